//! The same tiny models as GGUF files, written by the conventions of llama.cpp's converter: rows of queries and keys
//! permuted where the architecture turns neighbours, norms of Gemma with their 1, fused projections stacked, experts
//! stacked, rotation factors as tensors.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // tests

use std::path::{Path, PathBuf};

use quire_engine::{
    config::EngineConfig,
    model::{
        Opened,
        checkpoint::Checkpoint,
        description::names::{Fused, Role},
        executor_of,
    },
};
use quire_kernels::{
    backend::KvType,
    reference::{Numerics, Reference},
};
use serde_json::Value as Json;

mod gguf_writer;
mod model_support;

use gguf_writer::{Value, Writer};
use model_support::{Golden, Runner, argmax, max_difference};

struct Case {
    fixture: &'static str,
    architecture: &'static str,
    /// Rows of queries and keys are permuted.
    permute: bool,
    /// Names that differ from the usual ones.
    names: &'static [(Role, &'static str)],
}

const fn case(fixture: &'static str, architecture: &'static str) -> Case {
    Case { fixture, architecture, permute: false, names: &[] }
}

const CASES: &[Case] = &[
    Case { permute: true, ..case("llama-v5-config", "llama") },
    Case { permute: true, ..case("llama-rope-llama3", "llama") },
    Case { permute: true, ..case("llama-attn-bias", "llama") },
    Case { permute: true, ..case("mixtral", "llama") },
    Case { permute: true, ..case("granite", "granite") },
    case("ernie4_5", "ernie4_5"),
    case("qwen2", "qwen2"),
    case("qwen2_moe", "qwen2moe"),
    case("qwen3", "qwen3"),
    case("qwen3_moe", "qwen3moe"),
    case("gemma", "gemma"),
    case("gemma2", "gemma2"),
    case("gemma3", "gemma3"),
    case("phi", "phi2"),
    case("phi3", "phi3"),
    case("phi3-longrope", "phi3"),
    case("olmo2", "olmo2"),
    case("starcoder2", "starcoder2"),
    case("stablelm", "stablelm"),
    case("gpt2", "gpt2"),
    case("gpt_neox", "gptneox"),
    case("falcon-7b-style", "falcon"),
    Case { names: &[(Role::AttentionNorm, "attn_norm_2"), (Role::FeedForwardNorm, "attn_norm")], ..case("falcon-40b-style", "falcon") },
    case("cohere2", "cohere2"),
    case("glm4", "glm4"),
    case("minimax_m2", "minimax-m2"),
    Case { names: &[(Role::FeedForwardNorm, "post_attention_norm")], ..case("gpt_oss", "gpt-oss") },
];

const LAYER: &[(Role, &str)] = &[
    (Role::AttentionNorm, "attn_norm"),
    (Role::Query, "attn_q"),
    (Role::Key, "attn_k"),
    (Role::Value, "attn_v"),
    (Role::QueryKeyValue, "attn_qkv"),
    (Role::QueryNorm, "attn_q_norm"),
    (Role::KeyNorm, "attn_k_norm"),
    (Role::AttentionOutput, "attn_output"),
    (Role::AttentionBranchNorm, "post_attention_norm"),
    (Role::Sinks, "attn_sinks"),
    (Role::FeedForwardNorm, "ffn_norm"),
    (Role::Gate, "ffn_gate"),
    (Role::Up, "ffn_up"),
    (Role::GateUp, "ffn_up"),
    (Role::Down, "ffn_down"),
    (Role::FeedForwardBranchNorm, "post_ffw_norm"),
    (Role::RouterWeight, "ffn_gate_inp"),
    (Role::RouterCorrection, "exp_probs_b"),
    (Role::ExpertGate, "ffn_gate_exps"),
    (Role::ExpertUp, "ffn_up_exps"),
    (Role::ExpertDown, "ffn_down_exps"),
    (Role::SharedGate, "ffn_gate_shexp"),
    (Role::SharedUp, "ffn_up_shexp"),
    (Role::SharedDown, "ffn_down_shexp"),
    (Role::RowGate, "ffn_gate_inp_shexp"),
];

