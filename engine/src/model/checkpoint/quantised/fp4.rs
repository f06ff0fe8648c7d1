//! Four-bit floats (E2M1): MXFP4 and NVFP4. Consecutive columns share a byte, the even one in the low nibble.

use quire_kernels::quant::TensorType;
use rayon::prelude::*;

use super::exact;
use crate::model::safetensors::{Dtype, decode_f8};

/// E2M1 by its four bits.
const E2M1: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Blocks of 32 columns under an E8M0 exponent: 16 bytes each, and one.
#[derive(Debug)]
pub(in crate::model::checkpoint) struct Mxfp4<'a> {
    pub blocks: &'a [u8],
    pub exponents: &'a [u8],
}

impl Mxfp4<'_> {
    /// The same block in GGUF's order: exponent, then columns 0 to 15 in the low nibbles and 16 to 31 in the high ones.
    pub fn decode(&self) -> (TensorType, Vec<u8>) {
        let mut out = vec![0; self.exponents.len() * 17];
        let blocks = out.par_chunks_exact_mut(17).zip(self.blocks.par_chunks_exact(16)).zip(self.exponents);
        blocks.for_each(|((out, block), exponent)| {
            out[0] = *exponent;
            let q = |column: usize| block[column / 2] >> (4 * (column % 2)) & 15;
            out[1..].iter_mut().enumerate().for_each(|(i, out)| *out = q(i) | q(i + 16) << 4);
        });
        (TensorType::MXFP4, out)
    }
}

/// Blocks of 16 columns under an E4M3 scale, all under one factor.
#[derive(Debug)]
pub(in crate::model::checkpoint) struct Nvfp4<'a> {
    pub packed: &'a [u8],
    pub scales: &'a [u8],
    pub factor: Factor,
}

/// What all scales are multiplied with or divided by.
#[derive(Clone, Copy, Debug)]
pub(in crate::model::checkpoint) enum Factor {
    Times(f32),
    Over(f32),
}

impl Nvfp4<'_> {
    pub fn decode(&self) -> (TensorType, Vec<u8>) {
        let mut values = vec![0.0; self.packed.len() * 2];
        let blocks = values.par_chunks_exact_mut(16).zip(self.packed.par_chunks_exact(8)).zip(self.scales);
        blocks.for_each(|((out, packed), scale)| {
            let scale = decode_f8(Dtype::F8_E4M3, *scale);
            let scale = match self.factor {
                Factor::Times(factor) => scale * factor,
                Factor::Over(factor) => scale / factor,
            };
            for (column, out) in out.iter_mut().enumerate() {
                *out = scale * E2M1[usize::from(packed[column / 2] >> (4 * (column % 2)) & 15)];
            }
        });
        exact::smallest(&values)
    }
}
