//! Sends the requests: closed loop (so many at a time) or open loop (when the schedule says). Owns tasks and the clock, not figures.
//!
//! In an open loop an arrival is never dropped or moved. If a cap on concurrency is set, arrivals beyond it wait in the client and their
//! latencies count from when they were meant to start.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::{Semaphore, mpsc};
use tokio::time::sleep_until;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::client::Target;
use crate::prompt::Prompts;
use crate::stream::Outcome;

/// When requests start.
#[derive(Debug, Clone)]
pub enum Arrivals {
    /// `concurrency` users, each sending its next request when the last has ended; until `requests` have been sent or `span` is over.
    Closed { concurrency: usize, requests: usize, span: Option<Duration> },
    /// At these offsets from the start; `cap` bounds how many are under way at once.
    Open { offsets: Vec<Duration>, cap: Option<usize> },
}

/// A finished request and when it should have begun.
#[derive(Debug)]
pub struct Finished {
    /// From the arrival process; in a closed loop, when its user was free.
    pub intended: Instant,
    /// How late the client itself was: time between intended start and sending, waiting for the cap left out.
    pub lag: Duration,
    /// Time spent waiting for the cap.
    pub waited: Duration,
    pub outcome: Outcome,
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// All requests came back.
    Complete,
    /// The time limit cut requests off.
    TimeLimit,
    /// Somebody asked for it.
    Interrupted,
}

/// What a run did, beside its finished requests.
#[derive(Debug)]
pub struct Driven {
    pub started: Instant,
    /// Requests handed to a connection, finished or not.
    pub sent: usize,
    pub ended: Ended,
}

struct Shared {
    target: Target,
    prompts: Prompts,
    results: mpsc::Sender<Finished>,
    sent: AtomicUsize,
    stop: CancellationToken,
}

/// Runs the arrivals to their end, `limit` or `cancel`, giving each finished request to `take` as it comes back.
/// Dropped or cancelled requests close their connections.
pub async fn drive(
    target: &Target,
    prompts: Prompts,
    arrivals: &Arrivals,
    limit: Duration,
    cancel: &CancellationToken,
    mut take: impl FnMut(Finished),
) -> Driven {
    let (results, mut finished) = mpsc::channel(1_024);
    let stop = CancellationToken::new();
    let _stop_if_dropped = stop.clone().drop_guard();
    let shared = Arc::new(Shared { target: target.clone(), prompts, results, sent: AtomicUsize::new(0), stop: stop.clone() });
    let tasks = TaskTracker::new();
    // A moment ahead, so that the first arrivals are not late because of the start itself.
    let started = Instant::now() + Duration::from_millis(5);
    match arrivals {
        Arrivals::Closed { concurrency, requests, span } => {
            let next = Arc::new(AtomicUsize::new(0));
            for _ in 0..(*concurrency).min(*requests) {
                tasks.spawn(user(shared.clone(), next.clone(), started, *requests, *span));
            }
        }
        Arrivals::Open { offsets, cap } => {
            let cap = cap.map(|cap| Arc::new(Semaphore::new(cap)));
            tasks.spawn(arrive(shared.clone(), started, offsets.clone(), cap, tasks.clone()));
        }
    }
    // This function holds a sender itself, so the end is seen by the tasks, not by the channel.
    tasks.close();
    let mut ended = Ended::Complete;
    let deadline = tokio::time::Instant::from_std(started + limit);
    loop {
        tokio::select! {
            biased;
            Some(done) = finished.recv() => take(done),
            () = tasks.wait() => break,
            () = cancel.cancelled(), if ended == Ended::Complete => {
                ended = Ended::Interrupted;
                stop.cancel();
            }
            () = sleep_until(deadline), if ended == Ended::Complete => {
                ended = Ended::TimeLimit;
                stop.cancel();
            }
        }
    }
    while let Ok(done) = finished.try_recv() {
        take(done);
    }
    Driven { started, sent: shared.sent.load(Ordering::Relaxed), ended }
}

/// One user of a closed loop.
async fn user(shared: Arc<Shared>, next: Arc<AtomicUsize>, started: Instant, requests: usize, span: Option<Duration>) {
    sleep_until(started.into()).await;
    loop {
        let index = next.fetch_add(1, Ordering::Relaxed);
        if index >= requests || span.is_some_and(|span| started.elapsed() >= span) || shared.stop.is_cancelled() {
            return;
        }
        let body = shared.target.body(shared.prompts.get(index), None);
        let free = Instant::now();
        if !shared.send(body, free, free, Duration::ZERO).await {
            return;
        }
    }
}

/// Starts every arrival of an open loop at its time.
async fn arrive(shared: Arc<Shared>, started: Instant, offsets: Vec<Duration>, cap: Option<Arc<Semaphore>>, tasks: TaskTracker) {
    for (index, offset) in offsets.into_iter().enumerate() {
        // Made before its time, so that making it is not lateness.
        let body = shared.target.body(shared.prompts.get(index), None);
        let intended = started + offset;
        tokio::select! {
            () = shared.stop.cancelled() => return,
            () = sleep_until(intended.into()) => {}
        }
        let (shared, cap) = (shared.clone(), cap.clone());
        tasks.spawn(async move {
            let asked = Instant::now();
            let permit = match &cap {
                Some(cap) => tokio::select! {
                    () = shared.stop.cancelled() => return,
                    // Fair: first come, first served.
                    permit = cap.acquire() => permit.ok(),
                },
                None => None,
            };
            let waited = if permit.is_some() { asked.elapsed() } else { Duration::ZERO };
            shared.send(body, intended, asked, waited).await;
        });
    }
}

impl Shared {
    /// False if the run was stopped.
    async fn send(&self, body: bytes::Bytes, intended: Instant, asked: Instant, waited: Duration) -> bool {
        self.sent.fetch_add(1, Ordering::Relaxed);
        let outcome = tokio::select! {
            () = self.stop.cancelled() => return false,
            outcome = self.target.send(body) => outcome,
        };
        let lag = asked.saturating_duration_since(intended) + outcome.sent.saturating_duration_since(asked + waited);
        self.results.send(Finished { intended, lag, waited, outcome }).await.is_ok()
    }
}
