//! Cases 42 to 74: log-probabilities, stops, lengths and sampling.

use quire_proto::worker::v1::Stopping;
use serde_json::{Value, json};

use super::{CHAT, TEXT, chat, joined, refused, sampling, stopping, streamed, text, with};
use crate::site::{ANSWER, Behaviour, Site, ids};

#[tokio::test]
async fn case_42_none_without_asking() {
    let site = Site::start().await;
    assert_eq!(site.ask(TEXT, text(json!({}))).await["choices"][0]["logprobs"], Value::Null);
    assert_eq!(site.ask(CHAT, chat(json!({}))).await["choices"][0]["logprobs"], Value::Null);
}

#[tokio::test]
async fn case_43_44_entries_of_each_position() {
    let site = Site::start().await;
    for (asked, entries) in [(0, 1..=1), (5, 5..=6)] {
        let answer = site.ask(TEXT, text(json!({"logprobs": asked}))).await;
        let top = answer["choices"][0]["logprobs"]["top_logprobs"].as_array().unwrap().clone();
        assert_eq!(top.len(), ids(ANSWER).len());
        assert!(top.iter().all(|top| entries.contains(&top.as_object().unwrap().len())));
    }
}

#[tokio::test]
async fn case_45_more_than_the_limit() {
    let site = Site::start().await;
    refused(&site, TEXT, text(json!({"logprobs": 21})), "logprobs").await;
    refused(&site, TEXT, streamed(text(json!({"logprobs": 21}))), "logprobs").await;
    site.ask(TEXT, text(json!({"logprobs": 20}))).await;
}

#[tokio::test]
async fn case_46_47_top_logprobs_of_a_chat() {
    let site = Site::start().await;
    refused(&site, CHAT, chat(json!({"top_logprobs": 2})), "top_logprobs").await;
    let answer = site.ask(CHAT, chat(json!({"logprobs": true, "top_logprobs": 0}))).await;
    let content = answer["choices"][0]["logprobs"]["content"].as_array().unwrap().clone();
    assert!(content.len() == ids(ANSWER).len() && content.iter().all(|entry| entry["top_logprobs"] == json!([])));
}

#[tokio::test]
async fn case_48_49_of_the_prompt() {
    let site = Site::start().await;
    let answer = site.ask(TEXT, text(json!({"prompt": "Once upon", "prompt_logprobs": 1}))).await;
    let entries = answer["choices"][0]["prompt_logprobs"].as_array().unwrap().clone();
    assert_eq!((entries.len(), &entries[0]), (ids("Once upon").len(), &Value::Null));
    refused(&site, TEXT, streamed(text(json!({"prompt_logprobs": 1}))), "prompt_logprobs").await;
    refused(&site, TEXT, text(json!({"prompt_logprobs": -2})), "prompt_logprobs").await;
    refused(&site, TEXT, text(json!({"prompt_logprobs": "abc"})), "prompt_logprobs").await;
}

/// Not supported, and not ignored.
#[tokio::test]
async fn case_51_logprobs_of_chosen_ids_are_refused() {
    let site = Site::start().await;
    refused(&site, TEXT, text(json!({"logprobs": 1, "logprob_token_ids": [50]})), "logprob_token_ids").await;
}

#[tokio::test]
async fn case_53_tokens_named_by_id() {
    let site = Site::start().await;
    let answer = site.ask(TEXT, text(json!({"logprobs": 0, "return_tokens_as_token_ids": true}))).await;
    assert_eq!(answer["choices"][0]["logprobs"]["tokens"][0], format!("token_id:{}", ids(ANSWER)[0]));
}

