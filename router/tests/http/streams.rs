//! Streams: their grammar, their errors, and clients that are slow or gone.

use std::{collections::HashMap, sync::atomic::Ordering, time::Duration};

use futures::future::join_all;
use http::Request;
use http_body_util::BodyExt as _;
use quire_router::config::FaceConfig;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;
use tonic::Status;

use crate::site::{ANSWER, Behaviour, Site, WAIT, frames};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

fn chat(extra: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "x"}], "stream": true});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

#[tokio::test]
async fn a_chat_stream_follows_the_grammar() {
    let site = Site::start().await;
    let chunks = site.stream(CHAT, chat(json!({"n": 3, "temperature": 1}))).await;
    let mut texts: HashMap<u64, String> = HashMap::new();
    let mut ended: HashMap<u64, usize> = HashMap::new();
    for chunk in &chunks {
        assert_eq!((&chunk["object"], &chunk["id"]), (&json!("chat.completion.chunk"), &chunks[0]["id"]));
        assert!(!chunk.as_object().unwrap().contains_key("usage"), "nobody asked for it");
        let [choice] = chunk["choices"].as_array().unwrap().as_slice() else { panic!("{chunk}") };
        let index = choice["index"].as_u64().unwrap();
        assert!(!ended.contains_key(&index), "nothing follows the end of a choice: {chunk}");
        match texts.get_mut(&index) {
            None => {
                assert_eq!(choice["delta"], json!({"role": "assistant", "content": ""}), "a choice begins with its role");
                texts.insert(index, String::new());
            }
            Some(text) => text.push_str(choice["delta"]["content"].as_str().unwrap_or_default()),
        }
        if !choice["finish_reason"].is_null() {
            assert_eq!((&choice["finish_reason"], &choice["delta"]), (&json!("stop"), &json!({})));
            *ended.entry(index).or_default() += 1;
        }
        assert!(!choice["delta"]["content"].as_str().unwrap_or_default().contains('\u{fffd}'), "{chunk}");
    }
    assert_eq!(ended, HashMap::from([(0, 1), (1, 1), (2, 1)]));
    assert!(texts.values().all(|text| text == ANSWER), "{texts:?}");
}

#[tokio::test]
async fn usage_is_told_as_asked() {
    let site = Site::start().await;
    let whole = site.ask(CHAT, json!({"messages": [{"role": "user", "content": "x"}]})).await["usage"].clone();
    let chunks = site.stream(CHAT, chat(json!({"stream_options": {"include_usage": true}}))).await;
    let (last, rest) = chunks.split_last().unwrap();
    assert_eq!((&last["choices"], &last["usage"]), (&json!([]), &whole));
    assert!(rest.iter().all(|chunk| chunk.as_object().unwrap().get("usage") == Some(&Value::Null)));

    let both = json!({"stream_options": {"include_usage": true, "continuous_usage_stats": true}});
    let chunks = site.stream(CHAT, chat(both)).await;
    let counts: Vec<u64> = chunks.iter().map(|chunk| chunk["usage"]["completion_tokens"].as_u64().unwrap()).collect();
    assert!(counts.is_sorted() && counts.last() == whole["completion_tokens"].as_u64().as_ref(), "{counts:?}");

    for options in [json!({}), json!({"include_usage": false}), json!({"continuous_usage_stats": true})] {
        let chunks = site.stream(CHAT, chat(json!({"stream_options": options}))).await;
        assert!(chunks.iter().all(|chunk| chunk.as_object().unwrap().get("usage").is_none()), "{options}");
    }
}

