//! What every call on the main port passes, in order: request id, CORS, in-flight guard, span, key. Deny by default:
//! only the probes need no key.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Instant,
};

use axum::{
    body::Body,
    extract::{MatchedPath, Request, State},
    middleware::Next,
    response::{IntoResponse as _, Response},
};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use http_body::{Body as HttpBody, Frame, SizeHint};
use metrics::{counter, gauge, histogram};
use tokio_util::task::task_tracker::TaskTrackerToken;
use tracing::Instrument as _;

use super::{App, reply};
use crate::{
    error::ApiError,
    grpc,
    telemetry::{names, trace},
};

/// Correlates logs of client and server; sent back as it came.
const REQUEST_ID: &str = "x-request-id";
/// Milliseconds that the client will wait.
const TIMEOUT: &str = "x-request-timeout-ms";
/// Routes that need no key and hold up no drain.
const PROBES: [&str; 3] = ["/health", "/livez", "/readyz"];

/// Who calls, as far as it matters behind the edge.
#[derive(Clone, Debug, Default)]
pub struct Caller {
    pub request_id: String,
    pub cache_salt: Vec<u8>,
    /// 0: none.
    pub deadline_ms: u64,
}

/// Whether a call speaks gRPC: then so must its errors.
pub fn is_grpc(headers: &HeaderMap) -> bool {
    headers.get(header::CONTENT_TYPE).is_some_and(|value| value.as_bytes().starts_with(b"application/grpc"))
}

/// The middleware.
pub async fn edge(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let request_id = request_id(request.headers());
    let from_browser = request.headers().contains_key(header::ORIGIN);
    let mut response =
        if from_browser && is_preflight(&request) { preflight(request.headers()) } else { pass(&app, request, next, &request_id).await };
    let headers = response.headers_mut();
    if let Ok(value) = HeaderValue::try_from(request_id) {
        headers.insert(REQUEST_ID, value);
    }
    if from_browser {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*"));
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static(REQUEST_ID));
    }
    response
}

async fn pass(app: &App, mut request: Request, next: Next, request_id: &str) -> Response {
    let grpc = is_grpc(request.headers());
    let route = route_label(&request, grpc);
    let method = names::method_label(request.method());
    let mut guard = Guard::new(&route, method, (!is_probe(&route)).then(|| app.work.token()));
    let span = trace::call_span(method, &route, request_id, request.headers());
    let response = match caller(app, &request, &route, request_id) {
        Ok(caller) => {
            request.extensions_mut().insert(caller);
            next.run(request).instrument(span.clone()).await
        }
        Err(error) if grpc => {
            reply::count(&error);
            grpc::status(&error).into_http()
        }
        Err(error) => error.into_response(),
    };
    let response = if response.status() == StatusCode::METHOD_NOT_ALLOWED && !grpc { not_allowed(&response) } else { response };
    span.record("http.response.status_code", response.status().as_u16());
    guard.status = response.status().as_u16();
    response.map(|body| Body::new(GuardedBody { inner: body, _guard: guard }))
}

fn caller(app: &App, request: &Request, route: &str, request_id: &str) -> Result<Caller, ApiError> {
    let cache_salt = if is_probe(route) { Vec::new() } else { app.keys.authorize(request.headers())? };
    let deadline_ms = match request.headers().get(TIMEOUT) {
        None => 0,
        Some(value) => {
            let parsed = value.to_str().ok().and_then(|text| text.trim().parse::<u64>().ok()).filter(|&milliseconds| milliseconds > 0);
            parsed
                .ok_or_else(|| ApiError::invalid(TIMEOUT, format!("The header `{TIMEOUT}` must be a positive number of milliseconds.")))?
        }
    };
    Ok(Caller { request_id: request_id.to_owned(), cache_salt, deadline_ms })
}

/// A route as a label: a pattern of ours, never a client's path.
fn route_label(request: &Request, grpc: bool) -> String {
    if let Some(matched) = request.extensions().get::<MatchedPath>() {
        return matched.as_str().to_owned();
    }
    let path = request.uri().path();
    if grpc && grpc::METHODS.contains(&path) { path.to_owned() } else { "unmatched".to_owned() }
}

/// gRPC's health service is the probe of gRPC clients.
fn is_probe(route: &str) -> bool {
    PROBES.contains(&route) || route.starts_with("/grpc.health.v1.Health/")
}

/// The client's id, if it is one that may be logged; else a fresh one.
fn request_id(headers: &HeaderMap) -> String {
    let given = headers.get(REQUEST_ID).and_then(|value| value.to_str().ok());
    let usable = given.filter(|id| (1..=128).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_graphic()));
    usable.map_or_else(|| uuid::Uuid::new_v4().simple().to_string(), str::to_owned)
}

fn is_preflight(request: &Request) -> bool {
    request.method() == Method::OPTIONS && request.headers().contains_key(header::ACCESS_CONTROL_REQUEST_METHOD)
}

fn preflight(asked: &HeaderMap) -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    let headers = response.headers_mut();
    headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST, OPTIONS"));
    // `*` would not cover Authorization.
    let wanted = asked.get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned();
    headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, wanted.unwrap_or_else(|| HeaderValue::from_static("*")));
    headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("86400"));
    response
}

fn not_allowed(response: &Response) -> Response {
    let methods = response.headers().get(header::ALLOW).and_then(|value| value.to_str().ok()).unwrap_or("another");
    ApiError::MethodNotAllowed(methods.to_owned()).into_response()
}

/// Counts a call when it is over, however it ends.
struct Guard {
    route: String,
    method: &'static str,
    status: u16,
    begun: Instant,
    _work: Option<TaskTrackerToken>,
}

impl Guard {
    fn new(route: &str, method: &'static str, work: Option<TaskTrackerToken>) -> Self {
        gauge!(names::HTTP_IN_FLIGHT).increment(1.0);
        // 499, as proxies say: the client went away before there was a status.
        Self { route: route.to_owned(), method, status: 499, begun: Instant::now(), _work: work }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        gauge!(names::HTTP_IN_FLIGHT).decrement(1.0);
        let status = self.status.to_string();
        counter!(names::HTTP_REQUESTS, "route" => self.route.clone(), "method" => self.method, "status" => status).increment(1);
        histogram!(names::HTTP_DURATION, "route" => self.route.clone()).record(self.begun.elapsed().as_secs_f64());
    }
}

/// A response body that keeps its call's guard until it has been sent or given up.
struct GuardedBody {
    inner: Body,
    _guard: Guard,
}

impl HttpBody for GuardedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        Pin::new(&mut self.inner).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_ids_are_kept_only_if_harmless() {
        let with = |id: &[u8]| request_id(&HeaderMap::from_iter([(REQUEST_ID.parse().unwrap(), HeaderValue::from_bytes(id).unwrap())]));
        assert_eq!(with(b"abc-1"), "abc-1");
        for bad in [&b"two words"[..], &[b'x'; 129], b"\xff", b""] {
            assert_eq!(with(bad).len(), 32);
        }
    }
}
