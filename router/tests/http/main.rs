//! The faces over real sockets: HTTP, server-sent events and gRPC on one listener, before a worker that says what a test
//! wants. Cases follow what clients of vLLM and OpenAI rely on.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod admin;
mod answers;
mod cases;
mod grpc;
mod refusals;
mod responses;
mod shutdown;
mod site;
mod streams;
mod tools;
