//! The workers there are: what they serve, whether they can be reached, how busy they are.
//!
//! Owns one snapshot from which every decision is made; there is no second list. A worker that is gone stays in it, known
//! but unreachable, so that its models are "not available now" rather than "unknown".

mod artefacts;
mod member;
mod remote;
mod supervise;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use quire_proto::worker::v1::{ModelCard, NumericsFingerprint};
use rand::Rng;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::FleetConfig;
use crate::error::ApiError;
use crate::text::ModelText;
use crate::worker::Worker;

pub use member::{InFlight, Member};
pub use remote::RemoteWorker;

/// All workers of this router. Dropping it stops watching them.
pub struct Fleet {
    shared: Arc<Shared>,
    cancel: CancellationToken,
    tracker: TaskTracker,
}

/// What the tasks that watch workers share with the fleet.
struct Shared {
    config: FleetConfig,
    snapshot: ArcSwap<Snapshot>,
    members: Mutex<Vec<Known>>,
    artefacts: artefacts::Cache,
    /// Raised with every change of what can be reached.
    changed: watch::Sender<u64>,
}

/// A worker and the models by which it described itself last.
struct Known {
    member: Arc<Member>,
    models: Option<Vec<ModelOffer>>,
}

/// A model as one worker describes it.
#[derive(Clone)]
struct ModelOffer {
    card: Arc<ModelCard>,
    text: Arc<ModelText>,
}

/// What is served where, at one moment.
#[derive(Default)]
pub struct Snapshot {
    /// By canonical name.
    models: BTreeMap<String, Vec<Serving>>,
    /// Alias to canonical name.
    aliases: BTreeMap<String, String>,
    members: Vec<Arc<Member>>,
    /// Some worker has described itself since the start.
    heard: bool,
}

/// One model at one worker.
#[derive(Clone)]
pub struct Serving {
    pub member: Arc<Member>,
    pub card: Arc<ModelCard>,
    pub text: Arc<ModelText>,
}

/// A model, and the workers that serve it with one tokenizer and template.
#[derive(Clone)]
pub struct Model {
    /// The canonical name.
    pub name: String,
    pub card: Arc<ModelCard>,
    pub text: Arc<ModelText>,
    servings: Vec<Serving>,
}

impl Fleet {
    /// An empty fleet.
    #[must_use]
    pub fn new(config: FleetConfig) -> Arc<Self> {
        let shared = Shared {
            config,
            snapshot: ArcSwap::default(),
            members: Mutex::default(),
            artefacts: artefacts::Cache::default(),
            changed: watch::Sender::new(0),
        };
        Arc::new(Self { shared: Arc::new(shared), cancel: CancellationToken::new(), tracker: TaskTracker::new() })
    }

    /// Adds a worker and watches it from now on (needs a tokio runtime). `name` is for logs and metrics.
    pub fn add(&self, name: &str, worker: Arc<dyn Worker>) {
        let member = Arc::new(Member::new(name, worker));
        self.shared.members.lock().push(Known { member: member.clone(), models: None });
        self.shared.publish();
        let shared = self.shared.clone();
        let cancel = self.cancel.clone();
        self.tracker.spawn(async move {
            cancel.run_until_cancelled(supervise::supervise(&shared, &member)).await;
        });
    }

    /// Adds workers over the network, each `host:port` or a URL.
    ///
    /// # Errors
    /// [`ApiError::Invalid`] if one is not an address; then none is added.
    pub fn add_remote(&self, addresses: &[String]) -> Result<(), ApiError> {
        let workers = addresses.iter().map(|address| RemoteWorker::new(address).map(Arc::new)).collect::<Result<Vec<_>, _>>()?;
        addresses.iter().zip(workers).for_each(|(address, worker)| self.add(address, worker));
        Ok(())
    }

    /// Whether some worker can be reached.
    #[must_use]
    pub fn ready(&self) -> bool {
        self.snapshot().members.iter().any(|member| member.reachable())
    }

    /// Waits until [`Fleet::ready`], at most `limit`; tells whether it is.
    pub async fn wait_ready(&self, limit: Duration) -> bool {
        let mut changed = self.shared.changed.subscribe();
        tokio::time::timeout(limit, async { while !self.ready() && changed.changed().await.is_ok() {} }).await.is_ok() && self.ready()
    }

    /// What is served where, now.
    #[must_use]
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.shared.snapshot.load_full()
    }

    /// Stops watching; returns when every task has ended.
    pub async fn shutdown(&self) {
        self.cancel.cancel();
        self.tracker.close();
        self.tracker.wait().await;
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        self.cancel.cancel();
    }
}

