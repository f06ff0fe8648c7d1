//! Whole models against outputs that another implementation computed in float32 from the same weights.
//!
//! The committed files are tiny and exact; with `QUIRE_MODEL` naming SmolLM2-135M-Instruct Q4_1, the real thing too.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // tests

use std::path::{Path, PathBuf};

use quire_engine::{
    config::EngineConfig,
    model::{self, Prepared, executor_on},
    runner::{Executor, ModelExecutor},
};
use quire_kernels::{
    backend::{Backend, KvType},
    cpu::{CpuBackend, CpuOptions},
    plan::{GroupPlan, NO_ADAPTER, NO_TOKEN, StepOutput, StepPlan},
    reference::{Numerics, Reference},
};
use serde_json::Value as Json;

const MODELS: [&str; 4] = ["llama-F32", "llama-Q4_1", "llama-Q8_0", "llama256-Q4_K_M-mix"];

fn testdata(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("testdata").join(name)
}

fn json(name: &str) -> Json {
    serde_json::from_slice(&std::fs::read(testdata(name)).unwrap()).unwrap()
}

fn ids(value: &Json) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn floats(value: &Json) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect()
}

fn config(kv_type: KvType) -> EngineConfig {
    EngineConfig { kv_type, kv_blocks: 64, max_sequences: 8, max_batched_tokens: 128, ..EngineConfig::default() }
}

/// Rows `ids` of one sequence from position `start`; its blocks go backwards through the pool, so that a table is used.
fn plan(ids: &[u32], start: usize, logits: bool) -> StepPlan {
    const BLOCK: usize = 16;
    const LAST: usize = 63;
    let end = start + ids.len();
    let slot = |position: usize| ((LAST - position / BLOCK) * BLOCK + position % BLOCK) as u32;
    let table: Vec<u32> = (0..end.div_ceil(BLOCK)).map(|block| (LAST - block) as u32).collect();
    let mut plan = StepPlan {
        inputs: ids.to_vec(),
        positions: (start..end).map(|position| position as u32).collect(),
        adapters: vec![NO_ADAPTER; ids.len()],
        row_starts: vec![0, ids.len() as u32],
        context_lens: vec![end as u32],
        groups: vec![GroupPlan { slots: (start..end).map(slot).collect(), stride: table.len(), block_tables: table }],
        ..StepPlan::default()
    };
    let s = &mut plan.sampling;
    (s.bias_starts, s.history_starts) = (vec![0], vec![0]);
    if logits {
        plan.logit_rows = vec![ids.len() as u32 - 1];
        s.targets = vec![NO_TOKEN];
        (s.temperature, s.top_p, s.min_p, s.repetition) = (vec![0.0], vec![1.0], vec![0.0], vec![1.0]);
        (s.presence, s.frequency) = (vec![0.0], vec![0.0]);
        (s.top_k, s.seed, s.draw, s.logprobs, s.mask_rows) = (vec![0], vec![0], vec![0], vec![5], vec![-1]);
        (s.bias_starts, s.history_starts) = (vec![0, 0], vec![0, 0]);
    }
    plan
}

/// Logits of the last of `ids`, computed in chunks of at most `chunk` rows.
fn last_logits<B: Backend>(executor: &mut ModelExecutor<B>, ids: &[u32], chunk: usize) -> Vec<f32> {
    let mut logits = Vec::new();
    let mut start = 0;
    for rows in ids.chunks(chunk) {
        let last = start + rows.len() == ids.len();
        logits = executor.logits_of(&plan(rows, start, last)).unwrap();
        start += rows.len();
    }
    logits
}

/// A token and its log-probability, then the five likeliest.
struct Step {
    id: u32,
    logprob: f32,
    top: Vec<(u32, f32)>,
}

/// What greedy decoding gives after `ids`, through submit and wait.
fn greedy<B: Backend>(executor: &mut ModelExecutor<B>, ids: &[u32], steps: usize) -> Vec<Step> {
    let mut out = StepOutput::default();
    let mut given = Vec::new();
    let mut rows = ids.to_vec();
    let mut start = 0;
    while given.len() < steps {
        let chunk = rows.len().min(executor.limits().rows);
        let last = chunk == rows.len();
        let ticket = executor.submit(&plan(&rows[..chunk], start, last)).unwrap();
        executor.wait(ticket, &mut out).unwrap();
        start += chunk;
        rows.drain(..chunk);
        if last {
            let step = Step { id: out.ids[0], logprob: out.logprobs[0], top: out.top(0).collect() };
            rows.push(step.id);
            given.push(step);
        }
    }
    given
}

