//! JSON bodies: content type, size and time are bounded before anything is parsed.

use std::{sync::Arc, time::Duration};

use axum::{
    body::Body,
    extract::{FromRequest, Request},
};
use bytes::{Bytes, BytesMut};
use futures::TryStreamExt as _;
use http::{HeaderMap, header};
use http_body::Body as _;
use serde_json::Value;

use super::{App, edge::Caller};
use crate::error::ApiError;

/// A body must arrive within this.
const ARRIVAL: Duration = Duration::from_secs(60);
/// A refused body is read on for this long, so that its sender gets to read why.
const DRAIN: Duration = Duration::from_secs(2);
/// Above this, parsing is work for another thread than those that serve sockets.
const LARGE: usize = 256 << 10;

/// A call with a JSON body.
pub struct JsonCall {
    pub caller: Caller,
    pub body: Value,
}

impl FromRequest<Arc<App>> for JsonCall {
    type Rejection = ApiError;

    async fn from_request(mut request: Request, app: &Arc<App>) -> Result<Self, ApiError> {
        let caller = request.extensions_mut().remove::<Caller>().unwrap_or_default();
        content_type(request.headers())?;
        let reading = read(request.into_body(), app.config.max_body_bytes);
        let bytes = tokio::time::timeout(ARRIVAL, reading).await.map_err(|_| ApiError::Deadline)??;
        let body = if bytes.len() > LARGE {
            let parsed = tokio::task::spawn_blocking(move || parse(&bytes)).await;
            parsed.map_err(|error| ApiError::Internal(format!("Parsing failed: {error}.")))??
        } else {
            parse(&bytes)?
        };
        Ok(Self { caller, body })
    }
}

/// JSON, or nothing said.
fn content_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(given) = headers.get(header::CONTENT_TYPE) else { return Ok(()) };
    let given = String::from_utf8_lossy(given.as_bytes()).to_ascii_lowercase();
    let essence = given.split(';').next().unwrap_or_default().trim();
    if essence == "application/json" || (essence.starts_with("application/") && essence.ends_with("+json")) {
        return Ok(());
    }
    Err(ApiError::UnsupportedMedia(format!("The content type must be application/json, not `{essence}`.")))
}

async fn read(body: Body, limit: usize) -> Result<Bytes, ApiError> {
    let too_large = || ApiError::TooLarge(format!("The body is larger than the limit of {limit} bytes."));
    let announced = body.size_hint().lower();
    let mut chunks = body.into_data_stream();
    if announced > limit as u64 {
        drain(chunks, limit).await;
        return Err(too_large());
    }
    let mut whole = BytesMut::with_capacity(usize::try_from(announced).unwrap_or(0).min(1 << 20));
    loop {
        match chunks.try_next().await {
            Ok(Some(chunk)) if whole.len() + chunk.len() > limit => {
                drain(chunks, limit).await;
                return Err(too_large());
            }
            Ok(Some(chunk)) => whole.extend_from_slice(&chunk),
            Ok(None) => return Ok(whole.freeze()),
            Err(error) => {
                return Err(ApiError::Invalid { message: format!("The body could not be read: {error}."), param: None });
            }
        }
    }
}

/// Throws away at most `limit` bytes more.
async fn drain(mut chunks: axum::body::BodyDataStream, limit: usize) {
    let reading = async {
        let mut rest = limit;
        while let Ok(Some(chunk)) = chunks.try_next().await {
            rest = rest.saturating_sub(chunk.len());
            if rest == 0 {
                break;
            }
        }
    };
    // Whether the rest came or not, the answer is the same.
    let _ = tokio::time::timeout(DRAIN, reading).await;
}

fn parse(bytes: &[u8]) -> Result<Value, ApiError> {
    serde_json::from_slice(bytes)
        .map_err(|error| ApiError::Invalid { message: format!("The body is not valid JSON: {error}."), param: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accepted(value: &str) -> bool {
        content_type(&HeaderMap::from_iter([(header::CONTENT_TYPE, value.parse().unwrap())])).is_ok()
    }

    #[test]
    fn only_json_is_taken() {
        assert!(content_type(&HeaderMap::new()).is_ok());
        for good in ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"] {
            assert!(accepted(good), "{good}");
        }
        for bad in ["text/plain", "application/x-www-form-urlencoded", "application/jsonp", ""] {
            assert!(!accepted(bad), "{bad}");
        }
    }

    #[test]
    fn deep_nesting_is_refused_and_does_not_overflow() {
        assert!(parse("[".repeat(100_000).as_bytes()).is_err());
        assert!(parse(b"{\"temperature\": NaN}").is_err());
    }
}
