//! What turns a row of logits into a token: the arithmetic that every backend must reproduce to the bit.
//!
//! [`crate::reference::sample`] is the definition; this module owns its parts: the exponential, the weights, the order of
//! candidates, the random numbers, and the changes that bias, mask and penalties make. It owns no buffer and no batch.
//!
//! Two choices make a fast sampler possible that agrees exactly with a slow one. The exponential is one fixed sequence of
//! single-precision operations, the same in every lane width. And weights are rounded to multiples of 2⁻³⁴ and summed in
//! double precision, which is exact for up to [`MAX_VOCABULARY`] of them: no sum depends on the order of its terms, so
//! neither threads nor partial selection can change a draw.

use crate::{KernelError, plan::SamplingPlan};

/// Largest vocabulary for which sums of weights are exact.
pub const MAX_VOCABULARY: usize = 1 << 19;

pub(crate) const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// ln 2 in two pieces (Cody and Waite): the first has few bits, so that its product with an exponent is exact.
pub(crate) const LN_2_HIGH: f32 = 355.0 / 512.0;
pub(crate) const LN_2_LOW: f32 = -2.121_944_4e-4;
/// Adding this rounds to an integer and leaves it in the low bits.
pub(crate) const ROUND: f32 = 12_582_912.0;
/// Below this the exponential is taken as zero (it would be subnormal).
pub(crate) const EXP_MIN: f32 = -87.0;
/// Cephes' expf polynomial, highest power first: exp(r) ≈ 1 + r + r²·p(r).
pub(crate) const EXP_POLY: [f32; 6] = [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 5e-1];
/// Adding and taking away this rounds a double below 2¹⁷ to a multiple of 2⁻³⁴.
pub(crate) const WEIGHT_ROUND: f64 = 393_216.0;

/// eˣ for x ≤ 88, within 1.2e-7 relative; 0 below [`EXP_MIN`]; NaN for NaN.
#[must_use]
pub fn exp(x: f32) -> f32 {
    if x < EXP_MIN {
        return 0.0;
    }
    let shifted = x.mul_add(LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN_2_LOW, n.mul_add(-LN_2_HIGH, x));
    let mut p = EXP_POLY[0];
    for c in &EXP_POLY[1..] {
        p = p.mul_add(r, *c);
    }
    let y = (p * r).mul_add(r, r) + 1.0;
    f32::from_bits(y.to_bits().wrapping_add(shifted.to_bits() << 23))
}

/// The weight of a logit in a softmax whose largest logit is `max`: exp((z − max) / temperature), rounded to a multiple
/// of 2⁻³⁴.
#[must_use]
pub fn weight(z: f32, max: f32, temperature: f32) -> f64 {
    let w = f64::from(exp((z - max) / temperature));
    (w + WEIGHT_ROUND) - WEIGHT_ROUND
}

/// Sorts candidates likeliest first, equal logits by id: ascending keys.
#[must_use]
pub fn order_key(z: f32, id: u32) -> u64 {
    let bits = (z + 0.0).to_bits();
    let ascending = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    u64::from(!ascending) << 32 | u64::from(id)
}

/// The logit and the id that [`order_key`] packed.
#[must_use]
pub fn from_order_key(key: u64) -> (f32, u32) {
    let ascending = !((key >> 32) as u32);
    let bits = if ascending >> 31 == 1 { ascending & !(1 << 31) } else { !ascending };
    (f32::from_bits(bits), key as u32)
}

