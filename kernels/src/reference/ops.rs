//! The arithmetic of each op, one row or one head at a time, in plain loops.

use crate::backend::{Activation, RopeStyle};

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
