//! The scheduler against its rules, by named cases.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod scheduler_support;

use std::time::Duration;

use quire_engine::scheduler::{NewSequence, Outcome, Plan, Policy, Scheduler, SchedulerConfig, SequenceId};
use quire_proto::block_hash::{BlockHash, chain};
use scheduler_support::{B, config, distinct, sequence};

/// (sequence, rows) of a step, with one token for each that samples.
fn step(scheduler: &mut Scheduler, plan: &mut Plan) -> Vec<(SequenceId, usize)> {
    step_at(scheduler, Duration::ZERO, plan)
}

fn step_at(scheduler: &mut Scheduler, now: Duration, plan: &mut Plan) -> Vec<(SequenceId, usize)> {
    scheduler.plan(now, plan);
    let outcomes: Vec<Outcome> =
        plan.entries.iter().map(|entry| if entry.samples { Outcome::Token(7) } else { Outcome::Computed }).collect();
    scheduler.commit(plan, &outcomes);
    plan.entries.iter().map(|entry| (entry.sequence, entry.len)).collect()
}

#[test]
fn the_budget_is_handed_out_in_order_and_decodes_come_first() {
    let mut s = Scheduler::new(SchedulerConfig { max_rows: 1024, max_prefill_chunk: 1024, ..config(4000) });
    let mut plan = Plan::default();
    let ids: Vec<_> = (0..3).map(|i| s.add(sequence(distinct(i, 800), 100, u64::from(i))).unwrap()).collect();
    assert_eq!(step(&mut s, &mut plan), [(ids[0], 800), (ids[1], 224)]);
    assert_eq!(step(&mut s, &mut plan), [(ids[0], 1), (ids[1], 576), (ids[2], 447)]);
    assert_eq!(step(&mut s, &mut plan), [(ids[0], 1), (ids[1], 1), (ids[2], 353)]);
}

#[test]
fn no_sequence_gets_more_than_the_chunk() {
    let mut s = Scheduler::new(SchedulerConfig { max_rows: 1024, max_prefill_chunk: 400, ..config(4000) });
    let ids: Vec<_> = (0..3).map(|i| s.add(sequence(distinct(i, 800), 100, u64::from(i))).unwrap()).collect();
    assert_eq!(step(&mut s, &mut Plan::default()), [(ids[0], 400), (ids[1], 400), (ids[2], 224)]);
}

#[test]
fn what_can_never_fit_is_refused() {
    let mut s = Scheduler::new(config(4));
    // 17 tokens at the end, the last never fed back: 16 slots.
    assert!(s.add(sequence(distinct(0, 10), 7, 0)).is_ok());
    let refused = s.add(sequence(distinct(0, 10), 8, 0)).unwrap_err();
    assert_eq!((refused.needed, refused.total), (5, 4));
}

#[test]
fn the_last_admitted_is_preempted_and_comes_back_first() {
    let mut s = Scheduler::new(SchedulerConfig { watermark_blocks: 0, ..config(6) });
    let mut plan = Plan::default();
    let first = s.add(sequence(distinct(0, 11), 9, 0)).unwrap();
    let second = s.add(sequence(distinct(1, 11), 9, 1)).unwrap();
    let third = s.add(sequence(distinct(2, 3), 2, 2)).unwrap();
    step(&mut s, &mut plan);
    assert_eq!(s.running_ids().collect::<Vec<_>>(), [first, second], "the third does not fit");
    let mut preempted = Vec::new();
    while preempted.is_empty() {
        step(&mut s, &mut plan);
        preempted.clone_from(&plan.preempted);
    }
    assert_eq!(preempted, [second]);
    assert_eq!(s.waiting_ids().collect::<Vec<_>>(), [second, third]);
    assert_eq!(s.counters().preemptions, 1);
    assert!(s.sequence(first).unwrap().running());
}

