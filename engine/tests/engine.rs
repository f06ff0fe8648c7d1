//! The engine over a device that remembers what was written where: every output is checked against its definition.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::{collections::HashMap, sync::atomic::Ordering, time::Duration};

use futures::future::join_all;
use quire_engine::{
    core::{EngineError, EngineHandle},
    scheduler::Policy,
};
use quire_proto::{
    block_hash::{BlockHash, chain},
    worker::v1::{CacheEventBatch, FinishReason, GenerateRequest, LogitBias, Sampling, Stopping, generate_event::Event},
};
use support::{BROKEN, EOS, PANIC, POISON, Said, VOCAB, at_rest, engine, expected, listen, logprob, prompt, request, state};

async fn ask(handle: &EngineHandle, request: GenerateRequest) -> Said {
    listen(handle.generate(request).unwrap()).await
}

fn check(said: &Said, prompt: &[u32], n: usize) {
    let want = expected(prompt, n);
    assert_eq!(said.ids(0), want);
    assert_eq!(said.tokens[0].position as usize, prompt.len());
    let reason = if want.last() == Some(&EOS) { FinishReason::Stop } else { FinishReason::Length };
    assert_eq!(said.reason(), reason);
    assert_eq!(said.finished[0].generated_tokens as usize, want.len());
    assert_eq!(said.finished[0].stop_token_id, (reason == FinishReason::Stop).then_some(EOS));
}

async fn thirty_two(handle: &EngineHandle) {
    let prompts: Vec<_> = (0..32).map(|i| prompt(i, 5 + 7 * i as usize % 90)).collect();
    let all = join_all(prompts.iter().map(|prompt| ask(handle, request(prompt.clone(), 60)))).await;
    all.iter().zip(&prompts).for_each(|(said, prompt)| check(said, prompt, 60));
    at_rest(handle).await;
}

#[tokio::test]
async fn thirty_two_at_once_say_what_each_says_alone() {
    let (handle, switches) = engine(512, |_| {});
    switches.step_us.store(200, Ordering::Relaxed);
    thirty_two(&handle).await;
    assert!(switches.widest.load(Ordering::Relaxed) > 8, "they did not run together");
    assert_eq!(handle.load().preemptions, 0);
    // Again, with the index warm.
    thirty_two(&handle).await;
}

#[tokio::test]
async fn a_tiny_pool_preempts_and_says_the_same() {
    for chunk in [0, 16] {
        for policy in [Policy::plain(), Policy::default()] {
            let (handle, _) = engine(24, |config| (config.max_prefill_chunk, config.policy) = (chunk, policy));
            thirty_two(&handle).await;
            assert!(policy != Policy::plain() || handle.load().preemptions > 0);
            thirty_two(&handle).await;
        }
    }
}

#[tokio::test]
async fn a_target_for_the_time_between_tokens_changes_no_output() {
    let (handle, switches) = engine(512, |config| config.itl_target = Some(Duration::from_micros(100)));
    switches.step_us.store(200, Ordering::Relaxed);
    thirty_two(&handle).await;
}

#[tokio::test]
async fn a_warm_prefix_is_counted_in_whole_blocks_and_leaves_one_token() {
    let (handle, _) = engine(128, |_| {});
    for (seed, len, cached) in [(1, 55, 48), (2, 48, 32), (3, 15, 0), (4, 17, 16)] {
        let prompt = prompt(seed, len);
        for want in [0, cached] {
            let said = ask(&handle, request(prompt.clone(), 20)).await;
            check(&said, &prompt, 20);
            let started = said.started.unwrap();
            assert_eq!((started.prompt_tokens as usize, started.cached_tokens), (len, want), "{len} tokens");
        }
        let salted = GenerateRequest { cache_salt: b"other".to_vec(), ..request(prompt.clone(), 1) };
        assert_eq!(ask(&handle, salted).await.started.unwrap().cached_tokens, 0);
        let bypassing = GenerateRequest { bypass_prefix_cache: true, ..request(prompt, 1) };
        assert_eq!(ask(&handle, bypassing).await.started.unwrap().cached_tokens, 0);
    }
    at_rest(&handle).await;
}

