//! Numbers only: fused operations over caller-owned buffers, on one device.
//!
//! - [`backend`]: the trait that a device implements, cut at fusion size
//! - [`plan`]: what one step computes, as flat arrays
//! - [`quant`]: weight block formats: decode (and, per instruction set, pack)
//! - [`reference`]: scalar f32 of every op; the definition, never optimised
//! - [`cpu`]: the fast one, dispatched at run time over instruction sets
//!
//! Knows shapes, data types and instruction sets; no request, no model name.

pub mod backend;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod error;
pub mod plan;
pub mod quant;
pub mod reference;

pub use error::KernelError;
