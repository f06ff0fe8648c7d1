//! One worker as the fleet keeps it: can it be reached, how busy is it.
//!
//! Owns the count of requests in flight, raised before a request is sent and lowered when its stream is dropped, whatever
//! became of it; nothing else ever sets it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;
use quire_proto::worker::v1::LoadReport;
use tokio::sync::Notify;

use crate::worker::Worker;

/// A worker and what is known of its state.
pub struct Member {
    /// For logs and metrics.
    pub name: String,
    pub worker: Arc<dyn Worker>,
    in_flight: AtomicUsize,
    reachable: AtomicBool,
    pub(super) epoch: AtomicU64,
    /// The last report of each model.
    loads: Mutex<BTreeMap<String, LoadReport>>,
    /// Somebody found it unreachable before its watcher did.
    pub(super) lost: Notify,
}

impl Member {
    pub(super) fn new(name: &str, worker: Arc<dyn Worker>) -> Self {
        Self {
            name: name.to_owned(),
            worker,
            in_flight: AtomicUsize::new(0),
            reachable: AtomicBool::new(false),
            epoch: AtomicU64::new(0),
            loads: Mutex::default(),
            lost: Notify::new(),
        }
    }

    /// Whether it answers.
    #[must_use]
    pub fn reachable(&self) -> bool {
        self.reachable.load(Ordering::Acquire)
    }

    pub(super) fn set_reachable(&self, reachable: bool) -> bool {
        if !reachable {
            self.loads.lock().clear();
        }
        self.reachable.swap(reachable, Ordering::AcqRel) != reachable
    }

    /// A call found that it does not answer, or takes no more: nobody else is sent there until it describes itself again.
    pub fn suspect(&self) {
        self.set_reachable(false);
        self.lost.notify_one();
    }

    /// Requests that this router has there.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// The last load report of each of its models; empty while it can't be reached.
    #[must_use]
    pub fn loads(&self) -> Vec<LoadReport> {
        self.loads.lock().values().cloned().collect()
    }

    pub(super) fn report(&self, report: LoadReport) {
        self.loads.lock().insert(report.model.clone(), report);
    }

    /// Takes new requests for `model` (its canonical name).
    pub(super) fn takes(&self, model: &str) -> bool {
        self.reachable() && !self.loads.lock().get(model).is_some_and(|load| load.draining)
    }

    /// How busy it is: requests of ours there, and those of other routers that wait.
    pub(super) fn busy(&self, model: &str) -> usize {
        let waiting = self.loads.lock().get(model).map_or(0, |load| load.waiting as usize);
        self.in_flight() + waiting
    }

    pub(super) fn enter(self: &Arc<Self>) -> InFlight {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        InFlight(self.clone())
    }
}

#[cfg(test)]
impl Member {
    pub(crate) fn enter_for_test(self: &Arc<Self>) -> InFlight {
        self.enter()
    }
}

/// One request in flight at a worker; counted until dropped.
pub struct InFlight(Arc<Member>);

impl InFlight {
    /// Where it is.
    #[must_use]
    pub fn member(&self) -> &Arc<Member> {
        &self.0
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}
