//! The token list: texts, types, special ids.

use std::{
    borrow::Cow,
    collections::{BTreeSet, HashMap},
};

use super::super::{
    error::ContentError,
    gguf::{GgufError, Metadata},
};

/// Families of tokenizers in GGUF, as far as they matter for what a vocabulary means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Ranked merges (`gpt2`, `gemma4`).
    Merges,
    /// Scored merges (`llama`).
    SentencePiece,
    /// `bert`
    WordPiece,
    /// `t5`
    Unigram,
}

impl Kind {
    /// Ids of BOS, EOS, unknown and separator where the metadata doesn't say.
    fn default_ids(self) -> [Option<u32>; 4] {
        match self {
            Self::Merges => [None; 4],
            Self::SentencePiece => [Some(1), Some(2), Some(0), None],
            Self::WordPiece => [Some(101), None, Some(100), Some(102)],
            Self::Unigram => [None, Some(1), Some(2), None],
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TokenType {
    Normal,
    Unknown,
    /// Steers the model; text that looks like it is not it, unless the text is trusted.
    Control,
    /// Matched whole in any text.
    UserDefined,
    Unused,
    Byte,
}

pub(super) struct Vocabulary<'a> {
    /// By id; all different.
    pub tokens: Vec<Cow<'a, str>>,
    pub types: Vec<TokenType>,
    pub ids: HashMap<String, u32>,
    pub bos_id: Option<u32>,
    pub eos_id: Option<u32>,
    pub unknown_id: Option<u32>,
    pub separator_id: Option<u32>,
    /// End of turn and of message, and what models for code end with, as far as keys name them.
    other_ends: Vec<u32>,
}

/// Texts of tokens that end a generation wherever they exist, whatever their type is in the file.
const ENDS: &[&str] = &[
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "[e~[",
    "<｜end▁of▁sentence｜>",
];

/// Texts of tokens by which messages are framed in gpt-oss's form; whatever a file says, they steer the model.
const FRAMING: &[&str] = &["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"];

/// Texts of the pad, repository and file separator tokens of models that fill in code: each ends a generation. The
/// first key names one; else the first text that exists is it.
const FILL_IN_ENDS: &[(&str, &[&str])] = &[
    ("tokenizer.ggml.fim_pad_token_id", &["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"]),
    ("tokenizer.ggml.fim_rep_token_id", &["<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"]),
    ("tokenizer.ggml.fim_sep_token_id", &["<|file_sep|>"]),
];

impl<'a> Vocabulary<'a> {
    pub fn read(metadata: &Metadata<'a>, kind: Kind) -> Result<Self, ContentError> {
        const TOKENS: &str = "tokenizer.ggml.tokens";
        let texts = metadata.strings(TOKENS)?.ok_or_else(|| GgufError::key(TOKENS, "is missing"))?;
        if texts.is_empty() || texts.len() > 1 << 24 {
            return Err(GgufError::key(TOKENS, format!("has {} entries", texts.len())).into());
        }
        let types = read_types(metadata, texts.len())?;
        let mut ids = HashMap::with_capacity(texts.len());
        let mut tokens = Vec::with_capacity(texts.len());
        for (id, text) in texts.into_iter().enumerate() {
            // A name must be unique and not empty to have an id in the other form. Nothing encodes to such a token.
            let mut text = match kind {
                _ if text.is_empty() => Cow::Owned(format!("[EMPTY_{id}]")),
                Kind::WordPiece if types[id] == TokenType::Normal => word_piece(text),
                _ => Cow::Borrowed(text),
            };
            while ids.contains_key(text.as_ref()) {
                text = Cow::Owned(format!("[DUPLICATE_{id}]{text}"));
            }
            ids.insert(text.clone().into_owned(), id as u32);
            tokens.push(text);
        }
        let id = |key: &str, default: Option<u32>| special_id(metadata, key, default, tokens.len());
        let [bos, eos, unknown, separator] = kind.default_ids();
        let mut other_ends = Vec::new();
        for key in ["tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"] {
            other_ends.extend(id(key, None)?);
        }
        for (key, texts) in FILL_IN_ENDS {
            other_ends.extend(id(key, texts.iter().find_map(|text| ids.get(*text).copied()))?);
        }
        let mut vocabulary = Self {
            bos_id: id("tokenizer.ggml.bos_token_id", bos)?,
            eos_id: id("tokenizer.ggml.eos_token_id", eos)?,
            unknown_id: id("tokenizer.ggml.unknown_token_id", unknown)?,
            // The key is written so.
            separator_id: id("tokenizer.ggml.seperator_token_id", separator)?,
            tokens,
            types,
            ids,
            other_ends,
        };
        vocabulary.correct_types();
        Ok(vocabulary)
    }

    /// Converters have marked end tokens, and tokens that frame messages, as plain text.
    fn correct_types(&mut self) {
        let framing = FRAMING.iter().filter_map(|text| self.ids.get(*text).copied());
        let control: Vec<u32> = self.end_of_generation().into_iter().chain(framing).collect();
        for id in control {
            if let Some(token_type) = self.types.get_mut(id as usize) {
                *token_type = TokenType::Control;
            }
        }
    }

    pub fn end_of_generation(&self) -> Vec<u32> {
        let id = |text: &str| self.ids.get(text).copied();
        let mut ends: BTreeSet<u32> = ENDS.iter().filter_map(|text| id(text)).collect();
        ends.extend(&self.other_ends);
        ends.extend(self.eos_id);
        // Where messages end with others, `<|end|>` ends a part of one.
        let parts = (id("<|return|>").is_some() && id("<|call|>").is_some()) || (id("<|calls|>").is_some() && id("<|flush|>").is_some());
        if let (true, Some(end)) = (parts, id("<|end|>")) {
            ends.remove(&end);
        }
        ends.into_iter().collect()
    }

    /// Those merges whose parts and result are tokens; others could never be applied.
    pub fn known<'m>(&self, merges: impl Iterator<Item = (&'m str, &'m str)>) -> Vec<(&'m str, &'m str)> {
        let mut whole = String::new();
        let mut dropped = 0;
        let known = merges
            .filter(|(left, right)| {
                whole.clear();
                whole.push_str(left);
                whole.push_str(right);
                let known = [*left, *right, &whole].iter().all(|text| self.ids.contains_key(*text));
                dropped += usize::from(!known);
                known
            })
            .collect();
        if dropped > 0 {
            tracing::warn!(dropped, "the tokenizer has merges of tokens that do not exist; they are left out");
        }
        known
    }
}

/// A word as GGUF has it (`▁word` begins one, `word` goes on) → as WordPiece has it (`word`, `##word`).
fn word_piece(text: &str) -> Cow<'_, str> {
    match text.strip_prefix('▁') {
        Some(word) => Cow::Borrowed(word),
        None if text.starts_with('[') && text.ends_with(']') => Cow::Borrowed(text),
        None => Cow::Owned(format!("##{text}")),
    }
}

