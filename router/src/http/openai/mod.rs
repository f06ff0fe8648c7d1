//! The OpenAI API to its letter, with the extensions that vLLM and llama.cpp clients use.
//!
//! - [`chat`] with [`chat_answer`], [`completions`]: parse → core → answer or chunks
//! - [`parameters`], [`messages`]: what of a body becomes a request
//! - [`wire`], [`logprobs`]: the objects of answers and chunks
//! - [`responses`]: the newer form of chat, without storage
//! - [`models`], [`tokenize`]: the small routes
//! - [`openapi`]: the description of all of them

pub mod chat;
pub mod chat_answer;
pub mod completions;
pub mod logprobs;
pub mod messages;
pub mod models;
pub mod openapi;
mod openapi_fields;
pub mod parameters;
pub mod responses;
mod responses_answer;
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
        .route("/v1/responses", post(responses::handle))
        .route("/openapi.json", get(openapi::handle))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*name}", get(models::one))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route("/version", get(models::version))
        .route("/ping", get(models::ping).post(models::ping))
}
