//! Seeded random walks of the scheduler over small pools, checked against naive models: blocks are conserved, reference
//! counts are owners, budgets hold, every key and value that a row reads in any cache group is its own, order and bypass are
//! as promised, whoever leaves leaves nothing behind, and nobody starves.
//!
//! QUIRE_WALK_OPS sets the number of operations.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod scheduler_support;

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use quire_engine::{
    cache::{BlockId, Footprint, GroupKind},
    scheduler::{NewSequence, Outcome, Plan, Policy, Scheduler, SchedulerConfig, SequenceId},
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
    /// What stands for the past of each token and itself.
    states: Vec<u64>,
    prompt_len: usize,
    end: usize,
    /// Its place in the order, by definition; the number of its arrival is doubled, so that there is a place before it.
    score: i128,
    arrival: u64,
    passes: u32,
    fork_of: Option<SequenceId>,
    step_ahead: bool,
    admitted: bool,
}

impl Known {
    fn push(&mut self, token: u32) {
        self.tokens.push(token);
        self.states.push(mix(self.states.last().copied().unwrap_or(1), u64::from(token)));
    }

    fn truncate(&mut self, len: usize) {
        self.tokens.truncate(len);
        self.states.truncate(len);
    }

    /// Keys and values of a position in a group: they depend on all tokens before it, and on the layers.
    fn content(&self, group: usize, position: usize) -> u64 {
        mix(self.states[position], group as u64 + 1) | 1
    }
}

fn mix(state: u64, value: u64) -> u64 {
    let mut z = (state ^ value).wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z ^ (z >> 27)
}

/// A step whose outcome is not known to the scheduler yet.
struct Flight {
    plan: Plan,
    outcomes: Vec<Outcome>,
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
    guilty: usize,
    reruns: u64,
    placeholders: usize,
    copies: usize,
    left_windows: usize,
    fenced: usize,
    preempted: u64,
    hit_tokens: u64,
    bypasses: u64,
    full_checks: usize,
}

struct Walk {
    scheduler: Scheduler,
    config: SchedulerConfig,
    /// Steps are planned while one is under way.
    ahead: bool,
    flight: Option<Flight>,
    random: Random,
    known: BTreeMap<SequenceId, Known>,
    waiting_before: Vec<SequenceId>,
    decoding: Vec<SequenceId>,
    /// Slot → the keys and values that are there: the naive KV memory.
    memory: Vec<u64>,
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

/// Cache groups, some of them windows, if a sequence of some length fits into the blocks with them.
fn groups(random: &mut Random, blocks: usize, step_rows: usize) -> Vec<GroupKind> {
    let one = |random: &mut Random| match random.below(4) {
        0 => GroupKind::Full,
        1 | 2 => GroupKind::Window { tokens: 1 + random.below(30) },
        _ => GroupKind::Chunk { tokens: 1 + random.below(30) },
    };
    let groups = (0..1 + random.below(4)).map(|_| one(random)).collect();
    let footprint = Footprint { groups, block_size: B, step_rows };
    if footprint.longest(blocks) >= 6 * B { footprint.groups } else { vec![GroupKind::Full] }
}

impl Walk {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let blocks = 8 + random.below(57);
        let max_rows = 4 + random.below(40);
        let max_prefill_chunk = 1 + random.below(max_rows);
        let groups = if seed.is_multiple_of(3) { vec![GroupKind::Full] } else { groups(&mut random, blocks, max_prefill_chunk) };
        let config = SchedulerConfig {
            max_sequences: 1 + random.below(9),
            max_rows,
            max_logit_rows: 4 + random.below(12),
            max_prefill_chunk,
            groups,
            watermark_blocks: random.below(3),
            prefix_cache: random.below(5) > 0,
            policy: policy(&mut random),
            itl_target: [None, Some(Duration::from_millis(1)), Some(Duration::from_millis(20))][random.below(3)],
            ..config(blocks)
        };
        Self {
            scheduler: Scheduler::new(config.clone()),
            memory: vec![0; blocks * B],
            config,
            ahead: seed % 2 == 1,
            flight: None,
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
        let capacity = self.memory.len().min(self.scheduler.cache().footprint().longest(self.config.blocks));
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
        let mut new = sequence(tokens, output, 0);
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
        new.step_ahead = self.random.below(4) > 0;
        let forks = if self.random.below(6) == 0 && !new.score_prompt { self.random.below(3) } else { 0 };
        let parent = self.queue(new.clone());
        for _ in 0..forks {
            self.queue(NewSequence { fork_of: parent, ..new.clone() });
        }
    }

