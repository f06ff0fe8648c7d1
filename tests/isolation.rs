//! Faults inside a step, from socket to kernels: a real model whose device panics, or computes nonsense, on certain tokens.
//! One request gets a 500; the others say what they say alone.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../src/adapter.rs"]
mod adapter;

use std::{
    collections::HashSet,
    net::SocketAddr,
    path::Path,
    sync::{Arc, OnceLock},
    time::Duration,
};

use adapter::LocalWorker;
use bytes::Bytes;
use futures::future::join_all;
use http_body_util::{BodyExt as _, Full};
use hyper::Request;
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use metrics_exporter_prometheus::PrometheusHandle;
use quire_engine::{
    config::EngineConfig,
    core::{EngineHandle, KvFigures},
    model,
    runner::{Executor, Ticket},
    service::{ServedModel, WorkerService},
};
use quire_kernels::{
    KernelError,
    plan::{NO_TOKEN, StepLimits, StepOutput, StepPlan},
};
use quire_router::{
    config::{CoreConfig, FaceConfig, FleetConfig},
    core::Core,
    fleet::Fleet,
    http::admin::Check,
    server::{Server, ServerConfig},
    telemetry,
};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

const PANIC: u32 = 400;
const POISON: u32 = 401;
const REQUESTS: u32 = 32;

/// A device with a flaw.
struct Faulty {
    inner: Box<dyn Executor>,
    /// Blocks of sequences that hold the poison.
    poisoned: HashSet<u32>,
    /// Logit rows of the last two steps that are nonsense.
    bad_rows: Vec<(Ticket, Vec<usize>)>,
}

impl Executor for Faulty {
    fn limits(&self) -> StepLimits {
        self.inner.limits()
    }

    fn submit(&mut self, plan: &StepPlan) -> Result<Ticket, KernelError> {
        assert!(!plan.inputs.contains(&PANIC), "this token is too much");
        let group = &plan.groups[0];
        let mut bad = Vec::new();
        for s in 0..plan.sequences() {
            let rows = plan.row_starts[s]..plan.row_starts[s + 1];
            let block = group.block_tables[s * group.stride];
            let fresh = plan.positions[rows.start as usize] == 0;
            if fresh {
                self.poisoned.remove(&block);
            }
            if plan.inputs[rows.start as usize..rows.end as usize].contains(&POISON) {
                self.poisoned.insert(block);
            }
            if self.poisoned.contains(&block) {
                bad.extend((0..plan.logit_rows.len()).filter(|row| rows.contains(&plan.logit_rows[*row])));
            }
        }
        let ticket = self.inner.submit(plan)?;
        self.bad_rows.push((ticket, bad));
        Ok(ticket)
    }

    fn wait(&mut self, ticket: Ticket, out: &mut StepOutput) -> Result<(), KernelError> {
        self.inner.wait(ticket, out)?;
        let place = self.bad_rows.iter().position(|(other, _)| *other == ticket).unwrap();
        self.bad_rows.swap_remove(place).1.into_iter().for_each(|row| out.ids[row] = NO_TOKEN);
        Ok(())
    }
}

struct Site {
    address: SocketAddr,
    client: Client<HttpConnector, Full<Bytes>>,
    handle: EngineHandle,
    shutdown: CancellationToken,
}

