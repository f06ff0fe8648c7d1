//! What a run found: one structure, written as JSON or as a table. Computes rates and the verdict; measures nothing.

use std::fmt::Write as _;
use std::time::Duration;

use serde::Serialize;

use crate::calibrate::Calibration;
use crate::client::{Ask, Endpoint};
use crate::drive::{Driven, Ended};
use crate::schedule::Process;
use crate::selftest::ClientError;
use crate::tally::{Distribution, FailureRow, Tally, TokenSource};

/// The form of the JSON; raised when a field changes its meaning.
pub const SCHEMA: u32 = 1;

/// What was asked for. The API key is left out on purpose.
#[derive(Debug, Clone, Serialize)]
pub struct Setup {
    pub url: String,
    pub endpoint: Endpoint,
    pub ask: Ask,
    /// In an open loop: the cap, if any.
    pub concurrency: Option<usize>,
    pub requests: Option<usize>,
    pub duration_s: Option<f64>,
    /// None: closed loop.
    pub rate: Option<f64>,
    pub arrivals: Option<Process>,
    pub input_tokens: u32,
    pub shared_prefix_tokens: u32,
    pub warmup: usize,
    pub seed: u64,
    pub timeout_s: f64,
    pub max_duration_s: f64,
    pub max_lag_ms: f64,
    pub calibration: Calibration,
}

#[derive(Debug, Clone, Copy, Serialize)]
pub struct Requests {
    /// Due within the run.
    pub offered: usize,
    pub sent: usize,
    pub ok: u64,
    pub failed: u64,
    /// Sent, but cut off by the end of the run.
    pub unfinished: u64,
}

#[derive(Debug, Clone, Copy, Serialize)]
pub struct Tokens {
    pub counted_by: TokenSource,
    pub prompt: u64,
    pub cached: u64,
    pub output: u64,
    pub prompt_mean: f64,
    pub output_mean: f64,
}

/// Of successful requests, over the time from the first intended start to the last end.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Throughput {
    pub requests_s: f64,
    pub output_tokens_s: f64,
    pub total_tokens_s: f64,
}

/// Milliseconds. None: no sample.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Latency {
    /// From the intended start.
    pub ttft: Option<Distribution>,
    pub itl: Option<Distribution>,
    pub tpot: Option<Distribution>,
    /// From the intended start.
    pub e2e: Option<Distribution>,
    pub ttft_from_send: Option<Distribution>,
    pub e2e_from_send: Option<Distribution>,
}

/// Open loop only.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Schedule {
    pub offered_rate: f64,
    /// Arrivals that came, over the time that they span.
    pub achieved_rate: Option<f64>,
    /// How late the client was, waiting for the cap left out.
    pub lag: Option<Distribution>,
    /// Waiting for the cap, if there is one.
    pub waited: Option<Distribution>,
}

/// Whether the figures mean what they say.
#[derive(Debug, Clone, Serialize)]
pub struct Verdict {
    pub valid: bool,
    pub reasons: Vec<String>,
}

#[derive(Debug, Clone, Serialize)]
pub struct Report {
    pub schema: u32,
    pub version: &'static str,
    /// Seconds since 1970.
    pub finished_at: u64,
    pub setup: Setup,
    pub wall_s: f64,
    pub interrupted: bool,
    pub requests: Requests,
    pub failures: Vec<FailureRow>,
    pub tokens: Tokens,
    pub throughput: Throughput,
    pub latency_ms: Latency,
    pub schedule: Option<Schedule>,
    /// Against the mock only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_error: Option<ClientError>,
    pub verdict: Verdict,
    pub notes: Vec<String>,
}

