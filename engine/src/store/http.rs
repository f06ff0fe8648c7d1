//! Downloads over HTTP that can be continued.
//!
//! Redirects are followed here and not by the HTTP library, for two reasons: the token goes to the host it belongs to and to no
//! other, and the first answer of a chain carries what the last one doesn't (the content's own hash and size).

use std::{
    fs,
    io::Read,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use serde::{Deserialize, Serialize};
use ureq::{
    Agent, Body,
    http::{Response, Uri, header},
    tls::{PemItem, RootCerts, TlsConfig, parse_pem},
};

use super::{
    Progress, StoreError, StoreSettings,
    cache::FileEntry,
    landing::{Expected, Landing, partial_of},
};

const MAX_REDIRECTS: usize = 8;
/// Tries in a row that bring nothing new.
const MAX_FAILURES: u32 = 4;
/// JSON answers are small.
const MAX_TEXT: u64 = 64 << 20;

/// What to get.
pub(super) struct Request<'a> {
    pub(super) url: &'a str,
    /// Sent to the origin of `url` only.
    pub(super) token: Option<&'a str>,
    pub(super) expected: Expected,
    /// What to call it while it comes.
    pub(super) label: &'a str,
}

/// An answer that isn't the content.
pub(super) struct Refusal {
    pub(super) status: u16,
    /// Hugging Face's `X-Error-Code`.
    pub(super) code: Option<String>,
}

/// Why a download didn't work: the other side's answer, for the caller to explain, or anything else.
pub(super) enum Failure {
    Refused(Refusal),
    Other(StoreError),
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        Self::Other(error)
    }
}

/// What the partial file is a part of; beside it as `.partial.json`.
#[derive(Default, Serialize, Deserialize, PartialEq, Eq)]
struct PartialNote {
    url: String,
    /// Strong, of the answer that carried the bytes.
    etag: Option<String>,
    /// Of the content itself, from the first answer of the chain.
    linked_etag: Option<String>,
}

/// The end of a chain of redirects.
struct Answer {
    response: Response<Body>,
    linked_etag: Option<String>,
    linked_size: Option<u64>,
}

pub(super) struct Client {
    agent: Agent,
    retry_pause: Duration,
}

impl Client {
    pub(super) fn new(settings: &StoreSettings) -> Result<Self, StoreError> {
        let config = Agent::config_builder()
            .max_redirects(0)
            .max_redirects_will_error(false)
            .http_status_as_error(false)
            .user_agent(concat!("quire/", env!("CARGO_PKG_VERSION")))
            .timeout_resolve(Some(settings.connect_timeout))
            .timeout_connect(Some(settings.connect_timeout))
            .timeout_recv_response(Some(settings.silence_timeout))
            .timeout_per_read(Some(settings.silence_timeout))
            .tls_config(TlsConfig::builder().root_certs(roots(settings)?).build())
            .build();
        Ok(Self { agent: config.new_agent(), retry_pause: settings.retry_pause })
    }

    /// A small text, e.g. JSON.
    pub(super) fn text(&self, url: &str, token: Option<&str>) -> Result<String, Failure> {
        let mut answer = self.open(url, token, None)?;
        let status = answer.response.status().as_u16();
        if status != 200 {
            return Err(refused(&answer.response));
        }
        let text = answer.response.body_mut().with_config().limit(MAX_TEXT).read_to_string();
        text.map_err(|error| Failure::Other(unreachable(url, &error)))
    }

