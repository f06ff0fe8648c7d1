//! A router with a worker in the same process, and a client of its sockets.

use std::{
    net::SocketAddr,
    sync::{
        Arc, LazyLock, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use futures::{StreamExt as _, stream};
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use metrics_exporter_prometheus::PrometheusHandle;
use parking_lot::Mutex;
use quire_proto::worker::v1::*;
use quire_router::{
    config::{CoreConfig, FaceConfig, FleetConfig},
    core::Core,
    fleet::Fleet,
    http::admin::Check,
    server::{Server, ServerConfig, Stopped},
    telemetry,
    text::{SpecialText, Tokenizer},
    worker::{EventStream, LoadStream, Worker},
};
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use tokio::{net::TcpListener, task::JoinHandle};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::Status;

pub const TOKENIZER: &[u8] = include_bytes!("../../testdata/tokenizers/main/tokenizer.json");
const TEMPLATE: &[u8] = b"{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
pub const EOS: u32 = 510;
/// What the worker answers to everything.
pub const ANSWER: &str = "Hello, w\u{f6}rld \u{1f600}! Bye.";
pub const WAIT: Duration = Duration::from_secs(10);

pub fn ids(text: &str) -> Vec<u32> {
    static LOADED: LazyLock<Tokenizer> = LazyLock::new(|| Tokenizer::from_json(TOKENIZER).unwrap());
    LOADED.encode(text, false, SpecialText::Plain).unwrap()
}

/// What the worker does with a request.
#[derive(Clone, Default)]
pub enum Behaviour {
    #[default]
    Answer,
    /// Answers with these tokens instead.
    Say(Vec<u32>),
    /// As `Say`, a token a millisecond.
    Slowly(Vec<u32>),
    Refuse(Status),
    /// After so many events.
    Fail(usize, Status),
    Hang(usize),
    /// Takes the request and never says that it started.
    Silent,
    /// Tokens for ever.
    Endless,
}

/// The worker.
pub struct Fake {
    card: ModelCard,
    template: Vec<u8>,
    pub behaviour: Mutex<Behaviour>,
    pub requests: Mutex<Vec<GenerateRequest>>,
    /// Streams that are open.
    pub open: Arc<AtomicUsize>,
    /// Events that were taken from all streams.
    pub taken: Arc<AtomicUsize>,
}

struct Open(Arc<AtomicUsize>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

fn event(event: generate_event::Event) -> GenerateEvent {
    GenerateEvent { event: Some(event) }
}

fn logprobs(id: u32, count: Option<u32>) -> Option<TokenLogprobs> {
    let top = 0..count?;
    Some(TokenLogprobs {
        logprob: Some(-0.5),
        top_ids: top.clone().map(|rank| if rank == 0 { id } else { rank }).collect(),
        top_logprobs: top.map(|rank| -0.5 - rank as f32).collect(),
    })
}

fn answer(request: &GenerateRequest, said: Vec<u32>) -> Vec<GenerateEvent> {
    let stopping = request.stopping.clone().unwrap_or_default();
    let most = if stopping.max_tokens == 0 { usize::MAX } else { stopping.max_tokens as usize };
    let mut prompt_logprobs = Vec::new();
    if request.prompt_logprobs.is_some() {
        prompt_logprobs = request.prompt_ids.iter().map(|&id| logprobs(id, request.prompt_logprobs).unwrap()).collect();
        prompt_logprobs[0] = TokenLogprobs::default();
    }
    let prompt_tokens = request.prompt_ids.len() as u32;
    let started = Started { prompt_tokens, cached_tokens: prompt_tokens.min(2), prompt_logprobs };
    let mut events = vec![event(generate_event::Event::Started(started))];
    let whole = [said, vec![EOS]].concat();
    let stops = |id: &u32| (*id == EOS && !stopping.ignore_eos) || stopping.stop_token_ids.contains(id);
    let length = whole.iter().position(stops).map_or(whole.len(), |last| last + 1).min(most);
    let choices = request.n.max(1);
    for (index, &id) in whole[..length].iter().enumerate() {
        for choice in 0..choices {
            let token = Token { choice, position: prompt_tokens + index as u32, id, logprobs: logprobs(id, request.logprobs) };
            events.push(event(generate_event::Event::Token(token)));
        }
    }
    let stop_token_id = Some(whole[length - 1]).filter(|id| stops(id));
    let reason = if stop_token_id.is_some() { FinishReason::Stop } else { FinishReason::Length } as i32;
    for choice in 0..choices {
        let finished = Finished { choice, reason, stop_token_id, generated_tokens: length as u32, message: String::new() };
        events.push(event(generate_event::Event::Finished(finished)));
    }
    events
}

#[async_trait]
impl Worker for Fake {
    async fn generate(&self, request: GenerateRequest) -> Result<EventStream, Status> {
        let behaviour = self.behaviour.lock().clone();
        let said = if let Behaviour::Say(ids) | Behaviour::Slowly(ids) = &behaviour { ids.clone() } else { ids(ANSWER) };
        let answer = answer(&request, said);
        self.requests.lock().push(request);
        let events = stream::iter(answer.clone()).map(Ok);
        let events = match behaviour {
            Behaviour::Answer | Behaviour::Say(_) => events.boxed(),
            Behaviour::Slowly(_) => events
                .then(|event| async {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                    event
                })
                .boxed(),
            Behaviour::Refuse(status) => return Err(status),
            Behaviour::Fail(after, status) => events.take(after).chain(stream::iter([Err(status)])).boxed(),
            Behaviour::Hang(after) => events.take(after).chain(stream::pending()).boxed(),
            Behaviour::Silent => stream::pending().boxed(),
            Behaviour::Endless => events.take(1).chain(stream::repeat(answer[1].clone()).map(Ok)).boxed(),
        };
        self.open.fetch_add(1, Ordering::SeqCst);
        let (open, taken) = (Open(Arc::clone(&self.open)), Arc::clone(&self.taken));
        Ok(events
            .map(move |event| {
                let _ = &open;
                taken.fetch_add(1, Ordering::SeqCst);
                event
            })
            .boxed())
    }

    async fn describe(&self) -> Result<DescribeResponse, Status> {
        Ok(DescribeResponse { epoch: 1, models: vec![self.card.clone()], version: "test".to_owned() })
    }

    async fn artefact(&self, hash: &str) -> Result<Bytes, Status> {
        let found = [TOKENIZER, &self.template].into_iter().find(|bytes| digest(bytes) == hash);
        found.map(Bytes::copy_from_slice).ok_or_else(|| Status::not_found("artefact"))
    }

    async fn watch(&self, _interval_ms: u32) -> Result<LoadStream, Status> {
        let report = LoadReport { model: self.card.names[0].clone(), ..LoadReport::default() };
        let each = move |()| std::future::ready(Some((Ok(report.clone()), ())));
        Ok(stream::unfold((), each)
            .then(|report| async {
                tokio::time::sleep(Duration::from_millis(50)).await;
                report
            })
            .boxed())
    }
}

fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The one recorder of this process; figures of a site go by its model's name.
pub fn recorder() -> PrometheusHandle {
    static RECORDER: OnceLock<PrometheusHandle> = OnceLock::new();
    RECORDER.get_or_init(|| telemetry::install_recorder(&[]).unwrap()).clone()
}

/// A running router.
pub struct Site {
    pub address: SocketAddr,
    pub admin: SocketAddr,
    pub fake: Arc<Fake>,
    pub shutdown: CancellationToken,
    served: JoinHandle<Stopped>,
    client: Client<HttpConnector, Full<Bytes>>,
}

pub struct Answer {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&self.body)))
    }
}