impl Shared {
    /// Makes a new snapshot of what is known. The lock is held until it is stored, so that none overwrites a newer one.
    fn publish(&self) {
        let members = self.members.lock();
        let mut snapshot = Snapshot::default();
        for known in members.iter() {
            snapshot.members.push(known.member.clone());
            snapshot.heard |= known.models.is_some();
            for offer in known.models.iter().flatten() {
                let Some(name) = offer.card.names.first() else { continue };
                let serving = Serving { member: known.member.clone(), card: offer.card.clone(), text: offer.text.clone() };
                snapshot.models.entry(name.clone()).or_default().push(serving);
                for alias in &offer.card.names {
                    snapshot.aliases.entry(alias.clone()).or_insert_with(|| name.clone());
                }
            }
        }
        self.snapshot.store(Arc::new(snapshot));
        drop(members);
        self.changed.send_modify(|count| *count += 1);
    }

    fn describe(&self, member: &Arc<Member>, models: Vec<ModelOffer>) {
        if let Some(known) = self.members.lock().iter_mut().find(|known| Arc::ptr_eq(&known.member, member)) {
            known.models = Some(models);
        }
        member.set_reachable(true);
        self.publish();
    }

    fn lose(&self, member: &Arc<Member>) {
        member.set_reachable(false);
        self.changed.send_modify(|count| *count += 1);
    }
}

impl Snapshot {
    /// Every worker, reachable or not.
    #[must_use]
    pub fn members(&self) -> &[Arc<Member>] {
        &self.members
    }

    /// Every model, in order of canonical names.
    pub fn models(&self) -> impl Iterator<Item = Model> + '_ {
        self.models.keys().filter_map(|name| self.select(name))
    }

    /// The model of a name or alias.
    ///
    /// # Errors
    /// [`ApiError::ModelNotFound`]; [`ApiError::Unavailable`] while no worker has been heard of yet.
    pub fn resolve(&self, name: &str) -> Result<Model, ApiError> {
        // A canonical name goes before another model's alias.
        let canonical = self.models.get_key_value(name).map(|(name, _)| name).or_else(|| self.aliases.get(name));
        match canonical.and_then(|name| self.select(name)) {
            Some(model) => Ok(model),
            None if self.heard => Err(ApiError::ModelNotFound(name.to_owned())),
            None => Err(ApiError::Unavailable("No worker can be reached yet.".to_owned())),
        }
    }

    /// Workers may serve a name with different tokenizers while they are being replaced; a request needs one of these.
    fn select(&self, name: &str) -> Option<Model> {
        let servings = self.models.get(name)?;
        let chosen = servings.iter().find(|serving| serving.member.takes(name)).or(servings.first())?;
        let same = |other: &&Serving| {
            let (one, other) = (&chosen.card, &other.card);
            one.tokenizer_hash == other.tokenizer_hash && one.chat_template_hash == other.chat_template_hash
        };
        Some(Model {
            name: name.to_owned(),
            card: chosen.card.clone(),
            text: chosen.text.clone(),
            servings: servings.iter().filter(same).cloned().collect(),
        })
    }
}

impl Model {
    /// Some worker takes requests for it.
    #[must_use]
    pub fn available(&self) -> bool {
        self.servings.iter().any(|serving| serving.member.takes(&self.name))
    }

    /// A worker for a request that needs `tokens` of context: the less busy of two at random, none of `excluded`; with
    /// `numerics`, only one whose outputs are equal to those that were computed so.
    #[must_use]
    pub fn pick(&self, tokens: u32, excluded: &[Arc<Member>], numerics: Option<&NumericsFingerprint>) -> Option<(Serving, InFlight)> {
        let fits = |serving: &&Serving| {
            serving.member.takes(&self.name)
                && serving.card.max_context >= tokens
                && !excluded.iter().any(|member| Arc::ptr_eq(member, &serving.member))
                && numerics.is_none_or(|numerics| serving.card.numerics.as_ref() == Some(numerics))
        };
        let candidates: Vec<&Serving> = self.servings.iter().filter(fits).collect();
        let chosen = match candidates.as_slice() {
            [] => return None,
            [only] => *only,
            several => {
                let mut random = rand::rng();
                let first = random.random_range(0..several.len());
                let second = (first + random.random_range(1..several.len())) % several.len();
                let (first, second) = (several[first], several[second]);
                if second.member.busy(&self.name) < first.member.busy(&self.name) { second } else { first }
            }
        };
        Some((chosen.clone(), chosen.member.enter()))
    }
}

#[cfg(test)]
#[path = "fleet_tests.rs"]
mod tests;
