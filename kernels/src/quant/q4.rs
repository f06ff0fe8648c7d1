//! Q4_0: d, 16 bytes: d·(q − 8). Q4_1: d, m, 16 bytes: d·q + m. Low nibbles are columns 0 to 15, high ones 16 to 31.

use super::f16_at;

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
