//! What the scheduler itself costs: a step with 256 running and 1,000 waiting sequences, and looking up a long prompt.

#![allow(clippy::unwrap_used, missing_docs)]

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use criterion::{Criterion, criterion_group, criterion_main};
use quire_engine::{
    cache::GroupKind,
    scheduler::{NewSequence, Outcome, Plan, Policy, Scheduler, SchedulerConfig},
};
use quire_proto::block_hash::{BlockHash, chain};

const BLOCK: usize = 16;

fn config(blocks: usize) -> SchedulerConfig {
    SchedulerConfig {
        max_sequences: 256,
        max_rows: 2048,
        max_logit_rows: 256,
        max_prefill_chunk: 2048,
        block_size: BLOCK,
        groups: vec![GroupKind::Full],
        blocks,
        watermark_blocks: blocks / 100,
        prefix_cache: true,
        policy: Policy { growth_cap: 64, ..Policy::default() },
        itl_target: Some(Duration::from_millis(50)),
        epoch: 1,
    }
}

fn sequence(number: u32, len: u32, output: usize) -> NewSequence {
    let tokens: Vec<u32> = (0..len).map(|i| number * 100_000 + i).collect();
    let root = BlockHash::root("", b"");
    NewSequence {
        prompt_len: tokens.len(),
        hashes: chain(root, &tokens, BLOCK),
        use_index: true,
        max_len: tokens.len() + output,
        tokens,
        root,
        priority: 0,
        arrival: u64::from(number),
        arrived: Duration::ZERO,
        deadline: None,
        score_prompt: false,
        step_ahead: true,
        fork_of: None,
    }
}

fn step(scheduler: &mut Scheduler, plan: &mut Plan, outcomes: &mut Vec<Outcome>) {
    scheduler.plan(Duration::ZERO, plan);
    outcomes.clear();
    outcomes.extend(plan.entries.iter().map(|entry| if entry.samples { Outcome::Token(7) } else { Outcome::Computed }));
    scheduler.commit(plan, outcomes);
    scheduler.observe(plan, Duration::from_millis(20));
}

const STEPS: u64 = 64;

/// With 512 slots it is room that is missing: each step looks whether one of the first five can be let in.
fn full(slots: usize) -> Scheduler {
    // The running ones, their growth in the measured steps, and not enough for another 32,000 tokens.
    let blocks = 256 * (16 + 1 + STEPS as usize / BLOCK) + 200;
    let mut scheduler = Scheduler::new(SchedulerConfig { max_sequences: slots, max_logit_rows: 512, ..config(blocks) });
    let (mut plan, mut outcomes) = (Plan::default(), Vec::new());
    for number in 0..256 {
        scheduler.add(sequence(number, 250, 100)).unwrap();
    }
    // Prompts first, so that nothing is expected to grow beyond what there is.
    while scheduler.waiting() > 0 || plan.decode_rows < 256 {
        step(&mut scheduler, &mut plan, &mut outcomes);
        assert!(plan.step < 1_000, "{} of 256 are in", scheduler.running());
    }
    for number in 256..1256 {
        scheduler.add(sequence(number, if number < 261 { 32_000 } else { 256 }, 100)).unwrap();
    }
    scheduler
}

fn steps(criterion: &mut Criterion) {
    for (name, slots) in [("step, 256 running, 1000 waiting for a place", 256), ("step, 256 running, 1000 waiting for room", 512)] {
        criterion.bench_function(name, |bencher| {
            bencher.iter_custom(|iterations| {
                let (mut plan, mut outcomes) = (Plan::default(), Vec::new());
                let mut spent = Duration::ZERO;
                for _ in 0..iterations {
                    let mut scheduler = full(slots);
                    let began = Instant::now();
                    (0..STEPS).for_each(|_| step(&mut scheduler, &mut plan, &mut outcomes));
                    spent += began.elapsed();
                    assert_eq!((scheduler.running(), scheduler.waiting(), plan.decode_rows), (256, 1000, 256));
                }
                spent / STEPS as u32
            });
        });
    }
}

fn lookup(criterion: &mut Criterion) {
    let mut scheduler = Scheduler::new(config(4096));
    let (mut plan, mut outcomes) = (Plan::default(), Vec::new());
    let new = sequence(1, 8192, 8);
    let hashes = new.hashes.clone();
    scheduler.add(new).unwrap();
    (0..8).for_each(|_| step(&mut scheduler, &mut plan, &mut outcomes));
    assert_eq!(scheduler.cache().hit(&hashes, 8192), 511);
    criterion.bench_function("lookup of 8,192 tokens, all cached", |bencher| {
        bencher.iter(|| black_box(scheduler.cache().hit(black_box(&hashes), 8192)));
    });
}

criterion_group!(benches, steps, lookup);
criterion_main!(benches);
