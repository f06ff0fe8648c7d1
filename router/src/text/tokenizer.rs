//! A model's tokenizer: text to ids and back.
//!
//! Owns the two ways to read the text of a special token (`<|im_end|>` typed by somebody): as control, or as the
//! characters it is made of. Never adds anything on its own account beyond what `tokenizer.json` says.

use tokenizers::Tokenizer as Inner;

use super::marks::Guarded;
use super::runs;
use super::specials::SpecialTexts;
use super::vocabulary::{Joining, Vocabulary};
use crate::error::ApiError;

/// How the text of special tokens within a text is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecialText {
    /// It becomes the special token.
    Control,
    /// It is text like any other.
    Plain,
}

/// A special token.
struct Special {
    id: u32,
    text: String,
    takes_space_before: bool,
    takes_space_after: bool,
}

/// A loaded tokenizer. Share it; it has no state.
pub struct Tokenizer {
    /// Reads special text as control.
    control: Inner,
    /// The same tokenizer, reading special text as text (a setting of the tokenizer, not of a call).
    plain: Inner,
    /// As `plain`, for a piece of text that isn't the first, where the first alone gets a space before it.
    later: Option<Inner>,
    specials: Vec<Special>,
    special_texts: SpecialTexts,
    guarded: Guarded,
    /// Normalisation may shorten text, so that the bound by bytes must be wider.
    shrinks: bool,
    pub(super) vocabulary: Vocabulary,
}

impl Tokenizer {
    /// Loads the `tokenizer.json` form.
    ///
    /// # Errors
    /// [`ApiError::Internal`]: the file is damaged.
    pub fn from_json(json: &[u8]) -> Result<Self, ApiError> {
        // The library panics on some damaged files; that must cost no more than this model.
        std::panic::catch_unwind(|| Self::read(json))
            .unwrap_or_else(|_| Err(ApiError::Internal("The model's tokenizer can't be loaded: the file is damaged.".to_owned())))
    }

    fn read(json: &[u8]) -> Result<Self, ApiError> {
        let damaged = |error: tokenizers::Error| ApiError::Internal(format!("The model's tokenizer can't be loaded: {error}"));
        let mut control = Inner::from_bytes(json).map_err(damaged)?;
        // A file may ask for them; a server must not cut or fill prompts.
        control.with_truncation(None).map_err(damaged)?;
        control.with_padding(None);
        let mut plain = control.clone();
        plain.set_encode_special_tokens(true);
        let later = without_first_space(&plain).map_err(damaged)?;
        let mut specials: Vec<Special> = control
            .get_added_tokens_decoder()
            .into_iter()
            .filter(|(_, token)| token.special && !token.content.is_empty())
            .map(|(id, token)| Special { id, text: token.content, takes_space_before: token.lstrip, takes_space_after: token.rstrip })
            .collect();
        specials.sort_by_key(|special| special.id);
        let special_texts = SpecialTexts::new(specials.iter().map(|special| special.text.as_str()));
        let guarded = Guarded::new(&specials.iter().map(|special| special.text.clone()).collect::<Vec<_>>());
        let normalizer = control.get_normalizer().and_then(|n| serde_json::to_string(n).ok()).unwrap_or_default();
        let shrinks = ["NF", "Precompiled", "Regex", "Strip", "Nmt"].iter().any(|name| normalizer.contains(name));
        let vocabulary = Vocabulary::new(&control);
        Ok(Self { control, plain, later, specials, special_texts, guarded, shrinks, vocabulary })
    }

    /// Bytes above which no text fits `max_context` tokens, whatever it says.
    #[must_use]
    pub fn max_bytes(&self, max_context: u32) -> usize {
        let widest = self.vocabulary.longest * if self.shrinks { 4 } else { 1 };
        (max_context as usize).saturating_mul(widest)
    }

    /// Ids of a text.
    ///
    /// # Errors
    /// [`ApiError::Invalid`] where it can't be tokenized (see [`runs`]).
    pub fn encode(&self, text: &str, add_special_tokens: bool, special_text: SpecialText) -> Result<Vec<u32>, ApiError> {
        runs::check(text)?;
        let tokenizer = match special_text {
            SpecialText::Control => &self.control,
            SpecialText::Plain => &self.plain,
        };
        ids(tokenizer, text, add_special_tokens)
    }

