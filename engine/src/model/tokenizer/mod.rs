//! A GGUF file's tokenizer → the `tokenizer.json` form, and the special ids beside it.
//!
//! The worker never encodes text: it hands the artefact to whoever does. Two kinds are understood: byte-level BPE
//! (`gpt2`, with the named splitting rule of `tokenizer.ggml.pre`) and SentencePiece BPE (`llama`).

mod json;
mod pre;
mod sentencepiece;
mod vocabulary;

pub use pre::pre_tokenizers;

use super::{
    error::ContentError,
    gguf::{GgufError, Metadata},
};
use json::Parts;
use vocabulary::{Kind, Vocabulary};

/// A tokenizer and what generation needs to know of it.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    /// In the `tokenizer.json` form. Encoding with special tokens adds the beginning-of-sequence token exactly when the
    /// model wants it.
    pub json: Vec<u8>,
    pub tokens: usize,
    pub bos_id: Option<u32>,
    pub add_bos: bool,
    /// Tokens that end a generation, ascending.
    pub eos_ids: Vec<u32>,
    /// Jinja source.
    pub chat_template: Option<String>,
}

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";

impl Tokenizer {
    /// Converts the tokenizer in a file's metadata.
    pub fn from_gguf(metadata: &Metadata<'_>) -> Result<Self, ContentError> {
        let kind = match metadata.string(MODEL)? {
            Some("gpt2") => Kind::ByteLevel,
            Some("llama") => Kind::SentencePiece,
            Some("none" | "no_vocab") | None => return Err(ContentError::Model("the file holds no tokenizer".to_owned())),
            Some(other) => {
                return Err(GgufError::key(MODEL, format!("is `{other}`, which is not supported; supported: gpt2, llama")).into());
            }
        };
        let vocabulary = Vocabulary::read(metadata, kind)?;
        let parts = match kind {
            Kind::ByteLevel => byte_level(metadata, &vocabulary)?,
            Kind::SentencePiece => sentence_piece(metadata, &vocabulary)?,
        };
        let bos_id = if parts.rule.removes_bos { None } else { vocabulary.bos_id };
        let default_add_bos = kind == Kind::SentencePiece || parts.rule.adds_bos;
        // A model that wants a token which it doesn't have gets none.
        let add_bos = metadata.boolean("tokenizer.ggml.add_bos_token")?.unwrap_or(default_add_bos) && bos_id.is_some();
        let add_eos = metadata.boolean("tokenizer.ggml.add_eos_token")?.unwrap_or(false) && vocabulary.eos_id.is_some();
        let first = bos_id.filter(|_| add_bos);
        let last = vocabulary.eos_id.filter(|_| add_eos);
        let json = json::write(&vocabulary, &parts, first, last).map_err(|error| ContentError::Model(format!("tokenizer: {error}")))?;
        Ok(Self {
            json,
            tokens: vocabulary.tokens.len(),
            bos_id,
            add_bos,
            eos_ids: vocabulary.end_of_generation(),
            chat_template: metadata.string("tokenizer.chat_template")?.filter(|template| !template.is_empty()).map(str::to_owned),
        })
    }
}

fn byte_level<'v>(metadata: &Metadata<'v>, vocabulary: &'v Vocabulary<'_>) -> Result<Parts<'v>, ContentError> {
    let Some(name) = metadata.string(PRE)? else {
        let problem = "is missing, so the rule that splits text is unknown: convert the model again with a current converter";
        return Err(GgufError::key(PRE, problem).into());
    };
    let rule = pre::rule(name).ok_or_else(|| {
        GgufError::key(PRE, format!("is `{name}`, a splitting rule that is not supported; supported: {}", pre_tokenizers().join(", ")))
    })?;
    const MERGES: &str = "tokenizer.ggml.merges";
    let merges = metadata.strings(MERGES)?.ok_or_else(|| GgufError::key(MERGES, "is missing"))?;
    let merges = merges.into_iter().filter_map(|merge| {
        // A part may itself begin with a space, so look behind the first character.
        let first = merge.chars().next()?.len_utf8();
        let space = first + merge[first..].find(' ')?;
        Some((&merge[..space], &merge[space + 1..]))
    });
    Ok(Parts { kind: Kind::ByteLevel, rule, merges: vocabulary.known(merges), prefix_space: false })
}

fn sentence_piece<'v>(metadata: &Metadata<'_>, vocabulary: &'v Vocabulary<'_>) -> Result<Parts<'v>, ContentError> {
    const SCORES: &str = "tokenizer.ggml.scores";
    let scores = metadata.floats(SCORES)?.ok_or_else(|| GgufError::key(SCORES, "is missing"))?;
    if scores.len() < vocabulary.tokens.len() {
        return Err(GgufError::key(SCORES, format!("has {} entries for {} tokens", scores.len(), vocabulary.tokens.len())).into());
    }
    Ok(Parts {
        kind: Kind::SentencePiece,
        rule: pre::Rule::default(),
        merges: sentencepiece::merges(vocabulary, &scores),
        prefix_space: metadata.boolean("tokenizer.ggml.add_space_prefix")?.unwrap_or(true),
    })
}
