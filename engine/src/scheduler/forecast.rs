//! How much KV memory the running sequences are going to want at once.

const BUCKETS: usize = 24;
/// Lengths that are remembered; then the older half counts half.
const WINDOW: u64 = 512;
/// Lengths below which nothing is expected of the next.
const ENOUGH: u64 = 16;

/// Lengths of outputs that ended, by powers of two.
#[derive(Clone, Debug, Default)]
pub(super) struct OutputLengths {
    /// Number and sum of the lengths in each bucket,
    buckets: [(u64, u64); BUCKETS],
    /// and in it and all above.
    above: [(u64, u64); BUCKETS],
}

fn bucket(len: usize) -> usize {
    ((usize::BITS - len.leading_zeros()) as usize).min(BUCKETS - 1)
}

impl OutputLengths {
    pub fn record(&mut self, len: usize) {
        let entry = &mut self.buckets[bucket(len)];
        *entry = (entry.0 + 1, entry.1 + len as u64);
        if self.above[0].0 + 1 >= WINDOW {
            for (count, sum) in &mut self.buckets {
                let half = *count / 2;
                *sum = (*sum * half).checked_div(*count).unwrap_or(0);
                *count = half;
            }
        }
        let mut total = (0, 0);
        for (entry, above) in self.buckets.iter().zip(&mut self.above).rev() {
            total = (total.0 + entry.0, total.1 + entry.1);
            *above = total;
        }
    }

    /// Tokens that an output of `done` tokens is still expected to grow by; `None` while too little is known.
    pub fn remaining(&self, done: usize) -> Option<usize> {
        if self.above[0].0 < ENOUGH {
            return None;
        }
        for (count, sum) in self.above.iter().skip(bucket(done)).take(2) {
            let mean = sum.checked_div(*count).unwrap_or(0) as usize;
            if mean > done {
                return Some(mean - done);
            }
        }
        // Longer than all that is known: what has lasted long lasts long.
        Some(done)
    }
}

/// What one sequence is going to hold: blocks that nobody else holds now (and all that groups which don't grow for ever
/// will hold), and tokens to come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Demand {
    pub blocks: usize,
    pub remaining: usize,
}

/// The running sequences, as far as their future use of memory goes. They grow by a token a step and leave when they are
/// expected to end, so the most that they hold together is reached at one of these ends.
#[derive(Clone, Debug, Default)]
pub(super) struct Forecast {
    /// Who stays longest comes first.
    demands: Vec<Demand>,
    /// Blocks that stay in use whoever leaves: shared ones.
    pub fixed: usize,
}

impl Forecast {
    pub fn clear(&mut self) {
        self.demands.clear();
        self.fixed = 0;
    }

    /// Many at once: call [`sort`](Self::sort) after the last.
    pub fn push(&mut self, demand: Demand) {
        self.demands.push(demand);
    }

    pub fn sort(&mut self) {
        self.demands.sort_unstable_by_key(|demand| std::cmp::Reverse(demand.remaining));
    }

    pub fn insert(&mut self, demand: Demand) {
        let place = self.demands.partition_point(|other| other.remaining >= demand.remaining);
        self.demands.insert(place, demand);
    }

    /// The most blocks that will be in use at a time if `new` joins. A sequence that grows by a block takes one for each of
    /// `growing` cache groups.
    pub fn peak_with(&self, new: Demand, block_size: usize, growing: usize) -> usize {
        let place = self.demands.partition_point(|other| other.remaining >= new.remaining);
        let (longer, shorter) = self.demands.split_at(place);
        let (mut held, mut peak) = (0, 0);
        for (others, demand) in longer.iter().chain([&new]).chain(shorter).enumerate() {
            held += demand.blocks;
            peak = peak.max(held + growing * ((others + 1) * demand.remaining).div_ceil(block_size));
        }
        self.fixed + peak
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_expected_from_what_outlived_them() {
        let mut lengths = OutputLengths::default();
        (0..15).for_each(|_| lengths.record(10));
        assert_eq!(lengths.remaining(0), None);
        (0..5).for_each(|_| lengths.record(1000));
        assert_eq!(lengths.remaining(0), Some((15 * 10 + 5 * 1000) / 20));
        assert_eq!(lengths.remaining(100), Some(900), "the short ones have ended");
        assert_eq!(lengths.remaining(5000), Some(5000));
        (0..5000).for_each(|_| lengths.record(40));
        assert!(lengths.remaining(0).unwrap() < 60, "the past fades: {:?}", lengths.remaining(0));
    }

    #[test]
    fn the_peak_is_where_the_naive_walk_through_time_finds_it() {
        let demands = [(10, 64), (3, 16), (7, 200), (1, 0), (20, 16)].map(|(blocks, remaining)| Demand { blocks, remaining });
        let new = Demand { blocks: 5, remaining: 48 };
        let mut forecast = Forecast::default();
        demands[..3].iter().for_each(|demand| forecast.push(*demand));
        forecast.sort();
        demands[3..].iter().for_each(|demand| forecast.insert(*demand));
        forecast.fixed = 2;
        for growing in [0, 1, 3] {
            let naive = (0..=200)
                .map(|time| {
                    let alive = demands.iter().chain([&new]).filter(|demand| demand.remaining >= time);
                    let (count, held) = alive.fold((0, 0), |(count, held), demand| (count + 1, held + demand.blocks));
                    2 + held + growing * (count * time).div_ceil(16)
                })
                .max();
            assert_eq!(Some(forecast.peak_with(new, 16, growing)), naive);
        }
    }
}
