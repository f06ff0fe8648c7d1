//! Weight block formats: one file each, decode to f32 and encode; and the one form of quantised activations.
//!
//! A matrix row is a run of blocks; a block holds a fixed number of consecutive columns. Formats and their byte order are
//! those of GGUF. Nothing here is fast: decoders define the values that packed kernels must reproduce.

mod activation;
mod encode;
mod fit;
mod float;
mod iq4;
mod k_quants;
mod q4;
mod q5;
mod q8;

pub use activation::{ACTIVATION_BLOCK, quantize_activations};
pub use encode::quantize;
pub(crate) use iq4::{IQ4_VALUES, MXFP4_VALUES, e8m0_half, iq4_xs_scale};
pub(crate) use k_quants::{q3_k_scales, scales_and_mins};

use crate::KernelError;

/// Type of a stored tensor, by its GGUF name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types)]
pub enum TensorType {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
}

impl TensorType {
    /// Every type that can be decoded.
    pub const ALL: [Self; 16] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q2_K,
        Self::Q3_K,
        Self::Q4_K,
        Self::Q5_K,
        Self::Q6_K,
        Self::IQ4_NL,
        Self::IQ4_XS,
        Self::MXFP4,
    ];

    /// GGUF number, name, columns and bytes of a block.
    const fn facts(self) -> (u32, &'static str, usize, usize) {
        match self {
            Self::F32 => (0, "F32", 1, 4),
            Self::F16 => (1, "F16", 1, 2),
            Self::BF16 => (30, "BF16", 1, 2),
            Self::Q4_0 => (2, "Q4_0", 32, 18),
            Self::Q4_1 => (3, "Q4_1", 32, 20),
            Self::Q5_0 => (6, "Q5_0", 32, 22),
            Self::Q5_1 => (7, "Q5_1", 32, 24),
            Self::Q8_0 => (8, "Q8_0", 32, 34),
            Self::Q2_K => (10, "Q2_K", 256, 84),
            Self::Q3_K => (11, "Q3_K", 256, 110),
            Self::Q4_K => (12, "Q4_K", 256, 144),
            Self::Q5_K => (13, "Q5_K", 256, 176),
            Self::Q6_K => (14, "Q6_K", 256, 210),
            Self::IQ4_NL => (20, "IQ4_NL", 32, 18),
            Self::IQ4_XS => (23, "IQ4_XS", 256, 136),
            Self::MXFP4 => (39, "MXFP4", 32, 17),
        }
    }

    /// The type with this number in a GGUF file, if it can be decoded.
    #[must_use]
    pub fn from_gguf(id: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|tensor_type| tensor_type.gguf_id() == id)
    }

    /// Its number in a GGUF file.
    #[must_use]
    pub const fn gguf_id(self) -> u32 {
        self.facts().0
    }

    /// As GGUF spells it, e.g. `Q4_1`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.facts().1
    }

    /// Columns of one block.
    #[must_use]
    pub const fn block_len(self) -> usize {
        self.facts().2
    }

    /// Bytes of one block.
    #[must_use]
    pub const fn block_bytes(self) -> usize {
        self.facts().3
    }

    /// Bytes of a row of `columns`, which must be a multiple of [`TensorType::block_len`] (a rest is not counted).
    #[must_use]
    pub const fn row_bytes(self, columns: usize) -> usize {
        columns / self.block_len() * self.block_bytes()
    }

    /// F32, F16 or BF16: activations stay f32. All others take [`quantize_activations`].
    #[must_use]
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F16 | Self::BF16)
    }
}

/// A matrix in memory that the caller keeps: `rows × columns`, each row a whole number of blocks, rows one after the other.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    pub tensor_type: TensorType,
    pub rows: usize,
    pub columns: usize,
    pub data: &'a [u8],
}

impl<'a> TensorView<'a> {
    /// Bytes of row `row`; empty where there is none.
    #[must_use]
    pub fn row(&self, row: usize) -> &'a [u8] {
        let bytes = self.tensor_type.row_bytes(self.columns);
        self.data.get(row * bytes..(row + 1) * bytes).unwrap_or(&[])
    }

    /// Is the row a whole number of blocks, and the data as long as the shape says?
    ///
    /// # Errors
    /// [`KernelError::Shape`] names `op` and the mismatch.
    pub fn check(&self, op: &'static str) -> Result<(), KernelError> {
        let name = self.tensor_type.name();
        if !self.columns.is_multiple_of(self.tensor_type.block_len()) {
            let detail = format!("{} columns are no multiple of {name}'s block of {}", self.columns, self.tensor_type.block_len());
            return Err(KernelError::Shape { op, detail });
        }
        let bytes = self.rows.checked_mul(self.tensor_type.row_bytes(self.columns));
        if bytes != Some(self.data.len()) {
            let detail = format!("{} × {} of {name} with {} bytes", self.rows, self.columns, self.data.len());
            return Err(KernelError::Shape { op, detail });
        }
        Ok(())
    }
}

