//! How many prompt rows a step may compute beside decodes, so that streams keep their time between tokens.

use std::time::Duration;

/// What is aimed at, of the target: step times scatter.
const AIM: f64 = 0.9;
/// Weight of the past, step by step.
const DECODE_MEMORY: f64 = 0.98;
const PREFILL_MEMORY: f64 = 0.9;
/// Prompt rows beside decodes before the cost of one is known.
const UNKNOWN: usize = 32;

/// Learns what steps cost: a fixed time, a time for each decode row, a time for each prompt row.
#[derive(Clone, Debug)]
pub(super) struct Pace {
    target: Option<f64>,
    floor: usize,
    // Sums over steps without prompt rows: weight, decode rows, their squares, seconds, seconds times decode rows.
    steps: f64,
    rows: f64,
    squares: f64,
    seconds: f64,
    product: f64,
    // Sums over steps with prompt rows: rows, and seconds beyond what their decodes cost.
    prefill_rows: f64,
    prefill_seconds: f64,
}

impl Pace {
    pub fn new(target: Option<Duration>, floor: usize) -> Self {
        Self {
            target: target.map(|target| target.as_secs_f64()),
            floor: floor.max(1),
            steps: 0.0,
            rows: 0.0,
            squares: 0.0,
            seconds: 0.0,
            product: 0.0,
            prefill_rows: 0.0,
            prefill_seconds: 0.0,
        }
    }

    /// A step of so many rows took so long.
    pub fn observe(&mut self, decode_rows: usize, prefill_rows: usize, elapsed: Duration) {
        if self.target.is_none() {
            return;
        }
        let seconds = elapsed.as_secs_f64();
        if prefill_rows > 0 {
            // Prompt rows cost more the further they are into the prompt, so the newest steps say most.
            self.prefill_rows = self.prefill_rows * PREFILL_MEMORY + prefill_rows as f64;
            self.prefill_seconds = self.prefill_seconds * PREFILL_MEMORY + (seconds - self.decode_seconds(decode_rows)).max(0.0);
            return;
        }
        let rows = decode_rows as f64;
        for (sum, value) in [
            (&mut self.steps, 1.0),
            (&mut self.rows, rows),
            (&mut self.squares, rows * rows),
            (&mut self.seconds, seconds),
            (&mut self.product, seconds * rows),
        ] {
            *sum = *sum * DECODE_MEMORY + value;
        }
    }

    /// What a step of decodes alone takes, on a line through what was seen; 0 while nothing was.
    fn decode_seconds(&self, decode_rows: usize) -> f64 {
        if self.steps == 0.0 {
            return 0.0;
        }
        let (rows, seconds) = (self.rows / self.steps, self.seconds / self.steps);
        let variance = self.squares / self.steps - rows * rows;
        let slope = if variance > 1e-3 { (self.product / self.steps - rows * seconds) / variance } else { 0.0 };
        // A row never makes a step shorter, nor longer than in proportion.
        let slope = slope.clamp(0.0, seconds / rows.max(1.0));
        seconds + slope * (decode_rows as f64 - rows)
    }

    /// Prompt rows that a step with so many decode rows may compute.
    pub fn prefill_rows(&self, decode_rows: usize) -> usize {
        let Some(target) = self.target.filter(|_| decode_rows > 0) else { return usize::MAX };
        if self.prefill_rows == 0.0 {
            return self.floor.max(UNKNOWN);
        }
        let room = AIM * target - self.decode_seconds(decode_rows);
        let row = (self.prefill_seconds / self.prefill_rows).max(1e-9);
        ((room / row).max(0.0) as usize).max(self.floor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cost(decode: usize, prefill: usize) -> Duration {
        Duration::from_micros((4_000 + 200 * decode + 150 * prefill) as u64)
    }

    #[test]
    fn steps_settle_below_the_target() {
        let mut pace = Pace::new(Some(Duration::from_millis(20)), 16);
        assert_eq!(pace.prefill_rows(0), usize::MAX, "nobody to protect");
        assert_eq!(pace.prefill_rows(8), UNKNOWN);
        for i in 0..300 {
            let decode = 1 + i % 24;
            let prefill = if i % 3 == 0 { pace.prefill_rows(decode) } else { 0 };
            let elapsed = cost(decode, prefill);
            if i > 100 && prefill > 0 {
                assert!((16..=20).contains(&elapsed.as_millis()), "{decode} and {prefill} rows: {elapsed:?}");
            }
            pace.observe(decode, prefill, elapsed);
        }
        // (18 - 4 - 8 * 0.2) / 0.15
        assert!((75..=90).contains(&pace.prefill_rows(8)), "{}", pace.prefill_rows(8));
        assert_eq!(pace.prefill_rows(500), 16, "the decodes alone take longer: the prompt goes on all the same");
    }

    #[test]
    fn it_follows_a_machine_that_gets_slower() {
        let mut pace = Pace::new(Some(Duration::from_millis(20)), 16);
        for _ in 0..50 {
            pace.observe(8, 0, cost(8, 0));
            pace.observe(8, 60, cost(8, 60));
        }
        for _ in 0..50 {
            pace.observe(8, 60, 2 * cost(8, 60));
        }
        let rows = pace.prefill_rows(8);
        assert!(2 * cost(8, rows) < Duration::from_millis(22), "{rows} rows");
    }

    #[test]
    fn without_a_target_nothing_is_capped() {
        let mut pace = Pace::new(None, 16);
        pace.observe(8, 60, cost(8, 60));
        assert_eq!(pace.prefill_rows(8), usize::MAX);
    }
}
