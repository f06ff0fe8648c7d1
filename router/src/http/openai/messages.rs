//! Chat messages and tools as clients send them, made ready for a chat template: contents become strings.

use serde_json::{Map, Value};

use crate::{
    error::ApiError,
    http::fields::{Fields, wrong},
    request::ChatPrompt,
};

/// Reads `messages`, `tools`, `tool_choice` and what the template may ask for.
pub fn chat_prompt(body: &Fields<'_>) -> Result<ChatPrompt, ApiError> {
    let messages = messages(body)?;
    if body.get("chat_template").is_some() {
        let message = "`chat_template` cannot be given with a request; the model's own is used.";
        return Err(ApiError::invalid("chat_template", message));
    }
    let template_arguments = match body.object("chat_template_kwargs")? {
        Some(arguments) => arguments.map().clone(),
        None => Map::new(),
    };
    Ok(ChatPrompt {
        messages,
        tools: tools(body)?,
        documents: documents(body)?,
        add_generation_prompt: body.boolean("add_generation_prompt")?,
        continue_final_message: body.boolean("continue_final_message")?.unwrap_or(false),
        parsed: false,
        template_arguments,
    })
}

fn documents(body: &Fields<'_>) -> Result<Option<Value>, ApiError> {
    let Some(documents) = body.list("documents")? else { return Ok(None) };
    for (index, document) in documents.iter().enumerate() {
        Fields::at(document, format!("documents[{index}]"))?;
    }
    Ok(Some(Value::Array(documents.to_vec())))
}

fn messages(body: &Fields<'_>) -> Result<Vec<Value>, ApiError> {
    let list = body.list("messages")?.ok_or_else(|| ApiError::invalid("messages", "`messages` is missing."))?;
    if list.is_empty() {
        return Err(ApiError::invalid("messages", "`messages` must hold at least one message."));
    }
    list.iter().enumerate().map(|(index, value)| message(value, &format!("messages[{index}]"))).collect()
}

fn message(value: &Value, path: &str) -> Result<Value, ApiError> {
    let fields = Fields::at(value, path.to_owned())?;
    let role_path = fields.path("role");
    let role = fields.string("role")?.filter(|role| !role.is_empty());
    let role = role.ok_or_else(|| ApiError::invalid(&role_path, format!("`{role_path}` is missing.")))?;
    let calls = fields.list("tool_calls")?;
    let content_path = fields.path("content");
    let content = match fields.get("content") {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => join_parts(parts, &content_path)?,
        Some(other) => return Err(wrong(&content_path, "a string or an array of text parts", other)),
        // An assistant's turn may consist of tool calls alone.
        None if role == "assistant" => String::new(),
        None => return Err(ApiError::invalid(&content_path, format!("`{content_path}` is missing."))),
    };
    let mut message = fields.map().clone();
    message.insert("content".to_owned(), Value::String(content));
    match calls {
        Some(calls) => {
            message.insert("tool_calls".to_owned(), Value::Array(calls.iter().map(open_arguments).collect()));
        }
        // Templates ask whether it is defined.
        None => {
            message.shift_remove("tool_calls");
        }
    }
    Ok(Value::Object(message))
}

/// Text parts, one a line, as vLLM and llama.cpp join them.
pub fn join_parts(parts: &[Value], path: &str) -> Result<String, ApiError> {
    let mut texts = Vec::with_capacity(parts.len());
    for (index, part) in parts.iter().enumerate() {
        let path = format!("{path}[{index}]");
        let fields = Fields::at(part, path.clone())?;
        let (kind, field) = match fields.string("type")? {
            Some("text" | "input_text" | "output_text") => ("text", "text"),
            Some("refusal") => ("refusal", "refusal"),
            Some(kind) => {
                return Err(ApiError::invalid(&path, format!("Content of type `{kind}` is not supported by this model; only text is.")));
            }
            None => return Err(ApiError::invalid(&fields.path("type"), format!("`{path}.type` is missing."))),
        };
        let text = fields.string(field)?;
        texts.push(text.ok_or_else(|| ApiError::invalid(&fields.path(field), format!("A part of type `{kind}` needs `{field}`.")))?);
    }
    Ok(texts.join("\n"))
}

/// Templates iterate over a call's arguments, clients send them as JSON text.
fn open_arguments(call: &Value) -> Value {
    let mut call = call.clone();
    if let Some(arguments) = call.pointer_mut("/function/arguments") {
        let parsed = arguments.as_str().and_then(|text| serde_json::from_str::<Value>(text).ok()).filter(Value::is_object);
        if let Some(parsed) = parsed {
            *arguments = parsed;
        }
    }
    call
}

