//! The contract: `worker.v1` (tokens, between router and worker) and `inference.v1` (text, for internal services),
//! and the block hash that both sides of the first border must compute alike.
//!
//! Owns messages, service traits and the hash. Never holds behaviour of either side.

pub mod block_hash;

/// Token-level service between router and worker.
pub mod worker {
    /// Version 1.
    #[allow(clippy::all, clippy::unwrap_used, clippy::disallowed_methods)]
    pub mod v1 {
        tonic::include_proto!("quire.worker.v1");
    }
}

/// Text-level service for gRPC clients.
pub mod inference {
    /// Version 1.
    #[allow(clippy::all, clippy::unwrap_used, clippy::disallowed_methods)]
    pub mod v1 {
        tonic::include_proto!("quire.inference.v1");
    }
}

/// Encoded `FileDescriptorSet` of both packages, for gRPC reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
