//! The scheduler against its rules: named cases, and seeded walks checked against naive models.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{collections::HashMap, time::Duration};

use quire_engine::{
    cache::{BlockId, GroupKind, GroupSpec},
    scheduler::{NewSequence, Outcome, Plan, Policy, Scheduler, SchedulerConfig, SequenceId},
};
use quire_proto::block_hash::{BlockHash, chain};

const B: usize = 4;

fn config(blocks: usize) -> SchedulerConfig {
    SchedulerConfig {
        max_sequences: 8,
        max_rows: 32,
        max_logit_rows: 8,
        max_prefill_chunk: 32,
        block_size: B,
        groups: vec![GroupSpec { kind: GroupKind::Paged, blocks }],
        watermark_blocks: 1,
        prefix_cache: true,
        policy: Policy::plain(),
        itl_target: None,
        epoch: 1,
    }
}

fn sequence(tokens: Vec<u32>, output: usize, arrival: u64) -> NewSequence {
    let root = BlockHash::root("", b"");
    NewSequence {
        prompt_len: tokens.len(),
        hashes: chain(root, &tokens, B),
        use_index: true,
        max_len: tokens.len() + output,
        tokens,
        root,
        priority: 0,
        arrival,
        arrived: Duration::ZERO,
        deadline: None,
        score_prompt: false,
    }
}

fn distinct(base: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| base * 10_000 + i).collect()
}

/// (sequence, rows) of a step, with one token for each that samples.
fn step(scheduler: &mut Scheduler, plan: &mut Plan) -> Vec<(SequenceId, usize)> {
    scheduler.plan(Duration::ZERO, plan);
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
    s.add(sequence(distinct(0, 14), 5, 0)).unwrap();
    s.plan(Duration::ZERO, &mut plan);
    s.fail(&plan);
    assert_eq!((s.cache().used(), s.cache().index(0).unwrap().len(), s.running()), (0, 0, 0));
    let again = s.add(sequence(distinct(0, 14), 5, 1)).unwrap();
    assert_eq!(step(&mut s, &mut plan), [(again, 14)]);
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

/// SplitMix64: the walks are the same everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % below
    }
}

/// What a walk knows of a sequence without asking the scheduler.
struct Known {
    tokens: Vec<u32>,
    end: usize,
}

struct Walk {
    scheduler: Scheduler,
    config: SchedulerConfig,
    plan: Plan,
    random: Random,
    known: HashMap<SequenceId, Known>,
    /// Slot → the token whose keys and values are there: the naive KV memory.
    memory: Vec<u32>,
    arrivals: u64,
    now: Duration,
    finished: usize,
}