fn read_types(metadata: &Metadata<'_>, tokens: usize) -> Result<Vec<TokenType>, ContentError> {
    const TYPES: &str = "tokenizer.ggml.token_type";
    let Some(numbers) = metadata.unsigneds(TYPES)? else { return Ok(vec![TokenType::Normal; tokens]) };
    if numbers.len() < tokens {
        return Err(GgufError::key(TYPES, format!("has {} entries for {tokens} tokens", numbers.len())).into());
    }
    let types = numbers.into_iter().take(tokens).map(|number| match number {
        2 => TokenType::Unknown,
        3 => TokenType::Control,
        4 => TokenType::UserDefined,
        5 => TokenType::Unused,
        6 => TokenType::Byte,
        _ => TokenType::Normal,
    });
    Ok(types.collect())
}

/// An id from the metadata; files hold garbage such as 2³²−1 for "none", then the default stands.
fn special_id(metadata: &Metadata<'_>, key: &str, default: Option<u32>, tokens: usize) -> Result<Option<u32>, ContentError> {
    // Negative ids mean "none" too, and are no reason to refuse a file.
    let stored = match metadata.get(key) {
        None => None,
        Some(_) => metadata.unsigned(key).unwrap_or(None),
    };
    let valid = |id: u64| (id < tokens as u64).then_some(id as u32);
    Ok(stored.and_then(valid).or(default.and_then(|id| valid(u64::from(id)))))
}
