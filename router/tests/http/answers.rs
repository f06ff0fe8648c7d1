//! What is answered, not streamed.

use serde_json::{Value, json};

use crate::site::{ANSWER, EOS, Site, ids};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

fn user(text: &str) -> Value {
    json!([{"role": "user", "content": text}])
}

#[tokio::test]
async fn a_chat_answer_has_openais_shape() {
    let site = Site::start().await;
    let answer = site.ask(CHAT, json!({"model": "tiny", "messages": user("hi")})).await;
    assert!(answer["id"].as_str().unwrap().starts_with("chatcmpl-"), "{answer}");
    assert_eq!(answer["object"], "chat.completion");
    assert_eq!(answer["model"], "tiny");
    assert!(answer["created"].as_u64().unwrap() > 1_700_000_000);
    assert!(answer["system_fingerprint"].as_str().unwrap().starts_with("fp_"));
    let choice = &answer["choices"][0];
    assert_eq!(choice["message"], json!({"role": "assistant", "content": ANSWER, "refusal": null}));
    assert_eq!((&choice["index"], &choice["finish_reason"], &choice["stop_reason"]), (&json!(0), &json!("stop"), &Value::Null));
    assert_eq!(choice["logprobs"], Value::Null);
    let prompt = ids("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n").len();
    let sent = site.fake.requests.lock()[0].prompt_ids.len() as u64;
    let generated = ids(ANSWER).len() as u64 + 1;
    assert!(sent > 2 && sent < prompt as u64, "special tokens are single ids: {sent}");
    assert_eq!(
        answer["usage"],
        json!({"prompt_tokens": sent, "completion_tokens": generated, "total_tokens": sent + generated,
            "prompt_tokens_details": {"cached_tokens": 2}, "completion_tokens_details": {"reasoning_tokens": 0}})
    );
}

#[tokio::test]
async fn a_completion_stops_at_max_tokens() {
    let site = Site::start().await;
    let answer = site.ask(TEXT, json!({"prompt": "say", "max_tokens": 5, "temperature": 0})).await;
    assert!(answer["id"].as_str().unwrap().starts_with("cmpl-"));
    assert_eq!(answer["object"], "text_completion");
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(answer["usage"]["completion_tokens"], 5);
    let usage = &answer["usage"];
    assert_eq!(usage["total_tokens"].as_u64(), Some(usage["prompt_tokens"].as_u64().unwrap() + 5));
    // Sixteen, if the client doesn't say.
    site.ask(TEXT, json!({"prompt": "say"})).await;
    assert_eq!(site.fake.requests.lock()[1].stopping.clone().unwrap().max_tokens, 16);
    site.ask(CHAT, json!({"messages": user("x"), "max_tokens": 3, "max_completion_tokens": 4})).await;
    assert_eq!(site.fake.requests.lock()[2].stopping.clone().unwrap().max_tokens, 4, "the newer name wins");
}

#[tokio::test]
async fn prompts_come_as_lists_and_choices_are_numbered_through() {
    let site = Site::start().await;
    for prompt in [json!(["a b", "a b"]), json!([ids("a b"), ids("a b")])] {
        let answer = site.ask(TEXT, json!({"prompt": prompt, "n": 2, "max_tokens": 3})).await;
        let choices = answer["choices"].as_array().unwrap();
        assert_eq!(choices.iter().map(|choice| choice["index"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 1, 2, 3]);
        assert!(choices.iter().all(|choice| choice["text"] == choices[0]["text"]), "{answer}");
        assert_eq!(answer["usage"]["completion_tokens"], 12);
    }
}

#[tokio::test]
async fn echo_puts_the_prompt_before_the_answer() {
    let site = Site::start().await;
    let tail = site.ask(TEXT, json!({"prompt": "Once", "max_tokens": 4})).await["choices"][0]["text"].as_str().unwrap().to_owned();
    for prompt in [json!("Once"), json!(ids("Once"))] {
        let answer = site.ask(TEXT, json!({"prompt": prompt, "max_tokens": 4, "echo": true})).await;
        assert_eq!(answer["choices"][0]["text"], format!("Once{tail}"), "{prompt}");
    }
    let prompt = ids("Once upon");
    let answer = site.ask(TEXT, json!({"prompt": prompt, "max_tokens": 2, "echo": true, "logprobs": 1})).await;
    let logprobs = &answer["choices"][0]["logprobs"];
    for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(logprobs[list].as_array().unwrap().len(), prompt.len() + 2, "{list}");
    }
    assert_eq!(logprobs["token_logprobs"][0], Value::Null);
    assert_eq!(logprobs["text_offset"][prompt.len()], "Once upon".len());
}

