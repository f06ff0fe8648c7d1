//! Quantised checkpoints: several stored tensors → the one weight that they stand for.
//!
//! Owns the published layouts (GPTQ, AWQ, compressed-tensors, scaled FP8 and INT8, MXFP4, NVFP4) as weights only: what they
//! say of activations and of the KV cache is not used. Values are exact: a layout that one of the kernels' block types
//! can hold as it is becomes that type (symmetric INT4 → Q4_0, symmetric INT8 → Q8_0, MXFP4 → MXFP4); all others become
//! BF16 or F16 where those hold every value, else F32.
//!
//! | layout | stored | weight |
//! |---|---|---|
//! | GPTQ | `qweight` \[in·bits/32, out\], `qzeros` \[groups, out·bits/32\], `scales` \[groups, out\], `g_idx` \[in\] | s·(q − z) |
//! | AWQ | `qweight` \[in, out/8\], `qzeros` \[groups, out/8\], nibbles in the order 0 2 4 6 1 3 5 7, `scales` | s·(q − z) |
//! | compressed-tensors | `weight_packed` \[out, in·bits/32\], `weight_scale` \[out, groups\], `weight_zero_point`, `weight_g_idx` | s·(q − z) |
//! | FP8, INT8 | `weight` \[out, in\], `weight_scale` or `weight_scale_inv`: one, one per row, or one per block | s·q |
//! | MXFP4 | `…_blocks` \[…, in/32, 16\], `…_scales` \[…, in/32\] | 2^(e − 127)·E2M1 |
//! | NVFP4 | `weight_packed` \[out, in/2\], `weight_scale` \[out, in/16\], `weight_global_scale` | (s ÷ global)·E2M1 |

mod config;
mod exact;
mod fp4;
mod integers;
mod parts;
mod scaled;

pub use config::QuantConfig;
pub(super) use parts::{Parts, Weight, gather};

use quire_kernels::quant::TensorType;

use crate::model::ContentError;

/// What a weight is made of.
#[derive(Debug)]
pub(super) enum Recipe<'a> {
    Integers(integers::IntegerMatrix<'a>),
    Scaled(scaled::ScaledMatrix<'a>),
    Mxfp4(fp4::Mxfp4<'a>),
    Nvfp4(fp4::Nvfp4<'a>),
}

impl Recipe<'_> {
    /// The weight in a type that kernels read.
    pub(super) fn decode(&self) -> Result<(TensorType, Vec<u8>), ContentError> {
        Ok(match self {
            Self::Integers(matrix) => matrix.decode(),
            Self::Scaled(matrix) => matrix.decode(),
            Self::Mxfp4(matrix) => matrix.decode(),
            Self::Nvfp4(matrix) => matrix.decode(),
        })
    }

    /// For people.
    pub(super) fn type_name(&self) -> String {
        match self {
            Self::Integers(matrix) => format!("INT{}", matrix.bits()),
            Self::Scaled(matrix) => matrix.dtype().name().to_owned(),
            Self::Mxfp4(_) => "MXFP4".to_owned(),
            Self::Nvfp4(_) => "NVFP4".to_owned(),
        }
    }
}
