//! The one error type of the router, and its one mapping to HTTP status, gRPC code, OpenAI error object and metric label.

use serde_json::{Value, json};
use thiserror::Error;

/// Why a request was not, or not fully, answered.
#[derive(Clone, Debug, Error)]
pub enum ApiError {
    /// The request is wrong; `param` names the field.
    #[error("{message}")]
    Invalid { message: String, param: Option<String> },
    /// Prompt and output don't fit the model's context.
    #[error("{message}")]
    ContextLength { message: String, param: Option<String> },
    /// No such model.
    #[error("The model `{0}` does not exist; GET /v1/models lists those that do.")]
    ModelNotFound(String),
    /// No such route.
    #[error("{0}")]
    NotFound(String),
    #[error("Method not allowed; this route takes {0}.")]
    MethodNotAllowed(String),
    /// The body is larger than the limit.
    #[error("{0}")]
    TooLarge(String),
    /// The content type is not JSON.
    #[error("{0}")]
    UnsupportedMedia(String),
    /// Missing or wrong API key.
    #[error("Incorrect API key provided. Send it as `Authorization: Bearer KEY`.")]
    Unauthorized,
    /// Queues are full; try again later.
    #[error("{message}")]
    Overloaded { message: String, retry_after_s: u32 },
    /// Its deadline passed.
    #[error("The request's deadline passed before it was answered.")]
    Deadline,
    /// No worker can be reached, or it is draining.
    #[error("{0}")]
    Unavailable(String),
    /// A fault of ours.
    #[error("{0}")]
    Internal(String),
}

impl ApiError {
    /// The request is wrong in `param`.
    #[must_use]
    pub fn invalid(param: &str, message: impl Into<String>) -> Self {
        Self::Invalid { message: message.into(), param: Some(param.to_owned()) }
    }

    /// HTTP status.
    #[must_use]
    pub fn status(&self) -> u16 {
        match self {
            Self::Invalid { .. } | Self::ContextLength { .. } => 400,
            Self::Unauthorized => 401,
            Self::ModelNotFound(_) | Self::NotFound(_) => 404,
            Self::MethodNotAllowed(_) => 405,
            Self::Deadline => 408,
            Self::TooLarge(_) => 413,
            Self::UnsupportedMedia(_) => 415,
            Self::Overloaded { .. } => 429,
            Self::Internal(_) => 500,
            Self::Unavailable(_) => 503,
        }
    }

    /// gRPC code.
    #[must_use]
    pub fn grpc_code(&self) -> tonic::Code {
        match self {
            Self::Invalid { .. } | Self::ContextLength { .. } | Self::UnsupportedMedia(_) | Self::TooLarge(_) => {
                tonic::Code::InvalidArgument
            }
            Self::Unauthorized => tonic::Code::Unauthenticated,
            Self::ModelNotFound(_) | Self::NotFound(_) => tonic::Code::NotFound,
            Self::MethodNotAllowed(_) => tonic::Code::Unimplemented,
            Self::Deadline => tonic::Code::DeadlineExceeded,
            Self::Overloaded { .. } => tonic::Code::ResourceExhausted,
            Self::Internal(_) => tonic::Code::Internal,
            Self::Unavailable(_) => tonic::Code::Unavailable,
        }
    }

    /// `error.type` of OpenAI's error object.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Unauthorized => "authentication_error",
            Self::Overloaded { .. } => "rate_limit_error",
            Self::Internal(_) => "server_error",
            Self::Unavailable(_) => "service_unavailable_error",
            Self::Deadline => "timeout_error",
            _ => "invalid_request_error",
        }
    }

    /// `error.code`, and the metric label.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Invalid { .. } => "invalid_value",
            Self::ContextLength { .. } => "context_length_exceeded",
            Self::ModelNotFound(_) => "model_not_found",
            Self::NotFound(_) => "not_found",
            Self::MethodNotAllowed(_) => "method_not_allowed",
            Self::TooLarge(_) => "request_too_large",
            Self::UnsupportedMedia(_) => "unsupported_media_type",
            Self::Unauthorized => "invalid_api_key",
            Self::Overloaded { .. } => "overloaded",
            Self::Deadline => "deadline_exceeded",
            Self::Unavailable(_) => "unavailable",
            Self::Internal(_) => "internal_error",
        }
    }

    /// OpenAI's error object.
    #[must_use]
    pub fn body(&self) -> Value {
        let param = match self {
            Self::Invalid { param, .. } | Self::ContextLength { param, .. } => param.clone(),
            Self::ModelNotFound(_) => Some("model".to_owned()),
            _ => None,
        };
        json!({"error": {"message": self.to_string(), "type": self.kind(), "param": param, "code": self.code()}})
    }
}
