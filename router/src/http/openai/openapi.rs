//! `GET /openapi.json`: what this API takes and gives. The fields of bodies come from one table; a test holds it against
//! what the code reads.

use axum::response::Response;
use http::StatusCode;
use serde_json::{Map, Value, json};

use super::openapi_fields::{CHAT, COMPLETIONS, FIELDS, RESPONSES};
use crate::http::reply;

/// The route.
pub async fn handle() -> Response {
    reply::json(StatusCode::OK, &document())
}

/// The OpenAPI 3.1 document.
pub fn document() -> Value {
    let tokenize = json!({"type": "object", "properties": {
        "model": or_null(&json!({"type": "string"})),
        "prompt": or_null(&json!({"type": "string"})),
        "content": or_null(&json!({"type": "string"})),
        "messages": or_null(&json!({"type": "array", "minItems": 1, "items": {"type": "object"}})),
        "add_special_tokens": or_null(&json!({"type": "boolean"})),
        "add_special": or_null(&json!({"type": "boolean"})),
        "return_token_strs": or_null(&json!({"type": "boolean"})),
    }});
    let detokenize = json!({"type": "object", "required": ["tokens"], "properties": {
        "model": or_null(&json!({"type": "string"})),
        "tokens": {"type": "array", "items": {"type": "integer", "minimum": 0}},
    }});
    json!({
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": env!("CARGO_PKG_VERSION"),
            "description": "The OpenAI API. Unknown fields are ignored; those that would change the answer and aren't supported are refused by name."},
        "paths": {
            "/v1/chat/completions": {"post": generating("Answers messages", CHAT, &["messages"], "ChatCompletion")},
            "/v1/completions": {"post": generating("Continues prompts", COMPLETIONS, &["prompt"], "Completion")},
            "/v1/responses": {"post": generating("Answers input; nothing is stored", RESPONSES, &["input"], "Response")},
            "/v1/models": {"get": operation("Lists models", None, "ModelList")},
            "/v1/models/{name}": {
                "parameters": [{"name": "name", "in": "path", "required": true, "schema": {"type": "string", "minLength": 1}}],
                "get": operation("Tells of a model", None, "Model"),
            },
            "/tokenize": {"post": operation("Text or messages to token ids", Some(tokenize), "Tokens")},
            "/detokenize": {"post": operation("Token ids to text", Some(detokenize), "Text")},
            "/version": {"get": operation("The server's version", None, "Version")},
        },
        "components": {
            "schemas": schemas(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    })
}

fn or_null(schema: &Value) -> Value {
    json!({"anyOf": [schema, {"type": "null"}]})
}

/// A body of the table's fields.
fn body(route: u8, required: &[&str]) -> Value {
    let mut properties = Map::new();
    for field in FIELDS.iter().filter(|field| field.routes & route != 0) {
        let schema: Value = serde_json::from_str(field.schema).unwrap_or_default();
        let mut schema = if required.contains(&field.name) { schema } else { or_null(&schema) };
        schema["description"] = json!(field.about);
        properties.insert(field.name.to_owned(), schema);
    }
    json!({"type": "object", "required": required, "properties": properties})
}

fn generating(summary: &str, route: u8, required: &[&str], answer: &str) -> Value {
    let mut operation = operation(summary, Some(body(route, required)), answer);
    operation["responses"]["200"]["content"]["text/event-stream"] = json!({"schema": {"type": "string"}});
    operation
}

fn operation(summary: &str, body: Option<Value>, answer: &str) -> Value {
    let content = |name: &str| json!({"application/json": {"schema": {"$ref": format!("#/components/schemas/{name}")}}});
    let mut operation = json!({"summary": summary, "responses": {
        "200": {"description": "The answer", "content": content(answer)},
        "default": {"description": "Why there is none", "content": content("Error")},
    }});
    if let Some(body) = body {
        operation["requestBody"] = json!({"required": true, "content": {"application/json": {"schema": body}}});
    }
    operation
}

fn object(required: &[&str], properties: Value) -> Value {
    json!({"type": "object", "required": required, "properties": properties})
}

fn schemas() -> Value {
    let string = || json!({"type": "string"});
    let count = || json!({"type": "integer", "minimum": 0});
    let choices = |inner: &str| json!({"type": "array", "items": object(&["index", inner, "finish_reason"], json!({"index": count()}))});
    let head = |name: &str, choices: Value| {
        object(
            &["id", "object", "created", "model", "choices", "usage"],
            json!({"id": string(), "object": {"const": name}, "created": count(), "model": string(), "choices": choices,
                "usage": {"$ref": "#/components/schemas/Usage"}}),
        )
    };
    let model = object(&["id", "object", "created", "owned_by"], json!({"id": string(), "object": {"const": "model"}, "created": count()}));
    json!({
        "Error": object(&["error"], json!({"error": object(&["message", "type", "param", "code"], json!({
            "message": string(), "type": string(), "param": {"type": ["string", "null"]}, "code": string()}))})),
        "Usage": object(&["prompt_tokens", "completion_tokens", "total_tokens"],
            json!({"prompt_tokens": count(), "completion_tokens": count(), "total_tokens": count()})),
        "ChatCompletion": head("chat.completion", choices("message")),
        "Completion": head("text_completion", choices("text")),
        "Response": object(&["id", "object", "created_at", "model", "status", "output", "usage"], json!({
            "id": string(), "object": {"const": "response"}, "created_at": count(), "model": string(),
            "status": {"enum": ["completed", "incomplete"]}, "output": {"type": "array", "items": {"type": "object"}}})),
        "ModelList": object(&["object", "data"], json!({"object": {"const": "list"},
            "data": {"type": "array", "items": {"$ref": "#/components/schemas/Model"}}})),
        "Model": model,
        "Tokens": object(&["count", "max_model_len", "tokens"],
            json!({"count": count(), "max_model_len": count(), "tokens": {"type": "array", "items": count()}})),
        "Text": object(&["prompt"], json!({"prompt": string()})),
        "Version": object(&["version"], json!({"version": string()})),
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::error::ApiError;
    use crate::http::{
        fields::SEEN,
        openai::{chat, completions, parameters::REFUSED, responses},
    };

    /// Every field that a route reads is described or refused, and every one described is read.
    #[test]
    fn the_description_is_true() {
        let messages = json!([{"role": "user", "content": "x"}]);
        type Read = fn(&Value) -> Result<(), ApiError>;
        for (route, path, read, body) in [
            (COMPLETIONS, "/v1/completions", completions::read_all as Read, json!({"prompt": "x"})),
            (CHAT, "/v1/chat/completions", chat::read_all, json!({"messages": messages})),
            (RESPONSES, "/v1/responses", responses::read_all, json!({"input": "x"})),
        ] {
            SEEN.take();
            read(&body).unwrap();
            let mut read = SEEN.take();
            for (refused, _) in REFUSED {
                assert!(read.remove(refused), "{refused}");
            }
            // The body that a response's is turned into is read as a chat's.
            if route == RESPONSES {
                let inner = ["messages", "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"];
                for inner in inner.iter().chain(&["documents", "reasoning_effort"]) {
                    assert!(read.remove(*inner), "{inner}");
                }
            }
            let schema = &document()["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"];
            let described: BTreeSet<String> = schema["properties"].as_object().unwrap().keys().cloned().collect();
            assert_eq!(described, read, "{path}");
        }
    }

    #[test]
    fn every_schema_is_json_and_every_reference_leads_somewhere() {
        for field in &FIELDS {
            assert!(serde_json::from_str::<Value>(field.schema).is_ok(), "{}", field.name);
        }
        let document = document();
        let text = document.to_string();
        for (at, _) in text.match_indices("\"#/components/schemas/") {
            let name = text[at + 1..].split('"').next().unwrap();
            assert!(document.pointer(&name[1..]).is_some(), "{name}");
        }
    }
}
