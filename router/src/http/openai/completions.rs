//! `POST /v1/completions`: one prompt or many, as text or as ids, with or without echo.

use std::sync::Arc;

use axum::{
    extract::State,
    response::{IntoResponse as _, Response},
};
use http::StatusCode;
use serde::Serialize;
use serde_json::Value;

use super::{
    logprobs::{self, TextLogprobs},
    parameters::{self, Delivery},
    wire::{self, AnswerObject, Chunk, ChunkUsage, Head},
};
use crate::{
    core::{Completed, CompletedChoice},
    error::ApiError,
    http::{
        App,
        body::JsonCall,
        fields::{Fields, ids, wrong},
        generation::{self, Tally, total},
        reply,
        sse::{self, Chunks, Frames},
    },
    request::{FinishReason, Parameters, Prompt, TextEvent, TokenLogprob, Usage},
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
    let mut parameters = text_parameters(&body, app.config.completion_max_tokens)?;
    let echo = body.boolean("echo")?.unwrap_or(false);
    if echo && parameters.truncate.is_some() {
        return Err(ApiError::invalid("echo", "`echo` is not available with `truncate_prompt_tokens`."));
    }
    let best_of = best_of(&body, &mut parameters, delivery.stream)?;
    let wants_prompt_logprobs = parameters.prompt_logprobs.is_some();
    // The prompt's own log-probabilities take a step of the model, and a step generates: its token is left out.
    let prompt_only = echo && parameters.max_tokens == Some(0);
    if echo {
        parameters.prompt_logprobs = parameters.prompt_logprobs.max(parameters.logprobs);
    }
    if prompt_only {
        (parameters.max_tokens, parameters.min_tokens) = (Some(1), None);
    }
    let prompts = prompts(&body, app.config.max_prompts)?;
    let model = wire::model(app, body.string("model")?)?;
    let mut echoes = Vec::new();
    if echo {
        for prompt in &prompts {
            echoes.push(match prompt {
                Prompt::Text(text) => text.clone(),
                Prompt::Ids(ids) => app.core.detokenize(&model.name, ids).await?,
                Prompt::Chat(_) => String::new(),
            });
        }
    }

    let head = Head::new("cmpl", "text_completion", &call.caller, &model);
    let count = prompts.len();
    let choices = parameters.n.unwrap_or(1) as usize;
    let logprobs = parameters.logprobs.is_some();
    if best_of.is_some() {
        parameters.logprobs = parameters.logprobs.or(Some(0));
    }
    let salt = parameters::cache_salt(&body)?;
    let requests = wire::requests(&call.caller, &model, prompts, &parameters, salt);
    let events = generation::start(app, Operation::Completion, requests).await?;
    let choices = best_of.unwrap_or(choices);
    let offsets = vec![0; count * choices];
    let view = View { head, delivery, logprobs, wants_prompt_logprobs, choices, echoes, prompt_only, offsets };
    if delivery.stream {
        return Ok(sse::response(events, TextChunks { view, tally: Tally::default() }, app.config.keep_alive));
    }
    let mut answers = generation::collect(events, count).await?;
    if best_of.is_some() {
        answers.iter_mut().for_each(|answer| keep_likeliest(answer, choices));
    }
    Ok(reply::json(StatusCode::OK, &view.answer(answers)))
}

/// Reads a body as the route does, for the test of the API's description.
#[cfg(test)]
pub fn read_all(body: &Value) -> Result<(), ApiError> {
    let body = Fields::root(body)?;
    parameters::delivery(&body)?;
    parameters::response_format(&body)?;
    let mut parameters = text_parameters(&body, 16)?;
    body.boolean("echo")?;
    best_of(&body, &mut parameters, false)?;
    prompts(&body, 1)?;
    body.string("model")?;
    parameters::cache_salt(&body).map(|_| ())
}