fn prepare<B: Backend>(backend: B, path: &Path, config: &EngineConfig) -> Prepared<B> {
    executor_on(backend, path, Vec::new(), config).unwrap_or_else(|error| panic!("{error}"))
}

fn max_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

/// Prompts of a committed model, with what is known of each.
fn prompts(name: &str) -> Vec<(Vec<u32>, Vec<f32>, Vec<u32>)> {
    let golden = json(&format!("models/{name}.golden.json"));
    let prompts = golden["prompts"].as_array().unwrap();
    assert_eq!(prompts.len(), 4);
    prompts
        .iter()
        .map(|p| {
            let mut greedy = ids(&p["greedy"]);
            greedy.truncate(p["greedy_safe_len"].as_u64().unwrap() as usize);
            (ids(&p["ids"]), floats(&p["last_logits"]), greedy)
        })
        .collect()
}

fn model_path(name: &str) -> PathBuf {
    testdata(&format!("models/{name}.gguf"))
}

#[test]
fn the_definition_agrees_with_another_implementation() {
    for name in MODELS {
        let prepared = prepare(Reference::new(Numerics::Exact), &model_path(name), &config(KvType::F32));
        let mut executor = prepared.executor;
        let (mut worst, mut tokens) = (0f32, 0);
        for (prompt, want, want_greedy) in prompts(name) {
            worst = worst.max(max_difference(&last_logits(&mut executor, &prompt, 128), &want));
            let given = greedy(&mut executor, &prompt, want_greedy.len());
            assert_eq!(given.iter().map(|step| step.id).collect::<Vec<_>>(), want_greedy, "{name}, prompt of {}", prompt.len());
            tokens += want_greedy.len();
        }
        println!("{name}: reference: logits differ by {worst:.1e} at most, {tokens} greedy tokens equal");
        assert!(worst < 5e-4, "{name}: {worst}");
        assert!(tokens > 40);
    }
}

fn check_cpu(name: &str, kv_type: KvType) {
    let prepared = prepare(cpu(), &model_path(name), &config(kv_type));
    let mut executor = prepared.executor;
    let mut definition = prepare(Reference::new(Numerics::Quantised), &model_path(name), &config(kv_type)).executor;
    let (mut worst, mut least, mut from_definition) = (0f32, 1f64, 0f32);
    for (prompt, want, want_greedy) in prompts(name) {
        let logits = last_logits(&mut executor, &prompt, 128);
        worst = worst.max(max_difference(&logits, &want));
        least = least.min(cosine(&logits, &want));
        from_definition = from_definition.max(max_difference(&logits, &last_logits(&mut definition, &prompt, 128)));
        if name.ends_with("F32") && kv_type == KvType::F32 {
            let given = greedy(&mut executor, &prompt, want_greedy.len());
            assert_eq!(given.iter().map(|step| step.id).collect::<Vec<_>>(), want_greedy, "{name}, prompt of {}", prompt.len());
        }
    }
    let kv_type_name = kv_type.name();
    println!(
        "{name}: cpu, KV {kv_type_name}: logits differ by {worst:.1e} at most, cosine {least:.6} at least; {from_definition:.1e} from the definition"
    );
    // What quantised activations cost these random weights; the definition with them costs the same.
    assert!(least >= 0.998, "{name}: cosine {least}");
    if name.ends_with("F32") && kv_type == KvType::F32 {
        assert!(worst < 2e-3, "{name}: {worst}");
    }
}

#[test]
fn the_cpu_backend_agrees_with_another_implementation() {
    for name in MODELS {
        check_cpu(name, KvType::F32);
        check_cpu(name, KvType::F16);
    }
}

/// How a prompt is cut into steps changes no bit.
#[test]
fn chunked_prefill_gives_the_same_bits() {
    fn check<B: Backend>(prepared: Prepared<B>, name: &str) {
        let mut executor = prepared.executor;
        let (prompt, ..) = prompts(name).pop().unwrap();
        assert!(prompt.len() >= 100);
        let whole: Vec<u32> = last_logits(&mut executor, &prompt, 128).iter().map(|x| x.to_bits()).collect();
        for chunk in [1, 7, 16, 33, 64, 99] {
            let cut: Vec<u32> = last_logits(&mut executor, &prompt, chunk).iter().map(|x| x.to_bits()).collect();
            assert!(cut == whole, "{name}, chunks of {chunk}");
        }
    }
    for name in MODELS {
        check(prepare(Reference::new(Numerics::Quantised), &model_path(name), &config(KvType::F16)), name);
        check(prepare(cpu(), &model_path(name), &config(KvType::F16)), name);
    }
}

