//! Finished requests as distributions. Per-request values are kept as they are; gaps between tokens, of which there are many more, go into
//! a histogram with three significant digits. Knows nothing of tables or JSON.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use serde::Serialize;

use crate::drive::Finished;
use crate::stream::Outcome;

/// Quantiles in milliseconds, by nearest rank. `n` says what they are worth: a p99 of 50 samples is their maximum.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Distribution {
    pub n: u64,
    pub mean: f64,
    pub p50: f64,
    pub p90: f64,
    pub p95: f64,
    pub p99: f64,
    /// Only where at least ten samples lie beyond it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p999: Option<f64>,
    pub max: f64,
}

const P999_SAMPLES: u64 = 10_000;

/// Values of which each request has at most one.
#[derive(Debug, Clone, Default)]
pub struct Samples(Vec<f64>);

impl Samples {
    pub fn push(&mut self, time: Duration) {
        self.0.push(time.as_secs_f64() * 1e3);
    }

    pub fn distribution(&self) -> Option<Distribution> {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let max = *sorted.last()?;
        let at = |q: f64| sorted.get(((q * sorted.len() as f64).ceil() as usize).max(1) - 1).copied().unwrap_or(max);
        let n = sorted.len() as u64;
        Some(Distribution {
            n,
            mean: sorted.iter().sum::<f64>() / n as f64,
            p50: at(0.50),
            p90: at(0.90),
            p95: at(0.95),
            p99: at(0.99),
            p999: (n >= P999_SAMPLES).then(|| at(0.999)),
            max,
        })
    }
}

/// Microseconds, weighted in thousandths of a token.
#[derive(Debug, Clone)]
struct Gaps {
    histogram: Option<Histogram<u64>>,
    count: u64,
}

const LONGEST_GAP_US: u64 = 3_600_000_000;
const WEIGHT: f64 = 1_000.0;

impl Gaps {
    fn push(&mut self, gap: Duration, tokens: f64) {
        let micros = u64::try_from(gap.as_micros()).unwrap_or(LONGEST_GAP_US).clamp(1, LONGEST_GAP_US);
        if let Some(histogram) = &mut self.histogram {
            histogram.saturating_record_n(micros, ((tokens * WEIGHT).round() as u64).max(1));
            self.count += 1;
        }
    }

    fn distribution(&self) -> Option<Distribution> {
        let histogram = self.histogram.as_ref().filter(|_| self.count > 0)?;
        let at = |q: f64| histogram.value_at_quantile(q) as f64 / 1e3;
        Some(Distribution {
            n: self.count,
            mean: histogram.mean() / 1e3,
            p50: at(0.50),
            p90: at(0.90),
            p95: at(0.95),
            p99: at(0.99),
            p999: (self.count >= P999_SAMPLES).then(|| at(0.999)),
            max: histogram.max() as f64 / 1e3,
        })
    }
}

/// How output tokens were counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum TokenSource {
    /// The server's `usage`, for every request.
    Usage,
    /// Chunks with output, for every request: a lower bound of the tokens.
    Deltas,
    /// Usage where there was one.
    Mixed,
    /// Nothing was counted.
    None,
}

/// One kind of failure.
#[derive(Debug, Clone, Serialize)]
pub struct FailureRow {
    pub kind: String,
    pub count: u64,
    pub example: String,
}

/// Everything that has come back so far.
#[derive(Debug)]
pub struct Tally {
    pub ok: u64,
    pub failed: u64,
    failures: BTreeMap<String, FailureRow>,
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub output_tokens: u64,
    with_usage: u64,
    /// Successes whose tokens were no text: they have no first delta.
    pub without_text: u64,
    pub ttft: Samples,
    pub e2e: Samples,
    /// The same two from sending, not from the intended start.
    pub ttft_from_send: Samples,
    pub e2e_from_send: Samples,
    pub tpot: Samples,
    itl: Gaps,
    pub lag: Samples,
    pub waited: Samples,
    /// The first and last intended start of a finished request, and the last end.
    pub first_start: Option<Instant>,
    pub last_start: Option<Instant>,
    pub last_end: Option<Instant>,
}

