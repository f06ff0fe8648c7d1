//! The tokenizer files of a Hugging Face folder.
//!
//! `tokenizer.json` goes out as it is, unless `tokenizer_config.json` wants other tokens around a text than it adds; then
//! it is written anew with those, as Hugging Face does.

use std::{collections::BTreeSet, fs, path::Path};

use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use serde_json::{Value, json};

use super::{Tokenizer, charsmap, own_first, templates};
use crate::model::error::ContentError;

/// The largest known has a quarter of it.
const LARGEST_TOKENIZER: u64 = 128 << 20;
/// Some list thousands of added tokens.
const LARGEST_CONFIG: u64 = 16 << 20;

/// What is looked at of a `tokenizer.json`; the rest is the business of who encodes.
#[derive(Deserialize)]
struct Outline {
    #[serde(default)]
    added_tokens: Vec<Added>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    post_processor: Value,
    model: ModelOutline,
}

#[derive(Deserialize)]
struct Added {
    id: u32,
    content: String,
}

#[derive(Deserialize)]
struct ModelOutline {
    vocab: Entries,
}

/// How many entries a vocabulary has, and one more than its largest id.
struct Entries(usize);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Count;
        impl<'de> Visitor<'de> for Count {
            type Value = usize;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("tokens with ids, or a list of tokens with scores")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<usize, A::Error> {
                let mut size = 0;
                while let Some((_, id)) = map.next_entry::<IgnoredAny, u32>()? {
                    size = size.max(id as usize + 1);
                }
                Ok(size)
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<usize, A::Error> {
                let mut size = 0;
                while list.next_element::<IgnoredAny>()?.is_some() {
                    size += 1;
                }
                Ok(size)
            }
        }
        deserializer.deserialize_any(Count).map(Self)
    }
}

impl Tokenizer {
    /// Reads `tokenizer.json`, `tokenizer_config.json`, the chat templates, and which tokens end a generation: those of
    /// `generation_config.json`, else of `config.json`, and the tokenizer's own.
    ///
    /// # Errors
    /// The file that is missing, too large or malformed.
    pub fn from_folder(folder: &Path) -> Result<Self, ContentError> {
        let json = read(&folder.join("tokenizer.json"), LARGEST_TOKENIZER)?.ok_or_else(|| {
            let problem = "holds no tokenizer.json; save one with `AutoTokenizer.from_pretrained(…).save_pretrained(…)`";
            ContentError::Model(format!("{}: {problem}", folder.display()))
        })?;
        let bad = |error: &dyn std::fmt::Display| ContentError::Model(format!("tokenizer.json: {error}"));
        let outline: Outline = serde_json::from_slice(&json).map_err(|error| bad(&error))?;
        check_charsmaps(&outline.normalizer).map_err(|problem| bad(&format!("`precompiled_charsmap` {problem}")))?;
        let object = |name: &str| read_json(&folder.join(name));
        let config = object("tokenizer_config.json")?;
        let special = object("special_tokens_map.json")?;
        let (generation, model) = (object("generation_config.json")?, object("config.json")?);

        let named = |key: &str| token_text(&config[key]).or_else(|| token_text(&special[key]));
        let id_of = |text: &str| outline.added_tokens.iter().find(|token| token.content == text).map(|token| token.id);
        let (bos, eos) = (named("bos_token"), named("eos_token"));
        let bos_id = bos.and_then(id_of).or_else(|| ids(&generation, &model, "bos_token_id").first().copied());
        let eos_id = eos.and_then(id_of);
        let mut eos_ids: BTreeSet<u32> = ids(&generation, &model, "eos_token_id").into_iter().collect();
        eos_ids.extend(eos_id);
        let tokens = outline.added_tokens.iter().map(|token| token.id as usize + 1).fold(outline.model.vocab.0, usize::max);
        eos_ids.retain(|id| (*id as usize) < tokens);

        let first = bos_id.zip(bos);
        let wanted = Around {
            bos: config["add_bos_token"].as_bool().map(|wants| first.filter(|_| wants)),
            eos: config["add_eos_token"].as_bool().map(|wants| eos_id.zip(eos).filter(|_| wants)),
        };
        let (json, add_bos) = wanted.apply(json, &outline.post_processor, first).map_err(|error| bad(&error))?;
        Ok(Self {
            json,
            tokens,
            bos_id,
            add_bos,
            eos_ids: own_first(eos_id, eos_ids),
            chat_template: templates::from_folder(folder, &config)?,
        })
    }
}

