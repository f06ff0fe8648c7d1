//! The definition of sampling, one row at a time, with a full sort.

use crate::{
    plan::NO_TOKEN,
    sampling::{RowParams, from_order_key, logprob, order_key, uniform, weight},
};

/// What one row gave.
#[derive(Clone, Debug, PartialEq)]
pub struct Drawn {
    /// The token, or [`NO_TOKEN`].
    pub id: u32,
    /// Natural log of its probability under the untouched logits; NaN where none was asked for, or no token came out.
    pub logprob: f32,
    /// The likeliest tokens under the untouched logits, likeliest first, equal ones by id.
    pub top: Vec<(u32, f32)>,
}

impl Drawn {
    fn nothing() -> Self {
        Self { id: NO_TOKEN, logprob: f32::NAN, top: Vec::new() }
    }
}

/// Turns one row of logits into a token.
///
/// 1. A NaN or +∞ among the logits, or nothing above −∞: no token, no log-probabilities.
/// 2. If log-probabilities are wanted: m = the largest logit, S = Σ [`weight`]\(z, m, 1); log p = z − m − ln S
///    ([`logprob`]), for the token (given or drawn) and for the k largest logits (order of [`order_key`]).
/// 3. A target: it is the token.
/// 4. [`RowParams::adjust`]: bias, mask, penalties. Nothing left above −∞, or a +∞ or NaN made by it: no token.
/// 5. Temperature 0: the largest logit, of equal ones the lowest id.
/// 6. Otherwise order the tokens by [`order_key`], with w = [`weight`]\(z, m, temperature), m being the largest adjusted
///    logit. Three filters cut this list at its end; all sums are exact, see [`crate::sampling`]:
///    - top-k: the first k (0: all);
///    - top-p: of those, with sum S, the shortest beginning with a sum ≥ p · S, of one or more (p ≥ 1: all);
///    - min-p: of those, the beginning with w ≥ min_p · (weight of the first).
///
///    With T the sum of what is left and u = [`uniform`]\(seed, draw), the token is the first whose running sum is above
///    u · T (or, if rounding of the product leaves none, the last with a weight above 0).
pub fn sample(logits: &mut [f32], params: &RowParams<'_>) -> Drawn {
    let Some(max) = largest(logits) else { return Drawn::nothing() };
    let mut drawn = Drawn::nothing();
    let raw = (params.logprobs >= 0).then(|| logits.to_vec());
    drawn.id = if params.target == NO_TOKEN { draw(logits, params) } else { params.target };
    if let (Some(raw), true) = (raw, drawn.id != NO_TOKEN) {
        let total: f64 = raw.iter().map(|&z| weight(z, max, 1.0)).sum();
        drawn.logprob = logprob(raw[drawn.id as usize], max, total);
        let order = sorted(&raw);
        drawn.top = order.iter().take(params.logprobs as usize).map(|&(z, id)| (id, logprob(z, max, total))).collect();
    }
    drawn
}

/// The largest logit, if it is finite and no NaN is among them.
fn largest(logits: &[f32]) -> Option<f32> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    (max.is_finite() && !logits.iter().any(|z| z.is_nan())).then_some(max)
}

/// Logits and ids, likeliest first.
fn sorted(logits: &[f32]) -> Vec<(f32, u32)> {
    let mut keys: Vec<u64> = logits.iter().zip(0..).map(|(&z, id)| order_key(z, id)).collect();
    keys.sort_unstable();
    keys.into_iter().map(from_order_key).collect()
}

fn draw(logits: &mut [f32], params: &RowParams<'_>) -> u32 {
    params.adjust(logits);
    let Some(max) = largest(logits) else { return NO_TOKEN };
    let order = sorted(logits);
    if params.greedy() {
        return order[0].1;
    }
    let mut kept: Vec<(f64, u32)> = order.iter().map(|&(z, id)| (weight(z, max, params.temperature), id)).collect();
    if params.top_k > 0 {
        kept.truncate(params.top_k as usize);
    }
    if params.top_p < 1.0 {
        let wanted = f64::from(params.top_p) * kept.iter().map(|k| k.0).sum::<f64>();
        kept.truncate(1 + first_where(&kept, |sum| sum >= wanted));
    }
    let least = f64::from(params.min_p) * kept[0].0;
    kept.retain(|k| k.0 >= least);
    let target = uniform(params.seed, params.draw) * kept.iter().map(|k| k.0).sum::<f64>();
    kept.retain(|k| k.0 > 0.0);
    kept[first_where(&kept, |sum| sum > target)].1
}

/// Index of the first entry whose running sum fulfils `good`, else of the last.
fn first_where(kept: &[(f64, u32)], good: impl Fn(f64) -> bool) -> usize {
    let mut sum = 0.0;
    kept.iter()
        .position(|k| {
            sum += k.0;
            good(sum)
        })
        .unwrap_or(kept.len() - 1)
}
