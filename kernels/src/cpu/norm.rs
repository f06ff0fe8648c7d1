//! RMS norm, to the bit as [`crate::reference`] defines it: 16 lanes, each operation rounded on its own. Plain Rust, which the
//! compiler turns into whatever registers there are without changing a bit.

use super::simd::LANES;

/// x / √(mean(x²) + epsilon) · weight.
pub(super) fn rms_norm(x: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
    let (chunks, rest) = x.as_chunks::<LANES>();
    let mut lanes = [0.0_f32; LANES];
    for chunk in chunks {
        for (lane, v) in lanes.iter_mut().zip(chunk) {
            *lane += v * v;
        }
    }
    for (lane, v) in lanes.iter_mut().zip(rest) {
        *lane += v * v;
    }
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
    }
    let factor = 1.0 / (lanes[0] / x.len() as f32 + epsilon).sqrt();
    for ((out, v), w) in out.iter_mut().zip(x).zip(weight) {
        *out = v * factor * w;
    }
}
