//! What is refused, and how.

use http::Request;
use quire_router::config::FaceConfig;
use serde_json::{Value, json};
use tonic::Status;

use crate::site::{Behaviour, Site};

/// Status and field of each wrong request; the next right one is answered.
#[tokio::test]
async fn wrong_requests_name_their_field() {
    let site = Site::start().await;
    let chat = |extra: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "x"}]});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        ("/v1/chat/completions", body)
    };
    let text = |extra: Value| {
        let mut body = json!({"prompt": "x"});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        ("/v1/completions", body)
    };
    let stream = |extra: Value| {
        let (path, mut body) = text(extra);
        body["stream"] = json!(true);
        (path, body)
    };
    for ((path, body), status, param) in [
        (text(json!({"prompt": null})), 400, "prompt"),
        (text(json!({"prompt": ""})), 400, "prompt"),
        (text(json!({"prompt": []})), 400, "prompt"),
        (text(json!({"prompt": [999_999]})), 400, "prompt"),
        (text(json!({"prompt": [-1]})), 400, "prompt[0]"),
        (text(json!({"prompt": [[-1]]})), 400, "prompt[0][0]"),
        (text(json!({"prompt": vec!["x"; 1025]})), 400, "prompt"),
        (text(json!({"max_tokens": 0})), 400, "max_tokens"),
        (text(json!({"max_tokens": 300})), 400, "max_tokens"),
        (text(json!({"prompt": vec![65; 256]})), 400, "prompt"),
        (text(json!({"suffix": "x"})), 400, "suffix"),
        (text(json!({"logprobs": 21})), 400, "logprobs"),
        (stream(json!({"logprobs": 21})), 400, "logprobs"),
        (stream(json!({"prompt_logprobs": 1})), 400, "prompt_logprobs"),
        (text(json!({"prompt_logprobs": -2})), 400, "prompt_logprobs"),
        (text(json!({"stream_options": {}})), 400, "stream_options"),
        (text(json!({"temperature": 2.1})), 400, "temperature"),
        (text(json!({"top_p": 0})), 400, "top_p"),
        (text(json!({"top_k": -2})), 400, "top_k"),
        (text(json!({"n": 0})), 400, "n"),
        (text(json!({"stop": ""})), 400, "stop"),
        (text(json!({"stop": ["a", ""]})), 400, "stop"),
        (text(json!({"logit_bias": {"512": 1}})), 400, "logit_bias"),
        (text(json!({"logit_bias": {"x": 1}})), 400, "logit_bias"),
        (text(json!({"min_tokens": 5, "max_tokens": 4})), 400, "min_tokens"),
        (text(json!({"model": "other"})), 404, "model"),
        (stream(json!({"model": "other"})), 404, "model"),
        (chat(json!({"model": 5})), 400, "model"),
        (chat(json!({"messages": []})), 400, "messages"),
        (chat(json!({"top_logprobs": 2})), 400, "top_logprobs"),
        (chat(json!({"logprobs": 2})), 400, "logprobs"),
        (chat(json!({"tools": []})), 400, "tools"),
        (chat(json!({"tool_choice": "required"})), 400, "tool_choice"),
        (chat(json!({"response_format": {"type": "json_object"}})), 400, "response_format"),
        (("/tokenize", json!({})), 400, "prompt"),
        (("/detokenize", json!({"tokens": ["a"]})), 400, "tokens[0]"),
        (("/detokenize", json!({"tokens": [600]})), 400, "tokens"),
    ] {
        let answer = site.post(path, &body).await;
        let error = answer.json()["error"].clone();
        assert_eq!((answer.status, error["param"].as_str()), (status, Some(param)), "{path} {body}: {error}");
        assert_eq!(error["type"], "invalid_request_error");
        assert!(error["code"].is_string() && error["message"].is_string(), "{error}");
    }
    site.ask("/v1/completions", json!({"prompt": "x", "made_up": {"x": 1}, "seed": i64::MAX, "temperature": 0.001})).await;
    assert_eq!(site.fake.requests.lock().len(), 1, "nothing wrong reached the worker");
}

#[tokio::test]
async fn what_is_no_request_is_refused_in_the_same_form() {
    let site = Site::with("tiny", FaceConfig { max_body_bytes: 1000, ..FaceConfig::default() }, 256).await;
    let json_post = || Request::post("/").header("content-type", "application/json");
    for (name, answer, status) in [
        ("malformed", site.send(json_post(), "/v1/completions", "{\"prompt\": ").await, 400),
        ("NaN", site.send(json_post(), "/v1/completions", "{\"prompt\": \"x\", \"temperature\": NaN}").await, 400),
        ("no object", site.send(json_post(), "/v1/completions", "[]").await, 400),
        ("empty", site.send(json_post(), "/v1/completions", "").await, 400),
        ("text", site.send(Request::post("/").header("content-type", "text/plain"), "/v1/completions", "{}").await, 415),
        ("large", site.send(json_post(), "/v1/completions", vec![b' '; 1001]).await, 413),
        ("method", site.get("/v1/completions").await, 405),
        ("route", site.get("/v2/none").await, 404),
        ("deadline", site.send(json_post().header("x-request-timeout-ms", "soon"), "/v1/completions", "{}").await, 400),
    ] {
        assert_eq!(answer.status, status, "{name}");
        assert!(answer.json()["error"]["message"].is_string(), "{name}");
        assert_eq!(answer.headers.contains_key("allow"), status == 405, "{name}");
    }
    let just_under = format!("{{\"prompt\": \"x\"{}}}", " ".repeat(1000 - 15));
    assert_eq!(site.send(json_post(), "/v1/completions", just_under).await.status, 200);
    assert_eq!(site.send(Request::post("/"), "/v1/completions", "{\"prompt\": \"x\"}").await.status, 200, "no content type");
}

#[tokio::test]
async fn a_workers_refusal_is_a_status_even_for_a_stream() {
    let site = Site::start().await;
    for (status, expected) in
        [(Status::resource_exhausted("full"), 429), (Status::deadline_exceeded("late"), 408), (Status::internal("broken"), 500)]
    {
        site.behave(Behaviour::Refuse(status));
        for stream in [false, true] {
            let answer = site.post("/v1/completions", &json!({"prompt": "x", "stream": stream})).await;
            assert_eq!(answer.status, expected, "{}", answer.json());
            assert_eq!(answer.headers.contains_key("retry-after"), expected == 429);
        }
    }
}
