//! How positions turn queries and keys.

use quire_kernels::backend::RopeStyle;

/// Other frequencies for long contexts.
#[derive(Clone, Debug, PartialEq)]
pub struct LongRope {
    /// They hold where sequences may grow longer than this.
    pub above: usize,
    pub frequencies: Vec<f32>,
}

/// One kind of rotation.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    pub style: RopeStyle,
    /// Radians per position of each pair; twice as many elements of a head turn, from its start.
    pub frequencies: Vec<f32>,
    /// Multiplies cos and sin.
    pub magnitude: f32,
    pub long: Option<LongRope>,
}

impl Rope {
    /// base^(−2i / dim) for `dim` turning elements.
    #[must_use]
    pub fn new(style: RopeStyle, dim: usize, base: f64) -> Self {
        Self { style, frequencies: narrow(&frequencies(dim, base)), magnitude: 1.0, long: None }
    }

    /// Elements of a head that turn.
    #[must_use]
    pub fn dim(&self) -> usize {
        2 * self.frequencies.len()
    }

    /// The frequencies of a worker whose sequences grow to `context` tokens at most. One choice for all sequences: cached
    /// keys are shared between long and short ones.
    #[must_use]
    pub fn frequencies_for(&self, context: usize) -> &[f32] {
        match &self.long {
            Some(long) if context > long.above => &long.frequencies,
            _ => &self.frequencies,
        }
    }
}

/// base^(−2i / dim).
#[must_use]
pub fn frequencies(dim: usize, base: f64) -> Vec<f64> {
    (0..dim / 2).map(|i| base.powf(-2.0 * i as f64 / dim as f64)).collect()
}

pub fn narrow(values: &[f64]) -> Vec<f32> {
    values.iter().map(|value| *value as f32).collect()
}

/// Llama 3.1: long waves are stretched, short ones kept, and those between blended.
#[derive(Clone, Copy, Debug)]
pub struct Llama3 {
    pub factor: f64,
    pub low_frequency_factor: f64,
    pub high_frequency_factor: f64,
    pub original_context: f64,
}

impl Llama3 {
    pub fn apply(&self, frequencies: &mut [f64]) {
        for frequency in frequencies {
            let turns = self.original_context * *frequency / std::f64::consts::TAU;
            let smooth = (turns - self.low_frequency_factor) / (self.high_frequency_factor - self.low_frequency_factor);
            let smooth = smooth.clamp(0.0, 1.0);
            *frequency = (1.0 - smooth) * *frequency / self.factor + smooth * *frequency;
        }
    }
}

/// YaRN (Peng et al. 2023): pairs that turn rarely over the original context are interpolated, those that turn often kept.
#[derive(Clone, Copy, Debug)]
pub struct Yarn {
    pub factor: f64,
    pub beta_fast: f64,
    pub beta_slow: f64,
    pub original_context: f64,
    /// The ramp's ends are whole pairs.
    pub truncate: bool,
}

impl Yarn {
    pub fn apply(&self, frequencies: &mut [f64], base: f64) {
        let dim = 2.0 * frequencies.len() as f64;
        let pair_of = |turns: f64| dim * (self.original_context / (turns * std::f64::consts::TAU)).ln() / (2.0 * base.ln());
        let (mut low, mut high) = (pair_of(self.beta_fast), pair_of(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(dim - 1.0));
        if low == high {
            high += 0.001;
        }
        for (i, frequency) in frequencies.iter_mut().enumerate() {
            let stretched = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
            *frequency = *frequency / self.factor * stretched + *frequency * (1.0 - stretched);
        }
    }

    /// 0.1 · scale · ln(factor) + 1.
    #[must_use]
    pub fn magnitude(factor: f64, scale: f64) -> f64 {
        if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From the reference implementation, 16 elements, base 50000, factor 8, 1, 4, original context 32.
    #[test]
    fn llama3_keeps_short_waves_and_stretches_long_ones() {
        let mut values = frequencies(16, 50_000.0);
        let plain = values.clone();
        Llama3 { factor: 8.0, low_frequency_factor: 1.0, high_frequency_factor: 4.0, original_context: 32.0 }.apply(&mut values);
        assert_eq!(values[0], plain[0], "5 turns over the original context");
        assert!(values[1] < plain[1] && values[1] > plain[1] / 8.0, "1.3 turns: between");
        assert_eq!(values[4], plain[4] / 8.0);
    }

    #[test]
    fn yarn_blends_between_the_ends_of_the_ramp() {
        let mut values = frequencies(64, 10_000.0);
        let plain = values.clone();
        let yarn = Yarn { factor: 4.0, beta_fast: 32.0, beta_slow: 1.0, original_context: 4096.0, truncate: true };
        yarn.apply(&mut values, 10_000.0);
        assert_eq!(values[0], plain[0]);
        assert_eq!(values[31], plain[31] / 4.0);
        let turns = |i: usize| 4096.0 * plain[i] / std::f64::consts::TAU;
        for i in 0..32 {
            if turns(i) > 40.0 {
                assert_eq!(values[i], plain[i]);
            }
            if turns(i) < 0.8 {
                assert_eq!(values[i], plain[i] / 4.0);
            }
        }
        assert!((Yarn::magnitude(4.0, 1.0) - 1.138_629).abs() < 1e-6);
    }

    #[test]
    fn a_long_context_takes_its_own_frequencies() {
        let mut rope = Rope::new(RopeStyle::Half, 4, 10_000.0);
        rope.long = Some(LongRope { above: 64, frequencies: vec![0.5, 0.25] });
        assert_eq!(rope.frequencies_for(64), &[1.0, 0.01]);
        assert_eq!(rope.frequencies_for(65), &[0.5, 0.25]);
    }
}
