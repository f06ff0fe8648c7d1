//! Cases 1 to 41: completions, streams, choices and seeds.

use std::time::Duration;

use http::Request;
use http_body_util::BodyExt as _;
use serde_json::{Value, json};
use tonic::Status;

use super::{CHAT, TEXT, chat, joined, refused, sampling, streamed, text, with};
use crate::site::{ANSWER, Behaviour, Site, WAIT, frames, ids};

#[tokio::test]
async fn case_01_a_text_prompt_and_a_length() {
    let site = Site::start().await;
    let answer = site.ask(TEXT, text(json!({"max_tokens": 5, "temperature": 0}))).await;
    assert_eq!(answer["choices"].as_array().unwrap().len(), 1);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    let usage = &answer["usage"];
    assert_eq!((&usage["completion_tokens"], &usage["total_tokens"]), (&json!(5), &json!(usage["prompt_tokens"].as_u64().unwrap() + 5)));
    assert!(answer["id"].as_str().unwrap().starts_with("cmpl-"));
}

#[tokio::test]
async fn case_02_a_prompt_of_ids() {
    let site = Site::start().await;
    let answer = site.ask(TEXT, text(json!({"prompt": [65, 66]}))).await;
    assert_eq!(answer["choices"][0]["text"], ANSWER);
    assert_eq!(site.fake.requests.lock()[0].prompt_ids, [65, 66]);
}

#[tokio::test]
async fn case_03_04_lists_of_prompts() {
    let site = Site::start().await;
    for prompt in [json!(["a", "a"]), json!([[65], [65]])] {
        let answer = site.ask(TEXT, text(json!({"prompt": prompt}))).await;
        let choices = answer["choices"].as_array().unwrap();
        assert_eq!((choices.len(), &choices[0]["index"], &choices[1]["index"]), (2, &json!(0), &json!(1)));
        assert_eq!(choices[0]["text"], choices[1]["text"]);
    }
}

#[tokio::test]
async fn case_05_lists_of_prompts_streamed() {
    let site = Site::start().await;
    let mut texts = [String::new(), String::new()];
    for chunk in site.stream(TEXT, streamed(text(json!({"prompt": ["a", "b"]})))).await {
        let [choice] = chunk["choices"].as_array().unwrap().as_slice() else { panic!("{chunk}") };
        texts[choice["index"].as_u64().unwrap() as usize].push_str(choice["text"].as_str().unwrap());
    }
    assert_eq!(texts, [ANSWER, ANSWER]);
}

#[tokio::test]
async fn case_06_to_10_prompts_that_are_none() {
    let site = Site::start().await;
    refused(&site, TEXT, text(json!({"prompt": null})), "prompt").await;
    refused(&site, TEXT, text(json!({"prompt": null, "prompt_embeds": []})), "prompt").await;
    refused(&site, TEXT, text(json!({"prompt": ""})), "prompt").await;
    let answer = site.post(TEXT, &text(json!({"prompt": [999_999]}))).await;
    assert_eq!(answer.status, 400);
    assert!(answer.json()["error"]["message"].as_str().unwrap().contains("out of vocabulary"));
    refused(&site, TEXT, text(json!({"prompt": [-1]})), "prompt[0]").await;
    refused(&site, TEXT, text(json!({"prompt": [[-1]]})), "prompt[0][0]").await;
    let answer = site.post(TEXT, &text(json!({"prompt": vec!["x"; 1025]}))).await;
    assert!(answer.status == 400 && answer.json()["error"]["message"].as_str().unwrap().contains("1024"));
    assert!(site.fake.requests.lock().is_empty());
}

#[tokio::test]
async fn case_11_long_prompts_are_cut_as_asked() {
    let site = Site::start().await;
    let whole: Vec<u32> = (40..60).collect();
    for (side, kept) in [(json!("right"), &whole[..4]), (json!("left"), &whole[16..]), (Value::Null, &whole[16..])] {
        let body = text(json!({"prompt": whole, "truncate_prompt_tokens": 4, "truncation_side": side, "return_token_ids": true}));
        let answer = site.ask(TEXT, body).await;
        assert_eq!(answer["choices"][0]["prompt_token_ids"], json!(kept), "{side}");
        assert_eq!(answer["usage"]["prompt_tokens"], 4);
    }
    // As many as leave room for the answer.
    let long: Vec<u32> = vec![40; 400];
    site.ask(TEXT, text(json!({"prompt": long, "truncate_prompt_tokens": -1, "max_tokens": 16}))).await;
    assert_eq!(site.fake.requests.lock().last().unwrap().prompt_ids.len(), 240);
    let words = "word ".repeat(2000);
    site.ask(CHAT, chat(json!({"messages": [{"role": "user", "content": words}], "truncate_prompt_tokens": -1}))).await;
    assert_eq!(site.fake.requests.lock().last().unwrap().prompt_ids.len(), 255);
    for wrong in [-2, 0, 257] {
        refused(&site, TEXT, text(json!({"truncate_prompt_tokens": wrong})), "truncate_prompt_tokens").await;
    }
}

