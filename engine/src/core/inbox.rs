//! What the step thread and everybody else share: commands in, figures out, and the permits that bound the queue.
//!
//! A request takes its permit here, under the lock, before it costs anything; so the queue is bounded however many
//! callers race. The step thread holds the lock for moments only, never while it computes.

use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use quire_proto::worker::v1::CacheEventBatch;
use tokio::sync::{Notify, mpsc};

use super::{EngineError, admission::NewRequest, handle::Load};
use crate::telemetry::EngineMetrics;

/// Names a request within one engine.
pub(crate) type RequestKey = u64;

/// What the step thread is asked to do.
pub(crate) enum Command {
    Start(Box<NewRequest>),
    /// The receiver is gone.
    Cancel(RequestKey),
    /// End every request in band.
    AbortAll,
    /// A snapshot of the prefix index, then its changes; the sender is dropped if it falls behind.
    Subscribe(mpsc::Sender<CacheEventBatch>),
}

/// How much may wait.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueueLimits {
    /// Sequences that run and wait together.
    pub sequences: usize,
    /// Prompt tokens that wait.
    pub waiting_tokens: usize,
}

/// What the step thread has, after a round of its loop.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Figures {
    /// Sequences that hold KV blocks.
    pub running: usize,
    pub kv_used: usize,
    /// Since the start.
    pub preemptions: u64,
    /// Since the start.
    pub steps: u64,
}

/// Requests that are in the engine, the inbox included.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Live {
    pub requests: usize,
    pub sequences: usize,
    /// Prompt tokens of sequences that were never admitted to the KV memory.
    pub waiting_tokens: usize,
}

struct State {
    commands: Vec<Command>,
    live: Live,
    next_key: RequestKey,
    draining: bool,
    stopping: bool,
    dead: bool,
    figures: Figures,
    kv_total: usize,
    /// When work last appeared or a step last ended.
    progress: Instant,
}

pub(crate) struct Inbox {
    state: Mutex<State>,
    wake: Condvar,
    /// Notified when the last request leaves and when the engine dies.
    idle: Notify,
    limits: QueueLimits,
    metrics: EngineMetrics,
}

impl Inbox {
    pub fn new(limits: QueueLimits, kv_total: usize, metrics: EngineMetrics) -> Self {
        let state = State {
            commands: Vec::new(),
            live: Live::default(),
            next_key: 0,
            draining: false,
            stopping: false,
            dead: false,
            figures: Figures::default(),
            kv_total,
            progress: Instant::now(),
        };
        Self { state: Mutex::new(state), wake: Condvar::new(), idle: Notify::new(), limits, metrics }
    }

    pub fn metrics(&self) -> &EngineMetrics {
        &self.metrics
    }

    /// Takes the permit of a request, or says why there is none.
    pub fn start(&self, mut request: Box<NewRequest>) -> Result<RequestKey, EngineError> {
        let mut state = self.state.lock();
        if state.dead || state.stopping {
            return Err(EngineError::Stopped);
        }
        if state.draining {
            return Err(EngineError::Draining);
        }
        let live = &mut state.live;
        if live.sequences >= self.limits.sequences {
            return Err(EngineError::Overloaded(format!("{} sequences are running or waiting already", live.sequences)));
        }
        let tokens = request.waiting_tokens();
        if live.waiting_tokens > 0 && live.waiting_tokens + tokens > self.limits.waiting_tokens {
            return Err(EngineError::Overloaded(format!("{} prompt tokens are waiting already", live.waiting_tokens)));
        }
        live.requests += 1;
        live.sequences += request.choices;
        live.waiting_tokens += tokens;
        if live.requests == 1 {
            state.progress = Instant::now();
        }
        let key = state.next_key;
        state.next_key += 1;
        request.key = key;
        state.commands.push(Command::Start(request));
        self.publish(&state);
        drop(state);
        self.wake.notify_one();
        Ok(key)
    }

    /// Hands a command over; false if nobody will read it.
    pub fn push(&self, command: Command) -> bool {
        let mut state = self.state.lock();
        if state.dead {
            return false;
        }
        state.commands.push(command);
        drop(state);
        self.wake.notify_one();
        true
    }

    /// Moves the waiting commands to `out`. With nothing to do (`idle`), blocks until there are some.
    /// Returns false once the engine is to stop.
    pub fn receive(&self, idle: bool, out: &mut Vec<Command>) -> bool {
        let mut state = self.state.lock();
        while idle && state.commands.is_empty() && !state.stopping {
            self.wake.wait(&mut state);
        }
        out.append(&mut state.commands);
        !state.stopping
    }

    /// Records what a round of the step loop changed.
    pub fn report(&self, gone: Live, figures: Figures) {
        let mut state = self.state.lock();
        let live = &mut state.live;
        live.requests -= gone.requests.min(live.requests);
        live.sequences -= gone.sequences.min(live.sequences);
        live.waiting_tokens -= gone.waiting_tokens.min(live.waiting_tokens);
        let idle = live.requests == 0;
        if figures.steps > state.figures.steps {
            state.progress = Instant::now();
        }
        state.figures = figures;
        self.publish(&state);
        drop(state);
        if idle && gone.requests > 0 {
            self.idle.notify_waiters();
        }
    }

    fn publish(&self, state: &MutexGuard<'_, State>) {
        let Figures { running, kv_used, .. } = state.figures;
        self.metrics.set_load(running, state.live.sequences.saturating_sub(running), kv_used, state.kv_total);
    }

    pub fn load(&self) -> Load {
        let state = self.state.lock();
        let (live, figures) = (state.live, state.figures);
        Load {
            running: figures.running,
            waiting: live.sequences.saturating_sub(figures.running),
            waiting_prompt_tokens: live.waiting_tokens,
            requests: live.requests,
            kv_blocks_used: figures.kv_used,
            kv_blocks_total: state.kv_total,
            steps: figures.steps,
            preemptions: figures.preemptions,
            step_age: if live.requests > 0 { state.progress.elapsed() } else { Duration::ZERO },
            draining: state.draining,
            alive: !state.dead,
        }
    }

    pub fn set_draining(&self) {
        self.state.lock().draining = true;
    }

    /// Waits until no request is left (or the engine is dead).
    pub async fn idle(&self) {
        loop {
            let notified = self.idle.notified();
            tokio::pin!(notified);
            // Registered before the look, so that a change in between is not lost.
            notified.as_mut().enable();
            {
                let state = self.state.lock();
                if state.live.requests == 0 || state.dead {
                    return;
                }
            }
            notified.await;
        }
    }

    pub fn stop(&self) {
        self.state.lock().stopping = true;
        self.wake.notify_one();
    }

    /// The step thread has ended: nothing is running and nothing will be.
    pub fn died(&self) {
        let mut state = self.state.lock();
        state.dead = true;
        state.live = Live::default();
        state.figures.running = 0;
        state.figures.kv_used = 0;
        let commands = std::mem::take(&mut state.commands);
        self.publish(&state);
        drop(state);
        // Dropped outside the lock: receivers of requests in there learn of it.
        drop(commands);
        self.idle.notify_waiters();
    }
}
