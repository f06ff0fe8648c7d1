//! Weight block formats: one file each, decode to f32.
//!
//! A matrix row is a run of blocks; a block holds a fixed number of consecutive columns. Formats and their byte order are
//! those of GGUF.

use crate::KernelError;

/// Type of a stored tensor, by its GGUF number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types)]
pub enum TensorType {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q8_0,
    Q4_K,
    Q6_K,
}

/// A matrix in memory that the caller keeps: `rows × columns`, each row a whole number of blocks, rows one after the other.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    pub tensor_type: TensorType,
    pub rows: usize,
    pub columns: usize,
    pub data: &'a [u8],
}
