//! The scheduler over a machine that is only a cost.

use std::time::Duration;

use quire_proto::block_hash::{BlockHash, chain};

use super::{Arrival, Report, report::Samples};
use crate::scheduler::{NewSequence, Outcome, Plan, Scheduler, SchedulerConfig, SequenceId};

/// What a step takes, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    pub fixed: f64,
    pub decode_row: f64,
    pub prefill_row: f64,
    /// For each row and thousand tokens before it.
    pub context: f64,
}

impl Cost {
    /// A model of a hundred million weights on two cores.
    #[must_use]
    pub fn small_cpu() -> Self {
        Self { fixed: 6_000.0, decode_row: 900.0, prefill_row: 500.0, context: 250.0 }
    }

    /// A model of eight thousand million weights on a data centre's GPU.
    #[must_use]
    pub fn gpu() -> Self {
        Self { fixed: 7_000.0, decode_row: 20.0, prefill_row: 25.0, context: 2.0 }
    }

    fn step(&self, plan: &Plan) -> Duration {
        let rows = self.fixed + self.decode_row * plan.decode_rows as f64 + self.prefill_row * plan.prefill_rows() as f64;
        let before = plan.entries.iter().map(|entry| entry.len as f64 * (entry.start as f64 + entry.len as f64 / 2.0)).sum::<f64>();
        Duration::from_secs_f64((rows + self.context * before / 1000.0) / 1e6)
    }
}

/// A request under way.
struct Stream {
    arrived: Duration,
    last: Option<Duration>,
    left: usize,
    priority: i32,
}

struct Run<'a> {
    scheduler: Scheduler,
    cost: &'a Cost,
    block_size: usize,
    streams: Vec<Option<Stream>>,
    now: Duration,
    plan: Plan,
    outcomes: Vec<Outcome>,
    samples: Samples,
}

/// Runs a trace to its end. `config.block_size` and `config.groups` say how much memory there is.
#[must_use]
pub fn simulate(config: &SchedulerConfig, cost: &Cost, trace: &[Arrival]) -> Report {
    let mut run = Run {
        scheduler: Scheduler::new(config.clone()),
        cost,
        block_size: config.block_size,
        streams: Vec::new(),
        now: Duration::ZERO,
        plan: Plan::default(),
        outcomes: Vec::new(),
        samples: Samples::default(),
    };
    let mut arrivals = trace.iter().enumerate().peekable();
    loop {
        while let Some((number, arrival)) = arrivals.next_if(|(_, arrival)| arrival.at <= run.now) {
            run.arrive(number as u64, arrival);
        }
        if run.scheduler.running() + run.scheduler.waiting() > 0 && run.step() {
            continue;
        }
        let Some((_, next)) = arrivals.peek() else { break };
        run.now = run.now.max(next.at);
    }
    let stuck = run.scheduler.running() + run.scheduler.waiting();
    let counters = run.scheduler.counters();
    let blocks = run.scheduler.cache().total();
    run.samples.report(run.now, &counters, stuck, (blocks, blocks * config.block_size))
}

impl Run<'_> {
    fn arrive(&mut self, number: u64, arrival: &Arrival) {
        let root = BlockHash::root("", b"");
        let added = self.scheduler.add(NewSequence {
            prompt_len: arrival.tokens.len(),
            hashes: chain(root, &arrival.tokens, self.block_size),
            use_index: true,
            max_len: arrival.tokens.len() + arrival.max_output,
            tokens: arrival.tokens.clone(),
            root,
            priority: arrival.priority,
            arrival: number,
            arrived: arrival.at,
            deadline: None,
            score_prompt: false,
            step_ahead: true,
            fork_of: None,
        });
        let Ok(id) = added else {
            self.samples.refused += 1;
            return;
        };
        let slot = id.slot();
        if self.streams.len() <= slot {
            self.streams.resize_with(slot + 1, || None);
        }
        self.streams[slot] = Some(Stream { arrived: arrival.at, last: None, left: arrival.output, priority: arrival.priority });
    }

    /// False if nothing could be done.
    fn step(&mut self) -> bool {
        let mut plan = std::mem::take(&mut self.plan);
        self.scheduler.plan(self.now, &mut plan);
        let worked = !plan.is_empty();
        if worked {
            let elapsed = self.cost.step(&plan);
            self.now += elapsed;
            self.note_memory();
            self.samples.steps += 1;
            self.samples.prefill_rows += plan.prefill_rows() as u64;
            self.outcomes.clear();
            for entry in &plan.entries {
                let outcome = if entry.samples { self.token(entry.sequence) } else { Outcome::Computed };
                self.outcomes.push(outcome);
            }
            self.scheduler.commit(&plan, &self.outcomes);
            self.scheduler.observe(&plan, elapsed);
        }
        self.plan = plan;
        worked
    }

    fn token(&mut self, id: SequenceId) -> Outcome {
        let Some(stream) = self.streams.get_mut(id.slot()).and_then(Option::as_mut) else { return Outcome::Finished };
        match stream.last.replace(self.now) {
            None => self.samples.first_token(stream.priority, self.now.saturating_sub(stream.arrived)),
            Some(last) => self.samples.gap(self.now.saturating_sub(last)),
        }
        stream.left = stream.left.saturating_sub(1);
        if stream.left > 0 {
            return Outcome::Token(7);
        }
        self.samples.finished += 1;
        Outcome::Finished
    }

    /// Slots of taken blocks that hold nothing: only the ends of tables have any.
    fn note_memory(&mut self) {
        let scheduler = &self.scheduler;
        let groups = scheduler.cache().groups().len();
        let empty = |id| scheduler.sequence(id).map_or(0, |s| groups * (s.table(0).len() * self.block_size - s.computed()));
        self.samples.empty_slots += scheduler.running_ids().map(empty).sum::<usize>() as u64;
        self.samples.taken_slots += (scheduler.cache().used() * self.block_size) as u64;
        self.samples.most_blocks = self.samples.most_blocks.max(scheduler.cache().used());
        self.samples.widest = self.samples.widest.max(scheduler.running());
    }
}
