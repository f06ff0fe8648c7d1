//! The two byte types of the cache, to the bit: every backend stores these bytes and scales, from f32, once.
//!
//! A row is one token's key or value of one head. Its scale maps the largest magnitude to the type's largest number: 127, or
//! 448 for E4M3 (no infinities, 2⁻⁹ the smallest step). With `top` that number and `largest` the row's largest magnitude:
//! stored = nearest(x · (top / largest)), ties to even; read back: stored · (largest / top). So the error of an element is at most
//! largest / 254 for Q8, and the larger of |x| / 16 and largest / 448 / 1024 for E4M3.
//!
//! A row with an element that is not finite has the scale NaN, so that whatever reads it is not finite either. A row
//! whose largest magnitude is below [`NOTHING`] is stored as zeros.

use half::f16;

use super::KvType;

/// Below this a row is zero: its scale's inverse would not be finite, or the scale not precise.
pub const NOTHING: f32 = 1.0 / (1u128 << 100) as f32;
/// Adding it rounds a small number to an integer, which is then in the lowest bits.
const ROUND: f32 = 12_582_912.0;

/// Largest number of a byte type.
#[must_use]
pub fn top(kv_type: KvType) -> f32 {
    if kv_type == KvType::Fp8 { 448.0 } else { 127.0 }
}

/// Bits of the largest magnitude of a row; those of an infinity or above where an element is not finite.
#[inline(always)]
#[must_use]
pub fn largest(x: &[f32]) -> u32 {
    x.iter().fold(0, |largest, x| largest.max(x.to_bits() & 0x7FFF_FFFF))
}

/// What to multiply a row with before it is rounded, and its scale, from [`largest`].
#[inline]
#[must_use]
pub fn scales(largest: u32, top: f32) -> (f32, f32) {
    let largest = f32::from_bits(largest);
    if !largest.is_finite() {
        (0.0, f32::NAN)
    } else if largest < NOTHING {
        (0.0, 0.0)
    } else {
        (top / largest, largest / top)
    }
}

/// The nearest integer as a signed byte, for |x| ≤ 127.
#[inline(always)]
#[must_use]
pub fn to_q8(x: f32) -> u8 {
    (x + ROUND).to_bits() as u8
}

/// The nearest E4M3 number, for |x| < 464.
#[inline(always)]
#[must_use]
pub fn to_fp8(x: f32) -> u8 {
    let bits = x.to_bits() & 0x7FFF_FFFF;
    // Three bits of mantissa, the exponent's bias from 127 to 7.
    let normal = ((bits + 0x7_FFFF + (bits >> 20 & 1)) >> 20).wrapping_sub(120 << 3);
    // Multiples of 2⁻⁹: eight of them are the smallest normal number, and its bits.
    let small = (f32::from_bits(bits) * 512.0 + ROUND).to_bits();
    let magnitude = if bits < f32::to_bits(1.0 / 64.0) { small } else { normal };
    (magnitude as u8 & 0x7F) | (x.to_bits() >> 24) as u8 & 0x80
}

/// What a byte of E4M3 stands for, by way of halves: the same bits, but for a bias of 15 instead of 7.
#[inline(always)]
#[must_use]
pub fn from_fp8(byte: u8) -> f32 {
    let half = u16::from(byte & 0x80) << 8 | u16::from(byte & 0x7F) << 7;
    f16::from_bits(half).to_f32() * 256.0
}

/// A row as it is read back from a cache of this type.
#[must_use]
pub fn stored(x: &[f32], kv_type: KvType) -> Vec<f32> {
    let (factor, scale) = scales(largest(x), top(kv_type));
    // Zeros where the row is not finite, not rounded infinities.
    let scaled = |x: f32| if factor == 0.0 { 0.0 } else { x * factor };
    match kv_type {
        KvType::F32 => x.to_vec(),
        KvType::F16 => x.iter().map(|&x| f16::from_f32(x).to_f32()).collect(),
        KvType::Q8 => x.iter().map(|&x| f32::from(to_q8(scaled(x)) as i8) * scale).collect(),
        KvType::Fp8 => x.iter().map(|&x| from_fp8(to_fp8(scaled(x))) * scale).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All E4M3 numbers, and every f32 between two of them goes to the nearer, ties to the even one.
    #[test]
    fn fp8_rounds_to_the_nearest() {
        let value = |byte: u8| {
            let (e, m) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
            if e == 0 { m / 8.0 * 2_f32.powi(-6) } else { (1.0 + m / 8.0) * 2_f32.powi(e - 7) }
        };
        for byte in 0..0x7F_u8 {
            assert_eq!(from_fp8(byte), value(byte));
            assert_eq!(from_fp8(byte | 0x80), -value(byte));
            assert_eq!((to_fp8(value(byte)), to_fp8(-value(byte))), (byte, byte | 0x80));
            if byte < 0x7E {
                let (low, high) = (value(byte), value(byte + 1));
                let middle = f32::midpoint(low, high);
                assert_eq!(to_fp8(middle), byte + (byte & 1), "tie above {low}");
                assert_eq!(to_fp8(middle.next_down()), byte);
                assert_eq!(to_fp8(middle.next_up()), byte + 1);
            }
        }
        assert_eq!((to_fp8(448.0), to_fp8(448.1), to_fp8(463.9)), (0x7E, 0x7E, 0x7E));
    }

    #[test]
    fn q8_rounds_to_the_nearest() {
        for n in -127..=127_i8 {
            assert_eq!(to_q8(f32::from(n)) as i8, n);
            assert_eq!(to_q8(f32::from(n) + 0.49) as i8, n);
            assert_eq!(to_q8(f32::from(n) - 0.49) as i8, n);
        }
        assert_eq!((to_q8(0.5), to_q8(1.5), to_q8(127.00001)), (0, 2, 127));
    }

    #[test]
    fn extremes_of_a_row() {
        for kv_type in [KvType::Q8, KvType::Fp8] {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                assert!(stored(&[1.0, bad, 0.0], kv_type).iter().all(|x| x.is_nan()));
            }
            assert_eq!(stored(&[0.0, 1e-38, -1e-45], kv_type), [0.0; 3]);
            // (At the very end of f32 the scale may round up to where its product is infinite.)
            let large = stored(&[3.4e38, -1.7e38], kv_type);
            assert!((large[0] / 3.4e38 - 1.0).abs() < 1e-6 && (large[1] / 3.4e38 + 0.5).abs() < 1.0 / 16.0, "{large:?}");
            let small = stored(&[1e-30, 5e-31], kv_type);
            assert!((small[0] / 1e-30 - 1.0).abs() < 1e-6, "{small:?}");
        }
    }
}