#[tokio::test]
async fn generated_blocks_are_cached_too() {
    let (handle, _) = engine(128, |_| {});
    let mut prompt = prompt(9, 20);
    let said = ask(
        &handle,
        GenerateRequest {
            stopping: Some(Stopping { max_tokens: 30, ignore_eos: true, ..Stopping::default() }),
            ..request(prompt.clone(), 0)
        },
    )
    .await;
    prompt.extend(said.ids(0));
    assert_eq!(prompt.len(), 50);
    let said = ask(&handle, request(prompt.clone(), 5)).await;
    assert_eq!(said.started.as_ref().unwrap().cached_tokens, 48);
    check(&said, &prompt, 5);
}

#[tokio::test]
async fn dropped_receivers_give_everything_back() {
    let (handle, switches) = engine(256, |config| config.max_sequences = 16);
    switches.step_us.store(1000, Ordering::Relaxed);
    let mut open = Vec::new();
    for i in 0..200 {
        let mut events = handle.generate(GenerateRequest { n: 1 + i % 3, ..request(prompt(i, 40), 400) }).unwrap();
        if i < 8 {
            events.recv().await.unwrap();
            events.recv().await.unwrap();
        }
        open.push(events);
    }
    assert!(handle.load().running > 0 && handle.load().waiting > 0);
    drop(open);
    at_rest(&handle).await;
    let prompt = prompt(1000, 30);
    check(&ask(&handle, request(prompt.clone(), 10)).await, &prompt, 10);
}

#[tokio::test]
async fn a_dropped_stream_leaves_within_two_steps() {
    let (handle, switches) = engine(64, |_| {});
    switches.step_us.store(5000, Ordering::Relaxed);
    let mut events = handle.generate(request(prompt(1, 20), 400)).unwrap();
    events.recv().await.unwrap();
    let before = handle.load();
    assert!(before.kv_blocks_used > 0);
    drop(events);
    at_rest(&handle).await;
    assert!(handle.load().steps <= before.steps + 2);
}

#[tokio::test]
async fn a_deadline_ends_what_still_waits() {
    let (handle, switches) = engine(64, |config| config.max_sequences = 1);
    switches.step_us.store(2000, Ordering::Relaxed);
    let runs = handle.generate(GenerateRequest { deadline_ms: 30, ..request(prompt(1, 20), 60) }).unwrap();
    tokio::time::sleep(Duration::from_millis(10)).await;
    let late = ask(&handle, GenerateRequest { deadline_ms: 30, n: 2, ..request(prompt(2, 20), 60) }).await;
    assert!(late.started.is_none() && late.tokens.is_empty());
    assert_eq!(late.finished.len(), 2);
    assert!(late.finished.iter().all(|finished| finished.reason() == FinishReason::Deadline));
    check(&listen(runs).await, &prompt(1, 20), 60);
    at_rest(&handle).await;
}

#[tokio::test]
async fn a_request_that_breaks_every_step_fails_alone() {
    for bad in [PANIC, BROKEN] {
        let (handle, switches) = engine(128, |_| {});
        let mut poisoned = prompt(1, 40);
        let clean = poisoned.clone();
        poisoned.push(bad);
        let said = ask(&handle, request(poisoned, 10)).await;
        assert_eq!(said.reason(), FinishReason::Error);
        assert!(said.finished[0].message.contains("this request alone"), "{}", said.finished[0].message);
        at_rest(&handle).await;
        // Its blocks were named in the step that failed: nobody may find them.
        let said = ask(&handle, request(clean.clone(), 10)).await;
        assert_eq!(said.started.as_ref().unwrap().cached_tokens, 0);
        check(&said, &clean, 10);
        assert!(handle.health().ready());
        switches.widest.store(0, Ordering::Relaxed);
        thirty_two(&handle).await;
    }
}

#[tokio::test]
async fn whoever_shared_a_failed_step_says_what_it_says_alone() {
    for bad in [PANIC, BROKEN, POISON] {
        for blocks in [512, 48] {
            let (handle, switches) = engine(blocks, |config| config.max_prefill_chunk = 24);
            switches.step_us.store(200, Ordering::Relaxed);
            // It shares its beginning with one of the others, and breaks in its second chunk.
            let mut poisoned = prompt(3, 26);
            poisoned.push(bad);
            poisoned.extend(prompt(99, 10));
            let bad = async {
                tokio::time::sleep(Duration::from_millis(5)).await;
                ask(&handle, GenerateRequest { n: 2, ..request(poisoned, 10) }).await
            };
            let (said, ()) = tokio::join!(bad, thirty_two(&handle));
            assert_eq!((said.finished.len(), said.tokens.len()), (2, 0));
            assert!(said.finished.iter().all(|finished| finished.reason() == FinishReason::Error && !finished.message.is_empty()));
            assert!(handle.health().ready());
            thirty_two(&handle).await;
        }
    }
}