#[tokio::test]
async fn case_12_to_14_echo() {
    let site = Site::start().await;
    for prompt in [json!("Once"), json!(ids("Once"))] {
        let answer = site.ask(TEXT, text(json!({"prompt": prompt, "echo": true}))).await;
        assert_eq!(answer["choices"][0]["text"], format!("Once{ANSWER}"));
    }
    let answer = site.ask(TEXT, text(json!({"prompt": "Once", "echo": true, "max_tokens": 0, "logprobs": 1}))).await;
    assert_eq!(answer["choices"][0]["text"], "Once");
    assert_eq!(answer["choices"][0]["logprobs"]["tokens"].as_array().unwrap().len(), ids("Once").len());
    assert_eq!(answer["usage"]["completion_tokens"], 0);
}

#[tokio::test]
async fn case_15_no_tokens_without_echo() {
    let site = Site::start().await;
    refused(&site, TEXT, text(json!({"max_tokens": 0})), "max_tokens").await;
    refused(&site, CHAT, chat(json!({"max_tokens": 0})), "max_tokens").await;
}

#[tokio::test]
async fn case_16_the_echo_is_a_chunk_of_its_own() {
    let site = Site::start().await;
    let chunks = site.stream(TEXT, streamed(text(json!({"prompt": "Once", "echo": true})))).await;
    assert_eq!(chunks[0]["choices"][0]["text"], "Once");
    assert_eq!(joined(&chunks), format!("Once{ANSWER}"));
}

#[tokio::test]
async fn case_17_echo_with_logprobs() {
    let site = Site::start().await;
    let answer = site.ask(TEXT, text(json!({"prompt": "Once upon", "echo": true, "logprobs": 1}))).await;
    let logprobs = &answer["choices"][0]["logprobs"];
    let length = ids("Once upon").len() + ids(ANSWER).len();
    for list in ["tokens", "token_logprobs", "text_offset"] {
        assert_eq!(logprobs[list].as_array().unwrap().len(), length, "{list}");
    }
    assert_eq!(logprobs["token_logprobs"][0], Value::Null);
}

#[tokio::test]
async fn case_18_a_suffix_is_refused() {
    let site = Site::start().await;
    refused(&site, TEXT, text(json!({"suffix": "end"})), "suffix").await;
}

#[tokio::test]
async fn case_19_token_ids_on_request() {
    let site = Site::start().await;
    let answer = site.ask(TEXT, text(json!({"return_token_ids": true}))).await;
    let choice = &answer["choices"][0];
    assert_eq!((&choice["prompt_token_ids"], &choice["token_ids"]), (&json!(ids("x")), &json!(ids(ANSWER))));
    let chunks = site.stream(CHAT, streamed(chat(json!({"return_token_ids": true})))).await;
    let streamed: Vec<Value> = chunks.iter().flat_map(|c| c["choices"][0]["token_ids"].as_array().cloned().unwrap_or_default()).collect();
    assert_eq!(streamed, json!(ids(ANSWER)).as_array().unwrap().clone());
    assert!(chunks[0]["prompt_token_ids"].is_array());
}

#[tokio::test]
async fn case_20_an_unknown_model() {
    let site = Site::start().await;
    for path in [TEXT, CHAT] {
        let answer = site.post(path, &with(chat(json!({"prompt": "x"})), json!({"model": "other"}))).await;
        let error = &answer.json()["error"];
        assert_eq!((answer.status, &error["code"], &error["param"]), (404, &json!("model_not_found"), &json!("model")));
    }
}

/// 415, not vLLM's 400.
#[tokio::test]
async fn case_21_text_is_no_json() {
    let site = Site::start().await;
    let answer = site.send(Request::post("/").header("content-type", "text/plain"), TEXT, "{\"prompt\": \"x\"}").await;
    assert_eq!((answer.status, &answer.json()["error"]["code"]), (415, &json!("unsupported_media_type")));
}

