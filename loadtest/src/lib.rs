//! Load for OpenAI-compatible servers, and figures that hold.
//!
//! * [`schedule`]: when requests are meant to start (pure).
//! * [`prompt`]: what they ask (pure); [`calibrate`] finds how much text makes a token, by the server's own count.
//! * [`client`]: one streamed request, timed; [`sse`] cuts the stream into events, [`stream`] says what they mean.
//! * [`drive`]: sends them, closed or open loop, and never drops an arrival.
//! * [`tally`] and [`report`]: what came back, as numbers, a table and JSON.
//! * [`mock`]: a server with scripted times and faults, so that the client can prove its own error
//!   ([`selftest`]).
//! * [`itl`]: what running streams feel of a long prompt.
//! * [`soak`]: very many short requests of every kind, and what the server holds afterwards.
//! * [`cli`]: the flags of `quire bench`.
//!
//! Times, all from one monotonic clock: the intended start comes from the arrival process, not from when the client got round to it.
//! TTFT is the first delta that carries output, E2E the end of the stream, TPOT `(last delta - first delta) / (output tokens - 1)`,
//! ITL every gap between two deltas, counted once for each token of the later one.

#![forbid(unsafe_code)]

pub mod calibrate;
pub mod cli;
pub mod client;
pub mod drive;
mod error;
pub mod itl;
pub mod mock;
pub mod prompt;
pub mod report;
pub mod schedule;
pub mod selftest;
pub mod soak;
pub mod sse;
pub mod stream;
pub mod tally;

pub use error::Error;
pub use report::Report;
