use std::{
    sync::Arc,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use quire_proto::worker::v1::{CacheEventBatch, GenerateRequest};
use tokio::sync::mpsc;

use super::{
    EngineError, EventReceiver,
    admission::{Admission, AdmissionLimits},
    inbox::{Command, Inbox, QueueLimits},
    publisher::channel_len,
    step_loop::{StepLoop, StepLoopParts},
};
use crate::{
    cache::{Footprint, GroupKind},
    config::EngineConfig,
    model::ModelCard,
    runner::{Executor, MemoryPlan},
    scheduler::{Scheduler, SchedulerConfig},
    telemetry::EngineMetrics,
};

/// The KV memory that the executor has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvFigures {
    pub blocks: usize,
    /// Tokens per block.
    pub block_size: usize,
    /// What each cache group keeps.
    pub groups: Vec<GroupKind>,
}

impl From<&MemoryPlan> for KvFigures {
    fn from(plan: &MemoryPlan) -> Self {
        Self { blocks: plan.kv.blocks, block_size: plan.kv.block_size, groups: plan.footprint.groups.clone() }
    }
}

/// What the engine is doing. True at the moment of the call, waiting requests included that no step has seen yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// Sequences that hold KV blocks.
    pub running: usize,
    /// Sequences that do not.
    pub waiting: usize,
    pub waiting_prompt_tokens: usize,
    /// Requests (of one or more sequences) that have not ended.
    pub requests: usize,
    pub kv_blocks_used: usize,
    pub kv_blocks_total: usize,
    /// Steps run so far.
    pub steps: u64,
    /// Sequences that lost their KV blocks to others, so far.
    pub preemptions: u64,
    /// Since the last step ended, or since work appeared; zero while idle.
    pub step_age: Duration,
    pub draining: bool,
    /// False once the step thread has ended.
    pub alive: bool,
}

/// Whether requests should be sent here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Health {
    pub alive: bool,
    pub draining: bool,
    /// As in [`Load`].
    pub step_age: Duration,
    /// Work is there, but no step has ended for longer than the configuration allows.
    pub stalled: bool,
    /// The same, for so long that it is not going to end.
    pub hopeless: bool,
}

impl Health {
    /// Alive, making progress, and taking requests.
    #[must_use]
    pub fn ready(&self) -> bool {
        self.alive && !self.draining && !self.stalled
    }
}

/// One model's step loop. Clones share it; the thread ends when the last one is dropped, or at [`shutdown`](Self::shutdown).
#[derive(Clone)]
pub struct EngineHandle {
    shared: Arc<Shared>,
}

struct Shared {
    inbox: Arc<Inbox>,
    admission: Admission,
    stall_after: Duration,
    give_up_after: Option<Duration>,
    epoch: u64,
    kv: KvFigures,
    card: ModelCard,
    limits: AdmissionLimits,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.inbox.stop();
    }
}

