//! From a request on the wire to sequences ready to be queued: checks, hashes, and the stream. Runs on the caller's
//! thread, so that the step thread finds everything prepared.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use quire_proto::{
    block_hash::{BlockHash, chain},
    worker::v1::{GenerateEvent, GenerateRequest},
};
use tokio::sync::mpsc;

use super::{EngineError, inbox::RequestKey};
use crate::{
    model::ModelCard,
    sampling::{BadParameter, ChoiceSampler, ModelFacts, RequestSampling, Stop},
    scheduler::NewSequence,
};

/// Choices of one request.
const MAX_CHOICES: u32 = 64;
/// Bytes of a cache salt.
const MAX_SALT: usize = 256;

/// What requests may ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdmissionLimits {
    /// Tokens of prompt and output together.
    pub max_context: usize,
    pub vocab_size: usize,
    pub max_logprobs: usize,
    /// Sequences that run at a time.
    pub max_sequences: usize,
    /// Rows of one step.
    pub max_rows: usize,
}

/// One choice of a request that is to be queued.
pub(crate) struct NewChoice {
    pub index: u32,
    pub sequence: NewSequence,
    pub sampler: ChoiceSampler,
}

/// A checked request.
pub(crate) struct NewRequest {
    pub key: RequestKey,
    /// For logs.
    pub request_id: String,
    pub choices: usize,
    /// In order of their index; empty if `ended`.
    pub sequences: Vec<NewChoice>,
    /// There is nothing to generate: what was generated elsewhere had ended already.
    pub ended: Option<Stop>,
    pub first_choice: u32,
    pub prompt_len: usize,
    /// Of these, what came from elsewhere.
    pub generated: usize,
    /// As the plan has it; -1: none.
    pub prompt_logprobs: i32,
    /// Longest output.
    pub max_tokens: usize,
    pub arrived: Instant,
    pub sender: mpsc::Sender<GenerateEvent>,
}

impl NewRequest {
    /// Tokens that wait for their first admission.
    pub fn waiting_tokens(&self) -> usize {
        self.sequences.iter().map(|choice| choice.sequence.tokens.len()).sum()
    }
}

/// Checks requests against the model and the device.
pub(crate) struct Admission {
    limits: AdmissionLimits,
    facts: ModelFacts,
    block_size: usize,
    prefix_cache: bool,
    /// Zero of the scheduler's time.
    started: Instant,
}

impl From<BadParameter> for EngineError {
    fn from(bad: BadParameter) -> Self {
        Self::Invalid { field: bad.field, message: bad.message }
    }
}

impl Admission {
    pub fn new(limits: AdmissionLimits, card: &ModelCard, block_size: usize, prefix_cache: bool, started: Instant) -> Self {
        let facts = ModelFacts { vocab_size: limits.vocab_size, eos_ids: card.eos_ids.clone(), max_logprobs: limits.max_logprobs };
        Self { limits, facts, block_size, prefix_cache, started }
    }

    /// The request, ready for the inbox, and the other end of its stream.
    pub fn prepare(&self, request: GenerateRequest) -> Result<(Box<NewRequest>, mpsc::Receiver<GenerateEvent>), EngineError> {
        let n = self.check(&request)?;
        let prompt_len = request.prompt_ids.len();
        let generated = request.generated_ids.len();
        let sampling = Arc::new(RequestSampling::new(&request, &self.facts, self.limits.max_context - prompt_len)?);
        let prompt_logprobs = crate::sampling::logprobs("prompt_logprobs", request.prompt_logprobs, &self.facts)?;
        let first = ChoiceSampler::new(Arc::clone(&sampling), request.first_choice, &request.prompt_ids, &request.generated_ids);
        let ended = if generated > 0 { first.ended_before(request.generated_ids.last().copied()) } else { None };
        let max_tokens = sampling.max_tokens();
        // Everything that the request can ever say: a step never waits for a reader.
        let capacity = 1 + n as usize * (max_tokens.saturating_sub(generated) + 1);
        let (sender, receiver) = mpsc::channel(capacity);
        let mut prepared = NewRequest {
            key: 0,
            choices: n as usize,
            sequences: Vec::new(),
            ended,
            first_choice: request.first_choice,
            prompt_len,
            generated,
            prompt_logprobs,
            max_tokens,
            arrived: Instant::now(),
            sender,
            request_id: String::new(),
        };
        if ended.is_none() {
            prepared.sequences = self.choices(&request, n, &sampling, first, prompt_logprobs >= 0);
        }
        prepared.request_id = request.request_id;
        Ok((Box::new(prepared), receiver))
    }