    /// Ids of a text in which special text is control, except where it includes the character that ends at one of
    /// `marks` (byte offsets, ascending): that came from outside, and is text.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_marked(&self, text: &str, marks: &[usize]) -> Result<Vec<u32>, ApiError> {
        if marks.is_empty() {
            return self.encode(text, false, SpecialText::Control);
        }
        runs::check(text)?;
        let mut out = Vec::new();
        let mut from = 0;
        let piece = |start: usize, end: usize| match &self.later {
            Some(later) if start > 0 => ids(later, &text[start..end], false),
            _ => ids(&self.plain, &text[start..end], false),
        };
        // Cut at the control tokens; what lies between is one text, however many marks it has.
        for (start, end, id) in self.control_tokens(text, marks) {
            if start > from {
                out.extend(piece(from, start)?);
            }
            out.push(id);
            from = end;
        }
        if from < text.len() {
            out.extend(piece(from, text.len())?);
        }
        Ok(out)
    }

    /// Where control tokens are in a text: leftmost, then longest, white space taken as each token asks for.
    fn control_tokens(&self, text: &str, marks: &[usize]) -> Vec<(usize, usize, u32)> {
        let mut found = Vec::new();
        let (mut at, mut last_end) = (0, 0);
        while at < text.len() {
            let special = self.special_texts.longest(&text.as_bytes()[at..]).filter(|(_, length)| {
                let mark = marks.partition_point(|&mark| mark <= at);
                marks.get(mark).is_none_or(|&mark| mark > at + length)
            });
            let special = special.and_then(|(number, _)| self.specials.get(number as usize));
            let Some(special) = special else {
                at += text[at..].chars().next().map_or(1, char::len_utf8);
                continue;
            };
            let (mut start, mut end) = (at, at + special.text.len());
            if special.takes_space_before {
                start = text[last_end..start].trim_end().len() + last_end;
            }
            if special.takes_space_after {
                end = text.len() - text[end..].trim_start().len();
            }
            found.push((start, end, special.id));
            (at, last_end) = (end, end);
        }
        found
    }

    /// Text of ids, as the tokenizer itself decodes them.
    ///
    /// # Errors
    /// [`ApiError::Internal`] if its decoder fails.
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String, ApiError> {
        self.control.decode(ids, skip_special_tokens).map_err(|error| ApiError::Internal(format!("The ids can't be decoded: {error}")))
    }

    /// A token alone, as bytes; may be part of a character.
    #[must_use]
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        match self.vocabulary.joining {
            Joining::Window => self.control.decode(&[id], false).unwrap_or_default().into_bytes(),
            _ => self.vocabulary.bytes(id).to_vec(),
        }
    }

    /// A token as the vocabulary writes it.
    #[must_use]
    pub fn piece(&self, id: u32) -> Option<String> {
        self.control.id_to_token(id)
    }

    /// The id of a token as the vocabulary writes it.
    #[must_use]
    pub fn id(&self, piece: &str) -> Option<u32> {
        self.control.token_to_id(piece)
    }

    /// One more than the largest id.
    #[must_use]
    pub fn size(&self) -> usize {
        self.vocabulary.len()
    }

    /// Texts of all special tokens, as what must not pass for control within a client's messages.
    #[must_use]
    pub fn guarded(&self) -> &Guarded {
        &self.guarded
    }
}

fn ids(tokenizer: &Inner, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, ApiError> {
    let encoding = tokenizer
        .encode_fast(text, add_special_tokens)
        .map_err(|error| ApiError::Invalid { message: format!("The text can't be tokenized: {error}"), param: None })?;
    Ok(encoding.get_ids().to_vec())
}

/// The same tokenizer without the space that it puts before the first piece of a text. None: it puts none there.
fn without_first_space(tokenizer: &Inner) -> Result<Option<Inner>, tokenizers::Error> {
    fn change(value: &mut serde_json::Value) -> bool {
        match value {
            serde_json::Value::Object(map) => map.iter_mut().fold(false, |changed, (key, value)| {
                if key == "prepend_scheme" && value == "first" {
                    *value = "never".into();
                    return true;
                }
                change(value) || changed
            }),
            serde_json::Value::Array(items) => items.iter_mut().map(change).filter(|changed| *changed).count() > 0,
            _ => false,
        }
    }
    let Some(pre_tokenizer) = tokenizer.get_pre_tokenizer() else { return Ok(None) };
    let mut json = serde_json::to_value(pre_tokenizer)?;
    if !change(&mut json) {
        return Ok(None);
    }
    let mut later = tokenizer.clone();
    later.with_pre_tokenizer(Some(serde_json::from_value::<tokenizers::PreTokenizerWrapper>(json)?));
    Ok(Some(later))
}

#[cfg(test)]
#[path = "tokenizer_tests.rs"]
mod tests;
