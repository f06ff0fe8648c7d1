//! How well a model foretells a text, through the engine that serves it: the log-probabilities of prompts, nothing else.
//!
//! The text is cut into windows of `context` tokens that don't overlap; a tail shorter than that is left out. Where the model wants
//! a BOS token, it is the first of the `context` tokens of each window. The tokens of a window's second half are scored, so that each
//! has at least half a window before it. Perplexity is exp of the mean of their negative log-probabilities.

use futures::future::try_join_all;
use quire_proto::worker::v1::{FinishReason, GenerateRequest, Sampling, Stopping, generate_event::Event};
use thiserror::Error;

use crate::core::{EngineError, EngineHandle};

/// Windows that are in the engine at a time.
const AT_A_TIME: usize = 4;

/// Why there is no perplexity.
#[derive(Debug, Error)]
pub enum PerplexityError {
    #[error("the text has {tokens} tokens, fewer than one window of {context}")]
    ShortText { tokens: usize, context: usize },
    #[error("a window of {0} tokens has no second half; it must be 4 at least")]
    Context(usize),
    #[error("{0}")]
    Refused(#[from] EngineError),
    #[error("a window could not be scored: {0}")]
    Failed(String),
}

/// Windows of exactly `context` tokens, `bos` (if any) first in each; at least one.
pub fn windows(tokens: &[u32], bos: Option<u32>, context: usize) -> Result<Vec<Vec<u32>>, PerplexityError> {
    if context < 4 {
        return Err(PerplexityError::Context(context));
    }
    let fresh = context - usize::from(bos.is_some());
    let windows: Vec<Vec<u32>> = tokens.chunks_exact(fresh).map(|chunk| bos.into_iter().chain(chunk.iter().copied()).collect()).collect();
    if windows.is_empty() { Err(PerplexityError::ShortText { tokens: tokens.len(), context }) } else { Ok(windows) }
}

/// Natural log-probabilities of the scored tokens of all windows, in order: of a window of n tokens, those from n / 2 on.
/// `done` is told after each few windows how many have been scored.
pub async fn score(handle: &EngineHandle, windows: &[Vec<u32>], mut done: impl FnMut(usize)) -> Result<Vec<f32>, PerplexityError> {
    let mut scores = Vec::new();
    let mut finished = 0;
    for some in windows.chunks(AT_A_TIME) {
        for scored in try_join_all(some.iter().map(|window| score_window(handle, window))).await? {
            scores.extend(scored);
        }
        finished += some.len();
        done(finished);
    }
    Ok(scores)
}

async fn score_window(handle: &EngineHandle, window: &[u32]) -> Result<Vec<f32>, PerplexityError> {
    let request = GenerateRequest {
        request_id: "perplexity".to_owned(),
        prompt_ids: window.to_vec(),
        prompt_logprobs: Some(0),
        sampling: Some(Sampling::default()),
        // One token must be asked for; it is not looked at.
        stopping: Some(Stopping { max_tokens: 1, ..Stopping::default() }),
        bypass_prefix_cache: true,
        ..GenerateRequest::default()
    };
    let mut events = handle.generate(request)?;
    let mut scores = Vec::new();
    while let Some(event) = events.recv().await {
        match event.event {
            Some(Event::Started(started)) => {
                let second_half = started.prompt_logprobs.get(window.len() / 2..).unwrap_or_default();
                scores = second_half.iter().filter_map(|token| token.logprob).collect();
            }
            Some(Event::Finished(finished)) if finished.reason() == FinishReason::Error => {
                return Err(PerplexityError::Failed(finished.message));
            }
            _ => {}
        }
    }
    let wanted = window.len() - window.len() / 2;
    if scores.len() == wanted {
        Ok(scores)
    } else {
        Err(PerplexityError::Failed(format!("{} log-probabilities came, not {wanted}", scores.len())))
    }
}

/// exp of the mean of the negative log-probabilities.
#[must_use]
pub fn perplexity(scores: &[f32]) -> f64 {
    let sum: f64 = scores.iter().map(|score| -f64::from(*score)).sum();
    (sum / scores.len().max(1) as f64).exp()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_whole_do_not_overlap_and_begin_with_bos() {
        let tokens: Vec<u32> = (10..31).collect();
        assert_eq!(windows(&tokens, None, 8).unwrap(), [(10..18).collect::<Vec<u32>>(), (18..26).collect()]);
        assert_eq!(windows(&tokens, Some(1), 8).unwrap()[2], [1, 24, 25, 26, 27, 28, 29, 30]);
        assert!(matches!(windows(&tokens[..7], None, 8), Err(PerplexityError::ShortText { tokens: 7, context: 8 })));
        assert!(matches!(windows(&tokens, None, 3), Err(PerplexityError::Context(3))));
    }

    #[test]
    fn perplexity_of_a_fair_choice_is_its_size() {
        let scores = vec![-(8f32.ln()); 100];
        assert!((perplexity(&scores) - 8.0).abs() < 1e-5);
    }
}
