//! Chat templates as one artefact: Jinja source, or, where a model has several, a JSON object of name → source whose
//! `default` and `tool_use` are what Hugging Face chooses between.

use std::{collections::BTreeMap, fs, path::Path};

use serde_json::Value;

use crate::model::{
    error::ContentError,
    gguf::{GgufError, Metadata},
};

/// Real ones have up to some ten kilobytes.
const LARGEST: usize = 1 << 20;
const DEFAULT: &str = "default";

/// The templates of a GGUF file.
pub(super) fn from_gguf(metadata: &Metadata<'_>) -> Result<Option<String>, GgufError> {
    const KEY: &str = "tokenizer.chat_template";
    let mut named = BTreeMap::new();
    for (key, _) in metadata.sorted() {
        let Some(name) = key.strip_prefix(KEY) else { continue };
        let name = match name.strip_prefix('.') {
            Some(name) => name,
            None if name.is_empty() => DEFAULT,
            None => continue,
        };
        let source = metadata.string(key)?.unwrap_or_default();
        if source.len() > LARGEST {
            return Err(GgufError::key(key, format!("has {} bytes; a template has at most {LARGEST}", source.len())));
        }
        if !source.is_empty() {
            named.insert(name.to_owned(), source.to_owned());
        }
    }
    Ok(artefact(named))
}

/// The templates of a Hugging Face folder: its files, else what its tokenizer configuration holds.
pub(super) fn from_folder(folder: &Path, tokenizer_config: &Value) -> Result<Option<String>, ContentError> {
    let mut named = BTreeMap::new();
    if let Some(source) = read(&folder.join("chat_template.jinja"))? {
        named.insert(DEFAULT.to_owned(), source);
    }
    if let Ok(entries) = fs::read_dir(folder.join("additional_chat_templates")) {
        for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
            let name = path.file_stem().and_then(|name| name.to_str()).map(str::to_owned);
            if let (Some(name), true) = (name, path.extension().is_some_and(|extension| extension == "jinja")) {
                named.extend(read(&path)?.map(|source| (name, source)));
            }
        }
    }
    if named.is_empty()
        && let Some(text) = read(&folder.join("chat_template.json"))?
    {
        let json: Value =
            serde_json::from_str(&text).map_err(|error| ContentError::Model(format!("chat_template.json is not JSON: {error}")))?;
        collect(json.get("chat_template").unwrap_or(&Value::Null), &mut named)?;
    }
    if named.is_empty() {
        collect(tokenizer_config.get("chat_template").unwrap_or(&Value::Null), &mut named)?;
    }
    Ok(artefact(named))
}

/// A template, or a list of `{name, template}`.
fn collect(value: &Value, named: &mut BTreeMap<String, String>) -> Result<(), ContentError> {
    match value {
        Value::Null => Ok(()),
        Value::String(source) => {
            named.insert(DEFAULT.to_owned(), source.clone());
            Ok(())
        }
        Value::Array(items) => {
            for item in items {
                let text = |key: &str| item.get(key).and_then(Value::as_str).map(str::to_owned);
                let (Some(name), Some(source)) = (text("name"), text("template")) else {
                    return Err(ContentError::Model("`chat_template` has an entry without `name` or `template`".to_owned()));
                };
                named.insert(name, source);
            }
            Ok(())
        }
        _ => Err(ContentError::Model("`chat_template` is neither a string nor a list of named templates".to_owned())),
    }
}

fn read(path: &Path) -> Result<Option<String>, ContentError> {
    let fail = |problem: String| ContentError::Model(format!("{}: {problem}", path.display()));
    let Ok(metadata) = fs::metadata(path) else { return Ok(None) };
    if metadata.len() > LARGEST as u64 {
        return Err(fail(format!("has {} bytes; a template has at most {LARGEST}", metadata.len())));
    }
    fs::read_to_string(path).map(Some).map_err(|error| fail(format!("cannot be read: {error}")))
}

fn artefact(mut named: BTreeMap<String, String>) -> Option<String> {
    if named.len() == 1
        && let Some(only) = named.remove(DEFAULT)
    {
        return Some(only);
    }
    (!named.is_empty()).then(|| serde_json::to_string(&named).unwrap_or_default())
}
