//! One request of a soak over a connection that is kept, and whether its answer is one that may be given.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{Method, Request, StatusCode, header};
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;

use super::mix::{Ask, Kind};
use crate::Error;
use crate::sse::Parser;
use crate::stream::{Stream, excerpt};

/// How a request ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum End {
    /// Answered in full.
    Answered,
    /// The client left.
    Left,
    /// The server said that the time was over.
    Late,
    /// Refused, as it should be.
    Refused,
    /// Anything else.
    Unexpected(String),
}

/// One server.
#[derive(Debug, Clone)]
pub(super) struct Web {
    client: Client<HttpConnector, Full<Bytes>>,
    base: String,
    timeout: Duration,
}

impl Web {
    pub fn new(base: &str, timeout: Duration) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(Duration::from_secs(10)));
        let client = Client::builder(TokioExecutor::new()).pool_max_idle_per_host(usize::MAX).build(connector);
        Self { client, base: base.trim_end_matches('/').to_owned(), timeout }
    }

    /// A page by its path.
    pub async fn get(&self, path: &str) -> Result<String, Error> {
        let url = format!("{}{path}", self.base);
        let failed = |why: String| Error::Unreachable { url: url.clone(), why };
        let request = Request::builder().uri(&url).body(Full::default()).map_err(|error| failed(error.to_string()))?;
        let ask = async {
            let response = self.client.request(request).await.map_err(|error| failed(error.to_string()))?;
            let status = response.status();
            let body = response.into_body().collect().await.map_err(|error| failed(error.to_string()))?.to_bytes();
            if status == StatusCode::OK { Ok(String::from_utf8_lossy(&body).into_owned()) } else { Err(failed(format!("status {status}"))) }
        };
        tokio::time::timeout(self.timeout, ask).await.map_err(|_| failed("no answer in time".into()))?
    }

    /// Sends a request of the mix and does with the answer what it says.
    pub async fn send(&self, ask: Ask) -> End {
        let hurry = ask.hurry_ms.map(|ms| Duration::from_millis(ms.into()));
        let limit = hurry.unwrap_or(self.timeout);
        match tokio::time::timeout(limit, self.follow(ask)).await {
            Ok(end) => end,
            Err(_) if hurry.is_some() => End::Left,
            Err(_) => End::Unexpected("no end in time".into()),
        }
    }

    async fn follow(&self, ask: Ask) -> End {
        let mut request = Request::builder()
            .method(Method::POST)
            .uri(format!("{}/v1/completions", self.base))
            .header(header::CONTENT_TYPE, "application/json");
        if let Some(ms) = ask.deadline_ms {
            request = request.header("x-request-timeout-ms", ms);
        }
        let Ok(request) = request.body(Full::new(ask.body)) else { return End::Unexpected("no request".into()) };
        let response = match self.client.request(request).await {
            Ok(response) => response,
            Err(error) => return End::Unexpected(format!("no response: {error}")),
        };
        let status = response.status();
        let streams = response.headers().get(header::CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
        if streams && status == StatusCode::OK {
            return Self::read_stream(response.into_body(), ask.leave_after).await;
        }
        let body = match response.into_body().collect().await {
            Ok(body) => body.to_bytes(),
            Err(error) => return End::Unexpected(format!("status {status}, then {error}")),
        };
        let parsed: Option<serde_json::Value> = serde_json::from_slice(&body).ok();
        let has = |field: &str| parsed.as_ref().is_some_and(|json| !json[field].is_null());
        match (ask.kind, status.as_u16()) {
            (Kind::Wrong, 400..=422) if has("error") => End::Refused,
            (Kind::Deadline, 408) if has("error") => End::Late,
            (Kind::Wrong, _) => End::Unexpected(format!("a wrong request got {status}: {}", excerpt(&body))),
            (_, 200) if has("choices") && has("usage") => End::Answered,
            _ => End::Unexpected(format!("{:?} got {status}: {}", ask.kind, excerpt(&body))),
        }
    }

    async fn read_stream(mut body: hyper::body::Incoming, leave_after: Option<u32>) -> End {
        let (mut stream, mut outcome) = (Stream::default(), crate::client::outcome());
        let (mut parser, mut events, mut seen) = (Parser::default(), Vec::new(), 0);
        while let Some(frame) = body.frame().await {
            let data = match frame.map(hyper::body::Frame::into_data) {
                Ok(Ok(data)) => data,
                Ok(Err(_)) => continue,
                Err(error) => return End::Unexpected(format!("broken stream: {error}")),
            };
            if let Err(error) = parser.feed(&data, |event| events.push(event)) {
                return End::Unexpected(error.to_string());
            }
            for event in events.drain(..) {
                if let Err(failure) = stream.take(&event, outcome.sent, &mut outcome) {
                    return End::Unexpected(format!("{}: {}", failure.kind(), failure.detail()));
                }
                seen += 1;
            }
            if leave_after.is_some_and(|events| seen >= events) {
                return End::Left;
            }
        }
        match stream.verdict(&outcome) {
            // A greedy answer may be the end token alone: a whole stream without text.
            Ok(()) | Err(crate::stream::Failure::Empty) => End::Answered,
            Err(failure) => End::Unexpected(format!("{}: {}", failure.kind(), failure.detail())),
        }
    }
}
