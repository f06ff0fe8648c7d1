//! The end of a server: unready first, what runs finishes, and what doesn't is ended in-band.

use std::sync::atomic::Ordering;

use http_body_util::BodyExt as _;
use quire_router::server::Stopped;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::site::{ANSWER, Behaviour, Site, WAIT, frames};

#[tokio::test]
async fn unready_comes_first_and_requests_are_answered_until_then() {
    let site = Site::start().await;
    site.shutdown.cancel();
    assert_eq!(site.get("/readyz").await.status, 503);
    assert_eq!(site.get("/livez").await.status, 200);
    let answer = site.ask("/v1/completions", json!({"prompt": "x", "max_tokens": 50})).await;
    assert_eq!(answer["choices"][0]["text"], ANSWER, "still settling: no client is turned away");
    let address = site.address;
    assert_eq!(site.stopped().await, Stopped { cut: 0 });
    assert!(tokio::net::TcpStream::connect(address).await.is_err());
}

#[tokio::test]
async fn the_deadline_ends_streams_in_band() {
    let site = Site::start().await;
    site.behave(Behaviour::Hang(4));
    let stream = site.stay("/v1/completions", json!({"prompt": "x", "stream": true})).await;
    let whole = json!({"prompt": "x"});
    let (answer, ()) = tokio::join!(site.post("/v1/completions", &whole), async {
        site.until("both run", |fake| fake.open.load(Ordering::SeqCst) == 2).await;
        site.shutdown.cancel();
    });
    assert_eq!((answer.status, &answer.json()["error"]["code"]), (503, &json!("unavailable")));
    let body = tokio::time::timeout(WAIT, stream.collect()).await.unwrap().unwrap().to_bytes();
    let chunks = frames(std::str::from_utf8(&body).unwrap());
    assert_eq!(chunks.last().unwrap()["error"]["code"], "unavailable", "{chunks:?}");
    site.until_idle().await;
    assert_eq!(site.stopped().await, Stopped { cut: 2 });
}

#[tokio::test]
async fn connections_that_are_idle_close_while_others_still_drain() {
    let site = Site::start().await;
    site.behave(Behaviour::Hang(4));
    let running = site.stay("/v1/completions", json!({"prompt": "x", "stream": true})).await;
    let mut idle = tokio::net::TcpStream::connect(site.address).await.unwrap();
    idle.write_all(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let mut head = [0; 16];
    idle.read_exact(&mut head).await.unwrap();
    assert_eq!(&head, b"HTTP/1.1 200 OK\r");
    site.shutdown.cancel();
    let mut rest = Vec::new();
    tokio::time::timeout(WAIT, idle.read_to_end(&mut rest)).await.unwrap().unwrap();
    assert_eq!(site.fake.open.load(Ordering::SeqCst), 1, "the other connection has its time still");
    drop(running);
    assert_eq!(site.stopped().await, Stopped { cut: 0 });
}
