//! Text in, tokens to workers, text out. Holds no state that cannot be rebuilt.
//!
//! - [`request`]: a request and its events as text: what every face speaks with the core
//! - [`core`]: the one path from request to events: validate, template, tokenize, dispatch, detokenize, stop
//! - [`text`]: chat template, tokenizer, incremental detokenizer, stop strings
//! - [`worker`], [`fleet`]: the trait to reach a worker; the workers there are, their health and load
//! - [`error`]: the one error type, and its mapping to HTTP, gRPC and metric labels
//! - [`http`], [`grpc`]: thin faces
//! - [`telemetry`]: metric names, spans

pub mod config;
pub mod core;
pub mod error;
pub mod fleet;
pub mod grpc;
pub mod http;
pub mod request;
pub mod server;
pub mod telemetry;
pub mod text;
pub mod worker;
