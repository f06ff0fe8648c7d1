//! The OpenAI API to its letter, with the extensions that vLLM and llama.cpp clients use.
//!
//! - [`chat`], [`completions`]: parse → core → answer or chunks
//! - [`parameters`], [`messages`]: what of a body becomes a request
//! - [`wire`], [`logprobs`]: the objects of answers and chunks
//! - [`models`], [`tokenize`]: the small routes

pub mod chat;
pub mod completions;
pub mod logprobs;
pub mod messages;
pub mod models;
pub mod parameters;
pub mod tokenize;
pub mod wire;

use std::sync::Arc;

use axum::{
    Router,
    routing::{get, post},
};

use super::App;

/// All routes of this API.
pub fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/v1/chat/completions", post(chat::handle))
        .route("/v1/completions", post(completions::handle))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*name}", get(models::one))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route("/version", get(models::version))
        .route("/ping", get(models::ping).post(models::ping))
}
