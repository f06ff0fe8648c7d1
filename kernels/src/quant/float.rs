//! F32, F16 and BF16, little endian: one value is a block.

pub(super) fn f32_block(bytes: &[u8], out: &mut [f32]) {
    out[0] = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
}

pub(super) fn f16_block(bytes: &[u8], out: &mut [f32]) {
    out[0] = super::f16_at(bytes, 0);
}

pub(super) fn bf16_block(bytes: &[u8], out: &mut [f32]) {
    out[0] = half::bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
}

pub(super) fn encode_f32(x: &[f32], _: &[f32], out: &mut [u8]) {
    out.copy_from_slice(&x[0].to_le_bytes());
}

/// Magnitudes above 65504 become that.
pub(super) fn encode_f16(x: &[f32], _: &[f32], out: &mut [u8]) {
    out.copy_from_slice(&super::f16_bits(x[0]));
}

pub(super) fn encode_bf16(x: &[f32], _: &[f32], out: &mut [u8]) {
    out.copy_from_slice(&half::bf16::from_f32(x[0]).to_le_bytes());
}