/// Two steps may be submitted before the first is waited for; tickets are waited for in order.
#[test]
fn steps_are_waited_for_in_order() {
    let mut executor = prepare(Reference::new(Numerics::Exact), &model_path("llama-F32"), &config(KvType::F32)).executor;
    let (prompt, _, want) = prompts("llama-F32").remove(1);
    let mut out = StepOutput::default();
    let first = executor.submit(&plan(&prompt, 0, true)).unwrap();
    // The token of the first step, which only the device knows yet.
    let next = plan(&[quire_kernels::plan::SAMPLED_ROW], prompt.len(), true);
    let second = executor.submit(&next).unwrap();
    assert!(executor.wait(second, &mut out).is_err());
    executor.wait(first, &mut out).unwrap();
    assert_eq!(out.ids, want[..1]);
    executor.wait(second, &mut out).unwrap();
    assert_eq!(out.ids, want[1..2]);
    assert!(executor.wait(second, &mut out).is_err());
    // A step without logits gives nothing.
    let third = executor.submit(&plan(&prompt, 0, false)).unwrap();
    executor.wait(third, &mut out).unwrap();
    assert!(out.ids.is_empty() && out.top_starts == [0]);
}

#[test]
fn a_loaded_model_describes_itself() {
    let path = model_path("llama-Q4_1");
    let loaded = model::load(&path, Vec::new(), &config(KvType::F16)).unwrap();
    let card = &loaded.card;
    assert_eq!(card.names, ["llama-Q4_1"]);
    assert_eq!((card.architecture.as_str(), card.weights.as_str(), card.kv_type.as_str()), ("llama", "Q4_1", "f16"));
    assert_eq!((card.vocab_size, card.trained_context, card.max_context), (512, 256, 256));
    assert_eq!((card.bos_id, card.add_bos, card.eos_ids.clone()), (Some(507), false, vec![510]));
    assert!(card.created > 0 && card.parameters > 100_000 && card.weights_hash.len() == 64, "{card:?}");
    assert_eq!(loaded.memory.kv.blocks, 64);
    assert!(loaded.memory.weights_bytes > 50_000);
    let again = model::load(&path, vec!["a".into(), "b".into()], &config(KvType::F16)).unwrap();
    assert_eq!(again.card.names, ["a", "b"]);
    assert_eq!(again.card.weights_hash, card.weights_hash);
    let other = model::load(&model_path("llama-F32"), Vec::new(), &config(KvType::F16)).unwrap();
    assert_ne!(other.card.weights_hash, card.weights_hash);
}

