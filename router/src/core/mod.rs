//! The one path from a request to its events: admit → resolve → validate → template → tokenize → dispatch →
//! detokenize → stop. Every face calls this and nothing else.
//!
//! Owns limits, parameter rules and the order of steps. Never knows a protocol (JSON, SSE, gRPC messages of clients).

mod answer;
mod choice;
mod dispatch;
#[cfg(test)]
pub(crate) mod fake;
mod validate;

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures::stream::{self, BoxStream};
use futures::{Stream, StreamExt};
use quire_proto::worker::v1::{GenerateRequest, ModelCard};
use serde_json::Value;
use tokio::sync::Semaphore;

use self::answer::{Answer, Split};
use self::dispatch::Dispatch;
use crate::config::CoreConfig;
use crate::error::ApiError;
use crate::fleet::{Fleet, Model};
use crate::request::{ChatPrompt, FinishReason, Parameters, Part, Prompt, TextEvent, TextRequest, TokenLogprob, Usage};
use crate::text::output::Tools;
use crate::text::{ModelText, marks};

/// Bytes of text above which it is tokenized off the I/O threads: below, the way there costs more than the work.
const INLINE_BYTES: usize = 8 << 10;

/// Prompts that are to be cut may be this many times larger than any that fits.
const CUT_FACTOR: usize = 8;

/// The request core. Share it as `Arc<Core>`.
pub struct Core {
    fleet: Arc<Fleet>,
    config: CoreConfig,
    /// One permit a request, from its arrival to its last event.
    admission: Arc<Semaphore>,
    /// One permit a prompt that is tokenized off the I/O threads.
    tokenizing: Arc<Semaphore>,
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
#[allow(clippy::large_enum_variant)] // One a call; a box would only move it.
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
    /// The same, split, where that was asked for; parts of a kind that follow one another are one.
    pub parts: Vec<Part>,
    pub token_ids: Vec<u32>,
    pub logprobs: Vec<TokenLogprob>,
    pub reason: Option<FinishReason>,
}

impl Core {
    /// A core over a fleet.
    #[must_use]
    pub fn new(fleet: Arc<Fleet>, config: CoreConfig) -> Self {
        let admission = Arc::new(Semaphore::new(config.max_in_flight.min(Semaphore::MAX_PERMITS)));
        let tokenizing = Arc::new(Semaphore::new(config.tokenizer_threads.clamp(1, 64)));
        Self { fleet, config, admission, tokenizing }
    }

    /// The workers behind this core.
    #[must_use]
    pub fn fleet(&self) -> &Arc<Fleet> {
        &self.fleet
    }