    /// A file, into `target`. Goes on from what an earlier try left if the content is still the same.
    pub(super) fn download(&self, request: &Request<'_>, target: &Path, progress: &dyn Progress) -> Result<FileEntry, Failure> {
        let mut failures = 0;
        let mut landing = self.pick_up(request, target)?;
        loop {
            let before = landing.written();
            let error = match self.attempt(request, target, &mut landing, progress) {
                Ok((expected, etag)) => {
                    let entry = landing.finish(&expected, etag);
                    let _ = fs::remove_file(note_of(target));
                    return Ok(entry?);
                }
                Err(Failure::Refused(refusal)) if !matches!(refusal.status, 408 | 429 | 500..=599) => {
                    return Err(Failure::Refused(refusal));
                }
                Err(Failure::Other(error)) if !matches!(error, StoreError::Interrupted { .. }) => return Err(error.into()),
                Err(failure) => failure,
            };
            failures = if landing.written() > before { 1 } else { failures + 1 };
            if failures >= MAX_FAILURES {
                return Err(error);
            }
            self.pause(failures, progress)?;
        }
    }

    fn pause(&self, failures: u32, progress: &dyn Progress) -> Result<(), StoreError> {
        let mut left = self.retry_pause * 2_u32.pow(failures.saturating_sub(1));
        while !left.is_zero() {
            if progress.cancelled() {
                return Err(StoreError::Cancelled);
            }
            let step = left.min(Duration::from_millis(100));
            thread::sleep(step);
            left -= step;
        }
        Ok(())
    }

    /// The partial file, if its note says that it is a part of this.
    fn pick_up(&self, request: &Request<'_>, target: &Path) -> Result<Landing, StoreError> {
        let note = read_note(target);
        if note.url == request.url && note.etag.is_some() { Landing::resume(target) } else { Landing::create(target) }
    }

    /// One connection. Ok: all bytes are there.
    fn attempt(
        &self,
        request: &Request<'_>,
        target: &Path,
        landing: &mut Landing,
        progress: &dyn Progress,
    ) -> Result<(Expected, Option<String>), Failure> {
        let mut note = read_note(target);
        let range = note.etag.clone().filter(|_| landing.written() > 0).map(|etag| (landing.written(), etag));
        let answer = self.open(request.url, request.token, range.as_ref())?;
        let response = &answer.response;
        let (total, fresh) = match response.status().as_u16() {
            206 if range.is_some() => match content_range(response) {
                Some((start, total)) if start == landing.written() => (total, false),
                _ => {
                    landing.restart()?;
                    let _ = fs::remove_file(note_of(target));
                    return Err(interrupted(request.url, 0, "the server sent another range than was asked for").into());
                }
            },
            200 => (header_number(response, "content-length"), true),
            416 if range.is_some() => {
                // All of it was there already, or it has become shorter. Only a whole new try can tell.
                landing.restart()?;
                let _ = fs::remove_file(note_of(target));
                return Err(interrupted(request.url, 0, "the file has another size now").into());
            }
            _ => return Err(refused(response)),
        };
        let expected = merge(&request.expected, &answer, total, request.label)?;
        if fresh || (answer.linked_etag.is_some() && answer.linked_etag != note.linked_etag) {
            if !fresh {
                // The range is of another content than the part that is here.
                landing.restart()?;
                let _ = fs::remove_file(note_of(target));
                return Err(interrupted(request.url, 0, "the file changed meanwhile").into());
            }
            landing.restart()?;
            note = PartialNote { url: request.url.to_owned(), etag: strong_etag(response), linked_etag: answer.linked_etag.clone() };
            write_note(target, &note)?;
        }
        progress.started(request.label, expected.bytes);
        receive(request.url, answer.response, landing, expected.bytes, progress)?;
        Ok((expected, note.linked_etag.or(note.etag)))
    }

