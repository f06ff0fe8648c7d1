//! The K types: 256 columns a block, in sub-blocks of 16 or 32 with small integer scales below one or two f16.
//!
//! | type | bytes in order | value |
//! |---|---|---|
//! | Q2_K | 16 × (scale, min nibbles), 64 × 4 two-bit q, d, dmin | d·scale·q − dmin·min, sub-blocks of 16 |
//! | Q3_K | 32 × 8 high bits, 64 × 4 two-bit q, 12 bytes of 16 six-bit scales, d | d·(scale − 32)·(q − 4), sub-blocks of 16 |
//! | Q4_K | d, dmin, 12 bytes of 8 six-bit scales and mins, 128 bytes of nibbles | d·scale·q − dmin·min, sub-blocks of 32 |
//! | Q5_K | d, dmin, 12 bytes as above, 32 × 8 high bits, 128 bytes of nibbles | as Q4_K |
//! | Q6_K | 128 bytes of nibbles, 64 × 4 two high bits, 16 signed scales, d | d·scale·(q − 32), sub-blocks of 16 |

use super::{f16_at, fit, put_f16, rounded_f16};

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

/// The inverse of [`scales_and_mins`].
fn put_scales_and_mins(out: &mut [u8], pairs: [(u8, u8); 8]) {
    out.fill(0);
    for (j, (scale, min)) in pairs.into_iter().enumerate() {
        if j < 4 {
            out[j] |= scale;
            out[j + 4] |= min;
        } else {
            out[j + 4] = scale & 15 | min << 4;
            out[j - 4] |= scale >> 4 << 6;
            out[j] |= min >> 4 << 6;
        }
    }
}

/// Two bits of each of 256 values, as [`two_bits`] reads them.
fn put_two_bits(out: &mut [u8], q: &[u8; 256]) {
    out.fill(0);
    for (i, q) in q.iter().enumerate() {
        out[i / 128 * 32 + i % 32] |= (q & 3) << (2 * (i % 128 / 32));
    }
}

/// A block of sub-blocks of `N` values with scales and offsets: d, dmin, their integers, and the values'.
struct Offsets<const SUBS: usize> {
    d: f32,
    dmin: f32,
    pairs: [(u8, u8); SUBS],
    q: [u8; 256],
}

/// Levels from 0 to `most`; scales and offsets of up to `most_scale`. d·scale·q − dmin·min.
fn with_offsets<const SUBS: usize>(x: &[f32], w: &[f32], most: f32, most_scale: f32) -> Offsets<SUBS> {
    let each = 256 / SUBS;
    let (mut scales, mut mins, mut weights) = ([0.0; SUBS], [0.0; SUBS], [0.0; SUBS]);
    for (j, (x, w)) in x.chunks_exact(each).zip(w.chunks_exact(each)).enumerate() {
        let (scale, min) = fit::affine(x, w, most, fit::Offset::NotAboveZero);
        (scales[j], mins[j], weights[j]) = (scale.max(0.0), -min, w.iter().sum());
    }
    let d = rounded_f16(fit::positive(&scales, &weights, most_scale));
    let dmin = rounded_f16(fit::positive(&mins, &weights, most_scale));
    let mut block = Offsets { d, dmin, pairs: [(0, 0); SUBS], q: [0; 256] };
    for j in 0..SUBS {
        let scale = fit::level(scales[j] * fit::inverse(d), 0.0, most_scale);
        let min = fit::level(mins[j] * fit::inverse(dmin), 0.0, most_scale);
        block.pairs[j] = (scale as u8, min as u8);
        let inverse = fit::inverse(d * scale);
        for i in each * j..each * (j + 1) {
            block.q[i] = fit::level((x[i] + dmin * min) * inverse, 0.0, most) as u8;
        }
    }
    block
}

/// A block of sixteen sub-blocks with signed scales: d, the scales, and the values from −half to half − 1.
struct Signed {
    d: f32,
    scales: [i8; 16],
    q: [i8; 256],
}