#[tokio::test]
async fn a_device_that_computes_nothing_ends_the_engine() {
    let (handle, switches) = engine(64, |_| {});
    switches.broken.store(true, Ordering::Relaxed);
    let mut open: Vec<_> = (0..3).map(|i| handle.generate(request(prompt(i, 10), 5)).unwrap()).collect();
    let mut failed = 0;
    for events in &mut open {
        while let Some(event) = events.recv().await {
            failed += matches!(event.event, Some(Event::Finished(_))) as usize;
        }
    }
    assert!(failed <= 1, "streams end without a verdict, so that the router goes on elsewhere");
    assert!(!handle.health().alive);
    assert!(matches!(handle.generate(request(prompt(1, 10), 5)), Err(EngineError::Stopped)));
}

#[tokio::test]
async fn choices_hold_the_prompt_once_even_without_the_prefix_cache() {
    let (handle, switches) = engine(128, |config| config.prefix_cache = false);
    let stopping = Stopping { max_tokens: 40, ignore_eos: true, ..Stopping::default() };
    let long = prompt(7, 200);
    switches.step_us.store(2000, Ordering::Relaxed);
    let mut events = handle.generate(GenerateRequest { n: 8, stopping: Some(stopping), ..request(long.clone(), 0) }).unwrap();
    let (mut said, mut most) = (Said::default(), 0);
    while let Some(event) = events.recv().await {
        said.hear(event.event.unwrap());
        most = most.max(handle.load().kv_blocks_used);
    }
    // 200 tokens are 12 whole blocks and a half; 40 more end in three blocks of each one's own.
    assert!((12 + 8..=12 + 8 * 3 + 8).contains(&most), "{most} blocks");
    assert_eq!(switches.copied.load(Ordering::Relaxed), 7);
    for choice in 0..8 {
        let greedy: Vec<u32> = expected(&long, 40);
        assert_eq!(said.ids(choice)[..greedy.len()], greedy);
    }
    at_rest(&handle).await;
}

#[tokio::test]
async fn one_step_ahead_says_the_same() {
    for blocks in [512, 24] {
        let (handle, switches) = engine(blocks, |config| config.step_ahead = 1);
        thirty_two(&handle).await;
        thirty_two(&handle).await;
        assert!(switches.placeholders.load(Ordering::Relaxed) > 1000);
        let sampling = Sampling { temperature: 1.0, seed: 5, presence_penalty: 0.5, ..Sampling::default() };
        let request = GenerateRequest { sampling: Some(sampling), ..request(prompt(5, 33), 30) };
        let (other, _) = engine(blocks, |config| config.step_ahead = 0);
        assert_eq!(ask(&handle, request.clone()).await.ids(0), ask(&other, request).await.ids(0));
        at_rest(&other).await;
    }
}

#[tokio::test]
async fn a_bad_row_fails_alone() {
    let (handle, switches) = engine(512, |_| {});
    switches.step_us.store(200, Ordering::Relaxed);
    let mut bad = prompt(77, 40);
    bad[20] = POISON;
    let (said, ()) = tokio::join!(ask(&handle, request(bad.clone(), 10)), thirty_two(&handle));
    assert_eq!(said.reason(), FinishReason::Error);
    assert!(said.tokens.is_empty());
    // Nor does anybody build on its blocks.
    assert_eq!(ask(&handle, request(bad, 10)).await.started.unwrap().cached_tokens, 0);
    at_rest(&handle).await;
}

#[tokio::test]
async fn choices_share_the_prompt_and_draw_their_own() {
    let (handle, _) = engine(128, |_| {});
    let sampling = Sampling { temperature: 1.0, seed: 42, ..Sampling::default() };
    let stopping = Stopping { max_tokens: 20, ignore_eos: true, ..Stopping::default() };
    let base = GenerateRequest { sampling: Some(sampling), stopping: Some(stopping), ..request(prompt(5, 40), 0) };
    let together = ask(&handle, GenerateRequest { n: 4, ..base.clone() }).await;
    assert_eq!(together.finished.len(), 4);
    assert_eq!(together.started.as_ref().unwrap().cached_tokens, 0);
    let mut seen = Vec::new();
    for choice in 0..4 {
        let alone = ask(&handle, GenerateRequest { first_choice: choice, ..base.clone() }).await;
        assert_eq!(alone.ids(choice), together.ids(choice), "choice {choice}");
        assert_eq!(alone.ids(choice).len(), 20);
        seen.push(alone.ids(choice));
    }
    seen.dedup();
    assert_eq!(seen.len(), 4);
}

