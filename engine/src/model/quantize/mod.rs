//! A model's weights in fewer bits: `quire quantize`, and quantisation at load.
//!
//! Owns which tensors are quantised and to what ([`Mix`]), importance matrices, and the written file. The arithmetic is the
//! kernels'.

mod file;
mod importance;
mod mix;

pub use file::{QuantizeError, QuantizeOptions, Summary, quantize_file};
pub use importance::Importance;
pub use mix::{Choice, Mix, ModelFacts, fallback};

use quire_kernels::{
    KernelError,
    quant::{TensorType, TensorView, dequantize, quantize},
};
use rayon::prelude::*;

/// Values that a thread decodes at a time.
const PIECE: usize = 1 << 18;

/// A tensor in another type. Rows whose length is no whole number of that type's blocks can't be had.
///
/// `importance`: one number per column, or one set of them per matrix of a stack.
///
/// # Errors
/// [`KernelError::Shape`]: lengths that do not fit, or values that are not finite.
pub fn requantise(view: &TensorView<'_>, tensor_type: TensorType, importance: Option<&[f32]>) -> Result<Vec<u8>, KernelError> {
    view.check("requantise")?;
    let columns = view.columns;
    if columns == 0 || !columns.is_multiple_of(tensor_type.block_len()) {
        let detail = format!("{columns} columns are no multiple of {}'s block of {}", tensor_type.name(), tensor_type.block_len());
        return Err(KernelError::Shape { op: "requantise", detail });
    }
    let matrices = importance.map_or(1, |importance| (importance.len() / columns).max(1));
    let whole = importance.is_none_or(|importance| importance.len() == matrices * columns);
    if !whole || !view.rows.is_multiple_of(matrices) {
        let detail =
            format!("an importance of {} numbers does not fit {} rows of {columns}", importance.map_or(0, <[f32]>::len), view.rows);
        return Err(KernelError::Shape { op: "requantise", detail });
    }
    let rows_each = view.rows / matrices;
    let (from, to) = (view.tensor_type.row_bytes(columns), tensor_type.row_bytes(columns));
    let mut out = vec![0; view.rows * to];
    // Pieces never cross matrices.
    let rows = (1..=(PIECE / columns).max(1).min(rows_each.max(1))).rev().find(|rows| rows_each.is_multiple_of(*rows)).unwrap_or(1);
    out.par_chunks_mut(rows * to).zip(view.data.par_chunks(rows * from)).enumerate().try_for_each_init(
        || vec![0.0; rows * columns],
        |values, (piece, (out, bytes))| {
            dequantize(view.tensor_type, bytes, values)?;
            let importance = importance.map(|importance| &importance[piece * rows / rows_each * columns..][..columns]);
            quantize(tensor_type, values, columns, importance, out)
        },
    )?;
    Ok(out)
}