/// A model whose file is not what its metadata says is refused with the file's name and the tensor's.
#[test]
fn a_wrong_model_is_a_clear_error() {
    let bytes = std::fs::read(model_path("llama-Q4_1")).unwrap();
    let folder = std::env::temp_dir().join(format!("quire-golden-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("broken.gguf");
    let with = |from: &[u8], to: &[u8]| {
        assert_eq!(from.len(), to.len());
        let mut bytes = bytes.clone();
        let at = bytes.windows(from.len()).position(|window| window == from).unwrap();
        bytes[at..at + to.len()].copy_from_slice(to);
        std::fs::write(&path, bytes).unwrap();
        model::load(&path, Vec::new(), &config(KvType::F16)).err().unwrap().to_string()
    };
    let error = with(b"blk.1.attn_k.weight", b"blk.1.attn_x.weight");
    assert!(error.contains("broken.gguf: tensor `blk.1.attn_k.weight`: is missing"), "{error}");
    let error = with(b"llama.embedding_length\x04\0\0\0\x40", b"llama.embedding_length\x04\0\0\0\x60");
    assert!(error.contains("broken.gguf: tensor `") && error.contains("the configuration asks for"), "{error}");
    let error = with(b"blk.1.attn_norm.weight", b"blk.1.attn_norm.weighs");
    assert!(error.contains("is missing"), "{error}");
    std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    let error = model::load(&path, Vec::new(), &config(KvType::F16)).err().unwrap().to_string();
    assert!(error.contains("broken.gguf: tensor `") && error.contains("download it again"), "{error}");
    // An extra tensor would be a part of the model that is not computed.
    std::fs::remove_dir_all(&folder).unwrap();
    let missing = model::load(&path, Vec::new(), &config(KvType::F16)).err().unwrap().to_string();
    assert!(missing.contains("broken.gguf: cannot be read"), "{missing}");
}

/// The real model: no further from float32 than what quantised activations cost.
#[test]
fn the_real_model_agrees_with_float32() {
    let Ok(path) = std::env::var("QUIRE_MODEL") else {
        println!("skipped: QUIRE_MODEL does not name SmolLM2-135M-Instruct.Q4_1.gguf");
        return;
    };
    let golden = json("golden_smollm2.json");
    let settings = EngineConfig { kv_blocks: 64, max_sequences: 8, ..EngineConfig::default() };
    let began = std::time::Instant::now();
    let Prepared { mut executor, tokenizer, memory, .. } = prepare(cpu(), Path::new(&path), &settings);
    println!("loaded in {:?}; {memory}", began.elapsed());
    let text = tokenizers::Tokenizer::from_bytes(&tokenizer.json).unwrap();
    let cases = golden["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 16);
    let mut figures = Figures::default();
    for case in cases {
        let prompt = case["prompt"].as_str().unwrap();
        let want = ids(&case["ids"]);
        assert_eq!(text.encode(prompt, false).unwrap().get_ids(), want, "{prompt:?}");
        let logits = last_logits(&mut executor, &want, settings.max_batched_tokens);
        figures.first(prompt, &logits, &case["first_top5"]);
        let steps = case["greedy"].as_array().unwrap();
        let given = greedy(&mut executor, &want, steps.len());
        figures.greedy(prompt, &given, steps);
    }
    println!("{figures:?}");
    assert!(figures.likeliest <= 0.25, "the likeliest first token's log-probability is off by {}", figures.likeliest);
    assert!(figures.next_four <= 0.5, "a following token's log-probability is off by {}", figures.next_four);
    assert!(figures.widest_margin <= 0.3, "greedy output differs where the margin is {}", figures.widest_margin);
}

/// With default settings, as a worker starts: quickly, and without touching the memory of the cache.
#[test]
fn the_real_model_starts_quickly_in_little_memory() {
    let Ok(path) = std::env::var("QUIRE_MODEL") else {
        println!("skipped: QUIRE_MODEL does not name SmolLM2-135M-Instruct.Q4_1.gguf");
        return;
    };
    let resident = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let anonymous = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        anonymous.trim().trim_end_matches(" kB").parse::<usize>().unwrap() * 1024
    };
    let before = resident();
    let began = std::time::Instant::now();
    let loaded = model::load(path.as_ref(), Vec::new(), &EngineConfig::default()).unwrap();
    let (took, grown) = (began.elapsed(), resident().saturating_sub(before));
    let memory = &loaded.memory;
    println!("{memory}; weights {} MiB, scratch {} MiB", memory.weights_bytes >> 20, memory.scratch_bytes >> 20);
    println!("ready in {took:?}, {} MiB resident; {:?}", grown >> 20, loaded.card);
    assert!(memory.kv_bytes() > 256 << 20, "the cache is too small to tell");
    assert!(grown < memory.weights_bytes + memory.scratch_bytes + (192 << 20), "{grown} bytes are resident");
    assert!(took < std::time::Duration::from_secs(2), "{took:?}");
}

#[derive(Debug, Default)]
struct Figures {
    /// Largest difference of the likeliest first token's log-probability.
    likeliest: f64,
    /// The same of the next four, where they are above −6.
    next_four: f64,
    /// Prompts whose greedy output is the same to the end.
    same: usize,
    /// Widest margin at which a greedy output first differs.
    widest_margin: f64,
}

impl Figures {
    fn first(&mut self, prompt: &str, logits: &[f32], want: &Json) {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|x| f64::from(x - max).exp()).sum();
        for (rank, pair) in want.as_array().unwrap().iter().enumerate() {
            let (id, logprob) = (pair[0].as_u64().unwrap() as usize, pair[1].as_f64().unwrap());
            let off = (f64::from(logits[id] - max) - sum.ln() - logprob).abs();
            match rank {
                0 => {
                    println!("{off:.3} {:?}", prompt.chars().take(40).collect::<String>());
                    self.likeliest = self.likeliest.max(off);
                }
                _ if logprob > -6.0 => self.next_four = self.next_four.max(off),
                _ => {}
            }
        }
    }

    fn greedy(&mut self, prompt: &str, given: &[Step], want: &[Json]) {
        let differs = given.iter().zip(want).position(|(given, want)| u64::from(given.id) != want[0].as_u64().unwrap());
        // What sampling reports is what the logits say.
        for step in given {
            assert_eq!((step.id, step.logprob), step.top[0], "{prompt:?}");
        }
        match differs {
            None => self.same += 1,
            Some(at) => {
                let margin = want[at][2].as_f64().unwrap();
                println!("      differs at token {at}, where the margin is {margin:.3}");
                self.widest_margin = self.widest_margin.max(margin);
            }
        }
    }
}

/// The fast backend on this machine.
fn cpu() -> CpuBackend {
    CpuBackend::new(CpuOptions::default()).unwrap()
}
