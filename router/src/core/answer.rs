//! A request's events as text: the dispatch's token events, through one [`Choice`] each, to [`TextEvent`]s.
//!
//! Owns the order of events and the counts. Events are pulled as the client takes them, so a slow client slows its worker
//! stream and nothing piles up here; what is ready at once leaves as one delta a choice.

use std::collections::VecDeque;

use futures::FutureExt;
use quire_proto::worker::v1::generate_event::Event;
use quire_proto::worker::v1::{self as wire, GenerateEvent};
use tokio::sync::OwnedSemaphorePermit;

use super::choice::{Choice, logprob};
use super::dispatch::Dispatch;
use crate::error::ApiError;
use crate::request::{Parameters, Part, TextEvent, TokenLogprob, Usage};
use crate::text::output::Tools;
use crate::text::{ModelText, OutputParser};

/// Token events that may become one delta.
const MERGE: usize = 64;

/// Ids at the end of a prompt that tell within what an answer begins.
const PROMPT_END: usize = 24;

/// An answer is to be split into thoughts, calls and the rest.
pub struct Split {
    /// None: calls are not looked for.
    pub tools: Option<Tools>,
}

fn parsers(text: &ModelText, split: Option<Split>, prompt_ids: &[u32], n: usize) -> Vec<Option<OutputParser>> {
    let Some(Split { tools }) = split else { return (0..n).map(|_| None).collect() };
    let end = text.tokenizer.decode(&prompt_ids[prompt_ids.len().saturating_sub(PROMPT_END)..], false).unwrap_or_default();
    (0..n).map(|_| OutputParser::new(text.format, tools.clone(), &end)).collect()
}

/// State of one answer.
pub struct Answer {
    /// None once every choice has ended: dropping it cancels what the worker still does.
    dispatch: Option<Dispatch>,
    choices: Vec<Choice>,
    /// Whether deltas have parts; of each choice, what makes them, if there is anything to be told apart.
    split: bool,
    parsers: Vec<Option<OutputParser>>,
    /// `Finished` is out.
    told: Vec<bool>,
    /// Tokens that a delta waits for, once a choice has begun to speak.
    interval: usize,
    spoken: Vec<bool>,
    usage: Usage,
    outbox: VecDeque<TextEvent>,
    failed: Option<ApiError>,
    _permit: OwnedSemaphorePermit,
}

impl Answer {
    /// Waits until a worker has taken up the request.
    pub async fn start(
        mut dispatch: Dispatch,
        text: &ModelText,
        card: &wire::ModelCard,
        parameters: &Parameters,
        prompt_ids: Vec<u32>,
        split: Option<Split>,
        permit: OwnedSemaphorePermit,
    ) -> Result<Self, ApiError> {
        let Some(Event::Started(started)) = dispatch.next().await?.event else {
            return Err(ApiError::Internal("The worker answered out of order.".to_owned()));
        };
        let n = parameters.n.unwrap_or(1) as usize;
        let splits = split.is_some();
        let kept = if splits { text.format_ids.as_slice() } else { &[] };
        let choices = (0..n).map(|_| Choice::new(text.tokenizer.clone(), parameters, &card.eos_ids, &prompt_ids, kept)).collect();
        let parsers = parsers(text, split, &prompt_ids, n);
        let prompt_logprobs: Vec<TokenLogprob> =
            prompt_ids.iter().zip(&started.prompt_logprobs).map(|(&id, entry)| logprob(&text.tokenizer, id, entry)).collect();
        let cached_tokens = started.cached_tokens.min(prompt_ids.len() as u32);
        let usage = Usage { prompt_tokens: prompt_ids.len() as u32, cached_tokens, completion_tokens: 0 };
        let outbox = [TextEvent::Started { prompt_ids, cached_tokens, prompt_logprobs }].into();
        let interval = parameters.stream_interval.max(1) as usize;
        let (told, spoken) = (vec![false; n], vec![false; n]);
        Ok(Self {
            dispatch: Some(dispatch),
            choices,
            split: splits,
            parsers,
            told,
            interval,
            spoken,
            usage,
            outbox,
            failed: None,
            _permit: permit,
        })
    }

    /// The next event; None after the last.
    pub async fn next(&mut self) -> Option<Result<TextEvent, ApiError>> {
        loop {
            if let Some(event) = self.outbox.pop_front() {
                return Some(Ok(event));
            }
            if let Some(error) = self.failed.take() {
                self.dispatch = None;
                return Some(Err(error));
            }
            let event = self.dispatch.as_mut()?.next().await;
            self.absorb(event);
            for _ in 1..MERGE {
                if self.failed.is_some() || self.choices.iter().all(|choice| choice.finished.is_some()) {
                    break;
                }
                let Some(ready) = self.dispatch.as_mut().and_then(|dispatch| dispatch.next().now_or_never()) else { break };
                self.absorb(ready);
            }
            self.tell();
        }
    }

    fn absorb(&mut self, event: Result<GenerateEvent, ApiError>) {
        let event = match event {
            Ok(event) => event.event,
            Err(error) => {
                self.failed = Some(error);
                return;
            }
        };
        match event {
            Some(Event::Token(token)) => {
                let Some(choice) = self.choices.get_mut(token.choice as usize).filter(|choice| choice.finished.is_none()) else { return };
                choice.token(token.id, token.logprobs);
                if choice.finished.is_some()
                    && let Some(dispatch) = &mut self.dispatch
                {
                    dispatch.forget(token.choice);
                }
            }
            Some(Event::Finished(finished)) => {
                if let Some(choice) = self.choices.get_mut(finished.choice as usize) {
                    choice.finish(&finished, finished.reason() == wire::FinishReason::Stop);
                }
            }
            // Of a continuation: the client has had its Started.
            Some(Event::Started(_)) | None => {}
        }
    }

    /// Puts what the choices have to say into the outbox.
    fn tell(&mut self) {
        for (index, choice) in self.choices.iter_mut().enumerate() {
            if self.spoken[index] && choice.finished.is_none() && choice.waiting_tokens() < self.interval {
                continue;
            }
            let output = choice.output();
            let number = index as u32;
            let mut parts = Vec::new();
            if let Some(parser) = &mut self.parsers[index] {
                parser.push(&output.text, &mut parts);
                if choice.finished.is_some() && !self.told[index] {
                    parser.finish(&mut parts);
                }
            } else if self.split && !output.text.is_empty() {
                parts.push(Part::Content(output.text.clone()));
            }
            if !output.is_empty() || !parts.is_empty() {
                self.spoken[index] = true;
                let (text, token_ids, logprobs) = (output.text, output.token_ids, output.logprobs);
                self.outbox.push_back(TextEvent::Delta { choice: number, text, parts, token_ids, logprobs });
            }
            if let Some(reason) = choice.finished.clone().filter(|_| !self.told[index]) {
                self.told[index] = true;
                self.outbox.push_back(TextEvent::Finished { choice: number, reason });
            }
        }
        if self.told.iter().all(|told| *told) {
            self.dispatch = None;
            self.usage.completion_tokens = self.choices.iter().map(|choice| choice.generated.len() as u32).sum();
            self.outbox.push_back(TextEvent::Usage(self.usage));
        }
    }
}
