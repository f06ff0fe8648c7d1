//! Every tensor type that a GGUF file may name, with the size of its blocks.

use quire_kernels::quant::TensorType;

/// A tensor type by its GGUF number, whether or not there is arithmetic for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GgmlType {
    /// In a file.
    pub number: u32,
    pub name: &'static str,
    /// Consecutive columns of one block.
    pub block: usize,
    /// Bytes of one block.
    pub bytes: usize,
    /// `None`: known, but no kernel reads it.
    pub kernel: Option<TensorType>,
}

/// Number, name, columns and bytes of a block of the types that no kernel reads.
const OTHERS: &[(u32, &str, usize, usize)] = &[
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (24, "I8", 1, 1),
    (25, "I16", 1, 2),
    (26, "I32", 1, 4),
    (27, "I64", 1, 8),
    (28, "F64", 1, 8),
    (29, "IQ1_M", 256, 56),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (40, "NVFP4", 64, 36),
    (41, "Q1_0", 128, 18),
    (42, "Q2_0", 64, 18),
];

impl GgmlType {
    /// The type of this number, or why there is none.
    pub fn from_number(number: u32) -> Result<Self, String> {
        if let Some(kernel) = TensorType::from_gguf(number) {
            return Ok(Self { number, name: kernel.name(), block: kernel.block_len(), bytes: kernel.block_bytes(), kernel: Some(kernel) });
        }
        if let Some(&(_, name, block, bytes)) = OTHERS.iter().find(|(other, ..)| *other == number) {
            return Ok(Self { number, name, block, bytes, kernel: None });
        }
        Err(match number {
            4 | 5 => format!("has type {number} (Q4_2 or Q4_3), which was withdrawn long ago: convert the model again"),
            9 | 15 => format!("has type {number} (Q8_1 or Q8_K), which is for activations and is never stored"),
            31..=33 | 36..=38 => format!("has type {number} (an interleaved Q4_0 or IQ4_NL), which was withdrawn: convert the model again"),
            _ => format!("has the unknown type {number}"),
        })
    }

    /// Names of all types that can be computed with.
    #[must_use]
    pub fn supported() -> String {
        TensorType::ALL.map(TensorType::name).join(", ")
    }
}
