//! The smallest plain type that holds all values of a matrix.

use half::{bf16, f16};
use quire_kernels::quant::TensorType;
use rayon::prelude::*;

/// Rows that a thread takes at a time.
const PIECE: usize = 1 << 16;

/// Values as BF16 or F16 where that changes none of them, else as F32.
pub(super) fn smallest(values: &[f32]) -> (TensorType, Vec<u8>) {
    let all = |fits: fn(f32) -> bool| values.par_chunks(PIECE).all(|piece| piece.iter().all(|value| fits(*value)));
    if all(|value| bf16::from_f32(value).to_f32().to_bits() == value.to_bits()) {
        return (TensorType::BF16, write(values, |value| bf16::from_f32(value).to_le_bytes()));
    }
    if all(is_f16) {
        return (TensorType::F16, write(values, |value| f16::from_f32(value).to_le_bytes()));
    }
    (TensorType::F32, write(values, f32::to_le_bytes))
}

/// Is there an f16 of exactly this value?
pub(super) fn is_f16(value: f32) -> bool {
    f16::from_f32(value).to_f32().to_bits() == value.to_bits()
}

fn write<const N: usize>(values: &[f32], bytes: impl Fn(f32) -> [u8; N] + Sync) -> Vec<u8> {
    let mut out = vec![0; values.len() * N];
    out.par_chunks_mut(PIECE * N).zip(values.par_chunks(PIECE)).for_each(|(out, values)| {
        for (out, value) in out.chunks_exact_mut(N).zip(values) {
            out.copy_from_slice(&bytes(*value));
        }
    });
    out
}
