//! Requests and choices under way, and what they say.

use std::{collections::HashMap, time::Instant};

use quire_kernels::plan::StepOutput;
use quire_proto::worker::v1::{FinishReason, Finished, GenerateEvent, Started, Token, TokenLogprobs, generate_event::Event};
use tokio::sync::mpsc::{self, error::TrySendError};

use super::{
    admission::{NewChoice, NewRequest},
    inbox::{Live, RequestKey},
};
use crate::{
    sampling::ChoiceSampler,
    scheduler::SequenceId,
    telemetry::{EngineMetrics, Outcome, Timing},
};

/// One choice that the scheduler has.
pub(crate) struct Choice {
    pub id: SequenceId,
    pub request: RequestKey,
    pub index: u32,
    pub sampler: ChoiceSampler,
    /// Of the rows that score the prompt; -1: none.
    pub prompt_logprobs: i32,
    /// Tokens that count as waiting until the first admission.
    pub waiting_tokens: usize,
    pub timing: Timing,
}

/// Choices by the slot of their sequence.
#[derive(Default)]
pub(crate) struct Choices {
    slots: Vec<Option<Choice>>,
}

impl Choices {
    pub fn insert(&mut self, choice: Choice) {
        let slot = choice.id.slot();
        if self.slots.len() <= slot {
            self.slots.resize_with(slot + 1, || None);
        }
        self.slots[slot] = Some(choice);
    }

    pub fn get(&self, id: SequenceId) -> Option<&Choice> {
        self.slots.get(id.slot())?.as_ref().filter(|choice| choice.id == id)
    }

    pub fn get_mut(&mut self, id: SequenceId) -> Option<&mut Choice> {
        self.slots.get_mut(id.slot())?.as_mut().filter(|choice| choice.id == id)
    }

    pub fn remove(&mut self, id: SequenceId) -> Option<Choice> {
        self.slots.get_mut(id.slot())?.take_if(|choice| choice.id == id)
    }
}

/// One request that has not ended.
pub(crate) struct Request {
    pub request_id: String,
    pub sender: mpsc::Sender<GenerateEvent>,
    /// Choices without a Finished event.
    pub unfinished: usize,
    /// The choice that was queued first.
    pub first: Option<SequenceId>,
    /// What the scheduler has of it.
    pub sequences: Vec<SequenceId>,
    /// Choices that wait for the prompt's scores, since Started comes before all tokens.
    pub held: Vec<NewChoice>,
    pub started: bool,
    pub prompt_len: usize,
    pub generated: usize,
    pub cached: Option<usize>,
    /// With prompt scoring: one entry per prompt token.
    pub prompt_scores: Option<Vec<TokenLogprobs>>,
    pub arrived: Instant,
}

impl Request {
    pub fn new(new: &mut NewRequest) -> Self {
        // The first prompt token follows nothing.
        let prompt_scores = (new.prompt_logprobs >= 0).then(|| vec![TokenLogprobs::default()]);
        Self {
            request_id: std::mem::take(&mut new.request_id),
            sender: new.sender.clone(),
            unfinished: new.choices,
            first: None,
            sequences: Vec::new(),
            held: Vec::new(),
            started: false,
            prompt_len: new.prompt_len,
            generated: new.generated,
            cached: None,
            prompt_scores,
            arrived: new.arrived,
        }
    }
}

/// Requests under way, the events of a step that are still to be sent, and what is to be reported of those that left.
#[derive(Default)]
pub(crate) struct Requests {
    by_key: HashMap<RequestKey, Request>,
    outbox: Vec<(RequestKey, Event)>,
    pub gone: Live,
}

impl Requests {
    pub fn is_empty(&self) -> bool {
        self.by_key.is_empty()
    }

    pub fn insert(&mut self, key: RequestKey, request: Request) {
        self.by_key.insert(key, request);
    }

    pub fn get_mut(&mut self, key: RequestKey) -> Option<&mut Request> {
        self.by_key.get_mut(&key)
    }