#[tokio::test]
async fn a_continued_stream_is_the_unbroken_one() {
    let (handle, _) = engine(128, |_| {});
    let sampling = Sampling { temperature: 0.7, seed: 7, presence_penalty: 0.1, ..Sampling::default() };
    let stopping = Stopping { max_tokens: 25, ignore_eos: true, ..Stopping::default() };
    let base = GenerateRequest { sampling: Some(sampling), stopping: Some(stopping), ..request(prompt(6, 21), 0) };
    let unbroken = ask(&handle, base.clone()).await.ids(0);
    for cut in [1, 11, 12, 24] {
        let said = ask(&handle, GenerateRequest { generated_ids: unbroken[..cut].to_vec(), ..base.clone() }).await;
        assert_eq!(said.ids(0), unbroken[cut..], "cut at {cut}");
        assert_eq!(said.tokens[0].position as usize, 21 + cut);
        assert_eq!(said.started.as_ref().unwrap().prompt_tokens, 21);
        assert_eq!(said.finished[0].generated_tokens, 25);
    }
    let over = ask(&handle, GenerateRequest { generated_ids: unbroken, ..base }).await;
    assert_eq!((over.tokens.len(), over.reason()), (0, FinishReason::Length));
    at_rest(&handle).await;
}

#[tokio::test]
async fn stops_bans_and_the_end_of_the_context() {
    let (handle, _) = engine(128, |_| {});
    let prompt = prompt(8, 30);
    let free = expected(&prompt, 12);
    let stop = free[5];
    assert!(!free[..5].contains(&stop) && !free.contains(&EOS));
    let stopping = Stopping { max_tokens: 12, stop_token_ids: vec![stop], ..Stopping::default() };
    let said = ask(&handle, GenerateRequest { stopping: Some(stopping.clone()), ..request(prompt.clone(), 0) }).await;
    assert_eq!(said.ids(0), free[..6]);
    assert_eq!((said.reason(), said.finished[0].stop_token_id), (FinishReason::Stop, Some(stop)));
    let stopping = Stopping { min_tokens: 8, ..stopping };
    let said = ask(&handle, GenerateRequest { stopping: Some(stopping), ..request(prompt.clone(), 0) }).await;
    assert!(!said.ids(0)[..8].contains(&stop) && said.ids(0).len() >= 8);
    let sampling = Sampling { logit_bias: vec![LogitBias { token_id: free[0], bias: f32::NEG_INFINITY }], ..Sampling::default() };
    let said = ask(&handle, GenerateRequest { sampling: Some(sampling), ..request(prompt, 1) }).await;
    assert_ne!(said.ids(0)[0], free[0]);
    let stopping = Stopping { ignore_eos: true, ..Stopping::default() };
    let long = support::prompt(3, 500);
    let said = ask(&handle, GenerateRequest { stopping: Some(stopping), ..request(long, 0) }).await;
    assert_eq!((said.tokens.len(), said.reason()), (12, FinishReason::Length), "512 tokens are the context");
    at_rest(&handle).await;
}

#[tokio::test]
async fn logprobs_come_with_tokens_and_prompts() {
    // Few logit rows and a small pool: scoring runs in chunks, beside others, and is preempted.
    let (handle, _) = engine(24, |config| config.max_prefill_chunk = 16);
    let prompt = prompt(11, 120);
    let scored = GenerateRequest { logprobs: Some(2), prompt_logprobs: Some(3), n: 2, ..request(prompt.clone(), 20) };
    let others = join_all((0..6).map(|i| ask(&handle, request(support::prompt(100 + i, 30), 100))));
    for round in 0..2 {
        let said = ask(&handle, scored.clone()).await;
        let started = said.started.as_ref().unwrap();
        assert_eq!((started.prompt_logprobs.len(), started.cached_tokens), (120, 0), "round {round}");
        assert_eq!(started.prompt_logprobs[0].logprob, None);
        for (i, score) in started.prompt_logprobs.iter().enumerate().skip(1) {
            assert_eq!(score.logprob, Some(logprob(state(prompt[..i].iter().copied()), prompt[i])), "prompt token {i}");
            assert_eq!(score.top_ids, [0, 1, 2]);
        }
        for choice in 0..2 {
            assert_eq!(said.ids(choice), expected(&prompt, 20));
        }
        for token in &said.tokens {
            let past = prompt.iter().copied().chain(said.ids(token.choice).into_iter().take(token.position as usize - prompt.len()));
            let logprobs = token.logprobs.as_ref().unwrap();
            assert_eq!(logprobs.logprob, Some(logprob(state(past), token.id)));
            assert_eq!(logprobs.top_ids.len(), 2);
        }
    }
    let both = tokio::join!(others, ask(&handle, scored.clone()), ask(&handle, scored));
    assert_eq!(both.1.started.as_ref().map(|s| &s.prompt_logprobs), both.2.started.as_ref().map(|s| &s.prompt_logprobs));
    at_rest(&handle).await;
}

