//! What one streamed answer says: deltas with output, usage, errors, its end. No sockets here: events and times in, an [`Outcome`] out.
//!
//! A status of 200 is not success: a stream counts only if it ends as the protocol says, with a finish reason and `[DONE]`, and no error
//! in between.

use std::borrow::Cow;
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::Value;

use crate::sse::Event;

/// Why a request did not succeed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// No connection.
    Connect(String),
    /// A status other than 200, and the start of the body.
    Status(u16, String),
    /// Status 200, then an error inside the stream.
    InBand(String),
    /// The stream ended, cleanly, before a finish reason and `[DONE]`.
    Truncated(String),
    /// The connection broke while a response was expected or under way.
    Broken(String),
    /// What came was not a stream of JSON events.
    Protocol(String),
    /// The stream was complete but held no output.
    Empty,
    /// Not finished within the time for one request.
    Timeout,
}

impl Failure {
    /// A name from a small closed set (status codes aside), for counting.
    pub fn kind(&self) -> Cow<'static, str> {
        Cow::Borrowed(match self {
            Failure::Connect(_) => "connect",
            Failure::Status(code, _) => return Cow::Owned(format!("http_{code}")),
            Failure::InBand(_) => "in_band_error",
            Failure::Truncated(_) => "truncated",
            Failure::Broken(_) => "broken_connection",
            Failure::Protocol(_) => "protocol",
            Failure::Empty => "empty",
            Failure::Timeout => "timeout",
        })
    }

    /// What was seen, for people.
    pub fn detail(&self) -> &str {
        match self {
            Failure::Status(_, text)
            | Failure::Connect(text)
            | Failure::InBand(text)
            | Failure::Truncated(text)
            | Failure::Broken(text)
            | Failure::Protocol(text) => text,
            Failure::Empty => "a complete stream without output",
            Failure::Timeout => "not finished within --timeout",
        }
    }
}

/// The server's own count.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt: u64,
    pub completion: u64,
    pub cached: u64,
}

/// Time since the delta before, and the tokens of this delta where the server says them (token ids or log-probabilities).
#[derive(Debug, Clone, Copy)]
pub struct Gap {
    pub time: Duration,
    pub tokens: Option<u32>,
}

/// What became of one request.
#[derive(Debug)]
pub struct Outcome {
    /// Just before the request was given to the connection.
    pub sent: Instant,
    /// First and last delta with output.
    pub first: Option<Instant>,
    pub last: Option<Instant>,
    pub end: Instant,
    /// Deltas with output.
    pub deltas: u32,
    /// One for each delta but the first.
    pub gaps: Vec<Gap>,
    pub usage: Option<Usage>,
    pub result: Result<(), Failure>,
}

/// What has been seen of one stream.
#[derive(Debug, Default)]
pub(crate) struct Stream {
    finished: bool,
    done: bool,
}

impl Stream {
    /// Takes one event; true after `[DONE]`.
    pub(crate) fn take(&mut self, event: &Event, now: Instant, outcome: &mut Outcome) -> Result<bool, Failure> {
        if event.data.trim() == "[DONE]" {
            self.done = true;
            return Ok(true);
        }
        if event.name == "error" {
            return Err(Failure::InBand(excerpt(event.data.as_bytes())));
        }
        let chunk: Chunk =
            serde_json::from_str(&event.data).map_err(|error| Failure::Protocol(format!("{error}: {}", excerpt(event.data.as_bytes()))))?;
        if chunk.error.is_some_and(|error| !error.is_null()) || chunk.object.as_deref() == Some("error") {
            return Err(Failure::InBand(excerpt(event.data.as_bytes())));
        }
        if let Some(usage) = chunk.usage {
            let cached = usage.prompt_tokens_details.and_then(|details| details.cached_tokens).unwrap_or(0);
            outcome.usage =
                Some(Usage { prompt: usage.prompt_tokens.unwrap_or(0), completion: usage.completion_tokens.unwrap_or(0), cached });
        }
        self.finished |= chunk.choices.iter().any(|choice| choice.finish_reason.is_some());
        if chunk.choices.iter().any(Choice::has_output) {
            let tokens = chunk.choices.iter().map(Choice::tokens).sum::<Option<u32>>();
            match outcome.last {
                Some(last) => outcome.gaps.push(Gap { time: now - last, tokens }),
                None => outcome.first = Some(now),
            }
            outcome.last = Some(now);
            outcome.deltas += 1;
        }
        Ok(false)
    }

