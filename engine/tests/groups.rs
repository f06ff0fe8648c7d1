//! The engine over a model whose layers form several cache groups: the device checks that every row finds in each group
//! what the group that keeps everything has, so a block that is given back too early, or found wrongly, changes the output.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::sync::atomic::Ordering;

use quire_engine::{cache::GroupKind, core::EngineHandle, scheduler::Policy};
use quire_proto::worker::v1::{FinishReason, GenerateRequest};
use support::{Said, at_rest, engine_of, expected, listen, prompt, request};

const LOCAL: GroupKind = GroupKind::Window { tokens: 40 };
const GROUPS: [GroupKind; 4] = [GroupKind::Full, LOCAL, LOCAL, GroupKind::Chunk { tokens: 64 }];

async fn ask(handle: &EngineHandle, request: GenerateRequest) -> Said {
    listen(handle.generate(request).unwrap()).await
}

fn prompt_of(i: u32) -> Vec<u32> {
    let shared = [prompt(1000 + i % 3, 90), prompt(i, 20)].concat();
    if i.is_multiple_of(2) { shared } else { prompt(i, 10 + 3 * i as usize) }
}

async fn thirty_two(handle: &EngineHandle) {
    let streams: Vec<_> = (0..32).map(|i| (prompt_of(i), handle.generate(request(prompt_of(i), 100)).unwrap())).collect();
    for (prompt, events) in streams {
        let said = listen(events).await;
        assert_eq!(said.ids(0), expected(&prompt, 100));
    }
    at_rest(handle).await;
}

#[tokio::test]
async fn thirty_two_at_once_say_what_each_says_alone() {
    for step_ahead in [0, 1] {
        let (handle, switches) = engine_of(&GROUPS, 2048, |config| config.step_ahead = step_ahead);
        thirty_two(&handle).await;
        assert!(switches.widest.load(Ordering::Relaxed) >= 24);
        // And again, with all of it cached.
        thirty_two(&handle).await;
        let said = ask(&handle, request(prompt_of(2), 10)).await;
        assert_eq!(said.started.unwrap().cached_tokens, 96);
    }
}

#[tokio::test]
async fn a_tiny_pool_preempts_and_says_the_same() {
    for step_ahead in [0, 1] {
        let (handle, _) = engine_of(&GROUPS, 100, |config| {
            (config.step_ahead, config.policy) = (step_ahead, Policy::plain());
        });
        thirty_two(&handle).await;
        assert!(handle.load().preemptions > 0);
        thirty_two(&handle).await;
    }
}

#[tokio::test]
async fn a_long_stream_holds_its_windows_only() {
    let (handle, switches) = engine_of(&GROUPS, 256, |config| config.max_batched_tokens = 16);
    switches.step_us.store(500, Ordering::Relaxed);
    let prompt = prompt(1, 400);
    let mut events = handle.generate(request(prompt.clone(), 60)).unwrap();
    let mut said = Said::default();
    while let Some(event) = events.recv().await {
        let used = handle.load().kv_blocks_used;
        // 40 positions lie in 4 blocks at most, a chunk in 4, and a token may be under way.
        assert!(said.tokens.is_empty() || used == 0 || used <= 29 + 2 * 4 + 5, "{used} blocks");
        said.hear(event.event.unwrap());
    }
    assert_eq!(said.ids(0), expected(&prompt, 60));
    at_rest(&handle).await;
}

#[tokio::test]
async fn choices_share_what_their_windows_need() {
    for step_ahead in [0, 1] {
        let (handle, switches) = engine_of(&GROUPS, 512, |config| config.step_ahead = step_ahead);
        let prompt = prompt(3, 203);
        let said = ask(&handle, GenerateRequest { n: 8, ..request(prompt.clone(), 30) }).await;
        for choice in 0..8 {
            assert_eq!(said.ids(choice), expected(&prompt, 30));
        }
        assert!(switches.copied.load(Ordering::Relaxed) >= 7 * 4, "a block in each group for each choice but the first");
        at_rest(&handle).await;
    }
}

#[tokio::test]
async fn the_context_is_what_one_sequence_can_hold() {
    // At 64 rows a step: the windows take 8 blocks each, the chunk 9 (64 - 1 + 64 positions).
    let (handle, _) = engine_of(&GROUPS, 45, |_| {});
    assert_eq!(handle.limits().max_context, 20 * 16 + 1);
    let said = ask(&handle, request(prompt(1, 320), 10)).await;
    assert_eq!((said.reason(), said.tokens.len()), (FinishReason::Length, 1));
    assert!(handle.generate(request(prompt(1, 321), 10)).is_err());
    at_rest(&handle).await;
    // Windows alone have no limit of their own.
    let (handle, _) = engine_of(&[GroupKind::Full], 45, |_| {});
    assert_eq!(handle.limits().max_context, 512);
}
