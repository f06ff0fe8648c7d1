//! The arithmetic of each op, one row or one head at a time, in plain loops.

use super::Reference;
use crate::{
    backend::{Activation, Norm, NormKind, RopeStyle},
    routing::sigmoid,
};

/// (x − shift) · factor · weight + bias, with shift 0 and factor 1 / √(mean(x²) + epsilon) for RMS; for layer norms with
/// shift the mean, and factor 1 / √(mean((x − shift)²) + epsilon).
///
/// Sums go in 16 lanes (element i in lane i mod 16), which then fold in halves, with every operation rounded
/// on its own. This is the order of wide registers: fast backends reach the same bits, so that a quantiser behind the norm
/// never rounds to the other side.
pub fn norm(x: &[f32], norm: &Norm<'_, Reference>) -> Vec<f32> {
    let n = x.len() as f32;
    let shift = match norm.kind {
        NormKind::Rms => 0.0,
        NormKind::Layer => lane_sum(x.iter().copied()) / n,
    };
    let factor = 1.0 / (lane_sum(x.iter().map(|v| (v - shift) * (v - shift))) / n + norm.epsilon).sqrt();
    let at = |buffer: Option<&Vec<f32>>, i: usize| buffer.map(|values| values[i]);
    x.iter()
        .enumerate()
        .map(|(i, v)| {
            let mut y = (v - shift) * factor;
            if let Some(w) = at(norm.weight, i) {
                y *= w;
            }
            if let Some(b) = at(norm.bias, i) {
                y += b;
            }
            y
        })
        .collect()
}

fn lane_sum(x: impl Iterator<Item = f32>) -> f32 {
    let mut lanes = [0.0_f32; 16];
    for (i, v) in x.enumerate() {
        lanes[i % 16] += v;
    }
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
    }
    lanes[0]
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

/// An activation without a gate.
pub fn activate(x: f32, activation: Activation) -> f32 {
    match activation {
        Activation::Silu => x * sigmoid(x),
        Activation::Gelu => 0.5 * x * (1.0 + (0.797_884_6 * (x + 0.044_715 * x * x * x)).tanh()),
        Activation::GeluExact => (0.5 * f64::from(x) * (1.0 + erf(f64::from(x) * std::f64::consts::FRAC_1_SQRT_2))) as f32,
        Activation::Relu => x.max(0.0),
        Activation::ReluSquared => x.max(0.0) * x.max(0.0),
        Activation::ClampedSwiglu { alpha, limit } => x.min(limit) * sigmoid(alpha * x.min(limit)),
    }
}

/// A gate's activation times what it lets through.
pub fn gate(gate: f32, up: f32, activation: Activation) -> f32 {
    let up = match activation {
        Activation::ClampedSwiglu { limit, .. } => up.clamp(-limit, limit) + 1.0,
        _ => up,
    };
    activate(gate, activation) * up
}

/// cap · tanh(z / cap).
pub fn softcap(z: f32, cap: f32) -> f32 {
    cap * (z / cap).tanh()
}

/// The error function: 2/√π · e^(−x²) · Σ 2ⁿ x^(2n+1) / (1 · 3 · … · (2n+1)), whose terms all have one sign; 1 from 6 on.
fn erf(x: f64) -> f64 {
    if x.is_nan() || x.abs() >= 6.0 {
        return if x.is_nan() { x } else { x.signum() };
    }
    let (mut term, mut sum, mut n) = (x, 0.0, 0.0);
    while sum + term != sum {
        sum += term;
        n += 1.0;
        term *= 2.0 * x * x / (2.0 * n + 1.0);
    }
    std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp() * sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn erf_is_known() {
        for (x, want) in [
            (0.0, 0.0),
            (0.1, 0.112_462_916_018_284_9),
            (0.5, 0.520_499_877_813_046_5),
            (1.0, 0.842_700_792_949_714_9),
            (2.5, 0.999_593_047_982_555),
        ] {
            assert!((erf(x) - want).abs() < 1e-15, "{x}");
            assert_eq!(erf(-x), -erf(x));
        }
        assert_eq!(erf(7.0), 1.0);
    }
}