    pub(crate) fn verdict(&self, outcome: &Outcome) -> Result<(), Failure> {
        match (self.finished, self.done) {
            (true, true) => {}
            (false, true) => return Err(Failure::Truncated(format!("[DONE] after {} deltas without a finish reason", outcome.deltas))),
            (true, false) => return Err(Failure::Truncated("a finish reason but no [DONE]".into())),
            (false, false) => return Err(Failure::Truncated(format!("ended after {} deltas without a finish reason", outcome.deltas))),
        }
        // Tokens that are no text (special ones) are still tokens.
        if outcome.deltas == 0 && outcome.usage.is_none_or(|usage| usage.completion == 0) {
            return Err(Failure::Empty);
        }
        Ok(())
    }
}

#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<WireUsage>,
    error: Option<Value>,
    object: Option<String>,
}

#[derive(Deserialize)]
struct Choice {
    text: Option<String>,
    delta: Option<Delta>,
    finish_reason: Option<String>,
    token_ids: Option<Vec<serde::de::IgnoredAny>>,
    logprobs: Option<Logprobs>,
}

#[derive(Deserialize)]
struct Delta {
    content: Option<String>,
    reasoning_content: Option<String>,
    reasoning: Option<String>,
    refusal: Option<String>,
    tool_calls: Option<Vec<serde::de::IgnoredAny>>,
}

#[derive(Deserialize)]
struct Logprobs {
    content: Option<Vec<serde::de::IgnoredAny>>,
    tokens: Option<Vec<serde::de::IgnoredAny>>,
}

#[derive(Deserialize)]
struct WireUsage {
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    prompt_tokens_details: Option<PromptDetails>,
}

#[derive(Deserialize)]
struct PromptDetails {
    cached_tokens: Option<u64>,
}

impl Choice {
    /// Role-only, empty and finish-only chunks carry none; reasoning, tool calls and refusals do.
    fn has_output(&self) -> bool {
        let some = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
        some(&self.text)
            || self.delta.as_ref().is_some_and(|delta| {
                let texts = [&delta.content, &delta.reasoning_content, &delta.reasoning, &delta.refusal];
                texts.into_iter().any(some) || delta.tool_calls.as_ref().is_some_and(|calls| !calls.is_empty())
            })
    }

    fn tokens(&self) -> Option<u32> {
        let logprobs = || self.logprobs.as_ref().and_then(|logprobs| logprobs.content.as_ref().or(logprobs.tokens.as_ref()));
        let list = self.token_ids.as_ref().or_else(logprobs)?;
        u32::try_from(list.len()).ok().filter(|count| *count > 0)
    }
}

/// How many characters of an error are kept.
pub(crate) const EXCERPT: usize = 300;

pub(crate) fn excerpt(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let text = text.trim();
    match text.char_indices().nth(EXCERPT) {
        Some((at, _)) => format!("{}...", &text[..at]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn has_output(json: &str) -> bool {
        let chunk: Chunk = serde_json::from_str(json).unwrap();
        chunk.choices.iter().any(Choice::has_output)
    }

    #[test]
    fn only_deltas_with_output_count() {
        assert!(!has_output(r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#));
        assert!(!has_output(r#"{"choices":[{"delta":{},"finish_reason":"stop"}]}"#));
        assert!(!has_output(r#"{"choices":[],"usage":{"prompt_tokens":1}}"#));
        assert!(has_output(r#"{"choices":[{"text":" \u00e9\n"}]}"#));
        assert!(has_output(r#"{"choices":[{"delta":{"reasoning_content":"hm"}}]}"#));
        assert!(has_output(r#"{"choices":[{"delta":{"content":null,"tool_calls":[{"index":0}]}}]}"#));
    }

    #[test]
    fn tokens_of_a_delta_are_known_only_if_the_server_says_them() {
        let tokens = |json: &str| serde_json::from_str::<Choice>(json).unwrap().tokens();
        assert_eq!(tokens(r#"{"text":"ab"}"#), None);
        assert_eq!(tokens(r#"{"text":"ab","token_ids":[1,2,3]}"#), Some(3));
        assert_eq!(tokens(r#"{"text":"ab","logprobs":{"tokens":["a","b"],"top_logprobs":null}}"#), Some(2));
        assert_eq!(tokens(r#"{"delta":{"content":"ab"},"logprobs":{"content":[{"token":"ab"}]}}"#), Some(1));
    }
}
