//! One choice of an answer: token events in, text out.
//!
//! Owns what is held back: bytes of an unfinished character, what may be the beginning of a stop string, and the tokens
//! that belong to such text. A token is let go together with (the beginning of) its text; tokens of a stop string, and
//! the token that ended generation, are not part of the answer, but they count as generated.

use std::collections::VecDeque;
use std::sync::Arc;

use quire_proto::worker::v1::{self as wire, TokenLogprobs};

use crate::request::{FinishReason, Parameters, TokenLogprob};
use crate::text::{Detokenizer, StopScanner, Tokenizer};

/// What a choice has to say since it was asked last.
#[derive(Default)]
pub struct Output {
    pub text: String,
    pub token_ids: Vec<u32>,
    pub logprobs: Vec<TokenLogprob>,
}

impl Output {
    /// Nothing was let go.
    pub fn is_empty(&self) -> bool {
        self.text.is_empty() && self.token_ids.is_empty()
    }
}

/// A token whose text is not out yet.
struct Waiting {
    id: u32,
    logprob: Option<TokenLogprob>,
    /// Where its text begins, in bytes of the choice's text.
    start: usize,
}

/// State of one choice.
pub struct Choice {
    tokenizer: Arc<Tokenizer>,
    detokenizer: Detokenizer,
    scanner: StopScanner,
    stops: Vec<String>,
    stop_token_ids: Vec<u32>,
    ends: Vec<u32>,
    include_stop: bool,
    min_tokens: usize,
    /// Bytes of text made so far, and let go so far.
    made: usize,
    released: usize,
    waiting: VecDeque<Waiting>,
    /// A token that may have ended generation; the next event tells.
    last: Option<(u32, Option<TokenLogprob>)>,
    /// Every token received, for a continuation on another worker.
    pub generated: Vec<u32>,
    pub finished: Option<FinishReason>,
    output: Output,
    /// Text of one push, kept to save the allocation.
    fresh: String,
}

impl Choice {
    /// `kept`: special tokens whose text is shown.
    pub fn new(tokenizer: Arc<Tokenizer>, parameters: &Parameters, eos_ids: &[u32], prompt: &[u32], kept: &[u32]) -> Self {
        let mut ends = parameters.stop_token_ids.clone();
        if !parameters.ignore_eos {
            ends.extend_from_slice(eos_ids);
        }
        Self {
            detokenizer: Detokenizer::new(tokenizer.clone(), prompt, parameters.skip_special_tokens.unwrap_or(true)).keeping(kept),
            tokenizer,
            scanner: StopScanner::new(&parameters.stop, parameters.include_stop),
            stops: parameters.stop.clone(),
            stop_token_ids: parameters.stop_token_ids.clone(),
            ends,
            include_stop: parameters.include_stop,
            min_tokens: parameters.min_tokens.unwrap_or(0) as usize,
            made: 0,
            released: 0,
            waiting: VecDeque::new(),
            last: None,
            generated: Vec::new(),
            finished: None,
            output: Output::default(),
            fresh: String::new(),
        }
    }

    /// Takes a token. Afterwards `finished` may be set: a stop string was met.
    pub fn token(&mut self, id: u32, logprobs: Option<TokenLogprobs>) {
        if self.finished.is_some() {
            return;
        }
        self.settle();
        if self.finished.is_some() {
            return;
        }
        self.generated.push(id);
        let logprob = logprobs.map(|logprobs| logprob(&self.tokenizer, id, &logprobs));
        if self.ends.contains(&id) {
            self.last = Some((id, logprob));
        } else {
            self.take(id, logprob);
        }
    }

    /// The worker says that the choice ended.
    pub fn finish(&mut self, finished: &wire::Finished, stopped: bool) {
        if self.finished.is_some() {
            return;
        }
        let ended_by = finished.stop_token_id.filter(|_| stopped);
        if !self.include_stop && self.last.as_ref().is_some_and(|(id, _)| ended_by == Some(*id)) {
            self.last = None;
        }
        self.settle();
        if self.finished.is_some() {
            return;
        }
        self.fresh.clear();
        let mut fresh = std::mem::take(&mut self.fresh);
        self.detokenizer.flush(&mut fresh);
        self.made += fresh.len();
        let mut out = String::new();
        // What completes here may complete a stop string too.
        let met = self.scan(&fresh, &mut out);
        if met.is_none() {
            self.scanner.flush(&mut out);
        }
        self.fresh = fresh;
        self.release(&out);
        if met.is_none() {
            // Nothing waits for more text.
            self.let_go(usize::MAX);
            self.finished = Some(match ended_by {
                Some(id) if self.stop_token_ids.contains(&id) => FinishReason::StopToken(id),
                _ if stopped => FinishReason::EndOfSequence,
                _ => FinishReason::Length,
            });
        }
    }

    /// What was let go since the last call.
    pub fn output(&mut self) -> Output {
        std::mem::take(&mut self.output)
    }

    /// Tokens let go since the last call of [`Choice::output`].
    pub fn waiting_tokens(&self) -> usize {
        self.output.token_ids.len()
    }

    /// What looked like the end was not.
    fn settle(&mut self) {
        if let Some((id, logprob)) = self.last.take() {
            self.take(id, logprob);
        }
    }

    fn take(&mut self, id: u32, logprob: Option<TokenLogprob>) {
        self.waiting.push_back(Waiting { id, logprob, start: self.made });
        let mut fresh = std::mem::take(&mut self.fresh);
        fresh.clear();
        self.detokenizer.push(id, &mut fresh);
        self.made += fresh.len();
        let mut out = String::new();
        let met = if self.generated.len() < self.min_tokens {
            self.scanner.pass(&fresh, &mut out);
            None
        } else {
            self.scan(&fresh, &mut out)
        };
        self.fresh = fresh;
        let idle = met.is_none() && self.scanner.held() == 0 && !self.detokenizer.pending();
        self.release(&out);
        if idle {
            self.let_go(usize::MAX);
        }
        if met.is_some() {
            self.waiting.clear();
        }
    }

    fn scan(&mut self, fresh: &str, out: &mut String) -> Option<usize> {
        let met = self.scanner.push(fresh, out);
        if let Some(index) = met {
            self.finished = Some(FinishReason::StopString(self.stops[index].clone()));
        }
        met
    }

    fn release(&mut self, text: &str) {
        self.output.text.push_str(text);
        self.released += text.len();
        self.let_go(self.released);
    }

    /// Lets go the tokens whose text begins before `end`.
    fn let_go(&mut self, end: usize) {
        while self.waiting.front().is_some_and(|token| token.start < end) {
            let Some(token) = self.waiting.pop_front() else { return };
            self.output.token_ids.push(token.id);
            self.output.logprobs.extend(token.logprob);
        }
    }
}

/// A token's log-probability as clients see it.
pub fn logprob(tokenizer: &Tokenizer, id: u32, logprobs: &TokenLogprobs) -> TokenLogprob {
    let one = |id, logprob, top| TokenLogprob { id, bytes: tokenizer.token_bytes(id), logprob, top };
    let top = logprobs.top_ids.iter().zip(&logprobs.top_logprobs).map(|(&id, &value)| one(id, Some(value), Vec::new())).collect();
    one(id, logprobs.logprob, top)
}
