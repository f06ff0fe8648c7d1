//! A server that answers by script, for proving the client: known time to first token, known gaps, and every way of going wrong.
//! It keeps the times at which it really did things, on the same clock as the client, so that measuring error and a busy machine's
//! oversleeping can be told apart. Loopback only.

use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::Json;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures::stream;
use serde_json::{Value, json};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use crate::Error;

/// One way of going wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// This status instead of a stream.
    Status(u16),
    /// Status 200, then an error event after the first delta.
    InBand,
    /// A clean end after the first delta.
    Truncate,
    /// The connection breaks after the first delta.
    Break,
    /// A complete stream without output.
    Empty,
    /// An event that isn't JSON.
    Garbage,
    /// A plain JSON answer, as if `stream` had been ignored.
    NotAStream,
    /// Nothing ever comes.
    Hang,
}

/// How the mock behaves.
#[derive(Debug, Clone)]
pub struct Script {
    /// From the request (or its slot) to the first delta.
    pub ttft: Duration,
    /// Between deltas.
    pub itl: Duration,
    /// Tokens in each delta, as `usage` will count them.
    pub tokens_per_delta: u32,
    /// How many requests are served at once; the others queue.
    pub slots: Option<usize>,
    pub usage: bool,
    /// Request `i` goes wrong in the way of `faults[i % len]`.
    pub faults: Vec<Option<Fault>>,
}

impl Default for Script {
    fn default() -> Script {
        Script {
            ttft: Duration::from_millis(20),
            itl: Duration::from_millis(5),
            tokens_per_delta: 1,
            slots: None,
            usage: true,
            faults: Vec::new(),
        }
    }
}

/// What the mock really did for one request.
#[derive(Debug, Clone)]
pub struct Served {
    pub arrived: Instant,
    pub prompt: String,
    pub max_tokens: u32,
    /// When each delta was handed to the connection.
    pub deltas: Vec<Instant>,
}

/// A running mock; stops when dropped.
#[derive(Debug)]
pub struct Mock {
    addr: SocketAddr,
    shared: Arc<Shared>,
    _stop: DropGuard,
}

#[derive(Debug)]
struct Shared {
    script: Script,
    slots: Option<Arc<Semaphore>>,
    count: AtomicUsize,
    served: Mutex<Vec<Served>>,
}

