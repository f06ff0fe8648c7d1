//! Q5_0: d, 32 high bits, 16 bytes of nibbles: d·(q − 16). Q5_1: d, m, high bits, nibbles: d·q + m.
//! Nibbles as in Q4_0; bit j of the high bits is the fifth bit of column j.

use super::f16_at;

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