#[tokio::test]
async fn case_22_malformed_json() {
    let site = Site::start().await;
    for body in ["{\"prompt\": ", "", "{\"prompt\": \"x\", \"n\": NaN}", "[1]", "\u{feff}"] {
        let answer = site.send(Request::post("/").header("content-type", "application/json"), TEXT, body).await;
        let error = &answer.json()["error"];
        assert_eq!((answer.status, &error["type"], &error["param"]), (400, &json!("invalid_request_error"), &Value::Null), "{body}");
        assert!(error["message"].is_string() && error["code"].is_string());
    }
}

#[tokio::test]
async fn case_23_unknown_fields_pass() {
    let site = Site::start().await;
    site.ask(TEXT, text(json!({"made_up": [1], "user": "me", "metadata": {"a": "b"}}))).await;
    site.ask(CHAT, chat(json!({"made_up": [1], "user": "me", "store": false, "service_tier": "auto"}))).await;
}

#[tokio::test]
async fn case_24_to_26_a_stream_is_the_answer() {
    let site = Site::start().await;
    for (path, body) in [(TEXT, text(json!({"temperature": 0}))), (CHAT, chat(json!({"temperature": 0})))] {
        // `stream` checks for the last `[DONE]`.
        let chunks = site.stream(path, streamed(body.clone())).await;
        let answer = site.ask(path, body).await;
        let whole = answer["choices"][0]["text"].as_str().or(answer["choices"][0]["message"]["content"].as_str()).unwrap().to_owned();
        assert_eq!(joined(&chunks), whole);
        let ends: Vec<usize> = (0..chunks.len()).filter(|&at| !chunks[at]["choices"][0]["finish_reason"].is_null()).collect();
        assert_eq!(ends, [chunks.len() - 1]);
    }
}

#[tokio::test]
async fn case_27_to_29_usage_in_a_stream() {
    let site = Site::start().await;
    for (path, body) in [(TEXT, text(json!({}))), (CHAT, chat(json!({})))] {
        let total = site.ask(path, body.clone()).await["usage"].clone();
        let asked = |options: Value| streamed(with(body.clone(), json!({"stream_options": options})));
        let chunks = site.stream(path, asked(json!({"include_usage": true}))).await;
        let (last, rest) = chunks.split_last().unwrap();
        assert_eq!((&last["choices"], &last["usage"]), (&json!([]), &total));
        assert!(rest.iter().all(|chunk| chunk.as_object().unwrap().get("usage") == Some(&Value::Null)));
        let chunks = site.stream(path, asked(json!({"include_usage": true, "continuous_usage_stats": true}))).await;
        let counts: Vec<u64> = chunks.iter().map(|chunk| chunk["usage"]["completion_tokens"].as_u64().unwrap()).collect();
        assert!(counts.is_sorted(), "{counts:?}");
        for options in [json!({}), json!({"include_usage": false}), json!({"include_usage": false, "continuous_usage_stats": true})] {
            let chunks = site.stream(path, asked(options.clone())).await;
            assert!(chunks.iter().all(|chunk| !chunk.as_object().unwrap().contains_key("usage")), "{options}");
        }
    }
}

#[tokio::test]
async fn case_30_stream_options_need_a_stream() {
    let site = Site::start().await;
    for options in [json!({}), json!({"include_usage": true}), json!({"include_usage": false}), json!({"continuous_usage_stats": true})] {
        refused(&site, TEXT, text(json!({"stream_options": options})), "stream_options").await;
        refused(&site, CHAT, chat(json!({"stream": false, "stream_options": options})), "stream_options").await;
    }
}

#[tokio::test]
async fn case_32_a_chat_begins_with_its_role() {
    let site = Site::start().await;
    let chunks = site.stream(CHAT, streamed(chat(json!({})))).await;
    assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant");
    assert!(chunks[1..].iter().all(|chunk| chunk["choices"][0]["delta"].get("role").is_none()));
}

