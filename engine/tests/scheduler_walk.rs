//! Seeded random walks of the scheduler over small pools, checked against naive models: blocks are conserved, reference
//! counts are owners, budgets hold, every key and value that a row reads is its own, order and bypass are as promised,
//! whoever leaves leaves nothing behind, and nobody starves.
//!
//! QUIRE_WALK_OPS sets the number of operations.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod scheduler_support;

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use quire_engine::{
    cache::BlockId,
    scheduler::{Outcome, Plan, Policy, Scheduler, SchedulerConfig, SequenceId},
    simulate::Random,
};
use scheduler_support::{B, config, distinct, sequence};

const OPERATIONS: usize = 1_000_000;
const SEEDS: u64 = 100;
/// Between checks of everything.
const FULL_CHECK: usize = 64;

/// What a walk knows of a sequence without asking the scheduler.
struct Known {
    tokens: Vec<u32>,
    prompt_len: usize,
    end: usize,
    /// Its place in the order, by definition; the number of its arrival is doubled, so that there is a place before it.
    score: i128,
    arrival: u64,
    passes: u32,
}

#[derive(Default)]
struct Tally {
    arrived: usize,
    refused: usize,
    steps: usize,
    finished: usize,
    cancelled: usize,
    expired: usize,
    evicted: usize,
    failed_steps: usize,
    preempted: u64,
    hit_tokens: u64,
    bypasses: u64,
    full_checks: usize,
}

struct Walk {
    scheduler: Scheduler,
    config: SchedulerConfig,
    plan: Plan,
    outcomes: Vec<Outcome>,
    random: Random,
    known: BTreeMap<SequenceId, Known>,
    waiting_before: Vec<SequenceId>,
    decoding: Vec<SequenceId>,
    /// Slot → the token whose keys and values are there: the naive KV memory.
    memory: Vec<u32>,
    arrivals: u64,
    now: Duration,
    tally: Tally,
}

fn policy(random: &mut Random) -> Policy {
    Policy {
        ageing: Duration::from_millis([0, 20, 500][random.below(3)]),
        bypass_depth: random.below(5),
        bypass_passes: random.below(6) as u32,
        bypass_for: Duration::from_millis([5, 100, 100_000][random.below(3)]),
        growth_reserve: [0.0, 0.5, 1.0][random.below(3)],
        growth_cap: 1 + random.below(40),
        prefill_floor: 1 + random.below(4),
    }
}

