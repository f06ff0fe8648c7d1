//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::{
    extract::State,
    response::{IntoResponse as _, Response},
};
use http::StatusCode;
use serde::Serialize;
use serde_json::Value;

use super::{
    logprobs::{self, ChatLogprobs},
    messages,
    parameters::{self, Delivery},
    wire::{self, AnswerObject, Chunk, ChunkUsage, Head},
};
use crate::{
    core::{Completed, CompletedChoice},
    error::ApiError,
    http::{
        App,
        body::JsonCall,
        fields::Fields,
        generation::{self, Tally},
        reply,
        sse::{self, Chunks, Frames},
    },
    request::{ChatPrompt, Parameters, Prompt, TextEvent},
    telemetry::trace::Operation,
};

/// The route.
pub async fn handle(State(app): State<Arc<App>>, call: JsonCall) -> Response {
    answer(&app, &call).await.unwrap_or_else(ApiError::into_response)
}

async fn answer(app: &Arc<App>, call: &JsonCall) -> Result<Response, ApiError> {
    let body = Fields::root(&call.body)?;
    let delivery = parameters::delivery(&body)?;
    parameters::response_format(&body)?;
    let parameters = chat_parameters(&body)?;
    let prompt = messages::chat_prompt(&body)?;
    let model = wire::model(app, body.string("model")?)?;

    let object = if delivery.stream { "chat.completion.chunk" } else { "chat.completion" };
    let head = Head::new("chatcmpl", object, &call.caller, &model);
    let salt = parameters::cache_salt(&body)?;
    let echo = echo(&body, &prompt)?;
    let requests = wire::requests(&call.caller, &model, vec![Prompt::Chat(prompt)], &parameters, salt);
    let events = generation::start(app, Operation::Chat, requests).await?;
    let view = View { head, delivery, logprobs: parameters.logprobs.is_some(), choices: parameters.n.unwrap_or(1), echo };
    if delivery.stream {
        return Ok(sse::response(events, ChatChunks { view, tally: Tally::default() }, app.config.keep_alive));
    }
    let answers = generation::collect(events, 1).await?;
    Ok(reply::json(StatusCode::OK, &view.answer(answers.into_iter().next().unwrap_or_default(), &parameters)))
}

fn chat_parameters(body: &Fields<'_>) -> Result<Parameters, ApiError> {
    let mut parameters = parameters::sampling(body)?;
    let older = body.unsigned("max_tokens")?;
    parameters.max_tokens = body.unsigned("max_completion_tokens")?.or(older);
    if parameters.add_special_tokens == Some(true) {
        let message = "`add_special_tokens` is not available here: the model's chat template says what stands around messages.";
        return Err(ApiError::invalid("add_special_tokens", message));
    }
    let wanted = body.boolean("logprobs")?.unwrap_or(false);
    let top = body.unsigned("top_logprobs")?.unwrap_or(0);
    if top > 0 && !wanted {
        return Err(ApiError::invalid("top_logprobs", "`top_logprobs` needs `logprobs`: true."));
    }
    parameters.logprobs = wanted.then_some(top);
    Ok(parameters)
}

/// With `echo`, the text that an answer goes on from: the content of a last message that is the assistant's.
fn echo(body: &Fields<'_>, prompt: &ChatPrompt) -> Result<String, ApiError> {
    let echo = body.boolean("echo")?.unwrap_or(false);
    let last = prompt.messages.last().filter(|message| echo && message["role"] == "assistant");
    Ok(last.and_then(|message| message["content"].as_str()).unwrap_or_default().to_owned())
}

/// How this call's answer looks.
struct View {
    head: Head,
    delivery: Delivery,
    logprobs: bool,
    choices: u32,
    /// Put before each answer.
    echo: String,
}

#[derive(Serialize)]
struct Choice {
    index: usize,
    message: Message,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<&'static str>,
    stop_reason: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

#[derive(Serialize)]
struct Message {
    role: &'static str,
    content: String,
    refusal: Option<()>,
}

impl View {
    fn logprobs(&self, tokens: &[crate::request::TokenLogprob]) -> Option<ChatLogprobs> {
        self.logprobs.then(|| logprobs::chat(tokens, self.delivery.tokens_as_ids))
    }

