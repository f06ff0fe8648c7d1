//! `POST /v1/chat/completions`: a body becomes a request. What is answered is [`chat_answer`](super::chat_answer)'s.

use std::sync::Arc;

use axum::{
    extract::State,
    response::{IntoResponse as _, Response},
};
use http::StatusCode;
use serde_json::json;

use super::{
    chat_answer::{ChatChunks, View},
    messages,
    parameters::{self, Delivery},
    wire::{self, Head},
};
use crate::{
    error::ApiError,
    http::{App, body::JsonCall, fields::Fields, generation, reply, sse},
    request::{ChatPrompt, Parameters, Prompt},
    telemetry::trace::Operation,
};

/// The route.
pub async fn handle(State(app): State<Arc<App>>, call: JsonCall) -> Response {
    answer(&app, &call).await.unwrap_or_else(ApiError::into_response)
}

/// What a body asks for.
struct Asked<'a> {
    delivery: Delivery,
    parameters: Parameters,
    prompt: ChatPrompt,
    model: Option<&'a str>,
    cache_salt: Option<&'a str>,
    /// Text that an answer goes on from, to be put before it.
    echo: String,
    reasoning: bool,
    parallel_calls: bool,
}

fn read<'a>(body: &Fields<'a>) -> Result<Asked<'a>, ApiError> {
    let delivery = parameters::delivery(body)?;
    parameters::response_format(body)?;
    let parameters = chat_parameters(body)?;
    let mut prompt = messages::chat_prompt(body)?;
    prompt.parsed = true;
    reasoning_effort(body, &mut prompt)?;
    Ok(Asked {
        delivery,
        parameters,
        model: body.string("model")?,
        cache_salt: parameters::cache_salt(body)?,
        echo: echo(body, &prompt)?,
        reasoning: body.boolean("include_reasoning")?.unwrap_or(true),
        parallel_calls: body.boolean("parallel_tool_calls")?.unwrap_or(true),
        prompt,
    })
}

async fn answer(app: &Arc<App>, call: &JsonCall) -> Result<Response, ApiError> {
    let asked = read(&Fields::root(&call.body)?)?;
    let model = wire::model(app, asked.model)?;
    let object = if asked.delivery.stream { "chat.completion.chunk" } else { "chat.completion" };
    let view = View {
        head: Head::new("chatcmpl", object, &call.caller, &model),
        delivery: asked.delivery,
        logprobs: asked.parameters.logprobs.is_some(),
        prompt_logprobs: asked.parameters.prompt_logprobs.is_some(),
        choices: asked.parameters.n.unwrap_or(1),
        echo: asked.echo,
        reasoning: asked.reasoning,
        parallel_calls: asked.parallel_calls,
    };
    let requests = wire::requests(&call.caller, &model, vec![Prompt::Chat(asked.prompt)], &asked.parameters, asked.cache_salt);
    let events = generation::start(app, Operation::Chat, requests).await?;
    if view.delivery.stream {
        return Ok(sse::response(events, ChatChunks::new(view), app.config.keep_alive));
    }
    let answers = generation::collect(events, 1).await?;
    Ok(reply::json(StatusCode::OK, &view.answer(answers.into_iter().next().unwrap_or_default())))
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

/// `reasoning_effort` is a variable of the template; "none" also sets the one by which most models are told not to think.
pub fn reasoning_effort(body: &Fields<'_>, prompt: &mut ChatPrompt) -> Result<(), ApiError> {
    let Some(effort) = body.string("reasoning_effort")? else { return Ok(()) };
    let arguments = &mut prompt.template_arguments;
    match effort {
        "minimal" | "low" | "medium" | "high" | "xhigh" => {}
        "none" => {
            arguments.entry("enable_thinking").or_insert(json!(false));
            return Ok(());
        }
        other => {
            let message = format!("`reasoning_effort` must be none, minimal, low, medium, high or xhigh, not `{other}`.");
            return Err(ApiError::invalid("reasoning_effort", message));
        }
    }
    arguments.entry("reasoning_effort").or_insert(json!(effort));
    Ok(())
}

/// With `echo`, the content of a last message that is the assistant's.
fn echo(body: &Fields<'_>, prompt: &ChatPrompt) -> Result<String, ApiError> {
    let echo = body.boolean("echo")?.unwrap_or(false);
    let last = prompt.messages.last().filter(|message| echo && message["role"] == "assistant");
    Ok(last.and_then(|message| message["content"].as_str()).unwrap_or_default().to_owned())
}

/// Reads a body as the route does, for the test of the API's description.
#[cfg(test)]
pub fn read_all(body: &serde_json::Value) -> Result<(), ApiError> {
    read(&Fields::root(body)?).map(|_| ())
}
