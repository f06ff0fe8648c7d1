//! `quire bench itl`: what running streams feel of a long prompt that arrives beside them, and what the prompt pays for it.
//!
//! One pass: so many streams run; alone for a while, then with the prompt computed beside them. A gap between two deltas of a stream
//! counts as loaded if it overlaps the time from sending the prompt to its first token.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{Method, Request, StatusCode, header};
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;
use parking_lot::Mutex;
use serde::Serialize;
use serde_json::json;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::Error;
use crate::client::outcome;
use crate::sse::Parser;
use crate::stream::Stream;

/// What to send where.
#[derive(Debug, Clone)]
pub struct Itl {
    /// `http://host:port`
    pub url: String,
    pub streams: usize,
    /// Tokens of the prompt that comes beside them.
    pub prompt_tokens: usize,
    /// How long the streams run alone.
    pub alone: Duration,
    /// For one pass.
    pub timeout: Duration,
}

/// Gaps between the tokens of streams, in milliseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Gaps {
    pub n: usize,
    pub p50: f64,
    pub p99: f64,
    pub max: f64,
    /// Tokens a second, all streams together.
    pub rate: f64,
}

/// One pass.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Pass {
    pub alone: Gaps,
    pub loaded: Gaps,
    /// From sending the prompt to its first token, in seconds.
    pub first_token: f64,
    /// Tokens of prompt and streams a second, while the prompt was computed.
    pub throughput: f64,
}

/// Streams are long enough for any prompt; they are cut off when enough has been seen.
const LONG: usize = 4_000;
/// Ids of the prompt: small ones, which every vocabulary has; those below are often control tokens.
const IDS: std::ops::Range<usize> = 260..500;
/// Deltas of every stream before the clock starts.
const WARM: usize = 8;

type Times = Arc<Mutex<Vec<Instant>>>;

#[derive(Clone)]
struct Web {
    client: Client<HttpConnector, Full<Bytes>>,
    url: String,
}

impl Web {
    fn new(base: &str) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        let client = Client::builder(TokioExecutor::new()).build(connector);
        Self { client, url: format!("{}/v1/completions", base.trim_end_matches('/')) }
    }

    /// Follows a stream and notes when its deltas come; ends with it, or when `stop` is raised.
    async fn follow(&self, body: serde_json::Value, times: Times, stop: CancellationToken) -> Result<(), Error> {
        let failed = |why: String| Error::FirstRequest(why);
        let request = Request::builder().method(Method::POST).uri(&self.url).header(header::CONTENT_TYPE, "application/json");
        let request = request.body(Full::new(Bytes::from(body.to_string()))).map_err(|error| failed(error.to_string()))?;
        let response = self.client.request(request).await.map_err(|error| failed(error.to_string()))?;
        let status = response.status();
        let mut body = response.into_body();
        if status != StatusCode::OK {
            let text = body.collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
            return Err(failed(format!("status {status}: {}", crate::stream::excerpt(&text))));
        }
        let (mut stream, mut outcome, mut parser, mut events) = (Stream::default(), outcome(), Parser::default(), Vec::new());
        loop {
            let frame = tokio::select! {
                () = stop.cancelled() => return Ok(()),
                frame = body.frame() => frame,
            };
            let Some(frame) = frame else { return stream.verdict(&outcome).map_err(|failure| failed(failure.detail().to_owned())) };
            let now = Instant::now();
            let frame = frame.map_err(|error| failed(error.to_string()))?;
            let Some(data) = frame.data_ref() else { continue };
            parser.feed(data, |event| events.push(event)).map_err(|error| failed(error.to_string()))?;
            for event in events.drain(..) {
                let before = outcome.deltas;
                stream.take(&event, now, &mut outcome).map_err(|failure| failed(failure.detail().to_owned()))?;
                if outcome.deltas > before {
                    times.lock().push(now);
                }
            }
        }
    }
}

/// One pass against a server that runs.
pub async fn pass(itl: &Itl) -> Result<Pass, Error> {
    match tokio::time::timeout(itl.timeout, measure(itl)).await {
        Ok(result) => result,
        Err(_) => Err(Error::FirstRequest("the pass did not end in time".into())),
    }
}

