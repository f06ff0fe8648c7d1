//! 4-bit values through a table, nibbles ordered as in Q4_0.
//!
//! IQ4_NL: d, 16 bytes: d·T[q]. IQ4_XS: d, 16 high bits and 4 bytes of low nibbles of eight scales, 128 bytes:
//! d·(scale − 32)·T[q] per 32 columns. MXFP4: an exponent e, 16 bytes: 2^(e − 128)·K[q], where K is twice E2M1.

use super::{f16_at, fit, put_f16, q4::put_nibbles};

/// T of IQ4_NL and IQ4_XS.
pub const IQ4_VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// K of MXFP4: twice the E2M1 values.
pub const MXFP4_VALUES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// 2^(e − 128): half of what the E8M0 exponent says, subnormal for e below 2.
#[must_use]
pub fn e8m0_half(e: u8) -> f32 {
    if e < 2 { f32::from_bits(0x0020_0000 << e) } else { f32::from_bits((u32::from(e) - 1) << 23) }
}

fn nibbles(scale: f32, table: &[i8; 16], bytes: &[u8], out: &mut [f32]) {
    for (i, &byte) in bytes[..16].iter().enumerate() {
        out[i] = scale * f32::from(table[usize::from(byte & 15)]);
        out[i + 16] = scale * f32::from(table[usize::from(byte >> 4)]);
    }
}

pub(super) fn iq4_nl_block(bytes: &[u8], out: &mut [f32]) {
    nibbles(f16_at(bytes, 0), &IQ4_VALUES, &bytes[2..], out);
}

pub(super) fn iq4_xs_block(bytes: &[u8], out: &mut [f32]) {
    let d = f16_at(bytes, 0);
    for (j, out) in out.chunks_exact_mut(32).enumerate() {
        nibbles(d * f32::from(iq4_xs_scale(bytes, j)), &IQ4_VALUES, &bytes[8 + 16 * j..], out);
    }
}

/// Scale of sub-block `j` (0 to 7) of an IQ4_XS block, −32 to 31.
pub(crate) fn iq4_xs_scale(bytes: &[u8], j: usize) -> i8 {
    let low = bytes[4 + j / 2] >> (4 * (j % 2)) & 15;
    let high = (u16::from_le_bytes([bytes[2], bytes[3]]) >> (2 * j) & 3) as u8;
    (low | high << 4) as i8 - 32
}

pub(super) fn mxfp4_block(bytes: &[u8], out: &mut [f32]) {
    nibbles(e8m0_half(bytes[0]), &MXFP4_VALUES, &bytes[1..], out);
}

/// Positions in the table of the values nearest to −128, −127, … 127.
static NEAREST: [u8; 256] = {
    let mut table = [0; 256];
    let mut i = 0;
    while i < 256 {
        let x = i as i32 - 128;
        // Past the middle between this one and the next.
        while table[i] < 15 && 2 * x > IQ4_VALUES[table[i] as usize] as i32 + IQ4_VALUES[table[i] as usize + 1] as i32 {
            table[i] += 1;
        }
        i += 1;
    }
    table
};

/// Position in the table of the value nearest to `x`, to the half that rounding to an integer leaves.
fn nearest_iq4(x: f32) -> u8 {
    NEAREST[(fit::level(x, -128.0, 127.0) + 128.0) as usize & 255]
}

/// s with x ≈ s·T\[q\]; negative where the extreme value is positive.
fn iq4_scale(x: &[f32], w: &[f32]) -> f32 {
    let extreme = x.iter().fold(0.0_f32, |most, x| if x.abs() > most.abs() { *x } else { most });
    if extreme.abs() < 1e-15 {
        return 0.0;
    }
    let (mut score, mut scale) = (0.0, 0.0);
    for step in -7..=7 {
        let inverse = (step as f32 - 127.0) / extreme;
        let (mut xt, mut tt) = (0.0, 0.0);
        for (x, w) in x.iter().zip(w) {
            let t = f32::from(IQ4_VALUES[usize::from(nearest_iq4(x * inverse))]);
            xt += w * x * t;
            tt += w * t * t;
        }
        if tt > 0.0 && xt * xt > score * tt {
            (score, scale) = (xt * xt / tt, xt / tt);
        }
    }
    scale
}

pub(super) fn encode_iq4_nl(x: &[f32], w: &[f32], out: &mut [u8]) {
    let inverse = fit::inverse(put_f16(&mut out[..2], iq4_scale(x, w)));
    put_nibbles(&mut out[2..], |i| nearest_iq4(x[i] * inverse));
}

pub(super) fn encode_iq4_xs(x: &[f32], w: &[f32], out: &mut [u8]) {
    let part = |values: &[f32], j: usize| -> [f32; 32] { std::array::from_fn(|i| values[32 * j + i]) };
    let scales: [f32; 8] = std::array::from_fn(|j| iq4_scale(&part(x, j), &part(w, j)));
    let weights: [f32; 8] = std::array::from_fn(|j| part(w, j).iter().sum());
    let d = put_f16(&mut out[..2], fit::symmetric(&scales, &weights, 32.0));
    let mut high = 0_u16;
    out[4..8].fill(0);
    for (j, scale) in scales.iter().enumerate() {
        let scale = fit::level(scale * fit::inverse(d), -32.0, 31.0);
        let stored = (scale + 32.0) as u8;
        out[4 + j / 2] |= (stored & 15) << (4 * (j % 2));
        high |= u16::from(stored >> 4) << (2 * j);
        let inverse = fit::inverse(d * scale);
        put_nibbles(&mut out[8 + 16 * j..][..16], |i| nearest_iq4(x[32 * j + i] * inverse));
    }
    out[2..4].copy_from_slice(&high.to_le_bytes());
}

/// The E2M1 code nearest to `x`, where K counts halves.
fn nearest_e2m1(x: f32) -> u8 {
    const BETWEEN: [f32; 7] = [0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0];
    let magnitude = x.abs();
    BETWEEN.iter().fold(0, |count, between| count + u8::from(magnitude > *between)) | u8::from(x < 0.0) << 3
}

/// The exponent that loses least of those that put the largest value near the end of the range.
pub(super) fn encode_mxfp4(x: &[f32], w: &[f32], out: &mut [u8]) {
    let most = x.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
    let usual = ((most.to_bits() >> 23) as u8).saturating_sub(2);
    let error = |e: u8| -> f32 {
        let (scale, inverse) = (e8m0_half(e), 1.0 / e8m0_half(e));
        let lost = |x: f32| x - scale * f32::from(MXFP4_VALUES[usize::from(nearest_e2m1(x * inverse))]);
        x.iter().zip(w).map(|(x, w)| w * lost(*x) * lost(*x)).sum()
    };
    let candidates = [usual, usual.saturating_add(1).min(254), usual.saturating_sub(1)];
    let best = candidates.into_iter().min_by(|a, b| error(*a).total_cmp(&error(*b))).unwrap_or(usual);
    out[0] = best;
    let inverse = 1.0 / e8m0_half(best);
    put_nibbles(&mut out[1..], |i| if most == 0.0 { 0 } else { nearest_e2m1(x[i] * inverse) });
}
