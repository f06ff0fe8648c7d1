//! Every decoder family against the reference implementation's logits: tiny models with random weights.
//!
//! A dozen is committed; with `QUIRE_FIXTURES` naming the whole set, all of them run. `engine/testdata/models/README.md`
//! says how they were made. `QUIRE_FIXTURE` narrows the run to names that contain it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // tests

use std::{
    fs,
    path::{Path, PathBuf},
};

use quire_engine::{
    config::EngineConfig,
    model::{ModelError, Opened, checkpoint::Checkpoint, description::hf, executor_of},
    runner::ModelExecutor,
};
use quire_kernels::{
    backend::{Backend, KvType},
    cpu::{CpuBackend, CpuOptions},
    reference::{Numerics, Reference},
};

use serde_json::{Value as Json, json};

mod model_support;

use model_support::{Golden, Prompt, Runner, max_difference};

const BLOCKS: usize = 512;
const STEPS: usize = 24;

/// Families that need what is not there yet: refused, and the message says what is missing.
const REFUSED: &[(&str, &str)] = &[
    ("bert", "encoder"),
    ("xlm-roberta", "encoder"),
    ("modernbert", "encoder"),
    ("nomic_bert", "encoder"),
    ("deepseek_v4", "compressed sparse attention"),
    ("falcon_h1", "state-space"),
    ("granitemoehybrid", "state-space"),
    ("kimi_linear", "linear attention"),
    ("lfm2", "convolutions"),
    ("mamba", "state-space"),
    ("nemotron_h", "state-space"),
    ("qwen3_5", "linear attention"),
    ("qwen3_next", "linear attention"),
];

/// Folders of models: the committed ones, or all.
fn folders() -> Vec<PathBuf> {
    let root = match std::env::var_os("QUIRE_FIXTURES") {
        Some(fixtures) => PathBuf::from(fixtures).join("models"),
        None => PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("testdata/models"),
    };
    let wanted = std::env::var("QUIRE_FIXTURE").unwrap_or_default();
    let entries = fs::read_dir(&root).unwrap_or_else(|error| panic!("{}: {error}", root.display()));
    let mut folders: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).filter(|path| path.join("config.json").is_file()).collect();
    folders.retain(|folder| name(folder).contains(&wanted));
    folders.sort();
    folders
}

fn name(folder: &Path) -> String {
    folder.file_name().unwrap().to_string_lossy().into_owned()
}

fn config(max_context: usize) -> EngineConfig {
    EngineConfig {
        kv_type: KvType::F32,
        kv_blocks: BLOCKS,
        max_sequences: 8,
        max_batched_tokens: 256,
        max_context,
        ..EngineConfig::default()
    }
}

fn missing(name: &str) -> Option<&'static str> {
    REFUSED.iter().find(|(start, _)| name.starts_with(start)).map(|(_, reason)| *reason)
}

/// A model and its number of cache groups.
type Prepared<B> = (ModelExecutor<B>, usize);

fn prepare<B: Backend>(backend: B, folder: &Path, max_context: usize) -> Result<Prepared<B>, ModelError> {
    let checkpoint = Checkpoint::open(folder)?;
    let opened = Opened::new(&checkpoint).map_err(|error| error.at(folder))?;
    let (executor, memory) = executor_of(backend, &opened, folder, &config(max_context))?;
    Ok((executor, memory.footprint.groups.len()))
}

/// What differs by more than `tolerance`, or at all where it may not.
fn compare<B: Backend>(folder: &Path, backend: impl Fn() -> B, tolerance: f32, worst: &mut f32) -> Vec<String> {
    let Some(golden) = Golden::read(folder) else { return Vec::new() };
    let mut wrong = Vec::new();
    // Where frequencies depend on the context that the worker allows, short prompts need one that allows no more.
    let whole = match prepare(backend(), folder, 0) {
        Ok(whole) => whole,
        Err(error) => return vec![error.to_string()],
    };
    let above = whole.0.decoder().description().ropes.iter().find_map(|rope| Some(rope.long.as_ref()?.above));
    let (short, long): (Vec<&Prompt>, Vec<&Prompt>) = golden.prompts.iter().partition(|p| above.is_some_and(|above| p.ids.len() <= above));
    if let Some(above) = above {
        let narrow = prepare(backend(), folder, above).unwrap_or_else(|error| panic!("{error}"));
        wrong.extend(compare_prompts(narrow, &short, tolerance, worst));
    }
    let mut whole = whole;
    if let Some(scored) = &golden.scored {
        let ids = &golden.prompts[scored.prompt].ids;
        if above.is_none_or(|above| ids.len() > above) {
            let scores = Runner { executor: &mut whole.0, groups: whole.1, blocks: BLOCKS }.score(ids, 50);
            let (logprobs, likeliest): (Vec<f32>, Vec<u32>) = scores.into_iter().unzip();
            let difference = max_difference(&logprobs, &scored.logprobs);
            if difference > tolerance || likeliest != scored.argmax[..likeliest.len()] {
                wrong.push(format!("log-probabilities of the prompt differ by {difference}"));
            }
        }
    }
    wrong.extend(compare_prompts(whole, &long, tolerance, worst));
    wrong
}

