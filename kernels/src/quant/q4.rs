//! Q4_0: d, 16 bytes: d·(q − 8). Q4_1: d, m, 16 bytes: d·q + m. Low nibbles are columns 0 to 15, high ones 16 to 31.

use super::{f16_at, fit, put_f16};

pub(super) fn q4_0_block(bytes: &[u8], out: &mut [f32]) {
    let d = f16_at(bytes, 0);
    for (i, &byte) in bytes[2..18].iter().enumerate() {
        out[i] = d * (f32::from(byte & 15) - 8.0);
        out[i + 16] = d * (f32::from(byte >> 4) - 8.0);
    }
}

pub(super) fn q4_1_block(bytes: &[u8], out: &mut [f32]) {
    let (d, m) = (f16_at(bytes, 0), f16_at(bytes, 2));
    for (i, &byte) in bytes[4..20].iter().enumerate() {
        out[i] = d * f32::from(byte & 15) + m;
        out[i + 16] = d * f32::from(byte >> 4) + m;
    }
}

/// Nibbles of 32 values: columns 0 to 15 low, 16 to 31 high.
pub(super) fn put_nibbles(out: &mut [u8], q: impl Fn(usize) -> u8) {
    out.iter_mut().enumerate().for_each(|(i, out)| *out = q(i) & 15 | (q(i + 16) & 15) << 4);
}

pub(super) fn encode_q4_0(x: &[f32], w: &[f32], out: &mut [u8]) {
    let d = put_f16(&mut out[..2], fit::symmetric(x, w, 8.0));
    let inverse = fit::inverse(d);
    put_nibbles(&mut out[2..], |i| (fit::level(x[i] * inverse, -8.0, 7.0) + 8.0) as u8);
}

pub(super) fn encode_q4_1(x: &[f32], w: &[f32], out: &mut [u8]) {
    let (d, m) = fit::affine(x, w, 15.0, fit::Offset::Any);
    let (d, m) = (put_f16(&mut out[..2], d), put_f16(&mut out[2..4], m));
    let inverse = fit::inverse(d);
    put_nibbles(&mut out[4..], |i| fit::level((x[i] - m) * inverse, 0.0, 15.0) as u8);
}