/// `best_of` above `n`: so many are generated, and of them the `n` likeliest are the answer. Some(n) where that is asked.
fn best_of(body: &Fields<'_>, parameters: &mut Parameters, stream: bool) -> Result<Option<usize>, ApiError> {
    let n = parameters.n.unwrap_or(1);
    let Some(best_of) = body.unsigned("best_of")?.filter(|best_of| *best_of != n) else { return Ok(None) };
    if best_of < n {
        return Err(ApiError::invalid("best_of", format!("`best_of` ({best_of}) can't be below `n` ({n}).")));
    }
    if stream {
        return Err(ApiError::invalid("best_of", "`best_of` above `n` is not available with `stream`: true."));
    }
    parameters.n = Some(best_of);
    Ok(Some(n as usize))
}

/// By the mean log-probability of their tokens; equal ones in order.
fn keep_likeliest(answer: &mut Completed, n: usize) {
    let mean = |choice: &CompletedChoice| {
        let sum: f32 = choice.logprobs.iter().filter_map(|token| token.logprob).sum();
        sum / choice.logprobs.len().max(1) as f32
    };
    answer.choices.sort_by(|one, other| mean(other).total_cmp(&mean(one)));
    answer.choices.truncate(n);
}

fn text_parameters(body: &Fields<'_>, default_max_tokens: u32) -> Result<Parameters, ApiError> {
    let mut parameters = parameters::sampling(body)?;
    let older = body.unsigned("max_tokens")?;
    parameters.max_tokens = Some(body.unsigned("max_completion_tokens")?.or(older).unwrap_or(default_max_tokens));
    parameters.logprobs = body.unsigned("logprobs")?;
    Ok(parameters)
}

/// `prompt`: a string, a list of strings, a list of ids, or a list of lists of ids.
fn prompts(body: &Fields<'_>, max: usize) -> Result<Vec<Prompt>, ApiError> {
    let missing = || ApiError::invalid("prompt", "`prompt` is missing or empty.");
    let list = match body.get("prompt") {
        None => return Err(missing()),
        Some(Value::String(text)) if text.is_empty() => return Err(missing()),
        Some(Value::String(text)) => return Ok(vec![Prompt::Text(text.clone())]),
        Some(Value::Array(list)) => list,
        Some(other) => return Err(wrong("prompt", "a string or an array", other)),
    };
    match list.first() {
        None => return Err(missing()),
        Some(Value::Number(_)) => return Ok(vec![Prompt::Ids(ids(list, "prompt")?)]),
        Some(_) if list.len() > max => {
            let message = format!("`prompt` holds {} prompts; at most {max} are taken in one call.", list.len());
            return Err(ApiError::invalid("prompt", message));
        }
        Some(_) => {}
    }
    list.iter().enumerate().map(|(index, value)| prompt(value, &format!("prompt[{index}]"))).collect()
}

fn prompt(value: &Value, path: &str) -> Result<Prompt, ApiError> {
    let empty = || ApiError::invalid(path, format!("`{path}` is empty."));
    match value {
        Value::String(text) if text.is_empty() => Err(empty()),
        Value::String(text) => Ok(Prompt::Text(text.clone())),
        Value::Array(list) if list.is_empty() => Err(empty()),
        Value::Array(list) => Ok(Prompt::Ids(ids(list, path)?)),
        other => Err(wrong(path, "a string or an array of token ids", other)),
    }
}

/// How this call's answer looks, and how far the text of each choice has come.
struct View {
    head: Head,
    delivery: Delivery,
    logprobs: bool,
    wants_prompt_logprobs: bool,
    /// Of one prompt.
    choices: usize,
    /// Text of each prompt; empty without echo.
    echoes: Vec<String>,
    /// Nothing but the echo is wanted.
    prompt_only: bool,
    /// Characters so far, by index in the answer.
    offsets: Vec<usize>,
}

#[derive(Default, Serialize)]
struct Choice {
    index: usize,
    text: String,
    logprobs: Option<TextLogprobs>,
    finish_reason: Option<&'static str>,
    stop_reason: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<Value>,
}

impl View {
    fn logprobs(&mut self, index: usize, tokens: &[TokenLogprob]) -> Option<TextLogprobs> {
        let offset = self.offsets.get_mut(index)?;
        self.logprobs.then(|| logprobs::text(tokens, offset, self.delivery.tokens_as_ids))
    }

