//! Calls and thoughts in chats: what is streamed is what is answered, in every format.

use serde_json::{Value, json};

use crate::cases::{CHAT, chat, refused, streamed, with};
use crate::site::{Behaviour, Site, ids};

fn tools() -> Value {
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    json!([
        {"type": "function", "function": {"name": "get_weather", "parameters": parameters}},
        {"type": "function", "function": {"name": "now"}},
    ])
}

/// A message put together from chunks, as clients do it.
fn assembled(chunks: &[Value]) -> (Value, Value) {
    let mut message = json!({"content": "", "reasoning_content": "", "tool_calls": []});
    let mut reason = Value::Null;
    for chunk in chunks {
        let choice = &chunk["choices"][0];
        for field in ["content", "reasoning_content"] {
            let more = choice["delta"][field].as_str().unwrap_or_default();
            message[field] = json!(message[field].as_str().unwrap().to_owned() + more);
        }
        for call in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
            let index = call["index"].as_u64().unwrap() as usize;
            let calls = message["tool_calls"].as_array_mut().unwrap();
            if index == calls.len() {
                assert!(call["id"].as_str().is_some_and(|id| !id.is_empty()) && call["type"] == "function", "{call}");
                calls.push(call.clone());
            } else {
                assert!(call.get("id").is_none() && call["function"].get("name").is_none(), "id and name come once: {call}");
                let whole = calls[index]["function"]["arguments"].as_str().unwrap().to_owned();
                calls[index]["function"]["arguments"] = json!(whole + call["function"]["arguments"].as_str().unwrap());
            }
        }
        if !choice["finish_reason"].is_null() {
            reason = choice["finish_reason"].clone();
        }
    }
    (message, reason)
}

fn without_ids(calls: &Value) -> Vec<(String, Value)> {
    let call = |call: &Value| {
        let function = &call["function"];
        (function["name"].as_str().unwrap().to_owned(), serde_json::from_str(function["arguments"].as_str().unwrap()).unwrap())
    };
    calls.as_array().into_iter().flatten().map(call).collect()
}