impl Walk {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let blocks = 8 + random.next(57) as usize;
        let max_rows = 4 + random.next(40) as usize;
        let config = SchedulerConfig {
            max_sequences: 1 + random.next(9) as usize,
            max_rows,
            max_logit_rows: 4 + random.next(12) as usize,
            max_prefill_chunk: 1 + random.next(max_rows as u64) as usize,
            watermark_blocks: random.next(3) as usize,
            prefix_cache: !random.next(5).eq(&0),
            ..config(blocks)
        };
        Self {
            scheduler: Scheduler::new(config.clone()),
            memory: vec![u32::MAX; blocks * B],
            config,
            plan: Plan::default(),
            random,
            known: HashMap::new(),
            arrivals: 0,
            now: Duration::ZERO,
            finished: 0,
        }
    }

    fn arrive(&mut self) {
        let capacity = self.memory.len() as u64;
        // Few families of prompts, so that prefixes are shared, with tails of their own.
        let family = self.random.next(4) as u32;
        let len = 1 + self.random.next(capacity * 3 / 4) as usize;
        let mut tokens = distinct(family, len);
        if self.random.next(2) == 0 {
            let from = self.random.next(len as u64) as usize;
            tokens[from..].iter_mut().for_each(|token| *token += 5_000);
        }
        let output = 1 + self.random.next(20) as usize;
        self.arrivals += 1;
        let mut new = sequence(tokens.clone(), output, self.arrivals);
        new.priority = self.random.next(2) as i32;
        new.score_prompt = self.random.next(8) == 0;
        if self.random.next(8) == 0 {
            new.deadline = Some(self.now + Duration::from_millis(self.random.next(50)));
        }
        if self.random.next(8) == 0 {
            new.use_index = false;
            new.hashes.clear();
        }
        let fits = (len + output - 1).div_ceil(B) <= self.memory.len() / B;
        match self.scheduler.add(new) {
            Ok(id) => {
                assert!(fits, "what can never fit was queued");
                let known = Known { tokens, end: len + output };
                assert!(self.known.insert(id, known).is_none(), "a name was used twice");
            }
            Err(_) => assert!(!fits, "what fits was refused"),
        }
    }

    fn step(&mut self) {
        self.now += Duration::from_millis(1);
        let decoding: Vec<_> = self.scheduler.running_ids().filter(|id| self.wanted(*id) == 1).collect();
        let mut plan = std::mem::take(&mut self.plan);
        self.scheduler.plan(self.now, &mut plan);
        for id in &plan.expired {
            self.known.remove(id);
        }
        self.check_plan(&plan, &decoding);
        self.write(&plan);
        if self.random.next(100) == 0 && !plan.is_empty() {
            self.scheduler.fail(&plan);
            // The rows were never written.
            for entry in &plan.entries {
                self.known.remove(&entry.sequence);
            }
            self.scramble();
        } else {
            let outcomes = self.outcomes(&plan);
            self.scheduler.commit(&plan, &outcomes);
        }
        self.plan = plan;
    }

    fn wanted(&self, id: SequenceId) -> usize {
        self.scheduler.sequence(id).map_or(0, |sequence| sequence.tokens().len() - sequence.computed())
    }

    fn check_plan(&self, plan: &Plan, decoding: &[SequenceId]) {
        assert!(plan.rows <= self.config.max_rows && plan.logit_rows <= self.config.max_logit_rows);
        assert!(self.scheduler.running() <= self.config.max_sequences);
        assert_eq!(plan.rows, plan.entries.iter().map(|entry| entry.len).sum::<usize>());
        assert_eq!(plan.logit_rows, plan.entries.iter().map(|entry| entry.logit_rows()).sum::<usize>());
        for entry in &plan.entries {
            assert!(entry.len > 0);
            assert_eq!(plan.entries.iter().filter(|other| other.sequence == entry.sequence).count(), 1);
        }
        for id in decoding.iter().filter(|id| !plan.preempted.contains(id)) {
            assert!(plan.entries.iter().any(|entry| entry.sequence == *id), "a decode was left out");
        }
        if plan.is_empty() {
            assert!(self.known.is_empty(), "work is there, but nobody runs");
        }
    }

    /// Writes the rows of the step, then reads every participant's whole past: it must be its own.
    fn write(&mut self, plan: &Plan) {
        for entry in &plan.entries {
            let sequence = self.scheduler.sequence(entry.sequence).unwrap();
            for position in entry.start..entry.start + entry.len {
                self.memory[sequence.table(0)[position / B].0 as usize * B + position % B] = sequence.tokens()[position];
            }
        }
        for entry in &plan.entries {
            let (sequence, known) = (self.scheduler.sequence(entry.sequence).unwrap(), &self.known[&entry.sequence]);
            assert_eq!(sequence.tokens(), known.tokens);
            for position in 0..entry.start + entry.len {
                let slot = sequence.table(0)[position / B].0 as usize * B + position % B;
                assert_eq!(self.memory[slot], known.tokens[position], "position {position} of {:?}", entry.sequence);
            }
        }
    }

    /// After a step that failed: blocks that it owned alone hold rubbish.
    fn scramble(&mut self) {
        let pool = self.scheduler.cache().pool(0).unwrap();
        let index = self.scheduler.cache().index(0).unwrap();
        for block in 0..pool.total() as u32 {
            if pool.refs(BlockId(block)) == 0 && index.hash_of(BlockId(block)).is_none() {
                self.memory[block as usize * B..][..B].fill(u32::MAX);
            }
        }
    }

    fn outcomes(&mut self, plan: &Plan) -> Vec<Outcome> {
        let mut outcomes = Vec::new();
        for entry in &plan.entries {
            let known = self.known.get_mut(&entry.sequence).unwrap();
            if !entry.samples {
                outcomes.push(Outcome::Computed);
                continue;
            }
            assert_eq!(entry.start + entry.len, known.tokens.len());
            let token = 90_000 + self.random.next(3) as u32;
            known.tokens.push(token);
            let failed = self.random.next(200) == 0;
            if failed || known.tokens.len() >= known.end || self.random.next(40) == 0 {
                self.known.remove(&entry.sequence);
                self.finished += 1;
                outcomes.push(if failed { Outcome::Failed } else { Outcome::Finished });
            } else {
                outcomes.push(Outcome::Token(token));
            }
        }
        outcomes
    }

    fn cancel(&mut self) {
        let mut ids: Vec<_> = self.known.keys().copied().collect();
        ids.sort();
        if ids.is_empty() {
            return;
        }
        let id = ids[self.random.next(ids.len() as u64) as usize];
        assert!(self.scheduler.cancel(id));
        self.known.remove(&id);
    }

    /// Reference counts are owners; used and free blocks are all blocks; everybody is somewhere.
    fn check_blocks(&self) {
        let pool = self.scheduler.cache().pool(0).unwrap();
        let mut owners = vec![0; pool.total()];
        for id in self.scheduler.running_ids() {
            let sequence = self.scheduler.sequence(id).unwrap();
            assert!(sequence.table(0).len() >= sequence.computed().div_ceil(B));
            sequence.table(0).iter().for_each(|block| owners[block.0 as usize] += 1);
        }
        for (block, owners) in owners.iter().enumerate() {
            assert_eq!(pool.refs(BlockId(block as u32)), *owners);
        }
        let free = owners.iter().filter(|owners| **owners == 0).count();
        assert_eq!((pool.free(), pool.used()), (free, pool.total() - free));
        assert_eq!(pool.eviction_order().count(), free);
        assert_eq!(self.scheduler.running() + self.scheduler.waiting(), self.known.len());
        assert!(self.scheduler.waiting_ids().all(|id| self.scheduler.sequence(id).unwrap().table(0).is_empty()));
    }
}

#[test]
fn seeded_walks_keep_every_promise() {
    let (mut finished, mut preempted, mut hits) = (0, 0, 0);
    for seed in 0..60 {
        let mut walk = Walk::new(seed);
        for _ in 0..2_000 {
            match walk.random.next(10) {
                0 | 1 if walk.known.len() < 40 => walk.arrive(),
                2 => walk.cancel(),
                _ => walk.step(),
            }
            walk.check_blocks();
        }
        // Nobody starves: without arrivals all that is there ends.
        let mut left = 20_000;
        while !walk.known.is_empty() {
            walk.step();
            walk.check_blocks();
            left -= 1;
            assert!(left > 0, "seed {seed}: {} sequences never end", walk.known.len());
        }
        assert_eq!(walk.scheduler.cache().used(), 0);
        finished += walk.finished;
        preempted += walk.scheduler.counters().preemptions;
        hits += walk.scheduler.counters().hit_tokens;
    }
    println!("{finished} finished, {preempted} preemptions, {hits} tokens hit");
    assert!(finished > 1_000 && preempted > 100 && hits > 1_000, "the walks are too tame: {finished}, {preempted}, {hits}");
}
