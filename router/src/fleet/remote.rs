//! A worker over the network.

/// A worker at an address.
pub struct RemoteWorker;
