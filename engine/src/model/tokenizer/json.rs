//! Writes the `tokenizer.json` form.

use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use super::{
    charsmap,
    pre::{Rule, Spelling},
    vocabulary::{TokenType, Vocabulary},
};

/// What differs between tokenizers beside the vocabulary.
pub(super) struct Parts<'v> {
    pub algorithm: Algorithm<'v>,
    /// Text begins as if a space stood before it.
    pub prefix_space: bool,
    /// Control tokens swallow the white space behind them.
    pub control_takes_space: bool,
}

/// How pieces of text become tokens.
pub(super) enum Algorithm<'v> {
    /// Ranked merges over pieces that a rule cuts.
    Merges { rule: Rule, merges: Vec<(&'v str, &'v str)> },
    /// SentencePiece's score-driven merges, as ranked ones.
    SentencePiece { merges: Vec<(&'v str, &'v str)> },
    /// Greedy longest match, word by word.
    WordPiece { lowercase: bool, strip_accents: bool },
    /// The likeliest cut.
    Unigram { scores: Vec<f32>, charsmap: Vec<u8>, removes_extra_spaces: bool },
}

impl Algorithm<'_> {
    fn byte_level(&self) -> bool {
        matches!(self, Self::Merges { rule: Rule { spelling: Spelling::Bytes, .. }, .. })
    }
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
#[serde(tag = "type")]
#[allow(clippy::large_enum_variant)] // There is one.
enum Model<'v> {
    #[serde(rename = "BPE")]
    Bpe {
        dropout: Value,
        unk_token: Option<&'v str>,
        continuing_subword_prefix: Value,
        end_of_word_suffix: Value,
        fuse_unk: bool,
        byte_fallback: bool,
        ignore_merges: bool,
        vocab: Ids<'v>,
        merges: &'v [(&'v str, &'v str)],
    },
    WordPiece {
        unk_token: &'v str,
        continuing_subword_prefix: &'static str,
        max_input_chars_per_word: usize,
        vocab: Ids<'v>,
    },
    Unigram {
        unk_id: Option<u32>,
        vocab: Scored<'v>,
        byte_fallback: bool,
    },
}

/// Token text → id, as a map.
struct Ids<'v>(&'v Vocabulary<'v>);

impl Serialize for Ids<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.tokens.iter().enumerate().map(|(id, text)| (text, id)))
    }
}

/// Pairs of token text and log-probability, by id.
struct Scored<'v> {
    vocabulary: &'v Vocabulary<'v>,
    scores: &'v [f32],
}

impl Serialize for Scored<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        // What text must never become is unlikelier than any way to write it otherwise.
        const NEVER: f64 = -1e6;
        let rows = self.vocabulary.tokens.iter().zip(&self.vocabulary.types).zip(self.scores);
        serializer.collect_seq(rows.map(|((text, token_type), score)| match token_type {
            TokenType::Control | TokenType::Byte => (text, NEVER),
            TokenType::UserDefined => (text, 0.0),
            TokenType::Normal | TokenType::Unknown | TokenType::Unused => (text, f64::from(*score)),
        }))
    }
}

/// `first` and `last` are put around every text that is encoded with special tokens.
pub(super) fn write(vocabulary: &Vocabulary<'_>, parts: &Parts<'_>, first: Option<u32>, last: Option<u32>) -> serde_json::Result<Vec<u8>> {
    let text = |id: u32| vocabulary.tokens.get(id as usize).map(AsRef::as_ref);
    let pair = |id: Option<u32>| id.and_then(|id| Some((id, text(id)?)));
    let root = Root {
        version: "1.0",
        truncation: Value::Null,
        padding: Value::Null,
        added_tokens: added_tokens(vocabulary, parts),
        normalizer: normalizer(parts)?,
        pre_tokenizer: pre_tokenizer(parts),
        post_processor: post_processor(parts, pair(first), pair(last)),
        decoder: decoder(parts),
        model: model(vocabulary, parts),
    };
    serde_json::to_vec(&root)
}

fn model<'v>(vocabulary: &'v Vocabulary<'_>, parts: &'v Parts<'_>) -> Model<'v> {
    let unknown = vocabulary.unknown_id.and_then(|id| vocabulary.tokens.get(id as usize)).map(AsRef::as_ref);
    let bpe = |merges, spelled: bool, ignore_merges| Model::Bpe {
        dropout: Value::Null,
        unk_token: unknown.filter(|_| spelled),
        continuing_subword_prefix: Value::Null,
        end_of_word_suffix: Value::Null,
        fuse_unk: spelled,
        byte_fallback: spelled,
        ignore_merges,
        vocab: Ids(vocabulary),
        merges,
    };
    match &parts.algorithm {
        Algorithm::Merges { rule, merges } => bpe(merges, rule.spelling != Spelling::Bytes, rule.ignore_merges),
        Algorithm::SentencePiece { merges } => bpe(merges, true, false),
        Algorithm::WordPiece { .. } => Model::WordPiece {
            unk_token: unknown.unwrap_or("[UNK]"),
            continuing_subword_prefix: "##",
            max_input_chars_per_word: 100,
            vocab: Ids(vocabulary),
        },
        Algorithm::Unigram { scores, .. } => Model::Unigram {
            unk_id: vocabulary.unknown_id,
            vocab: Scored { vocabulary, scores },
            byte_fallback: vocabulary.types.contains(&TokenType::Byte),
        },
    }
}