async fn measure(itl: &Itl) -> Result<Pass, Error> {
    let web = Web::new(&itl.url);
    let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
    let _stop_if_dropped = stop.clone().drop_guard();
    let streams: Vec<Times> = (0..itl.streams).map(|_| Times::default()).collect();
    let failure: Arc<Mutex<Option<Error>>> = Arc::default();
    for (number, times) in streams.iter().enumerate() {
        let body = json!({"prompt": format!("Stream {number}. A long story of {number} travellers:"), "max_tokens": LONG, "ignore_eos": true,
            "temperature": 0, "stream": true});
        let (web, times, stop, failure) = (web.clone(), Arc::clone(times), stop.clone(), Arc::clone(&failure));
        tasks.spawn(async move {
            if let Err(error) = web.follow(body, times, stop.clone()).await {
                failure.lock().get_or_insert(error);
            }
        });
    }
    tasks.close();
    let broken = || failure.lock().take().map_or(Ok(()), Err);
    while streams.iter().any(|times| times.lock().len() < WARM) {
        broken()?;
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let begun = Instant::now();
    tokio::time::sleep(itl.alone).await;
    broken()?;

    // A prompt that nobody has seen, so that no cache answers it.
    let salt = begun.elapsed().subsec_nanos() as usize;
    let ids: Vec<usize> = (0..itl.prompt_tokens).map(|i| IDS.start + (i * i * 7 + i * 31 + salt * (i % 5 + 1)) % IDS.len()).collect();
    let sent = Instant::now();
    let prompt = Times::default();
    let body = json!({"prompt": ids, "max_tokens": 2, "ignore_eos": true, "temperature": 0, "stream": true, "logprobs": 0});
    web.follow(body, Arc::clone(&prompt), CancellationToken::new()).await?;
    let first = prompt.lock().first().copied().ok_or_else(|| Error::FirstRequest("the prompt was answered without a token".into()))?;
    broken()?;
    if tasks.len() < itl.streams {
        return Err(Error::Args("streams ended before the prompt had its first token: it takes a model with a longer context".into()));
    }
    stop.cancel();
    tasks.wait().await;
    let seen: Vec<Vec<Instant>> = streams.iter().map(|times| times.lock().clone()).collect();
    let loaded = gaps(&seen, sent, first);
    let first_token = (first - sent).as_secs_f64();
    Ok(Pass { alone: gaps(&seen, begun, sent), loaded, first_token, throughput: loaded.rate + itl.prompt_tokens as f64 / first_token })
}

/// Gaps that overlap a span of time; rate of the tokens inside it.
fn gaps(streams: &[Vec<Instant>], from: Instant, to: Instant) -> Gaps {
    let mut all: Vec<f64> = Vec::new();
    let mut tokens = 0;
    for times in streams {
        all.extend(times.windows(2).filter(|pair| pair[1] > from && pair[0] < to).map(|pair| (pair[1] - pair[0]).as_secs_f64() * 1e3));
        tokens += times.iter().filter(|time| **time > from && **time <= to).count();
    }
    all.sort_by(f64::total_cmp);
    let at = |q: f64| all.get(((q * all.len() as f64).ceil() as usize).max(1) - 1).copied().unwrap_or(0.0);
    let rate = tokens as f64 / (to - from).as_secs_f64().max(1e-9);
    Gaps { n: all.len(), p50: at(0.5), p99: at(0.99), max: all.last().copied().unwrap_or(0.0), rate }
}

/// The passes beside each other, each with the target it ran under.
#[must_use]
pub fn table(passes: &[(Option<f64>, Pass)]) -> String {
    let mut out = String::from(
        "target        streams alone: p50      p99      max   tok/s    with the prompt: p50      p99      max   tok/s    first token   all tok/s\n",
    );
    for (target, pass) in passes {
        let target = target.map_or_else(|| "none".to_owned(), |ms| format!("{ms:.1} ms"));
        let (a, l) = (&pass.alone, &pass.loaded);
        let _ = writeln!(
            out,
            "{target:<10} {:>22.1} {:>8.1} {:>8.1} {:>7.1} {:>23.1} {:>8.1} {:>8.1} {:>7.1} {:>12.2} s {:>11.1}",
            a.p50, a.p99, a.max, a.rate, l.p50, l.p99, l.max, l.rate, pass.first_token, pass.throughput
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_counts_where_it_overlaps() {
        let zero = Instant::now();
        let at = |ms: u64| zero + Duration::from_millis(ms);
        // Every 10 ms until 100, then one gap of 60, then every 20.
        let times: Vec<Instant> = (0..=10).map(|i| at(i * 10)).chain([at(160), at(180), at(200)]).collect();
        let before = gaps(std::slice::from_ref(&times), at(0), at(100));
        assert_eq!((before.n, before.p50.round(), before.max.round()), (10, 10.0, 10.0));
        assert!((before.rate - 100.0).abs() < 1e-6);
        let during = gaps(&[times], at(130), at(185));
        assert_eq!((during.n, during.p50.round(), during.max.round()), (3, 20.0, 60.0));
    }
}
