//! CPU.

pub mod activations;
pub mod isa;
pub mod linear;
pub mod pool;
