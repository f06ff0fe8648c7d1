//! One streamed request to an OpenAI-compatible server, timed. A request that fails is a result, never an error or a panic.
//!
//! Never retries; what the stream means is decided in [`crate::stream`].

use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{Request, StatusCode, Uri, header};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::Error;
use crate::sse::Parser;
use crate::stream::{EXCERPT, Failure, Outcome, Stream, excerpt};

/// Which of the two streaming endpoints to drive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Endpoint {
    Completions,
    Chat,
}

/// A server, and what every request to it has in common.
#[derive(Debug, Clone)]
pub struct Target {
    client: Client<HttpConnector, Full<Bytes>>,
    base: String,
    endpoint: Endpoint,
    auth: Option<header::HeaderValue>,
    template: Map<String, Value>,
    timeout: Duration,
}

/// The fields of a request beside its prompt.
#[derive(Debug, Clone, Serialize)]
pub struct Ask {
    pub model: String,
    pub max_tokens: u32,
    pub temperature: f64,
    pub ignore_eos: bool,
    /// Further fields, laid over the others.
    pub extra: Map<String, Value>,
}

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the end of a body may stay away after `[DONE]` before the connection is given up.
const AFTER_DONE: Duration = Duration::from_millis(50);

impl Target {
    /// `url`: `http://host:port`, with or without a trailing `/v1`. `timeout` bounds one request, connection included.
    pub fn new(url: &str, endpoint: Endpoint, api_key: Option<&str>, timeout: Duration) -> Result<Target, Error> {
        let bad = |why: &str| Error::Url(url.to_owned(), why.to_owned());
        let uri: Uri = url.parse().map_err(|error: hyper::http::uri::InvalidUri| bad(&error.to_string()))?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => return Err(Error::Https(url.to_owned())),
            _ => return Err(bad("it must begin with http://")),
        }
        let base = url.trim_end_matches('/').trim_end_matches("/v1").to_owned();
        let auth = api_key.map(|key| {
            let mut value =
                header::HeaderValue::try_from(format!("Bearer {key}")).map_err(|_| bad("the API key has forbidden characters"))?;
            value.set_sensitive(true);
            Ok::<_, Error>(value)
        });
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
        let client = Client::builder(TokioExecutor::new()).pool_max_idle_per_host(usize::MAX).build(connector);
        Ok(Target { client, base, endpoint, auth: auth.transpose()?, template: Map::new(), timeout })
    }

    /// Sets what all requests ask for.
    pub fn ask(&mut self, ask: &Ask) {
        let mut body = Map::new();
        body.insert("model".into(), ask.model.clone().into());
        body.insert("max_tokens".into(), ask.max_tokens.into());
        body.insert("temperature".into(), ask.temperature.into());
        body.insert("stream".into(), true.into());
        body.insert("stream_options".into(), serde_json::json!({ "include_usage": true }));
        if ask.ignore_eos {
            body.insert("ignore_eos".into(), true.into());
        }
        body.extend(ask.extra.clone());
        self.template = body;
    }

    /// The endpoint's full address.
    pub fn url(&self) -> String {
        match self.endpoint {
            Endpoint::Completions => format!("{}/v1/completions", self.base),
            Endpoint::Chat => format!("{}/v1/chat/completions", self.base),
        }
    }

    /// A request body for `prompt`; `max_tokens` if not the template's.
    pub fn body(&self, prompt: String, max_tokens: Option<u32>) -> Bytes {
        let mut body = self.template.clone();
        if let Some(max_tokens) = max_tokens {
            body.insert("max_tokens".into(), max_tokens.into());
        }
        match self.endpoint {
            Endpoint::Completions => body.insert("prompt".into(), prompt.into()),
            Endpoint::Chat => body.insert("messages".into(), serde_json::json!([{ "role": "user", "content": prompt }])),
        };
        Bytes::from(Value::Object(body).to_string())
    }

    fn request(&self, method: hyper::Method, url: String, body: Bytes) -> Result<Request<Full<Bytes>>, hyper::http::Error> {
        let mut request = Request::builder().method(method).uri(url).header(header::CONTENT_TYPE, "application/json");
        if let Some(auth) = &self.auth {
            request = request.header(header::AUTHORIZATION, auth.clone());
        }
        request.body(Full::new(body))
    }

    /// The first model that the server lists.
    pub async fn first_model(&self) -> Result<String, Error> {
        #[derive(Deserialize)]
        struct Models {
            data: Vec<Model>,
        }
        #[derive(Deserialize)]
        struct Model {
            id: String,
        }
        let url = format!("{}/v1/models", self.base);
        let unreachable = |why: String| Error::Unreachable { url: url.clone(), why };
        let none = |why: String| Error::NoModel { url: url.clone(), why };
        let request = self.request(hyper::Method::GET, url.clone(), Bytes::new()).map_err(|error| unreachable(error.to_string()))?;
        let ask = async {
            let response = self.client.request(request).await.map_err(|error| unreachable(chain(&error)))?;
            let status = response.status();
            let body = response.into_body().collect().await.map_err(|error| unreachable(chain(&error)))?.to_bytes();
            if status != StatusCode::OK {
                return Err(none(format!("status {status}: {}", excerpt(&body))));
            }
            let models: Models = serde_json::from_slice(&body).map_err(|error| none(error.to_string()))?;
            models.data.into_iter().next().map(|model| model.id).ok_or_else(|| none("the list is empty".into()))
        };
        tokio::time::timeout(self.timeout, ask).await.map_err(|_| unreachable("no answer in time".into()))?
    }

    /// Sends `body` and follows the stream to its end, a failure or the time-out.
    pub async fn send(&self, body: Bytes) -> Outcome {
        let mut outcome = outcome();
        let sent = outcome.sent;
        if let Ok(result) = tokio::time::timeout(self.timeout, self.follow(body, &mut outcome)).await {
            outcome.result = result;
        }
        if outcome.end == sent {
            outcome.end = Instant::now();
        }
        outcome
    }

    async fn follow(&self, body: Bytes, outcome: &mut Outcome) -> Result<(), Failure> {
        let request = self.request(hyper::Method::POST, self.url(), body).map_err(|error| Failure::Protocol(error.to_string()))?;
        let response = self.client.request(request).await.map_err(|error| match error.is_connect() {
            true => Failure::Connect(chain(&error)),
            false => Failure::Broken(chain(&error)),
        })?;
        let status = response.status();
        let kind = response.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned();
        let mut body = response.into_body();
        if status != StatusCode::OK || !kind.starts_with("text/event-stream") {
            let mut seen = Vec::new();
            while let Some(Ok(frame)) = body.frame().await {
                seen.extend_from_slice(frame.data_ref().unwrap_or(&Bytes::new()));
                if seen.len() > 4 * EXCERPT {
                    break;
                }
            }
            return Err(match status {
                StatusCode::OK => Failure::Protocol(format!("not an event stream but {kind:?}: {}", excerpt(&seen))),
                _ => Failure::Status(status.as_u16(), excerpt(&seen)),
            });
        }
        let mut stream = Stream::default();
        let mut parser = Parser::default();
        let mut events = Vec::new();
        while let Some(frame) = body.frame().await {
            let now = Instant::now();
            let frame = frame.map_err(|error| Failure::Broken(chain(&error)))?;
            let Some(data) = frame.data_ref() else { continue };
            parser.feed(data, |event| events.push(event)).map_err(|error| Failure::Protocol(error.to_string()))?;
            for event in events.drain(..) {
                if stream.take(&event, now, outcome)? {
                    outcome.end = now;
                    // Only a body read to its end gives the connection back to the pool; nothing more is waited for.
                    let rest = async { while let Some(Ok(_)) = body.frame().await {} };
                    let _ = tokio::time::timeout(AFTER_DONE, rest).await;
                    return stream.verdict(outcome);
                }
            }
        }
        stream.verdict(outcome)
    }
}

/// Of a request that is sent now, before anything has come.
pub(crate) fn outcome() -> Outcome {
    let sent = Instant::now();
    Outcome { sent, first: None, last: None, end: sent, deltas: 0, gaps: Vec::new(), usage: None, result: Err(Failure::Timeout) }
}

/// The error with its causes: hyper's own message alone says little.
fn chain(error: &dyn std::error::Error) -> String {
    let mut out = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        out = format!("{out}: {error}");
        source = error.source();
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_checked() {
        let target = |url: &str| Target::new(url, Endpoint::Chat, None, Duration::from_secs(1));
        assert_eq!(target("http://a:1/v1/").unwrap().url(), "http://a:1/v1/chat/completions");
        assert_eq!(target("http://a:1").unwrap().url(), "http://a:1/v1/chat/completions");
        assert!(matches!(target("https://a"), Err(Error::Https(_))));
        assert!(matches!(target("a:1"), Err(Error::Url(..))));
        assert!(matches!(target("not a url"), Err(Error::Url(..))));
    }
}
