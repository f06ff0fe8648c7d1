//! What stops a run before it has figures. A request that fails is a figure, not an error: see [`crate::stream::Failure`].

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}")]
    Args(String),
    #[error("the address {0:?} can't be used: {1}")]
    Url(String, String),
    #[error("https is not supported, got {0:?}: use http://, or a local proxy that ends TLS")]
    Https(String),
    #[error("no answer from {url}: {why}")]
    Unreachable { url: String, why: String },
    #[error("{url} lists no model: name one with --model ({why})")]
    NoModel { url: String, why: String },
    #[error("the first request failed, so the run was not started: {0}")]
    FirstRequest(String),
    #[error("can't read the text {path:?}: {source}")]
    Text { path: String, source: std::io::Error },
    #[error("the text {0:?} has fewer than 16 words")]
    ShortText(String),
    #[error("can't write the report to {path:?}: {source}")]
    Write { path: String, source: std::io::Error },
    #[error("can't start the mock server: {0}")]
    Mock(std::io::Error),
}
