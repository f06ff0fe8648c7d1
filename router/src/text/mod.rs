//! Text in and out of token ids: chat template, tokenizer, incremental detokenizer, stop strings.
//!
//! Everything here is a function of a model's tokenizer and template and of the text given to it: no request, no worker,
//! no clock but the one that a template may ask for.

pub mod detokenizer;
pub mod runs;
pub mod stop;
pub mod template;
pub mod tokenizer;
mod vocabulary;

use std::sync::Arc;

use quire_proto::worker::v1::ModelCard;

use crate::error::ApiError;
use crate::request::ChatPrompt;

pub use detokenizer::Detokenizer;
pub use stop::StopScanner;
pub use template::ChatTemplate;
pub use tokenizer::{SpecialText, Tokenizer};

/// The text side of one model.
pub struct ModelText {
    pub tokenizer: Arc<Tokenizer>,
    pub template: Option<ChatTemplate>,
    /// Put before text (not before chat, whose template says what it wants).
    bos: Option<u32>,
}

impl ModelText {
    /// Loads tokenizer and template of a model.
    ///
    /// # Errors
    /// What is wrong with either of them.
    pub fn load(card: &ModelCard, tokenizer: &[u8], template: Option<&[u8]>) -> Result<Self, ApiError> {
        Self::new(card, Arc::new(Tokenizer::from_json(tokenizer)?), template)
    }

    /// As [`ModelText::load`], with a tokenizer that is loaded already.
    ///
    /// # Errors
    /// What is wrong with the template.
    pub fn new(card: &ModelCard, tokenizer: Arc<Tokenizer>, template: Option<&[u8]>) -> Result<Self, ApiError> {
        let name_of = |id: Option<u32>| id.and_then(|id| tokenizer.piece(id)).unwrap_or_default();
        let template = template
            .map(|source| {
                let source = std::str::from_utf8(source).map_err(|_| ApiError::Internal("The chat template is not UTF-8.".to_owned()))?;
                ChatTemplate::new(source, name_of(card.bos_id), name_of(card.eos_ids.first().copied()))
            })
            .transpose()?;
        let bos = card.bos_id.filter(|_| card.add_bos);
        Ok(Self { tokenizer, template, bos })
    }

    /// Ids of raw text, in which the text of special tokens is control. With `add_special_tokens`, what the tokenizer
    /// puts around text (BOS).
    ///
    /// # Errors
    /// [`ApiError::Invalid`] where the text can't be tokenized.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, ApiError> {
        let mut ids = self.tokenizer.encode(text, add_special_tokens, SpecialText::Control)?;
        if let Some(bos) = self.bos.filter(|bos| add_special_tokens && ids.first() != Some(bos)) {
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    /// Ids of messages. Special tokens that the template writes are control; their text within what a client sent is
    /// text. Exactly what the template says, as Hugging Face does: no BOS is added; of two written, one is dropped.
    ///
    /// # Errors
    /// [`ApiError::Invalid`] where the template refuses the messages, or the model has none.
    pub fn encode_chat(&self, prompt: &ChatPrompt) -> Result<Vec<u32>, ApiError> {
        let Some(template) = &self.template else {
            return Err(ApiError::invalid("messages", "This model has no chat template; send its prompt to /v1/completions."));
        };
        let rendered = template.render(prompt, self.tokenizer.special_texts())?;
        let mut ids = self.tokenizer.encode_marked(&rendered.text, &rendered.marks)?;
        if ids.len() >= 2 && ids[0] == ids[1] && self.bos == Some(ids[0]) {
            ids.remove(0);
        }
        Ok(ids)
    }
}
