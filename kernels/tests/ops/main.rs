//! Every op with everything that is optional in it, on every instruction set of this machine.
//!
//! - `parity`: against the reference
//! - `invariance`: a row's bits depend on nothing but its sequence
//! - `meaning`: what options mean, where both backends could be wrong together

#![allow(clippy::unwrap_used, clippy::panic, clippy::needless_range_loop)] // Helpers of tests.

mod cases;
#[path = "../common/mod.rs"]
mod common;
mod experts;
mod harness;
mod invariance;
mod meaning;
mod parity;
mod queries;