#[tokio::test]
async fn bad_requests_name_the_field() {
    let (handle, _) = engine(16, |_| {});
    let good = request(prompt(1, 10), 5);
    let field = |change: &dyn Fn(&mut GenerateRequest)| {
        let mut request = good.clone();
        change(&mut request);
        match handle.generate(request) {
            Err(EngineError::Invalid { field, .. }) => field,
            Err(other) => panic!("{other}"),
            Ok(_) => "accepted",
        }
    };
    assert_eq!(field(&|r| r.prompt_ids.clear()), "prompt_ids");
    assert_eq!(field(&|r| r.prompt_ids[3] = VOCAB as u32), "prompt_ids");
    assert_eq!(field(&|r| r.prompt_ids = prompt(1, 257)), "prompt_ids");
    assert_eq!(field(&|r| r.prompt_ids = prompt(1, 256)), "accepted");
    assert_eq!(field(&|r| r.n = 65), "n");
    assert_eq!(field(&|r| (r.n, r.generated_ids) = (2, vec![5])), "generated_ids");
    assert_eq!(field(&|r| r.generated_ids = vec![VOCAB as u32]), "generated_ids");
    assert_eq!(field(&|r| r.first_choice = u32::MAX), "first_choice");
    assert_eq!(field(&|r| r.adapter = "x".to_owned()), "adapter");
    assert_eq!(field(&|r| r.logprobs = Some(21)), "logprobs");
    assert_eq!(field(&|r| r.prompt_logprobs = Some(21)), "prompt_logprobs");
    assert_eq!(field(&|r| r.sampling = Some(Sampling { temperature: f32::NAN, ..Sampling::default() })), "sampling.temperature");
    at_rest(&handle).await;
}

#[tokio::test]
async fn the_queue_is_bounded() {
    let (handle, switches) = engine(64, |config| (config.max_sequences, config.max_waiting) = (2, 3));
    switches.hold.store(true, Ordering::Relaxed);
    let open: Vec<_> = (0..5).map(|i| handle.generate(request(prompt(i, 10), 5)).unwrap()).collect();
    assert!(matches!(handle.generate(request(prompt(9, 10), 5)), Err(EngineError::Overloaded(_))));
    assert_eq!(handle.load().requests, 5);
    switches.hold.store(false, Ordering::Relaxed);
    join_all(open.into_iter().map(listen)).await;
    at_rest(&handle).await;

    let (handle, switches) = engine(64, |config| config.max_waiting_tokens = 50);
    switches.hold.store(true, Ordering::Relaxed);
    let first = handle.generate(request(prompt(1, 40), 5)).unwrap();
    let mut open = vec![first];
    let refused = loop {
        match handle.generate(request(prompt(2, 40), 5)) {
            Ok(events) => open.push(events),
            Err(error) => break error,
        }
        assert!(open.len() < 4);
    };
    assert!(matches!(refused, EngineError::Overloaded(_)));
    switches.hold.store(false, Ordering::Relaxed);
    join_all(open.into_iter().map(listen)).await;
    at_rest(&handle).await;
}

#[tokio::test]
async fn a_stuck_step_makes_it_unready_and_the_next_one_ready() {
    let (handle, switches) = engine(64, |config| {
        config.stall_after = Duration::from_millis(50);
        config.give_up_after = Some(Duration::from_millis(300));
    });
    assert!(handle.health().ready());
    switches.hold.store(true, Ordering::Relaxed);
    let events = handle.generate(request(prompt(1, 10), 5)).unwrap();
    tokio::time::sleep(Duration::from_millis(150)).await;
    assert!(handle.health().stalled && !handle.health().ready() && !handle.health().hopeless);
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(handle.health().hopeless);
    switches.hold.store(false, Ordering::Relaxed);
    check(&listen(events).await, &prompt(1, 10), 5);
    at_rest(&handle).await;
    assert!(handle.health().ready());
}