    fn answer(mut self, answers: Vec<Completed>) -> Value {
        let mut usages = Vec::new();
        let mut choices = Vec::new();
        for (prompt, mut answer) in answers.into_iter().enumerate() {
            usages.push(if self.prompt_only { Usage { completion_tokens: 0, ..answer.usage } } else { answer.usage });
            for (choice, completed) in std::mem::take(&mut answer.choices).into_iter().enumerate() {
                choices.push(self.choice(prompt, choice, &answer, completed));
            }
        }
        let answer =
            AnswerObject { head: &self.head, choices, usage: total(&usages).into(), prompt_token_ids: None, prompt_logprobs: None };
        serde_json::to_value(&answer).unwrap_or_default()
    }

    fn choice(&mut self, prompt: usize, choice: usize, answer: &Completed, mut completed: CompletedChoice) -> Choice {
        let index = prompt * self.choices + choice;
        if self.prompt_only {
            completed = CompletedChoice { reason: Some(FinishReason::Length), ..CompletedChoice::default() };
        }
        let mut tokens = Vec::new();
        let mut text = String::new();
        if let Some(echo) = self.echoes.get(prompt) {
            text.clone_from(echo);
            tokens.clone_from(&answer.prompt_logprobs);
        }
        text.push_str(&completed.text);
        tokens.append(&mut completed.logprobs);
        let with_ids = self.delivery.return_token_ids;
        Choice {
            index,
            text,
            logprobs: self.logprobs(index, &tokens),
            finish_reason: completed.reason.as_ref().map(wire::finish_reason),
            stop_reason: completed.reason.as_ref().map_or(Value::Null, wire::stop_reason),
            prompt_token_ids: with_ids.then(|| answer.prompt_ids.clone()),
            token_ids: with_ids.then_some(completed.token_ids),
            prompt_logprobs: self.wants_prompt_logprobs.then(|| logprobs::prompt(&answer.prompt_logprobs)),
        }
    }
}

struct TextChunks {
    view: View,
    tally: Tally,
}

#[derive(Serialize)]
struct ChunkChoice {
    index: usize,
    text: String,
    logprobs: Option<TextLogprobs>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

impl ChunkChoice {
    fn new(index: usize, text: String) -> Self {
        Self { index, text, logprobs: None, finish_reason: None, stop_reason: None, prompt_token_ids: None, token_ids: None }
    }
}

impl TextChunks {
    fn push(&self, choice: ChunkChoice, out: &mut Frames) {
        let delivery = &self.view.delivery;
        let usage = match (delivery.continuous_usage, delivery.include_usage) {
            (true, _) => ChunkUsage::So(self.usage().into()),
            (false, true) => ChunkUsage::Null,
            (false, false) => ChunkUsage::Absent,
        };
        out.push(&Chunk { head: &self.view.head, choices: &[choice], usage, prompt_token_ids: None });
    }

    fn usage(&self) -> Usage {
        let usage = self.tally.total();
        if self.view.prompt_only { Usage { completion_tokens: 0, ..usage } } else { usage }
    }