#[tokio::test]
async fn case_33_a_stream_interval_makes_fewer_chunks() {
    let site = Site::start().await;
    let told =
        |chunks: &[Value]| chunks.iter().filter(|chunk| !chunk["choices"][0]["text"].as_str().unwrap_or_default().is_empty()).count();
    let long = "Many words, said at length, one after another, to the very end of it all.";
    site.behave(Behaviour::Slowly(ids(long)));
    let wide = site.stream(TEXT, streamed(text(json!({"stream_interval": 10, "return_token_ids": true})))).await;
    let deltas: Vec<usize> = wide[1..].iter().filter_map(|c| c["choices"][0]["token_ids"].as_array().map(Vec::len)).collect();
    assert!(deltas[1..deltas.len() - 1].iter().all(|&tokens| tokens >= 10), "{deltas:?}");
    assert_eq!(joined(&wide), long);
    assert!(told(&wide) <= 2 + ids(long).len() / 10, "{wide:?}");
    refused(&site, TEXT, streamed(text(json!({"stream_interval": 0}))), "stream_interval").await;
}

#[tokio::test]
async fn case_34_an_error_within_a_stream() {
    let site = Site::start().await;
    site.behave(Behaviour::Fail(4, Status::internal("broken")));
    let chunks = site.stream(CHAT, streamed(chat(json!({})))).await;
    assert_eq!(chunks.last().unwrap()["error"]["code"], "internal_error");
}

#[tokio::test]
async fn case_35_a_slow_reader_loses_nothing() {
    let site = Site::start().await;
    let mut body = site.stay(TEXT, streamed(text(json!({})))).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    let mut all = Vec::new();
    while let Some(frame) = tokio::time::timeout(WAIT, body.frame()).await.unwrap() {
        all.extend_from_slice(frame.unwrap().data_ref().unwrap());
    }
    assert_eq!(joined(&frames(std::str::from_utf8(&all).unwrap())), ANSWER);
}

#[tokio::test]
async fn case_36_37_several_choices() {
    let site = Site::start().await;
    let answer = site.ask(CHAT, chat(json!({"n": 3, "temperature": 1}))).await;
    let indexes: Vec<_> = answer["choices"].as_array().unwrap().iter().map(|choice| choice["index"].clone()).collect();
    assert_eq!(indexes, [0, 1, 2]);
    assert_eq!(answer["usage"]["completion_tokens"], 3 * (ids(ANSWER).len() + 1));
    let chunks = site.stream(CHAT, streamed(chat(json!({"n": 3, "temperature": 1})))).await;
    let mut ends: Vec<u64> = chunks
        .iter()
        .filter(|chunk| !chunk["choices"][0]["finish_reason"].is_null())
        .map(|chunk| chunk["choices"][0]["index"].as_u64().unwrap())
        .collect();
    ends.sort_unstable();
    assert_eq!(ends, [0, 1, 2]);
}

/// Allowed: OpenAI's own API allows it.
#[tokio::test]
async fn case_38_several_greedy_choices() {
    let site = Site::start().await;
    assert_eq!(site.ask(TEXT, text(json!({"n": 2, "temperature": 0}))).await["choices"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn case_39_numbers_of_choices() {
    let site = Site::start().await;
    for n in [0, -1, 129] {
        refused(&site, TEXT, text(json!({"n": n})), "n").await;
    }
    let answer = site.ask(TEXT, text(json!({"n": 2, "best_of": 4}))).await;
    assert_eq!(answer["choices"].as_array().unwrap().len(), 2);
    assert_eq!((site.fake.requests.lock()[0].n, &answer["choices"][0]["logprobs"]), (4, &Value::Null));
    assert_eq!(answer["usage"]["completion_tokens"], 4 * (ids(ANSWER).len() + 1), "all that were generated");
    refused(&site, TEXT, text(json!({"n": 3, "best_of": 2})), "best_of").await;
    refused(&site, TEXT, streamed(text(json!({"best_of": 2}))), "best_of").await;
}

/// That equal seeds give equal text is the worker's: tested end to end.
#[tokio::test]
async fn case_40_41_seeds_reach_the_worker() {
    let site = Site::start().await;
    for seed in [0, 7, i64::MAX] {
        site.ask(TEXT, text(json!({"seed": seed}))).await;
        assert_eq!(sampling(&site).seed, seed.cast_unsigned());
    }
    refused(&site, TEXT, text(json!({"seed": u64::MAX})), "seed").await;
    site.ask(TEXT, text(json!({"seed": -1}))).await;
    let first = sampling(&site).seed;
    site.ask(TEXT, text(json!({"seed": -1}))).await;
    assert_ne!(first, sampling(&site).seed, "-1 is any");
}