impl Walk {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let blocks = 8 + random.below(57);
        let max_rows = 4 + random.below(40);
        let config = SchedulerConfig {
            max_sequences: 1 + random.below(9),
            max_rows,
            max_logit_rows: 4 + random.below(12),
            max_prefill_chunk: 1 + random.below(max_rows),
            watermark_blocks: random.below(3),
            prefix_cache: random.below(5) > 0,
            policy: policy(&mut random),
            itl_target: [None, Some(Duration::from_millis(1)), Some(Duration::from_millis(20))][random.below(3)],
            ..config(blocks)
        };
        Self {
            scheduler: Scheduler::new(config.clone()),
            memory: vec![u32::MAX; blocks * B],
            config,
            plan: Plan::default(),
            outcomes: Vec::new(),
            random,
            known: BTreeMap::new(),
            waiting_before: Vec::new(),
            decoding: Vec::new(),
            arrivals: 0,
            now: Duration::ZERO,
            tally: Tally::default(),
        }
    }

    fn operation(&mut self) {
        match self.random.below(64) {
            0..12 if self.known.len() < 40 => self.arrive(),
            12..17 => self.cancel(),
            17 => drop(self.scheduler.preempt_last()),
            18 | 19 => {
                let count = 1 + self.random.below(8);
                self.tally.evicted += self.scheduler.cache_mut().evict(count);
            }
            _ => self.step(),
        }
    }

    fn arrive(&mut self) {
        let capacity = self.memory.len();
        // Few families of prompts, so that prefixes are shared, with tails of their own.
        let family = self.random.below(4) as u32;
        let longest = if self.random.below(4) == 0 { capacity * 3 / 4 } else { capacity / 6 };
        let len = 1 + self.random.below(longest);
        let mut tokens = distinct(family, len);
        if self.random.below(2) == 0 {
            let from = self.random.below(len);
            tokens[from..].iter_mut().for_each(|token| *token += 5_000);
        }
        let output = 1 + self.random.below(20);
        self.arrivals += 1;
        let mut new = sequence(tokens.clone(), output, self.arrivals);
        new.arrived = self.now;
        new.priority = self.random.below(3) as i32;
        new.score_prompt = self.random.below(8) == 0;
        if self.random.below(8) == 0 {
            new.deadline = Some(self.now + Duration::from_millis(self.random.below(50) as u64));
        }
        if self.random.below(8) == 0 {
            new.use_index = false;
            new.hashes.clear();
        }
        let ageing = self.config.policy.ageing.as_micros() as i128;
        let (priority, arrived) = (i128::from(new.priority), self.now.as_micros() as i128);
        let score = if ageing == 0 { priority } else { priority * ageing + arrived };
        let fits = (len + output - 1).div_ceil(B) <= self.memory.len() / B;
        match self.scheduler.add(new) {
            Ok(id) => {
                assert!(fits, "what can never fit was queued");
                let known = Known { tokens, prompt_len: len, end: len + output, score, arrival: 2 * self.arrivals, passes: 0 };
                assert!(self.known.insert(id, known).is_none(), "a name was used twice");
                self.tally.arrived += 1;
            }
            Err(_) => {
                assert!(!fits, "what fits was refused");
                self.tally.refused += 1;
            }
        }
    }

    fn step(&mut self) {
        self.now += Duration::from_millis(1);
        self.tally.steps += 1;
        let mut plan = std::mem::take(&mut self.plan);
        self.waiting_before.clear();
        self.waiting_before.extend(self.scheduler.waiting_ids());
        self.decoding.clear();
        self.decoding.extend(self.scheduler.running_ids().filter(|id| {
            let sequence = self.scheduler.sequence(*id).unwrap();
            sequence.tokens().len() - sequence.computed() == 1
        }));
        self.scheduler.plan(self.now, &mut plan);
        for id in &plan.expired {
            assert!(self.known.remove(id).is_some());
            self.tally.expired += 1;
        }
        self.check_plan(&plan);
        self.check_order();
        self.write(&plan);
        if self.random.below(100) == 0 && !plan.is_empty() {
            self.scheduler.fail(&plan);
            self.tally.failed_steps += 1;
            // The rows were never written.
            for entry in &plan.entries {
                self.known.remove(&entry.sequence);
            }
            self.scramble();
        } else {
            self.outcomes(&plan);
            self.scheduler.commit(&plan, &self.outcomes);
            let elapsed = Duration::from_micros((500 + 300 * plan.rows + self.random.below(500)) as u64);
            self.scheduler.observe(&plan, elapsed);
        }
        self.plan = plan;
    }

    fn check_plan(&self, plan: &Plan) {
        assert!(plan.rows <= self.config.max_rows && plan.logit_rows <= self.config.max_logit_rows);
        assert!(self.scheduler.running() <= self.config.max_sequences);
        assert_eq!(plan.rows, plan.entries.iter().map(|entry| entry.len).sum::<usize>());
        assert_eq!(plan.decode_rows, plan.entries.iter().filter(|entry| entry.is_decode()).count());
        assert_eq!(plan.logit_rows, plan.entries.iter().map(|entry| entry.logit_rows()).sum::<usize>());
        for entry in &plan.entries {
            assert!(entry.len > 0);
            assert_eq!(plan.entries.iter().filter(|other| other.sequence == entry.sequence).count(), 1);
        }
        for id in self.decoding.iter().filter(|id| !plan.preempted.contains(id)) {
            assert!(plan.entries.iter().any(|entry| entry.sequence == *id), "a decode was left out");
        }
        if plan.is_empty() {
            assert!(self.known.is_empty(), "work is there, but nobody runs");
        }
    }

    /// Who got in although others stood before it has passed them; nobody is passed more often than the policy says.
    fn check_order(&mut self) {
        let waits = |id: &&SequenceId| self.scheduler.sequence(**id).is_some_and(|sequence| !sequence.running());
        if let Some(place) = self.waiting_before.iter().position(|id| waits(&id)) {
            let first = &self.known[&self.waiting_before[place]];
            let before = (first.score, first.arrival - 1);
            for id in &self.waiting_before[place..] {
                if self.scheduler.sequence(*id).is_some_and(|sequence| sequence.running()) {
                    let known = self.known.get_mut(id).unwrap();
                    (known.score, known.arrival) = before;
                }
            }
        }
        let mut entered = 0;
        for id in self.waiting_before.iter().rev() {
            let Some(sequence) = self.scheduler.sequence(*id) else { continue };
            let known = self.known.get_mut(id).unwrap();
            if sequence.running() {
                entered += 1;
                continue;
            }
            known.passes += entered;
            let allowed = if self.config.policy.bypass_depth == 0 { 0 } else { self.config.policy.bypass_passes };
            assert!(known.passes <= allowed, "{id:?} was passed {} times", known.passes);
        }
    }

    /// Writes the rows of the step; a place in the past of every participant, drawn at random, must be its own.
    fn write(&mut self, plan: &Plan) {
        for entry in &plan.entries {
            let (sequence, known) = (self.scheduler.sequence(entry.sequence).unwrap(), &self.known[&entry.sequence]);
            for position in entry.start..entry.start + entry.len {
                assert_eq!(sequence.tokens()[position], known.tokens[position]);
                self.memory[sequence.table(0)[position / B].0 as usize * B + position % B] = known.tokens[position];
            }
        }
        for entry in &plan.entries {
            let position = self.random.below(entry.start + entry.len);
            self.check_slot(entry.sequence, position);
        }
    }

    fn check_slot(&self, id: SequenceId, position: usize) {
        let slot = self.scheduler.sequence(id).unwrap().table(0)[position / B].0 as usize * B + position % B;
        assert_eq!(self.memory[slot], self.known[&id].tokens[position], "position {position} of {id:?}");
    }

    /// After a step that failed: blocks that it owned alone hold rubbish.
    fn scramble(&mut self) {
        let pool = self.scheduler.cache().pool();
        let index = self.scheduler.cache().index();
        for block in 0..pool.total() as u32 {
            if pool.refs(BlockId(block)) == 0 && index.name_of(BlockId(block)).is_none() {
                self.memory[block as usize * B..][..B].fill(u32::MAX);
            }
        }
    }

    fn outcomes(&mut self, plan: &Plan) {
        self.outcomes.clear();
        for entry in &plan.entries {
            let known = self.known.get_mut(&entry.sequence).unwrap();
            if !entry.samples {
                self.outcomes.push(Outcome::Computed);
                continue;
            }
            assert_eq!(entry.start + entry.len, known.tokens.len());
            let token = 90_000 + self.random.below(3) as u32;
            known.tokens.push(token);
            let failed = self.random.below(200) == 0;
            if failed || known.tokens.len() >= known.end || self.random.below(40) == 0 {
                self.known.remove(&entry.sequence);
                self.tally.finished += 1;
                self.outcomes.push(if failed { Outcome::Failed } else { Outcome::Finished });
            } else {
                self.outcomes.push(Outcome::Token(token));
            }
        }
    }

    fn cancel(&mut self) {
        let place = self.random.below(self.known.len());
        let Some(id) = self.known.keys().nth(place).copied() else { return };
        assert!(self.scheduler.cancel(id));
        assert!(!self.scheduler.cancel(id), "cancelled twice");
        self.known.remove(&id);
        self.tally.cancelled += 1;
    }

    /// After every operation.
    fn check_counts(&self) {
        let pool = self.scheduler.cache().pool();
        assert_eq!(pool.free() + pool.used(), pool.total());
        assert_eq!(self.scheduler.running() + self.scheduler.waiting(), self.known.len());
        assert!(self.scheduler.running() > 0 || pool.used() == 0, "nobody runs, but blocks are taken");
    }

    /// Reference counts are owners; used and free blocks are all blocks; everybody is somewhere, in order; everything that
    /// was computed is still there.
    fn check_all(&mut self) {
        self.tally.full_checks += 1;
        let pool = self.scheduler.cache().pool();
        let mut owners = vec![0; pool.total()];
        for id in self.scheduler.running_ids() {
            let sequence = self.scheduler.sequence(id).unwrap();
            assert!(sequence.table(0).len() >= sequence.computed().div_ceil(B));
            sequence.table(0).iter().for_each(|block| owners[block.0 as usize] += 1);
            (0..sequence.computed()).for_each(|position| self.check_slot(id, position));
        }
        for (block, owners) in owners.iter().enumerate() {
            assert_eq!(pool.refs(BlockId(block as u32)), *owners);
        }
        let free = owners.iter().filter(|owners| **owners == 0).count();
        assert_eq!((pool.free(), pool.eviction_order().count()), (free, free));
        for ids in [self.scheduler.waiting_ids().collect::<Vec<_>>(), self.scheduler.running_ids().collect()] {
            assert!(ids.is_sorted_by_key(|id| (self.known[id].score, self.known[id].arrival)), "out of order");
        }
        assert!(self.scheduler.waiting_ids().all(|id| self.scheduler.sequence(id).unwrap().table(0).is_empty()));
        for (id, known) in &self.known {
            let sequence = self.scheduler.sequence(*id).unwrap();
            assert_eq!((sequence.tokens(), sequence.prompt_len()), (&known.tokens[..], known.prompt_len));
        }
    }
}