#[tokio::test]
async fn several_prompts_stream_under_their_own_indexes() {
    let site = Site::start().await;
    let body = json!({"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 6, "logprobs": 1, "echo": true});
    let whole = site.ask(TEXT, body.clone()).await;
    let mut streamed = body;
    streamed["stream"] = json!(true);
    let mut texts = vec![String::new(); 6];
    let mut tokens = vec![Vec::new(); 6];
    let mut offsets = vec![Vec::new(); 6];
    for chunk in site.stream(TEXT, streamed).await {
        let [choice] = chunk["choices"].as_array().unwrap().as_slice() else { panic!("{chunk}") };
        let index = choice["index"].as_u64().unwrap() as usize;
        if texts[index].is_empty() {
            assert_eq!(choice["text"], ["a", "a", "b", "b", "c", "c"][index], "the prompt is a chunk of its own");
        }
        texts[index].push_str(choice["text"].as_str().unwrap());
        for (list, key) in [(&mut tokens, "tokens"), (&mut offsets, "text_offset")] {
            list[index].extend(choice["logprobs"][key].as_array().cloned().unwrap_or_default());
        }
    }
    for (index, choice) in whole["choices"].as_array().unwrap().iter().enumerate() {
        assert_eq!(choice["text"], texts[index]);
        assert_eq!((&choice["logprobs"]["tokens"], &choice["logprobs"]["text_offset"]), (&json!(tokens[index]), &json!(offsets[index])));
    }
}

#[tokio::test]
async fn an_error_within_a_stream_is_its_last_event() {
    let site = Site::start().await;
    site.behave(Behaviour::Fail(4, Status::internal("broken")));
    let chunks = site.stream(TEXT, json!({"prompt": "x", "stream": true})).await;
    let (last, rest) = chunks.split_last().unwrap();
    assert_eq!(last["error"]["type"], "server_error", "{last}");
    assert!(!rest.is_empty() && rest.iter().all(|chunk| chunk["choices"][0]["finish_reason"].is_null()), "{rest:?}");
    let answer = site.post(TEXT, &json!({"prompt": "x"})).await;
    assert_eq!(answer.status, 500, "half an answer is none");
}

#[tokio::test]
async fn a_client_that_leaves_is_noticed_at_once() {
    let site = Site::start().await;
    site.behave(Behaviour::Hang(3));
    let streams: Vec<_> = join_all((0..20).map(|_| site.stay(TEXT, json!({"prompt": ["x", "y"], "stream": true})))).await;
    assert_eq!(site.fake.open.load(Ordering::SeqCst), 40);
    drop(streams);
    site.until_idle().await;

    // The same while no head was sent: not streamed, and not even started.
    for behaviour in [Behaviour::Hang(3), Behaviour::Silent] {
        site.behave(behaviour);
        let mut socket = tokio::net::TcpStream::connect(site.address).await.unwrap();
        let body = "{\"prompt\": \"x\"}";
        let head = format!("POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n", body.len());
        socket.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
        site.until("taken up", |fake| fake.open.load(Ordering::SeqCst) == 1).await;
        drop(socket);
        site.until_idle().await;
    }
}

#[tokio::test]
async fn a_slow_reader_slows_its_own_stream_and_piles_up_nothing() {
    let site = Site::with("tiny", FaceConfig::default(), 1 << 30).await;
    site.behave(Behaviour::Endless);
    let mut slow = site.stay(TEXT, json!({"prompt": "x", "stream": true, "max_tokens": 100_000_000})).await;
    slow.frame().await.unwrap().unwrap();
    let (mut before, mut same) = (0, 0);
    tokio::time::timeout(WAIT, async {
        while same < 10 {
            tokio::time::sleep(Duration::from_millis(20)).await;
            let now = site.fake.taken.load(Ordering::SeqCst);
            same = if now == before { same + 1 } else { 0 };
            before = now;
        }
    })
    .await
    .expect("the worker's stream goes on though nobody reads");
    site.behave(Behaviour::Answer);
    site.ask(TEXT, json!({"prompt": "x"})).await;
    drop(slow);
    site.until_idle().await;
}

#[tokio::test]
async fn silence_is_filled_with_comments() {
    let face = FaceConfig { keep_alive: Duration::from_millis(20), ..FaceConfig::default() };
    let site = Site::with("tiny", face, 256).await;
    site.behave(Behaviour::Hang(2));
    let mut body = site.stay(TEXT, json!({"prompt": "x", "stream": true})).await;
    let mut seen = String::new();
    while !seen.contains(": keep-alive\n\n: keep-alive\n\n") {
        let frame = tokio::time::timeout(WAIT, body.frame()).await.unwrap().unwrap().unwrap();
        seen.push_str(std::str::from_utf8(frame.data_ref().unwrap()).unwrap());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_hundred_streams_are_held_at_once() {
    let site = Site::start().await;
    let hold = || site.open(Request::post("/").header("content-type", "application/json"), TEXT, "{\"prompt\":\"x\",\"stream\":true}");
    site.behave(Behaviour::Hang(2));
    let held = join_all((0..500).map(|_| hold())).await;
    assert!(held.iter().all(|response| response.status() == 200));
    assert_eq!(site.fake.open.load(Ordering::SeqCst), 500);
    site.behave(Behaviour::Answer);
    assert_eq!(site.stream(CHAT, chat(json!({}))).await.last().unwrap()["choices"][0]["finish_reason"], "stop");
    drop(held);
    site.until_idle().await;
    let all = join_all((0..500).map(|_| async { hold().await.into_body().collect().await.unwrap().to_bytes() })).await;
    for body in all {
        let text: String =
            frames(std::str::from_utf8(&body).unwrap()).iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect();
        assert!(ANSWER.starts_with(&text) && !text.is_empty(), "{text}");
    }
}