    /// Follows redirects to the answer.
    fn open(&self, url: &str, token: Option<&str>, range: Option<&(u64, String)>) -> Result<Answer, Failure> {
        let home = origin(url);
        let mut url = url.to_owned();
        let (mut linked_etag, mut linked_size) = (None, None);
        for _ in 0..MAX_REDIRECTS {
            let mut request = self.agent.get(&url).header(header::ACCEPT_ENCODING, "identity");
            if let Some(token) = token.filter(|_| home.is_some() && origin(&url) == home) {
                request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
            }
            if let Some((start, etag)) = range {
                request = request.header(header::RANGE, format!("bytes={start}-")).header(header::IF_RANGE, etag);
            }
            let response = request.call().map_err(|error| unreachable(&url, &error))?;
            linked_etag = linked_etag.or_else(|| header_text(&response, "x-linked-etag").map(|etag| unquoted(&etag)));
            linked_size = linked_size.or_else(|| header_number(&response, "x-linked-size"));
            if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
                return Ok(Answer { response, linked_etag, linked_size });
            }
            let location = header_text(&response, "location").unwrap_or_default();
            let next = resolve(&url, &location)
                .ok_or_else(|| StoreError::Refused(format!("{}: a redirect to nowhere: `{location}`", place(&url))))?;
            if url.starts_with("https:") && !next.starts_with("https:") {
                return Err(StoreError::Refused(format!("{}: a redirect away from https, to {}", place(&url), place(&next))).into());
            }
            url = next;
        }
        Err(StoreError::Refused(format!("{}: too many redirects", place(&url))).into())
    }
}

/// Body → file, up to `total` bytes in all.
fn receive(
    url: &str,
    response: Response<Body>,
    landing: &mut Landing,
    total: Option<u64>,
    progress: &dyn Progress,
) -> Result<(), StoreError> {
    let mut body = response.into_body().into_with_config().limit(u64::MAX).reader();
    let mut chunk = vec![0; 256 << 10];
    loop {
        if progress.cancelled() {
            return Err(StoreError::Cancelled);
        }
        progress.advanced(landing.written());
        let read = body.read(&mut chunk).map_err(|error| interrupted(url, landing.written(), &error.to_string()))?;
        if read == 0 {
            break;
        }
        landing.write(&chunk[..read])?;
    }
    match total {
        Some(total) if landing.written() < total => Err(interrupted(url, landing.written(), "the connection was closed")),
        _ => Ok(()),
    }
}

/// What the caller, the first answer and the last one say of the content must agree, before anything is downloaded.
fn merge(wanted: &Expected, answer: &Answer, total: Option<u64>, label: &str) -> Result<Expected, StoreError> {
    let announced = answer.linked_size.or(total);
    if let (Some(expected), Some(found)) = (wanted.bytes, announced)
        && expected != found
    {
        return Err(StoreError::Refused(format!("{label}: there it has {found} bytes, but it must have {expected}")));
    }
    // For large files Hugging Face's linked ETag is the SHA-256 of the content.
    let linked = answer.linked_etag.clone().filter(|etag| etag.len() == 64 && etag.bytes().all(|byte| byte.is_ascii_hexdigit()));
    if let (Some(expected), Some(found)) = (&wanted.sha256, &linked)
        && !expected.eq_ignore_ascii_case(found)
    {
        return Err(StoreError::Refused(format!("{label}: there its SHA-256 is {found}, but it must be {expected}")));
    }
    Ok(Expected { bytes: wanted.bytes.or(announced), sha256: wanted.sha256.clone().or(linked) })
}

fn note_of(target: &Path) -> PathBuf {
    let mut name = partial_of(target).into_os_string();
    name.push(".json");
    PathBuf::from(name)
}

fn read_note(target: &Path) -> PartialNote {
    fs::read(note_of(target)).ok().and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default()
}

fn write_note(target: &Path, note: &PartialNote) -> Result<(), StoreError> {
    let path = note_of(target);
    let text = serde_json::to_vec(note).map_err(|error| StoreError::Io { action: "write", path: path.clone(), source: error.into() })?;
    fs::write(&path, text).map_err(StoreError::io("write", &path))
}

fn roots(settings: &StoreSettings) -> Result<RootCerts, StoreError> {
    let Some(path) = &settings.certificates else { return Ok(RootCerts::WebPki) };
    let text = fs::read(path).map_err(StoreError::io("read", path))?;
    let certificates: Vec<_> = parse_pem(&text)
        .filter_map(|item| match item {
            Ok(PemItem::Certificate(certificate)) => Some(certificate),
            _ => None,
        })
        .collect();
    Ok(if certificates.is_empty() { RootCerts::WebPki } else { RootCerts::from(certificates) })
}

