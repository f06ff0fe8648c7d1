use std::time::Duration;

/// Priorities beyond this count as this, so that ageing catches up with everyone in bounded time.
const MAX_PRIORITY: i32 = 100;

/// Choices that trade one client's time against another's. None of them changes what a sequence says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Policy {
    /// Waiting for so long is worth one level of priority; zero: priorities are absolute, and the lowest may starve.
    /// Levels beyond ±100 count as ±100.
    pub ageing: Duration,
    /// Sequences for which there is no room that others behind them may pass at a time; 0: strictly in order.
    pub bypass_depth: usize,
    /// How many others may pass a sequence that waits for room,
    pub bypass_passes: u32,
    /// and for how long after it was first found too large; then nobody passes it any more.
    pub bypass_for: Duration,
    /// Share of the expected growth of running sequences that admission leaves room for; 0: none.
    pub growth_reserve: f64,
    /// A sequence is expected to grow by at most so many tokens.
    pub growth_cap: usize,
    /// Prompt rows that a step computes beside decodes at least, whatever the target for the time between tokens.
    pub prefill_floor: usize,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            ageing: Duration::from_secs(5),
            bypass_depth: 4,
            bypass_passes: 16,
            bypass_for: Duration::from_secs(2),
            growth_reserve: 0.75,
            growth_cap: 1024,
            prefill_floor: 2,
        }
    }
}

impl Policy {
    /// First come, first served, and everyone in who fits: the rule without its refinements.
    #[must_use]
    pub fn plain() -> Self {
        Self { ageing: Duration::ZERO, bypass_depth: 0, growth_reserve: 0.0, ..Self::default() }
    }

    /// Order of a sequence, lower first. Everybody who waits ages at the same rate, so who stands before whom never
    /// changes, and the queue needs no sorting: a level of priority is a head start of `ageing`.
    pub(super) fn score(&self, priority: i32, arrived: Duration) -> i64 {
        if self.ageing.is_zero() {
            return i64::from(priority);
        }
        let micros = |time: Duration| i64::try_from(time.as_micros()).unwrap_or(i64::MAX);
        let start = i64::from(priority.clamp(-MAX_PRIORITY, MAX_PRIORITY)).saturating_mul(micros(self.ageing));
        start.saturating_add(micros(arrived))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_level_is_a_head_start_and_the_extremes_are_bounded() {
        let policy = Policy { ageing: Duration::from_secs(5), ..Policy::default() };
        let at = Duration::from_secs;
        assert!(policy.score(0, at(4)) < policy.score(1, at(0)), "one level better, four seconds later");
        assert!(policy.score(1, at(0)) < policy.score(0, at(6)), "but not six");
        assert!(policy.score(i32::MAX, at(0)) < policy.score(i32::MIN, at(1001)), "a thousand seconds catch up with anything");
        let absolute = Policy { ageing: Duration::ZERO, ..policy };
        assert!(absolute.score(0, at(1_000_000)) < absolute.score(1, at(0)));
    }
}
