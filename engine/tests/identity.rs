//! What a request says does not depend on its company: alone, in a batch, in chunks, preempted, after cache hits, a step ahead,
//! on any number of threads, for every type that keys and values are stored in. Tokens and log-probabilities, to the last bit,
//! on a real model (a committed tiny one) through the real engine.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // tests

use std::path::PathBuf;

use futures::future::join_all;
use quire_engine::{
    config::EngineConfig,
    core::{EngineHandle, KvFigures},
    model,
};
use quire_kernels::backend::KvType;
use quire_proto::worker::v1::{GenerateRequest, Sampling, Stopping, TokenLogprobs, generate_event::Event};

const REQUESTS: u32 = 12;
const TOKENS: u32 = 30;

/// What a choice said: ids and, as bits, log-probabilities with their runners-up.
type Choice = Vec<(u32, Bits)>;
type Bits = (Option<u32>, Vec<(u32, u32)>);

/// What a request said: scores of its prompt, if it wanted them, and its choices.
#[derive(Debug, PartialEq, Eq)]
struct Said {
    prompt: Vec<Bits>,
    choices: Vec<Choice>,
}

fn bits(logprobs: &TokenLogprobs) -> Bits {
    let top = logprobs.top_ids.iter().zip(&logprobs.top_logprobs).map(|(id, value)| (*id, value.to_bits())).collect();
    (logprobs.logprob.map(f32::to_bits), top)
}

/// Greedy and drawn, short and long; some share their beginning, some have choices, some want their prompt scored.
fn request(number: u32) -> GenerateRequest {
    let len = [5, 150, 33, 64, 97, 17, 128, 48, 200, 16, 75, 111][number as usize % 12];
    let family = number % 3;
    GenerateRequest {
        prompt_ids: (0..len).map(|i| 5 + (if i < 48 { family * 131 } else { number * 57 } + i * 17 + i * i % 13) % 220).collect(),
        sampling: Some(Sampling {
            temperature: if number.is_multiple_of(2) { 0.0 } else { 0.9 },
            top_p: 0.95,
            seed: number.into(),
            ..Sampling::default()
        }),
        stopping: Some(Stopping { max_tokens: TOKENS, ignore_eos: true, ..Stopping::default() }),
        logprobs: Some(3),
        prompt_logprobs: (number % 5 == 4).then_some(2),
        n: if number % 4 == 3 { 3 } else { 1 },
        ..GenerateRequest::default()
    }
}

async fn ask(handle: &EngineHandle, request: GenerateRequest) -> Said {
    let mut said = Said { prompt: Vec::new(), choices: vec![Vec::new(); request.n.max(1) as usize] };
    let mut events = handle.generate(request).unwrap();
    while let Some(event) = events.recv().await {
        match event.event.unwrap() {
            Event::Started(started) => said.prompt = started.prompt_logprobs.iter().map(bits).collect(),
            Event::Token(token) => said.choices[token.choice as usize].push((token.id, bits(token.logprobs.as_ref().unwrap()))),
            Event::Finished(finished) => assert_eq!(finished.generated_tokens, TOKENS, "{}", finished.message),
        }
    }
    assert!(events.finished());
    said
}

fn engine(model: &str, kv_type: KvType, change: impl FnOnce(&mut EngineConfig)) -> EngineHandle {
    let mut config = EngineConfig { kv_type, threads: 2, kv_blocks: 512, prefix_cache: false, ..EngineConfig::default() };
    change(&mut config);
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("testdata/models/{model}.gguf"));
    let loaded = model::load(&path, Vec::new(), &config).unwrap();
    EngineHandle::spawn(loaded.executor, KvFigures::from(&loaded.memory), loaded.card, &config).unwrap()
}

async fn alone(handle: &EngineHandle) -> Vec<Said> {
    let mut all = Vec::new();
    for number in 0..REQUESTS {
        all.push(ask(handle, request(number)).await);
    }
    all
}

async fn together(handle: &EngineHandle) -> Vec<Said> {
    join_all((0..REQUESTS).map(|number| ask(handle, request(number)))).await
}

fn same(what: &str, got: &[Said], truth: &[Said]) {
    for (number, (got, truth)) in got.iter().zip(truth).enumerate() {
        assert!(got == truth, "{what}: request {number} says something else:\n{got:?}\n{truth:?}");
    }
    assert_eq!(got.len(), truth.len());
}

async fn check(model: &str, kv_type: KvType) {
    let name = format!("{model}, {}", kv_type.name());
    let truth = {
        let handle = engine(model, kv_type, |config| config.threads = 1);
        alone(&handle).await
    };
    assert!(truth.iter().any(|said| !said.prompt.is_empty()) && truth.iter().any(|said| said.choices.len() == 3));
    for chunk in [16, 64, 512] {
        let handle = engine(model, kv_type, |config| (config.max_prefill_chunk, config.max_batched_tokens) = (chunk, 512));
        same(&format!("{name}, batched, chunks of {chunk}"), &together(&handle).await, &truth);
    }
    // Steps so small that prompts and decodes mix in every way.
    let handle = engine(model, kv_type, |config| config.max_batched_tokens = 24);
    same(&format!("{name}, steps of 24"), &together(&handle).await, &truth);

    let handle = engine(model, kv_type, |config| {
        (config.kv_blocks, config.policy) = (20, quire_engine::scheduler::Policy::plain());
    });
    same(&format!("{name}, preempted"), &together(&handle).await, &truth);
    assert!(handle.load().preemptions > 0, "{name}: nobody was preempted");

    for step_ahead in [0, 1] {
        let handle = engine(model, kv_type, |config| (config.prefix_cache, config.step_ahead) = (true, step_ahead));
        same(&format!("{name}, {step_ahead} ahead, filling the cache"), &together(&handle).await, &truth);
        same(&format!("{name}, {step_ahead} ahead, cache hits"), &together(&handle).await, &truth);
        let again = alone(&handle).await;
        same(&format!("{name}, {step_ahead} ahead, cache hits alone"), &again, &truth);
    }
}

#[tokio::test]
async fn halves() {
    check("llama-Q4_1", KvType::F16).await;
    check("llama256-Q4_K_M-mix", KvType::F16).await;
}

#[tokio::test]
async fn floats() {
    check("llama-F32", KvType::F32).await;
}

#[tokio::test]
async fn bytes() {
    check("llama-Q8_0", KvType::Q8).await;
    check("llama256-Q4_K_M-mix", KvType::Q8).await;
}

#[tokio::test]
async fn e4m3() {
    check("llama-Q8_0", KvType::Fp8).await;
}