/// Alone, all together, and in chunks.
fn compare_prompts<B: Backend>((mut executor, groups): Prepared<B>, prompts: &[&Prompt], tolerance: f32, worst: &mut f32) -> Vec<String> {
    let mut runner = Runner { executor: &mut executor, groups, blocks: BLOCKS };
    let all: Vec<&[u32]> = prompts.iter().map(|prompt| &prompt.ids[..]).collect();
    let alone = all.iter().flat_map(|ids| runner.greedy(&[ids], usize::MAX >> 1, STEPS)).collect();
    let together = runner.greedy(&all, usize::MAX >> 1, STEPS);
    let chunked = runner.greedy(&all, 11, STEPS);
    let mut wrong = Vec::new();
    for (how, results) in [("alone", alone), ("together", together), ("in chunks", chunked)] {
        for (prompt, (logits, greedy)) in prompts.iter().zip::<Vec<_>>(results) {
            let difference = max_difference(&logits, &prompt.last_logits);
            *worst = worst.max(difference);
            if difference > tolerance {
                wrong.push(format!("{how}, {} tokens: logits differ by {difference}", prompt.ids.len()));
            }
            if greedy != prompt.greedy[..STEPS] {
                let same = greedy.iter().zip(&prompt.greedy).take_while(|(a, b)| a == b).count();
                wrong.push(format!("{how}, {} tokens: greedy differs at step {same}", prompt.ids.len()));
            }
        }
    }
    wrong
}

fn check<B: Backend>(backend: impl Fn() -> B, tolerance: f32) {
    let mut failures = Vec::new();
    let mut seen = 0;
    for folder in folders() {
        let name = name(&folder);
        if missing(&name).is_some() {
            continue;
        }
        seen += 1;
        let mut worst = 0.0;
        let wrong = compare(&folder, &backend, tolerance, &mut worst);
        println!("{name}: {}, largest difference {worst:.1e}", if wrong.is_empty() { "same" } else { "DIFFERS" });
        failures.extend(wrong.into_iter().map(|problem| format!("{name}: {problem}")));
    }
    assert!(seen > 0, "no model found");
    assert!(failures.is_empty(), "{} differences:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn reference_backend_computes_what_the_family_does() {
    check(|| Reference::new(Numerics::Exact), 5e-4);
}

#[test]
fn cpu_backend_computes_what_the_family_does() {
    check(|| CpuBackend::new(CpuOptions { threads: 2, isa: None }).unwrap(), 2e-3);
}

fn config_of(folder: &Path) -> Json {
    serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap()
}

#[test]
fn families_that_lack_something_are_refused_with_a_reason() {
    for folder in folders() {
        if let Some(reason) = missing(&name(&folder)) {
            let error = hf::translate(&config_of(&folder), &|_| true).err().unwrap().to_string();
            assert!(error.contains("config.json") && error.contains(reason), "{}: {error}", name(&folder));
        }
    }
    let error = hf::translate(&json!({"model_type": "new"}), &|_| true).err().unwrap().to_string();
    assert!(error.contains("`new`, which is not supported; supported: llama, mistral"), "{error}");
}

/// Whatever stands in a field: a description or an error that names it, never a panic or a large allocation.
#[test]
fn damaged_configurations_are_errors() {
    let values = [
        json!(null),
        json!(0),
        json!(1),
        json!(-1),
        json!(2.5),
        json!(1e300),
        json!(u64::MAX),
        json!("x"),
        json!(true),
        json!([]),
        json!([1, 2]),
        json!(["full_attention"]),
        json!({}),
        json!({"rope_type": "yarn"}),
        json!({"rope_type": "longrope", "factor": 1}),
    ];
    for folder in folders() {
        let whole = config_of(&folder);
        for key in whole.as_object().unwrap().keys() {
            let mut without = whole.clone();
            without.as_object_mut().unwrap().remove(key);
            let _ = hf::translate(&without, &|_| true);
            for value in &values {
                let mut damaged = whole.clone();
                damaged[key] = value.clone();
                for has in [true, false] {
                    if let Ok((description, _)) = hf::translate(&damaged, &|_| has) {
                        let _ = (description.cache_layout(), description.cache_shapes());
                    }
                }
            }
        }
    }
    let llama = |key: &str, value: Json| {
        let mut config = json!({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 96, "vocab_size": 100, "max_position_embeddings": 64});
        config[key] = value;
        hf::translate(&config, &|_| true).err().map_or_else(String::new, |error| error.to_string())
    };
    for (message, part) in [
        (llama("hidden_size", json!(-3)), "field `hidden_size` is -3; it should be a whole number between 1 and"),
        (llama("num_key_value_heads", json!(3)), "field `num_key_value_heads` is 3, which 4 heads can't share"),
        (llama("rope_scaling", json!({"type": "yarn"})), ""),
        (llama("rope_scaling", json!({"type": "linear"})), "field `rope_scaling.factor` is missing"),
        (llama("rope_scaling", json!({"type": "odd"})), "field `rope_scaling.rope_type` is `odd`"),
        (llama("hidden_act", json!("mish")), "field `hidden_act` is `mish`"),
        (llama("vocab_size", json!(null)), "field `vocab_size` is missing"),
    ] {
        assert!(message.contains(part), "{message}");
    }
}
