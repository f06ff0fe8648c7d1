//! `quire bench soak`: very many short requests of every kind, and whether the server holds more at the end than it did before.
//!
//! * `mix`: what is asked (pure). `client`: one request. `process`: what the server's process holds, what its metrics say.
//!
//! The verdict: no answer that may not be given; all requests accounted for, here and in the server's own counts; nothing running,
//! waiting or held at the end; memory, descriptors and threads as they were.

mod client;
mod mix;
mod process;
mod report;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::client::{End, Web};
pub use self::mix::Kind;
pub use self::process::Holding;
use self::process::series;
pub use self::report::{Counts, Memory, SoakReport};
use crate::Error;

/// What to do to whom.
#[derive(Debug, Clone)]
pub struct Soak {
    /// `http://host:port`, with `/metrics` on the same port.
    pub url: String,
    /// The server's process, on this machine.
    pub pid: Option<u32>,
    pub requests: usize,
    /// Further ones before them: memory is looked at from there on.
    pub warmup: usize,
    pub concurrency: usize,
    pub seed: u64,
    /// For one request.
    pub timeout: Duration,
    /// Growth of resident memory after the first fifth that is still called flat, in per cent.
    pub max_growth: f64,
}

/// Between two looks at the process.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// Until everything must have been given back.
const SETTLE: Duration = Duration::from_secs(10);
/// Unexpected answers that are kept to be shown.
const SHOWN: usize = 10;

/// A look at the process.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Look {
    pub done: usize,
    pub holding: Holding,
}

#[derive(Default)]
struct Tally {
    counts: BTreeMap<Kind, Counts>,
    shown: Vec<String>,
}

/// Runs it all; `progress` hears how many requests have ended.
pub async fn run(soak: &Soak, cancel: &CancellationToken, progress: impl Fn(usize) + Send + 'static) -> Result<SoakReport, Error> {
    let web = Web::new(&soak.url, soak.timeout);
    let model = first_model(&web).await?;
    let before = figures(&web).await?;
    let idle_before = soak.pid.and_then(Holding::of);
    let (next, done) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let tally = Arc::new(Mutex::new(Tally::default()));
    let (users, looking) = (TaskTracker::new(), CancellationToken::new());
    let begun = Instant::now();
    let all = soak.warmup + soak.requests;
    for _ in 0..soak.concurrency.min(all) {
        let (web, model, soak, cancel) = (web.clone(), model.clone(), soak.clone(), cancel.clone());
        let (next, done, tally) = (Arc::clone(&next), Arc::clone(&done), Arc::clone(&tally));
        users.spawn(async move {
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= all || cancel.is_cancelled() {
                    return;
                }
                let ask = mix::ask(&model, soak.seed, index);
                let kind = ask.kind;
                let end = web.send(ask).await;
                tally.lock().take(kind, end);
                done.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    users.close();
    let looks = users.spawn(look(soak.pid, Arc::clone(&done), looking.clone(), progress));
    // The looker is the last to leave.
    while done.load(Ordering::Relaxed) < all && !cancel.is_cancelled() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    looking.cancel();
    users.wait().await;
    let seconds = begun.elapsed().as_secs_f64();
    let looks = looks.await.unwrap_or_default();
    // Its connections end with it.
    drop(web);
    let web = Web::new(&soak.url, soak.timeout);
    let (after, left) = settle(&web, soak.pid, idle_before).await?;
    let Tally { counts, shown } = std::mem::take(&mut *tally.lock());
    Ok(SoakReport::new(soak, counts, shown, seconds, &looks, (&before, &after), (idle_before, left)))
}

impl Tally {
    fn take(&mut self, kind: Kind, end: End) {
        let counts = self.counts.entry(kind).or_default();
        counts.sent += 1;
        match end {
            End::Answered => counts.answered += 1,
            End::Left => counts.left += 1,
            End::Late => counts.late += 1,
            End::Refused => counts.refused += 1,
            End::Unexpected(what) => {
                counts.unexpected += 1;
                if self.shown.len() < SHOWN {
                    self.shown.push(what);
                }
            }
        }
    }
}

async fn look(pid: Option<u32>, done: Arc<AtomicUsize>, end: CancellationToken, progress: impl Fn(usize)) -> Vec<Look> {
    let mut looks = Vec::new();
    loop {
        let count = done.load(Ordering::Relaxed);
        progress(count);
        looks.extend(pid.and_then(Holding::of).map(|holding| Look { done: count, holding }));
        tokio::select! {
            () = end.cancelled() => return looks,
            () = tokio::time::sleep(LOOK_EVERY) => {}
        }
    }
}

async fn first_model(web: &Web) -> Result<String, Error> {
    let page = web.get("/v1/models").await?;
    let listed: serde_json::Value = serde_json::from_str(&page).unwrap_or_default();
    let name = listed["data"][0]["id"].as_str();
    name.map(str::to_owned).ok_or_else(|| Error::NoModel { url: "/v1/models".into(), why: "the list is empty".into() })
}

async fn figures(web: &Web) -> Result<BTreeMap<String, f64>, Error> {
    Ok(series(&web.get("/metrics").await?))
}

/// Waits until the server is at rest, if it ever is, and its connections are gone.
async fn settle(web: &Web, pid: Option<u32>, before: Option<Holding>) -> Result<(BTreeMap<String, f64>, Option<Holding>), Error> {
    let begun = Instant::now();
    loop {
        let now = figures(web).await?;
        let holding = pid.and_then(Holding::of);
        let closed = match (before, holding) {
            (Some(before), Some(now)) => now.descriptors <= before.descriptors,
            _ => true,
        };
        if (report::busy(&now).is_empty() && closed) || begun.elapsed() > SETTLE {
            return Ok((now, holding));
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}