/// Decodes whole blocks: `bytes.len() / block_bytes · block_len` values.
///
/// # Errors
/// [`KernelError::Shape`] where `bytes` is no whole number of blocks, or `out` is not as long as they need.
pub fn dequantize(tensor_type: TensorType, bytes: &[u8], out: &mut [f32]) -> Result<(), KernelError> {
    let blocks = bytes.len() / tensor_type.block_bytes();
    if !bytes.len().is_multiple_of(tensor_type.block_bytes()) || out.len() != blocks * tensor_type.block_len() {
        let detail = format!("{} bytes of {} into {} values", bytes.len(), tensor_type.name(), out.len());
        return Err(KernelError::Shape { op: "dequantize", detail });
    }
    let block = match tensor_type {
        TensorType::F32 => float::f32_block,
        TensorType::F16 => float::f16_block,
        TensorType::BF16 => float::bf16_block,
        TensorType::Q4_0 => q4::q4_0_block,
        TensorType::Q4_1 => q4::q4_1_block,
        TensorType::Q5_0 => q5::q5_0_block,
        TensorType::Q5_1 => q5::q5_1_block,
        TensorType::Q8_0 => q8::q8_0_block,
        TensorType::Q2_K => k_quants::q2_k_block,
        TensorType::Q3_K => k_quants::q3_k_block,
        TensorType::Q4_K => k_quants::q4_k_block,
        TensorType::Q5_K => k_quants::q5_k_block,
        TensorType::Q6_K => k_quants::q6_k_block,
        TensorType::IQ4_NL => iq4::iq4_nl_block,
        TensorType::IQ4_XS => iq4::iq4_xs_block,
        TensorType::MXFP4 => iq4::mxfp4_block,
    };
    for (bytes, out) in bytes.chunks_exact(tensor_type.block_bytes()).zip(out.chunks_exact_mut(tensor_type.block_len())) {
        block(bytes, out);
    }
    Ok(())
}

/// The f16 at `bytes[at .. at + 2]`.
pub(crate) fn f16_at(bytes: &[u8], at: usize) -> f32 {
    half::f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// The f16 nearest to `x`, little endian; at most ±65504.
fn f16_bits(x: f32) -> [u8; 2] {
    half::f16::from_f32(x.clamp(-65504.0, 65504.0)).to_le_bytes()
}

/// Writes the f16 nearest to `x`; its value.
fn put_f16(out: &mut [u8], x: f32) -> f32 {
    out.copy_from_slice(&f16_bits(x));
    f16_at(out, 0)
}

/// The value of the f16 nearest to `x`.
fn rounded_f16(x: f32) -> f32 {
    f16_at(&f16_bits(x), 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_names_are_unique_and_found_again() {
        for tensor_type in TensorType::ALL {
            assert_eq!(TensorType::from_gguf(tensor_type.gguf_id()), Some(tensor_type));
            assert_eq!(format!("{tensor_type:?}"), tensor_type.name());
        }
        // Q8_1 and Q8_K are never in files; 4, 5, 31 were removed.
        for id in [4, 5, 9, 15, 31, 1000] {
            assert_eq!(TensorType::from_gguf(id), None);
        }
    }

    #[test]
    fn wrong_lengths_are_refused() {
        assert!(dequantize(TensorType::Q4_1, &[0; 19], &mut [0.0; 32]).is_err());
        assert!(dequantize(TensorType::Q4_1, &[0; 20], &mut [0.0; 31]).is_err());
        let view = TensorView { tensor_type: TensorType::Q8_0, rows: 2, columns: 32, data: &[0; 68] };
        assert!(view.check("test").is_ok());
        assert!(TensorView { columns: 33, ..view }.check("test").is_err());
        assert!(TensorView { rows: 3, ..view }.check("test").is_err());
        assert!(TensorView { rows: usize::MAX, ..view }.check("test").is_err());
    }
}