    fn queue(&mut self, mut new: NewSequence) -> Option<SequenceId> {
        self.arrivals += 1;
        new.arrival = self.arrivals;
        let (tokens, len, output) = (new.tokens.clone(), new.prompt_len, new.max_len - new.prompt_len);
        let (fork_of, step_ahead) = (new.fork_of, new.step_ahead);
        let ageing = self.config.policy.ageing.as_micros() as i128;
        let (priority, arrived) = (i128::from(new.priority), self.now.as_micros() as i128);
        let score = if ageing == 0 { priority } else { priority * ageing + arrived };
        let fits = self.scheduler.cache().footprint().peak(len + output - 1) <= self.config.blocks;
        assert!(self.config.groups != [GroupKind::Full] || fits == ((len + output - 1).div_ceil(B) <= self.config.blocks));
        match self.scheduler.add(new) {
            Ok(id) => {
                assert!(fits, "what can never fit was queued");
                let mut known = Known {
                    tokens: Vec::new(),
                    states: Vec::new(),
                    prompt_len: len,
                    end: len + output,
                    score,
                    arrival: 2 * self.arrivals,
                    passes: 0,
                    fork_of,
                    step_ahead,
                    admitted: false,
                };
                tokens.iter().for_each(|token| known.push(*token));
                assert!(self.known.insert(id, known).is_none(), "a name was used twice");
                self.tally.arrived += 1;
                Some(id)
            }
            Err(_) => {
                assert!(!fits, "what fits was refused");
                self.tally.refused += 1;
                None
            }
        }
    }

    /// Plans and submits a step, then learns the outcome of the one before it (or of this one).
    fn step(&mut self) {
        self.now += Duration::from_millis(1);
        self.tally.steps += 1;
        let mut plan = Plan::default();
        self.waiting_before.clear();
        self.waiting_before.extend(self.scheduler.waiting_ids());
        self.decoding.clear();
        self.decoding.extend(self.scheduler.running_ids().filter(|id| {
            let (sequence, known) = (self.scheduler.sequence(*id).unwrap(), &self.known[id]);
            let due = if known.step_ahead && known.tokens.len() < known.end { known.tokens.len() } else { sequence.tokens().len() };
            due == sequence.computed() + 1
        }));
        let (fenced, isolating) = (self.scheduler.fenced().count(), self.scheduler.isolating());
        self.scheduler.plan(self.now, &mut plan);
        for id in &plan.expired {
            assert!(self.known.remove(id).is_some());
            self.tally.expired += 1;
        }
        self.check_plan(&plan, fenced > 0 || isolating);
        if !isolating {
            self.check_order(&plan);
        }
        self.write(&plan);
        let outcomes = self.draw(&plan);
        let this = Flight { plan, outcomes };
        let Some(before) = self.flight.take() else {
            if self.ahead {
                self.flight = Some(this);
            } else if self.fails(&this) {
                self.fail(&[&this.plan]);
            } else {
                self.commit(this);
            }
            return;
        };
        if self.fails(&before) {
            self.fail(&[&before.plan, &this.plan]);
            return;
        }
        self.commit(before);
        if self.fails(&this) {
            self.fail(&[&this.plan]);
        } else {
            self.flight = Some(this);
        }
    }

    /// Rarely; but those that run alone after a failure are often to blame.
    fn fails(&mut self, flight: &Flight) -> bool {
        let rare = if self.scheduler.isolating() { 8 } else { 100 };
        !flight.plan.is_empty() && self.random.below(rare) == 0
    }

    fn fail(&mut self, plans: &[&Plan]) {
        self.tally.failed_steps += 1;
        let guilty = self.scheduler.fail(plans);
        if let Some(id) = guilty {
            assert_eq!((plans[0].entries.len(), plans[0].entries[0].sequence), (1, id));
            assert!(self.known.remove(&id).is_some());
            self.tally.guilty += 1;
        }
        for entry in plans.iter().flat_map(|plan| &plan.entries) {
            if let Some(sequence) = self.scheduler.sequence(entry.sequence) {
                assert!(!sequence.running() && sequence.computed() == 0);
                // What they drew was never said.
                self.known.get_mut(&entry.sequence).unwrap().truncate(sequence.tokens().len());
            }
        }
        self.scramble();
    }

    fn commit(&mut self, flight: Flight) {
        let Flight { plan, outcomes } = flight;
        for (entry, outcome) in plan.entries.iter().zip(&outcomes) {
            if matches!(outcome, Outcome::Finished | Outcome::Failed) && self.known.remove(&entry.sequence).is_some() {
                self.tally.finished += 1;
            }
        }
        self.scheduler.commit(&plan, &outcomes);
        let elapsed = Duration::from_micros((500 + 300 * plan.rows + self.random.below(500)) as u64);
        self.scheduler.observe(&plan, elapsed);
    }