pub fn tools(body: &Fields<'_>) -> Result<Option<Value>, ApiError> {
    let tools = body.list("tools")?;
    if tools.is_some_and(<[Value]>::is_empty) {
        return Err(ApiError::invalid("tools", "`tools` must hold at least one tool; leave it out otherwise."));
    }
    for (index, tool) in tools.unwrap_or_default().iter().enumerate() {
        let fields = Fields::at(tool, format!("tools[{index}]"))?;
        let function = fields.object("function")?;
        let function = function.ok_or_else(|| ApiError::invalid(&fields.path("function"), "A tool needs `function`."))?;
        if function.string("name")?.is_none_or(str::is_empty) {
            return Err(ApiError::invalid(&function.path("name"), "A function needs `name`."));
        }
    }
    let choice = match body.get("tool_choice") {
        Some(Value::String(choice)) => choice.as_str(),
        Some(Value::Object(_)) => "named",
        Some(other) => return Err(wrong("tool_choice", "a string or an object", other)),
        None => "auto",
    };
    match choice {
        // The model is not to call any, so it isn't told of them.
        "none" => Ok(None),
        "auto" if tools.is_none() && body.get("tool_choice").is_some() => {
            Err(ApiError::invalid("tool_choice", "`tool_choice` needs `tools`."))
        }
        "auto" => Ok(tools.map(|tools| Value::Array(tools.to_vec()))),
        "required" | "named" if tools.is_none() => Err(ApiError::invalid("tool_choice", "`tool_choice` needs `tools`.")),
        "named" if !names(tools).any(|name| named(body) == Some(name)) => {
            Err(ApiError::invalid("tool_choice", "`tool_choice` must name a function of `tools`."))
        }
        "required" | "named" => {
            Err(ApiError::invalid("tool_choice", "Forcing a tool call is not supported yet; `tool_choice` may be `auto` or `none`."))
        }
        other => Err(ApiError::invalid(
            "tool_choice",
            format!("`tool_choice` must be `none`, `auto`, `required` or a named function, not `{other}`."),
        )),
    }
}

/// The function that `tool_choice` names.
fn named<'a>(body: &Fields<'a>) -> Option<&'a str> {
    body.get("tool_choice")?.pointer("/function/name")?.as_str()
}

fn names(tools: Option<&[Value]>) -> impl Iterator<Item = &str> {
    tools.into_iter().flatten().filter_map(|tool| tool.pointer("/function/name")?.as_str())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(body: &Value) -> Result<ChatPrompt, ApiError> {
        chat_prompt(&Fields::root(body).unwrap())
    }

    #[test]
    fn contents_become_strings() {
        let body = json!({"messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
            {"role": "assistant", "content": null, "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"x\":1}"}}]},
            {"role": "assistant", "content": "done", "tool_calls": null},
        ]});
        let prompt = read(&body).unwrap();
        assert_eq!(prompt.messages[0], json!({"role": "user", "content": "a\nb", "name": "Ann"}));
        assert_eq!(prompt.messages[1]["content"], "");
        assert_eq!(prompt.messages[1]["tool_calls"][0]["function"]["arguments"], json!({"x": 1}));
        assert_eq!(prompt.messages[2], json!({"role": "assistant", "content": "done"}));
    }

    #[test]
    fn wrong_messages_and_tools_are_refused_by_name() {
        let user = json!([{"role": "user", "content": "x"}]);
        let tool = json!([{"type": "function", "function": {"name": "f"}}]);
        for (body, param) in [
            (json!({}), "messages"),
            (json!({"messages": []}), "messages"),
            (json!({"messages": "hi"}), "messages"),
            (json!({"messages": ["hi"]}), "messages[0]"),
            (json!({"messages": [{"content": "x"}]}), "messages[0].role"),
            (json!({"messages": [{"role": "user"}]}), "messages[0].content"),
            (json!({"messages": [{"role": "user", "content": 5}]}), "messages[0].content"),
            (
                json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
                "messages[0].content[0]",
            ),
            (json!({"messages": [{"role": "user", "content": [{"type": "text"}]}]}), "messages[0].content[0].text"),
            (json!({"messages": user, "tools": []}), "tools"),
            (json!({"messages": user, "tools": [{}]}), "tools[0].function"),
            (json!({"messages": user, "tools": [{"function": {}}]}), "tools[0].function.name"),
            (json!({"messages": user, "tool_choice": "auto"}), "tool_choice"),
            (json!({"messages": user, "tool_choice": "required"}), "tool_choice"),
            (json!({"messages": user, "tools": tool, "tool_choice": "sometimes"}), "tool_choice"),
            (json!({"messages": user, "tools": tool, "tool_choice": {}}), "tool_choice"),
            (json!({"messages": user, "continue_final_message": 1}), "continue_final_message"),
            (json!({"messages": user, "documents": "x"}), "documents"),
            (json!({"messages": user, "documents": [1]}), "documents[0]"),
            (json!({"messages": user, "chat_template_kwargs": 1}), "chat_template_kwargs"),
        ] {
            match read(&body) {
                Err(ApiError::Invalid { param: Some(found), .. }) => assert_eq!(found, param, "{body}"),
                other => panic!("{body}: {other:?}"),
            }
        }
    }

    #[test]
    fn tools_reach_the_template_unless_none_is_chosen() {
        let mut body = json!({"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": {"name": "f"}}]});
        assert!(read(&body).unwrap().tools.is_some());
        body["tool_choice"] = json!("none");
        assert!(read(&body).unwrap().tools.is_none());
    }
}