const ONCE: &[(Role, &str)] =
    &[(Role::Embedding, "token_embd"), (Role::Positions, "position_embd"), (Role::OutputNorm, "output_norm"), (Role::Output, "output")];

/// Rows × columns, or a vector where rows is 0.
struct Matrix {
    rows: usize,
    columns: usize,
    values: Vec<f32>,
}

impl Matrix {
    fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.columns..(row + 1) * self.columns]
    }

    fn pick(&self, rows: &[usize]) -> Self {
        let values = rows.iter().flat_map(|row| self.row(*row).to_vec()).collect();
        Self { rows: rows.len(), columns: self.columns, values }
    }

    fn turned(&self) -> Self {
        let values = (0..self.columns).flat_map(|c| (0..self.rows).map(move |r| self.values[r * self.columns + c])).collect();
        Self { rows: self.columns, columns: self.rows, values }
    }
}

fn folder(name: &str) -> Option<PathBuf> {
    let committed = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("testdata/models").join(name);
    let all = std::env::var_os("QUIRE_FIXTURES").map(|fixtures| PathBuf::from(fixtures).join("models").join(name));
    [Some(committed), all].into_iter().flatten().find(|folder| folder.join("model.safetensors").is_file())
}

struct Converter<'o, 'a> {
    opened: &'o Opened<'a>,
    case: &'o Case,
    writer: Writer,
}

impl Converter<'_, '_> {
    fn read(&self, name: &str) -> Option<Matrix> {
        let tensor = self.opened.tensors.get(name).unwrap()?;
        let (rows, columns) = (if tensor.shape.len() > 1 { tensor.rows() } else { 0 }, tensor.columns());
        Some(Matrix { rows, columns, values: tensor.to_f32().unwrap() })
    }

    fn write(&mut self, name: &str, dimensions: &[usize], values: &[f32]) {
        let data = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let dimensions: Vec<u64> = dimensions.iter().map(|size| *size as u64).collect();
        self.writer.tensors.push(gguf_writer::Tensor { name: name.to_owned(), dimensions, tensor_type: 0, offset: None, data });
    }

    fn write_matrix(&mut self, name: &str, matrix: &Matrix) {
        let both = [matrix.columns, matrix.rows];
        self.write(name, if matrix.rows > 1 { &both } else { &both[..1] }, &matrix.values);
    }

    /// Which rows of the stored tensor come where.
    fn order(&self, layer: usize, role: Role, rows: usize) -> Vec<usize> {
        let attention = &self.opened.description.layers[layer].attention;
        let (head_dim, half) = (attention.head_dim, attention.head_dim / 2);
        match role {
            Role::Query | Role::Key if self.case.permute => {
                (0..rows).map(|row| row / head_dim * head_dim + row % 2 * half + row % head_dim / 2).collect()
            }
            Role::QueryKeyValue if self.opened.map.fused == Fused::PerKeyHead => {
                let own = attention.heads / attention.kv_heads * head_dim;
                let period = own + 2 * head_dim;
                let part =
                    |start: usize, count: usize| (0..attention.kv_heads).flat_map(move |h| (0..count).map(move |i| h * period + start + i));
                part(0, own).chain(part(own, head_dim)).chain(part(own + head_dim, head_dim)).collect()
            }
            _ => (0..rows).collect(),
        }
    }

    fn role(&mut self, layer: usize, role: Role, name: &str) {
        let Some(source) = self.opened.map.layer(layer, role) else { return };
        let target = format!("blk.{layer}.{name}");
        if source.contains("{e}") {
            return self.experts(layer, &source, &target);
        }
        let norm = name.contains("norm");
        let Some(mut matrix) = self.read(&format!("{source}.weight")).or_else(|| self.read(&source)) else { return };
        if norm {
            matrix.values.iter_mut().for_each(|value| *value += self.opened.map.norm_offset);
        }
        if self.opened.map.transposed && matrix.rows > 0 {
            matrix = matrix.turned();
        }
        if matrix.rows > 1 {
            matrix = matrix.pick(&self.order(layer, role, matrix.rows));
        }
        let suffix = if role == Role::RouterCorrection { "bias" } else { "weight" };
        self.write_matrix(&format!("{target}.{suffix}"), &matrix);
        if let Some(bias) = self.read(&format!("{source}.bias")) {
            let order = if norm { (0..bias.columns).collect() } else { self.order(layer, role, bias.columns) };
            let values: Vec<f32> = order.iter().map(|row| bias.values[*row]).collect();
            self.write(&format!("{target}.bias"), &[values.len()], &values);
        }
    }