    fn check_plan(&self, plan: &Plan, may_leave_out: bool) {
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
            // Unless its blocks are on their way back, or a suspect runs.
            let planned = plan.entries.iter().any(|entry| entry.sequence == *id);
            assert!(planned || may_leave_out || self.scheduler.fenced().count() > 0, "a decode was left out");
        }
        if plan.is_empty() && self.flight.is_none() {
            assert!(self.known.is_empty(), "work is there, but nobody runs");
        }
    }

    /// What waits for something else than room may be stepped over.
    fn not_yet(&self, id: SequenceId, plan: &Plan) -> bool {
        let (known, sequence) = (&self.known[&id], self.scheduler.sequence(id).unwrap());
        let forks = || {
            let parent = known.fork_of.filter(|_| !known.admitted)?;
            let running = self.scheduler.sequence(parent)?.running();
            let entry = plan.entries.iter().find(|entry| entry.sequence == parent);
            let computed = entry.map_or(self.scheduler.sequence(parent)?.computed(), |entry| entry.start);
            (!running || self.waiting_before.contains(&parent) || computed < known.prompt_len).then_some(())
        };
        known.tokens.len() > sequence.tokens().len() || forks().is_some()
    }

    /// Who got in although others stood before it has passed them; nobody is passed more often than the policy says.
    fn check_order(&mut self, plan: &Plan) {
        let waits = |id: &SequenceId| self.scheduler.sequence(*id).is_some_and(|sequence| !sequence.running()) && !self.not_yet(*id, plan);
        if let Some(place) = self.waiting_before.iter().position(waits) {
            let first = &self.known[&self.waiting_before[place]];
            let before = (first.score, first.arrival - 1);
            for id in &self.waiting_before[place..] {
                if self.scheduler.sequence(*id).is_some_and(|sequence| sequence.running()) {
                    let known = self.known.get_mut(id).unwrap();
                    (known.score, known.arrival) = before;
                }
            }
        }
        for (id, _) in &plan.admitted {
            self.known.get_mut(id).unwrap().admitted = true;
        }
        let mut entered = 0;
        for id in self.waiting_before.iter().rev() {
            let Some(sequence) = self.scheduler.sequence(*id) else { continue };
            if sequence.running() {
                entered += 1;
                continue;
            }
            if self.not_yet(*id, plan) {
                continue;
            }
            let known = self.known.get_mut(id).unwrap();
            known.passes += entered;
            let allowed = if self.config.policy.bypass_depth == 0 { 0 } else { self.config.policy.bypass_passes };
            assert!(known.passes <= allowed, "{id:?} was passed {} times", known.passes);
        }
    }

    /// Writes the rows of the step; a place in the past of every participant, drawn at random, must be its own.
    fn write(&mut self, plan: &Plan) {
        for (from, to) in &plan.copies {
            let from = from.0 as usize * B;
            self.memory.copy_within(from..from + B, to.0 as usize * B);
            self.tally.copies += 1;
        }
        for entry in &plan.entries {
            let (sequence, known) = (self.scheduler.sequence(entry.sequence).unwrap(), &self.known[&entry.sequence]);
            let end = entry.start + entry.len;
            assert_eq!(sequence.tokens().len() < end, entry.placeholder.is_some());
            assert!(entry.placeholder.is_none() || known.step_ahead && end < known.end);
            self.tally.placeholders += usize::from(entry.placeholder.is_some());
            for position in entry.start..end {
                assert!(sequence.tokens().get(position).is_none_or(|token| *token == known.tokens[position]));
                for group in 0..self.config.groups.len() {
                    self.memory[sequence.table(group)[position / B].0 as usize * B + position % B] = known.content(group, position);
                }
            }
        }
        for entry in &plan.entries {
            for group in 0..self.config.groups.len() {
                let from = self.config.groups[group].first_visible(entry.start);
                let position = from + self.random.below(entry.start + entry.len - from);
                self.check_slot(entry.sequence, group, position);
                // The first and the last that the rows see.
                self.check_slot(entry.sequence, group, from);
                self.check_slot(entry.sequence, group, entry.start + entry.len - 1);
                let table = self.scheduler.sequence(entry.sequence).unwrap().table(group);
                self.tally.left_windows += usize::from(table[0] == BlockId::DEAD);
            }
        }
    }

    fn check_slot(&self, id: SequenceId, group: usize, position: usize) {
        let sequence = self.scheduler.sequence(id).unwrap();
        let block = sequence.table(group)[position / B];
        assert!(block != BlockId::DEAD && self.scheduler.cache().pool().refs(block) > 0, "a row reads what is not its own");
        let slot = block.0 as usize * B + position % B;
        assert_eq!(
            self.memory[slot],
            self.known[&id].content(group, position),
            "position {position} of {id:?} in group {group} of {:?} (step ahead: {}; computed {}, slot {slot}, table {:?}, parent {:?}, {} tokens, {} prompt)",
            self.config.groups,
            self.ahead,
            sequence.computed(),
            sequence.table(group),
            self.known[&id].fork_of,
            sequence.tokens().len(),
            sequence.prompt_len()
        );
    }