impl Report {
    /// `offered`: arrivals due in the run, as the schedule or the request count has it.
    pub fn new(setup: Setup, offered: usize, driven: &Driven, tally: &Tally) -> Report {
        let since = |end: std::time::Instant| end.saturating_duration_since(tally.first_start.unwrap_or(driven.started));
        let wall = tally.last_end.map_or(Duration::ZERO, since).as_secs_f64();
        let per_s = |count: u64| if wall > 0.0 { count as f64 / wall } else { 0.0 };
        let mean = |sum: u64| if tally.ok > 0 { sum as f64 / tally.ok as f64 } else { 0.0 };
        let finished = tally.ok + tally.failed;
        let requests = Requests {
            offered,
            sent: driven.sent,
            ok: tally.ok,
            failed: tally.failed,
            unfinished: (driven.sent as u64).saturating_sub(finished),
        };
        let schedule = setup.rate.map(|offered_rate| {
            let span = tally.first_start.zip(tally.last_start).map(|(first, last)| (last - first).as_secs_f64());
            Schedule {
                offered_rate,
                achieved_rate: span.filter(|span| *span > 0.0).map(|span| finished.saturating_sub(1) as f64 / span),
                lag: tally.lag.distribution(),
                waited: setup.concurrency.and_then(|_| tally.waited.distribution()),
            }
        });
        Report {
            schema: SCHEMA,
            version: env!("CARGO_PKG_VERSION"),
            finished_at: std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |age| age.as_secs()),
            wall_s: wall,
            interrupted: driven.ended == Ended::Interrupted,
            failures: tally.failures(),
            tokens: Tokens {
                counted_by: tally.source(),
                prompt: tally.prompt_tokens,
                cached: tally.cached_tokens,
                output: tally.output_tokens,
                prompt_mean: mean(tally.prompt_tokens),
                output_mean: mean(tally.output_tokens),
            },
            throughput: Throughput {
                requests_s: per_s(tally.ok),
                output_tokens_s: per_s(tally.output_tokens),
                total_tokens_s: per_s(tally.prompt_tokens + tally.output_tokens),
            },
            latency_ms: Latency {
                ttft: tally.ttft.distribution(),
                itl: tally.itl(),
                tpot: tally.tpot.distribution(),
                e2e: tally.e2e.distribution(),
                ttft_from_send: tally.ttft_from_send.distribution(),
                e2e_from_send: tally.e2e_from_send.distribution(),
            },
            client_error: None,
            verdict: verdict(&setup, &requests, driven, schedule.as_ref()),
            notes: notes(&setup, tally, driven),
            requests,
            schedule,
            setup,
        }
    }

    /// Something succeeded, nothing failed, and the figures hold.
    pub fn is_clean(&self) -> bool {
        self.verdict.valid && self.requests.ok > 0 && self.requests.failed == 0
    }

    /// Pretty-printed, with a newline at the end.
    pub fn json(&self) -> String {
        // The report holds no map with keys other than strings, so this can't fail.
        serde_json::to_string_pretty(self).unwrap_or_default() + "\n"
    }

    /// For people.
    pub fn table(&self) -> String {
        let mut out = String::new();
        // Writing to a string can't fail.
        let _ = self.write_table(&mut out);
        out
    }

    fn write_table(&self, out: &mut String) -> std::fmt::Result {
        let Report { setup, requests, tokens, throughput, latency_ms: ms, .. } = self;
        writeln!(out, "{}  model {}", setup.url, setup.ask.model)?;
        let bound = match (setup.requests, setup.duration_s) {
            (Some(requests), None) => format!("{requests} requests"),
            (None, Some(seconds)) => format!("{seconds} s"),
            (Some(requests), Some(seconds)) => format!("{requests} requests or {seconds} s"),
            (None, None) => String::new(),
        };
        match (setup.rate, setup.arrivals) {
            (Some(rate), Some(process)) => {
                let cap = setup.concurrency.map_or(String::new(), |cap| format!(", at most {cap} at once"));
                write!(out, "open loop: {rate}/s {}{cap}, {bound}", format!("{process:?}").to_lowercase())?;
            }
            _ => write!(out, "closed loop: {} at a time, {bound}", setup.concurrency.unwrap_or(1))?,
        }
        writeln!(out, "; seed {}\n", setup.seed)?;
        writeln!(
            out,
            "requests    {} ok, {} failed, {} unfinished, of {} due, in {:.2} s",
            requests.ok, requests.failed, requests.unfinished, requests.offered, self.wall_s
        )?;
        writeln!(
            out,
            "throughput  {:.1} output tokens/s, {:.1} tokens/s in all, {:.2} requests/s",
            throughput.output_tokens_s, throughput.total_tokens_s, throughput.requests_s
        )?;
        writeln!(
            out,
            "tokens      {:.1} in ({} asked), {:.1} out (at most {}), {} cached; counted by {}\n",
            tokens.prompt_mean,
            setup.input_tokens + setup.shared_prefix_tokens,
            tokens.output_mean,
            setup.ask.max_tokens,
            tokens.cached,
            format!("{:?}", tokens.counted_by).to_lowercase()
        )?;
        writeln!(out, "{:<15}{:>10}{:>10}{:>10}{:>10}{:>10}{:>10}{:>9}", "ms", "p50", "p90", "p95", "p99", "mean", "max", "n")?;
        row(out, "TTFT", ms.ttft.as_ref())?;
        row(out, "ITL", ms.itl.as_ref())?;
        row(out, "TPOT", ms.tpot.as_ref())?;
        row(out, "E2E", ms.e2e.as_ref())?;
        if let Some(schedule) = &self.schedule {
            row(out, "TTFT from send", ms.ttft_from_send.as_ref())?;
            row(out, "E2E from send", ms.e2e_from_send.as_ref())?;
            row(out, "schedule lag", schedule.lag.as_ref())?;
            row(out, "wait for cap", schedule.waited.as_ref())?;
            let achieved = schedule.achieved_rate.map_or("unknown".into(), |rate| format!("{rate:.2}"));
            writeln!(
                out,
                "\narrivals    {} /s asked, {achieved} /s achieved; TTFT and E2E count from the intended start",
                schedule.offered_rate
            )?;
        }
        if let Some(error) = &self.client_error {
            writeln!(
                out,
                "\nthe client's own error, ms: TTFT p50 {:+.3}, p99 {:+.3}; ITL p50 {:+.3}, mean {:+.3}",
                error.ttft_p50, error.ttft_p99, error.itl_p50, error.itl_mean
            )?;
        }
        for failure in &self.failures {
            writeln!(out, "failed      {} x {}: {}", failure.count, failure.kind, failure.example)?;
        }
        self.notes.iter().try_for_each(|note| writeln!(out, "note        {note}"))?;
        self.verdict.reasons.iter().try_for_each(|reason| writeln!(out, "INVALID     {reason}"))
    }
}

