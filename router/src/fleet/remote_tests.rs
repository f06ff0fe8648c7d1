//! Over a real socket: a tonic server in front of the fake worker.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::{self, BoxStream};
use quire_proto::worker::v1::worker_server::{self, WorkerServer};
use quire_proto::worker::v1::*;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::*;
use crate::config::{CoreConfig, FleetConfig};
use crate::core::fake::{Fake, Say, answer, started, token};
use crate::core::{Core, collect};
use crate::fleet::Fleet;
use crate::request::{Parameters, Prompt, TextRequest};

struct Served(Arc<Fake>);

type Answer<T> = BoxStream<'static, Result<T, Status>>;

#[async_trait]
impl worker_server::Worker for Served {
    type GenerateStream = Answer<GenerateEvent>;
    type ArtefactsStream = Answer<ArtefactChunk>;
    type WatchStream = Answer<LoadReport>;
    type CacheEventsStream = Answer<CacheEventBatch>;

    async fn generate(&self, request: Request<GenerateRequest>) -> Result<Response<Self::GenerateStream>, Status> {
        Worker::generate(self.0.as_ref(), request.into_inner()).await.map(Response::new)
    }

    async fn describe(&self, _: Request<DescribeRequest>) -> Result<Response<DescribeResponse>, Status> {
        Worker::describe(self.0.as_ref()).await.map(Response::new)
    }

    async fn artefacts(&self, request: Request<ArtefactRequest>) -> Result<Response<Self::ArtefactsStream>, Status> {
        let bytes = self.0.artefact(&request.into_inner().hash).await?;
        let chunks: Vec<_> = bytes.chunks(1000).map(|chunk| Ok(ArtefactChunk { data: Bytes::copy_from_slice(chunk) })).collect();
        Ok(Response::new(stream::iter(chunks).boxed()))
    }

    async fn watch(&self, request: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        Worker::watch(self.0.as_ref(), request.into_inner().interval_ms).await.map(Response::new)
    }

    async fn cache_events(&self, _: Request<CacheEventsRequest>) -> Result<Response<Self::CacheEventsStream>, Status> {
        Err(Status::unimplemented("cache events"))
    }

    async fn drain(&self, _: Request<DrainRequest>) -> Result<Response<DrainResponse>, Status> {
        Err(Status::unimplemented("drain"))
    }
}

/// Serves a fake until the returned token is cancelled, which breaks every connection.
async fn serve(worker: Arc<Fake>) -> (String, CancellationToken) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let stop = CancellationToken::new();
    let stopped = stop.clone();
    // Dropping a server leaves its connections to their own tasks; a run time of its own takes them along.
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::from_std(listener.into_std().unwrap()).unwrap();
            let server = tonic::transport::Server::builder()
                .add_service(WorkerServer::new(Served(worker)))
                .serve_with_incoming(TcpListenerStream::new(listener));
            stopped.run_until_cancelled(server).await
        });
        runtime.shutdown_timeout(Duration::from_millis(100));
    });
    (address, stop)
}

fn request() -> TextRequest {
    TextRequest {
        request_id: "r".into(),
        model: "tiny".into(),
        prompt: Prompt::Ids(vec![32]),
        parameters: Parameters::default(),
        cache_salt: Vec::new(),
        deadline_ms: 0,
    }
}

fn config() -> FleetConfig {
    FleetConfig { watch_interval: Duration::from_millis(100), backoff_min: Duration::from_millis(10), ..FleetConfig::default() }
}

#[tokio::test]
async fn an_answer_over_a_socket_and_a_cancel() {
    let worker = Fake::new(vec![answer(&[32, 33, 510]), Ok(vec![started(), token(0, 32), Say::Hang])]);
    let (address, stop) = serve(worker.clone()).await;
    let fleet = Fleet::new(config());
    fleet.add_remote(&[address]).unwrap();
    assert!(fleet.wait_ready(Duration::from_secs(10)).await);
    let core = Core::new(fleet, CoreConfig::default());
    let completed = collect(core.generate(request()).await.unwrap()).await.unwrap();
    assert_eq!(completed.choices[0].text, "AB");
    let stream = core.generate(request()).await.unwrap();
    assert_eq!(worker.open.load(Ordering::SeqCst), 1);
    drop(stream);
    let freed = async {
        while worker.open.load(Ordering::SeqCst) > 0 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(5), freed).await.expect("the worker never saw the cancel");
    stop.cancel();
}

#[tokio::test]
async fn a_connection_that_breaks_within_an_answer_is_continued_elsewhere() {
    let dying = Fake::new(vec![Ok(vec![started(), token(0, 32), Say::Hang])]);
    let (address, stop) = serve(dying.clone()).await;
    let fleet = Fleet::new(config());
    fleet.add_remote(&[address]).unwrap();
    assert!(fleet.wait_ready(Duration::from_secs(10)).await);
    let core = Core::new(fleet.clone(), CoreConfig::default());
    let mut stream = core.generate(request()).await.unwrap();
    assert!(matches!(stream.next().await, Some(Ok(crate::request::TextEvent::Started { .. }))));
    assert!(matches!(stream.next().await, Some(Ok(crate::request::TextEvent::Delta { .. }))));
    let heir = Fake::new(vec![answer(&[33, 510])]);
    let (other, stop_other) = serve(heir.clone()).await;
    fleet.add_remote(&[other]).unwrap();
    let all_there = || fleet.snapshot().members().iter().all(|member| member.reachable());
    while !all_there() {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    // The stream was made before the second worker was there; a new snapshot must be used for the continuation.
    stop.cancel();
    let completed = tokio::time::timeout(Duration::from_secs(10), collect(stream)).await.unwrap().unwrap();
    assert_eq!(completed.choices[0].text, "B");
    assert_eq!(heir.requests.lock()[0].generated_ids, [32]);
    stop_other.cancel();
}
