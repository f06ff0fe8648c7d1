//! 4-bit values through a table, nibbles ordered as in Q4_0.
//!
//! IQ4_NL: d, 16 bytes: d·T[q]. IQ4_XS: d, 16 high bits and 4 bytes of low nibbles of eight scales, 128 bytes:
//! d·(scale − 32)·T[q] per 32 columns. MXFP4: an exponent e, 16 bytes: 2^(e − 128)·K[q], where K is twice E2M1.

use super::f16_at;

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