#[tokio::test]
async fn draining_lets_work_finish_or_ends_it_in_band() {
    let (handle, switches) = engine(64, |_| {});
    switches.step_us.store(1000, Ordering::Relaxed);
    let events = handle.generate(request(prompt(1, 10), 20)).unwrap();
    let (aborted, said) = tokio::join!(handle.drain(None), listen(events));
    assert_eq!(aborted, 0);
    check(&said, &prompt(1, 10), 20);
    assert!(matches!(handle.generate(request(prompt(1, 10), 5)), Err(EngineError::Draining)));
    assert!(!handle.health().ready());

    let (handle, switches) = engine(64, |config| config.max_sequences = 1);
    switches.step_us.store(1000, Ordering::Relaxed);
    let stopping = Stopping { ignore_eos: true, ..Stopping::default() };
    let open: Vec<_> = (0..3)
        .map(|i| handle.generate(GenerateRequest { stopping: Some(stopping.clone()), ..request(prompt(i, 10), 0) }).unwrap())
        .collect();
    let (aborted, said) = tokio::join!(handle.drain(Some(Duration::from_millis(50))), join_all(open.into_iter().map(listen)));
    assert_eq!(aborted, 3);
    assert!(said.iter().all(|said| said.reason() == FinishReason::Abort));
    at_rest(&handle).await;
}

#[tokio::test]
async fn shutdown_ends_streams_in_band_and_joins() {
    let (handle, switches) = engine(64, |_| {});
    switches.step_us.store(1000, Ordering::Relaxed);
    let events = handle.generate(request(prompt(1, 10), 400)).unwrap();
    let other = handle.clone();
    tokio::task::spawn_blocking(move || other.shutdown()).await.unwrap();
    let said = listen(events).await;
    assert!(matches!(said.reason(), FinishReason::Abort | FinishReason::Stop));
    assert!(!handle.load().alive);
    assert!(matches!(handle.generate(request(prompt(1, 10), 5)), Err(EngineError::Stopped)));
    assert!(handle.cache_events().is_err());
}

fn apply(replica: &mut HashMap<Vec<u8>, Vec<u8>>, batch: CacheEventBatch) {
    for hash in &batch.removed {
        assert!(replica.remove(&hash[..]).is_some(), "removed what was not stored");
    }
    for block in &batch.stored {
        assert!(replica.insert(block.hash.to_vec(), block.parent.to_vec()).is_none(), "stored twice");
    }
}

#[tokio::test]
async fn cache_events_replay_to_what_is_cached() {
    let (handle, _) = engine(24, |_| {});
    let first = prompt(50, 100);
    ask(&handle, request(first.clone(), 1)).await;
    let mut early = handle.cache_events().unwrap();
    let snapshot = early.recv().await.unwrap();
    assert!(snapshot.snapshot && snapshot.epoch == handle.epoch());
    let hashes = chain(BlockHash::root("", b""), &first, 16);
    assert_eq!(
        snapshot.stored.iter().map(|block| block.hash.to_vec()).collect::<Vec<_>>(),
        hashes.iter().map(|hash| hash.0.to_vec()).collect::<Vec<_>>()
    );
    let mut last = snapshot.sequence;
    let mut replica = HashMap::new();
    apply(&mut replica, snapshot);
    for i in 0..12 {
        ask(&handle, request(prompt(i, 60), 40)).await;
    }
    let fresh = handle.cache_events().unwrap().recv().await.unwrap();
    while last < fresh.sequence {
        let batch = early.recv().await.unwrap();
        assert_eq!((batch.sequence, batch.snapshot), (last + 1, false));
        last = batch.sequence;
        apply(&mut replica, batch);
    }
    let mut now = HashMap::new();
    apply(&mut now, fresh);
    assert_eq!(replica, now);
    assert!(!now.is_empty() && !now.contains_key(&hashes[5].0[..]), "nothing was evicted");
}

#[tokio::test]
async fn a_slow_subscriber_is_cut_off_and_starts_again_from_a_snapshot() {
    let (handle, _) = engine(24, |_| {});
    let mut slow = handle.cache_events().unwrap();
    for i in 0..400 {
        ask(&handle, request(prompt(i, 40), 2)).await;
    }
    let mut batches = 0;
    while slow.recv().await.is_some() {
        batches += 1;
    }
    assert!(batches <= 257, "{batches} batches were kept for it");
    assert!(handle.cache_events().unwrap().recv().await.unwrap().snapshot);
}
