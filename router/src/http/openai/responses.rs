//! `POST /v1/responses`: OpenAI's newer form of chat. Nothing is stored, so that what needs storage is refused.

use std::sync::Arc;

use axum::{
    extract::State,
    response::{IntoResponse as _, Response},
};
use http::StatusCode;
use serde_json::{Map, Value, json};

use super::{
    chat, messages, parameters,
    responses_answer::{Builder, ResponseEvents},
    wire,
};
use crate::{
    error::ApiError,
    http::{
        App,
        body::JsonCall,
        fields::{Fields, wrong},
        generation, reply, sse,
    },
    request::{ChatPrompt, Parameters, Prompt, Truncate},
    telemetry::trace::Operation,
};

/// Fields that ask for what this server does not keep or run.
const UNSTORED: [(&str, &str); 4] = [
    ("previous_response_id", "Nothing is stored here: send the earlier turns with `input`."),
    ("conversation", "Nothing is stored here: send the earlier turns with `input`."),
    ("background", "An answer is given to the call that asks for it, or not at all."),
    ("prompt", "Nothing is stored here: send the prompt's text with `instructions` and `input`."),
];

/// The route.
pub async fn handle(State(app): State<Arc<App>>, call: JsonCall) -> Response {
    answer(&app, &call).await.unwrap_or_else(ApiError::into_response)
}

struct Asked<'a> {
    stream: bool,
    parameters: Parameters,
    prompt: ChatPrompt,
    model: Option<&'a str>,
    cache_salt: Option<&'a str>,
    /// Fields that the answer repeats.
    repeated: Map<String, Value>,
}

fn read<'a>(body: &Fields<'a>) -> Result<Asked<'a>, ApiError> {
    for (name, why) in UNSTORED {
        if body.get(name).is_some_and(|value| value.as_bool() != Some(false)) {
            return Err(ApiError::invalid(name, format!("`{name}` is not supported. {why}")));
        }
    }
    let delivery = parameters::delivery(body)?;
    let mut parameters = parameters::sampling(body)?;
    if parameters.n.is_some_and(|n| n != 1) {
        return Err(ApiError::invalid("n", "`n` can only be 1 here."));
    }
    parameters.max_tokens = body.unsigned("max_output_tokens")?;
    if parameters.max_tokens == Some(0) {
        return Err(ApiError::invalid("max_output_tokens", "`max_output_tokens` must be at least 1."));
    }
    if body.unsigned("top_logprobs")?.is_some_and(|top| top > 0) {
        return Err(ApiError::invalid("top_logprobs", "`top_logprobs` is not supported here; /v1/chat/completions gives them."));
    }
    parameters.prompt_logprobs = None;
    match body.string("truncation")? {
        None | Some("disabled") => {}
        Some("auto") => parameters.truncate = Some(Truncate { keep: None, keep_end: true }),
        Some(other) => return Err(ApiError::invalid("truncation", format!("`truncation` must be `auto` or `disabled`, not `{other}`."))),
    }
    text_format(body)?;
    let repeated = repeated(body)?;
    Ok(Asked {
        stream: delivery.stream,
        parameters,
        prompt: prompt(body)?,
        model: body.string("model")?,
        cache_salt: parameters::cache_salt(body)?,
        repeated,
    })
}

/// Only text, so far.
fn text_format(body: &Fields<'_>) -> Result<(), ApiError> {
    let Some(format) = body.object("text")?.map(|text| text.object("format")).transpose()?.flatten() else { return Ok(()) };
    match format.string("type")? {
        None | Some("text") => Ok(()),
        Some(kind) => {
            Err(ApiError::invalid("text.format", format!("`text.format` of type `{kind}` is not supported yet; only `text` is.")))
        }
    }
}

fn repeated(body: &Fields<'_>) -> Result<Map<String, Value>, ApiError> {
    body.object("metadata")?;
    body.boolean("parallel_tool_calls")?;
    body.string("user")?;
    let absent = |name: &str, value: Value| (name.to_owned(), body.get(name).cloned().unwrap_or(value));
    Ok(Map::from_iter([
        absent("instructions", Value::Null),
        absent("max_output_tokens", Value::Null),
        absent("metadata", json!({})),
        absent("parallel_tool_calls", json!(true)),
        absent("reasoning", json!({"effort": null, "summary": null})),
        absent("temperature", json!(1.0)),
        absent("text", json!({"format": {"type": "text"}})),
        absent("tool_choice", json!("auto")),
        absent("tools", json!([])),
        absent("top_p", json!(1.0)),
        absent("truncation", json!("disabled")),
        absent("user", Value::Null),
    ]))
}

