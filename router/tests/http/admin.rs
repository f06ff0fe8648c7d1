//! Probes, metrics, keys, request ids and CORS.

use http::Request;
use http_body_util::{BodyExt as _, Empty};
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use quire_router::config::FaceConfig;
use serde_json::json;

use crate::site::Site;

async fn admin(site: &Site, path: &str) -> (u16, String) {
    let client = Client::builder(TokioExecutor::new()).build_http::<Empty<bytes::Bytes>>();
    let response = client.get(format!("http://{}{path}", site.admin).parse().unwrap()).await.unwrap();
    let status = response.status().as_u16();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    (status, String::from_utf8(body.to_vec()).unwrap())
}

fn value(metrics: &str, series: &str) -> f64 {
    let line = metrics.lines().find_map(|line| line.strip_prefix(series));
    line.unwrap_or_else(|| panic!("no {series} in\n{metrics}")).trim().parse().unwrap()
}

#[tokio::test]
async fn probes_and_metrics_are_on_both_ports_while_there_is_no_key() {
    let site = Site::start().await;
    site.ask("/v1/completions", json!({"prompt": "x"})).await;
    for path in ["/livez", "/readyz", "/health", "/metrics"] {
        assert_eq!(site.get(path).await.status, 200, "{path}");
        assert_eq!(admin(&site, path).await.0, 200, "{path}");
    }
    assert_eq!(site.get("/readyz").await.json()["checks"]["workers"], "ok");
    assert_eq!(site.get("/ping").await.status, 200);
    assert!(site.get("/version").await.json()["version"].is_string());
    assert_eq!(admin(&site, "/v1/models").await.0, 404, "no faces on the admin port");
}

#[tokio::test]
async fn a_key_is_needed_for_everything_but_probes() {
    let site = Site::with("tiny", FaceConfig { api_key: Some("secret".to_owned()), ..FaceConfig::default() }, 256).await;
    for path in ["/v1/models", "/version", "/ping", "/metrics", "/none", "/tokenize"] {
        let answer = site.get(path).await;
        assert_eq!(answer.status, 401, "{path}");
        assert_eq!(answer.json()["error"]["code"], "invalid_api_key", "{path}");
        assert_eq!(site.send(Request::get("/").header("authorization", "Bearer wrong"), path, "").await.status, 401, "{path}");
    }
    for path in ["/health", "/livez", "/readyz"] {
        assert_eq!(site.get(path).await.status, 200, "{path}");
    }
    let with_key = |builder: http::request::Builder| builder.header("authorization", "Bearer secret");
    assert_eq!(site.send(with_key(Request::get("/")), "/v1/models", "").await.status, 200);
    assert_eq!(site.send(with_key(Request::get("/")), "/metrics", "").await.status, 404, "figures stay on the admin port");
    assert_eq!(admin(&site, "/metrics").await.0, 200);
    let body = "{\"prompt\": \"x\"}";
    assert_eq!(site.send(with_key(Request::post("/")), "/v1/completions", body).await.status, 200);
    assert_eq!(site.fake.requests.lock()[0].cache_salt.len(), 16, "the cache is the key's own");
    let preflight = Request::options("/").header("origin", "http://a").header("access-control-request-method", "POST");
    assert_eq!(site.send(preflight, "/v1/completions", "").await.status, 204);
}

#[tokio::test]
async fn request_ids_come_back_and_browsers_may_ask() {
    let site = Site::start().await;
    let answer = site.send(Request::post("/").header("x-request-id", "abc-1"), "/v1/completions", "{\"prompt\": \"x\"}").await;
    assert_eq!((answer.headers["x-request-id"].to_str().unwrap(), &answer.json()["id"]), ("abc-1", &json!("cmpl-abc-1")));
    assert_eq!(site.fake.requests.lock()[0].request_id, "abc-1");
    let plain = site.get("/v1/models").await;
    assert_eq!(plain.headers["x-request-id"].len(), 32);
    assert!(!plain.headers.contains_key("access-control-allow-origin"));
    let cross = site.send(Request::get("/").header("origin", "http://a"), "/none", "").await;
    assert_eq!((cross.status, &cross.headers["access-control-allow-origin"]), (404, &"*".parse().unwrap()));
    let preflight = Request::options("/")
        .header("origin", "http://a")
        .header("access-control-request-method", "POST")
        .header("access-control-request-headers", "authorization,content-type");
    let answer = site.send(preflight, "/v1/chat/completions", "").await;
    assert_eq!(answer.headers["access-control-allow-headers"], "authorization,content-type");
}

#[tokio::test]
async fn metrics_add_up_to_the_usages() {
    let site = Site::with("metered", FaceConfig::default(), 256).await;
    let (mut prompt, mut generated) = (0, 0);
    for n in 1..=3 {
        let usage = site.ask("/v1/completions", json!({"prompt": "count me", "n": n, "max_tokens": 4})).await["usage"].clone();
        prompt += usage["prompt_tokens"].as_u64().unwrap();
        generated += usage["completion_tokens"].as_u64().unwrap();
    }
    site.post("/v1/completions", &json!({"prompt": ""})).await;
    let metrics = site.get("/metrics").await;
    let metrics = std::str::from_utf8(&metrics.body).unwrap();
    let of = |name: &str| value(metrics, &format!("{name}{{model=\"metered\"}}"));
    assert_eq!(of("quire_router_prompt_tokens_total"), prompt as f64);
    assert_eq!(of("quire_router_completion_tokens_total"), generated as f64);
    assert_eq!(of("quire_router_cached_prompt_tokens_total"), 6.0);
    assert_eq!(of("quire_router_generations_in_flight"), 0.0);
    assert_eq!(of("quire_router_time_to_first_token_seconds_count"), 3.0);
    assert_eq!(value(metrics, "quire_router_generations_total{model=\"metered\",outcome=\"length\"}"), 3.0);
    assert!(value(metrics, "quire_router_errors_total{code=\"invalid_value\"}") >= 1.0);
    assert!(metrics.contains("quire_http_requests_total{route=\"/v1/completions\",method=\"POST\",status=\"200\"}"), "{metrics}");
}