#[test]
fn a_prefill_takes_the_blocks_of_a_later_ranked_decode_of_the_same_step() {
    let mut s = Scheduler::new(SchedulerConfig { watermark_blocks: 0, max_prefill_chunk: 3, ..config(5) });
    let mut plan = Plan::default();
    let low = s.add(NewSequence { priority: 1, ..sequence(distinct(0, 3), 9, 0) }).unwrap();
    step(&mut s, &mut plan);
    let high = s.add(sequence(distinct(1, 16), 2, 1)).unwrap();
    for _ in 0..4 {
        assert_eq!(step(&mut s, &mut plan), [(low, 1), (high, 3)]);
    }
    // Now both need a block, and there is none: the decode was scheduled already, and is taken out again.
    assert_eq!(step(&mut s, &mut plan), [(high, 3)]);
    assert_eq!((plan.rows, plan.preempted.clone(), plan.admitted.len()), (3, vec![low], 0));
    let tokens: Vec<u32> = distinct(0, 3).into_iter().chain([7; 6]).collect();
    assert_eq!(s.cache().hit(&chain(BlockHash::root("", b""), &tokens, B), 9), 1, "the block that it would have filled is not named");
    assert_eq!((s.running(), s.waiting(), s.cache().used()), (1, 1, 4));
}

#[test]
fn lower_priority_numbers_run_first() {
    let mut s = Scheduler::new(SchedulerConfig { max_sequences: 1, ..config(32) });
    let mut plan = Plan::default();
    let late = s.add(NewSequence { priority: 5, ..sequence(distinct(0, 5), 5, 0) }).unwrap();
    let b = s.add(NewSequence { priority: 1, ..sequence(distinct(1, 5), 5, 2) }).unwrap();
    let a = s.add(NewSequence { priority: 1, ..sequence(distinct(2, 5), 5, 1) }).unwrap();
    assert_eq!(s.waiting_ids().collect::<Vec<_>>(), [a, b, late]);
    assert_eq!(step(&mut s, &mut plan), [(a, 5)]);
}

#[test]
fn equal_prompts_share_blocks_within_a_step() {
    let mut s = Scheduler::new(config(32));
    let mut plan = Plan::default();
    let a = s.add(sequence(distinct(0, 14), 5, 0)).unwrap();
    let b = s.add(sequence(distinct(0, 14), 5, 1)).unwrap();
    assert_eq!(step(&mut s, &mut plan), [(a, 14), (b, 2)]);
    assert_eq!(s.sequence(a).unwrap().table(0)[..3], s.sequence(b).unwrap().table(0)[..3]);
    assert_eq!(plan.admitted, [(a, 0), (b, 12)]);
    assert_eq!((s.counters().queried_tokens, s.counters().hit_tokens), (28, 12));
    s.cancel(a);
    s.cancel(b);
    assert_eq!(s.cache().used(), 0);
}

#[test]
fn a_failed_step_leaves_no_name_behind() {
    let mut s = Scheduler::new(config(32));
    let mut plan = Plan::default();
    let a = s.add(sequence(distinct(0, 14), 5, 0)).unwrap();
    let b = s.add(sequence(distinct(1, 6), 5, 1)).unwrap();
    s.plan(Duration::ZERO, &mut plan);
    assert_eq!(s.fail(&[&plan]), None);
    assert_eq!((s.cache().used(), s.cache().index().len(), s.running()), (0, 0, 0));
    // Each runs alone once, before anyone else; the second one fails again.
    let c = s.add(sequence(distinct(2, 3), 5, 2)).unwrap();
    assert_eq!(step(&mut s, &mut plan), [(a, 14)]);
    s.plan(Duration::ZERO, &mut plan);
    assert_eq!(plan.entries.iter().map(|entry| (entry.sequence, entry.len)).collect::<Vec<_>>(), [(b, 6)]);
    assert_eq!(s.fail(&[&plan]), Some(b));
    assert!(s.sequence(b).is_none());
    assert_eq!(step(&mut s, &mut plan), [(a, 1), (c, 3)]);
    assert_eq!(s.counters().reruns, 2);
}