fn row(out: &mut String, name: &str, values: Option<&Distribution>) -> std::fmt::Result {
    let Some(d) = values else { return Ok(()) };
    writeln!(out, "{name:<15}{:>10.1}{:>10.1}{:>10.1}{:>10.1}{:>10.1}{:>10.1}{:>9}", d.p50, d.p90, d.p95, d.p99, d.mean, d.max, d.n)
}

fn verdict(setup: &Setup, requests: &Requests, driven: &Driven, schedule: Option<&Schedule>) -> Verdict {
    let mut reasons = Vec::new();
    if let Some(lag) = schedule.and_then(|schedule| schedule.lag)
        && lag.p99 > setup.max_lag_ms
    {
        reasons.push(format!("the client was late: p99 of the schedule lag {:.1} ms, bound {} ms", lag.p99, setup.max_lag_ms));
    }
    if requests.ok == 0 {
        reasons.push("no request succeeded".into());
    }
    let missing = requests.offered as u64 - (requests.ok + requests.failed).min(requests.offered as u64);
    match driven.ended {
        Ended::Interrupted => reasons.push("interrupted: only what had come back is counted".into()),
        // The slowest are the ones missing, so every quantile is too good.
        Ended::TimeLimit if schedule.is_some() => reasons.push(format!("the time limit cut off {missing} arrivals, and those the slowest")),
        Ended::TimeLimit | Ended::Complete => {}
    }
    Verdict { valid: reasons.is_empty(), reasons }
}

fn notes(setup: &Setup, tally: &Tally, driven: &Driven) -> Vec<String> {
    let mut notes = Vec::new();
    if driven.ended == Ended::TimeLimit && setup.rate.is_none() {
        notes.push("the time limit was reached: requests under way are not counted".into());
    }
    match tally.source() {
        TokenSource::Deltas => notes.push("the server sent no usage: output tokens are chunks, and prompt tokens unknown".into()),
        TokenSource::Mixed => notes.push("some answers had no usage: their output tokens are chunks".into()),
        TokenSource::Usage | TokenSource::None => {}
    }
    if !setup.calibration.measured {
        notes.push("prompt lengths are a guess: the server's own count was not usable".into());
    }
    if tally.without_text > 0 {
        notes.push(format!("{} answers had tokens but no text, so no TTFT", tally.without_text));
    }
    if tally.ok > 0 && tally.ok < 100 {
        notes.push(format!("p99 of {} requests is their maximum", tally.ok));
    }
    notes
}