impl Site {
    pub async fn start() -> Self {
        Self::with("tiny", FaceConfig::default(), 256).await
    }

    pub async fn with(model: &str, face: FaceConfig, max_context: u32) -> Self {
        Self::built(model, face, max_context, TEMPLATE.to_vec()).await
    }

    /// One whose chat template shows that the model writes calls or thoughts with certain markers.
    pub async fn showing(markers: &str) -> Self {
        let template = [b"{# ", markers.as_bytes(), b" #}", TEMPLATE].concat();
        Self::built("tiny", FaceConfig::default(), 1024, template).await
    }

    async fn built(model: &str, face: FaceConfig, max_context: u32, template: Vec<u8>) -> Self {
        let card = ModelCard {
            names: vec![model.to_owned(), format!("{model}:alias")],
            max_context,
            vocab_size: 512,
            bos_id: Some(507),
            eos_ids: vec![EOS],
            max_logprobs: 20,
            tokenizer_hash: digest(TOKENIZER),
            chat_template_hash: digest(&template),
            numerics: Some(NumericsFingerprint::default()),
            created: 1_700_000_000,
            ..ModelCard::default()
        };
        let behaviour = Mutex::default();
        let fake = Arc::new(Fake { card, template, behaviour, requests: Mutex::default(), open: Arc::default(), taken: Arc::default() });
        let fleet = Fleet::new(FleetConfig { watch_interval: Duration::from_millis(500), ..FleetConfig::default() });
        fleet.add("fake", Arc::clone(&fake) as Arc<dyn Worker>);
        assert!(fleet.wait_ready(WAIT).await);
        let watched = Arc::clone(&fleet);
        let server = Server {
            core: Arc::new(Core::new(fleet, CoreConfig::default())),
            face,
            config: ServerConfig { settle: Duration::from_millis(200), drain: Duration::from_millis(700), ..ServerConfig::default() },
            readiness: Arc::new(move || vec![Check::new("workers", watched.ready(), "no worker")]),
            metrics: recorder(),
        };
        let (main, admin) = (TcpListener::bind("127.0.0.1:0").await.unwrap(), TcpListener::bind("127.0.0.1:0").await.unwrap());
        let (address, admin_address) = (main.local_addr().unwrap(), admin.local_addr().unwrap());
        let shutdown = CancellationToken::new();
        let serving = server.serve(main, Some(admin), shutdown.clone());
        let served = TaskTracker::new().spawn(async { serving.await.unwrap() });
        let client = Client::builder(TokioExecutor::new()).build_http();
        Self { address, admin: admin_address, fake, shutdown, served, client }
    }