fn added_tokens<'v>(vocabulary: &'v Vocabulary<'_>, parts: &Parts<'_>) -> Vec<AddedToken<'v>> {
    let with_types = vocabulary.tokens.iter().zip(&vocabulary.types).enumerate();
    with_types
        .filter(|(_, (_, token_type))| matches!(token_type, TokenType::Control | TokenType::Unknown | TokenType::UserDefined))
        .map(|(id, (content, token_type))| {
            let special = *token_type != TokenType::UserDefined;
            let bare = matches!(content.as_ref(), "<unk>" | "<s>" | "<|endoftext|>");
            AddedToken {
                id: id as u32,
                content,
                single_word: false,
                // A mask stands for a word with the space before it.
                lstrip: content == "<mask>",
                rstrip: special && parts.control_takes_space && !bare,
                normalized: false,
                special,
            }
        })
        .collect()
}

fn normalizer(parts: &Parts<'_>) -> serde_json::Result<Value> {
    let spaces = || json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    Ok(match &parts.algorithm {
        Algorithm::Merges { rule: Rule { spelling: Spelling::Text, .. }, .. } => spaces(),
        Algorithm::Merges { rule, .. } if rule.nfc => json!({"type": "NFC"}),
        Algorithm::Merges { .. } => Value::Null,
        Algorithm::SentencePiece { .. } => {
            let prefix = json!({"type": "Prepend", "prepend": "▁"});
            let steps = if parts.prefix_space { vec![prefix, spaces()] } else { vec![spaces()] };
            json!({"type": "Sequence", "normalizers": steps})
        }
        Algorithm::WordPiece { lowercase, strip_accents } => json!({
            "type": "BertNormalizer",
            "clean_text": true,
            "handle_chinese_chars": true,
            "strip_accents": strip_accents,
            "lowercase": lowercase,
        }),
        Algorithm::Unigram { charsmap, removes_extra_spaces, .. } => {
            let mut steps = Vec::new();
            if !charsmap.is_empty() {
                steps.push(charsmap::as_json(charsmap)?);
            }
            if *removes_extra_spaces {
                steps.push(json!({"type": "Strip", "strip_left": false, "strip_right": true}));
                steps.push(json!({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}));
            }
            json!({"type": "Sequence", "normalizers": steps})
        }
    })
}

fn pre_tokenizer(parts: &Parts<'_>) -> Value {
    let metaspace = |scheme: &str| json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": true});
    let rule = match &parts.algorithm {
        Algorithm::Merges { rule, .. } => rule,
        Algorithm::SentencePiece { .. } => return Value::Null,
        Algorithm::WordPiece { .. } => return json!({"type": "BertPreTokenizer"}),
        Algorithm::Unigram { .. } => return metaspace(if parts.prefix_space { "always" } else { "never" }),
    };
    let splits = rule.patterns.iter();
    let mut steps: Vec<Value> =
        splits.map(|regex| json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false})).collect();
    match rule.spelling {
        Spelling::Bytes => steps.push(json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false})),
        Spelling::Text if steps.is_empty() => return Value::Null,
        Spelling::Text => {}
        Spelling::TextWords => steps.push(metaspace("always")),
    }
    json!({"type": "Sequence", "pretokenizers": steps})
}

fn post_processor(parts: &Parts<'_>, first: Option<(u32, &str)>, last: Option<(u32, &str)>) -> Value {
    if first.is_none() && last.is_none() {
        return Value::Null;
    }
    let mut special_tokens = serde_json::Map::new();
    for (id, text) in first.into_iter().chain(last) {
        special_tokens.insert(text.to_owned(), json!({"id": text, "ids": [id], "tokens": [text]}));
    }
    let special =
        |token: Option<(u32, &str)>, type_id: u32| token.map(|(_, text)| json!({"SpecialToken": {"id": text, "type_id": type_id}}));
    let sequence = |id: &str, type_id: u32| Some(json!({"Sequence": {"id": id, "type_id": type_id}}));
    let single = [special(first, 0), sequence("A", 0), special(last, 0)];
    // What stands between two texts, and which of them the second one is to the model.
    let (between, second) = match parts.algorithm {
        Algorithm::WordPiece { .. } => (None, 1),
        Algorithm::Unigram { .. } => (special(last.filter(|_| first.is_some()), 0), 0),
        _ => (special(first, 1), 1),
    };
    let pair = single.clone().into_iter().chain([between, sequence("B", second), special(last, second)]);
    json!({
        "type": "TemplateProcessing",
        "single": single.iter().flatten().collect::<Vec<_>>(),
        "pair": pair.flatten().collect::<Vec<_>>(),
        "special_tokens": special_tokens,
    })
}

fn decoder(parts: &Parts<'_>) -> Value {
    match &parts.algorithm {
        algorithm if algorithm.byte_level() => {
            json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true})
        }
        Algorithm::WordPiece { .. } => json!({"type": "WordPiece", "prefix": "##", "cleanup": true}),
        Algorithm::Unigram { .. } => json!({
            "type": "Metaspace",
            "replacement": "▁",
            "prepend_scheme": if parts.prefix_space { "always" } else { "never" },
            "split": true,
        }),
        _ => {
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
    }
}