/// A uniform number in [0, 1): draw `draw` of stream `seed`.
///
/// Counter-based, so that a draw depends on nothing but its place: two rounds of the splitmix64 finaliser (Steele, Lea and
/// Flood 2014), the first over the seed, the second over its result plus `draw` golden-ratio steps; 53 bits are kept.
#[must_use]
pub fn uniform(seed: u64, draw: u32) -> f64 {
    const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;
    fn mix(mut z: u64) -> u64 {
        z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }
    let stream = mix(seed.wrapping_add(GOLDEN));
    let bits = mix(stream.wrapping_add(GOLDEN.wrapping_mul(u64::from(draw) + 1)));
    (bits >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

/// Natural log of a token's probability, given its logit, the row's largest logit and the sum of weights at temperature 1.
/// In double precision, rounded once.
#[must_use]
pub fn logprob(z: f32, max: f32, total: f64) -> f32 {
    (f64::from(z) - f64::from(max) - total.ln()) as f32
}

/// The parameters of one logit row.
#[derive(Clone, Copy, Debug)]
pub struct RowParams<'a> {
    pub target: u32,
    pub temperature: f32,
    pub top_k: u32,
    pub top_p: f32,
    pub min_p: f32,
    pub presence: f32,
    pub frequency: f32,
    pub repetition: f32,
    pub seed: u64,
    pub draw: u32,
    pub logprobs: i32,
    pub bias_ids: &'a [u32],
    pub bias_values: &'a [f32],
    pub history_ids: &'a [u32],
    pub history_counts: &'a [u32],
    /// One bit per token; `None`: all may be drawn.
    pub mask: Option<&'a [u32]>,
}

impl RowParams<'_> {
    /// The two filters and the temperature leave the draw alone: the likeliest token is taken.
    #[must_use]
    pub fn greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// Nothing changes the logits before the draw.
    #[must_use]
    pub fn plain(&self) -> bool {
        self.bias_ids.is_empty() && self.mask.is_none() && (self.history_ids.is_empty() || !self.penalised())
    }

    fn penalised(&self) -> bool {
        self.repetition != 1.0 || self.presence != 0.0 || self.frequency != 0.0
    }

    /// Changes the logits in this order: bias is added; masked tokens become −∞; tokens of the prompt and the output are
    /// divided (positive) or multiplied (others) by the repetition penalty; tokens of the output lose frequency × count,
    /// then presence.
    pub fn adjust(&self, logits: &mut [f32]) {
        for (&id, &value) in self.bias_ids.iter().zip(self.bias_values) {
            logits[id as usize] += value;
        }
        if let Some(mask) = self.mask {
            for (word, values) in mask.iter().zip(logits.chunks_mut(32)) {
                if *word != u32::MAX {
                    for (bit, value) in values.iter_mut().enumerate() {
                        if word >> bit & 1 == 0 {
                            *value = f32::NEG_INFINITY;
                        }
                    }
                }
            }
        }
        if !self.penalised() {
            return;
        }
        for (&id, &count) in self.history_ids.iter().zip(self.history_counts) {
            let z = &mut logits[id as usize];
            *z = if *z > 0.0 { *z / self.repetition } else { *z * self.repetition };
            if count > 0 {
                *z -= self.frequency * count as f32;
                *z -= self.presence;
            }
        }
    }
}

impl SamplingPlan {
    /// Parameters of logit row `row`, of a plan that [`check`](Self::check) accepted.
    #[must_use]
    pub fn row(&self, row: usize, vocabulary: usize) -> RowParams<'_> {
        let bias = self.bias_starts[row] as usize..self.bias_starts[row + 1] as usize;
        let history = self.history_starts[row] as usize..self.history_starts[row + 1] as usize;
        let words = vocabulary.div_ceil(32);
        RowParams {
            target: self.targets[row],
            temperature: self.temperature[row],
            top_k: self.top_k[row],
            top_p: self.top_p[row],
            min_p: self.min_p[row],
            presence: self.presence[row],
            frequency: self.frequency[row],
            repetition: self.repetition[row],
            seed: self.seed[row],
            draw: self.draw[row],
            logprobs: self.logprobs[row],
            bias_ids: &self.bias_ids[bias.clone()],
            bias_values: &self.bias_values[bias],
            history_ids: &self.history_ids[history.clone()],
            history_counts: &self.history_counts[history],
            mask: usize::try_from(self.mask_rows[row]).ok().map(|m| &self.masks[m * words..(m + 1) * words]),
        }
    }

    /// Checks lengths, offsets, ids and ranges for `rows` logit rows.
    pub fn check(&self, rows: usize, vocabulary: usize, top_logprobs: usize) -> Result<(), KernelError> {
        let lengths = [
            ("targets", self.targets.len()),
            ("temperature", self.temperature.len()),
            ("top_k", self.top_k.len()),
            ("top_p", self.top_p.len()),
            ("min_p", self.min_p.len()),
            ("presence", self.presence.len()),
            ("frequency", self.frequency.len()),
            ("repetition", self.repetition.len()),
            ("seed", self.seed.len()),
            ("draw", self.draw.len()),
            ("logprobs", self.logprobs.len()),
            ("mask_rows", self.mask_rows.len()),
        ];
        for (name, len) in lengths {
            require(len == rows, || format!("sampling.{name}: {len} entries for {rows} logit rows"))?;
        }
        offsets("sampling.bias_starts", &self.bias_starts, rows, self.bias_ids.len())?;
        offsets("sampling.history_starts", &self.history_starts, rows, self.history_ids.len())?;
        require(self.bias_values.len() == self.bias_ids.len(), || "sampling.bias_values: not as long as bias_ids".into())?;
        require(self.history_counts.len() == self.history_ids.len(), || "sampling.history_counts: not as long as history_ids".into())?;
        let known = |id: u32| (id as usize) < vocabulary;
        require(self.targets.iter().all(|&id| id == crate::plan::NO_TOKEN || known(id)), || {
            "sampling.targets: outside the vocabulary".into()
        })?;
        require(self.bias_ids.iter().all(|&id| known(id)), || "sampling.bias_ids: outside the vocabulary".into())?;
        require(self.history_ids.iter().all(|&id| known(id)), || "sampling.history_ids: outside the vocabulary".into())?;
        let masks = self.masks.len() / vocabulary.div_ceil(32).max(1);
        require(self.mask_rows.iter().all(|&m| m == -1 || usize::try_from(m).is_ok_and(|m| m < masks)), || {
            format!("sampling.mask_rows: only {masks} masks are given")
        })?;
        require(self.logprobs.iter().all(|&k| k == -1 || usize::try_from(k).is_ok_and(|k| k <= top_logprobs)), || {
            format!("sampling.logprobs: more than {top_logprobs} asked for")
        })?;
        let each = |name: &str, values: &[f32], good: fn(f32) -> bool| {
            let bad = values.iter().find(|v| !good(**v));
            require(bad.is_none(), || format!("sampling.{name}: {bad:?} is out of range"))
        };
        each("temperature", &self.temperature, |v| v.is_finite() && v >= 0.0)?;
        each("top_p", &self.top_p, |v| (0.0..=1.0).contains(&v))?;
        each("min_p", &self.min_p, |v| (0.0..=1.0).contains(&v))?;
        each("presence", &self.presence, f32::is_finite)?;
        each("frequency", &self.frequency, f32::is_finite)?;
        each("repetition", &self.repetition, |v| v.is_finite() && v > 0.0)?;
        each("bias_values", &self.bias_values, |v| v < f32::INFINITY)
    }
}