/// Host and port, for people.
fn place(url: &str) -> String {
    url.parse::<Uri>()
        .ok()
        .and_then(|uri| uri.authority().map(|authority| authority.as_str().rsplit('@').next().unwrap_or_default().to_owned()))
        .unwrap_or_else(|| url.to_owned())
}

/// Scheme, host and port.
fn origin(url: &str) -> Option<(String, String, u16)> {
    let uri: Uri = url.parse().ok()?;
    let scheme = uri.scheme_str()?.to_owned();
    let port = uri.port_u16().unwrap_or(if scheme == "https" { 443 } else { 80 });
    Some((scheme, uri.host()?.to_ascii_lowercase(), port))
}

/// `Location`, against the URL that gave it.
fn resolve(base: &str, location: &str) -> Option<String> {
    if location.starts_with("https://") || location.starts_with("http://") {
        return Some(location.to_owned());
    }
    let uri: Uri = base.parse().ok()?;
    let root = format!("{}://{}", uri.scheme_str()?, uri.authority()?);
    if location.starts_with("//") {
        return Some(format!("{}:{location}", uri.scheme_str()?));
    }
    if location.starts_with('/') {
        return Some(format!("{root}{location}"));
    }
    let folder = uri.path().rsplit_once('/').map_or("", |(folder, _)| folder);
    (!location.is_empty()).then(|| format!("{root}{folder}/{location}"))
}

fn header_text(response: &Response<Body>, name: &str) -> Option<String> {
    response.headers().get(name)?.to_str().ok().map(|value| value.trim().to_owned())
}

fn header_number(response: &Response<Body>, name: &str) -> Option<u64> {
    header_text(response, name)?.parse().ok()
}

/// First byte and total of `Content-Range: bytes 5-9/10`.
fn content_range(response: &Response<Body>) -> Option<(u64, Option<u64>)> {
    let text = header_text(response, "content-range")?;
    let (range, total) = text.strip_prefix("bytes ")?.split_once('/')?;
    Some((range.split_once('-')?.0.parse().ok()?, total.parse().ok()))
}

/// A weak ETag doesn't promise equal bytes.
fn strong_etag(response: &Response<Body>) -> Option<String> {
    header_text(response, "etag").filter(|etag| etag.starts_with('"'))
}

fn unquoted(etag: &str) -> String {
    etag.trim_start_matches("W/").trim_matches('"').to_owned()
}

fn refused(response: &Response<Body>) -> Failure {
    Failure::Refused(Refusal { status: response.status().as_u16(), code: header_text(response, "x-error-code") })
}

fn interrupted(url: &str, received: u64, reason: &str) -> StoreError {
    StoreError::Interrupted { place: place(url), received, reason: reason.to_owned() }
}

fn unreachable(url: &str, error: &ureq::Error) -> StoreError {
    StoreError::Unreachable { place: place(url), reason: error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locations_resolve_against_their_url() {
        let base = "https://a.example:8443/x/y?q=1";
        for (location, url) in [
            ("https://b.example/z", "https://b.example/z"),
            ("//b.example/z", "https://b.example/z"),
            ("/z", "https://a.example:8443/z"),
            ("z", "https://a.example:8443/x/z"),
        ] {
            assert_eq!(resolve(base, location).as_deref(), Some(url));
        }
        assert_eq!(resolve(base, ""), None);
    }

    #[test]
    fn an_origin_is_scheme_host_and_port() {
        assert_eq!(origin("https://A.example/x"), origin("https://a.example:443/y"));
        for other in ["http://a.example/", "https://a.example:444/", "https://b.a.example/", "https://a.example.b/"] {
            assert_ne!(origin("https://a.example/"), origin(other), "{other}");
        }
    }
}
