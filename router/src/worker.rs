//! The one small trait by which the router reaches a worker: over the network the tonic client, in `quire serve` an
//! adapter to the service in the same process. The same calls either way.

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use quire_proto::worker::v1::{DescribeResponse, GenerateEvent, GenerateRequest, LoadReport};
use tonic::Status;

/// Events of one request. Dropping it cancels the request on the worker.
pub type EventStream = BoxStream<'static, Result<GenerateEvent, Status>>;
/// Load reports of one worker, one a model and interval.
pub type LoadStream = BoxStream<'static, Result<LoadReport, Status>>;

/// A worker as the router sees it.
#[async_trait]
pub trait Worker: Send + Sync + 'static {
    /// Starts a request.
    async fn generate(&self, request: GenerateRequest) -> Result<EventStream, Status>;
    /// What the worker serves.
    async fn describe(&self) -> Result<DescribeResponse, Status>;
    /// The bytes behind a content hash of the description; the caller verifies them.
    async fn artefact(&self, hash: &str) -> Result<Bytes, Status>;
    /// Load figures from now on.
    async fn watch(&self, interval_ms: u32) -> Result<LoadStream, Status>;
}
