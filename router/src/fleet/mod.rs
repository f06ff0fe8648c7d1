//! The workers there are: what they serve, whether they can be reached, how busy they are.

mod remote;

use std::sync::Arc;
use std::time::Duration;

use crate::config::FleetConfig;
use crate::worker::Worker;

pub use remote::RemoteWorker;

/// All workers of this router.
pub struct Fleet {
    _config: FleetConfig,
}

impl Fleet {
    /// An empty fleet.
    #[must_use]
    pub fn new(config: FleetConfig) -> Arc<Self> {
        Arc::new(Self { _config: config })
    }

    /// Adds a worker and watches it from now on (needs a tokio runtime). `name` is for logs and metrics.
    pub fn add(self: &Arc<Self>, _name: &str, _worker: Arc<dyn Worker>) {}

    /// Whether some worker can be reached and takes requests.
    #[must_use]
    pub fn ready(&self) -> bool {
        false
    }

    /// Waits until [`Fleet::ready`], at most `limit`; tells whether it is.
    pub async fn wait_ready(&self, _limit: Duration) -> bool {
        false
    }

    /// Stops watching.
    pub async fn shutdown(&self) {}
}
