//! When requests are meant to start. Pure: a rate, a process and a seed in, offsets from the start of the run out.
//!
//! The schedule is fixed before the first request is sent and nothing that the server does can change it: no arrival is
//! dropped, merged or moved. (Clients that take the clock inside a semaphore measure a slow server as a fast one.)

use std::time::Duration;

use rand::Rng;

/// How gaps between arrivals are drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Process {
    /// Independent exponential gaps: what many users who don't know of each other look like.
    Poisson,
    /// Equal gaps, the first arrival at once.
    Constant,
}

/// Where a schedule ends: at whichever bound comes first. At least one must be set, or the schedule is empty.
#[derive(Debug, Clone, Copy, Default)]
pub struct Bounds {
    pub arrivals: Option<usize>,
    pub span: Option<Duration>,
}

/// Offsets of all arrivals from the start, ascending. `rate` in arrivals per second, finite and above zero.
pub fn offsets(process: Process, rate: f64, bounds: Bounds, rng: &mut impl Rng) -> Vec<Duration> {
    if (bounds.arrivals.is_none() && bounds.span.is_none()) || !rate.is_finite() || rate <= 0.0 {
        return Vec::new();
    }
    let count = bounds.arrivals.unwrap_or(usize::MAX);
    let span = bounds.span.map_or(f64::INFINITY, |span| span.as_secs_f64());
    let mut out = Vec::new();
    let mut at = 0.0;
    while out.len() < count {
        match process {
            // 1 - u lies in (0, 1], so the logarithm is finite.
            Process::Poisson => at += -(1.0 - rng.random::<f64>()).ln() / rate,
            // From the index, not by adding up: no drift.
            Process::Constant => at = out.len() as f64 / rate,
        }
        if at >= span {
            break;
        }
        out.push(Duration::from_secs_f64(at));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;
    use rand::rngs::StdRng;

    fn gaps(offsets: &[Duration]) -> Vec<f64> {
        let starts = std::iter::once(Duration::ZERO).chain(offsets.iter().copied());
        starts.zip(offsets).map(|(a, b)| (*b - a).as_secs_f64()).collect()
    }

    #[test]
    fn poisson_gaps_have_the_mean_and_variance_of_an_exponential() {
        let (rate, n) = (8.0, 40_000);
        let bounds = Bounds { arrivals: Some(n), span: None };
        let offsets = offsets(Process::Poisson, rate, bounds, &mut StdRng::seed_from_u64(1));
        let gaps = gaps(&offsets);
        let mean = gaps.iter().sum::<f64>() / n as f64;
        let var = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / n as f64;
        // The standard error of the mean is 0.5 %, of the variance sqrt(8 / n) = 1.4 %: four of each.
        assert!((mean * rate - 1.0).abs() < 0.02, "mean gap {mean}");
        assert!((var * rate * rate - 1.0).abs() < 0.06, "variance of gaps {var}");
    }

    #[test]
    fn poisson_counts_in_windows_have_variance_equal_to_their_mean() {
        let bounds = Bounds { arrivals: None, span: Some(Duration::from_secs(4_000)) };
        let offsets = offsets(Process::Poisson, 5.0, bounds, &mut StdRng::seed_from_u64(2));
        let mut counts = vec![0f64; 4_000];
        offsets.iter().for_each(|at| counts[at.as_secs() as usize] += 1.0);
        let mean = counts.iter().sum::<f64>() / counts.len() as f64;
        let var = counts.iter().map(|count| (count - mean).powi(2)).sum::<f64>() / counts.len() as f64;
        assert!((mean - 5.0).abs() < 0.15, "mean {mean}");
        assert!((var / mean - 1.0).abs() < 0.1, "index of dispersion {}", var / mean);
    }

    #[test]
    fn constant_arrivals_do_not_drift() {
        let bounds = Bounds { arrivals: None, span: Some(Duration::from_secs(1_000)) };
        let offsets = offsets(Process::Constant, 3.0, bounds, &mut StdRng::seed_from_u64(3));
        assert_eq!(offsets.len(), 3_000);
        assert!((offsets[2_999].as_secs_f64() - 2_999.0 / 3.0).abs() < 1e-6);
    }

    #[test]
    fn the_same_seed_gives_the_same_schedule_and_another_seed_another() {
        let make = |seed| offsets(Process::Poisson, 2.0, Bounds { arrivals: Some(50), span: None }, &mut StdRng::seed_from_u64(seed));
        assert_eq!(make(7), make(7));
        assert_ne!(make(7), make(8));
    }

    #[test]
    fn without_a_bound_or_a_rate_there_are_no_arrivals() {
        let rng = &mut StdRng::seed_from_u64(4);
        assert!(offsets(Process::Poisson, 2.0, Bounds::default(), rng).is_empty());
        assert!(offsets(Process::Poisson, 0.0, Bounds { arrivals: Some(3), span: None }, rng).is_empty());
    }
}