#[test]
fn a_step_ahead_names_rows_and_fences_blocks() {
    let mut s = Scheduler::new(config(6));
    let (mut first, mut second, mut third) = (Plan::default(), Plan::default(), Plan::default());
    let a = s.add(sequence(distinct(0, 7), 8, 0)).unwrap();
    let b = s.add(NewSequence { step_ahead: false, ..sequence(distinct(1, 7), 8, 1) }).unwrap();
    s.plan(Duration::ZERO, &mut first);
    assert!(first.entries.iter().all(|entry| entry.samples && entry.placeholder.is_none()));
    // The token of `b` is waited for; that of `a` is named by its row.
    s.plan(Duration::ZERO, &mut second);
    assert_eq!(second.entries.len(), 1);
    assert_eq!((second.entries[0].sequence, second.entries[0].placeholder), (a, Some(0)));
    s.commit(&first, &[Outcome::Token(5), Outcome::Token(6)]);
    assert_eq!(s.sequence(a).unwrap().tokens().last(), Some(&5));
    // Cancelled while a step writes to its blocks: they come back when that is committed.
    let used = s.cache().used();
    assert!(s.cancel(a));
    assert_eq!(s.cache().used(), used);
    s.plan(Duration::ZERO, &mut third);
    assert_eq!(third.entries.iter().map(|entry| (entry.sequence, entry.placeholder)).collect::<Vec<_>>(), [(b, None)]);
    s.commit(&second, &[Outcome::Token(7)]);
    assert_eq!(s.cache().used(), s.sequence(b).unwrap().table(0).len());
    s.commit(&third, &[Outcome::Token(8)]);
    assert_eq!(s.sequence(b).unwrap().tokens()[7..], [6, 8]);
}

#[test]
fn the_last_token_is_not_fed_back_by_a_step_ahead() {
    let mut s = Scheduler::new(config(16));
    let (mut first, mut second) = (Plan::default(), Plan::default());
    s.add(sequence(distinct(0, 7), 1, 0)).unwrap();
    s.plan(Duration::ZERO, &mut first);
    s.plan(Duration::ZERO, &mut second);
    assert!(second.is_empty());
    s.commit(&first, &[Outcome::Finished]);
    assert_eq!(s.cache().used(), 0);
}

#[test]
fn a_failed_step_takes_the_one_planned_on_it_along() {
    let mut s = Scheduler::new(config(32));
    let (mut first, mut second) = (Plan::default(), Plan::default());
    let a = s.add(sequence(distinct(0, 7), 8, 0)).unwrap();
    s.plan(Duration::ZERO, &mut first);
    // Finds in the index what the step under way is to write.
    let b = s.add(sequence(distinct(0, 7), 8, 1)).unwrap();
    s.plan(Duration::ZERO, &mut second);
    assert_eq!(second.admitted, [(b, 4)]);
    assert_eq!(s.fail(&[&first, &second]), None);
    assert_eq!((s.cache().used(), s.cache().index().len(), s.waiting()), (0, 0, 2));
    assert_eq!(step(&mut s, &mut first), [(a, 7)]);
    // Only those of the first step are suspects.
    assert_eq!(step(&mut s, &mut first), [(a, 1), (b, 3)]);
}

#[test]
fn a_fork_shares_whole_blocks_and_copies_the_last() {
    for (len, shared, copies) in [(14, 3, 1), (12, 2, 1), (13, 3, 0), (1, 0, 0)] {
        let mut s = Scheduler::new(SchedulerConfig { prefix_cache: false, max_prefill_chunk: 8, ..config(32) });
        let mut plan = Plan::default();
        let a = s.add(sequence(distinct(0, len), 9, 0)).unwrap();
        let b = s.add(NewSequence { fork_of: Some(a), ..sequence(distinct(0, len), 9, 1) }).unwrap();
        while s.sequence(a).unwrap().computed() < len {
            let entries = step(&mut s, &mut plan);
            assert!(entries.iter().all(|(id, _)| *id == a), "it waits for the whole prompt");
        }
        assert_eq!(step(&mut s, &mut plan), [(a, 1), (b, 1)]);
        let (theirs, own) = (s.sequence(a).unwrap().table(0).to_vec(), s.sequence(b).unwrap().table(0).to_vec());
        assert_eq!(theirs[..shared], own[..shared]);
        assert_ne!(theirs.get(shared), own.get(shared), "{len}");
        let want: Vec<_> = plan.copies.clone();
        assert_eq!(want, vec![(theirs[shared], own[shared]); copies][..], "{len}");
        // Without its parent a fork goes on, and one that was not in time computes for itself.
        let late = s.add(NewSequence { fork_of: Some(a), ..sequence(distinct(0, len), 9, 2) }).unwrap();
        s.cancel(a);
        assert!(step(&mut s, &mut plan).contains(&(late, len.min(8))));
        assert_eq!(s.counters().forked_tokens as usize, shared * 4);
        s.cancel(b);
        s.cancel(late);
        assert_eq!(s.cache().used(), 0);
    }
}

