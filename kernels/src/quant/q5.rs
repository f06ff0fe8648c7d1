//! Q5_0: d, 32 high bits, 16 bytes of nibbles: d·(q − 16). Q5_1: d, m, high bits, nibbles: d·q + m.
//! Nibbles as in Q4_0; bit j of the high bits is the fifth bit of column j.

use super::{f16_at, fit, put_f16, q4::put_nibbles};

/// The 5-bit values of columns `i` and `i + 16`.
fn pair(high: u32, byte: u8, i: usize) -> (u8, u8) {
    let bit = |column: usize| ((high >> column) as u8 & 1) << 4;
    (byte & 15 | bit(i), byte >> 4 | bit(i + 16))
}

pub(super) fn q5_0_block(bytes: &[u8], out: &mut [f32]) {
    let d = f16_at(bytes, 0);
    let high = u32::from_le_bytes([bytes[2], bytes[3], bytes[4], bytes[5]]);
    for (i, &byte) in bytes[6..22].iter().enumerate() {
        let (low, up) = pair(high, byte, i);
        out[i] = d * (f32::from(low) - 16.0);
        out[i + 16] = d * (f32::from(up) - 16.0);
    }
}

pub(super) fn q5_1_block(bytes: &[u8], out: &mut [f32]) {
    let (d, m) = (f16_at(bytes, 0), f16_at(bytes, 2));
    let high = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
    for (i, &byte) in bytes[8..24].iter().enumerate() {
        let (low, up) = pair(high, byte, i);
        out[i] = d * f32::from(low) + m;
        out[i + 16] = d * f32::from(up) + m;
    }
}

/// High bits, then nibbles.
fn put_five_bits(out: &mut [u8], q: impl Fn(usize) -> u8) {
    let high = (0..32).fold(0_u32, |high, i| high | u32::from(q(i) >> 4 & 1) << i);
    out[..4].copy_from_slice(&high.to_le_bytes());
    put_nibbles(&mut out[4..], q);
}

pub(super) fn encode_q5_0(x: &[f32], w: &[f32], out: &mut [u8]) {
    let d = put_f16(&mut out[..2], fit::symmetric(x, w, 16.0));
    let inverse = fit::inverse(d);
    put_five_bits(&mut out[2..], |i| (fit::level(x[i] * inverse, -16.0, 15.0) + 16.0) as u8);
}

pub(super) fn encode_q5_1(x: &[f32], w: &[f32], out: &mut [u8]) {
    let (d, m) = fit::affine(x, w, 31.0, fit::Offset::Any);
    let (d, m) = (put_f16(&mut out[..2], d), put_f16(&mut out[2..4], m));
    let inverse = fit::inverse(d);
    put_five_bits(&mut out[4..], |i| fit::level((x[i] - m) * inverse, 0.0, 31.0) as u8);
}
