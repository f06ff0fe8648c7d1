//! A model's tokenizer as an artefact: the `tokenizer.json` form, the chat templates, and the special ids beside them.
//!
//! The worker never encodes text: it hands the artefact to whoever does. It comes out of GGUF metadata (byte-level BPE
//! with the named splitting rule of `tokenizer.ggml.pre`, raw-text BPE, SentencePiece BPE, WordPiece, Unigram) or from
//! the files of a Hugging Face folder.

mod charsmap;
mod folder;
mod json;
mod pre;
mod sentencepiece;
mod templates;
mod vocabulary;

pub use pre::pre_tokenizers;

use super::{
    error::ContentError,
    gguf::{GgufError, Metadata, Scalar, ValueType},
};
use json::{Algorithm, Parts};
use pre::Spelling;
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
    /// Tokens that end a generation: the tokenizer's own first (templates write it), then the others, ascending.
    pub eos_ids: Vec<u32>,
    /// Jinja source; of several templates, a JSON object of their names and sources.
    pub chat_template: Option<String>,
}

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const MERGES: &str = "tokenizer.ggml.merges";

impl Tokenizer {
    /// Converts the tokenizer in a file's metadata.
    ///
    /// # Errors
    /// The key that is missing, malformed or of an unknown kind.
    pub fn from_gguf(metadata: &Metadata<'_>) -> Result<Self, ContentError> {
        let model = metadata.string(MODEL)?;
        let kind = match model {
            Some("gpt2" | "gemma4") => Kind::Merges,
            Some("llama") => Kind::SentencePiece,
            Some("bert") => Kind::WordPiece,
            Some("t5") => Kind::Unigram,
            Some("none" | "no_vocab") | None => return Err(ContentError::Model("the file holds no tokenizer".to_owned())),
            Some(other) => {
                let problem = format!("is `{other}`, which is not supported; supported: gpt2, llama, bert, t5, gemma4");
                return Err(GgufError::key(MODEL, problem).into());
            }
        };
        let vocabulary = Vocabulary::read(metadata, kind)?;
        let mut bos_id = vocabulary.bos_id;
        // What stands around a text unless the metadata says otherwise.
        let (mut add_bos, add_eos) = match kind {
            Kind::Merges => (false, false),
            Kind::SentencePiece | Kind::WordPiece => (true, false),
            Kind::Unigram => (false, true),
        };
        let mut always_bos = false;
        let algorithm = match kind {
            Kind::Merges => {
                let rule = if model == Some("gemma4") { pre::rule("gemma4") } else { None };
                let rule = rule.map_or_else(|| named_rule(metadata), Ok)?;
                if rule.removes_bos {
                    bos_id = None;
                }
                add_bos = rule.adds_bos;
                // Files of Gemma 4 were written with the wrong value.
                always_bos = rule.adds_bos && rule.spelling == Spelling::Text;
                Algorithm::Merges { merges: ranked_merges(metadata, &vocabulary, rule)?, rule }
            }
            Kind::SentencePiece => Algorithm::SentencePiece { merges: sentencepiece::merges(&vocabulary, &scores(metadata, &vocabulary)?) },
            Kind::WordPiece => word_piece(metadata)?,
            Kind::Unigram => unigram(metadata, &vocabulary)?,
        };
        // A model that wants a token which it doesn't have gets none.
        let add_bos = (always_bos || metadata.boolean("tokenizer.ggml.add_bos_token")?.unwrap_or(add_bos)) && bos_id.is_some();
        let add_eos = metadata.boolean("tokenizer.ggml.add_eos_token")?.unwrap_or(add_eos);
        let first = bos_id.filter(|_| add_bos);
        let last = if kind == Kind::WordPiece { vocabulary.separator_id } else { vocabulary.eos_id.filter(|_| add_eos) };
        let parts = Parts {
            algorithm,
            prefix_space: metadata.boolean("tokenizer.ggml.add_space_prefix")?.unwrap_or(kind == Kind::SentencePiece),
            control_takes_space: kind == Kind::SentencePiece && is_phi3(metadata)?,
        };
        let json = json::write(&vocabulary, &parts, first, last).map_err(|error| ContentError::Model(format!("tokenizer: {error}")))?;
        Ok(Self {
            json,
            tokens: vocabulary.tokens.len(),
            bos_id,
            add_bos,
            eos_ids: own_first(vocabulary.eos_id, vocabulary.end_of_generation()),
            chat_template: templates::from_gguf(metadata)?,
        })
    }
}

