//! Cases 87 to 92: small routes, keys, headers and sizes.

use http::Request;
use quire_router::config::FaceConfig;
use serde_json::json;

use super::TEXT;
use crate::site::{Site, ids};

fn keyed() -> FaceConfig {
    FaceConfig { api_key: Some("secret".to_owned()), ..FaceConfig::default() }
}

#[tokio::test]
async fn case_87_tokens_there_and_back() {
    let site = Site::start().await;
    let said = "Hello w\u{f6}rld \u{1f600}";
    let answer = site.ask("/tokenize", json!({"prompt": said, "return_token_strs": true})).await;
    assert_eq!((&answer["count"], &answer["max_model_len"]), (&json!(ids(said).len()), &json!(256)));
    assert!(answer["token_strs"].as_array().unwrap().iter().all(serde_json::Value::is_string));
    assert_eq!(site.ask("/detokenize", json!({"tokens": answer["tokens"]})).await["prompt"], said);
    let chat = site.ask("/tokenize", json!({"messages": [{"role": "user", "content": "hi"}]})).await;
    let rendered = site.ask("/detokenize", json!({"tokens": chat["tokens"]})).await["prompt"].as_str().unwrap().to_owned();
    assert!(rendered.ends_with("<|im_start|>assistant\n"));
    assert_eq!(site.ask("/detokenize", json!({"tokens": []})).await["prompt"], "");
}

#[tokio::test]
async fn case_88_models() {
    let site = Site::start().await;
    let list = site.get("/v1/models").await.json();
    assert_eq!((&list["data"][0]["id"], &list["data"][0]["max_model_len"]), (&json!("tiny"), &json!(256)));
}

#[tokio::test]
async fn case_89_keys() {
    let site = Site::with("tiny", keyed(), 256).await;
    let with = |value: &'static str| Request::get("/").header("authorization", value);
    assert_eq!(site.get("/v1/models").await.status, 401);
    assert_eq!(site.send(with("Bearer wrong"), "/v1/models", "").await.status, 401);
    assert_eq!(site.send(with("Bearer secret"), "/v1/models", "").await.status, 200);
    let preflight = Request::options("/").header("origin", "http://a").header("access-control-request-method", "POST");
    assert_eq!(site.send(preflight, TEXT, "").await.status, 204);
    assert_eq!(site.get("/health").await.status, 200);
}

#[tokio::test]
async fn case_90_request_ids() {
    let site = Site::start().await;
    let answer = site.send(Request::get("/").header("x-request-id", "mine"), "/v1/models", "").await;
    assert_eq!(answer.headers["x-request-id"], "mine");
    assert_eq!(site.get("/v1/models").await.headers["x-request-id"].len(), 32);
}

/// Any origin may ask, as in vLLM's default; there is no list to be left out of.
#[tokio::test]
async fn case_91_other_origins() {
    let site = Site::start().await;
    let cross = site.send(Request::get("/").header("origin", "http://a"), "/v1/models", "").await;
    assert_eq!(cross.headers["access-control-allow-origin"], "*");
    assert!(!site.get("/v1/models").await.headers.contains_key("access-control-allow-origin"));
}

#[tokio::test]
async fn case_92_sizes() {
    let site = Site::with("tiny", FaceConfig { max_body_bytes: 2000, ..FaceConfig::default() }, 256).await;
    let post = || Request::post("/").header("content-type", "application/json");
    let padded = |size: usize| format!("{{\"prompt\": \"x\"{}}}", " ".repeat(size - 15));
    assert_eq!(site.send(post(), TEXT, padded(2000)).await.status, 200);
    assert_eq!(site.send(post(), TEXT, padded(2001)).await.status, 413);
}

#[tokio::test]
async fn a_cache_salt_divides_the_cache_and_never_joins_tenants() {
    let site = Site::with("tiny", keyed(), 256).await;
    let open = Site::start().await;
    for salt in [json!(null), json!("one"), json!("two"), json!("one")] {
        let body = json!({"prompt": "x", "cache_salt": salt}).to_string();
        let post = Request::post("/").header("authorization", "Bearer secret");
        assert_eq!(site.send(post, TEXT, body.clone()).await.status, 200);
        assert_eq!(open.send(Request::post("/"), TEXT, body).await.status, 200);
    }
    let salts = |site: &Site| site.fake.requests.lock().iter().map(|request| request.cache_salt.clone()).collect::<Vec<_>>();
    let (keyed, open) = (salts(&site), salts(&open));
    assert!(keyed[1] == keyed[3] && open[1] == open[3]);
    let different: std::collections::BTreeSet<_> = keyed.iter().chain(&open).collect();
    assert_eq!(different.len(), 6, "each salt of each tenant is its own");
    super::refused(&Site::start().await, TEXT, json!({"prompt": "x", "cache_salt": ""}), "cache_salt").await;
    super::refused(&Site::start().await, TEXT, json!({"prompt": "x", "cache_salt": 5}), "cache_salt").await;
}