    /// Requests between admission and their last event.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.config.max_in_flight.min(Semaphore::MAX_PERMITS) - self.admission.available_permits()
    }

    /// Starts a request. Returns once a worker has taken it up, so that what goes wrong before is a status, not an
    /// error within a stream.
    ///
    /// # Errors
    /// Whatever is wrong with the request, or with the fleet.
    pub async fn generate(&self, request: TextRequest) -> Result<TextStream, ApiError> {
        let deadline =
            (request.deadline_ms > 0).then(|| Instant::now() + Duration::from_millis(request.deadline_ms.min(u64::from(u32::MAX))));
        let permit = self.admission.clone().try_acquire_owned().map_err(|_| ApiError::Overloaded {
            message: format!("{} requests are in flight already; try again later.", self.config.max_in_flight),
            retry_after_s: self.config.retry_after_s,
        })?;
        let model = self.fleet.snapshot().resolve(&request.model)?;
        let (card, text) = (model.card.clone(), model.text.clone());
        let parameters = request.parameters;
        parameters.validate(&card, &self.config)?;
        let field = field(&request.prompt);
        let split = match &request.prompt {
            Prompt::Chat(chat) if chat.parsed => Some(Split { tools: chat.tools.as_ref().map(Tools::new) }),
            _ => None,
        };
        let mut prompt_ids = self.prompt_ids(&model, request.prompt, &parameters).await?;
        parameters.shorten(&mut prompt_ids, card.max_context);
        parameters.validate_length(&card, prompt_ids.len(), field)?;
        if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
            return Err(ApiError::Deadline);
        }
        let wire = wire_request(&card, &model.name, &parameters, request.request_id, request.cache_salt, prompt_ids.clone());
        let name = model.name.clone();
        let dispatch = Dispatch::start(self.fleet.clone(), model, wire, deadline, self.config.max_attempts).await?;
        let answer = Answer::start(dispatch, &text, &card, &parameters, prompt_ids, split, permit).await?;
        let inner = stream::unfold(answer, |mut answer| async move { answer.next().await.map(|event| (event, answer)) }).boxed();
        Ok(TextStream { model: name, inner })
    }

    /// Every model that is known, one a canonical name, in order of names.
    #[must_use]
    pub fn models(&self) -> Vec<ModelView> {
        self.fleet.snapshot().models().map(|model| view(&model)).collect()
    }

    /// The model of a name or alias.
    ///
    /// # Errors
    /// [`ApiError::ModelNotFound`]; [`ApiError::Unavailable`] while no worker has been heard of yet.
    pub fn model(&self, name: &str) -> Result<ModelView, ApiError> {
        self.fleet.snapshot().resolve(name).map(|model| view(&model))
    }

    /// Ids of a text or of messages.
    ///
    /// # Errors
    /// As [`Core::generate`].
    pub async fn tokenize(&self, model: &str, input: TokenizeInput) -> Result<Tokenized, ApiError> {
        let model = self.fleet.snapshot().resolve(model)?;
        let ids = match input {
            TokenizeInput::Text { text, add_special_tokens } => self.text_ids(&model, text, add_special_tokens, 1).await?,
            TokenizeInput::Chat(prompt) => self.chat_ids(&model, prompt, 1).await?,
        };
        let pieces = ids.iter().map(|&id| model.text.tokenizer.piece(id).unwrap_or_default()).collect();
        Ok(Tokenized { ids, pieces, max_context: model.card.max_context })
    }

    /// Text of ids, special tokens included.
    ///
    /// # Errors
    /// As [`Core::generate`].
    pub async fn detokenize(&self, model: &str, ids: &[u32]) -> Result<String, ApiError> {
        let model = self.fleet.snapshot().resolve(model)?;
        check_ids(&model.card, ids, "tokens")?;
        let ids = ids.to_vec();
        self.off_thread(&model, ids.len().saturating_mul(4), move |text| text.tokenizer.decode(&ids, false)).await
    }

    async fn prompt_ids(&self, model: &Model, prompt: Prompt, parameters: &Parameters) -> Result<Vec<u32>, ApiError> {
        let field = field(&prompt);
        let widened = if parameters.truncate.is_some() { CUT_FACTOR } else { 1 };
        let ids = match prompt {
            Prompt::Ids(ids) => {
                check_ids(&model.card, &ids, field)?;
                ids
            }
            Prompt::Text(text) if text.is_empty() => Vec::new(),
            Prompt::Text(text) => self.text_ids(model, text, parameters.add_special_tokens.unwrap_or(true), widened).await?,
            Prompt::Chat(chat) if chat.messages.is_empty() => Vec::new(),
            Prompt::Chat(chat) => self.chat_ids(model, chat, widened).await?,
        };
        if ids.is_empty() {
            return Err(ApiError::invalid(field, format!("`{field}` must not be empty.")));
        }
        Ok(ids)
    }

    async fn text_ids(&self, model: &Model, text: String, add_special_tokens: bool, widened: usize) -> Result<Vec<u32>, ApiError> {
        check_bytes(model, text.len(), widened, "prompt")?;
        let ids = self.off_thread(model, text.len(), move |model| model.encode(&text, add_special_tokens)).await;
        ids.map_err(|error| named(error, "prompt"))
    }

    async fn chat_ids(&self, model: &Model, chat: ChatPrompt, widened: usize) -> Result<Vec<u32>, ApiError> {
        let bytes: usize = chat
            .messages
            .iter()
            .chain(&chat.tools)
            .chain(&chat.documents)
            .chain(chat.template_arguments.values())
            .map(marks::text_bytes)
            .sum();
        check_bytes(model, chat.messages.iter().map(content_bytes).sum(), widened, "messages")?;
        let ids = self.off_thread(model, bytes, move |model| model.encode_chat(&chat)).await;
        ids.map_err(|error| named(error, "messages"))
    }

    /// Runs work on text here if there is little of it, else on the blocking pool, a bounded number at a time.
    async fn off_thread<T: Send + 'static>(
        &self,
        model: &Model,
        bytes: usize,
        work: impl FnOnce(&ModelText) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        if bytes <= INLINE_BYTES {
            return work(&model.text);
        }
        let failed = || ApiError::Internal("Tokenizing failed.".to_owned());
        let permit = self.tokenizing.clone().acquire_owned().await.map_err(|_| failed())?;
        let text = model.text.clone();
        // The permit goes along: a client that leaves does not make room while its text is still worked on.
        tokio::task::spawn_blocking(move || {
            let result = work(&text);
            drop(permit);
            result
        })
        .await
        .map_err(|_| failed())?
    }
}

/// The request field that a prompt came in.
fn field(prompt: &Prompt) -> &'static str {
    match prompt {
        Prompt::Text(_) | Prompt::Ids(_) => "prompt",
        Prompt::Chat(_) => "messages",
    }
}