/// Markers in the template, what the model says, content, thoughts, calls.
type Case = (&'static str, &'static str, &'static str, &'static str, Vec<(&'static str, Value)>);

fn examples() -> Vec<Case> {
    vec![
        (
            "<tool_call> </think>",
            "<think>\nWhich city? 日本 🗼\n</think>\n\nI look.\n<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"東京 x\u{301} 🗼\"}}\n</tool_call>",
            "I look.",
            "Which city? 日本 🗼",
            vec![("now", json!({})), ("get_weather", json!({"city": "東京 x\u{301} 🗼"}))],
        ),
        ("<|start_header_id|>", "{\"name\": \"now\", \"parameters\": {}}", "", "", vec![("now", json!({}))]),
        (
            "[TOOL_CALLS]",
            "So[TOOL_CALLS][{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Ulm\"}}]",
            "So",
            "",
            vec![("get_weather", json!({"city": "Ulm"}))],
        ),
        (
            "<|channel|> <|message|>",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{\"city\": \"Ulm\"}<|call|>",
            "",
            "Hm.",
            vec![("get_weather", json!({"city": "Ulm"}))],
        ),
        ("none at all", "Plain text, with {\"name\": \"now\"} in it. ", "Plain text, with {\"name\": \"now\"} in it. ", "", vec![]),
    ]
}

#[tokio::test]
async fn case_81_streamed_calls_are_those_of_the_answer() {
    for (markers, said, content, reasoning, calls) in examples() {
        let site = Site::showing(markers).await;
        let expected: Vec<(String, Value)> = calls.into_iter().map(|(name, arguments)| (name.to_owned(), arguments)).collect();
        let body = chat(json!({"tools": tools(), "logprobs": true, "return_token_ids": true}));
        for behaviour in [Behaviour::Say(ids(said)), Behaviour::Slowly(ids(said))] {
            site.behave(behaviour);
            let answer = site.ask(CHAT, body.clone()).await;
            let choice = &answer["choices"][0];
            let message = &choice["message"];
            assert_eq!(message["content"].as_str().unwrap_or_default(), content, "{said}");
            assert_eq!(message["reasoning_content"].as_str().unwrap_or_default(), reasoning);
            assert_eq!(without_ids(&message["tool_calls"]), expected);
            let reason = if expected.is_empty() { "stop" } else { "tool_calls" };
            assert_eq!(choice["finish_reason"], reason);

            let chunks = site.stream(CHAT, streamed(body.clone())).await;
            let (joined, ended) = assembled(&chunks);
            assert_eq!((&joined["content"], &joined["reasoning_content"]), (&json!(content), &json!(reasoning)));
            let arguments =
                |calls: &Value| -> Vec<Value> { calls.as_array().into_iter().flatten().map(|call| call["function"].clone()).collect() };
            assert_eq!(arguments(&joined["tool_calls"]), arguments(&message["tool_calls"]), "to the letter");
            assert_eq!(ended, reason);
            let listed = |path: &str| -> Vec<Value> {
                chunks.iter().flat_map(|chunk| chunk.pointer(path).and_then(Value::as_array).cloned().unwrap_or_default()).collect()
            };
            assert_eq!(json!(listed("/choices/0/token_ids")), choice["token_ids"]);
            assert_eq!(json!(listed("/choices/0/logprobs/content")), choice["logprobs"]["content"]);
        }
    }
}

#[tokio::test]
async fn calls_are_only_looked_for_where_there_are_tools() {
    let site = Site::showing("<tool_call>").await;
    let said = "<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>";
    site.behave(Behaviour::Say(ids(said)));
    for body in [chat(json!({})), chat(json!({"tools": tools(), "tool_choice": "none"}))] {
        let choice = site.ask(CHAT, body).await["choices"][0].clone();
        assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&json!(said), &json!("stop")));
    }
}

#[tokio::test]
async fn only_the_first_call_is_shown_when_asked_for() {
    let site = Site::showing("<tool_call>").await;
    let call = "<tool_call>{\"name\": \"now\", \"arguments\": {}}</tool_call>";
    site.behave(Behaviour::Say(ids(&call.repeat(2))));
    let body = chat(json!({"tools": tools(), "parallel_tool_calls": false}));
    assert_eq!(site.ask(CHAT, body.clone()).await["choices"][0]["message"]["tool_calls"].as_array().unwrap().len(), 1);
    assert_eq!(assembled(&site.stream(CHAT, streamed(body)).await).0["tool_calls"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn a_call_cut_by_length_ends_by_length() {
    let site = Site::showing("<tool_call>").await;
    site.behave(Behaviour::Say(ids("<tool_call>{\"name\": \"now\", \"arguments\": {}}</tool_call>")));
    for most in [1, 5, 20] {
        let choice = site.ask(CHAT, chat(json!({"tools": tools(), "max_tokens": most}))).await["choices"][0].clone();
        assert_eq!(choice["finish_reason"], "length");
        assert!(choice["message"].get("tool_calls").is_none() || most == 20, "{choice}");
    }
}

#[tokio::test]
async fn case_86_thoughts_are_left_out_on_request() {
    let site = Site::showing("</think>").await;
    site.behave(Behaviour::Say(ids("<think>Secret.</think>Open.")));
    let shown = site.ask(CHAT, chat(json!({}))).await;
    assert_eq!(shown["choices"][0]["message"]["reasoning_content"], "Secret.");
    assert!(shown["usage"].get("completion_tokens_details").is_none(), "not counted is not zero");
    let hidden = chat(json!({"include_reasoning": false}));
    let answer = site.ask(CHAT, hidden.clone()).await;
    assert_eq!((&answer["choices"][0]["message"]["content"], answer.to_string().contains("Secret")), (&json!("Open."), false));
    let chunks = site.stream(CHAT, streamed(hidden)).await;
    assert_eq!(assembled(&chunks).0["content"], "Open.");
    assert!(!json!(chunks).to_string().contains("Secret"));
    refused(&site, CHAT, chat(json!({"thinking_token_budget": 10})), "thinking_token_budget").await;
    refused(&site, CHAT, chat(json!({"reasoning_effort": "huge"})), "reasoning_effort").await;
    for effort in ["none", "low", "high"] {
        site.ask(CHAT, chat(json!({"reasoning_effort": effort}))).await;
    }
}

#[tokio::test]
async fn case_77_echo_of_a_continued_message() {
    let site = Site::start().await;
    let messages = json!([{"role": "user", "content": "x"}, {"role": "assistant", "content": "Well, "}]);
    let body = with(chat(json!({"messages": messages})), json!({"continue_final_message": true, "echo": true}));
    let answer = site.ask(CHAT, body.clone()).await;
    let content = answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    assert!(content.starts_with("Well, Hello"), "{content}");
    assert_eq!(assembled(&site.stream(CHAT, streamed(body)).await).0["content"], content);
    let prompt = site.ask("/detokenize", json!({"tokens": site.fake.requests.lock()[0].prompt_ids.clone()})).await;
    assert!(prompt["prompt"].as_str().unwrap().ends_with("<|im_start|>assistant\nWell, "), "{prompt}");
}
