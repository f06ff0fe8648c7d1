//! The worker service over a loopback socket and in process: the same events either way.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::time::Duration;

use futures::{StreamExt, TryStreamExt};
use quire_engine::service::{FIELD_KEY, ServedModel, WorkerService};
use quire_proto::worker::v1::{
    ArtefactRequest, CacheEventBatch, CacheEventsRequest, DescribeRequest, DrainRequest, GenerateRequest, WatchRequest,
    worker_client::WorkerClient, worker_server::WorkerServer,
};
use support::{
    Said, Switches, at_rest, engine, expected, prompt,
    replica::{OutOfStep, Replica},
    request,
};
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::task::TaskTracker;
use tonic::{
    Code,
    transport::{Channel, Endpoint, Server},
};

fn service() -> (WorkerService, Switches) {
    let (handle, switches) = engine(256, |_| {});
    let tokenizer_json = (0..700_000_u32).map(|i| (i % 251) as u8).collect();
    (WorkerService::new(vec![ServedModel { handle, tokenizer_json, chat_template: Some("{{ messages }}".to_owned()) }]), switches)
}

async fn connect(service: &WorkerService) -> WorkerClient<Channel> {
    connect_with(service, |endpoint| endpoint).await
}

async fn connect_with(service: &WorkerService, change: impl FnOnce(Endpoint) -> Endpoint) -> WorkerClient<Channel> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = Server::builder().add_service(WorkerServer::new(service.clone()));
    TaskTracker::new().spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    let endpoint = change(Endpoint::from_shared(format!("http://{address}")).unwrap());
    WorkerClient::new(endpoint.connect().await.unwrap())
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

fn service_of(blocks: usize) -> WorkerService {
    let (handle, _) = engine(blocks, |_| {});
    WorkerService::new(vec![ServedModel { handle, tokenizer_json: Vec::new(), chat_template: None }])
}

type Events = tonic::Streaming<CacheEventBatch>;

async fn subscribe(client: &mut WorkerClient<Channel>) -> Events {
    client.cache_events(CacheEventsRequest { model: "fake".to_owned() }).await.unwrap().into_inner()
}

async fn next(events: &mut Events) -> CacheEventBatch {
    tokio::time::timeout(Duration::from_secs(5), events.next()).await.unwrap().unwrap().unwrap()
}

/// Asks in process, so that no socket slows it down.
async fn ask(service: &WorkerService, prompt_ids: Vec<u32>, max_tokens: u32) {
    let _: Vec<_> = service.generate(request(prompt_ids, max_tokens)).await.unwrap().try_collect().await.unwrap();
}

/// What a new reader is told.
async fn fresh(client: &mut WorkerClient<Channel>) -> Replica {
    let mut replica = Replica::default();
    replica.apply(next(&mut subscribe(client).await).await).unwrap();
    replica
}

#[tokio::test]
async fn cache_events_over_a_socket_replay_to_what_is_cached() {
    let service = service_of(24);
    let mut client = connect(&service).await;
    ask(&service, prompt(50, 100), 1).await;
    let (mut early, mut replica) = (subscribe(&mut client).await, Replica::default());
    replica.apply(next(&mut early).await).unwrap();
    assert_eq!(replica.blocks.len(), 6);
    let first: Vec<_> = replica.blocks.keys().cloned().collect();
    for i in 0..12 {
        ask(&service, prompt(i, 60), 40).await;
    }
    let now = fresh(&mut client).await;
    while replica.sequence() < now.sequence() {
        // Every number is there, so this never fails.
        replica.apply(next(&mut early).await).unwrap();
    }
    assert!(first.iter().any(|hash| !now.blocks.contains_key(hash)), "nothing was evicted");
    assert_eq!((replica.blocks, replica.snapshots), (now.blocks, 1));
}

#[tokio::test]
async fn a_reader_that_is_too_slow_gets_a_new_snapshot_and_no_backlog() {
    let service = service_of(64);
    let narrow = |endpoint: Endpoint| endpoint.initial_stream_window_size(65_535).initial_connection_window_size(65_535);
    let mut client = connect_with(&service, narrow).await;
    let (mut slow, mut replica) = (subscribe(&mut client).await, Replica::default());
    replica.apply(next(&mut slow).await).unwrap();
    // It reads nothing while several times as much happens as the channel and the connection's buffers hold.
    for i in 0..5000 {
        ask(&service, prompt(i, 128), 1).await;
    }
    let mut client = connect(&service).await;
    let now = fresh(&mut client).await;
    let mut read = 0;
    while replica.snapshots < 2 {
        // Numbers run on up to where it was cut off; then comes the snapshot, whatever its number.
        replica.apply(next(&mut slow).await).unwrap();
        read += 1;
    }
    assert_eq!(replica.blocks, now.blocks);
    assert!(read < 5000, "{read} of 10,000 batches were kept for it");
    // It goes on from there.
    ask(&service, prompt(5000, 64), 1).await;
    let before = replica.sequence().unwrap();
    replica.apply(next(&mut slow).await).unwrap();
    assert_eq!(replica.sequence(), Some(before + 1));
}

#[tokio::test]
async fn a_gap_and_another_life_of_the_worker_are_noticed() {
    let service = service_of(64);
    let mut client = connect(&service).await;
    let (mut events, mut replica) = (subscribe(&mut client).await, Replica::default());
    replica.apply(next(&mut events).await).unwrap();
    for i in 0..3 {
        ask(&service, prompt(i, 40), 1).await;
    }
    replica.apply(next(&mut events).await).unwrap();
    // One is lost on the way.
    next(&mut events).await;
    let after = replica.sequence().unwrap();
    assert_eq!(replica.apply(next(&mut events).await), Err(OutOfStep::Gap { after, got: after + 2 }));
    assert_eq!(replica.apply(CacheEventBatch::default()), Err(OutOfStep::NoSnapshot));
    replica.apply(next(&mut subscribe(&mut client).await).await).unwrap();
    assert_eq!(replica.blocks.len(), 6, "asked again, it has everything");
    // The worker starts again: numbers could fit by chance, but the epoch does not.
    let other = service_of(64);
    assert_ne!(other.describe().epoch, service.describe().epoch);
    let mut client = connect(&other).await;
    let mut events = subscribe(&mut client).await;
    assert!(next(&mut events).await.snapshot);
    ask(&other, prompt(1, 40), 1).await;
    assert_eq!(replica.apply(next(&mut events).await), Err(OutOfStep::Epoch));
}
