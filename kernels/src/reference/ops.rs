//! The arithmetic of each op, one row or one head at a time, in plain loops.

use crate::backend::{Activation, CHUNK, RopeStyle};

/// x / √(mean(x²) + epsilon) · weight.
///
/// The squares are summed in 16 lanes (element i in lane i mod 16), which then fold in halves, with every operation rounded
/// on its own. This is the order of wide registers: fast backends reach the same bits, so that a quantiser behind the norm
/// never rounds to the other side.
pub fn rms_norm(x: &[f32], weight: &[f32], epsilon: f32) -> Vec<f32> {
    let mut lanes = [0.0_f32; 16];
    for (i, v) in x.iter().enumerate() {
        lanes[i % 16] += v * v;
    }
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
    }
    let factor = 1.0 / (lanes[0] / x.len() as f32 + epsilon).sqrt();
    x.iter().zip(weight).map(|(v, w)| v * factor * w).collect()
}

/// Σ a·b, in runs of 32 so that the sum's own rounding stays small.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.chunks(32).zip(b.chunks(32)).map(|(a, b)| a.iter().zip(b).map(|(x, y)| x * y).sum::<f32>()).sum()
}

/// Turns the first `2 · cos.len()` elements of a head: (a, b) becomes (a·cos − b·sin, a·sin + b·cos).
pub fn rope(head: &mut [f32], cos: &[f32], sin: &[f32], style: RopeStyle) {
    for i in 0..cos.len() {
        let (first, second) = match style {
            RopeStyle::Adjacent => (2 * i, 2 * i + 1),
            RopeStyle::Half => (i, i + cos.len()),
        };
        let (a, b) = (head[first], head[second]);
        head[first] = a * cos[i] - b * sin[i];
        head[second] = a * sin[i] + b * cos[i];
    }
}

/// The activation of a gate.
pub fn activate(x: f32, activation: Activation) -> f32 {
    match activation {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::Gelu => 0.5 * x * (1.0 + (0.797_884_6 * (x + 0.044_715 * x * x * x)).tanh()),
    }
}

/// Softmax-weighted sum of values as it is known after some keys: Σ e^(s − max) and Σ e^(s − max) · v.
pub struct Partial {
    pub max: f32,
    pub sum: f32,
    pub values: Vec<f32>,
}

impl Partial {
    /// Adds the keys of a later piece.
    fn merge(&mut self, later: &Self) {
        let max = self.max.max(later.max);
        let (a, b) = ((self.max - max).exp(), (later.max - max).exp());
        self.sum = self.sum * a + later.sum * b;
        for (v, w) in self.values.iter_mut().zip(&later.values) {
            *v = *v * a + w * b;
        }
        self.max = max;
    }
}

/// Attention of one query head over keys 0 .. `keys`, in pieces of [`CHUNK`] keys that are merged in ascending order.
/// `key(i)` and `value(i)` give the vectors of key `i`.
pub fn attend<'a>(q: &[f32], keys: usize, scale: f32, key: impl Fn(usize) -> &'a [f32], value: impl Fn(usize) -> &'a [f32]) -> Vec<f32> {
    let mut total: Option<Partial> = None;
    for start in (0..keys).step_by(CHUNK) {
        let end = keys.min(start + CHUNK);
        let scores: Vec<f32> = (start..end).map(|i| scale * dot(q, key(i))).collect();
        let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut piece = Partial { max, sum: 0.0, values: vec![0.0; q.len()] };
        for (i, score) in (start..end).zip(&scores) {
            let p = (score - max).exp();
            piece.sum += p;
            for (v, w) in piece.values.iter_mut().zip(value(i)) {
                *v += p * w;
            }
        }
        match &mut total {
            Some(total) => total.merge(&piece),
            None => total = Some(piece),
        }
    }
    total.map_or_else(|| vec![0.0; q.len()], |t| t.values.iter().map(|v| v / t.sum).collect())
}
