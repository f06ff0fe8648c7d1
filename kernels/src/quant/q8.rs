//! Q8_0: d, 32 signed bytes: d·q.

use super::f16_at;

pub(super) fn q8_0_block(bytes: &[u8], out: &mut [f32]) {
    let d = f16_at(bytes, 0);
    for (out, &byte) in out.iter_mut().zip(&bytes[2..34]) {
        *out = d * f32::from(byte as i8);
    }
}
