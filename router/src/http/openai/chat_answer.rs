//! A chat's answer, whole and as chunks: content, thoughts (`reasoning_content`) and calls of tools.

use serde::Serialize;
use serde_json::Value;

use super::{
    logprobs::{self, ChatLogprobs},
    parameters::Delivery,
    wire::{self, AnswerObject, Chunk, ChunkUsage, Head},
};
use crate::{
    core::{Completed, CompletedChoice},
    http::{
        generation::Tally,
        sse::{Chunks, Frames},
    },
    request::{FinishReason, Part, TextEvent, TokenLogprob},
};

/// How a call's answer looks.
pub struct View {
    pub head: Head,
    pub delivery: Delivery,
    pub logprobs: bool,
    pub prompt_logprobs: bool,
    pub choices: u32,
    /// Put before each answer.
    pub echo: String,
    /// Thoughts are shown.
    pub reasoning: bool,
    /// More than one call is shown.
    pub parallel_calls: bool,
}

#[derive(Serialize)]
pub struct Choice {
    index: usize,
    message: Message,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<&'static str>,
    stop_reason: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

#[derive(Default, Serialize)]
struct Message {
    role: &'static str,
    content: Option<String>,
    refusal: Option<()>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ToolCall>,
}

/// A call of a tool, whole.
#[derive(Serialize)]
struct ToolCall {
    id: String,
    #[serde(rename = "type")]
    kind: &'static str,
    function: Function,
}

#[derive(Serialize)]
struct Function {
    name: String,
    arguments: String,
}

/// The model's own id of a call, or a fresh one.
pub fn call_id(own: Option<String>) -> String {
    own.unwrap_or_else(|| format!("call_{}", &uuid::Uuid::new_v4().simple().to_string()[..24]))
}

impl View {
    fn logprobs(&self, tokens: &[TokenLogprob]) -> Option<ChatLogprobs> {
        self.logprobs.then(|| logprobs::chat(tokens, self.delivery.tokens_as_ids))
    }

    fn shows_call(&self, index: u32) -> bool {
        index == 0 || self.parallel_calls
    }

    /// The whole answer.
    pub fn answer(&self, answer: Completed) -> AnswerObject<'_, Choice> {
        let mut usage: wire::UsageObject = answer.usage.into();
        if answer.choices.iter().any(|choice| choice.parts.iter().any(|part| matches!(part, Part::Reasoning(_)))) {
            usage.forget_reasoning();
        }
        AnswerObject {
            head: &self.head,
            prompt_token_ids: self.delivery.return_token_ids.then(|| answer.prompt_ids.clone()),
            prompt_logprobs: self.prompt_logprobs.then(|| logprobs::prompt(&answer.prompt_logprobs)),
            choices: answer.choices.into_iter().enumerate().map(|(index, choice)| self.choice(index, choice)).collect(),
            usage,
        }
    }

    fn choice(&self, index: usize, choice: CompletedChoice) -> Choice {
        let mut message = Message { role: "assistant", ..Message::default() };
        let mut content = self.echo.clone();
        for part in choice.parts {
            match part {
                Part::Content(text) => content.push_str(&text),
                Part::Reasoning(text) if self.reasoning => message.reasoning_content.get_or_insert_default().push_str(&text),
                Part::Call { index, id, name } if self.shows_call(index) => {
                    message.tool_calls.push(ToolCall {
                        id: call_id(id),
                        kind: "function",
                        function: Function { name, arguments: String::new() },
                    });
                }
                Part::Arguments { index, text } => {
                    if let Some(call) = message.tool_calls.get_mut(index as usize) {
                        call.function.arguments.push_str(&text);
                    }
                }
                Part::Reasoning(_) | Part::Call { .. } => {}
            }
        }
        let called = !message.tool_calls.is_empty();
        message.content = Some(content).filter(|content| !(called && content.is_empty()));
        Choice {
            index,
            logprobs: self.logprobs(&choice.logprobs),
            finish_reason: choice.reason.as_ref().map(|reason| finish_reason(reason, called)),
            stop_reason: choice.reason.as_ref().map_or(Value::Null, wire::stop_reason),
            token_ids: self.delivery.return_token_ids.then_some(choice.token_ids),
            message,
        }
    }
}

fn finish_reason(reason: &FinishReason, called: bool) -> &'static str {
    match wire::finish_reason(reason) {
        "stop" if called => "tool_calls",
        other => other,
    }
}

/// The chunks of an answer.
pub struct ChatChunks {
    view: View,
    tally: Tally,
    /// Choices that called a tool.
    called: Vec<bool>,
    thought: bool,
}

#[derive(Serialize)]
struct ChunkChoice<'a> {
    index: u32,
    delta: Delta<'a>,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<&'a [u32]>,
}

#[derive(Default, Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<[CallDelta<'a>; 1]>,
}

