//! Writes the `tokenizer.json` form.

use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use super::{
    pre::Rule,
    vocabulary::{Kind, TokenType, Vocabulary},
};

/// What differs between tokenizers beside the vocabulary.
pub(super) struct Parts<'v> {
    pub kind: Kind,
    pub rule: Rule,
    pub merges: Vec<(&'v str, &'v str)>,
    /// Text begins as if a space stood before it.
    pub prefix_space: bool,
}

#[derive(Serialize)]
struct Root<'v> {
    version: &'static str,
    truncation: Value,
    padding: Value,
    added_tokens: Vec<AddedToken<'v>>,
    normalizer: Value,
    pre_tokenizer: Value,
    post_processor: Value,
    decoder: Value,
    model: Model<'v>,
}

#[derive(Serialize)]
struct AddedToken<'v> {
    id: u32,
    content: &'v str,
    single_word: bool,
    lstrip: bool,
    rstrip: bool,
    normalized: bool,
    special: bool,
}

#[derive(Serialize)]
struct Model<'v> {
    #[serde(rename = "type")]
    model_type: &'static str,
    dropout: Value,
    unk_token: Option<&'v str>,
    continuing_subword_prefix: Value,
    end_of_word_suffix: Value,
    fuse_unk: bool,
    byte_fallback: bool,
    ignore_merges: bool,
    vocab: Ids<'v>,
    merges: &'v [(&'v str, &'v str)],
}

/// Token text → id, as a map.
struct Ids<'v>(&'v Vocabulary<'v>);

impl Serialize for Ids<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.tokens.iter().enumerate().map(|(id, text)| (text, id)))
    }
}

/// `first` and `last` are put around every text that is encoded with special tokens.
pub(super) fn write(vocabulary: &Vocabulary<'_>, parts: &Parts<'_>, first: Option<u32>, last: Option<u32>) -> serde_json::Result<Vec<u8>> {
    let sentence_piece = parts.kind == Kind::SentencePiece;
    let text = |id: u32| vocabulary.tokens.get(id as usize).map(AsRef::as_ref);
    let root = Root {
        version: "1.0",
        truncation: Value::Null,
        padding: Value::Null,
        added_tokens: added_tokens(vocabulary),
        normalizer: normalizer(parts),
        pre_tokenizer: pre_tokenizer(parts),
        post_processor: post_processor(first.and_then(|id| Some((id, text(id)?))), last.and_then(|id| Some((id, text(id)?)))),
        decoder: decoder(parts),
        model: Model {
            model_type: "BPE",
            dropout: Value::Null,
            unk_token: vocabulary.unknown_id.filter(|_| sentence_piece).and_then(text),
            continuing_subword_prefix: Value::Null,
            end_of_word_suffix: Value::Null,
            fuse_unk: sentence_piece,
            byte_fallback: sentence_piece,
            ignore_merges: parts.rule.ignore_merges,
            vocab: Ids(vocabulary),
            merges: &parts.merges,
        },
    };
    serde_json::to_vec(&root)
}

fn added_tokens<'v>(vocabulary: &'v Vocabulary<'_>) -> Vec<AddedToken<'v>> {
    let with_types = vocabulary.tokens.iter().zip(&vocabulary.types).enumerate();
    with_types
        .filter(|(_, (_, token_type))| matches!(token_type, TokenType::Control | TokenType::Unknown | TokenType::UserDefined))
        .map(|(id, (content, token_type))| AddedToken {
            id: id as u32,
            content,
            single_word: false,
            lstrip: false,
            rstrip: false,
            normalized: false,
            special: *token_type != TokenType::UserDefined,
        })
        .collect()
}

fn normalizer(parts: &Parts<'_>) -> Value {
    match parts.kind {
        Kind::ByteLevel if parts.rule.nfc => json!({"type": "NFC"}),
        Kind::ByteLevel => Value::Null,
        Kind::SentencePiece => {
            let spaces = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
            let prefix = json!({"type": "Prepend", "prepend": "▁"});
            let steps = if parts.prefix_space { vec![prefix, spaces] } else { vec![spaces] };
            json!({"type": "Sequence", "normalizers": steps})
        }
    }
}

fn pre_tokenizer(parts: &Parts<'_>) -> Value {
    if parts.kind == Kind::SentencePiece {
        return Value::Null;
    }
    let splits = parts.rule.patterns.iter();
    let mut steps: Vec<Value> =
        splits.map(|regex| json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false})).collect();
    steps.push(json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}));
    json!({"type": "Sequence", "pretokenizers": steps})
}

fn post_processor(first: Option<(u32, &str)>, last: Option<(u32, &str)>) -> Value {
    if first.is_none() && last.is_none() {
        return Value::Null;
    }
    let mut special_tokens = serde_json::Map::new();
    for (id, text) in first.into_iter().chain(last) {
        special_tokens.insert(text.to_owned(), json!({"id": text, "ids": [id], "tokens": [text]}));
    }
    let template = |sequences: &[(&str, u32)]| {
        let mut pieces = Vec::new();
        for (sequence, type_id) in sequences {
            let special = |(_, text): (u32, &str)| json!({"SpecialToken": {"id": text, "type_id": type_id}});
            pieces.extend(first.map(special));
            pieces.push(json!({"Sequence": {"id": sequence, "type_id": type_id}}));
            pieces.extend(last.map(special));
        }
        pieces
    };
    json!({
        "type": "TemplateProcessing",
        "single": template(&[("A", 0)]),
        "pair": template(&[("A", 0), ("B", 1)]),
        "special_tokens": special_tokens,
    })
}

fn decoder(parts: &Parts<'_>) -> Value {
    if parts.kind == Kind::ByteLevel {
        return json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
    }
    let mut steps = vec![
        json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if parts.prefix_space {
        steps.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    json!({"type": "Sequence", "decoders": steps})
}
