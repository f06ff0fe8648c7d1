//! The one path from a request to its events: admit → resolve → validate → template → tokenize → dispatch →
//! detokenize → stop. Every face calls this and nothing else.
//!
//! Owns limits, parameter rules and the order of steps. Never knows a protocol (JSON, SSE, gRPC messages of clients).

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures::Stream;
use futures::stream::BoxStream;

use crate::config::CoreConfig;
use crate::error::ApiError;
use crate::fleet::Fleet;
use crate::request::{ChatPrompt, FinishReason, TextEvent, TextRequest, TokenLogprob, Usage};

/// The request core. Share it as `Arc<Core>`.
pub struct Core {
    fleet: Arc<Fleet>,
    config: CoreConfig,
}

/// Events of one request: `Started`, deltas, one `Finished` per choice, `Usage` last; or an error, which is the last item.
/// Dropping it cancels the request on the worker.
pub struct TextStream {
    /// The canonical name of the model that answers.
    pub model: String,
    inner: BoxStream<'static, Result<TextEvent, ApiError>>,
}

impl Stream for TextStream {
    type Item = Result<TextEvent, ApiError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.inner.as_mut().poll_next(context)
    }
}

/// What clients may know of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelView {
    /// The canonical name.
    pub name: String,
    /// Every name, the canonical one first.
    pub names: Vec<String>,
    pub max_context: u32,
    pub vocab_size: u32,
    pub architecture: String,
    pub parameters: u64,
    pub weights: String,
    /// Seconds since 1970.
    pub created: u64,
    pub adapters: Vec<String>,
    pub has_chat_template: bool,
    /// At least one worker that serves it can be reached.
    pub available: bool,
}

/// What is to be tokenized.
#[derive(Clone, Debug)]
pub enum TokenizeInput {
    /// Text; `add_special_tokens` as for a completions prompt.
    Text { text: String, add_special_tokens: bool },
    /// Messages through the model's chat template.
    Chat(ChatPrompt),
}

/// Ids of a text.
#[derive(Clone, Debug, PartialEq)]
pub struct Tokenized {
    pub ids: Vec<u32>,
    /// Each id as the vocabulary writes it.
    pub pieces: Vec<String>,
    pub max_context: u32,
}

/// A finished answer: what its stream said, collected.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Completed {
    pub prompt_ids: Vec<u32>,
    pub prompt_logprobs: Vec<TokenLogprob>,
    /// By index.
    pub choices: Vec<CompletedChoice>,
    pub usage: Usage,
}

/// One choice of a finished answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CompletedChoice {
    pub text: String,
    pub token_ids: Vec<u32>,
    pub logprobs: Vec<TokenLogprob>,
    pub reason: Option<FinishReason>,
}

impl Core {
    /// A core over a fleet.
    #[must_use]
    pub fn new(fleet: Arc<Fleet>, config: CoreConfig) -> Self {
        Self { fleet, config }
    }

    /// The workers behind this core.
    #[must_use]
    pub fn fleet(&self) -> &Arc<Fleet> {
        &self.fleet
    }

    /// Starts a request. Returns once a worker has taken it up, so that what goes wrong before is a status, not an
    /// error within a stream.
    ///
    /// # Errors
    /// Whatever is wrong with the request, or with the fleet.
    pub async fn generate(&self, _request: TextRequest) -> Result<TextStream, ApiError> {
        let _ = &self.config;
        Err(ApiError::Internal("not wired yet".to_owned()))
    }

    /// Every model that is known, one a canonical name, in order of names.
    #[must_use]
    pub fn models(&self) -> Vec<ModelView> {
        Vec::new()
    }

    /// The model of a name or alias.
    ///
    /// # Errors
    /// [`ApiError::ModelNotFound`]; [`ApiError::Unavailable`] while no worker has been heard of yet.
    pub fn model(&self, name: &str) -> Result<ModelView, ApiError> {
        Err(ApiError::ModelNotFound(name.to_owned()))
    }

    /// Ids of a text or of messages.
    ///
    /// # Errors
    /// As [`Core::generate`].
    pub async fn tokenize(&self, model: &str, _input: TokenizeInput) -> Result<Tokenized, ApiError> {
        Err(ApiError::ModelNotFound(model.to_owned()))
    }

    /// Text of ids, special tokens included.
    ///
    /// # Errors
    /// As [`Core::generate`].
    pub async fn detokenize(&self, model: &str, _ids: &[u32]) -> Result<String, ApiError> {
        Err(ApiError::ModelNotFound(model.to_owned()))
    }
}

/// The answer without streaming: the stream, collected.
///
/// # Errors
/// The stream's error, if it ends with one.
pub async fn collect(_stream: TextStream) -> Result<Completed, ApiError> {
    Err(ApiError::Internal("not wired yet".to_owned()))
}
