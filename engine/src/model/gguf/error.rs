use thiserror::Error;

/// What is wrong with a GGUF file, worded to follow the file's name.
#[derive(Debug, Error)]
pub enum GgufError {
    #[error("cannot be read: {0}")]
    Io(#[from] std::io::Error),
    #[error("is not a GGUF file: it starts with {found}, not with `GGUF`")]
    Magic { found: String },
    #[error("is a big-endian GGUF file; only little-endian ones can be read: convert the model again for this machine")]
    BigEndian,
    #[error("has GGUF version {0}; versions 2 and 3 can be read: convert the model again with a current converter")]
    Version(u32),
    #[error("is cut short or damaged: {what} at byte {at} needs {need} bytes and {left} are left; download it again")]
    Truncated { what: String, at: u64, need: u64, left: u64 },
    #[error("is damaged: {0}")]
    Header(String),
    #[error("metadata key `{key}`: {problem}")]
    Key { key: String, problem: String },
    #[error("tensor `{name}`: {problem}")]
    Tensor { name: String, problem: String },
    /// The same, of one part of several.
    #[error("part `{file}`: {source}")]
    In { file: String, source: Box<GgufError> },
}

impl GgufError {
    pub(crate) fn key(key: &str, problem: impl Into<String>) -> Self {
        Self::Key { key: clip(key), problem: problem.into() }
    }

    pub(super) fn inside(self, file: &str) -> Self {
        Self::In { file: clip(file), source: Box::new(self) }
    }

    pub(crate) fn tensor(name: &str, problem: impl Into<String>) -> Self {
        Self::Tensor { name: clip(name), problem: problem.into() }
    }
}

/// A name from a file that nobody vouches for, fit to be printed.
pub(in crate::model) fn clip(name: &str) -> String {
    const LONGEST: usize = 96;
    let mut shown: String = name.chars().take(LONGEST).flat_map(char::escape_debug).collect();
    if name.chars().nth(LONGEST).is_some() {
        shown.push('…');
    }
    shown
}
