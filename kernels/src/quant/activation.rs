//! Quantised activations: the one form that all block-quantised weights are multiplied with.
//!
//! This file is the definition; faster versions must give the same bits.

/// Columns that share a scale.
pub const ACTIVATION_BLOCK: usize = 32;

/// Largest magnitude below which a block counts as zero: 127 over it would overflow.
const TINY: f32 = 1e-30;

/// Quantises blocks of 32 columns to signed bytes: x ≈ d·q, and s = d·Σq.
///
/// For each block, with amax its largest |x|, in IEEE single precision:
/// - amax not finite (a NaN or an infinity is in the block): q = 0, d = s = NaN, so every output becomes NaN;
/// - amax < 1e-30: q = 0, d = s = 0;
/// - else d = amax / 127, q = x · (127 / amax) rounded to the nearest integer, ties to even, and s = d · (Σq as f32).
///
/// q is from −127 to 127, never −128. A last block shorter than 32 is as if padded with zeros.
///
/// `q` has as many entries as `x`, `d` and `s` have one per block.
pub fn quantize_activations(x: &[f32], q: &mut [i8], d: &mut [f32], s: &mut [f32]) {
    let blocks = x.chunks(ACTIVATION_BLOCK).zip(q.chunks_mut(ACTIVATION_BLOCK));
    for ((x, q), (d, s)) in blocks.zip(d.iter_mut().zip(s.iter_mut())) {
        // As integers the bits of |x| order as the values do, infinity above all numbers and NaN above infinity.
        let amax = f32::from_bits(x.iter().map(|x| x.to_bits() & 0x7fff_ffff).max().unwrap_or(0));
        if !amax.is_finite() || amax < TINY {
            q.fill(0);
            *d = if amax.is_finite() { 0.0 } else { f32::NAN };
            *s = *d;
            continue;
        }
        let inverse = 127.0 / amax;
        let mut sum = 0_i32;
        for (q, x) in q.iter_mut().zip(x) {
            *q = (x * inverse).round_ties_even() as i8;
            sum += i32::from(*q);
        }
        *d = amax / 127.0;
        *s = *d * sum as f32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quantize(x: &[f32]) -> (Vec<i8>, Vec<f32>, Vec<f32>) {
        let blocks = x.len().div_ceil(ACTIVATION_BLOCK);
        let (mut q, mut d, mut s) = (vec![1; x.len()], vec![1.0; blocks], vec![1.0; blocks]);
        quantize_activations(x, &mut q, &mut d, &mut s);
        (q, d, s)
    }

    #[test]
    fn rounds_to_the_nearest_ties_to_even() {
        let (q, d, s) = quantize(&[127.0, 0.5, 1.5, -2.5, -127.0, 3.6]);
        assert_eq!(q, [127, 0, 2, -2, -127, 4]);
        assert_eq!((d[0], s[0]), (1.0, 4.0));
    }

    #[test]
    fn blocks_are_independent_and_off_by_half_a_step_at_most() {
        let x: Vec<f32> = (0..96).map(|i| ((i * 37 % 101) as f32 - 50.0) * if i < 32 { 1e-3 } else { 10.0 }).collect();
        let (q, d, _) = quantize(&x);
        for (i, &x) in x.iter().enumerate() {
            let d = d[i / 32];
            assert!((x - d * f32::from(q[i])).abs() <= d * 0.5001, "{i}");
        }
        assert_eq!(quantize(&x[32..64]).0, q[32..64]);
    }

    #[test]
    fn extremes_stay_in_range() {
        let (q, d, _) = quantize(&[f32::MAX, -f32::MAX, 1.0, 0.0]);
        assert_eq!(q, [127, -127, 0, 0]);
        assert!(d[0].is_finite());
        let (q, d, s) = quantize(&[1e-31, -1e-38, 0.0]);
        assert_eq!((q, d[0], s[0]), (vec![0, 0, 0], 0.0, 0.0));
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let (q, d, s) = quantize(&[1.0, bad, 2.0]);
            assert_eq!(q, [0, 0, 0]);
            assert!(d[0].is_nan() && s[0].is_nan());
        }
    }
}