impl Drop for Site {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

fn recorder() -> PrometheusHandle {
    static RECORDER: OnceLock<PrometheusHandle> = OnceLock::new();
    RECORDER.get_or_init(|| telemetry::install_recorder(&[]).unwrap()).clone()
}

impl Site {
    async fn start(name: &str, step_ahead: usize) -> Self {
        let metrics = recorder();
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("engine/testdata/models/llama-F32.gguf");
        let config = EngineConfig { threads: 1, kv_blocks: 512, step_ahead, ..EngineConfig::default() };
        let loaded = model::load(&path, vec![name.to_owned()], &config).unwrap();
        let kv = KvFigures::from(&loaded.memory);
        let faulty = Faulty { inner: loaded.executor, poisoned: HashSet::new(), bad_rows: Vec::new() };
        let handle = EngineHandle::spawn(Box::new(faulty), kv, loaded.card, &config).unwrap();
        let served = ServedModel { handle: handle.clone(), tokenizer_json: loaded.tokenizer_json, chat_template: loaded.chat_template };
        let fleet = Fleet::new(FleetConfig::default());
        fleet.add("local", Arc::new(LocalWorker(WorkerService::new(vec![served]))));
        assert!(fleet.wait_ready(Duration::from_secs(10)).await);
        let server = Server {
            core: Arc::new(Core::new(fleet, CoreConfig::default())),
            face: FaceConfig::default(),
            config: ServerConfig { settle: Duration::ZERO, ..ServerConfig::default() },
            readiness: Arc::new(|| vec![Check::new("engine", true, "")]),
            metrics,
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let shutdown = CancellationToken::new();
        TaskTracker::new().spawn(server.serve(listener, None, shutdown.clone()));
        Self { address, client: Client::builder(TokioExecutor::new()).build_http(), handle, shutdown }
    }

    async fn call(&self, method: &str, path: &str, body: String) -> (u16, Bytes) {
        let request = Request::builder()
            .method(method)
            .uri(format!("http://{}{path}", self.address))
            .header("content-type", "application/json")
            .body(Full::from(body))
            .unwrap();
        let response = tokio::time::timeout(Duration::from_secs(30), self.client.request(request)).await.unwrap().unwrap();
        let status = response.status().as_u16();
        (status, response.into_body().collect().await.unwrap().to_bytes())
    }

    async fn complete(&self, model: &str, prompt: &[u32]) -> (u16, Value) {
        let body = json!({"model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": true, "logprobs": 1,
            "logit_bias": {PANIC.to_string(): -100, POISON.to_string(): -100}});
        let (status, body) = self.call("POST", "/v1/completions", body.to_string()).await;
        (status, serde_json::from_slice(&body).unwrap())
    }

    async fn counter(&self, name: &str, model: &str) -> f64 {
        let (_, body) = self.call("GET", "/metrics", String::new()).await;
        let text = String::from_utf8(body.to_vec()).unwrap();
        let line = text.lines().find(|line| line.starts_with(name) && line.contains(model));
        line.map_or(0.0, |line| line.rsplit(' ').next().unwrap().parse().unwrap())
    }
}

fn prompt(i: u32) -> Vec<u32> {
    (0..5 + i * 3 % 40).map(|k| 10 + (i * 131 + k * k * 7 + k) % 380).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_request_fails_and_thirty_one_say_what_they_say_alone() {
    for (fault, step_ahead) in [(PANIC, 0), (POISON, 0), (PANIC, 1), (POISON, 1)] {
        let model = format!("faulty-{fault}-{step_ahead}");
        let site = Site::start(&model, step_ahead).await;
        let mut alone = Vec::new();
        for i in 0..REQUESTS {
            let (status, body) = site.complete(&model, &prompt(i)).await;
            assert_eq!(status, 200, "{body}");
            alone.push(body["choices"][0].clone());
        }
        let mut bad = prompt(7);
        bad[3] = fault;
        let answers = join_all((0..REQUESTS).map(|i| {
            let prompt = if i == 7 { bad.clone() } else { prompt(i) };
            let (site, model) = (&site, &model);
            async move { site.complete(model, &prompt).await }
        }))
        .await;
        for (i, (status, body)) in answers.into_iter().enumerate() {
            if i == 7 {
                assert_eq!((status, body["error"]["type"].as_str()), (500, Some("server_error")), "{body}");
                let message = body["error"]["message"].as_str().unwrap();
                let wanted = if fault == PANIC { "failed again with this request alone" } else { "no finite logits" };
                assert!(message.contains(wanted), "{message}");
            } else {
                assert_eq!((status, &body["choices"][0]), (200, &alone[i]), "request {i}");
            }
        }
        assert!(site.handle.health().ready());
        assert_eq!(site.counter("quire_row_failures_total", &model).await, 1.0);
        let reruns = site.counter("quire_sequence_reruns_total", &model).await;
        assert_eq!(reruns > 0.0, fault == PANIC, "{reruns} reruns");
        let load = site.handle.load();
        assert_eq!((load.requests, load.kv_blocks_used), (0, 0));
    }
}
