//! Text in and out of token ids: chat template, tokenizer, incremental detokenizer, stop strings, thoughts and calls.
//!
//! Everything here is a function of a model's tokenizer and template and of the text given to it: no request, no worker,
//! no clock but the one that a template may ask for.

pub mod detokenizer;
pub mod marks;
pub mod output;
mod python;
pub mod runs;
mod specials;
pub mod stop;
pub mod template;
pub mod tokenizer;
mod vocabulary;

use std::sync::Arc;

use quire_proto::worker::v1::ModelCard;

use crate::error::ApiError;
use crate::request::ChatPrompt;

pub use detokenizer::Detokenizer;
pub use output::{ChatFormat, OutputParser};
pub use stop::StopScanner;
pub use template::ChatTemplate;
pub use tokenizer::{SpecialText, Tokenizer};

/// The text side of one model.
pub struct ModelText {
    pub tokenizer: Arc<Tokenizer>,
    pub template: Option<ChatTemplate>,
    /// Why the model's template can't be used.
    template_problem: Option<String>,
    /// How the model writes thoughts and calls, and the special tokens by which they are told.
    pub format: ChatFormat,
    pub format_ids: Vec<u32>,
    /// Put before text (not before chat, whose template says what it wants).
    bos: Option<u32>,
}

impl ModelText {
    /// A tokenizer and a template. With a template that isn't valid the model completes text, and says so when it is to chat.
    #[must_use]
    pub fn new(card: &ModelCard, tokenizer: Arc<Tokenizer>, template: Option<&[u8]>) -> Self {
        let format = ChatFormat::of_template(&template.map(String::from_utf8_lossy).unwrap_or_default());
        let format_ids = format.markers().filter_map(|marker| tokenizer.id(marker)).collect();
        let name_of = |id: Option<u32>| id.and_then(|id| tokenizer.piece(id)).unwrap_or_default();
        let template = template
            .map(|source| {
                let source = std::str::from_utf8(source).map_err(|_| ApiError::Internal("The chat template is not UTF-8.".to_owned()))?;
                ChatTemplate::new(source, name_of(card.bos_id), name_of(card.eos_ids.first().copied()))
            })
            .transpose();
        let (template, template_problem) = match template {
            Ok(template) => (template, None),
            Err(error) => {
                tracing::warn!(%error, "the model can't chat");
                (None, Some(error.to_string()))
            }
        };
        Self { tokenizer, template, template_problem, format, format_ids, bos: card.bos_id.filter(|_| card.add_bos) }
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
            let none = "This model has no chat template; send its prompt to /v1/completions.";
            return Err(ApiError::invalid("messages", self.template_problem.as_deref().unwrap_or(none)));
        };
        let rendered = template.render(prompt, self.tokenizer.guarded())?;
        let mut ids = self.tokenizer.encode_marked(&rendered.text, &rendered.marks)?;
        if ids.len() >= 2 && ids[0] == ids[1] && self.bos == Some(ids[0]) {
            ids.remove(0);
        }
        Ok(ids)
    }
}

#[cfg(test)]
mod hostile_tests;
