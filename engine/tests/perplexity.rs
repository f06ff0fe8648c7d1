//! Perplexity through the engine against its definition: a softmax over the logits of the executor, row by row.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // tests

use std::path::PathBuf;

use quire_engine::{
    config::EngineConfig,
    core::{EngineHandle, KvFigures},
    model::{self, executor_on},
    perplexity::{perplexity, score, windows},
};
use quire_kernels::{
    backend::KvType,
    plan::{GroupPlan, NO_ADAPTER, StepPlan},
    reference::{Numerics, Reference},
};

const CONTEXT: usize = 32;

fn path() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("testdata/models/llama-F32.gguf")
}

/// All rows of a sequence alone, with the logits of all of them.
fn plan(ids: &[u32]) -> StepPlan {
    let len = ids.len() as u32;
    let table: Vec<u32> = (0..len.div_ceil(16)).collect();
    let mut plan = StepPlan {
        inputs: ids.to_vec(),
        positions: (0..len).collect(),
        adapters: vec![NO_ADAPTER; ids.len()],
        row_starts: vec![0, len],
        context_lens: vec![len],
        groups: vec![GroupPlan { slots: (0..len).collect(), stride: table.len(), block_tables: table }],
        logit_rows: (0..len).collect(),
        ..StepPlan::default()
    };
    let (rows, s) = (ids.len(), &mut plan.sampling);
    (s.targets, s.temperature, s.top_p, s.min_p) = (vec![0; rows], vec![0.0; rows], vec![1.0; rows], vec![0.0; rows]);
    (s.presence, s.frequency, s.repetition) = (vec![0.0; rows], vec![0.0; rows], vec![1.0; rows]);
    (s.top_k, s.seed, s.draw, s.logprobs, s.mask_rows) = (vec![0; rows], vec![0; rows], vec![0; rows], vec![0; rows], vec![-1; rows]);
    (s.bias_starts, s.history_starts) = (vec![0; rows + 1], vec![0; rows + 1]);
    plan
}

fn logprob(logits: &[f32], id: u32) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|x| f64::from(x - max).exp()).sum();
    f64::from(logits[id as usize] - max) - sum.ln()
}

#[tokio::test]
async fn it_is_the_mean_of_what_the_logits_say() {
    let config = EngineConfig { kv_type: KvType::F32, kv_blocks: 64, max_sequences: 64, max_batched_tokens: 64, ..EngineConfig::default() };
    let mut prepared = executor_on(Reference::new(Numerics::Exact), &path(), Vec::new(), &config).unwrap();
    let vocabulary = prepared.card.vocab_size;
    let tokens: Vec<u32> = (0..5 * CONTEXT as u32 + 7).map(|i| (i * 37 + 11) % vocabulary as u32).collect();
    let windows = windows(&tokens, None, CONTEXT).unwrap();
    assert_eq!(windows.len(), 5);
    let mut want = Vec::new();
    for window in &windows {
        let logits = prepared.executor.logits_of(&plan(window)).unwrap();
        want.extend((CONTEXT / 2..CONTEXT).map(|i| logprob(&logits[(i - 1) * vocabulary..i * vocabulary], window[i])));
    }

    let loaded = model::load(&path(), Vec::new(), &config).unwrap();
    let handle = EngineHandle::spawn(loaded.executor, KvFigures::from(&loaded.memory), loaded.card, &config).unwrap();
    let mut heard = Vec::new();
    let scores = score(&handle, &windows, |done| heard.push(done)).await.unwrap();
    assert_eq!(heard, [4, 5]);
    assert_eq!(scores.len(), want.len());
    for (got, want) in scores.iter().zip(&want) {
        assert!((f64::from(*got) - want).abs() < 2e-4, "{got} {want}");
    }
    let mean = want.iter().sum::<f64>() / want.len() as f64;
    assert!((perplexity(&scores) / (-mean).exp() - 1.0).abs() < 1e-4);
    handle.shutdown();
}
