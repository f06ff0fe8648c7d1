//! What a soak found, and whether it holds.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::Serialize;

use super::{Holding, Kind, Look, Soak};

/// Ends of the requests of a kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    pub sent: u64,
    pub answered: u64,
    pub left: u64,
    pub late: u64,
    pub refused: u64,
    pub unexpected: u64,
}

/// Resident memory after the first fifth of the requests and at the end: medians of the looks around there.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Memory {
    pub fifth_kib: u64,
    pub end_kib: u64,
    /// After the first fifth.
    pub peak_kib: u64,
    /// End against fifth, in per cent.
    pub growth: f64,
    pub fifth_threads: u64,
    pub end_threads: u64,
    pub peak_descriptors: u64,
}

/// The whole story.
#[derive(Debug, Clone, Serialize)]
pub struct SoakReport {
    pub requests: usize,
    pub warmup: usize,
    pub concurrency: usize,
    pub seed: u64,
    pub seconds: f64,
    pub kinds: BTreeMap<Kind, Counts>,
    /// Choices that came to the engine, and that ended there, by its own metrics.
    pub arrived: u64,
    pub ended: u64,
    pub hit_tokens: u64,
    pub preemptions: u64,
    /// What was still held at the end, by the server's own figures.
    pub busy: Vec<String>,
    pub memory: Option<Memory>,
    pub idle_before: Option<Holding>,
    pub idle_after: Option<Holding>,
    pub unexpected: Vec<String>,
    /// What does not hold; empty: all is well.
    pub faults: Vec<String>,
}

const AT_REST: [&str; 3] = ["quire_requests_running", "quire_requests_waiting", "quire_kv_blocks_used"];
/// Descriptors that a server at rest may have more than before: the connection that asks, and what opened once.
const SLACK: u64 = 4;

/// Figures that are not 0 although nothing is asked.
pub(crate) fn busy(figures: &BTreeMap<String, f64>) -> Vec<String> {
    let held = AT_REST.iter().filter(|name| figures.get(**name).is_none_or(|value| *value != 0.0));
    held.map(|name| format!("{name} = {:?}", figures.get(*name))).collect()
}

impl SoakReport {
    pub(crate) fn new(
        soak: &Soak,
        kinds: BTreeMap<Kind, Counts>,
        unexpected: Vec<String>,
        seconds: f64,
        looks: &[Look],
        (before, after): (&BTreeMap<String, f64>, &BTreeMap<String, f64>),
        (idle_before, idle_after): (Option<Holding>, Option<Holding>),
    ) -> Self {
        let value = |figures: &BTreeMap<String, f64>, name: &str| figures.get(name).copied().unwrap_or(0.0);
        let grown = |name: &str| (value(after, name) - value(before, name)).max(0.0) as u64;
        let mut report = Self {
            requests: soak.requests,
            warmup: soak.warmup,
            concurrency: soak.concurrency,
            seed: soak.seed,
            seconds,
            arrived: grown("quire_request_choices_sum"),
            ended: grown("quire_requests_finished_total"),
            hit_tokens: grown("quire_prefix_cache_hit_tokens_total"),
            preemptions: grown("quire_preemptions_total"),
            busy: busy(after),
            memory: memory(soak, looks),
            idle_before,
            idle_after,
            unexpected,
            kinds,
            faults: Vec::new(),
        };
        report.judge(soak);
        report
    }

    /// Sums over all kinds.
    #[must_use]
    pub fn all(&self) -> Counts {
        self.kinds.values().fold(Counts::default(), |sum, one| Counts {
            sent: sum.sent + one.sent,
            answered: sum.answered + one.answered,
            left: sum.left + one.left,
            late: sum.late + one.late,
            refused: sum.refused + one.refused,
            unexpected: sum.unexpected + one.unexpected,
        })
    }

    fn judge(&mut self, soak: &Soak) {
        let all = self.all();
        let mut faults = Vec::new();
        let mut check = |holds: bool, what: String| {
            if !holds {
                faults.push(what);
            }
        };
        let wanted = soak.warmup + soak.requests;
        check(all.sent == wanted as u64, format!("{} of {wanted} requests were sent", all.sent));
        check(all.unexpected == 0, format!("{} unexpected ends", all.unexpected));
        check(self.arrived > 0, "the server's metrics name no requests".into());
        check(self.arrived == self.ended, format!("{} choices came to the engine, {} ended", self.arrived, self.ended));
        check(self.busy.is_empty(), format!("still held at the end: {}", self.busy.join(", ")));
        if let (Some(before), Some(after)) = (self.idle_before, self.idle_after) {
            let most = before.descriptors + SLACK;
            check(after.descriptors <= most, format!("{} descriptors at rest, {} before", after.descriptors, before.descriptors));
        }
        if let Some(memory) = &self.memory {
            check(memory.growth < soak.max_growth, format!("resident memory grew by {:.2} % after the first fifth", memory.growth));
            check(memory.end_threads <= memory.fifth_threads, format!("threads: {} to {}", memory.fifth_threads, memory.end_threads));
        }
        self.faults = faults;
    }