#[test]
fn deadlines_end_only_what_never_ran() {
    let mut s = Scheduler::new(SchedulerConfig { max_sequences: 1, ..config(32) });
    let mut plan = Plan::default();
    let deadline = Some(Duration::from_secs(1));
    let runs = s.add(NewSequence { deadline, ..sequence(distinct(0, 5), 50, 0) }).unwrap();
    let waits = s.add(NewSequence { deadline, ..sequence(distinct(1, 5), 50, 1) }).unwrap();
    step(&mut s, &mut plan);
    s.plan(Duration::from_secs(1), &mut plan);
    assert_eq!(plan.expired, [waits]);
    assert!(s.sequence(waits).is_none());
    assert!(s.sequence(runs).unwrap().running());
    assert!(!s.cancel(waits), "a name is never used twice");
}

#[test]
fn scoring_stays_within_the_logit_rows_and_scores_each_prompt_row_once() {
    let mut s = Scheduler::new(config(32));
    let mut plan = Plan::default();
    // Warm the index: it must not be read.
    let warm = s.add(sequence(distinct(0, 30), 5, 0)).unwrap();
    step(&mut s, &mut plan);
    s.cancel(warm);
    let id = s.add(NewSequence { score_prompt: true, ..sequence(distinct(0, 30), 5, 1) }).unwrap();
    let mut scored = Vec::new();
    loop {
        step(&mut s, &mut plan);
        assert!(plan.logit_rows <= 8, "{} logit rows", plan.logit_rows);
        let entry = plan.entries[0];
        assert_eq!(entry.sequence, id);
        scored.extend((entry.scored.0..entry.scored.1).map(|row| entry.start + row));
        if entry.samples {
            break;
        }
    }
    assert_eq!(scored, (0..29).collect::<Vec<_>>());
}

/// Ends every running sequence that has generated `output` tokens.
fn end_after(scheduler: &mut Scheduler, output: usize) {
    let done = |id: &SequenceId| scheduler.sequence(*id).is_some_and(|s| s.tokens().len() >= s.prompt_len() + output);
    let ids: Vec<_> = scheduler.running_ids().filter(done).collect();
    ids.into_iter().for_each(|id| assert!(scheduler.cancel(id)));
}

#[test]
fn a_few_small_ones_pass_a_large_one_and_then_wait_for_it() {
    let policy = Policy { bypass_depth: 1, bypass_passes: 3, bypass_for: Duration::from_secs(3600), ..Policy::plain() };
    let mut s = Scheduler::new(SchedulerConfig { watermark_blocks: 0, policy, ..config(16) });
    let mut plan = Plan::default();
    // Small ones keep coming, each takes four blocks and stays for two steps; the large one needs all but three.
    for i in 0..3 {
        s.add(sequence(distinct(i, 13), 3, u64::from(i))).unwrap();
    }
    step(&mut s, &mut plan);
    let large = s.add(sequence(distinct(900, 50), 3, 1000)).unwrap();
    let mut later = 2000;
    let mut steps = 0;
    while !s.sequence(large).unwrap().running() {
        later += 1;
        s.add(sequence(distinct(later, 13), 3, u64::from(later))).unwrap();
        step(&mut s, &mut plan);
        end_after(&mut s, 2);
        steps += 1;
        assert!(steps < 30, "the large one starves");
    }
    assert_eq!(s.counters().bypasses, 3);
}

#[test]
fn nobody_passes_after_the_time_for_it() {
    let policy = Policy { bypass_depth: 2, bypass_passes: 1000, bypass_for: Duration::from_secs(2), ..Policy::plain() };
    let mut s = Scheduler::new(SchedulerConfig { watermark_blocks: 0, policy, ..config(16) });
    let mut plan = Plan::default();
    s.add(sequence(distinct(0, 20), 20, 0)).unwrap();
    step(&mut s, &mut plan);
    let large = s.add(sequence(distinct(1, 50), 3, 1)).unwrap();
    for (second, passes) in [(0, true), (1, true), (2, false), (3, false)] {
        let small = s.add(sequence(distinct(10 + second, 5), 3, 10 + u64::from(second))).unwrap();
        step_at(&mut s, Duration::from_secs(u64::from(second)), &mut plan);
        assert_eq!(s.sequence(small).unwrap().running(), passes, "second {second}");
        s.cancel(small);
    }
    assert!(!s.sequence(large).unwrap().running());
}

