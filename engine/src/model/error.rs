use std::path::{Path, PathBuf};

use quire_kernels::KernelError;
use thiserror::Error;

use super::{gguf::GgufError, safetensors::SafetensorsError};

/// Why a model can't be served.
#[derive(Debug, Error)]
pub enum ModelError {
    /// The file itself: unreadable, damaged, of an unknown kind.
    #[error("{}: {source}", path.display())]
    File { path: PathBuf, source: GgufError },
    /// A sound file of a model that can't be run.
    #[error("{}: {problem}", path.display())]
    Model { path: PathBuf, problem: String },
    /// It does not fit, or not with these settings.
    #[error("memory: {0}")]
    Memory(String),
    /// The device refused.
    #[error("{what}: {source}")]
    Kernel { what: &'static str, source: KernelError },
}

/// What is wrong with a model's contents; [`ModelError`] adds the path.
#[derive(Debug, Error)]
pub enum ContentError {
    #[error(transparent)]
    Gguf(#[from] GgufError),
    #[error(transparent)]
    Safetensors(#[from] SafetensorsError),
    #[error("{0}")]
    Model(String),
    #[error("cannot pack the weights: {0}")]
    Kernel(#[from] KernelError),
}

impl ContentError {
    /// With the path of what it is about.
    #[must_use]
    pub fn at(self, path: &Path) -> ModelError {
        let path = path.to_owned();
        match self {
            Self::Gguf(source) => ModelError::File { path, source },
            Self::Safetensors(source) => ModelError::Model { path, problem: source.to_string() },
            Self::Model(problem) => ModelError::Model { path, problem },
            Self::Kernel(source) => ModelError::Kernel { what: "cannot pack the weights", source },
        }
    }
}
