//! One request as every protocol face hands it to the core, and what comes back: text, not tokens and not JSON.
//!
//! Faces (OpenAI HTTP, gRPC) translate to [`TextRequest`] and from [`TextEvent`]; they decide nothing about generation.
//! A non-streamed answer is the collected stream, so the two are equal by construction.

use std::collections::BTreeMap;

use serde_json::Value;

pub use crate::text::output::Part;

/// What is to be continued.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant)] // One a request; a box would only move it.
pub enum Prompt {
    /// Raw text; the tokenizer's own special tokens (BOS) are added. Special-token text in it is control, as vLLM and
    /// llama.cpp do for completions.
    Text(String),
    /// Ids as they are.
    Ids(Vec<u32>),
    /// Messages for the model's chat template.
    Chat(ChatPrompt),
}

/// Messages in OpenAI's form, plus what templates may ask for.
#[derive(Clone, Debug, Default)]
pub struct ChatPrompt {
    /// Objects with `role`, `content` (string or parts already joined to a string) and whatever else the client sent.
    pub messages: Vec<Value>,
    pub tools: Option<Value>,
    /// Objects with `title` and `text`, as templates for answers from documents read them.
    pub documents: Option<Value>,
    /// Default true, but where the final message is to be continued.
    pub add_generation_prompt: Option<bool>,
    /// The prompt ends where the last message's content does.
    pub continue_final_message: bool,
    /// Thoughts and (if there are tools) calls come apart from what is said, as [`Part`]s.
    pub parsed: bool,
    /// Extra variables for the template (`chat_template_kwargs`).
    pub template_arguments: serde_json::Map<String, Value>,
}

/// One request for one prompt. Absent values take the model's defaults, then the API's.
#[derive(Clone, Debug)]
pub struct TextRequest {
    pub request_id: String,
    pub model: String,
    pub prompt: Prompt,
    pub parameters: Parameters,
    /// From the API key, never from the client.
    pub cache_salt: Vec<u8>,
    /// What is left of the client's deadline, in milliseconds; 0: none.
    pub deadline_ms: u64,
}

/// Sampling and stopping; validated by [`Parameters::validate`](crate::request::Parameters) before any expensive work.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Parameters {
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    /// 0 or -1: off.
    pub top_k: Option<i64>,
    pub min_p: Option<f32>,
    pub presence_penalty: Option<f32>,
    pub frequency_penalty: Option<f32>,
    pub repetition_penalty: Option<f32>,
    pub logit_bias: BTreeMap<u32, f32>,
    pub seed: Option<i64>,
    pub n: Option<u32>,
    /// Absent: as far as the context goes (chat) or the face's own default.
    pub max_tokens: Option<u32>,
    pub min_tokens: Option<u32>,
    pub stop: Vec<String>,
    pub stop_token_ids: Vec<u32>,
    pub ignore_eos: bool,
    pub include_stop: bool,
    /// Text of special tokens is left out (default true).
    pub skip_special_tokens: Option<bool>,
    /// None: no log-probabilities; Some(k): of the token and of the k likeliest.
    pub logprobs: Option<u32>,
    pub prompt_logprobs: Option<u32>,
    pub priority: i32,
    /// What is cut of a prompt that is too long; absent: nothing, it is refused.
    pub truncate: Option<Truncate>,
    /// What the tokenizer puts around raw text (BOS); default true.
    pub add_special_tokens: Option<bool>,
    /// After the first, a delta waits until it has this many tokens; 0 counts as 1.
    pub stream_interval: u32,
}

/// How a prompt is shortened, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Truncate {
    /// Tokens to keep at most; absent: as many as leave room for the answer.
    pub keep: Option<u32>,
    /// The end of the prompt is kept and its beginning cut, not the other way round.
    pub keep_end: bool,
}

/// Why a choice ended.
#[derive(Clone, Debug, PartialEq)]
pub enum FinishReason {
    /// An end-of-generation token.
    EndOfSequence,
    /// One of the client's stop ids.
    StopToken(u32),
    /// One of the client's stop strings.
    StopString(String),
    /// max_tokens, or the end of the context.
    Length,
}

/// A token with its log-probability and the likeliest alternatives.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprob {
    pub id: u32,
    /// The token alone, as bytes (may be part of a character).
    pub bytes: Vec<u8>,
    /// None for the first prompt token.
    pub logprob: Option<f32>,
    pub top: Vec<TokenLogprob>,
}

/// What the core tells a face, in order: `Started`, then deltas, one `Finished` per choice, `Usage` last.
#[derive(Clone, Debug, PartialEq)]
pub enum TextEvent {
    Started {
        prompt_ids: Vec<u32>,
        cached_tokens: u32,
        prompt_logprobs: Vec<TokenLogprob>,
    },
    /// New text of a choice. Never ends within a character, never holds any part of a stop string.
    Delta {
        choice: u32,
        text: String,
        /// The same, split, where that was asked for. What is not decided yet comes with a later delta.
        parts: Vec<Part>,
        token_ids: Vec<u32>,
        logprobs: Vec<TokenLogprob>,
    },
    Finished {
        choice: u32,
        reason: FinishReason,
    },
    Usage(Usage),
}

/// Token counts of one request, all choices together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: u32,
    pub cached_tokens: u32,
    pub completion_tokens: u32,
}