#[tokio::test]
async fn case_54_to_58_stop_strings() {
    let site = Site::start().await;
    for (extra, said, reason) in [
        (json!({"stop": "w\u{f6}"}), "Hello, ", json!("w\u{f6}")),
        (json!({"stop": "w\u{f6}", "include_stop_str_in_output": true}), "Hello, w\u{f6}", json!("w\u{f6}")),
        // Over several tokens, and within one.
        (json!({"stop": "lo, w"}), "Hel", json!("lo, w")),
        (json!({"stop": "\u{1f600}!"}), "Hello, w\u{f6}rld ", json!("\u{1f600}!")),
        // Whichever is complete first.
        (json!({"stop": ["Bye", "rld"]}), "Hello, w\u{f6}", json!("rld")),
        (json!({"stop": ["Hello, w\u{f6}rld", "o,"]}), "Hell", json!("o,")),
    ] {
        let answer = site.ask(TEXT, text(extra.clone())).await;
        let choice = &answer["choices"][0];
        assert_eq!((&choice["text"], &choice["finish_reason"], &choice["stop_reason"]), (&json!(said), &json!("stop"), &reason));
        let chunks = site.stream(TEXT, streamed(text(extra))).await;
        assert_eq!((joined(&chunks).as_str(), &chunks.last().unwrap()["choices"][0]["stop_reason"]), (said, &reason));
    }
    refused(&site, TEXT, text(json!({"stop": ""})), "stop").await;
    refused(&site, TEXT, text(json!({"stop": ["a", ""]})), "stop").await;
}

#[tokio::test]
async fn case_59_stop_ids() {
    let site = Site::start().await;
    let said = ids(ANSWER);
    for list in [json!([said[3], said[1]]), json!([said[1], said[3]])] {
        let answer = site.ask(TEXT, text(json!({"stop_token_ids": list, "return_token_ids": true}))).await;
        let choice = &answer["choices"][0];
        assert_eq!((&choice["stop_reason"], &choice["token_ids"]), (&json!(said[1]), &json!([said[0]])));
    }
}

#[tokio::test]
async fn case_60_eos_may_be_ignored() {
    let site = Site::start().await;
    let most = ids(ANSWER).len() + 1;
    let answer = site.ask(TEXT, text(json!({"ignore_eos": true, "max_tokens": most, "skip_special_tokens": false}))).await;
    let choice = &answer["choices"][0];
    assert_eq!((&choice["finish_reason"], &answer["usage"]["completion_tokens"]), (&json!("length"), &json!(most)));
    assert!(choice["text"].as_str().unwrap().starts_with(ANSWER) && choice["text"] != ANSWER, "special tokens are shown when asked for");
    assert!(stopping(&site).ignore_eos);
    assert_eq!(site.ask(TEXT, text(json!({"ignore_eos": true, "max_tokens": most}))).await["choices"][0]["text"], ANSWER);
}

#[tokio::test]
async fn case_61_62_least_lengths() {
    let site = Site::start().await;
    let answer = site.ask(TEXT, text(json!({"min_tokens": 6, "stop": "lo"}))).await;
    assert_eq!(answer["choices"][0]["text"], ANSWER, "a stop string before the least length is text");
    assert_eq!(stopping(&site), Stopping { max_tokens: 100, min_tokens: 6, ..Stopping::default() });
    refused(&site, TEXT, text(json!({"min_tokens": 5, "max_tokens": 4})), "min_tokens").await;
    refused(&site, TEXT, text(json!({"min_tokens": -1})), "min_tokens").await;
}

#[tokio::test]
async fn case_63_64_the_end_of_the_context() {
    let site = Site::start().await;
    refused(&site, TEXT, json!({"prompt": vec![65; 256], "max_tokens": 1}), "prompt").await;
    let answer = site.ask(TEXT, json!({"prompt": vec![65; 255], "max_tokens": 1})).await;
    assert_eq!((&answer["choices"][0]["finish_reason"], &answer["usage"]["completion_tokens"]), (&json!("length"), &json!(1)));
    let answer = site.post(TEXT, &json!({"prompt": vec![65; 250], "max_tokens": 7})).await.json();
    assert_eq!((&answer["error"]["code"], &answer["error"]["param"]), (&json!("context_length_exceeded"), &json!("max_tokens")));
    let long = chat(json!({"messages": [{"role": "user", "content": "a".repeat(100)}]}));
    site.ask(CHAT, long.clone()).await;
    assert_eq!(stopping(&site).max_tokens, 0, "as many as the context holds");
    refused(&site, CHAT, with(long, json!({"max_tokens": 256})), "max_tokens").await;
}