    /// One tensor an expert → a stack.
    fn experts(&mut self, layer: usize, source: &str, target: &str) {
        let Some(experts) = self.opened.description.layers[layer].feed_forward.experts else { return };
        let all: Vec<Matrix> =
            (0..experts.count).map(|e| self.read(&format!("{}.weight", source.replace("{e}", &e.to_string()))).unwrap()).collect();
        let values: Vec<f32> = all.iter().flat_map(|matrix| matrix.values.clone()).collect();
        self.write(&format!("{target}.weight"), &[all[0].columns, all[0].rows, experts.count], &values);
    }

    /// gpt-oss: in × out, gate and up taking turns, biases.
    fn interleaved_experts(&mut self, layer: usize) {
        let experts = self.opened.description.layers[layer].feed_forward.experts.unwrap();
        let name = |role| self.opened.map.layer(layer, role).unwrap();
        let (gate_up, down) = (name(Role::ExpertGateUp), name(Role::ExpertDown));
        let (width, hidden) = (experts.width, self.opened.description.hidden);
        let whole = self.read(&gate_up).unwrap();
        let bias = self.read(&format!("{gate_up}_bias")).unwrap();
        for (part, role) in ["gate", "up"].into_iter().enumerate() {
            let mut values = Vec::new();
            for e in 0..experts.count {
                let own = Matrix {
                    rows: hidden,
                    columns: 2 * width,
                    values: whole.values[e * hidden * 2 * width..][..hidden * 2 * width].to_vec(),
                };
                let rows: Vec<usize> = (0..width).map(|i| 2 * i + part).collect();
                values.extend(own.turned().pick(&rows).values);
            }
            self.write(&format!("blk.{layer}.ffn_{role}_exps.weight"), &[hidden, width, experts.count], &values);
            let values: Vec<f32> = bias.values.iter().skip(part).step_by(2).copied().collect();
            self.write(&format!("blk.{layer}.ffn_{role}_exps.bias"), &[width, experts.count], &values);
        }
        let whole = self.read(&down).unwrap();
        let own = |e: usize| Matrix { rows: width, columns: hidden, values: whole.values[e * hidden * width..][..hidden * width].to_vec() };
        let values: Vec<f32> = (0..experts.count).flat_map(|e| own(e).turned().values).collect();
        self.write(&format!("blk.{layer}.ffn_down_exps.weight"), &[width, hidden, experts.count], &values);
        let bias = self.read(&format!("{down}_bias")).unwrap();
        self.write(&format!("blk.{layer}.ffn_down_exps.bias"), &[hidden, experts.count], &bias.values);
    }

    fn tensors(&mut self) {
        for (role, name) in ONCE {
            let source = self.opened.map.once(*role);
            let Some(source) = source.filter(|_| *role != Role::Output || !self.opened.description.tied_output) else { continue };
            let Some(mut matrix) = self.read(&format!("{source}.weight")) else { continue };
            if *role == Role::OutputNorm {
                matrix.values.iter_mut().for_each(|value| *value += self.opened.map.norm_offset);
            }
            self.write_matrix(&format!("{name}.weight"), &matrix);
            if let Some(bias) = self.read(&format!("{source}.bias")) {
                self.write(&format!("{name}.bias"), &[bias.columns], &bias.values);
            }
        }
        for layer in 0..self.opened.description.layers.len() {
            let shared_norm = self.opened.map.layer(layer, Role::FeedForwardNorm) == self.opened.map.layer(layer, Role::AttentionNorm);
            for (role, usual) in LAYER {
                let name = self.case.names.iter().find(|(other, _)| other == role).map_or(*usual, |(_, name)| name);
                if *role == Role::FeedForwardNorm && shared_norm {
                    continue;
                }
                if *role == Role::AttentionBranchNorm && self.case.architecture == "gpt-oss" {
                    continue;
                }
                if self.opened.map.experts_interleaved && matches!(role, Role::ExpertGate | Role::ExpertUp | Role::ExpertDown) {
                    continue;
                }
                self.role(layer, *role, name);
            }
            if self.opened.map.experts_interleaved {
                self.interleaved_experts(layer);
            }
        }
    }