/// Tokens that a configuration wants around a text. The outer `None`: it doesn't say.
struct Around<'a> {
    bos: Option<Option<(u32, &'a str)>>,
    eos: Option<Option<(u32, &'a str)>>,
}

impl Around<'_> {
    /// The tokenizer with these tokens, and whether it adds BOS.
    fn apply(&self, json: Vec<u8>, post_processor: &Value, bos: Option<(u32, &str)>) -> Result<(Vec<u8>, bool), tokenizers::Error> {
        let (before, after) = around(post_processor);
        let same = |want: Option<(u32, &str)>, is: &[&str]| want.map_or_else(|| is.is_empty(), |(_, text)| is == [text]);
        let adds_bos = bos.is_some_and(|(_, text)| before.first() == Some(&text));
        if self.bos.is_none() && self.eos.is_none() {
            return Ok((json, adds_bos));
        }
        // As in Hugging Face, one said means that both are.
        let (first, last) = (self.bos.flatten(), self.eos.flatten());
        if same(first, &before) && same(last, &after) {
            return Ok((json, first.is_some()));
        }
        let mut special_tokens = serde_json::Map::new();
        let mut single = Vec::new();
        for (token, is_last) in [(first, false), (last, true)] {
            if is_last {
                single.push(json!({"Sequence": {"id": "A", "type_id": 0}}));
            }
            if let Some((id, text)) = token {
                single.push(json!({"SpecialToken": {"id": text, "type_id": 0}}));
                special_tokens.insert(text.to_owned(), json!({"id": text, "ids": [id], "tokens": [text]}));
            }
        }
        let mut pair = single.clone();
        for piece in &single {
            let mut piece = piece.clone();
            for part in piece.as_object_mut().into_iter().flat_map(|object| object.values_mut()) {
                part["type_id"] = json!(1);
                if part["id"] == "A" {
                    part["id"] = json!("B");
                }
            }
            pair.push(piece);
        }
        let template = json!({"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special_tokens});
        let mut tokenizer = tokenizers::Tokenizer::from_bytes(&json)?;
        let processor: tokenizers::PostProcessorWrapper = serde_json::from_value(template)?;
        tokenizer.with_post_processor(Some(processor));
        Ok((tokenizer.to_string(false)?.into_bytes(), first.is_some()))
    }
}

/// Texts of the tokens that a post-processor puts before and after a text.
fn around(post_processor: &Value) -> (Vec<&str>, Vec<&str>) {
    let text = |value: &'static str| post_processor[value][0].as_str();
    match post_processor["type"].as_str() {
        Some("TemplateProcessing") => {
            let pieces = post_processor["single"].as_array().map_or(&[][..], Vec::as_slice);
            let special = |piece: &&Value| piece["SpecialToken"]["id"].is_string();
            let texts = |pieces: &[Value]| -> Vec<usize> { (0..pieces.len()).filter(|&at| special(&&pieces[at])).collect() };
            let at = pieces.iter().position(|piece| piece.get("Sequence").is_some()).unwrap_or(pieces.len());
            let name = |at: usize| pieces[at]["SpecialToken"]["id"].as_str().unwrap_or_default();
            (texts(&pieces[..at]).into_iter().map(name).collect(), texts(&pieces[at..]).into_iter().map(|i| name(at + i)).collect())
        }
        Some("BertProcessing" | "RobertaProcessing") => (text("cls").into_iter().collect(), text("sep").into_iter().collect()),
        Some("Sequence") => {
            let parts = post_processor["processors"].as_array().map_or(&[][..], Vec::as_slice);
            let (mut before, mut after) = (Vec::new(), Vec::new());
            for part in parts {
                let (first, last) = around(part);
                before.splice(0..0, first);
                after.extend(last);
            }
            (before, after)
        }
        _ => (Vec::new(), Vec::new()),
    }
}

/// A token's text: a string, or an object that holds it.
fn token_text(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value["content"].as_str()).filter(|text| !text.is_empty())
}

/// One id or a list of them, from the first file that says.
fn ids(generation: &Value, model: &Value, key: &str) -> Vec<u32> {
    let read = |value: &Value| -> Vec<u32> {
        let one = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        value.as_array().map_or_else(|| one(value).into_iter().collect(), |list| list.iter().filter_map(one).collect())
    };
    let found = read(&generation[key]);
    if found.is_empty() { read(&model[key]) } else { found }
}

/// Every `Precompiled` normaliser, however deep in sequences.
fn check_charsmaps(normalizer: &Value) -> Result<(), String> {
    if normalizer["type"] == "Precompiled" {
        let text = normalizer["precompiled_charsmap"].as_str().ok_or("is no string")?;
        return charsmap::check(&charsmap::from_base64(text).ok_or("is not base 64")?);
    }
    let inner = normalizer["normalizers"].as_array().map_or(&[][..], Vec::as_slice);
    inner.iter().try_for_each(check_charsmaps)
}

fn read(path: &Path, largest: u64) -> Result<Option<Vec<u8>>, ContentError> {
    let fail = |problem: String| ContentError::Model(format!("{}: {problem}", path.display()));
    let Ok(metadata) = fs::metadata(path) else { return Ok(None) };
    if metadata.len() > largest {
        return Err(fail(format!("has {} bytes; at most {largest} are read", metadata.len())));
    }
    fs::read(path).map(Some).map_err(|error| fail(format!("cannot be read: {error}")))
}

/// A JSON object; `null` where there is no such file.
fn read_json(path: &Path) -> Result<Value, ContentError> {
    let Some(bytes) = read(path, LARGEST_CONFIG)? else { return Ok(Value::Null) };
    match serde_json::from_slice(&bytes) {
        Ok(Value::Object(object)) => Ok(Value::Object(object)),
        Ok(_) => Err(ContentError::Model(format!("{}: is no JSON object", path.display()))),
        Err(error) => Err(ContentError::Model(format!("{}: is not JSON: {error}", path.display()))),
    }
}