impl Default for Tally {
    fn default() -> Tally {
        Tally {
            ok: 0,
            failed: 0,
            failures: BTreeMap::new(),
            prompt_tokens: 0,
            cached_tokens: 0,
            output_tokens: 0,
            with_usage: 0,
            without_text: 0,
            ttft: Samples::default(),
            e2e: Samples::default(),
            ttft_from_send: Samples::default(),
            e2e_from_send: Samples::default(),
            tpot: Samples::default(),
            // The bounds are constants that the constructor accepts; None can't happen, and would only lose ITL.
            itl: Gaps { histogram: Histogram::new_with_bounds(1, LONGEST_GAP_US, 3).ok(), count: 0 },
            lag: Samples::default(),
            waited: Samples::default(),
            first_start: None,
            last_start: None,
            last_end: None,
        }
    }
}

impl Tally {
    pub fn take(&mut self, finished: &Finished) {
        let Finished { intended, lag, waited, outcome } = finished;
        self.lag.push(*lag);
        self.waited.push(*waited);
        self.first_start = Some(self.first_start.map_or(*intended, |start| start.min(*intended)));
        self.last_start = self.last_start.max(Some(*intended));
        self.last_end = self.last_end.max(Some(outcome.end));
        match &outcome.result {
            Ok(()) => self.succeed(*intended, outcome),
            Err(failure) => {
                self.failed += 1;
                let kind = failure.kind().into_owned();
                let row = || FailureRow { kind: kind.clone(), count: 0, example: failure.detail().to_owned() };
                self.failures.entry(kind.clone()).or_insert_with(row).count += 1;
            }
        }
    }

    fn succeed(&mut self, intended: Instant, outcome: &Outcome) {
        self.ok += 1;
        let output = match outcome.usage {
            Some(usage) => {
                self.with_usage += 1;
                self.prompt_tokens += usage.prompt;
                self.cached_tokens += usage.cached;
                usage.completion
            }
            None => u64::from(outcome.deltas),
        };
        self.output_tokens += output;
        self.e2e.push(outcome.end - intended);
        self.e2e_from_send.push(outcome.end - outcome.sent);
        let (Some(first), Some(last)) = (outcome.first, outcome.last) else {
            self.without_text += 1;
            return;
        };
        self.ttft.push(first - intended);
        self.ttft_from_send.push(first - outcome.sent);
        if outcome.deltas >= 2 && output >= 2 {
            self.tpot.push((last - first).div_f64((output - 1) as f64));
        }
        // Where a delta doesn't say how many tokens it holds, the request's tokens are spread evenly over its deltas.
        let even = output as f64 / f64::from(outcome.deltas.max(1));
        outcome.gaps.iter().for_each(|gap| self.itl.push(gap.time, gap.tokens.map_or(even, f64::from)));
    }

    pub fn itl(&self) -> Option<Distribution> {
        self.itl.distribution()
    }

    /// Most frequent first.
    pub fn failures(&self) -> Vec<FailureRow> {
        let mut rows: Vec<FailureRow> = self.failures.values().cloned().collect();
        rows.sort_by_key(|row| std::cmp::Reverse(row.count));
        rows
    }

