//! The objects that answers and chunks of both endpoints are made of.

use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Serialize, Serializer};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::{
    core::ModelView,
    error::ApiError,
    http::{App, auth, edge::Caller},
    request::{FinishReason, Parameters, Prompt, TextRequest, Usage},
};

/// What every object of one answer repeats.
#[derive(Clone, Debug, Serialize)]
pub struct Head {
    pub id: String,
    pub object: &'static str,
    pub created: u64,
    pub model: String,
    pub system_fingerprint: String,
}

impl Head {
    pub fn new(prefix: &str, object: &'static str, caller: &Caller, model: &ModelView) -> Self {
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Self {
            id: format!("{prefix}-{}", caller.request_id),
            object,
            created,
            model: model.name.clone(),
            system_fingerprint: fingerprint(model),
        }
    }
}

/// Changes with what answers: the model, its weights, this version.
pub fn fingerprint(model: &ModelView) -> String {
    let mut hasher = Sha256::new();
    for part in [model.name.as_str(), &model.architecture, &model.weights, &model.created.to_string(), env!("CARGO_PKG_VERSION")] {
        hasher.update((part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    let digest = hasher.finalize();
    digest[..5].iter().fold("fp_".to_owned(), |text, byte| format!("{text}{byte:02x}"))
}

/// The named model, or the only one; of several, the first that can answer.
pub fn model(app: &App, name: Option<&str>) -> Result<ModelView, ApiError> {
    if let Some(name) = name.filter(|name| !name.is_empty()) {
        return app.core.model(name);
    }
    let models = app.core.models();
    let first = models.iter().find(|model| model.available).or(models.first()).cloned();
    first.ok_or_else(|| ApiError::Unavailable("No model is served yet.".to_owned()))
}

/// One request to the core for each prompt. `salt` comes from the client, and is mixed with the caller's own.
pub fn requests(caller: &Caller, model: &ModelView, prompts: Vec<Prompt>, parameters: &Parameters, salt: Option<&str>) -> Vec<TextRequest> {
    let cache_salt = match salt {
        Some(salt) => auth::mixed_salt(&caller.cache_salt, salt),
        None => caller.cache_salt.clone(),
    };
    let several = prompts.len() > 1;
    let request = |(index, prompt): (usize, Prompt)| TextRequest {
        request_id: if several { format!("{}-{index}", caller.request_id) } else { caller.request_id.clone() },
        model: model.name.clone(),
        prompt,
        parameters: parameters.clone(),
        cache_salt: cache_salt.clone(),
        deadline_ms: caller.deadline_ms,
    };
    prompts.into_iter().enumerate().map(request).collect()
}

/// `usage`.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct UsageObject {
    prompt_tokens: u32,
    completion_tokens: u32,
    total_tokens: u32,
    prompt_tokens_details: PromptDetails,
    #[serde(skip_serializing_if = "Option::is_none")]
    completion_tokens_details: Option<CompletionDetails>,
}

impl UsageObject {
    /// Thoughts were told apart by text, so how many tokens they are is not known: nothing is better than 0.
    pub fn forget_reasoning(&mut self) {
        self.completion_tokens_details = None;
    }
}

#[derive(Clone, Copy, Debug, Serialize)]
struct PromptDetails {
    cached_tokens: u32,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct CompletionDetails {
    reasoning_tokens: u32,
}

impl From<Usage> for UsageObject {
    fn from(usage: Usage) -> Self {
        Self {
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
            total_tokens: usage.prompt_tokens + usage.completion_tokens,
            prompt_tokens_details: PromptDetails { cached_tokens: usage.cached_tokens },
            completion_tokens_details: Some(CompletionDetails { reasoning_tokens: 0 }),
        }
    }
}

/// `usage` of a chunk: absent, null or there.
#[derive(Clone, Copy, Debug)]
pub enum ChunkUsage {
    Absent,
    Null,
    So(UsageObject),
}

impl ChunkUsage {
    pub fn is_absent(&self) -> bool {
        matches!(self, Self::Absent)
    }
}

impl Serialize for ChunkUsage {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Absent | Self::Null => serializer.serialize_none(),
            Self::So(usage) => usage.serialize(serializer),
        }
    }
}

/// One event of a stream.
#[derive(Serialize)]
pub struct Chunk<'a, C> {
    #[serde(flatten)]
    pub head: &'a Head,
    pub choices: &'a [C],
    #[serde(skip_serializing_if = "ChunkUsage::is_absent")]
    pub usage: ChunkUsage,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<&'a [u32]>,
}

/// A whole answer.
#[derive(Serialize)]
pub struct AnswerObject<'a, C> {
    #[serde(flatten)]
    pub head: &'a Head,
    pub choices: Vec<C>,
    pub usage: UsageObject,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<Value>,
}

/// `finish_reason`.
pub fn finish_reason(reason: &FinishReason) -> &'static str {
    match reason {
        FinishReason::EndOfSequence | FinishReason::StopToken(_) | FinishReason::StopString(_) => "stop",
        FinishReason::Length => "length",
    }
}

/// `stop_reason`: the string or token id of the client's that ended it, else null.
pub fn stop_reason(reason: &FinishReason) -> Value {
    match reason {
        FinishReason::StopToken(id) => json!(id),
        FinishReason::StopString(text) => json!(text),
        FinishReason::EndOfSequence | FinishReason::Length => Value::Null,
    }
}