/// Ids with the one that templates call `eos_token` in front.
fn own_first(own: Option<u32>, ids: impl IntoIterator<Item = u32>) -> Vec<u32> {
    own.into_iter().chain(ids.into_iter().filter(|id| Some(*id) != own)).collect()
}

fn named_rule(metadata: &Metadata<'_>) -> Result<pre::Rule, GgufError> {
    let Some(name) = metadata.string(PRE)? else {
        let problem = "is missing, so the rule that splits text is unknown: convert the model again with a current converter";
        return Err(GgufError::key(PRE, problem));
    };
    pre::rule(name).ok_or_else(|| {
        GgufError::key(PRE, format!("is `{name}`, a splitting rule that is not supported; supported: {}", pre_tokenizers().join(", ")))
    })
}

fn ranked_merges<'v>(
    metadata: &Metadata<'v>,
    vocabulary: &'v Vocabulary<'_>,
    rule: pre::Rule,
) -> Result<Vec<(&'v str, &'v str)>, GgufError> {
    let Some(merges) = metadata.strings(MERGES)? else {
        return if rule.merges_by_id { Ok(sentencepiece::merges_by_id(vocabulary)) } else { Err(GgufError::key(MERGES, "is missing")) };
    };
    let merges = merges.into_iter().filter_map(|merge| {
        // A part may itself begin with a space, so look behind the first character.
        let first = merge.chars().next()?.len_utf8();
        let space = first + merge[first..].find(' ')?;
        Some((&merge[..space], &merge[space + 1..]))
    });
    Ok(vocabulary.known(merges))
}

/// By id, at least one for each token.
fn scores(metadata: &Metadata<'_>, vocabulary: &Vocabulary<'_>) -> Result<Vec<f32>, GgufError> {
    const SCORES: &str = "tokenizer.ggml.scores";
    let scores = metadata.floats(SCORES)?.ok_or_else(|| GgufError::key(SCORES, "is missing"))?;
    if scores.len() < vocabulary.tokens.len() {
        return Err(GgufError::key(SCORES, format!("has {} entries for {} tokens", scores.len(), vocabulary.tokens.len())));
    }
    match scores.iter().position(|score| !score.is_finite()) {
        Some(id) => Err(GgufError::key(SCORES, format!("has a value that is no number, for token {id}"))),
        None => Ok(scores),
    }
}

fn word_piece<'v>(metadata: &Metadata<'_>) -> Result<Algorithm<'v>, GgufError> {
    let lowercase = metadata.boolean("tokenizer.ggml.normalizer.lowercase")?.unwrap_or(true);
    let strip_accents = metadata.boolean("tokenizer.ggml.normalizer.strip_accents")?.unwrap_or(lowercase);
    Ok(Algorithm::WordPiece { lowercase, strip_accents })
}

fn unigram<'v>(metadata: &Metadata<'_>, vocabulary: &Vocabulary<'_>) -> Result<Algorithm<'v>, GgufError> {
    const CHARSMAP: &str = "tokenizer.ggml.precompiled_charsmap";
    let charsmap = match metadata.get(CHARSMAP) {
        None => Vec::new(),
        Some(entry) => {
            let byte = |scalar| match scalar {
                Scalar::Unsigned(value) => u8::try_from(value).ok(),
                Scalar::Signed(value) => i8::try_from(value).ok().map(|value| value as u8),
                _ => None,
            };
            let bytes = if entry.value_type == ValueType::Array { entry.scalars().map(byte).collect() } else { None };
            let bytes: Vec<u8> = bytes.ok_or_else(|| GgufError::key(CHARSMAP, "is not an array of bytes"))?;
            charsmap::check(&bytes).map_err(|problem| GgufError::key(CHARSMAP, problem))?;
            bytes
        }
    };
    Ok(Algorithm::Unigram {
        scores: scores(metadata, vocabulary)?,
        charsmap,
        removes_extra_spaces: metadata.boolean("tokenizer.ggml.remove_extra_whitespaces")?.unwrap_or(false),
    })
}

/// Phi-3's tokenizer lets control tokens swallow the white space behind them, which no key says.
fn is_phi3(metadata: &Metadata<'_>) -> Result<bool, GgufError> {
    let name = metadata.string("general.name")?.unwrap_or_default().to_lowercase();
    Ok(name.contains("phi-3") || name.contains("phi3"))
}