fn without_offsets(x: &[f32], w: &[f32], half: f32, half_scale: f32) -> Signed {
    let (mut scales, mut weights) = ([0.0; 16], [0.0; 16]);
    for (j, (x, w)) in x.chunks_exact(16).zip(w.chunks_exact(16)).enumerate() {
        (scales[j], weights[j]) = (fit::symmetric(x, w, half), w.iter().sum());
    }
    let d = rounded_f16(fit::symmetric(&scales, &weights, half_scale));
    let mut block = Signed { d, scales: [0; 16], q: [0; 256] };
    for (j, scale) in scales.iter().enumerate() {
        let scale = fit::level(scale * fit::inverse(d), -half_scale, half_scale - 1.0);
        block.scales[j] = scale as i8;
        let inverse = fit::inverse(d * scale);
        for i in 16 * j..16 * (j + 1) {
            block.q[i] = fit::level(x[i] * inverse, -half, half - 1.0) as i8;
        }
    }
    block
}

pub(super) fn encode_q2_k(x: &[f32], w: &[f32], out: &mut [u8]) {
    let block = with_offsets::<16>(x, w, 3.0, 15.0);
    out.iter_mut().zip(block.pairs).for_each(|(out, (scale, min))| *out = scale | min << 4);
    put_two_bits(&mut out[16..80], &block.q);
    put_f16(&mut out[80..82], block.d);
    put_f16(&mut out[82..84], block.dmin);
}

pub(super) fn encode_q3_k(x: &[f32], w: &[f32], out: &mut [u8]) {
    let block = without_offsets(x, w, 4.0, 32.0);
    let q = block.q.map(|q| (q + 4) as u8);
    out.fill(0);
    for (i, q) in q.iter().enumerate() {
        out[i % 32] |= (q >> 2) << (i / 32);
    }
    put_two_bits(&mut out[32..96], &q);
    for (j, scale) in block.scales.iter().enumerate() {
        let scale = (scale + 32) as u8;
        out[96 + j % 8] |= (scale & 15) << (4 * (j / 8));
        out[104 + j % 4] |= (scale >> 4) << (2 * (j / 4));
    }
    put_f16(&mut out[108..110], block.d);
}

/// What Q4_K and Q5_K share: d, dmin, scales and mins first, nibbles from `nibbles` on.
fn put_k(out: &mut [u8], block: &Offsets<8>, nibbles: usize) {
    put_f16(&mut out[..2], block.d);
    put_f16(&mut out[2..4], block.dmin);
    put_scales_and_mins(&mut out[4..16], block.pairs);
    out[16..].fill(0);
    for (i, q) in block.q.iter().enumerate() {
        out[nibbles + i / 64 * 32 + i % 32] |= (q & 15) << (4 * (i % 64 / 32));
    }
}

pub(super) fn encode_q4_k(x: &[f32], w: &[f32], out: &mut [u8]) {
    put_k(out, &with_offsets::<8>(x, w, 15.0, 63.0), 16);
}

pub(super) fn encode_q5_k(x: &[f32], w: &[f32], out: &mut [u8]) {
    let block = with_offsets::<8>(x, w, 31.0, 63.0);
    put_k(out, &block, 48);
    for (i, q) in block.q.iter().enumerate() {
        out[16 + i % 32] |= (q >> 4) << (i / 32);
    }
}

pub(super) fn encode_q6_k(x: &[f32], w: &[f32], out: &mut [u8]) {
    let block = without_offsets(x, w, 32.0, 128.0);
    let q = block.q.map(|q| (q + 32) as u8);
    out.fill(0);
    for (i, q) in q.iter().enumerate() {
        let (half, l) = (i / 128, i % 128);
        out[64 * half + l % 64] |= (q & 15) << (4 * (l / 64));
    }
    put_two_bits(&mut out[128..192], &q.map(|q| q >> 4));
    out[192..208].iter_mut().zip(block.scales).for_each(|(out, scale)| *out = scale as u8);
    put_f16(&mut out[208..210], block.d);
}
