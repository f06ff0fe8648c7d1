//! A worker over the network: the tonic client behind the [`Worker`] trait.
//!
//! Owns the connection and its settings. Connects when first used and again after a loss; never retries a call.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use futures::{StreamExt, TryStreamExt};
use quire_proto::worker::v1::worker_client::WorkerClient;
use quire_proto::worker::v1::{ArtefactRequest, DescribeRequest, DescribeResponse, GenerateRequest, WatchRequest};
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};

use crate::error::ApiError;
use crate::telemetry::trace;
use crate::worker::{EventStream, LoadStream, Worker};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// A connection on which the other side is silent for both of these is dead.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(5);
/// HTTP/2's own default of 64 KiB would cap a stream at one window a round trip.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = 8 << 20;
/// One connection writes one frame at a time; two let a long prompt pass beside the rest.
const CONNECTIONS: usize = 2;
/// Started holds log-probabilities of a whole prompt when asked for.
const MAX_MESSAGE: usize = 256 << 20;
/// A tokenizer of a million tokens is some 60 MB.
const MAX_ARTEFACT: usize = 512 << 20;

/// A worker at an address.
pub struct RemoteWorker {
    clients: Vec<WorkerClient<Channel>>,
    next: AtomicUsize,
}

impl RemoteWorker {
    /// For `host:port` or a URL. Doesn't connect yet; needs a tokio runtime.
    ///
    /// # Errors
    /// [`ApiError::Invalid`]: not an address.
    pub fn new(address: &str) -> Result<Self, ApiError> {
        let url = if address.contains("://") { address.to_owned() } else { format!("http://{address}") };
        let endpoint = Endpoint::from_shared(url)
            .map_err(|error| ApiError::invalid("workers", format!("`{address}` is not an address of a worker: {error}")))?
            .connect_timeout(CONNECT_TIMEOUT)
            .tcp_nodelay(true)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .http2_keep_alive_interval(KEEP_ALIVE)
            .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
            .keep_alive_while_idle(true);
        let client =
            || WorkerClient::new(endpoint.connect_lazy()).max_decoding_message_size(MAX_MESSAGE).max_encoding_message_size(MAX_MESSAGE);
        Ok(Self { clients: (0..CONNECTIONS).map(|_| client()).collect(), next: AtomicUsize::new(0) })
    }

    fn client(&self) -> WorkerClient<Channel> {
        self.clients[self.next.fetch_add(1, Ordering::Relaxed) % self.clients.len()].clone()
    }
}

#[async_trait]
impl Worker for RemoteWorker {
    async fn generate(&self, request: GenerateRequest) -> Result<EventStream, Status> {
        let mut request = Request::new(request);
        trace::inject(request.metadata_mut());
        Ok(self.client().generate(request).await?.into_inner().boxed())
    }

    async fn describe(&self) -> Result<DescribeResponse, Status> {
        Ok(self.client().describe(DescribeRequest {}).await?.into_inner())
    }

    async fn artefact(&self, hash: &str) -> Result<Bytes, Status> {
        let mut chunks = self.client().artefacts(ArtefactRequest { hash: hash.to_owned() }).await?.into_inner();
        let mut bytes = BytesMut::new();
        while let Some(chunk) = chunks.try_next().await? {
            if bytes.len() + chunk.data.len() > MAX_ARTEFACT {
                return Err(Status::resource_exhausted("the artefact is too large"));
            }
            bytes.extend_from_slice(&chunk.data);
        }
        Ok(bytes.freeze())
    }

    async fn watch(&self, interval_ms: u32) -> Result<LoadStream, Status> {
        Ok(self.client().watch(WatchRequest { interval_ms }).await?.into_inner().boxed())
    }
}

#[cfg(test)]
#[path = "remote_tests.rs"]
mod tests;
