//! The router's worker trait over the engine's service in the same process: the same calls, no socket.

use async_trait::async_trait;
use quire_engine::service::WorkerService;
use quire_proto::worker::v1::{DescribeResponse, GenerateRequest};
use quire_router::worker::{EventStream, LoadStream, Worker};
use tonic::Status;

/// The service as a worker.
pub struct LocalWorker(pub WorkerService);

#[async_trait]
impl Worker for LocalWorker {
    async fn generate(&self, request: GenerateRequest) -> Result<EventStream, Status> {
        self.0.generate(request).await
    }

    async fn describe(&self) -> Result<DescribeResponse, Status> {
        Ok(self.0.describe())
    }

    async fn artefact(&self, hash: &str) -> Result<bytes::Bytes, Status> {
        self.0.artefact(hash)
    }

    async fn watch(&self, interval_ms: u32) -> Result<LoadStream, Status> {
        Ok(self.0.watch(interval_ms))
    }
}
