//! What the tokenizer tests share. Fixtures are those of the router, which encodes.

use std::path::PathBuf;

use quire_engine::model::{gguf::Gguf, tokenizer::Tokenizer};
use serde_json::Value as Json;

use crate::gguf_writer::Writer;

pub fn fixtures() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../router/testdata/tokenizers")
}

pub fn json(name: &str) -> Json {
    serde_json::from_slice(&std::fs::read(fixtures().join(name)).unwrap()).unwrap()
}

pub fn ids(value: &Json) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

pub fn convert(writer: &Writer) -> Result<Tokenizer, String> {
    let bytes = writer.bytes();
    let gguf = Gguf::parse(&bytes).map_err(|error| error.to_string())?;
    Tokenizer::from_gguf(&gguf.metadata).map_err(|error| error.to_string())
}

pub fn open(tokenizer: &Tokenizer) -> tokenizers::Tokenizer {
    tokenizers::Tokenizer::from_bytes(&tokenizer.json).unwrap()
}

pub fn encode(tokenizer: &tokenizers::Tokenizer, text: &str, special: bool) -> Vec<u32> {
    tokenizer.encode(text, special).unwrap().get_ids().to_vec()
}

/// All strings of a golden file, with what is known of each.
pub fn check_strings(tokenizer: &tokenizers::Tokenizer, golden: &Json) {
    check_strings_that(tokenizer, golden, |_| true);
}

/// As [`check_strings`], of some strings.
pub fn check_strings_that(tokenizer: &tokenizers::Tokenizer, golden: &Json, wanted: impl Fn(&str) -> bool) {
    let mut plain = tokenizer.clone();
    plain.set_encode_special_tokens(true);
    let strings = golden["strings"].as_array().unwrap();
    let mut checked = 0;
    for case in strings.iter().filter(|case| wanted(case["text"].as_str().unwrap())) {
        checked += 1;
        let text = case["text"].as_str().unwrap();
        assert_eq!(encode(tokenizer, text, false), ids(&case["ids"]), "{text:?}");
        assert_eq!(encode(tokenizer, text, true), ids(&case["ids_with_special_tokens_added"]), "{text:?} with special tokens");
        if case.get("ids_specials_as_text").is_some() {
            assert_eq!(encode(&plain, text, false), ids(&case["ids_specials_as_text"]), "{text:?} as text");
            assert_eq!(tokenizer.decode(&ids(&case["ids"]), false).unwrap(), case["decoded"].as_str().unwrap());
        }
        let with_special = ids(&case["ids_with_special_tokens_added"]);
        assert_eq!(tokenizer.decode(&with_special, true).unwrap(), case["decoded_skip_special"].as_str().unwrap());
    }
    assert!(checked > 15, "{checked} strings");
}

/// A `tokenizer.json` as a converter would put it into GGUF.
pub fn to_gguf(tokenizer: &Json) -> (Vec<String>, Vec<i32>, Vec<String>) {
    let vocabulary = tokenizer["model"]["vocab"].as_object().unwrap();
    let added = tokenizer["added_tokens"].as_array().unwrap();
    let size = vocabulary.values().chain(added.iter().map(|token| &token["id"])).map(|id| id.as_u64().unwrap()).max().unwrap() + 1;
    let mut tokens = vec![String::new(); size as usize];
    let mut types = vec![1; size as usize];
    for (text, id) in vocabulary {
        let id = id.as_u64().unwrap() as usize;
        tokens[id] = text.clone();
        if text.len() == 6 && text.starts_with("<0x") {
            types[id] = 6;
        }
    }
    for token in added {
        let id = token["id"].as_u64().unwrap() as usize;
        tokens[id] = token["content"].as_str().unwrap().to_owned();
        types[id] = 3;
    }
    let pair = |merge: &Json| format!("{} {}", merge[0].as_str().unwrap(), merge[1].as_str().unwrap());
    let merges = tokenizer["model"]["merges"].as_array().into_iter().flatten().map(pair).collect();
    (tokens, types, merges)
}
