//! A response object, built from an answer's parts. Streamed and whole answers are built by the same steps: the whole one
//! leaves out the telling.

use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};

use super::chat_answer::call_id;
use crate::{
    core::Completed,
    error::ApiError,
    http::sse::{Chunks, Frames},
    request::{FinishReason, Part, TextEvent, Usage},
};

/// What tells a client of a step.
type Tell<'a> = &'a mut dyn FnMut(&'static str, Value);

/// Builds one response.
pub struct Builder {
    /// The request id: ids of the response and of its items are made of it.
    id: String,
    object: Map<String, Value>,
    output: Vec<Value>,
    open: Option<Open>,
    parallel_calls: bool,
    cut: bool,
    usage: Usage,
    thought: bool,
}

/// The item that is being said.
#[derive(Clone, Copy, PartialEq)]
enum Open {
    Message,
    Reasoning,
    Call,
}

impl Builder {
    pub fn new(request_id: &str, model: &str, repeated: Map<String, Value>, parallel_calls: bool) -> Self {
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let mut object = Map::from_iter([
            ("id".to_owned(), json!(format!("resp_{request_id}"))),
            ("object".to_owned(), json!("response")),
            ("created_at".to_owned(), json!(created)),
            ("status".to_owned(), json!("in_progress")),
            ("error".to_owned(), Value::Null),
            ("incomplete_details".to_owned(), Value::Null),
            ("model".to_owned(), json!(model)),
            ("previous_response_id".to_owned(), Value::Null),
            ("store".to_owned(), json!(false)),
        ]);
        object.extend(repeated);
        Self {
            id: request_id.to_owned(),
            object,
            output: Vec::new(),
            open: None,
            parallel_calls,
            cut: false,
            usage: Usage::default(),
            thought: false,
        }
    }

    /// The answer without streaming.
    pub fn whole(mut self, answer: Completed) -> Value {
        let mut silent = |_: &'static str, _: Value| {};
        if let Some(choice) = answer.choices.into_iter().next() {
            choice.parts.into_iter().for_each(|part| self.part(part, &mut silent));
            self.cut = choice.reason == Some(FinishReason::Length);
        }
        self.usage = answer.usage;
        self.close(&mut silent);
        self.finished()
    }

    fn part(&mut self, part: Part, tell: Tell<'_>) {
        let (kind, text) = match part {
            Part::Content(text) => (Open::Message, text),
            Part::Reasoning(text) => (Open::Reasoning, text),
            Part::Call { index, .. } | Part::Arguments { index, .. } if index > 0 && !self.parallel_calls => return,
            Part::Call { id, name, .. } => {
                self.close(tell);
                self.begin(Open::Call, json!({"call_id": call_id(id), "name": name, "arguments": ""}), tell);
                return;
            }
            Part::Arguments { text, .. } => (Open::Call, text),
        };
        if self.open != Some(kind) {
            self.close(tell);
            self.begin(kind, json!({}), tell);
        }
        self.thought |= kind == Open::Reasoning;
        let (index, id) = self.place();
        let (event, path) = match kind {
            Open::Message => ("response.output_text.delta", "/content/0/text"),
            Open::Reasoning => ("response.reasoning_text.delta", "/content/0/text"),
            Open::Call => ("response.function_call_arguments.delta", "/arguments"),
        };
        if let Some(Value::String(whole)) = self.output.last_mut().and_then(|item| item.pointer_mut(path)) {
            whole.push_str(&text);
        }
        let mut delta = json!({"item_id": id, "output_index": index, "delta": text});
        if kind != Open::Call {
            delta["content_index"] = json!(0);
        }
        if kind == Open::Message {
            delta["logprobs"] = json!([]);
        }
        tell(event, delta);
    }

    /// Index and id of the item that is being said.
    fn place(&self) -> (usize, Value) {
        (self.output.len().saturating_sub(1), self.output.last().map_or(Value::Null, |item| item["id"].clone()))
    }

    fn begin(&mut self, kind: Open, extra: Value, tell: Tell<'_>) {
        let id = |prefix: &str| json!(format!("{prefix}_{}_{}", self.id, self.output.len()));
        let mut item = match kind {
            Open::Message => json!({"type": "message", "id": id("msg"), "status": "in_progress", "role": "assistant", "content": []}),
            Open::Reasoning => json!({"type": "reasoning", "id": id("rs"), "summary": [], "content": []}),
            Open::Call => json!({"type": "function_call", "id": id("fc"), "status": "in_progress"}),
        };
        if let (Value::Object(item), Value::Object(extra)) = (&mut item, extra) {
            item.extend(extra);
        }
        self.open = Some(kind);
        tell("response.output_item.added", json!({"output_index": self.output.len(), "item": item}));
        let part = match kind {
            Open::Message => json!({"type": "output_text", "text": "", "annotations": [], "logprobs": []}),
            Open::Reasoning => json!({"type": "reasoning_text", "text": ""}),
            Open::Call => Value::Null,
        };
        self.output.push(item);
        if !part.is_null() {
            let (index, id) = self.place();
            tell("response.content_part.added", json!({"item_id": id, "output_index": index, "content_index": 0, "part": part}));
            if let Some(item) = self.output.last_mut() {
                item["content"] = json!([part]);
            }
        }
    }

    /// Ends the item that is being said.
    fn close(&mut self, tell: Tell<'_>) {
        let Some(kind) = self.open.take() else { return };
        let (index, id) = self.place();
        let Some(item) = self.output.last_mut() else { return };
        if kind != Open::Reasoning {
            item["status"] = json!(if self.cut { "incomplete" } else { "completed" });
        }
        let item = item.clone();
        let part = &item["content"][0];
        match kind {
            Open::Call => {
                let done = json!({"item_id": id, "output_index": index, "name": item["name"], "arguments": item["arguments"]});
                tell("response.function_call_arguments.done", done);
            }
            Open::Message | Open::Reasoning => {
                let mut done = json!({"item_id": id, "output_index": index, "content_index": 0, "text": part["text"]});
                let event = if kind == Open::Message { "response.output_text.done" } else { "response.reasoning_text.done" };
                if kind == Open::Message {
                    done["logprobs"] = json!([]);
                }
                tell(event, done);
                tell("response.content_part.done", json!({"item_id": id, "output_index": index, "content_index": 0, "part": part}));
            }
        }
        tell("response.output_item.done", json!({"output_index": index, "item": item}));
    }

    /// The response as it is now.
    fn response(&self) -> Value {
        let mut object = self.object.clone();
        object.insert("output".to_owned(), Value::Array(self.output.clone()));
        object.insert("usage".to_owned(), Value::Null);
        Value::Object(object)
    }

    fn finished(&self) -> Value {
        let mut response = self.response();
        response["status"] = json!(if self.cut { "incomplete" } else { "completed" });
        if self.cut {
            response["incomplete_details"] = json!({"reason": "max_output_tokens"});
        }
        let usage = self.usage;
        response["usage"] = json!({
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        });
        // Thoughts are told apart by text: how many tokens they are is not known.
        if !self.thought {
            response["usage"]["output_tokens_details"] = json!({"reasoning_tokens": 0});
        }
        response
    }
}

/// The events of a response.
pub struct ResponseEvents {
    builder: Builder,
    sequence: u64,
}

impl ResponseEvents {
    pub fn new(builder: Builder) -> Self {
        Self { builder, sequence: 0 }
    }

    /// Runs a step, and tells of it.
    fn run(&mut self, out: &mut Frames, step: impl FnOnce(&mut Builder, Tell<'_>)) {
        let sequence = &mut self.sequence;
        let mut tell = |name: &'static str, event: Value| {
            let mut whole = Map::from_iter([("type".to_owned(), json!(name)), ("sequence_number".to_owned(), json!(*sequence))]);
            if let Value::Object(event) = event {
                whole.extend(event);
            }
            *sequence += 1;
            out.push_named(name, &whole);
        };
        step(&mut self.builder, &mut tell);
    }
}

impl Chunks for ResponseEvents {
    fn event(&mut self, _prompt: usize, event: TextEvent, out: &mut Frames) {
        match event {
            TextEvent::Started { .. } => self.run(out, |builder, tell| {
                tell("response.created", json!({"response": builder.response()}));
                tell("response.in_progress", json!({"response": builder.response()}));
            }),
            TextEvent::Delta { parts, .. } => {
                self.run(out, |builder, tell| parts.into_iter().for_each(|part| builder.part(part, &mut *tell)));
            }
            TextEvent::Finished { reason, .. } => self.run(out, |builder, tell| {
                builder.cut = reason == FinishReason::Length;
                builder.close(tell);
            }),
            TextEvent::Usage(usage) => self.builder.usage = usage,
        }
    }

    fn end(&mut self, out: &mut Frames) {
        self.run(out, |builder, tell| {
            let name = if builder.cut { "response.incomplete" } else { "response.completed" };
            tell(name, json!({"response": builder.finished()}));
        });
    }

    fn failed(&mut self, error: &ApiError, out: &mut Frames) {
        self.run(out, |builder, tell| {
            let mut response = builder.response();
            response["status"] = json!("failed");
            response["error"] = json!({"code": error.code(), "message": error.to_string()});
            tell("response.failed", json!({"response": response}));
        });
    }

    fn says_done(&self) -> bool {
        false
    }
}
