//! The worker service over a loopback socket and in process: the same events either way.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::time::Duration;

use futures::{StreamExt, TryStreamExt};
use quire_engine::service::{FIELD_KEY, ServedModel, WorkerService};
use quire_proto::worker::v1::{
    ArtefactRequest, CacheEventsRequest, DescribeRequest, DrainRequest, GenerateRequest, WatchRequest, worker_client::WorkerClient,
    worker_server::WorkerServer,
};
use support::{Said, Switches, at_rest, engine, expected, prompt, request};
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::task::TaskTracker;
use tonic::{
    Code,
    transport::{Channel, Server},
};

fn service() -> (WorkerService, Switches) {
    let (handle, switches) = engine(256, |_| {});
    let tokenizer_json = (0..700_000_u32).map(|i| (i % 251) as u8).collect();
    (WorkerService::new(vec![ServedModel { handle, tokenizer_json, chat_template: Some("{{ messages }}".to_owned()) }]), switches)
}

async fn connect(service: &WorkerService) -> WorkerClient<Channel> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = Server::builder().add_service(WorkerServer::new(service.clone()));
    TaskTracker::new().spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    WorkerClient::connect(format!("http://{address}")).await.unwrap()
}

#[tokio::test]
async fn generate_streams_over_a_socket_what_it_says_in_process() {
    let (service, _) = service();
    let mut client = connect(&service).await;
    let request = GenerateRequest { logprobs: Some(1), ..request(prompt(1, 40), 30) };
    let remote: Vec<_> = client.generate(request.clone()).await.unwrap().into_inner().try_collect().await.unwrap();
    let local: Vec<_> = service
        .generate(GenerateRequest { bypass_prefix_cache: true, model: "fake-alias".to_owned(), ..request })
        .await
        .unwrap()
        .try_collect()
        .await
        .unwrap();
    assert_eq!(remote, local);
    let mut said = Said::default();
    remote.into_iter().for_each(|event| said.hear(event.event.unwrap()));
    assert_eq!(said.ids(0), expected(&prompt(1, 40), 30));
}

#[tokio::test]
async fn errors_become_statuses_that_name_the_field() {
    let (service, _) = service();
    let mut client = connect(&service).await;
    let status = client.generate(GenerateRequest { model: "other".to_owned(), ..request(prompt(1, 4), 3) }).await.unwrap_err();
    assert_eq!(status.code(), Code::NotFound);
    let status = client.generate(request(vec![], 3)).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert_eq!(status.metadata().get(FIELD_KEY).unwrap(), "prompt_ids");
    let status = client.artefacts(ArtefactRequest { hash: "00".to_owned() }).await.unwrap_err();
    assert_eq!(status.code(), Code::NotFound);
    assert_eq!(client.drain(DrainRequest { deadline_ms: 100 }).await.unwrap().into_inner().aborted, 0);
    let status = client.generate(request(prompt(1, 4), 3)).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
}

#[tokio::test]
async fn the_description_names_artefacts_that_can_be_fetched() {
    let (service, _) = service();
    let mut client = connect(&service).await;
    let description = client.describe(DescribeRequest {}).await.unwrap().into_inner();
    let card = &description.models[0];
    assert_eq!(card.names, ["fake", "fake-alias"]);
    assert_eq!((card.block_size, card.kv_blocks, card.max_context, card.max_logprobs), (16, 256, 512, 20));
    assert_eq!(card.numerics.as_ref().unwrap().backend, "fake");
    let chunks: Vec<_> =
        client.artefacts(ArtefactRequest { hash: card.tokenizer_hash.clone() }).await.unwrap().into_inner().try_collect().await.unwrap();
    assert_eq!(chunks.iter().map(|chunk| chunk.data.len()).collect::<Vec<_>>(), [262_144, 262_144, 175_712]);
    let bytes: Vec<u8> = chunks.into_iter().flat_map(|chunk| chunk.data).collect();
    assert_eq!(bytes, service.artefact(&card.tokenizer_hash).unwrap());
    assert_eq!(service.artefact(&card.chat_template_hash).unwrap(), "{{ messages }}");
}

#[tokio::test]
async fn a_closed_connection_frees_the_blocks() {
    let (service, switches) = service();
    switches.step_us.store(2000, std::sync::atomic::Ordering::Relaxed);
    let handle = service.handles()[0].clone();
    for i in 0..20 {
        let mut client = connect(&service).await;
        let mut events = client.generate(request(prompt(i, 40), 400)).await.unwrap().into_inner();
        events.next().await.unwrap().unwrap();
    }
    at_rest(&handle).await;
}

#[tokio::test]
async fn watch_and_cache_events_report() {
    let (service, _) = service();
    let mut client = connect(&service).await;
    let mut watch = client.watch(WatchRequest { interval_ms: 50 }).await.unwrap().into_inner();
    let report = watch.next().await.unwrap().unwrap();
    assert_eq!((report.model.as_str(), report.running, report.kv_blocks_total, report.steps), ("fake", 0, 256, 0));
    let mut events = client.cache_events(CacheEventsRequest { model: "fake".to_owned() }).await.unwrap().into_inner();
    assert!(events.next().await.unwrap().unwrap().snapshot);
    let _: Vec<_> = client.generate(request(prompt(1, 40), 3)).await.unwrap().into_inner().try_collect().await.unwrap();
    assert_eq!(events.next().await.unwrap().unwrap().stored.len(), 2);
    let mut later = watch.try_filter(|report| std::future::ready(report.steps >= 3));
    let report = tokio::time::timeout(Duration::from_secs(5), later.next()).await.unwrap().unwrap().unwrap();
    assert_eq!(report.running, 0);
    // The watch ends with the engine, so that a server can close.
    let other = service.clone();
    let rest = client.watch(WatchRequest { interval_ms: 50 }).await.unwrap().into_inner();
    tokio::task::spawn_blocking(move || other.shutdown()).await.unwrap();
    tokio::time::timeout(Duration::from_secs(5), rest.collect::<Vec<_>>()).await.unwrap();
}
