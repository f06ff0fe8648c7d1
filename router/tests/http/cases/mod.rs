//! The black-box cases that users of vLLM rely on, by their numbers in its study. Those about what a model says are tested
//! here as what the worker is asked for, and over a real model end to end. `docs/openai.md` lists which are different.

mod chat;
mod completions;
mod limits;
mod operations;

use serde_json::{Value, json};

use crate::site::Site;

pub const CHAT: &str = "/v1/chat/completions";
pub const TEXT: &str = "/v1/completions";

/// A completions body: a prompt, and what a case adds.
pub fn text(extra: Value) -> Value {
    with(json!({"prompt": "x", "max_tokens": 100}), extra)
}

/// A chat body.
pub fn chat(extra: Value) -> Value {
    with(json!({"messages": [{"role": "user", "content": "x"}]}), extra)
}

pub fn with(mut body: Value, extra: Value) -> Value {
    let Value::Object(extra) = extra else { panic!("{extra}") };
    body.as_object_mut().unwrap().extend(extra);
    body
}

pub fn streamed(body: Value) -> Value {
    with(body, json!({"stream": true}))
}

/// A wrong request is a 400 that names `param`, and says so in OpenAI's form.
pub async fn refused(site: &Site, path: &str, body: Value, param: &str) {
    let answer = site.post(path, &body).await;
    let error = answer.json()["error"].clone();
    assert_eq!((answer.status, error["param"].as_str()), (400, Some(param)), "{body}: {error}");
    assert_eq!(error["type"], "invalid_request_error");
    assert!(error["message"].as_str().is_some_and(|message| message.contains(param.split(['[', '.']).next().unwrap())), "{error}");
}

/// Sampling parameters of the last request that reached the worker.
pub fn sampling(site: &Site) -> quire_proto::worker::v1::Sampling {
    site.fake.requests.lock().last().unwrap().sampling.clone().unwrap()
}

pub fn stopping(site: &Site) -> quire_proto::worker::v1::Stopping {
    site.fake.requests.lock().last().unwrap().stopping.clone().unwrap()
}

/// Text of the only choice, joined from chunks.
pub fn joined(chunks: &[Value]) -> String {
    let piece = |chunk: &Value| {
        let choice = &chunk["choices"][0];
        choice["text"].as_str().or(choice["delta"]["content"].as_str()).unwrap_or_default().to_owned()
    };
    chunks.iter().map(piece).collect()
}