    pub fn keys(&self) -> Vec<RequestKey> {
        self.by_key.keys().copied().collect()
    }

    /// Takes a request out, with all permits it still has.
    pub fn remove(&mut self, key: RequestKey) -> Option<Request> {
        let request = self.by_key.remove(&key)?;
        if request.unfinished > 0 {
            self.gone.requests += 1;
            self.gone.sequences += request.unfinished;
            self.gone.waiting_tokens += request.held.iter().map(|choice| choice.sequence.tokens.len()).sum::<usize>();
        }
        Some(request)
    }

    /// Says Started, if it was not said and all that it tells is known. True if it was said now.
    pub fn start(&mut self, key: RequestKey, metrics: &EngineMetrics) -> bool {
        let Some(request) = self.by_key.get_mut(&key).filter(|request| !request.started) else { return false };
        if request.prompt_scores.as_ref().is_some_and(|scores| scores.len() < request.prompt_len) {
            return false;
        }
        request.started = true;
        let cached_tokens = request.cached.unwrap_or(0).min(request.prompt_len) as u32;
        metrics.request_started(request.prompt_len, cached_tokens as usize);
        let started = Started {
            prompt_tokens: request.prompt_len as u32,
            cached_tokens,
            prompt_logprobs: request.prompt_scores.take().unwrap_or_default(),
        };
        self.outbox.push((key, Event::Started(started)));
        true
    }

    pub fn token(&mut self, choice: &Choice, position: usize, id: u32, logprobs: Option<TokenLogprobs>) {
        let token = Token { choice: choice.index, position: position as u32, id, logprobs };
        self.outbox.push((choice.request, Event::Token(token)));
    }

    /// Says Finished for one choice and gives its permits back.
    pub fn finished(&mut self, key: RequestKey, finished: Finished, waiting_tokens: usize) {
        let Some(request) = self.by_key.get_mut(&key) else { return };
        request.unfinished = request.unfinished.saturating_sub(1);
        self.gone.sequences += 1;
        self.gone.waiting_tokens += waiting_tokens;
        if request.unfinished == 0 {
            self.gone.requests += 1;
        }
        tracing::debug!(request_id = %request.request_id, choice = finished.choice, reason = finished.reason, tokens = finished.generated_tokens, "finished");
        self.outbox.push((key, Event::Finished(finished)));
    }

    /// Sends what was said. Requests that nobody listens to any more are named in `deserted`; those that have said all
    /// are dropped.
    pub fn flush(&mut self, deserted: &mut Vec<RequestKey>) {
        for (key, event) in self.outbox.drain(..) {
            let Some(request) = self.by_key.get(&key) else { continue };
            match request.sender.try_send(GenerateEvent { event: Some(event) }) {
                Ok(()) => {}
                Err(TrySendError::Closed(_)) => deserted.push(key),
                Err(TrySendError::Full(_)) => {
                    tracing::error!(request_id = %request.request_id, "a request said more than it can say");
                    deserted.push(key);
                }
            }
        }
        self.by_key.retain(|_, request| request.unfinished > 0);
    }
}

/// Log-probabilities of a logit row.
pub(crate) fn token_logprobs(output: &StepOutput, row: usize) -> TokenLogprobs {
    let (top_ids, top_logprobs) = output.top(row).unzip();
    let logprob = output.logprobs.get(row).copied().filter(|value| !value.is_nan());
    TokenLogprobs { logprob, top_ids, top_logprobs }
}

/// How metrics name the end of a choice.
pub(crate) fn outcome(reason: FinishReason) -> Outcome {
    match reason {
        FinishReason::Stop => Outcome::Stop,
        FinishReason::Length => Outcome::Length,
        FinishReason::Deadline => Outcome::Deadline,
        FinishReason::Abort => Outcome::Abort,
        FinishReason::Error | FinishReason::Unspecified => Outcome::Error,
    }
}