async fn answer(app: &Arc<App>, call: &JsonCall) -> Result<Response, ApiError> {
    let asked = read(&Fields::root(&call.body)?)?;
    let model = wire::model(app, asked.model)?;
    let parallel = asked.repeated.get("parallel_tool_calls") != Some(&Value::Bool(false));
    let builder = Builder::new(&call.caller.request_id, &model.name, asked.repeated, parallel);
    let requests = wire::requests(&call.caller, &model, vec![Prompt::Chat(asked.prompt)], &asked.parameters, asked.cache_salt);
    let events = generation::start(app, Operation::Chat, requests).await.map_err(renamed)?;
    if asked.stream {
        return Ok(sse::response(events, ResponseEvents::new(builder), app.config.keep_alive));
    }
    let answer = generation::collect(events, 1).await?.into_iter().next().unwrap_or_default();
    Ok(reply::json(StatusCode::OK, &builder.whole(answer)))
}

/// The core's names of fields, as they are here.
fn renamed(error: ApiError) -> ApiError {
    let name = |param: Option<String>| {
        param.map(|param| match param.as_str() {
            "messages" => "input".to_owned(),
            "max_tokens" => "max_output_tokens".to_owned(),
            _ => param,
        })
    };
    match error {
        ApiError::Invalid { message, param } => ApiError::Invalid { message, param: name(param) },
        ApiError::ContextLength { message, param } => ApiError::ContextLength { message, param: name(param) },
        other => other,
    }
}

/// The body as a chat's, which is then read as such: one set of rules for messages and tools.
fn prompt(body: &Fields<'_>) -> Result<ChatPrompt, ApiError> {
    let mut chat = Map::new();
    let mut turns = Vec::new();
    if let Some(instructions) = body.string("instructions")? {
        turns.push(json!({"role": "system", "content": instructions}));
    }
    match body.get("input") {
        Some(Value::String(text)) => turns.push(json!({"role": "user", "content": text})),
        Some(Value::Array(items)) if !items.is_empty() => {
            for (index, item) in items.iter().enumerate() {
                turn(item, &format!("input[{index}]"), &mut turns)?;
            }
        }
        None | Some(Value::Array(_)) => return Err(ApiError::invalid("input", "`input` is missing or empty.")),
        Some(other) => return Err(wrong("input", "a string or an array", other)),
    }
    chat.insert("messages".to_owned(), Value::Array(turns));
    if let Some(tools) = body.list("tools")?.filter(|tools| !tools.is_empty()) {
        let tools = tools.iter().enumerate().map(|(index, tool)| function(tool, index)).collect::<Result<_, _>>()?;
        chat.insert("tools".to_owned(), Value::Array(tools));
    }
    let choice = body.get("tool_choice").filter(|choice| choice.as_str() != Some("auto"));
    if let Some(choice) = choice {
        let choice =
            if choice["type"] == "function" { json!({"type": "function", "function": {"name": choice["name"]}}) } else { choice.clone() };
        chat.insert("tool_choice".to_owned(), choice);
    }
    if let Some(effort) = body.object("reasoning")?.map(|reasoning| reasoning.string("effort")).transpose()?.flatten() {
        chat.insert("reasoning_effort".to_owned(), json!(effort));
    }
    let chat = Value::Object(chat);
    // Paths of this body, not of the client's: below the root they were checked by `turn`.
    let fields = Fields::at(&chat, String::new())?;
    let mut prompt = messages::chat_prompt(&fields).map_err(renamed)?;
    prompt.parsed = true;
    chat::reasoning_effort(&fields, &mut prompt)?;
    Ok(prompt)
}

fn function(tool: &Value, index: usize) -> Result<Value, ApiError> {
    let fields = Fields::at(tool, format!("tools[{index}]"))?;
    match fields.string("type")? {
        Some("function") => {}
        kind => {
            let message = format!("A tool of type `{}` is not supported; only `function` is.", kind.unwrap_or("null"));
            return Err(ApiError::invalid(&fields.path("type"), message));
        }
    }
    let name = fields.string("name")?.filter(|name| !name.is_empty());
    name.ok_or_else(|| ApiError::invalid(&fields.path("name"), "A function needs `name`."))?;
    let function: Map<String, Value> = fields.map().iter().filter(|(key, _)| *key != "type").map(|(k, v)| (k.clone(), v.clone())).collect();
    Ok(json!({"type": "function", "function": function}))
}

