//! What came of a run.

use std::{fmt, time::Duration};

use crate::scheduler::Counters;

/// Collected on the way.
#[derive(Debug, Default)]
pub(super) struct Samples {
    first: Vec<f32>,
    first_low: Vec<f32>,
    gaps: Vec<f32>,
    pub finished: usize,
    pub refused: usize,
    pub steps: u64,
    pub prefill_rows: u64,
    pub widest: usize,
    pub empty_slots: u64,
    pub taken_slots: u64,
    pub most_blocks: usize,
}

/// Milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Percentiles {
    pub p50: f32,
    pub p99: f32,
    pub max: f32,
}

impl Percentiles {
    fn of(mut values: Vec<f32>) -> Self {
        values.sort_unstable_by(f32::total_cmp);
        let at = |share: f64| values.get(((values.len() as f64 * share).ceil() as usize).saturating_sub(1)).copied().unwrap_or(0.0);
        Self { p50: at(0.5), p99: at(0.99), max: at(1.0) }
    }
}

impl Samples {
    pub fn first_token(&mut self, priority: i32, time: Duration) {
        let samples = if priority > 0 { &mut self.first_low } else { &mut self.first };
        samples.push(time.as_secs_f32() * 1e3);
    }

    pub fn gap(&mut self, time: Duration) {
        self.gaps.push(time.as_secs_f32() * 1e3);
    }

    pub fn report(self, end: Duration, counters: &Counters, stuck: usize, (total_blocks, total_slots): (usize, usize)) -> Report {
        let tokens = (self.first.len() + self.first_low.len() + self.gaps.len()) as f64;
        let share = |part: u64, whole: u64| if whole == 0 { 0.0 } else { part as f64 / whole as f64 };
        Report {
            finished: self.finished,
            refused: self.refused,
            stuck,
            seconds: end.as_secs_f64(),
            requests_per_second: self.finished as f64 / end.as_secs_f64().max(1e-9),
            tokens_per_second: tokens / end.as_secs_f64().max(1e-9),
            ttft: Percentiles::of(self.first),
            ttft_low: Percentiles::of(self.first_low),
            itl: Percentiles::of(self.gaps),
            steps: self.steps,
            prefill_rows: self.prefill_rows,
            widest: self.widest,
            preemptions: counters.preemptions,
            lost_tokens: counters.preempted_tokens - counters.recovered_tokens.min(counters.preempted_tokens),
            bypasses: counters.bypasses,
            hit_rate: share(counters.hit_tokens, counters.queried_tokens),
            waste: share(self.empty_slots, self.taken_slots),
            memory: share(self.taken_slots, self.steps * total_slots as u64),
            peak_memory: share(self.most_blocks as u64, total_blocks as u64),
        }
    }
}

/// The figures of a run; times of the simulated clock.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Report {
    pub finished: usize,
    /// Requests that could never fit.
    pub refused: usize,
    /// Requests that the scheduler never ended: must be 0.
    pub stuck: usize,
    pub seconds: f64,
    pub requests_per_second: f64,
    pub tokens_per_second: f64,
    pub ttft: Percentiles,
    /// Of requests of low priority.
    pub ttft_low: Percentiles,
    pub itl: Percentiles,
    pub steps: u64,
    pub prefill_rows: u64,
    /// Most sequences that ran at a time.
    pub widest: usize,
    pub preemptions: u64,
    /// Tokens that were computed twice.
    pub lost_tokens: u64,
    pub bypasses: u64,
    pub hit_rate: f64,
    /// Slots of taken blocks that held nothing.
    pub waste: f64,
    /// Share of the blocks that was taken, in the mean over steps, and at most.
    pub memory: f64,
    pub peak_memory: f64,
}

impl Report {
    /// Head of a table of reports.
    pub const HEAD: &str = "| policy | tok/s | TTFT p50 | p99 | low p99 | ITL p50 | p99 | max | at once | preempted | twice | passed | hit | waste | memory | peak |\n\
        |---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|";
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, " {:.0} | {:.0} | {:.0} | ", self.tokens_per_second, self.ttft.p50, self.ttft.p99)?;
        write!(f, "{:.0} | {:.1} | {:.1} | {:.1} | ", self.ttft_low.p99, self.itl.p50, self.itl.p99, self.itl.max)?;
        write!(f, "{} | {} | {} | {} | ", self.widest, self.preemptions, self.lost_tokens, self.bypasses)?;
        write!(f, "{:.1} % | {:.1} % | ", self.hit_rate * 100.0, self.waste * 100.0)?;
        write!(f, "{:.1} % | {:.1} % |", self.memory * 100.0, self.peak_memory * 100.0)
    }
}
