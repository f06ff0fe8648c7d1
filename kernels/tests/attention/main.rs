//! Attention over every type of cache, mask and feature, on every instruction set of this machine.
//!
//! - `parity`: against the reference, and what is refused
//! - `invariance`: a row's bits depend on nothing but its sequence
//! - `shared`: groups of several shapes in one memory
//! - `quality`: what the byte types lose, against bounds that follow from their definition

#![allow(clippy::unwrap_used, clippy::panic, clippy::needless_range_loop)] // Helpers of tests.

#[path = "../common/mod.rs"]
mod common;
mod harness;
mod invariance;
mod parity;
mod quality;
mod shared;