pub(crate) fn require(good: bool, detail: impl FnOnce() -> String) -> Result<(), KernelError> {
    if good { Ok(()) } else { Err(KernelError::Shape { op: "upload", detail: detail() }) }
}

/// `starts` has `rows + 1` entries, ascending, from 0 to `total`.
fn offsets(name: &str, starts: &[u32], rows: usize, total: usize) -> Result<(), KernelError> {
    let good = starts.len() == rows + 1
        && starts.first() == Some(&0)
        && starts.last().map(|&e| e as usize) == Some(total)
        && starts.windows(2).all(|w| w[0] <= w[1]);
    require(good, || format!("{name}: not {} ascending offsets from 0 to {total}", rows + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_and_flushes() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert!(exp(f32::NAN).is_nan());
        let worst =
            (0..870_000).map(|i| -i as f32 * 1e-4).map(|x| (f64::from(exp(x)) / f64::from(x).exp() - 1.0).abs()).fold(0.0, f64::max);
        assert!(worst < 1.5e-7, "{worst:e}");
    }

    #[test]
    fn order_is_by_logit_then_id() {
        let mut keys: Vec<u64> =
            [(1.0, 5), (f32::NEG_INFINITY, 0), (-0.0, 9), (0.0, 3), (-2.5, 1), (1.0, 2)].map(|(z, id)| order_key(z, id)).into();
        keys.sort_unstable();
        let order: Vec<(f32, u32)> = keys.into_iter().map(from_order_key).collect();
        assert_eq!(order, [(1.0, 2), (1.0, 5), (0.0, 3), (0.0, 9), (-2.5, 1), (f32::NEG_INFINITY, 0)]);
    }

    #[test]
    fn weight_sums_are_exact_in_any_order() {
        let weights: Vec<f64> = (0..200_000u32).map(|i| weight(-(uniform(1, i) as f32) * 20.0, 0.0, 0.7)).collect();
        let forward: f64 = weights.iter().sum();
        let backward: f64 = weights.iter().rev().sum();
        assert_eq!(forward.to_bits(), backward.to_bits());
    }

    #[test]
    fn uniform_is_flat_over_seeds_and_draws() {
        for by_seed in [false, true] {
            let mut bins = [0u32; 64];
            for i in 0..64_000u32 {
                let u = if by_seed { uniform(u64::from(i), 7) } else { uniform(7, i) };
                bins[(u * 64.0) as usize] += 1;
            }
            let chi: f64 = bins.iter().map(|&b| (f64::from(b) - 1000.0).powi(2) / 1000.0).sum();
            assert!((30.0..105.0).contains(&chi), "{chi}");
        }
    }

    #[test]
    fn a_malformed_plan_names_its_array() {
        let mut plan = SamplingPlan {
            targets: vec![crate::plan::NO_TOKEN],
            temperature: vec![1.0],
            top_k: vec![0],
            top_p: vec![1.0],
            min_p: vec![0.0],
            presence: vec![0.0],
            frequency: vec![0.0],
            repetition: vec![1.0],
            seed: vec![0],
            draw: vec![0],
            logprobs: vec![-1],
            bias_starts: vec![0, 0],
            history_starts: vec![0, 0],
            mask_rows: vec![-1],
            ..SamplingPlan::default()
        };
        assert!(plan.check(1, 10, 5).is_ok());
        plan.mask_rows[0] = 0;
        assert!(plan.check(1, 10, 5).unwrap_err().to_string().contains("mask_rows"));
        plan.mask_rows[0] = -1;
        plan.bias_starts[1] = 1;
        assert!(plan.check(1, 10, 5).unwrap_err().to_string().contains("bias_starts"));
        plan.bias_starts[1] = 0;
        plan.temperature[0] = f32::NAN;
        assert!(plan.check(1, 10, 5).unwrap_err().to_string().contains("temperature"));
    }
}