    fn answer(&self, answer: Completed, parameters: &Parameters) -> AnswerObject<'_, Choice> {
        let choice = |(index, choice): (usize, CompletedChoice)| Choice {
            index,
            logprobs: self.logprobs(&choice.logprobs),
            finish_reason: choice.reason.as_ref().map(wire::finish_reason),
            stop_reason: choice.reason.as_ref().map_or(Value::Null, wire::stop_reason),
            token_ids: self.delivery.return_token_ids.then_some(choice.token_ids),
            message: Message { role: "assistant", content: format!("{}{}", self.echo, choice.text), refusal: None },
        };
        AnswerObject {
            head: &self.head,
            choices: answer.choices.into_iter().enumerate().map(choice).collect(),
            usage: answer.usage.into(),
            prompt_token_ids: self.delivery.return_token_ids.then(|| answer.prompt_ids.to_vec()),
            prompt_logprobs: parameters.prompt_logprobs.map(|_| logprobs::prompt(&answer.prompt_logprobs)),
        }
    }
}

struct ChatChunks {
    view: View,
    tally: Tally,
}

#[derive(Serialize)]
struct ChunkChoice<'a> {
    index: u32,
    delta: DeltaObject<'a>,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<&'a [u32]>,
}

#[derive(Default, Serialize)]
struct DeltaObject<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
}

impl ChatChunks {
    fn push(&self, choice: ChunkChoice<'_>, prompt_ids: Option<&[u32]>, out: &mut Frames) {
        let delivery = &self.view.delivery;
        let usage = match (delivery.continuous_usage, delivery.include_usage) {
            (true, _) => ChunkUsage::So(self.tally.total().into()),
            (false, true) => ChunkUsage::Null,
            (false, false) => ChunkUsage::Absent,
        };
        out.push(&Chunk { head: &self.view.head, choices: &[choice], usage, prompt_token_ids: prompt_ids });
    }

    fn plain(index: u32, delta: DeltaObject<'_>) -> ChunkChoice<'_> {
        ChunkChoice { index, delta, logprobs: None, finish_reason: None, stop_reason: None, token_ids: None }
    }
}

impl Chunks for ChatChunks {
    fn event(&mut self, prompt: usize, event: TextEvent, out: &mut Frames) {
        self.tally.event(prompt, &event);
        match event {
            TextEvent::Started { prompt_ids, .. } => {
                for index in 0..self.view.choices {
                    let delta = DeltaObject { role: Some("assistant"), content: Some(&self.view.echo) };
                    let ids = (self.view.delivery.return_token_ids && index == 0).then_some(prompt_ids.as_slice());
                    self.push(Self::plain(index, delta), ids, out);
                }
            }
            TextEvent::Delta { choice, text, token_ids, logprobs } => {
                let logprobs = if logprobs.is_empty() { None } else { self.view.logprobs(&logprobs) };
                let ids = self.view.delivery.return_token_ids.then_some(token_ids.as_slice()).filter(|ids| !ids.is_empty());
                // Text that waits for the rest of a character or of a stop string: nothing to say yet.
                if text.is_empty() && logprobs.is_none() && ids.is_none() {
                    return;
                }
                let delta = DeltaObject { role: None, content: Some(&text) };
                self.push(ChunkChoice { logprobs, token_ids: ids, ..Self::plain(choice, delta) }, None, out);
            }
            TextEvent::Finished { choice, reason } => {
                let plain = Self::plain(choice, DeltaObject::default());
                let stop_reason = Some(wire::stop_reason(&reason));
                self.push(ChunkChoice { finish_reason: Some(wire::finish_reason(&reason)), stop_reason, ..plain }, None, out);
            }
            TextEvent::Usage(_) => {}
        }
    }

    fn end(&mut self, out: &mut Frames) {
        if self.view.delivery.include_usage {
            let usage = ChunkUsage::So(self.tally.total().into());
            out.push(&Chunk::<ChunkChoice<'_>> { head: &self.view.head, choices: &[], usage, prompt_token_ids: None });
        }
    }
}