/// A refusal that doesn't know its field yet.
fn named(error: ApiError, field: &str) -> ApiError {
    match error {
        ApiError::Invalid { message, param: None } => ApiError::invalid(field, message),
        other => other,
    }
}

fn check_ids(card: &ModelCard, ids: &[u32], field: &str) -> Result<(), ApiError> {
    match ids.iter().find(|id| **id >= card.vocab_size) {
        Some(id) => {
            Err(ApiError::invalid(field, format!("`{field}` has {id}, out of vocabulary: this model has {} tokens.", card.vocab_size)))
        }
        None => Ok(()),
    }
}

/// Refuses what can't fit whatever it says, before any work is done for it; `widened` times that where it is to be cut.
fn check_bytes(model: &Model, bytes: usize, widened: usize, field: &str) -> Result<(), ApiError> {
    let most = model.text.tokenizer.max_bytes(model.card.max_context).saturating_mul(widened);
    if bytes <= most {
        return Ok(());
    }
    let message = format!(
        "This model's maximum context length is {} tokens, which is at most {most} bytes of text. Your prompt has {bytes} bytes.",
        model.card.max_context
    );
    Err(ApiError::ContextLength { message, param: Some(field.to_owned()) })
}

/// What every template puts into the prompt.
fn content_bytes(message: &Value) -> usize {
    message.get("content").map_or(0, marks::text_bytes)
}

fn wire_request(
    card: &ModelCard,
    model: &str,
    parameters: &Parameters,
    request_id: String,
    cache_salt: Vec<u8>,
    prompt_ids: Vec<u32>,
) -> GenerateRequest {
    // Any 64 bits will do; a client's number keeps its own.
    let seed = parameters.seed.map_or_else(rand::random, i64::cast_unsigned);
    GenerateRequest {
        request_id,
        model: model.to_owned(),
        cache_salt,
        prompt_ids,
        n: parameters.n.unwrap_or(1),
        sampling: Some(parameters.sampling(&card.defaults.unwrap_or_default(), seed)),
        stopping: Some(parameters.stopping()),
        logprobs: parameters.logprobs,
        prompt_logprobs: parameters.prompt_logprobs,
        priority: parameters.priority,
        ..GenerateRequest::default()
    }
}

fn view(model: &Model) -> ModelView {
    let card = &model.card;
    ModelView {
        name: model.name.clone(),
        names: card.names.clone(),
        max_context: card.max_context,
        vocab_size: card.vocab_size,
        architecture: card.architecture.clone(),
        parameters: card.parameters,
        weights: card.weights.clone(),
        created: card.created,
        adapters: card.adapters.clone(),
        has_chat_template: model.text.template.is_some(),
        available: model.available(),
    }
}

/// The answer without streaming: the stream, collected.
///
/// # Errors
/// The stream's error, if it ends with one.
pub async fn collect(mut stream: TextStream) -> Result<Completed, ApiError> {
    let mut completed = Completed::default();
    while let Some(event) = stream.next().await {
        match event? {
            TextEvent::Started { prompt_ids, prompt_logprobs, .. } => {
                (completed.prompt_ids, completed.prompt_logprobs) = (prompt_ids, prompt_logprobs);
            }
            TextEvent::Delta { choice, text, parts, token_ids, logprobs } => {
                completed.choice(choice).add(&text, parts, token_ids, logprobs);
            }
            TextEvent::Finished { choice, reason } => completed.choice(choice).reason = Some(reason),
            TextEvent::Usage(usage) => completed.usage = usage,
        }
    }
    Ok(completed)
}

impl CompletedChoice {
    /// Appends a delta.
    pub fn add(&mut self, text: &str, parts: Vec<Part>, token_ids: Vec<u32>, logprobs: Vec<TokenLogprob>) {
        self.text.push_str(text);
        self.token_ids.extend(token_ids);
        self.logprobs.extend(logprobs);
        for part in parts {
            match (self.parts.last_mut(), part) {
                (Some(Part::Content(before)), Part::Content(text)) | (Some(Part::Reasoning(before)), Part::Reasoning(text)) => {
                    before.push_str(&text);
                }
                (Some(Part::Arguments { index, text: before }), Part::Arguments { index: same, text }) if *index == same => {
                    before.push_str(&text);
                }
                (_, part) => self.parts.push(part),
            }
        }
    }
}

impl Completed {
    fn choice(&mut self, index: u32) -> &mut CompletedChoice {
        let index = index as usize;
        if self.choices.len() <= index {
            self.choices.resize_with(index + 1, CompletedChoice::default);
        }
        &mut self.choices[index]
    }
}

#[cfg(test)]
#[path = "core_tests.rs"]
mod tests;