    /// Nothing is wrong.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.faults.is_empty()
    }

    /// For people.
    #[must_use]
    pub fn table(&self) -> String {
        let mut out = String::new();
        let _ = writeln!(
            out,
            "{} requests after {} to warm up, {} at a time, {:.0} s, {:.0} a second, seed {}",
            self.requests,
            self.warmup,
            self.concurrency,
            self.seconds,
            (self.warmup + self.requests) as f64 / self.seconds.max(1e-9),
            self.seed
        );
        let _ = writeln!(out, "kind           sent  answered      left      late   refused  unexpected");
        let mut row = |name: &str, c: &Counts| {
            let _ = writeln!(
                out,
                "{name:<10} {:>8}  {:>8}  {:>8}  {:>8}  {:>8}  {:>10}",
                c.sent, c.answered, c.left, c.late, c.refused, c.unexpected
            );
        };
        for (kind, counts) in &self.kinds {
            row(&format!("{kind:?}").to_lowercase(), counts);
        }
        row("all", &self.all());
        let _ = writeln!(
            out,
            "engine: {} choices came, {} ended; {} prompt tokens found in the cache; {} preemptions",
            self.arrived, self.ended, self.hit_tokens, self.preemptions
        );
        if let Some(m) = &self.memory {
            let _ = writeln!(
                out,
                "resident: {} KiB after a fifth, {} KiB at the end ({:+.2} %), peak {} KiB; threads {} and {}; descriptors at most {}",
                m.fifth_kib, m.end_kib, m.growth, m.peak_kib, m.fifth_threads, m.end_threads, m.peak_descriptors
            );
        }
        if let (Some(before), Some(after)) = (self.idle_before, self.idle_after) {
            let _ = writeln!(out, "at rest: {} descriptors before, {} after", before.descriptors, after.descriptors);
        }
        for what in &self.unexpected {
            let _ = writeln!(out, "  unexpected: {what}");
        }
        let _ = writeln!(out, "{}", if self.holds() { "holds".to_owned() } else { format!("DOES NOT HOLD: {}", self.faults.join("; ")) });
        out
    }
}

/// `None` without looks around both places.
fn memory(soak: &Soak, looks: &[Look]) -> Option<Memory> {
    let share = |look: &Look| (look.done as f64 - soak.warmup as f64) / soak.requests.max(1) as f64;
    let among = |from: f64, to: f64| looks.iter().filter(move |look| (from..=to).contains(&share(look)));
    let median = |from: f64, to: f64, of: fn(&Holding) -> u64| {
        let mut values: Vec<u64> = among(from, to).map(|look| of(&look.holding)).collect();
        values.sort_unstable();
        values.get(values.len() / 2).copied()
    };
    let (fifth, end) = ((0.18, 0.24), (0.97, 1.0));
    let (fifth_kib, end_kib) = (median(fifth.0, fifth.1, |h| h.kib)?, median(end.0, end.1, |h| h.kib)?);
    Some(Memory {
        fifth_kib,
        end_kib,
        peak_kib: among(0.2, 1.0).map(|look| look.holding.kib).max()?,
        growth: (end_kib as f64 / fifth_kib.max(1) as f64 - 1.0) * 100.0,
        fifth_threads: median(fifth.0, fifth.1, |h| h.threads)?,
        end_threads: median(end.0, end.1, |h| h.threads)?,
        peak_descriptors: looks.iter().map(|look| look.holding.descriptors).max()?,
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn soak() -> Soak {
        Soak {
            url: String::new(),
            pid: None,
            requests: 100,
            warmup: 10,
            concurrency: 4,
            seed: 1,
            timeout: Duration::from_secs(1),
            max_growth: 2.0,
        }
    }

    fn figures(arrived: f64, ended: f64, used: f64) -> BTreeMap<String, f64> {
        let pairs = [
            ("quire_request_choices_sum", arrived),
            ("quire_requests_finished_total", ended),
            ("quire_requests_running", 0.0),
            ("quire_requests_waiting", 0.0),
            ("quire_kv_blocks_used", used),
        ];
        pairs.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }

    fn report(after: &BTreeMap<String, f64>, sent: u64, end_kib: u64) -> SoakReport {
        let looks: Vec<Look> = (0..=110)
            .map(|done| Look { done, holding: Holding { kib: if done > 50 { end_kib } else { 1000 }, descriptors: 9, threads: 5 } })
            .collect();
        let counts = Counts { sent, answered: sent, ..Counts::default() };
        let idle = Some(looks[0].holding);
        SoakReport::new(&soak(), [(Kind::Whole, counts)].into(), Vec::new(), 1.0, &looks, (&figures(5.0, 5.0, 0.0), after), (idle, idle))
    }

    #[test]
    fn each_fault_is_found() {
        let good = report(&figures(105.0, 105.0, 0.0), 110, 1010);
        assert!(good.holds(), "{:?}", good.faults);
        assert_eq!((good.arrived, good.memory.unwrap().growth.round()), (100, 1.0));
        assert!(!report(&figures(105.0, 104.0, 0.0), 110, 1000).holds(), "a choice is lost");
        assert!(!report(&figures(105.0, 105.0, 1.0), 110, 1000).holds(), "a block is held");
        assert!(!report(&figures(105.0, 105.0, 0.0), 99, 1000).holds(), "a request was not sent");
        assert!(!report(&figures(105.0, 105.0, 0.0), 110, 1030).holds(), "memory grew");
        assert!(!report(&BTreeMap::new(), 110, 1000).holds(), "no figures");
    }
}
