//! Q8_0: d, 32 signed bytes: d·q.

use super::{
    f16_at,
    fit::{inverse, level},
    put_f16,
};

pub(super) fn q8_0_block(bytes: &[u8], out: &mut [f32]) {
    let d = f16_at(bytes, 0);
    for (out, &byte) in out.iter_mut().zip(&bytes[2..34]) {
        *out = d * f32::from(byte as i8);
    }
}

/// d = the largest magnitude ÷ 127.
pub(super) fn encode_q8_0(x: &[f32], _: &[f32], out: &mut [u8]) {
    let most = x.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
    let d = put_f16(&mut out[..2], most / 127.0);
    let inverse = inverse(d);
    for (out, x) in out[2..].iter_mut().zip(x) {
        *out = level(x * inverse, -127.0, 127.0) as i8 as u8;
    }
}