#[tokio::test]
async fn case_65_the_newer_name_wins() {
    let site = Site::start().await;
    site.ask(CHAT, chat(json!({"max_tokens": 3, "max_completion_tokens": 4}))).await;
    assert_eq!(stopping(&site).max_tokens, 4);
}

/// Not supported, and not ignored.
#[tokio::test]
async fn case_66_repetition_detection_is_refused() {
    let site = Site::start().await;
    refused(&site, TEXT, text(json!({"repetition_detection": {"min_count": 2}})), "repetition_detection").await;
}

#[tokio::test]
async fn case_67_characters_stay_whole() {
    let site = Site::start().await;
    let said = "\u{1f468}\u{200d}\u{1f469}\u{200d}\u{1f467} 日本語 x\u{301} \u{1f1eb}\u{1f1f7} 한국어\u{1f600}";
    site.behave(Behaviour::Say(ids(said)));
    let chunks = site.stream(CHAT, streamed(chat(json!({})))).await;
    assert_eq!(joined(&chunks), said);
    assert!(chunks.iter().all(|chunk| !chunk.to_string().contains('\u{fffd}')));
}

#[tokio::test]
async fn case_70_biases() {
    let site = Site::start().await;
    site.ask(TEXT, text(json!({"logit_bias": {"5": 100, "6": -100, "7": 250}}))).await;
    let biases: Vec<(u32, f32)> = sampling(&site).logit_bias.iter().map(|bias| (bias.token_id, bias.bias)).collect();
    assert_eq!(biases, [(5, 100.0), (6, -100.0), (7, 100.0)]);
    let message = |body: Value| {
        let site = &site;
        async move { site.post(TEXT, &body).await.json()["error"]["message"].as_str().unwrap().to_owned() }
    };
    assert!(message(text(json!({"logit_bias": {"512": 1}}))).await.contains("512"));
    refused(&site, TEXT, text(json!({"logit_bias": {"a": 1}})), "logit_bias").await;
    let both = message(text(json!({"logit_bias": {"a": 1, "b": 1}}))).await;
    assert!(both.contains("`a`") && both.contains("`b`"), "{both}");
    refused(&site, TEXT, text(json!({"logit_bias": {"5": "1"}})), "logit_bias.5").await;
}

#[tokio::test]
async fn case_71_to_73_ranges() {
    let site = Site::start().await;
    for (field, wrong) in [
        ("temperature", json!(-0.1)),
        ("temperature", json!(2.1)),
        ("top_p", json!(0)),
        ("top_p", json!(1.1)),
        ("top_k", json!(-2)),
        ("min_p", json!(1.1)),
        ("presence_penalty", json!(2.1)),
        ("frequency_penalty", json!(-2.1)),
        ("repetition_penalty", json!(0)),
    ] {
        refused(&site, TEXT, text(json!({field: wrong})), field).await;
        refused(&site, CHAT, chat(json!({field: wrong})), field).await;
    }
    site.ask(TEXT, text(json!({"temperature": 0.001, "frequency_penalty": 2, "top_k": -1, "repetition_penalty": 1.3}))).await;
    let asked = sampling(&site);
    assert_eq!((asked.temperature, asked.frequency_penalty, asked.top_k, asked.repetition_penalty), (0.01, 2.0, 0, 1.3));
    site.ask(TEXT, text(json!({"top_k": 0}))).await;
    assert_eq!(sampling(&site).top_k, 0);
}

/// What is sampled is the worker's: tested end to end.
#[tokio::test]
async fn case_74_top_k_reaches_the_worker() {
    let site = Site::start().await;
    site.ask(TEXT, text(json!({"top_k": 1, "temperature": 1}))).await;
    assert_eq!((sampling(&site).top_k, sampling(&site).temperature), (1, 1.0));
}