    pub fn behave(&self, behaviour: Behaviour) {
        *self.fake.behaviour.lock() = behaviour;
    }

    /// The response as it comes.
    pub async fn open(&self, request: http::request::Builder, path: &str, body: impl Into<Bytes>) -> Response<Incoming> {
        let base = self.address;
        let request: Request<Full<Bytes>> = request.uri(format!("http://{base}{path}")).body(Full::new(body.into())).unwrap();
        tokio::time::timeout(WAIT, self.client.request(request)).await.unwrap().unwrap()
    }

    pub async fn send(&self, request: http::request::Builder, path: &str, body: impl Into<Bytes>) -> Answer {
        let (parts, body) = self.open(request, path, body).await.into_parts();
        let body = tokio::time::timeout(WAIT, body.collect()).await.unwrap().unwrap().to_bytes();
        Answer { status: parts.status.as_u16(), headers: parts.headers, body }
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.send(Request::get("/"), path, "").await
    }

    pub async fn post(&self, path: &str, body: &Value) -> Answer {
        self.send(Request::post("/").header("content-type", "application/json"), path, body.to_string()).await
    }

    /// The answer to a request that is right.
    pub async fn ask(&self, path: &str, body: Value) -> Value {
        let answer = self.post(path, &body).await;
        assert_eq!(answer.status, 200, "{body}: {}", answer.json());
        answer.json()
    }

    /// The chunks of a streamed answer, whose end is checked.
    pub async fn stream(&self, path: &str, body: Value) -> Vec<Value> {
        let answer = self.post(path, &body).await;
        assert_eq!(answer.status, 200, "{}", String::from_utf8_lossy(&answer.body));
        assert_eq!(answer.headers["content-type"], "text/event-stream");
        frames(std::str::from_utf8(&answer.body).unwrap())
    }

    /// A streamed answer that is left open.
    pub async fn stay(&self, path: &str, body: Value) -> Incoming {
        let response = self.open(Request::post("/").header("content-type", "application/json"), path, body.to_string()).await;
        assert_eq!(response.status(), StatusCode::OK);
        response.into_body()
    }

    /// Waits until no stream of the worker is open.
    pub async fn until_idle(&self) {
        self.until("every stream is dropped", |fake| fake.open.load(Ordering::SeqCst) == 0).await;
    }

    pub async fn until(&self, what: &str, condition: impl Fn(&Fake) -> bool) {
        let waiting = async {
            while !condition(&self.fake) {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(WAIT, waiting).await.unwrap_or_else(|_| panic!("never: {what}"));
    }

    /// Waits until the server is gone.
    pub async fn stopped(self) -> Stopped {
        tokio::time::timeout(WAIT, self.served).await.unwrap().unwrap()
    }
}

/// Data frames; the last must be `[DONE]`, and is left out.
pub fn frames(text: &str) -> Vec<Value> {
    let mut data: Vec<&str> = text.split("\n\n").filter(|frame| !frame.is_empty() && !frame.starts_with(':')).collect();
    assert_eq!(data.pop(), Some("data: [DONE]"), "{text}");
    data.iter().map(|frame| serde_json::from_str(frame.strip_prefix("data: ").unwrap()).unwrap()).collect()
}