fn add(sum: &mut Tally, walk: &Walk) {
    let (tally, counters) = (&walk.tally, walk.scheduler.counters());
    sum.arrived += tally.arrived;
    sum.refused += tally.refused;
    sum.steps += tally.steps;
    sum.finished += tally.finished;
    sum.cancelled += tally.cancelled;
    sum.expired += tally.expired;
    sum.evicted += tally.evicted;
    sum.failed_steps += tally.failed_steps;
    sum.full_checks += tally.full_checks;
    sum.preempted += counters.preemptions;
    sum.hit_tokens += counters.hit_tokens;
    sum.bypasses += counters.bypasses;
}

#[test]
fn seeded_walks_keep_every_promise() {
    let operations = std::env::var("QUIRE_WALK_OPS").map_or(OPERATIONS, |text| text.parse().unwrap());
    let began = Instant::now();
    let mut sum = Tally::default();
    for seed in 0..SEEDS {
        let mut walk = Walk::new(seed);
        for number in 0..operations.div_ceil(SEEDS as usize) {
            walk.operation();
            walk.check_counts();
            if number % FULL_CHECK == 0 {
                walk.check_all();
            }
        }
        // Nobody starves: without arrivals all that is there ends.
        let mut left = 20_000;
        while !walk.known.is_empty() {
            walk.step();
            walk.check_counts();
            left -= 1;
            assert!(left > 0, "seed {seed}: {} sequences never end", walk.known.len());
        }
        walk.check_all();
        assert_eq!(walk.scheduler.cache().used(), 0);
        add(&mut sum, &walk);
    }
    let Tally {
        arrived,
        refused,
        steps,
        finished,
        cancelled,
        expired,
        evicted,
        failed_steps,
        preempted,
        hit_tokens,
        bypasses,
        full_checks,
    } = sum;
    println!(
        "{operations} operations in {:.1?}: {arrived} arrived, {refused} refused, {steps} steps ({failed_steps} failed), {finished} finished, \
         {cancelled} cancelled, {expired} expired, {preempted} preemptions, {evicted} blocks evicted, {bypasses} passed, \
         {hit_tokens} tokens hit, {full_checks} full checks",
        began.elapsed()
    );
    let enough = operations / 1_000;
    for (name, count) in [
        ("finished", finished),
        ("cancelled", cancelled),
        ("expired", expired),
        ("evicted", evicted),
        ("preempted", preempted as usize),
        ("bypasses", bypasses as usize),
        ("hit", hit_tokens as usize),
    ] {
        assert!(count > enough, "the walks are too tame: {count} {name}");
    }
}
