use thiserror::Error;

/// Why a request was not accepted.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum EngineError {
    /// The request is wrong; `field` is its name in the proto.
    #[error("{field}: {message}")]
    Invalid { field: &'static str, message: String },
    /// No model of this name is served here.
    #[error("model `{0}` is not served by this worker")]
    UnknownModel(String),
    /// Nothing is stored under this content hash.
    #[error("no artefact has the hash `{0}`")]
    UnknownArtefact(String),
    /// As much waits as may wait.
    #[error("{0}")]
    Overloaded(String),
    /// The worker takes no new requests.
    #[error("the worker is draining")]
    Draining,
    /// The step loop has ended.
    #[error("the engine has stopped")]
    Stopped,
    /// The step thread could not be started, or the device cannot run what the configuration says.
    #[error("{0}")]
    Start(String),
}

impl EngineError {
    pub(crate) fn invalid(field: &'static str, message: impl Into<String>) -> Self {
        Self::Invalid { field, message: message.into() }
    }

    /// Metric label, from a closed set.
    #[must_use]
    pub fn label(&self) -> &'static str {
        match self {
            Self::Invalid { .. } => "invalid",
            Self::UnknownModel(_) | Self::UnknownArtefact(_) => "not_found",
            Self::Overloaded(_) => "overloaded",
            Self::Draining => "draining",
            Self::Stopped | Self::Start(_) => "stopped",
        }
    }
}