/// An item of `input` as a message; calls that follow one another are one message's.
fn turn(item: &Value, path: &str, turns: &mut Vec<Value>) -> Result<(), ApiError> {
    let fields = Fields::at(item, path.to_owned())?;
    let needed = |name: &str| {
        fields.string(name)?.ok_or_else(|| ApiError::invalid(&fields.path(name), format!("`{}` is missing.", fields.path(name))))
    };
    match fields.string("type")?.unwrap_or("message") {
        "message" => {
            let role = needed("role")?;
            let role = if role == "developer" { "system" } else { role };
            let content_path = fields.path("content");
            let content = match fields.get("content") {
                Some(Value::String(text)) => text.clone(),
                Some(Value::Array(parts)) => messages::join_parts(parts, &content_path)?,
                Some(other) => return Err(wrong(&content_path, "a string or an array of text parts", other)),
                None => return Err(ApiError::invalid(&content_path, format!("`{content_path}` is missing."))),
            };
            turns.push(json!({"role": role, "content": content}));
        }
        "function_call" => {
            let call = json!({"id": needed("call_id")?, "type": "function",
                "function": {"name": needed("name")?, "arguments": needed("arguments")?}});
            match turns.last_mut().and_then(|last| last.get_mut("tool_calls")).and_then(Value::as_array_mut) {
                Some(calls) => calls.push(call),
                None => turns.push(json!({"role": "assistant", "content": "", "tool_calls": [call]})),
            }
        }
        "function_call_output" => {
            let output = match fields.get("output") {
                Some(Value::Array(parts)) => messages::join_parts(parts, &fields.path("output"))?,
                _ => needed("output")?.to_owned(),
            };
            turns.push(json!({"role": "tool", "tool_call_id": needed("call_id")?, "content": output}));
        }
        // What was thought before is not shown again, as models are trained.
        "reasoning" => {}
        other => return Err(ApiError::invalid(&fields.path("type"), format!("An item of type `{other}` is not supported."))),
    }
    Ok(())
}

/// Reads a body as the route does, for the test of the API's description.
#[cfg(test)]
pub fn read_all(body: &Value) -> Result<(), ApiError> {
    read(&Fields::root(body)?).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_become_turns() {
        let body = json!({"instructions": "Be brief.", "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
            {"type": "reasoning", "summary": []},
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "b", "name": "g", "arguments": "{\"x\": 1}"},
            {"type": "function_call_output", "call_id": "a", "output": "sun"},
            {"type": "message", "role": "developer", "content": "d"},
        ], "tools": [{"type": "function", "name": "f", "parameters": {}}], "reasoning": {"effort": "none"}});
        let prompt = read(&Fields::root(&body).unwrap()).unwrap().prompt;
        let roles: Vec<&str> = prompt.messages.iter().map(|message| message["role"].as_str().unwrap()).collect();
        assert_eq!(roles, ["system", "user", "assistant", "tool", "system"]);
        assert_eq!(prompt.messages[2]["tool_calls"][1]["function"]["arguments"], json!({"x": 1}));
        assert_eq!(prompt.tools.unwrap()[0], json!({"type": "function", "function": {"name": "f", "parameters": {}}}));
        assert_eq!(prompt.template_arguments["enable_thinking"], json!(false));
        assert!(prompt.parsed);
    }

    #[test]
    fn wrong_bodies_are_refused_by_name() {
        for (extra, param) in [
            (json!({"input": null}), "input"),
            (json!({"input": []}), "input"),
            (json!({"input": 5}), "input"),
            (json!({"input": [{"role": "user"}]}), "input[0].content"),
            (json!({"input": [{"content": "x"}]}), "input[0].role"),
            (json!({"input": [{"type": "item_reference", "id": "x"}]}), "input[0].type"),
            (json!({"input": [{"type": "function_call", "call_id": "x", "name": "f"}]}), "input[0].arguments"),
            (json!({"previous_response_id": "resp_1"}), "previous_response_id"),
            (json!({"conversation": "c"}), "conversation"),
            (json!({"background": true}), "background"),
            (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
            (json!({"tools": [{"type": "function"}]}), "tools[0].name"),
            (json!({"tool_choice": "required", "tools": [{"type": "function", "name": "f"}]}), "tool_choice"),
            (json!({"text": {"format": {"type": "json_object"}}}), "text.format"),
            (json!({"max_output_tokens": 0}), "max_output_tokens"),
            (json!({"reasoning": {"effort": "huge"}}), "reasoning_effort"),
            (json!({"truncation": "some"}), "truncation"),
            (json!({"metadata": "x"}), "metadata"),
        ] {
            let mut body = json!({"input": "x"});
            body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
            match read_all(&body) {
                Err(ApiError::Invalid { param: Some(found), .. }) => assert_eq!(found, param, "{body}"),
                other => panic!("{body}: {other:?}"),
            }
        }
        read_all(&json!({"input": "x", "background": false, "store": true, "tools": [], "tool_choice": "auto"})).unwrap();
    }
}