    /// The prompt, as a chunk of its own, before anything of the answer.
    fn started(&mut self, prompt: usize, prompt_ids: &[u32], tokens: &[TokenLogprob], out: &mut Frames) {
        let echo = self.view.echoes.get(prompt).cloned();
        let with_ids = self.view.delivery.return_token_ids;
        for index in prompt * self.view.choices..(prompt + 1) * self.view.choices {
            if echo.is_some() || with_ids {
                let mut chunk = ChunkChoice::new(index, echo.clone().unwrap_or_default());
                chunk.logprobs = if echo.is_some() && !tokens.is_empty() { self.view.logprobs(index, tokens) } else { None };
                chunk.prompt_token_ids = with_ids.then(|| prompt_ids.to_vec());
                self.push(chunk, out);
            }
            if self.view.prompt_only {
                self.push(finished(index, &FinishReason::Length), out);
            }
        }
    }
}

fn finished(index: usize, reason: &FinishReason) -> ChunkChoice {
    let mut chunk = ChunkChoice::new(index, String::new());
    chunk.finish_reason = Some(wire::finish_reason(reason));
    chunk.stop_reason = Some(wire::stop_reason(reason));
    chunk
}

impl Chunks for TextChunks {
    fn event(&mut self, prompt: usize, event: TextEvent, out: &mut Frames) {
        self.tally.event(prompt, &event);
        match event {
            TextEvent::Started { prompt_ids, prompt_logprobs, .. } => self.started(prompt, &prompt_ids, &prompt_logprobs, out),
            TextEvent::Delta { choice, text, token_ids, logprobs, .. } if !self.view.prompt_only => {
                let index = prompt * self.view.choices + choice as usize;
                let mut chunk = ChunkChoice::new(index, text);
                chunk.logprobs = if logprobs.is_empty() { None } else { self.view.logprobs(index, &logprobs) };
                chunk.token_ids = Some(token_ids).filter(|ids| self.view.delivery.return_token_ids && !ids.is_empty());
                if !chunk.text.is_empty() || chunk.logprobs.is_some() || chunk.token_ids.is_some() {
                    self.push(chunk, out);
                }
            }
            TextEvent::Finished { choice, reason } if !self.view.prompt_only => {
                self.push(finished(prompt * self.view.choices + choice as usize, &reason), out);
            }
            TextEvent::Delta { .. } | TextEvent::Finished { .. } | TextEvent::Usage(_) => {}
        }
    }

    fn end(&mut self, out: &mut Frames) {
        if self.view.delivery.include_usage {
            let usage = ChunkUsage::So(self.usage().into());
            out.push(&Chunk::<ChunkChoice> { head: &self.view.head, choices: &[], usage, prompt_token_ids: None });
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_likeliest_choices_are_kept_in_order() {
        let choice = |text: &str, logprobs: &[f32]| CompletedChoice {
            text: text.to_owned(),
            logprobs: logprobs.iter().map(|&value| TokenLogprob { id: 0, bytes: vec![], logprob: Some(value), top: vec![] }).collect(),
            ..CompletedChoice::default()
        };
        let choices = vec![choice("a", &[-1.0, -3.0]), choice("b", &[-0.5]), choice("c", &[-0.5, -0.5, -0.5]), choice("d", &[-4.0])];
        let mut answer = Completed { choices, ..Completed::default() };
        keep_likeliest(&mut answer, 3);
        assert_eq!(answer.choices.iter().map(|choice| choice.text.as_str()).collect::<Vec<_>>(), ["b", "c", "a"]);
    }

    fn read(prompt: Value) -> Result<Vec<Prompt>, String> {
        prompts(&Fields::root(&json!({"prompt": prompt})).unwrap(), 3).map_err(|error| match error {
            ApiError::Invalid { param, .. } => param.unwrap_or_default(),
            other => panic!("{other:?}"),
        })
    }

    #[test]
    fn prompts_come_in_four_forms() {
        assert!(matches!(&read(json!("a")).unwrap()[..], [Prompt::Text(text)] if text == "a"));
        assert!(matches!(&read(json!(["a", "b"])).unwrap()[..], [Prompt::Text(_), Prompt::Text(_)]));
        assert!(matches!(&read(json!([1, 2, 3, 4, 5])).unwrap()[..], [Prompt::Ids(ids)] if ids == &[1, 2, 3, 4, 5]));
        assert!(matches!(&read(json!([[1], [2, 3]])).unwrap()[..], [Prompt::Ids(_), Prompt::Ids(_)]));
    }

    #[test]
    fn wrong_prompts_are_refused_by_name() {
        for (prompt, param) in [
            (json!(null), "prompt"),
            (json!(""), "prompt"),
            (json!([]), "prompt"),
            (json!(5), "prompt"),
            (json!([-1]), "prompt[0]"),
            (json!([1, "a"]), "prompt[1]"),
            (json!([[-1]]), "prompt[0][0]"),
            (json!([[1], []]), "prompt[1]"),
            (json!(["a", ""]), "prompt[1]"),
            (json!(["a", 1]), "prompt[1]"),
            (json!([{"x": 1}]), "prompt[0]"),
            (json!(["a", "b", "c", "d"]), "prompt"),
        ] {
            assert_eq!(read(prompt.clone()).unwrap_err(), param, "{prompt}");
        }
    }
}