    fn keys(&mut self, config: &Json) {
        let d = &self.opened.description;
        let attention = d.layers[0].attention;
        let mut keys: Vec<(&str, Value)> = vec![
            ("context_length", Value::u32(d.trained_context as u32)),
            ("embedding_length", Value::u32(d.hidden as u32)),
            ("block_count", Value::u32(d.layers.len() as u32)),
            ("attention.head_count", Value::u32(attention.heads as u32)),
            ("attention.head_count_kv", Value::u32(attention.kv_heads as u32)),
            ("attention.key_length", Value::u32(attention.head_dim as u32)),
            ("attention.value_length", Value::u32(attention.value_dim as u32)),
            ("attention.layer_norm_rms_epsilon", Value::f32(d.output_norm.epsilon)),
            ("attention.layer_norm_epsilon", Value::f32(d.output_norm.epsilon)),
        ];
        let number = |key: &str| config[key].as_f64().map(|value| value as f32);
        let width = ["intermediate_size", "n_inner", "ffn_hidden_size"].iter().find_map(|key| config[key].as_u64()).unwrap();
        keys.push(("feed_forward_length", Value::u32(width as u32)));
        let base = number("rope_theta").or(config["rope_parameters"]["rope_theta"].as_f64().map(|base| base as f32)).unwrap_or(10_000.0);
        keys.push(("rope.freq_base", Value::f32(base)));
        if let Some(rope) = d.ropes.first() {
            keys.push(("rope.dimension_count", Value::u32(rope.dim() as u32)));
        }
        if let Some(window) = config["sliding_window"].as_u64() {
            keys.push(("attention.sliding_window", Value::u32(window as u32)));
        }
        if let Some(every) = config["sliding_window_pattern"].as_u64() {
            keys.push(("attention.sliding_window_pattern", Value::u32(every as u32)));
        }
        for (from, to) in [
            ("attn_logit_softcapping", "attn_logit_softcapping"),
            ("final_logit_softcapping", "final_logit_softcapping"),
            ("embedding_multiplier", "embedding_scale"),
            ("residual_multiplier", "residual_scale"),
            ("attention_multiplier", "attention.scale"),
            ("logits_scaling", "logit_scale"),
            ("logit_scale", "logit_scale"),
            ("rope_local_base_freq", "rope.freq_base_swa"),
        ] {
            keys.extend(number(from).map(|value| (to, Value::f32(value))));
        }
        if let Some(scalar) = number("query_pre_attn_scalar") {
            // No converter writes it: real models of 46 and 62 layers apart it is a head's size.
            keys.push(("attention.scale", Value::f32(scalar.sqrt().recip())));
        }
        if let Some(experts) = d.layers.iter().find_map(|layer| layer.feed_forward.experts) {
            keys.push(("expert_count", Value::u32(experts.count as u32)));
            keys.push(("expert_used_count", Value::u32(experts.used as u32)));
            keys.push(("expert_feed_forward_length", Value::u32(experts.width as u32)));
        }
        if let Some(width) = config["shared_expert_intermediate_size"].as_u64() {
            keys.push(("expert_shared_feed_forward_length", Value::u32(width as u32)));
        }
        let scaling = &config["rope_scaling"];
        match scaling["rope_type"].as_str().or(scaling["type"].as_str()) {
            Some(kind @ ("yarn" | "linear")) => {
                keys.push(("rope.scaling.type", Value::string(kind)));
                keys.push(("rope.scaling.factor", Value::f32(scaling["factor"].as_f64().unwrap() as f32)));
                if let Some(original) = scaling["original_max_position_embeddings"].as_u64() {
                    keys.push(("rope.scaling.original_context_length", Value::u32(original as u32)));
                }
            }
            Some("llama3") => {
                let rope = &d.ropes[0];
                let plain = (0..rope.dim() / 2).map(|i| f64::from(base).powf(-2.0 * i as f64 / rope.dim() as f64));
                let factors: Vec<f32> = plain.zip(&rope.frequencies).map(|(plain, own)| (plain / f64::from(*own)) as f32).collect();
                self.write("rope_freqs.weight", &[factors.len()], &factors);
            }
            Some("longrope") => {
                for (name, key) in [("rope_factors_long.weight", "long_factor"), ("rope_factors_short.weight", "short_factor")] {
                    let factors = model_support::floats(&scaling[key]);
                    self.write(name, &[factors.len()], &factors);
                }
                keys.push(("rope.scaling.attn_factor", Value::f32(d.ropes[0].magnitude)));
                let original = config["original_max_position_embeddings"].as_u64().unwrap();
                keys.push(("rope.scaling.original_context_length", Value::u32(original as u32)));
            }
            _ => {}
        }
        if let Some(parallel) = config["use_parallel_residual"].as_bool() {
            keys.push(("use_parallel_residual", Value::bool(parallel)));
        }
        self.writer.keys.push(("general.architecture".to_owned(), Value::string(self.case.architecture)));
        for (key, value) in keys {
            let name = format!("{}.{key}", self.case.architecture);
            if !self.writer.keys.iter().any(|(other, _)| *other == name) {
                self.writer.keys.push((name, value));
            }
        }
    }
}