#[tokio::test]
async fn echo_alone_generates_nothing() {
    let site = Site::start().await;
    let prompt = ids("Once upon");
    let body = json!({"prompt": prompt, "max_tokens": 0, "echo": true, "logprobs": 0});
    let answer = site.ask(TEXT, body.clone()).await;
    let choice = &answer["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!("Once upon"), &json!("length")));
    assert_eq!(choice["logprobs"]["tokens"].as_array().unwrap().len(), prompt.len());
    assert_eq!(answer["usage"]["completion_tokens"], 0);
    let mut streamed = body;
    streamed["stream"] = json!(true);
    let chunks = site.stream(TEXT, streamed).await;
    assert_eq!(chunks.len(), 2, "{chunks:?}");
    assert_eq!(chunks[0]["choices"][0]["text"], "Once upon");
    assert_eq!(chunks[1]["choices"][0]["finish_reason"], "length");
}

#[tokio::test]
async fn logprobs_have_the_shape_of_their_endpoint() {
    let site = Site::start().await;
    let answer = site.ask(CHAT, json!({"messages": user("x"), "logprobs": true, "top_logprobs": 3})).await;
    let content = answer["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(content.len(), ids(ANSWER).len());
    let bytes: Vec<u8> =
        content.iter().flat_map(|token| token["bytes"].as_array().unwrap()).map(|byte| byte.as_u64().unwrap() as u8).collect();
    assert_eq!(String::from_utf8(bytes).unwrap(), ANSWER);
    assert!(content.iter().all(|token| token["top_logprobs"].as_array().unwrap().len() == 3 && token["logprob"] == -0.5));
    let answer = site.ask(CHAT, json!({"messages": user("x"), "logprobs": true, "top_logprobs": 0})).await;
    assert_eq!(answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"], json!([]));

    for (asked, entries) in [(0, 1..=1), (5, 5..=6)] {
        let answer = site.ask(TEXT, json!({"prompt": "x", "logprobs": asked, "max_tokens": 4})).await;
        let logprobs = &answer["choices"][0]["logprobs"];
        assert_eq!(logprobs["tokens"].as_array().unwrap().len(), 4);
        let top = logprobs["top_logprobs"].as_array().unwrap();
        assert!(top.iter().all(|top| entries.contains(&top.as_object().unwrap().len())), "{asked}: {logprobs}");
    }
    let named = site.ask(TEXT, json!({"prompt": "x", "logprobs": 0, "max_tokens": 1, "return_tokens_as_token_ids": true})).await;
    assert_eq!(named["choices"][0]["logprobs"]["tokens"][0], format!("token_id:{}", ids(ANSWER)[0]));
}

#[tokio::test]
async fn token_ids_and_prompt_logprobs_are_there_when_asked_for() {
    let site = Site::start().await;
    let prompt = ids("Once upon");
    let answer = site.ask(TEXT, json!({"prompt": prompt, "return_token_ids": true, "prompt_logprobs": 1, "max_tokens": 100})).await;
    let choice = &answer["choices"][0];
    assert_eq!((&choice["prompt_token_ids"], &choice["token_ids"]), (&json!(prompt), &json!(ids(ANSWER))));
    let entries = choice["prompt_logprobs"].as_array().unwrap();
    assert_eq!((entries.len(), &entries[0]), (prompt.len(), &Value::Null));
    assert_eq!(entries[1][prompt[1].to_string()]["rank"], 1);
    let answer = site.ask(CHAT, json!({"messages": user("x"), "return_token_ids": true})).await;
    assert_eq!(answer["choices"][0]["token_ids"], json!(ids(ANSWER)));
    assert_eq!(answer["prompt_token_ids"], json!(site.fake.requests.lock()[1].prompt_ids));
}

#[tokio::test]
async fn stops_end_the_answer_and_say_which() {
    let site = Site::start().await;
    for (body, text, reason) in [
        (json!({"stop": "rld"}), "Hello, w\u{f6}", json!("rld")),
        (json!({"stop": ["Bye", "rld"]}), "Hello, w\u{f6}", json!("rld")),
        (json!({"stop": "rld", "include_stop_str_in_output": true}), "Hello, w\u{f6}rld", json!("rld")),
        (json!({}), ANSWER, Value::Null),
    ] {
        let mut whole = json!({"prompt": "x", "max_tokens": 100});
        whole.as_object_mut().unwrap().extend(body.as_object().unwrap().clone());
        let answer = site.ask(TEXT, whole.clone()).await;
        let choice = &answer["choices"][0];
        assert_eq!((choice["text"].as_str(), &choice["finish_reason"], &choice["stop_reason"]), (Some(text), &json!("stop"), &reason));
        whole["stream"] = json!(true);
        let joined: String = site.stream(TEXT, whole).await.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect();
        assert_eq!(joined, text, "nothing of a stop string is streamed");
    }
    let third = ids(ANSWER)[2];
    let answer = site.ask(TEXT, json!({"prompt": "x", "stop_token_ids": [EOS, third], "max_tokens": 100})).await;
    assert_eq!(answer["choices"][0]["stop_reason"], third);
}

#[tokio::test]
async fn tokenizing_there_and_back_gives_the_same() {
    let site = Site::start().await;
    let text = "Hello w\u{f6}rld \u{1f600}";
    let answer = site.ask("/tokenize", json!({"prompt": text, "add_special_tokens": false, "return_token_strs": true})).await;
    assert_eq!(answer["tokens"], json!(ids(text)));
    assert_eq!(answer["count"], ids(text).len());
    assert_eq!(answer["max_model_len"], 256);
    assert_eq!(answer["token_strs"].as_array().unwrap().len(), ids(text).len());
    let back = site.ask("/detokenize", json!({"tokens": answer["tokens"]})).await;
    assert_eq!(back["prompt"], text);
    assert_eq!(site.ask("/detokenize", json!({"tokens": []})).await["prompt"], "");
    let chat = site.ask("/tokenize", json!({"messages": user("hi")})).await;
    assert_eq!(chat["token_strs"], Value::Null);
    let rendered = site.ask("/detokenize", json!({"tokens": chat["tokens"]})).await;
    assert_eq!(rendered["prompt"], "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n");
    let other = site.ask("/tokenize", json!({"content": text})).await;
    assert_eq!(other["tokens"], answer["tokens"], "as llama.cpp's clients ask");
}

#[tokio::test]
async fn models_are_listed_by_every_name() {
    let site = Site::start().await;
    let list = site.get("/v1/models").await.json();
    assert_eq!(list["object"], "list");
    let names: Vec<&str> = list["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap()).collect();
    assert_eq!(names, ["tiny", "tiny:alias"]);
    assert_eq!((&list["data"][0]["object"], &list["data"][0]["max_model_len"]), (&json!("model"), &json!(256)));
    assert_eq!(site.get("/v1/models/tiny:alias").await.json()["root"], "tiny");
    assert_eq!(site.get("/v1/models/org/other").await.status, 404);
    let answer = site.ask(TEXT, json!({"model": "tiny:alias", "prompt": "x"})).await;
    assert_eq!(answer["model"], "tiny");
}
