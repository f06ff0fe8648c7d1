//! Where the store keeps things and whom it asks.

use std::{
    env,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

/// Settings of a store; [`StoreSettings::from_env`] reads them as users expect.
#[derive(Clone, Debug)]
pub struct StoreSettings {
    pub cache: PathBuf,
    /// Without a slash at the end.
    pub hf_endpoint: String,
    pub hf_token: Option<String>,
    /// Has `-m pip`, which knows how this machine reaches its package index.
    pub python: OsString,
    /// More environment for pip.
    pub pip_environment: Vec<(OsString, OsString)>,
    /// PEM file of certificate authorities; None: the ones compiled in.
    pub certificates: Option<PathBuf>,
    /// A source that takes longer to be reached is given up on.
    pub connect_timeout: Duration,
    /// A source that says nothing for so long has fallen silent.
    pub silence_timeout: Duration,
    /// Before the first retry; doubles.
    pub retry_pause: Duration,
}

/// Where Linux distributions and macOS keep the machine's certificate authorities.
const BUNDLES: [&str; 4] =
    ["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/ca-bundle.pem", "/etc/ssl/cert.pem"];

impl StoreSettings {
    /// Defaults, in a given cache folder.
    #[must_use]
    pub fn in_folder(cache: impl Into<PathBuf>) -> Self {
        Self {
            cache: cache.into(),
            hf_endpoint: "https://huggingface.co".to_owned(),
            hf_token: None,
            python: "python3".into(),
            pip_environment: Vec::new(),
            certificates: None,
            connect_timeout: Duration::from_secs(5),
            silence_timeout: Duration::from_secs(30),
            retry_pause: Duration::from_millis(500),
        }
    }

    /// `QUIRE_CACHE` (else the XDG cache folder), `HF_ENDPOINT`, `HF_TOKEN` (else the file that `hf auth login` writes),
    /// `QUIRE_PYTHON`, `SSL_CERT_FILE`.
    #[must_use]
    pub fn from_env() -> Self {
        let mut settings = Self::in_folder(cache_folder());
        if let Some(endpoint) = text("HF_ENDPOINT") {
            endpoint.trim_end_matches('/').clone_into(&mut settings.hf_endpoint);
        }
        settings.hf_token = text("HF_TOKEN").or_else(token_file);
        if let Some(python) = env::var_os("QUIRE_PYTHON").filter(|value| !value.is_empty()) {
            settings.python = python;
        }
        settings.certificates = env::var_os("SSL_CERT_FILE")
            .map(PathBuf::from)
            .into_iter()
            .chain(BUNDLES.iter().map(PathBuf::from))
            .find(|path| path.is_file());
        settings
    }
}

fn text(name: &str) -> Option<String> {
    env::var(name).ok().map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
}

fn home() -> Option<PathBuf> {
    env::var_os("HOME").or_else(|| env::var_os("USERPROFILE")).filter(|home| !home.is_empty()).map(PathBuf::from)
}

fn folder(name: &str) -> Option<PathBuf> {
    env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

fn cache_folder() -> PathBuf {
    folder("QUIRE_CACHE")
        .or_else(|| folder("XDG_CACHE_HOME").filter(|path| path.is_absolute()).map(|path| path.join("quire")))
        .or_else(|| home().map(|path| path.join(".cache").join("quire")))
        .unwrap_or_else(|| Path::new(".quire-cache").to_path_buf())
}

fn token_file() -> Option<String> {
    let folder = folder("HF_HOME").or_else(|| home().map(|path| path.join(".cache").join("huggingface")))?;
    let token = fs::read_to_string(folder.join("token")).ok()?.trim().to_owned();
    (!token.is_empty()).then_some(token)
}