    pub fn source(&self) -> TokenSource {
        match (self.ok, self.with_usage) {
            (0, _) => TokenSource::None,
            (ok, usage) if ok == usage => TokenSource::Usage,
            (_, 0) => TokenSource::Deltas,
            _ => TokenSource::Mixed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::{Failure, Gap, Usage};

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// First delta 100 ms after sending, further ones at `gaps`, sent 50 ms after it was meant to be.
    fn finished(gaps: &[(u64, Option<u32>)], completion: Option<u64>, result: Result<(), Failure>) -> Finished {
        let intended = Instant::now();
        let sent = intended + ms(50);
        let first = sent + ms(100);
        let last = first + ms(gaps.iter().map(|gap| gap.0).sum());
        let gaps: Vec<Gap> = gaps.iter().map(|&(time, tokens)| Gap { time: ms(time), tokens }).collect();
        let usage = completion.map(|completion| Usage { prompt: 10, completion, cached: 4 });
        let outcome =
            Outcome { sent, first: Some(first), last: Some(last), end: last + ms(5), deltas: gaps.len() as u32 + 1, gaps, usage, result };
        Finished { intended, lag: ms(50), waited: ms(0), outcome }
    }

    #[test]
    fn latencies_count_from_the_intended_start() {
        let mut tally = Tally::default();
        tally.take(&finished(&[(10, None), (20, None)], Some(3), Ok(())));
        let p50 = |samples: &Samples| samples.distribution().unwrap().p50.round();
        assert_eq!((p50(&tally.ttft), p50(&tally.ttft_from_send)), (150.0, 100.0));
        assert_eq!((p50(&tally.e2e), p50(&tally.e2e_from_send)), (185.0, 135.0));
        assert_eq!(p50(&tally.tpot), 15.0);
        assert_eq!((tally.output_tokens, tally.prompt_tokens, tally.cached_tokens, tally.source()), (3, 10, 4, TokenSource::Usage));
    }

    #[test]
    fn gaps_weigh_as_many_tokens_as_their_delta_holds() {
        let mut tally = Tally::default();
        // 9 tokens arrive after 100 ms, one each after 10 ms twice.
        tally.take(&finished(&[(100, Some(9)), (10, Some(1)), (10, Some(1))], Some(12), Ok(())));
        let itl = tally.itl().unwrap();
        assert_eq!(itl.n, 3);
        assert!((itl.p50 - 100.0).abs() < 0.2, "{itl:?}");
        assert!((itl.mean - (9.0 * 100.0 + 20.0) / 11.0).abs() < 0.2, "{itl:?}");
    }

    #[test]
    fn the_token_count_is_the_servers_not_the_number_of_chunks() {
        let mut tally = Tally::default();
        tally.take(&finished(&[(10, None)], Some(64), Ok(())));
        assert_eq!((tally.output_tokens, tally.source()), (64, TokenSource::Usage));
        tally.take(&finished(&[(10, None)], None, Ok(())));
        assert_eq!((tally.output_tokens, tally.source()), (66, TokenSource::Mixed));
    }

    #[test]
    fn a_failure_adds_nothing_but_itself() {
        let mut tally = Tally::default();
        tally.take(&finished(&[(1, None)], Some(2), Err(Failure::Status(503, "busy".into()))));
        tally.take(&finished(&[(1, None)], Some(2), Err(Failure::Timeout)));
        tally.take(&finished(&[(1, None)], Some(2), Err(Failure::Status(503, "full".into()))));
        assert_eq!((tally.ok, tally.failed, tally.output_tokens), (0, 3, 0));
        assert!(tally.ttft.distribution().is_none() && tally.itl().is_none());
        let rows: Vec<(String, u64, String)> = tally.failures().into_iter().map(|row| (row.kind, row.count, row.example)).collect();
        assert_eq!(rows[0], ("http_503".into(), 2, "busy".into()));
        assert_eq!(rows[1].0, "timeout");
    }

    #[test]
    fn quantiles_are_nearest_rank_and_p999_needs_ten_samples_beyond_it() {
        let mut samples = Samples::default();
        (1..=200).rev().for_each(|value| samples.push(ms(value)));
        let d = samples.distribution().unwrap();
        assert_eq!((d.n, d.p50, d.p90, d.p95, d.p99, d.max, d.p999), (200, 100.0, 180.0, 190.0, 198.0, 200.0, None));
        (1..=9_800).for_each(|value| samples.push(ms(value)));
        assert!(samples.distribution().unwrap().p999.is_some());
        assert!(Samples::default().distribution().is_none());
    }
}