impl EngineHandle {
    /// Starts the step thread. Install the metrics recorder before: metric handles are fetched here, once.
    pub fn spawn(executor: Box<dyn Executor>, kv: KvFigures, card: ModelCard, config: &EngineConfig) -> Result<Self, EngineError> {
        let limits = executor.limits();
        if kv.blocks == 0
            || kv.block_size == 0
            || kv.groups.is_empty()
            || limits.rows == 0
            || limits.sequences == 0
            || limits.logit_rows == 0
        {
            return Err(EngineError::Start(format!("nothing can run with {kv:?} and {limits:?}")));
        }
        let max_rows = at_most(config.max_batched_tokens, limits.rows);
        let max_sequences = at_most(config.max_sequences, limits.sequences).min(max_rows).min(limits.logit_rows);
        let max_prefill_chunk = at_most(config.max_prefill_chunk, max_rows);
        let footprint = Footprint { groups: kv.groups.clone(), block_size: kv.block_size, step_rows: max_prefill_chunk };
        let longest = footprint.longest(kv.blocks);
        let capacity = longest.min(limits.blocks_per_sequence * kv.block_size);
        let admission_limits = AdmissionLimits {
            // The last token of a sequence is never fed back, so it needs no slot.
            max_context: card.max_context.min(capacity + 1),
            vocab_size: card.vocab_size,
            max_logprobs: limits.top_logprobs,
            max_sequences,
            max_rows,
        };
        let epoch = random_epoch();
        let scheduler = Scheduler::new(SchedulerConfig {
            max_sequences,
            max_rows,
            max_logit_rows: limits.logit_rows,
            max_prefill_chunk,
            block_size: kv.block_size,
            groups: kv.groups.clone(),
            blocks: kv.blocks,
            watermark_blocks: (config.watermark.clamp(0.0, 1.0) * kv.blocks as f64).ceil() as usize,
            prefix_cache: config.prefix_cache,
            policy: config.policy,
            itl_target: config.itl_target,
            epoch,
        });
        let metrics = EngineMetrics::new(card.names.first().map_or("", String::as_str), &kv, config);
        let waiting_tokens =
            if config.max_waiting_tokens == 0 { 16 * longest.min(kv.blocks * kv.block_size) } else { config.max_waiting_tokens };
        let queue = QueueLimits { sequences: max_sequences + config.max_waiting.max(1), waiting_tokens };
        let inbox = Arc::new(Inbox::new(queue, kv.blocks, metrics));
        let started = Instant::now();
        let admission = Admission::new(admission_limits, &card, kv.block_size, config.prefix_cache, started);
        let parts = StepLoopParts { inbox: Arc::clone(&inbox), scheduler, executor, started, step_ahead: config.step_ahead };
        let thread = std::thread::Builder::new()
            .name("quire-step".to_owned())
            .spawn(move || StepLoop::run(parts))
            .map_err(|error| EngineError::Start(format!("cannot start the step thread: {error}")))?;
        let shared = Shared {
            inbox,
            admission,
            stall_after: config.stall_after,
            give_up_after: config.give_up_after,
            epoch,
            kv,
            card,
            limits: admission_limits,
            thread: Mutex::new(Some(thread)),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Checks and queues a request; `model` is not looked at. Dropping the receiver cancels the request.
    pub fn generate(&self, request: GenerateRequest) -> Result<EventReceiver, EngineError> {
        let shared = &self.shared;
        let result = shared.admission.prepare(request).and_then(|(request, receiver)| {
            let choices = request.choices;
            shared.inbox.start(request).map(|key| EventReceiver::new(receiver, Arc::clone(&shared.inbox), key, choices))
        });
        if let Err(error) = &result {
            shared.inbox.metrics().rejected(error);
        }
        result
    }

    /// What the engine is doing now.
    #[must_use]
    pub fn load(&self) -> Load {
        self.shared.inbox.load()
    }

    /// Whether requests should be sent here: readiness is forward progress.
    #[must_use]
    pub fn health(&self) -> Health {
        let load = self.load();
        let Shared { stall_after, give_up_after, .. } = &*self.shared;
        Health {
            alive: load.alive,
            draining: load.draining,
            step_age: load.step_age,
            stalled: load.step_age > *stall_after,
            hopeless: !load.alive || give_up_after.is_some_and(|limit| load.step_age > limit),
        }
    }

    /// Batches of changes to the prefix index, the first of them a snapshot. The channel ends when the subscriber falls
    /// behind (subscribe again) or the engine stops (see [`Load::alive`]).
    pub fn cache_events(&self) -> Result<mpsc::Receiver<CacheEventBatch>, EngineError> {
        let (sender, receiver) = mpsc::channel(channel_len(self.shared.kv.blocks));
        if self.shared.inbox.push(Command::Subscribe(sender)) { Ok(receiver) } else { Err(EngineError::Stopped) }
    }

    /// Refuses new requests from now on, waits for the rest, and ends in band (reason abort) what is left at the
    /// deadline. Returns how many requests that were. Without a deadline it waits as long as they take.
    pub async fn drain(&self, deadline: Option<Duration>) -> usize {
        let inbox = &self.shared.inbox;
        inbox.set_draining();
        let Some(deadline) = deadline else {
            inbox.idle().await;
            return 0;
        };
        if tokio::time::timeout(deadline, inbox.idle()).await.is_ok() {
            return 0;
        }
        let aborted = inbox.load().requests;
        if inbox.push(Command::AbortAll) {
            inbox.idle().await;
        }
        aborted
    }

    /// Ends what is running (reason abort) and joins the step thread. Blocks for the rest of the current step.
    pub fn shutdown(&self) {
        self.shared.inbox.stop();
        if let Some(thread) = self.shared.thread.lock().take() {
            // The loop catches its own panics; there is nothing to learn from the result.
            let _ = thread.join();
        }
    }

    #[must_use]
    pub fn card(&self) -> &ModelCard {
        &self.shared.card
    }

    #[must_use]
    pub fn kv(&self) -> &KvFigures {
        &self.shared.kv
    }

    /// What requests may ask for here, after configuration and device.
    #[must_use]
    pub fn limits(&self) -> AdmissionLimits {
        self.shared.limits
    }

    /// Numbers this life of the engine; cached knowledge of another epoch is void.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.shared.epoch
    }
}

/// `wanted`, or all if it is 0.
fn at_most(wanted: usize, limit: usize) -> usize {
    if wanted == 0 { limit } else { wanted.min(limit) }
}

/// Differs between lives of a worker; its value means nothing.
fn random_epoch() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    let mut hasher = RandomState::new().build_hasher();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    hasher.write_u128(now.as_nanos());
    hasher.finish()
}