impl Mock {
    /// Listens on a free port of the loopback interface.
    pub async fn start(script: Script) -> Result<Mock, Error> {
        let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.map_err(Error::Mock)?;
        let addr = listener.local_addr().map_err(Error::Mock)?;
        let slots = script.slots.map(|slots| Arc::new(Semaphore::new(slots)));
        let shared = Arc::new(Shared { script, slots, count: AtomicUsize::new(0), served: Mutex::default() });
        let app = Router::new()
            .route("/v1/models", get(|| async { Json(json!({ "object": "list", "data": [{ "id": "mock" }] })) }))
            .route("/v1/completions", post(|state, body| answer(state, body, false)))
            .route("/v1/chat/completions", post(|state, body| answer(state, body, true)))
            .with_state(shared.clone());
        let stop = CancellationToken::new();
        let tasks = TaskTracker::new();
        let stopped = stop.clone();
        tasks.spawn(async move {
            use axum::serve::ListenerExt;
            let listener = listener.tap_io(|socket| {
                let _ = socket.set_nodelay(true);
            });
            tokio::select! {
                _ = axum::serve(listener, app) => {}
                () = stopped.cancelled() => {}
            }
        });
        tasks.close();
        Ok(Mock { addr, shared, _stop: stop.drop_guard() })
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// In order of arrival.
    pub fn served(&self) -> Vec<Served> {
        self.shared.served.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Shared {
    fn log(&self, index: usize, change: impl FnOnce(&mut Served)) {
        if let Some(served) = self.served.lock().unwrap_or_else(PoisonError::into_inner).get_mut(index) {
            change(served);
        }
    }
}

async fn answer(State(shared): State<Arc<Shared>>, Json(body): Json<Value>, chat: bool) -> Response {
    let arrived = Instant::now();
    let field = |name: &str| body.get(name).and_then(Value::as_u64);
    let max_tokens = field("max_tokens").and_then(|tokens| u32::try_from(tokens).ok()).unwrap_or(16);
    let prompt = match chat {
        true => body.pointer("/messages/0/content"),
        false => body.get("prompt"),
    };
    let prompt = prompt.and_then(Value::as_str).unwrap_or_default().to_owned();
    let (index, number) = {
        let mut served = shared.served.lock().unwrap_or_else(PoisonError::into_inner);
        // Words are the mock's tokens.
        served.push(Served { arrived, prompt: prompt.clone(), max_tokens, deltas: Vec::new() });
        (served.len() - 1, shared.count.fetch_add(1, Ordering::Relaxed))
    };
    let fault = shared.script.faults.get(number % shared.script.faults.len().max(1)).copied().flatten();
    match fault {
        Some(Fault::Status(code)) => {
            let status = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
            return (status, Json(json!({ "error": { "message": "scripted", "code": "scripted" } }))).into_response();
        }
        Some(Fault::NotAStream) => return Json(json!({ "choices": [{ "text": "all at once", "finish_reason": "stop" }] })).into_response(),
        Some(Fault::Hang) => std::future::pending::<()>().await,
        _ => {}
    }
    let permit = match &shared.slots {
        Some(slots) => slots.clone().acquire_owned().await.ok(),
        None => None,
    };
    let begin = if shared.slots.is_some() { Instant::now() } else { arrived };
    let stream = Stream {
        shared,
        index,
        chat,
        fault,
        begin,
        words: prompt.split_whitespace().count(),
        max_tokens,
        delta: 0,
        stage: Stage::Role,
        _permit: permit,
    };
    let body = Body::from_stream(stream::unfold(stream, |mut stream| async move { stream.next().await.map(|bytes| (bytes, stream)) }));
    ([(header::CONTENT_TYPE, "text/event-stream")], body).into_response()
}

enum Stage {
    Role,
    Deltas,
    Finish,
    Usage,
    Done,
    End,
}

struct Stream {
    shared: Arc<Shared>,
    index: usize,
    chat: bool,
    fault: Option<Fault>,
    begin: Instant,
    words: usize,
    max_tokens: u32,
    delta: u32,
    stage: Stage,
    _permit: Option<OwnedSemaphorePermit>,
}

impl Stream {
    fn deltas(&self) -> u32 {
        self.max_tokens.div_ceil(self.shared.script.tokens_per_delta.max(1))
    }

    async fn next(&mut self) -> Option<Result<Bytes, std::io::Error>> {
        let text = match self.stage {
            Stage::Role => {
                self.stage = if self.fault == Some(Fault::Empty) { Stage::Finish } else { Stage::Deltas };
                // Without output: must not be taken for the first token.
                self.choice("", None, self.chat)
            }
            Stage::Deltas => match self.fault.filter(|_| self.delta == 1) {
                Some(Fault::InBand) => {
                    self.stage = Stage::Done;
                    "data: {\"error\":{\"message\":\"scripted\",\"code\":\"internal\"}}\n\n".to_owned()
                }
                Some(Fault::Truncate) => return None,
                Some(Fault::Break) => {
                    self.stage = Stage::End;
                    return Some(Err(std::io::Error::other("scripted")));
                }
                Some(Fault::Garbage) => "data: {not json\n\n".to_owned(),
                _ => self.delta().await,
            },
            Stage::Finish => {
                self.stage = if self.shared.script.usage { Stage::Usage } else { Stage::Done };
                self.choice("", Some("length"), false)
            }
            Stage::Usage => {
                self.stage = Stage::Done;
                let completion = if self.fault == Some(Fault::Empty) { 0 } else { self.max_tokens };
                // The usage chunk has no choices.
                let usage = json!({ "choices": [], "usage": { "prompt_tokens": self.words, "completion_tokens": completion,
                    "prompt_tokens_details": { "cached_tokens": 0 } } });
                format!("data: {usage}\n\n")
            }
            Stage::Done => {
                self.stage = Stage::End;
                "data: [DONE]\n\n".to_owned()
            }
            Stage::End => return None,
        };
        Some(Ok::<_, Infallible>(Bytes::from(text)).map_err(|never| match never {}))
    }

    /// The next delta at its time, counted from the start: one late delta doesn't move the others.
    async fn delta(&mut self) -> String {
        let at = self.begin + self.shared.script.ttft + self.shared.script.itl * self.delta;
        tokio::time::sleep_until(at.into()).await;
        self.delta += 1;
        if self.delta >= self.deltas() {
            self.stage = Stage::Finish;
        }
        let now = Instant::now();
        self.shared.log(self.index, |served| served.deltas.push(now));
        self.choice(" word", None, false)
    }

    fn choice(&self, text: &str, finish: Option<&str>, role: bool) -> String {
        let choice = match (self.chat, role) {
            (true, true) => json!({ "index": 0, "delta": { "role": "assistant", "content": "" }, "finish_reason": null }),
            (true, false) => json!({ "index": 0, "delta": { "content": text }, "finish_reason": finish }),
            (false, _) => json!({ "index": 0, "text": text, "finish_reason": finish }),
        };
        format!("data: {}\n\n", json!({ "choices": [choice], "usage": null }))
    }
}