    fn choices(
        &self,
        request: &GenerateRequest,
        n: u32,
        sampling: &Arc<RequestSampling>,
        first: ChoiceSampler,
        score: bool,
    ) -> Vec<NewChoice> {
        let prompt_len = request.prompt_ids.len();
        let tokens: Vec<u32> = request.prompt_ids.iter().chain(&request.generated_ids).copied().collect();
        let root = BlockHash::root(&request.adapter, &request.cache_salt);
        let use_index = self.prefix_cache && !request.bypass_prefix_cache;
        let hashes = if use_index { chain(root, &tokens, self.block_size) } else { Vec::new() };
        let deadline = (request.deadline_ms > 0).then(|| self.started.elapsed() + Duration::from_millis(request.deadline_ms));
        let mut first = Some(first);
        (request.first_choice..request.first_choice + n)
            .map(|index| NewChoice {
                index,
                sequence: NewSequence {
                    tokens: tokens.clone(),
                    prompt_len,
                    root,
                    hashes: hashes.clone(),
                    use_index,
                    max_len: prompt_len + sampling.max_tokens(),
                    priority: request.priority,
                    arrival: 0,
                    arrived: Duration::ZERO,
                    deadline,
                    // The others share the prompt of the first.
                    score_prompt: score && index == request.first_choice,
                    step_ahead: !sampling.penalises(),
                    // The step loop knows it once the first is queued.
                    fork_of: None,
                },
                sampler: first.take().unwrap_or_else(|| ChoiceSampler::new(Arc::clone(sampling), index, &request.prompt_ids, &[])),
            })
            .collect()
    }

    /// Fields that are not about sampling; gives the number of choices.
    fn check(&self, request: &GenerateRequest) -> Result<u32, EngineError> {
        let n = request.n.max(1);
        let (prompt, generated) = (request.prompt_ids.len(), request.generated_ids.len());
        if n > MAX_CHOICES {
            return Err(EngineError::invalid("n", format!("{n} is more than {MAX_CHOICES}")));
        }
        if request.first_choice.checked_add(n).is_none() {
            return Err(EngineError::invalid("first_choice", "too large"));
        }
        if generated > 0 && n != 1 {
            return Err(EngineError::invalid("generated_ids", "only one choice at a time can be continued"));
        }
        if !request.adapter.is_empty() {
            return Err(EngineError::invalid("adapter", format!("adapter `{}` is not loaded", request.adapter)));
        }
        if request.cache_salt.len() > MAX_SALT {
            return Err(EngineError::invalid("cache_salt", format!("longer than {MAX_SALT} bytes")));
        }
        if prompt == 0 {
            return Err(EngineError::invalid("prompt_ids", "empty"));
        }
        // A sequence must have room for one more token.
        if prompt + generated >= self.limits.max_context && !(generated > 0 && prompt + generated == self.limits.max_context) {
            let message = format!("{} tokens leave no room in a context of {}", prompt + generated, self.limits.max_context);
            return Err(EngineError::invalid("prompt_ids", message));
        }
        for (field, ids) in [("prompt_ids", &request.prompt_ids), ("generated_ids", &request.generated_ids)] {
            if let Some(&id) = ids.iter().find(|id| **id as usize >= self.limits.vocab_size) {
                return Err(EngineError::invalid(field, crate::sampling::outside(id, &self.facts)));
            }
        }
        Ok(n)
    }
}
