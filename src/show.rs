//! `quire show`: what a model is.

use std::{io::Write, path::PathBuf, process::ExitCode};

use anyhow::{Context, Result};
use clap::Args;
use indicatif::HumanBytes;
use quire_engine::{
    model::{about::About, checkpoint::Checkpoint},
    store::{ModelRef, Store, StoreSettings},
};
use serde_json::{Map, Value, json};

use crate::models::count;

#[derive(Args, Clone, Debug)]
pub struct ShowArgs {
    /// A .gguf file, a folder, or the name of a model on this machine (`quire list`)
    #[arg(value_name = "MODEL")]
    model: String,
    /// As JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &ShowArgs) -> Result<ExitCode> {
    let path = find(&args.model)?;
    let about = About::of(&Checkpoint::open(&path)?).with_context(|| path.display().to_string())?;
    let text = if args.json { format!("{:#}\n", Value::Object(facts(&about))) } else { table(&about) };
    // Whoever reads may have seen enough (`| head`).
    let _ = std::io::stdout().write_all(text.as_bytes());
    Ok(ExitCode::SUCCESS)
}

/// The path itself, or the file that the store keeps for a name. Nothing is fetched.
fn find(model: &str) -> Result<PathBuf> {
    let path = PathBuf::from(model);
    if path.exists() {
        return Ok(path);
    }
    let reference = ModelRef::parse(model)?;
    if let ModelRef::Path(path) = reference {
        return Ok(path);
    }
    let name = reference.to_string();
    let here = Store::new(StoreSettings::from_env()).list()?;
    let found = here.into_iter().find(|(manifest, local)| manifest.name == name || local.name == model);
    found.map(|(_, local)| local.path).with_context(|| format!("`{model}` is not on this machine; `quire pull {model}` fetches it"))
}

/// Weights, and keys and values of a context.
fn memory(about: &About, tokens: u64) -> Option<u64> {
    about.kv_bytes_per_token?.checked_mul(tokens)?.checked_add(about.bytes)
}

fn table(about: &About) -> String {
    let mut rows: Vec<(&str, String)> = vec![
        ("architecture", about.architecture.clone()),
        ("files", format!("{} ({}, {})", about.files, about.container, HumanBytes(about.bytes))),
        ("parameters", format!("{} in {} tensors", count(about.parameters), about.tensors)),
    ];
    let mut types: Vec<_> = about.types.iter().collect();
    types.sort_by_key(|(_, share)| std::cmp::Reverse(share.bytes));
    for (index, (name, share)) in types.into_iter().enumerate() {
        let line = format!("{name:<10} {:>5} tensors  {:>6}  {}", share.tensors, count(share.parameters), HumanBytes(share.bytes));
        rows.push((if index == 0 { "types" } else { "" }, line));
    }
    let mut number = |label, value: Option<u64>| rows.extend(value.map(|value| (label, value.to_string())));
    number("context", about.context);
    number("layers", about.layers);
    number("hidden", about.hidden);
    number("heads", about.heads);
    number("KV heads", about.kv_heads.filter(|kv_heads| Some(*kv_heads) != about.heads));
    number("experts", about.experts);
    number("vocabulary", about.vocabulary);
    let mut text = |label, value: Option<String>| rows.extend(value.map(|value| (label, value)));
    text("name", about.name.clone());
    text("tokenizer", Some(about.tokenizer.clone().unwrap_or_else(|| "none".to_owned())));
    text("chat template", Some(if about.chat_template { "yes" } else { "no" }.to_owned()));
    text("licence", about.licence.clone());
    let context = about.context.unwrap_or(4096).min(4096);
    let needed = memory(about, context).map(|bytes| format!("about {} with one context of {context} tokens (F16)", HumanBytes(bytes)));
    text("memory", needed);
    let width = rows.iter().map(|(label, _)| label.len()).max().unwrap_or(0);
    rows.iter().map(|(label, value)| format!("{label:<width$}  {value}\n")).collect()
}

fn facts(about: &About) -> Map<String, Value> {
    let types: Map<String, Value> = about
        .types
        .iter()
        .map(|(name, share)| (name.clone(), json!({ "tensors": share.tensors, "bytes": share.bytes, "parameters": share.parameters })))
        .collect();
    let mut facts = Map::new();
    let mut put = |key: &str, value: Value| facts.insert(key.to_owned(), value);
    put("architecture", json!(about.architecture));
    put("name", json!(about.name));
    put("container", json!(about.container));
    put("files", json!(about.files));
    put("bytes", json!(about.bytes));
    put("parameters", json!(about.parameters));
    put("tensors", json!(about.tensors));
    put("types", Value::Object(types));
    put("context", json!(about.context));
    put("layers", json!(about.layers));
    put("hidden", json!(about.hidden));
    put("heads", json!(about.heads));
    put("kv_heads", json!(about.kv_heads));
    put("head_dim", json!(about.head_dim));
    put("experts", json!(about.experts));
    put("vocabulary", json!(about.vocabulary));
    put("tokenizer", json!(about.tokenizer));
    put("chat_template", json!(about.chat_template));
    put("licence", json!(about.licence));
    put("kv_bytes_per_token", json!(about.kv_bytes_per_token));
    facts
}
