//! Numbers only: fused operations over caller-owned buffers, on one device.
//!
//! - [`backend`]: the trait that a device implements, cut at fusion size; [`args`]: what its ops take
//! - [`routing`]: which experts a row goes to
//! - [`kv`]: how keys and values are stored, and which of them a row sees
//! - [`plan`]: what one step computes, as flat arrays
//! - [`inputs`]: a checked copy of it in host memory
//! - [`sampling`]: how logits become tokens, to the bit
//! - [`quant`]: weight block formats: decode (and, per instruction set, pack)
//! - [`reference`]: scalar f32 of every op; the definition, never optimised
//! - [`cpu`]: the fast one, dispatched at run time over instruction sets
//!
//! Knows shapes, data types and instruction sets; no request, no model name.

// Kernels take many things and walk several arrays in lockstep.
#![allow(clippy::too_many_arguments, clippy::needless_range_loop)]

pub mod args;
pub mod backend;
mod checks;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod error;
pub mod inputs;
pub mod kv;
pub mod plan;
pub mod quant;
pub mod reference;
pub mod routing;
pub mod sampling;

pub use error::KernelError;
