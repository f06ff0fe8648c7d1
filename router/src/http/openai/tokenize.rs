//! `/tokenize` and `/detokenize` in vLLM's shape; llama.cpp's `content` works too.

use std::sync::Arc;

use axum::{extract::State, response::Response};
use http::StatusCode;
use serde::Serialize;
use serde_json::json;

use super::{messages, wire};
use crate::{
    core::TokenizeInput,
    error::ApiError,
    http::{App, body::JsonCall, fields::Fields, reply},
};

#[derive(Serialize)]
struct Tokens {
    count: usize,
    max_model_len: u32,
    tokens: Vec<u32>,
    token_strs: Option<Vec<String>>,
}

/// `POST /tokenize`.
pub async fn tokenize(State(app): State<Arc<App>>, call: JsonCall) -> Result<Response, ApiError> {
    let body = Fields::root(&call.body)?;
    let input = input(&body)?;
    let with_strings = body.boolean("return_token_strs")?.unwrap_or(false);
    let model = wire::model(&app, body.string("model")?)?;
    let tokenized = app.core.tokenize(&model.name, input).await?;
    let answer = Tokens {
        count: tokenized.ids.len(),
        max_model_len: tokenized.max_context,
        tokens: tokenized.ids,
        token_strs: with_strings.then_some(tokenized.pieces),
    };
    Ok(reply::json(StatusCode::OK, &answer))
}

fn input(body: &Fields<'_>) -> Result<TokenizeInput, ApiError> {
    if body.get("messages").is_some() {
        return Ok(TokenizeInput::Chat(messages::chat_prompt(body)?));
    }
    // Each with the default of the server that it comes from.
    let (text, add_special_tokens) = match (body.string("prompt")?, body.string("content")?) {
        (Some(prompt), _) => (prompt, body.boolean("add_special_tokens")?.unwrap_or(true)),
        (None, Some(content)) => (content, body.boolean("add_special")?.unwrap_or(false)),
        (None, None) => return Err(ApiError::invalid("prompt", "One of `prompt` and `messages` is needed.")),
    };
    Ok(TokenizeInput::Text { text: text.to_owned(), add_special_tokens })
}

/// `POST /detokenize`.
pub async fn detokenize(State(app): State<Arc<App>>, call: JsonCall) -> Result<Response, ApiError> {
    let body = Fields::root(&call.body)?;
    let ids = body.ids("tokens")?.ok_or_else(|| ApiError::invalid("tokens", "`tokens` is missing."))?;
    let model = wire::model(&app, body.string("model")?)?;
    let text = app.core.detokenize(&model.name, &ids).await?;
    Ok(reply::json(StatusCode::OK, &json!({"prompt": text, "content": text})))
}
