//! The K types: 256 columns a block, in sub-blocks of 16 or 32 with small integer scales below one or two f16.
//!
//! | type | bytes in order | value |
//! |---|---|---|
//! | Q2_K | 16 × (scale, min nibbles), 64 × 4 two-bit q, d, dmin | d·scale·q − dmin·min, sub-blocks of 16 |
//! | Q3_K | 32 × 8 high bits, 64 × 4 two-bit q, 12 bytes of 16 six-bit scales, d | d·(scale − 32)·(q − 4), sub-blocks of 16 |
//! | Q4_K | d, dmin, 12 bytes of 8 six-bit scales and mins, 128 bytes of nibbles | d·scale·q − dmin·min, sub-blocks of 32 |
//! | Q5_K | d, dmin, 12 bytes as above, 32 × 8 high bits, 128 bytes of nibbles | as Q4_K |
//! | Q6_K | 128 bytes of nibbles, 64 × 4 two high bits, 16 signed scales, d | d·scale·(q − 32), sub-blocks of 16 |

use super::f16_at;

/// The eight 6-bit (scale, min) of Q4_K and Q5_K from their 12 bytes.
#[must_use]
pub fn scales_and_mins(packed: &[u8; 12]) -> [(u8, u8); 8] {
    std::array::from_fn(|j| {
        if j < 4 {
            (packed[j] & 63, packed[j + 4] & 63)
        } else {
            (packed[j + 4] & 15 | packed[j - 4] >> 6 << 4, packed[j + 4] >> 4 | packed[j] >> 6 << 4)
        }
    })
}

/// The sixteen scales of Q3_K, −32 to 31, from their 12 bytes: four low bits in bytes 0 to 7, two high ones in 8 to 11.
#[must_use]
pub fn q3_k_scales(packed: &[u8; 12]) -> [i8; 16] {
    std::array::from_fn(|j| {
        let low = if j < 8 { packed[j] & 15 } else { packed[j - 8] >> 4 };
        let high = packed[8 + j % 4] >> (2 * (j / 4)) & 3;
        (low | high << 4) as i8 - 32
    })
}

fn twelve(bytes: &[u8], at: usize) -> [u8; 12] {
    std::array::from_fn(|i| bytes[at + i])
}

/// Byte and shift of the two bits of column `i` among 64 bytes: per half of 128 columns, four shifts over 32 bytes.
fn two_bits(bytes: &[u8], i: usize) -> u8 {
    bytes[i / 128 * 32 + i % 32] >> (2 * (i % 128 / 32)) & 3
}

pub(super) fn q2_k_block(bytes: &[u8], out: &mut [f32]) {
    let (d, dmin) = (f16_at(bytes, 80), f16_at(bytes, 82));
    for (i, out) in out.iter_mut().enumerate() {
        let packed = bytes[i / 16];
        let q = two_bits(&bytes[16..80], i);
        *out = d * f32::from(packed & 15) * f32::from(q) - dmin * f32::from(packed >> 4);
    }
}

pub(super) fn q3_k_block(bytes: &[u8], out: &mut [f32]) {
    let scales = q3_k_scales(&twelve(bytes, 96));
    let d = f16_at(bytes, 108);
    for (i, out) in out.iter_mut().enumerate() {
        let low = two_bits(&bytes[32..96], i);
        let high = bytes[i % 32] >> (i / 32) & 1;
        *out = d * f32::from(scales[i / 16]) * (f32::from(low | high << 2) - 4.0);
    }
}

pub(super) fn q4_k_block(bytes: &[u8], out: &mut [f32]) {
    let (d, dmin) = (f16_at(bytes, 0), f16_at(bytes, 2));
    let scales = scales_and_mins(&twelve(bytes, 4));
    for (i, out) in out.iter_mut().enumerate() {
        let (scale, min) = scales[i / 32];
        let q = bytes[16 + i / 64 * 32 + i % 32] >> (4 * (i % 64 / 32)) & 15;
        *out = d * f32::from(scale) * f32::from(q) - dmin * f32::from(min);
    }
}

pub(super) fn q5_k_block(bytes: &[u8], out: &mut [f32]) {
    let (d, dmin) = (f16_at(bytes, 0), f16_at(bytes, 2));
    let scales = scales_and_mins(&twelve(bytes, 4));
    for (i, out) in out.iter_mut().enumerate() {
        let (scale, min) = scales[i / 32];
        let low = bytes[48 + i / 64 * 32 + i % 32] >> (4 * (i % 64 / 32)) & 15;
        let high = bytes[16 + i % 32] >> (i / 32) & 1;
        *out = d * f32::from(scale) * f32::from(low | high << 4) - dmin * f32::from(min);
    }
}

pub(super) fn q6_k_block(bytes: &[u8], out: &mut [f32]) {
    let d = f16_at(bytes, 208);
    for (i, out) in out.iter_mut().enumerate() {
        let (half, l) = (i / 128, i % 128);
        let low = bytes[64 * half + l % 64] >> (4 * (l / 64)) & 15;
        let high = two_bits(&bytes[128..192], i);
        let scale = bytes[192 + i / 16] as i8;
        *out = d * f32::from(scale) * (f32::from(low | high << 4) - 32.0);
    }
}