#[derive(Serialize)]
struct CallDelta<'a> {
    index: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    function: FunctionDelta<'a>,
}

#[derive(Serialize)]
struct FunctionDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    arguments: &'a str,
}

impl ChatChunks {
    pub fn new(view: View) -> Self {
        let called = vec![false; view.choices as usize];
        Self { view, tally: Tally::default(), called, thought: false }
    }

    fn push(&self, choice: ChunkChoice<'_>, prompt_ids: Option<&[u32]>, out: &mut Frames) {
        let delivery = &self.view.delivery;
        let usage = match (delivery.continuous_usage, delivery.include_usage) {
            (true, _) => ChunkUsage::So(self.usage()),
            (false, true) => ChunkUsage::Null,
            (false, false) => ChunkUsage::Absent,
        };
        out.push(&Chunk { head: &self.view.head, choices: &[choice], usage, prompt_token_ids: prompt_ids });
    }

    fn usage(&self) -> wire::UsageObject {
        let mut usage: wire::UsageObject = self.tally.total().into();
        if self.thought {
            usage.forget_reasoning();
        }
        usage
    }

    fn plain(index: u32, delta: Delta<'_>) -> ChunkChoice<'_> {
        ChunkChoice { index, delta, logprobs: None, finish_reason: None, stop_reason: None, token_ids: None }
    }

    /// A part as a delta; None if it is not shown.
    fn delta<'a>(&mut self, choice: u32, part: &'a Part) -> Option<Delta<'a>> {
        let call = |index, id, kind, name, arguments| {
            let call = CallDelta { index, id, kind, function: FunctionDelta { name, arguments } };
            Some(Delta { tool_calls: Some([call]), ..Delta::default() })
        };
        match part {
            Part::Content(text) => Some(Delta { content: Some(text), ..Delta::default() }),
            Part::Reasoning(text) => {
                self.thought = true;
                self.view.reasoning.then(|| Delta { reasoning_content: Some(text), ..Delta::default() })
            }
            Part::Call { index, .. } | Part::Arguments { index, .. } if !self.view.shows_call(*index) => None,
            Part::Call { index, id, name } => {
                if let Some(called) = self.called.get_mut(choice as usize) {
                    *called = true;
                }
                call(*index, Some(call_id(id.clone())), Some("function"), Some(name.as_str()), "")
            }
            Part::Arguments { index, text } => call(*index, None, None, None, text),
        }
    }

    /// One chunk a part; ids and log-probabilities go with the first.
    fn parts(&mut self, choice: u32, parts: &[Part], token_ids: &[u32], tokens: &[TokenLogprob], out: &mut Frames) {
        let mut logprobs = if tokens.is_empty() { None } else { self.view.logprobs(tokens) };
        let mut ids = Some(token_ids).filter(|ids| self.view.delivery.return_token_ids && !ids.is_empty());
        for part in parts {
            if let Some(delta) = self.delta(choice, part) {
                let chunk = ChunkChoice { logprobs: logprobs.take(), token_ids: ids.take(), ..Self::plain(choice, delta) };
                self.push(chunk, None, out);
            }
        }
        // Text that waits (for the rest of a character, a stop string, a marker), or isn't shown.
        if logprobs.is_some() || ids.is_some() {
            self.push(ChunkChoice { logprobs, token_ids: ids, ..Self::plain(choice, Delta::default()) }, None, out);
        }
    }
}

impl Chunks for ChatChunks {
    fn event(&mut self, prompt: usize, event: TextEvent, out: &mut Frames) {
        self.tally.event(prompt, &event);
        match event {
            TextEvent::Started { prompt_ids, .. } => {
                for index in 0..self.view.choices {
                    let delta = Delta { role: Some("assistant"), content: Some(&self.view.echo), ..Delta::default() };
                    let ids = (self.view.delivery.return_token_ids && index == 0).then_some(prompt_ids.as_slice());
                    self.push(Self::plain(index, delta), ids, out);
                }
            }
            TextEvent::Delta { choice, parts, token_ids, logprobs, .. } => self.parts(choice, &parts, &token_ids, &logprobs, out),
            TextEvent::Finished { choice, reason } => {
                let plain = Self::plain(choice, Delta::default());
                let called = self.called.get(choice as usize).copied().unwrap_or(false);
                let stop_reason = Some(wire::stop_reason(&reason));
                self.push(ChunkChoice { finish_reason: Some(finish_reason(&reason, called)), stop_reason, ..plain }, None, out);
            }
            TextEvent::Usage(_) => {}
        }
    }

    fn end(&mut self, out: &mut Frames) {
        if self.view.delivery.include_usage {
            let usage = ChunkUsage::So(self.usage());
            out.push(&Chunk::<ChunkChoice<'_>> { head: &self.view.head, choices: &[], usage, prompt_token_ids: None });
        }
    }
}
