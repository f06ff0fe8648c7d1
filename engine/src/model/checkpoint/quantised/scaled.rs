//! 8-bit floats and integers under scales: one for all, one per row, or one per block.

use half::f16;
use quire_kernels::quant::TensorType;
use rayon::prelude::*;

use super::exact;
use crate::model::safetensors::{Dtype, decode_f8};

/// `matrices` × `rows` × `columns` bytes: s·q, or s·(q − z).
#[derive(Debug)]
pub(in crate::model::checkpoint) struct ScaledMatrix<'a> {
    pub matrices: usize,
    pub rows: usize,
    pub columns: usize,
    pub dtype: Dtype,
    pub data: &'a [u8],
    /// Rows and columns that share a scale.
    pub block: [usize; 2],
    /// Per matrix, block row and block column; or one.
    pub scales: Vec<f32>,
    /// As the scales; empty: none.
    pub zeros: Vec<f32>,
}

impl ScaledMatrix<'_> {
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Scale number of a row (of all matrices) and a column.
    fn scale(&self, row: usize, column: usize) -> usize {
        if self.scales.len() == 1 {
            return 0;
        }
        let (down, across) = (self.rows.div_ceil(self.block[0]), self.columns.div_ceil(self.block[1]));
        // One per matrix of a stack is a block of the whole matrix.
        ((row / self.rows * down) + row % self.rows / self.block[0]) * across + column / self.block[1]
    }

    pub fn decode(&self) -> (TensorType, Vec<u8>) {
        let blocks = self.columns.is_multiple_of(32)
            && (self.scales.len() == 1 || self.block[1].is_multiple_of(32) || self.block[1] >= self.columns);
        if self.dtype == Dtype::I8 && self.zeros.is_empty() && blocks && self.scales.iter().all(|scale| exact::is_f16(*scale)) {
            return (TensorType::Q8_0, self.repack());
        }
        exact::smallest(&self.to_f32())
    }

    fn repack(&self) -> Vec<u8> {
        let row_bytes = TensorType::Q8_0.row_bytes(self.columns);
        let mut out = vec![0; self.matrices * self.rows * row_bytes];
        let rows = out.par_chunks_mut(row_bytes.max(1)).zip(self.data.par_chunks(self.columns.max(1)));
        rows.enumerate().for_each(|(row, (out, q))| {
            for (block, (out, q)) in out.chunks_exact_mut(34).zip(q.chunks_exact(32)).enumerate() {
                out[..2].copy_from_slice(&f16::from_f32(self.scales[self.scale(row, 32 * block)]).to_le_bytes());
                out[2..].copy_from_slice(q);
            }
        });
        out
    }

    fn to_f32(&self) -> Vec<f32> {
        let table: [f32; 256] = std::array::from_fn(|byte| match self.dtype {
            Dtype::I8 => f32::from(byte as u8 as i8),
            dtype => decode_f8(dtype, byte as u8),
        });
        let mut out = vec![0.0; self.data.len()];
        let rows = out.par_chunks_mut(self.columns.max(1)).zip(self.data.par_chunks(self.columns.max(1)));
        rows.enumerate().for_each(|(row, (out, q))| {
            for (column, (out, q)) in out.iter_mut().zip(q).enumerate() {
                let scale = self.scale(row, column);
                let zero = self.zeros.get(scale).copied().unwrap_or(0.0);
                *out = self.scales[scale] * (table[usize::from(*q)] - zero);
            }
        });
        out
    }
}
