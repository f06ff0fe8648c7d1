//! Errors and JSON as HTTP responses.

use axum::{
    body::Body,
    response::{IntoResponse, Response},
};
use http::{HeaderValue, StatusCode, header};
use metrics::counter;
use serde::Serialize;

use crate::{error::ApiError, telemetry::names};

/// A JSON response.
pub fn json(status: StatusCode, body: &impl Serialize) -> Response {
    let bytes = match serde_json::to_vec(body) {
        Ok(bytes) => bytes,
        Err(error) => return ApiError::Internal(format!("The answer could not be written: {error}.")).into_response(),
    };
    let mut response = Response::new(Body::from(bytes));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// Counts an error by its code, once a call or stream that ends with it.
pub fn count(error: &ApiError) {
    counter!(names::ERRORS, "code" => error.code()).increment(1);
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        count(&self);
        if let Self::Internal(message) = &self {
            tracing::error!(message, "a call failed");
        }
        let mut response = Response::new(Body::from(self.body().to_string()));
        *response.status_mut() = StatusCode::from_u16(self.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        match self {
            Self::Overloaded { retry_after_s, .. } => {
                headers.insert(header::RETRY_AFTER, HeaderValue::from(retry_after_s));
            }
            Self::Unauthorized => {
                headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            Self::MethodNotAllowed(methods) => {
                if let Ok(methods) = HeaderValue::try_from(methods) {
                    headers.insert(header::ALLOW, methods);
                }
            }
            _ => {}
        }
        response
    }
}
