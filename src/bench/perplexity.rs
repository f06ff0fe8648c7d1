//! `quire bench perplexity`: a model's perplexity on a text, through the real engine, for one or more settings side by side.

use std::{fmt::Write as _, path::PathBuf, process::ExitCode, time::Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use quire_engine::{
    config::{BackendChoice, EngineConfig},
    core::{EngineHandle, KvFigures},
    model::{self, LoadedModel},
    perplexity::{perplexity, score, windows},
    store::{Store, StoreSettings},
};
use quire_kernels::backend::KvType;
use quire_router::text::{SpecialText, Tokenizer};
use tokio_util::sync::CancellationToken;

use crate::{
    models::on_thread,
    options::{BackendName, EngineOptions, KvTypeName, ModelOptions},
    progress::Bar,
};

/// Chapters VI to VIII of "Alice's Adventures in Wonderland" by Lewis Carroll, 1865: in the public domain everywhere.
const TEXT: &str = include_str!("alice.txt");

#[derive(Args, Debug)]
pub struct PerplexityArgs {
    /// A .gguf file, a folder with one, hf:org/repo[/file], pypi:name==version, or an alias [default: smollm2:135m]
    #[arg(value_name = "MODEL", env = "QUIRE_MODEL")]
    model: Option<String>,
    /// Score this file [default: three chapters of "Alice's Adventures in Wonderland"]
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Tokens of a window
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = clap::value_parser!(u32).range(4..))]
    context: u32,
    /// Score only so many windows, the first ones
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    windows: Option<u32>,
    /// Compare these, the first being what the others are compared with [default: --kv-type]
    #[arg(long, value_enum, value_name = "TYPE,…", value_delimiter = ',')]
    kv_types: Vec<KvTypeName>,
    /// Compare these [default: --backend]
    #[arg(long, value_enum, value_name = "BACKEND,…", value_delimiter = ',')]
    backends: Vec<BackendName>,
    #[command(flatten)]
    engine: EngineOptions,
}

/// What one setting gave.
struct Row {
    backend: String,
    kv_type: KvType,
    kv_bytes: usize,
    scores: Vec<f32>,
    seconds: f64,
}

/// Prints a line for each setting.
pub async fn run(args: PerplexityArgs) -> Result<ExitCode> {
    let base = args.engine.config()?;
    let text = match &args.text {
        Some(path) => std::fs::read_to_string(path).with_context(|| format!("--text {}", path.display()))?,
        None => TEXT.to_owned(),
    };
    let (now, bar) = (CancellationToken::new(), Bar::new(CancellationToken::new()));
    let (model, _) = ModelOptions::one(args.model.clone()).parse()?.into_iter().next().context("no model is named")?;
    let local = on_thread(&now, move || Store::new(StoreSettings::from_env()).get(&model, &bar)).await??;

    let mut rows: Vec<Row> = Vec::new();
    for config in settings(&args, &base) {
        let (path, names, own) = (local.path.clone(), vec![local.name.clone()], config.clone());
        let loaded = on_thread(&now, move || model::load(&path, names, &own)).await??;
        let row = measure(&args, &text, loaded, &config, rows.is_empty()).await?;
        println!("{}", line(&row, rows.first().unwrap_or(&row)));
        rows.push(row);
    }
    Ok(ExitCode::SUCCESS)
}

/// Every backend with every KV type.
fn settings(args: &PerplexityArgs, base: &EngineConfig) -> Vec<EngineConfig> {
    let or = |given: Vec<_>, default| if given.is_empty() { vec![default] } else { given };
    let kv_types = or(args.kv_types.iter().map(|name| KvType::from(*name)).collect(), base.kv_type);
    let backends: Vec<BackendChoice> = args.backends.iter().map(|name| (*name).into()).collect();
    let backends = if backends.is_empty() { vec![base.backend] } else { backends };
    let pairs = backends.into_iter().flat_map(|backend| kv_types.iter().map(move |kv_type| (backend, *kv_type)));
    pairs.map(|(backend, kv_type)| EngineConfig { backend, kv_type, ..base.clone() }).collect()
}

async fn measure(args: &PerplexityArgs, text: &str, loaded: LoadedModel, config: &EngineConfig, first: bool) -> Result<Row> {
    let card = &loaded.card;
    let tokens = Tokenizer::from_json(&loaded.tokenizer_json)?.encode(text, false, SpecialText::Plain)?;
    let mut windows = windows(&tokens, card.bos_id.filter(|_| card.add_bos), args.context as usize)?;
    ensure!(
        card.max_context > args.context as usize,
        "--context {} needs room for one token more, but the model's context is {}",
        args.context,
        card.max_context
    );
    windows.truncate(args.windows.map_or(usize::MAX, |windows| windows as usize));
    if first {
        let scored: usize = windows.iter().map(|window| window.len() - window.len() / 2).sum();
        println!(
            "{}: {} tokens, {} windows of {}, {scored} tokens scored",
            card.names.join(", "),
            tokens.len(),
            windows.len(),
            args.context
        );
        println!("{HEAD}");
    }
    let kv = &loaded.memory.kv;
    let (backend, kv_bytes) = (format!("{} ({})", card.backend, card.instruction_set), kv.block_bytes() / kv.block_size);
    let handle = EngineHandle::spawn(loaded.executor, KvFigures::from(&loaded.memory), loaded.card, config)?;
    let begun = Instant::now();
    let all = windows.len();
    let scores = score(&handle, &windows, |done| eprint!("\r{done} of {all} windows ")).await;
    eprint!("\r                          \r");
    let seconds = begun.elapsed().as_secs_f64();
    on_thread(&CancellationToken::new(), move || handle.shutdown()).await?;
    Ok(Row { backend, kv_type: config.kv_type, kv_bytes, scores: scores?, seconds })
}

const HEAD: &str = "backend               KV     bytes/token   ratio   perplexity     change   |Δ logprob| mean      max   seconds";

/// A row beside what it is compared with.
fn line(row: &Row, first: &Row) -> String {
    let mut out = String::new();
    let value = perplexity(&row.scores);
    let _ = write!(out, "{:<20}  {:<5}  {:>11}  {:>6.3}  {value:>11.4}", row.backend, row.kv_type.name(), row.kv_bytes, ratio(row, first));
    let differences: Vec<f64> = row.scores.iter().zip(&first.scores).map(|(a, b)| f64::from((a - b).abs())).collect();
    let mean = differences.iter().sum::<f64>() / differences.len().max(1) as f64;
    let max = differences.iter().copied().fold(0.0, f64::max);
    let change = (value / perplexity(&first.scores) - 1.0) * 100.0;
    let _ = write!(out, "  {change:>+7.3} %  {mean:>18.5}  {max:>7.4}  {:>8.1}", row.seconds);
    out
}

fn ratio(row: &Row, first: &Row) -> f64 {
    row.kv_bytes as f64 / first.kv_bytes.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_says_what_it_changes() {
        let row = |kv_type, kv_bytes, score| Row { backend: "cpu".into(), kv_type, kv_bytes, scores: vec![score; 4], seconds: 1.0 };
        let first = row(KvType::F32, 200, -2.0);
        let second = row(KvType::F16, 100, -2.01);
        let fields: Vec<String> = line(&second, &first).split_whitespace().map(str::to_owned).collect();
        assert_eq!(fields, ["cpu", "f16", "100", "0.500", "7.4633", "+1.005", "%", "0.01000", "0.0100", "1.0"]);
    }
}