#[test]
fn low_priority_gets_in_however_many_of_high_priority_come() {
    for (ageing, wanted) in [(5, Some(30)), (0, None)] {
        let policy = Policy { ageing: Duration::from_secs(ageing), ..Policy::plain() };
        let mut s = Scheduler::new(SchedulerConfig { max_sequences: 1, policy, ..config(32) });
        let mut plan = Plan::default();
        let arrive = |second: u64, priority: i32| {
            let arrived = Duration::from_secs(second);
            let new =
                NewSequence { priority, arrived, ..sequence(distinct(second as u32 + 1, 5), 3, 2 * second + u64::from(priority == 0)) };
            (new, arrived)
        };
        let low = s.add(arrive(0, 6).0).unwrap();
        let mut entered = None;
        for second in 0..200 {
            // One comes and one goes each second.
            let (new, now) = arrive(second, 0);
            s.add(new).unwrap();
            step_at(&mut s, now, &mut plan);
            if s.sequence(low).is_some_and(|low| low.running()) {
                entered.get_or_insert(second);
            }
            end_after(&mut s, 1);
        }
        assert_eq!(entered, wanted, "ageing {ageing} s a level");
    }
}

#[test]
fn room_for_expected_growth_is_left_free() {
    let policy = Policy { growth_reserve: 1.0, ..Policy::plain() };
    let mut s = Scheduler::new(SchedulerConfig { watermark_blocks: 0, policy, ..config(10) });
    let mut plan = Plan::default();
    // Each ends with 24 tokens in six blocks: two of them would need twelve of the ten.
    let first = s.add(sequence(distinct(0, 8), 17, 0)).unwrap();
    let second = s.add(sequence(distinct(1, 8), 17, 1)).unwrap();
    let mut steps = 0;
    while s.sequence(second).is_some() {
        step(&mut s, &mut plan);
        if s.sequence(first).is_some() {
            assert!(s.sequence(first).unwrap().running());
        }
        end_after(&mut s, 16);
        steps += 1;
        assert!(steps < 60);
    }
    assert_eq!(s.counters().preemptions, 0);
    assert!(steps > 20, "they ran one after the other, not {steps} steps");
}

#[test]
fn prompt_rows_beside_streams_follow_the_target_and_never_stop() {
    let cost = |plan: &Plan| Duration::from_micros((2_000 + 100 * plan.decode_rows + 100 * plan.prefill_rows()) as u64);
    for (target, rows) in [(10, 40..=70), (1, 4..=4)] {
        let policy = Policy { prefill_floor: 4, ..Policy::plain() };
        let itl_target = Some(Duration::from_millis(target));
        let config = SchedulerConfig { max_rows: 512, max_prefill_chunk: 512, policy, itl_target, ..config(2000) };
        let mut s = Scheduler::new(config);
        let mut plan = Plan::default();
        for i in 0..4 {
            s.add(sequence(distinct(i, 5), 900, u64::from(i))).unwrap();
        }
        for _ in 0..10 {
            step(&mut s, &mut plan);
            let elapsed = cost(&plan);
            s.observe(&plan, elapsed);
        }
        let long = s.add(sequence(distinct(50, 2000), 9, 50)).unwrap();
        let mut steps = 0;
        while s.sequence(long).unwrap().computed() < 2000 {
            step(&mut s, &mut plan);
            let elapsed = cost(&plan);
            s.observe(&plan, elapsed);
            assert_eq!(plan.entries.iter().filter(|entry| entry.is_decode()).count(), 4);
            let last = s.sequence(long).unwrap().computed() >= 2000;
            assert!(steps < 1 || last || rows.contains(&plan.prefill_rows()), "{} rows, target {target} ms", plan.prefill_rows());
            steps += 1;
        }
        assert!(steps > 25);
    }
}
