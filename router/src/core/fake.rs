//! A worker that says what a test tells it to.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use async_trait::async_trait;
use bytes::Bytes;
use futures::StreamExt;
use futures::stream;
use parking_lot::Mutex;
use quire_proto::worker::v1::generate_event::Event;
use quire_proto::worker::v1::*;
use sha2::{Digest, Sha256};
use tonic::Status;

use crate::worker::{EventStream, LoadStream, Worker};

pub const TOKENIZER: &[u8] = include_bytes!("../../testdata/tokenizers/main/tokenizer.json");
pub const TEMPLATE: &[u8] = b"{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
pub const EOS: u32 = 510;

/// One item of a scripted answer.
#[derive(Clone)]
pub enum Say {
    Event(GenerateEvent),
    Fail(Status),
    /// Nothing more, for ever.
    Hang,
}

/// What a call to `generate` gets.
pub type Script = Result<Vec<Say>, Status>;

pub struct Fake {
    pub card: Mutex<ModelCard>,
    pub scripts: Mutex<VecDeque<Script>>,
    pub requests: Mutex<Vec<GenerateRequest>>,
    /// Streams that are open.
    pub open: Arc<AtomicUsize>,
    /// Events taken from all streams.
    pub taken: Arc<AtomicUsize>,
    pub dead: Arc<AtomicBool>,
    pub damaged: AtomicBool,
}

pub fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

pub fn card() -> ModelCard {
    ModelCard {
        names: vec!["tiny".into(), "tiny:alias".into()],
        max_context: 64,
        vocab_size: 512,
        bos_id: Some(507),
        eos_ids: vec![EOS, 508],
        max_logprobs: 20,
        tokenizer_hash: digest(TOKENIZER),
        chat_template_hash: digest(TEMPLATE),
        numerics: Some(NumericsFingerprint { backend: "fake".into(), ..NumericsFingerprint::default() }),
        ..ModelCard::default()
    }
}

impl Fake {
    pub fn new(scripts: Vec<Script>) -> Arc<Self> {
        Arc::new(Self {
            card: Mutex::new(card()),
            scripts: Mutex::new(scripts.into()),
            requests: Mutex::default(),
            open: Arc::default(),
            taken: Arc::default(),
            dead: Arc::default(),
            damaged: AtomicBool::new(false),
        })
    }

    pub fn with_card(self: Arc<Self>, change: impl FnOnce(&mut ModelCard)) -> Arc<Self> {
        change(&mut self.card.lock());
        self
    }

    fn alive(&self) -> Result<(), Status> {
        if self.dead.load(Ordering::SeqCst) { Err(Status::unavailable("dead")) } else { Ok(()) }
    }
}

/// Counts an open stream.
struct Open(Arc<AtomicUsize>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[async_trait]
impl Worker for Fake {
    async fn generate(&self, request: GenerateRequest) -> Result<EventStream, Status> {
        self.alive()?;
        self.requests.lock().push(request);
        let script = self.scripts.lock().pop_front().unwrap_or_else(|| Err(Status::internal("no script left")))?;
        self.open.fetch_add(1, Ordering::SeqCst);
        let open = Open(self.open.clone());
        let taken = self.taken.clone();
        let says = stream::iter(script).then(move |say| {
            let _ = &open;
            taken.fetch_add(1, Ordering::SeqCst);
            async move {
                match say {
                    Say::Event(event) => Ok(event),
                    Say::Fail(status) => Err(status),
                    Say::Hang => std::future::pending().await,
                }
            }
        });
        Ok(says.boxed())
    }

    async fn describe(&self) -> Result<DescribeResponse, Status> {
        self.alive()?;
        Ok(DescribeResponse { epoch: 1, models: vec![self.card.lock().clone()], version: "test".into() })
    }

    async fn artefact(&self, hash: &str) -> Result<Bytes, Status> {
        self.alive()?;
        if self.damaged.load(Ordering::SeqCst) {
            return Ok(Bytes::from_static(b"{}"));
        }
        [TOKENIZER, TEMPLATE]
            .into_iter()
            .find(|bytes| digest(bytes) == hash)
            .map(Bytes::from_static)
            .ok_or_else(|| Status::not_found("artefact"))
    }

    async fn watch(&self, interval_ms: u32) -> Result<LoadStream, Status> {
        self.alive()?;
        let dead = self.dead.clone();
        let period = std::time::Duration::from_millis(interval_ms.into());
        let report = LoadReport { model: "tiny".into(), ..LoadReport::default() };
        Ok(stream::unfold(0, move |count| {
            let (dead, report) = (dead.clone(), report.clone());
            async move {
                if count > 0 {
                    tokio::time::sleep(period).await;
                }
                if dead.load(Ordering::SeqCst) { None } else { Some((Ok(report), count + 1)) }
            }
        })
        .boxed())
    }
}

fn event(event: Event) -> Say {
    Say::Event(GenerateEvent { event: Some(event) })
}

pub fn started() -> Say {
    event(Event::Started(Started { prompt_tokens: 1, cached_tokens: 0, prompt_logprobs: Vec::new() }))
}

pub fn token(choice: u32, id: u32) -> Say {
    event(Event::Token(Token {
        choice,
        position: 0,
        id,
        logprobs: Some(TokenLogprobs { logprob: Some(-1.0), ..TokenLogprobs::default() }),
    }))
}

pub fn finished(choice: u32, reason: FinishReason, stop_token_id: Option<u32>) -> Say {
    event(Event::Finished(Finished { choice, reason: reason as i32, stop_token_id, ..Finished::default() }))
}

/// A whole answer of one choice that ends by its last token.
pub fn answer(ids: &[u32]) -> Script {
    let mut says = vec![started()];
    says.extend(ids.iter().map(|&id| token(0, id)));
    says.push(finished(0, FinishReason::Stop, ids.last().copied()));
    Ok(says)
}

/// As `answer`, ended by length.
pub fn cut(ids: &[u32]) -> Script {
    let mut says = vec![started()];
    says.extend(ids.iter().map(|&id| token(0, id)));
    says.push(finished(0, FinishReason::Length, None));
    Ok(says)
}