    /// After a step that failed: blocks that it owned alone hold rubbish.
    fn scramble(&mut self) {
        let pool = self.scheduler.cache().pool();
        let index = self.scheduler.cache().index();
        for block in 0..pool.total() as u32 {
            if pool.refs(BlockId(block)) == 0 && index.name_of(BlockId(block)).is_none() {
                self.memory[block as usize * B..][..B].fill(0);
            }
        }
    }

    /// The device draws when it computes; the scheduler learns of it at commit.
    fn draw(&mut self, plan: &Plan) -> Vec<Outcome> {
        let mut outcomes = Vec::new();
        for entry in &plan.entries {
            let known = self.known.get_mut(&entry.sequence).unwrap();
            if !entry.samples {
                outcomes.push(Outcome::Computed);
                continue;
            }
            assert_eq!(entry.start + entry.len, known.tokens.len());
            let token = 90_000 + self.random.below(3) as u32;
            known.push(token);
            let failed = self.random.below(200) == 0;
            outcomes.push(match () {
                () if failed => Outcome::Failed,
                () if known.tokens.len() >= known.end || self.random.below(40) == 0 => Outcome::Finished,
                () => Outcome::Token(token),
            });
        }
        outcomes
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
    fn check_counts(&mut self) {
        self.tally.fenced += self.scheduler.fenced().count();
        let pool = self.scheduler.cache().pool();
        assert_eq!(pool.free() + pool.used(), pool.total());
        assert_eq!(self.scheduler.running() + self.scheduler.waiting(), self.known.len());
        let fenced = self.scheduler.fenced().count();
        assert!(fenced == 0 || self.flight.is_some(), "blocks wait for a step that is over");
        assert!(self.scheduler.running() + fenced > 0 || pool.used() == 0, "nobody runs, but blocks are taken");
    }

    /// Reference counts are owners; used and free blocks are all blocks; everybody is somewhere, in order; everything that
    /// was computed is still there.
    fn check_all(&mut self) {
        self.tally.full_checks += 1;
        let pool = self.scheduler.cache().pool();
        let mut owners = vec![0; pool.total()];
        let count = |table: &[BlockId], owners: &mut [u32]| {
            table.iter().filter(|block| **block != BlockId::DEAD).for_each(|block| owners[block.0 as usize] += 1);
        };
        for id in self.scheduler.running_ids() {
            let sequence = self.scheduler.sequence(id).unwrap();
            for (group, kind) in self.config.groups.iter().enumerate() {
                assert!(sequence.table(group).len() >= sequence.computed().div_ceil(B));
                count(sequence.table(group), &mut owners);
                (kind.first_visible(sequence.computed())..sequence.computed()).for_each(|position| self.check_slot(id, group, position));
            }
        }
        for kv in self.scheduler.fenced() {
            (0..self.config.groups.len()).for_each(|group| count(kv.table(group), &mut owners));
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
            let said = sequence.tokens().len();
            assert!(said == known.tokens.len() || self.ahead && known.tokens.len() <= said + 2);
            assert_eq!((sequence.tokens(), sequence.prompt_len()), (&known.tokens[..said], known.prompt_len));
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
    sum.guilty += tally.guilty;
    sum.placeholders += tally.placeholders;
    sum.copies += tally.copies;
    sum.left_windows += tally.left_windows;
    sum.fenced += tally.fenced;
    sum.reruns += counters.reruns;
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
        while !walk.known.is_empty() || walk.flight.as_ref().is_some_and(|flight| !flight.plan.is_empty()) {
            walk.step();
            walk.check_counts();
            left -= 1;
            assert!(left > 0, "seed {seed}: {} sequences never end", walk.known.len());
        }
        // A plan without rows is never committed.
        walk.flight = None;
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
        guilty,
        reruns,
        placeholders,
        copies,
        left_windows,
        fenced,
        preempted,
        hit_tokens,
        bypasses,
        full_checks,
    } = sum;
    println!(
        "{operations} operations in {:.1?}: {arrived} arrived, {refused} refused, {steps} steps ({failed_steps} failed, {reruns} reruns, {guilty} guilty; \
         {placeholders} placeholders, {fenced} fences), {copies} blocks copied, {left_windows} tables with blocks that left a window, {finished} finished, \
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
        ("guilty", guilty * 10),
        ("reruns", reruns as usize),
        ("placeholders", placeholders),
        ("copies", copies * 2),
        ("left a window", left_windows),
        ("fenced", fenced),
        ("preempted", preempted as usize),
        ("bypasses", bypasses as usize),
        ("hit", hit_tokens as usize),
    ] {
        assert!(count > enough, "the walks are too tame: {count} {name}");
    }
}