/// Largest difference of any prompt's last logits, and whether greedy output is the same.
fn compare(case: &Case, folder: &Path, path: &Path) -> Result<f32, String> {
    let checkpoint = Checkpoint::open(folder).map_err(|error| error.to_string())?;
    let opened = Opened::new(&checkpoint).map_err(|error| error.to_string())?;
    let config: Json = serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap();
    let mut converter = Converter { opened: &opened, case, writer: Writer::default() };
    converter.keys(&config);
    converter.tensors();
    std::fs::write(path, converter.writer.bytes()).unwrap();

    let checkpoint = Checkpoint::open(path).map_err(|error| error.to_string())?;
    let gguf = Opened::new(&checkpoint).map_err(|error| error.to_string())?;
    let golden = Golden::read(folder).unwrap();
    let mut worst = 0.0f32;
    let above = opened.description.ropes.iter().find_map(|rope| Some(rope.long.as_ref()?.above));
    for prompt in &golden.prompts {
        let max_context = above.filter(|above| prompt.ids.len() <= *above).unwrap_or(0);
        let settings = EngineConfig {
            kv_type: KvType::F32,
            kv_blocks: 256,
            max_sequences: 4,
            max_batched_tokens: 128,
            max_context,
            ..EngineConfig::default()
        };
        let (mut executor, memory) =
            executor_of(Reference::new(Numerics::Exact), &gguf, path, &settings).map_err(|error| error.to_string())?;
        let mut runner = Runner { executor: &mut executor, groups: memory.footprint.groups.len(), blocks: 256 };
        let logits = runner.prefill(&[&prompt.ids], 1 << 20).remove(0);
        worst = worst.max(max_difference(&logits, &prompt.last_logits));
        if argmax(&logits) != prompt.greedy[0] {
            return Err(format!("another first token; logits differ by {worst}"));
        }
    }
    Ok(worst)
}

#[test]
fn gguf_files_of_all_families_compute_the_same() {
    let scratch = std::env::temp_dir().join(format!("quire-families-{}", std::process::id()));
    std::fs::create_dir_all(&scratch).unwrap();
    let mut failures = Vec::new();
    let mut seen = 0;
    for case in CASES {
        let Some(folder) = folder(case.fixture) else { continue };
        seen += 1;
        match compare(case, &folder, &scratch.join(format!("{}.gguf", case.fixture))) {
            Ok(worst) if worst <= 5e-4 => println!("{} as {}: {worst:.1e}", case.fixture, case.architecture),
            Ok(worst) => failures.push(format!("{} as {}: logits differ by {worst}", case.fixture, case.architecture)),
            Err(error) => failures.push(format!("{} as {}: {error}", case.fixture, case.architecture)),
        }
    }
    std::fs::remove_dir_all(&scratch).unwrap();
    assert!(seen >= 6, "models are missing");
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
}
