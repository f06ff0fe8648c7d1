//! `/v1/models`, `/version`, `/ping`.

use std::sync::Arc;

use axum::{
    extract::{Path, State},
    response::{IntoResponse as _, Response},
};
use http::StatusCode;
use serde_json::{Value, json};

use crate::{
    core::ModelView,
    error::ApiError,
    http::{App, reply},
};

/// `GET /v1/models`: every name, the canonical ones before their aliases.
pub async fn list(State(app): State<Arc<App>>) -> Response {
    let models = app.core.models();
    let data: Vec<Value> = models.iter().flat_map(|model| model.names.iter().map(|name| object(model, name))).collect();
    reply::json(StatusCode::OK, &json!({"object": "list", "data": data}))
}

/// `GET /v1/models/{name}`; names may hold slashes.
pub async fn one(State(app): State<Arc<App>>, Path(name): Path<String>) -> Result<Response, ApiError> {
    let model = app.core.model(&name)?;
    Ok(reply::json(StatusCode::OK, &object(&model, &name)))
}

/// `GET /version`.
pub async fn version() -> Response {
    reply::json(StatusCode::OK, &json!({"version": env!("CARGO_PKG_VERSION")}))
}

/// `/ping`, as SageMaker asks.
pub async fn ping(State(app): State<Arc<App>>) -> Response {
    let ready = app.readiness.ready().iter().all(|check| check.result.is_ok());
    if ready { StatusCode::OK.into_response() } else { ApiError::Unavailable("Not ready.".to_owned()).into_response() }
}

fn object(model: &ModelView, name: &str) -> Value {
    json!({
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "quire",
        "root": model.name,
        "parent": null,
        "max_model_len": model.max_context,
        "meta": {
            "architecture": model.architecture,
            "n_params": model.parameters,
            "n_vocab": model.vocab_size,
            "weights": model.weights,
            "available": model.available,
        },
    })
}
