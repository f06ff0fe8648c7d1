use thiserror::Error;

use crate::model::gguf::clip;

/// What is wrong with a safetensors file or its index, worded to follow the file's name.
#[derive(Debug, Error)]
pub enum SafetensorsError {
    #[error("cannot be read: {0}")]
    Io(#[from] std::io::Error),
    #[error("is cut short or damaged: {0}; download it again")]
    Truncated(String),
    #[error("is not a safetensors file: {0}")]
    Header(String),
    #[error("tensor `{name}`: {problem}")]
    Tensor { name: String, problem: String },
    #[error("is no usable index of shards: {0}")]
    Index(String),
    /// The same, of one file of several.
    #[error("file `{file}` {source}")]
    In { file: String, source: Box<SafetensorsError> },
}

impl SafetensorsError {
    pub(in crate::model) fn tensor(name: &str, problem: impl Into<String>) -> Self {
        Self::Tensor { name: clip(name), problem: problem.into() }
    }

    pub(super) fn inside(self, file: &str) -> Self {
        Self::In { file: clip(file), source: Box::new(self) }
    }
}
