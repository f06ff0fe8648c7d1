//! inbox → schedule → fill → submit, wait → commit → report → emit.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::{Duration, Instant},
};

use quire_kernels::plan::{GroupPlan, NO_TOKEN, StepOutput, StepPlan};
use quire_proto::worker::v1::{CacheEventBatch, FinishReason, Finished, StoredBlock};
use tokio::sync::mpsc;

use super::{
    admission::{NewChoice, NewRequest},
    emit::{self, Choice, Choices, Request, Requests},
    fill::fill,
    inbox::{Command, Figures, Inbox, RequestKey},
};
use crate::{
    cache::CacheChanges,
    runner::Executor,
    sampling::Stop,
    scheduler::{Counters, Outcome, Plan, Scheduler, SequenceId},
    telemetry::Timing,
};

/// A plan without rows while there is work should not be; if it is, the loop must not spin.
const EMPTY_PLAN_PAUSE: Duration = Duration::from_millis(5);

/// What the step thread starts with.
pub(crate) struct StepLoopParts {
    pub inbox: Arc<Inbox>,
    pub scheduler: Scheduler,
    pub executor: Box<dyn Executor>,
    /// Zero of the scheduler's time.
    pub started: Instant,
}

pub(crate) struct StepLoop {
    inbox: Arc<Inbox>,
    scheduler: Scheduler,
    executor: Box<dyn Executor>,
    started: Instant,
    requests: Requests,
    choices: Choices,
    next_arrival: u64,
    subscribers: Vec<mpsc::Sender<CacheEventBatch>>,
    counted: Counters,
    steps: u64,
    // Reused from step to step.
    commands: Vec<Command>,
    plan: Plan,
    step_plan: StepPlan,
    output: StepOutput,
    outcomes: Vec<Outcome>,
    deserted: Vec<RequestKey>,
}

impl StepLoop {
    /// Runs until the inbox says stop. Whatever happens, the inbox learns that it is over.
    pub fn run(parts: StepLoopParts) {
        let inbox = Arc::clone(&parts.inbox);
        let result = catch_unwind(AssertUnwindSafe(|| Self::new(parts).main()));
        if result.is_err() {
            tracing::error!("the step loop panicked; its requests are lost");
        }
        inbox.died();
    }

    fn new(parts: StepLoopParts) -> Self {
        let groups = parts.scheduler.cache().groups().iter().map(|_| GroupPlan::default()).collect();
        Self {
            inbox: parts.inbox,
            scheduler: parts.scheduler,
            executor: parts.executor,
            started: parts.started,
            requests: Requests::default(),
            choices: Choices::default(),
            next_arrival: 0,
            subscribers: Vec::new(),
            counted: Counters::default(),
            steps: 0,
            commands: Vec::new(),
            plan: Plan::default(),
            step_plan: StepPlan { groups, ..StepPlan::default() },
            output: StepOutput::default(),
            outcomes: Vec::new(),
            deserted: Vec::new(),
        }
    }

    fn main(mut self) {
        loop {
            let go_on = self.inbox.receive(self.requests.is_empty(), &mut self.commands);
            let mut commands = std::mem::take(&mut self.commands);
            commands.drain(..).for_each(|command| self.obey(command));
            self.commands = commands;
            if !go_on {
                self.abort_all("the engine is shutting down");
            }
            if !self.requests.is_empty() {
                self.step();
            }
            self.publish_cache_events();
            self.report();
            if !go_on {
                return;
            }
        }
    }

    /// Figures first, then events: whoever reads a request's last event finds it gone from the figures.
    fn report(&mut self) {
        self.report_figures();
        let mut deserted = std::mem::take(&mut self.deserted);
        self.requests.flush(&mut deserted);
        let cancelled = !deserted.is_empty();
        deserted.drain(..).for_each(|key| self.cancel(key));
        self.deserted = deserted;
        if cancelled {
            self.report_figures();
        }
    }

    fn report_figures(&mut self) {
        let figures = Figures {
            running: self.scheduler.running(),
            kv_used: self.scheduler.cache().used(),
            preemptions: self.counted.preemptions,
            steps: self.steps,
        };
        self.inbox.report(std::mem::take(&mut self.requests.gone), figures);
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Start(request) => self.start(*request),
            Command::Cancel(key) => self.cancel(key),
            Command::AbortAll => self.abort_all("the worker's drain deadline has passed"),
            Command::Subscribe(sender) => self.subscribe(sender),
        }
    }

    fn start(&mut self, mut new: NewRequest) {
        let key = new.key;
        let metrics = self.inbox.metrics();
        metrics.request_arrived(new.choices, new.max_tokens);
        let mut request = Request::new(&mut new);
        if let Some(Stop { reason, token }) = new.ended {
            // Nothing to compute, so nothing to score either.
            request.prompt_scores = None;
            let generated = request.generated;
            self.requests.insert(key, request);
            self.requests.start(key, metrics);
            let finished = finished(new.first_choice, reason, token, generated, "");
            metrics.choice_finished(emit::outcome(reason), &Timing::new(new.arrived), new.prompt_len, 0);
            self.requests.finished(key, finished, 0);
            return;
        }
        let mut sequences = std::mem::take(&mut new.sequences);
        let now = self.started.elapsed();
        for choice in &mut sequences {
            choice.sequence.arrived = now;
            choice.sequence.arrival = self.next_arrival;
            self.next_arrival += 1;
        }
        if new.prompt_logprobs >= 0 {
            request.held = sequences.split_off(1.min(sequences.len()));
        }
        self.requests.insert(key, request);
        for choice in sequences {
            self.queue(key, choice, new.prompt_logprobs);
        }
    }

    fn queue(&mut self, key: RequestKey, new: NewChoice, prompt_logprobs: i32) {
        let waiting_tokens = new.sequence.tokens.len();
        let generated = new.sampler.generated();
        match self.scheduler.add(new.sequence) {
            Ok(id) => {
                let Some(request) = self.requests.get_mut(key) else { return };
                request.sequences.push(id);
                let timing = Timing::new(request.arrived);
                let choice = Choice { id, request: key, index: new.index, sampler: new.sampler, prompt_logprobs, waiting_tokens, timing };
                self.choices.insert(choice);
            }
            // Admission has clipped requests to what fits; this is the second line.
            Err(error) => {
                self.inbox.metrics().row_failed();
                self.requests.finished(key, finished(new.index, FinishReason::Error, None, generated, &error.to_string()), waiting_tokens);
            }
        }
    }

    /// Frees everything of a request that nobody listens to.
    fn cancel(&mut self, key: RequestKey) {
        let Some(request) = self.requests.remove(key) else { return };
        let mut cancelled = request.held.len();
        for id in request.sequences {
            if let Some(choice) = self.choices.remove(id) {
                self.requests.gone.waiting_tokens += choice.waiting_tokens;
                self.scheduler.cancel(id);
                cancelled += 1;
            }
        }
        (0..cancelled).for_each(|_| self.inbox.metrics().choice_cancelled());
        tracing::debug!(request_id = %request.request_id, "cancelled");
    }

    fn abort_all(&mut self, message: &str) {
        for key in self.requests.keys() {
            let Some(request) = self.requests.get_mut(key) else { continue };
            let held = std::mem::take(&mut request.held);
            let sequences = std::mem::take(&mut request.sequences);
            for id in sequences {
                self.scheduler.cancel(id);
                self.finish(id, Stop { reason: FinishReason::Abort, token: None }, message);
            }
            for choice in held {
                let generated = choice.sampler.generated();
                let end = finished(choice.index, FinishReason::Abort, None, generated, message);
                self.requests.finished(key, end, choice.sequence.tokens.len());
            }
        }
    }

    /// Ends a choice whose sequence has left, or is about to leave, the scheduler.
    fn finish(&mut self, id: SequenceId, stop: Stop, message: &str) {
        let Some(choice) = self.choices.remove(id) else { return };
        let (key, generated) = (choice.request, choice.sampler.generated());
        let mut prompt_len = 0;
        let mut new_tokens = generated;
        if let Some(request) = self.requests.get_mut(key) {
            request.sequences.retain(|other| *other != id);
            prompt_len = request.prompt_len;
            new_tokens = generated.saturating_sub(request.generated);
        }
        self.inbox.metrics().choice_finished(emit::outcome(stop.reason), &choice.timing, prompt_len, new_tokens);
        self.requests.finished(key, finished(choice.index, stop.reason, stop.token, generated, message), choice.waiting_tokens);
        // Choices that wait for this one's scores would wait for ever.
        let held = self.requests.get_mut(key).filter(|request| !request.started).map(|request| std::mem::take(&mut request.held));
        for choice in held.unwrap_or_default() {
            let end = finished(choice.index, stop.reason, None, choice.sampler.generated(), message);
            self.requests.finished(key, end, choice.sequence.tokens.len());
        }
    }

    fn step(&mut self) {
        let began = Instant::now();
        let mut plan = std::mem::take(&mut self.plan);
        self.scheduler.plan(self.started.elapsed(), &mut plan);
        self.note_plan(&plan, began);
        if !plan.is_empty() {
            self.steps += 1;
            fill(&plan, &self.scheduler, &self.choices, &mut self.step_plan);
            match self.execute() {
                Ok(()) => self.commit(&plan),
                Err(message) => self.fail(&plan, &message),
            }
            let elapsed = began.elapsed();
            self.scheduler.observe(&plan, elapsed);
            self.inbox.metrics().step(plan.rows, elapsed);
        } else if !self.requests.is_empty() && self.scheduler.running() + self.scheduler.waiting() > 0 {
            std::thread::sleep(EMPTY_PLAN_PAUSE);
        }
        self.plan = plan;
    }

    fn note_plan(&mut self, plan: &Plan, now: Instant) {
        for &id in &plan.expired {
            self.finish(id, Stop { reason: FinishReason::Deadline, token: None }, "the deadline passed while the request waited");
        }
        for &(id, cached) in &plan.admitted {
            let Some(choice) = self.choices.get_mut(id) else { continue };
            self.requests.gone.waiting_tokens += std::mem::take(&mut choice.waiting_tokens);
            choice.timing.admitted = Some(now);
            let key = choice.request;
            if let Some(request) = self.requests.get_mut(key) {
                request.cached.get_or_insert(cached);
            }
            self.requests.start(key, self.inbox.metrics());
        }
        let counters = self.scheduler.counters();
        self.inbox.metrics().scheduled(&self.counted, &counters);
        self.counted = counters;
    }

    /// Runs the filled plan. A panic in there is an error like any other.
    fn execute(&mut self) -> Result<(), String> {
        let (executor, plan, output) = (&mut self.executor, &self.step_plan, &mut self.output);
        output.clear();
        let result = catch_unwind(AssertUnwindSafe(|| {
            let ticket = executor.submit(plan)?;
            executor.wait(ticket, output)
        }));
        match result {
            Ok(Ok(())) if output.ids.len() == plan.logit_rows.len() => Ok(()),
            Ok(Ok(())) => Err(format!("the device gave {} rows, not {}", output.ids.len(), plan.logit_rows.len())),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err("the step panicked".to_owned()),
        }
    }

    fn fail(&mut self, plan: &Plan, message: &str) {
        tracing::error!(step = plan.step, sequences = plan.entries.len(), "a step failed: {message}");
        self.inbox.metrics().step_failed();
        self.scheduler.fail(plan);
        for entry in &plan.entries {
            self.finish(entry.sequence, Stop { reason: FinishReason::Error, token: None }, message);
        }
    }

    fn commit(&mut self, plan: &Plan) {
        let now = Instant::now();
        let mut outcomes = std::mem::take(&mut self.outcomes);
        outcomes.clear();
        let mut row = 0;
        for entry in &plan.entries {
            let position = entry.start + entry.len;
            let scored = entry.scored.1 - entry.scored.0;
            let healthy = self.score(entry.sequence, row..row + scored);
            row += scored;
            let sampled = entry.samples.then_some(row);
            row += usize::from(entry.samples);
            outcomes.push(match sampled {
                _ if !healthy => self.row_failed(entry.sequence),
                Some(row) => self.accept(entry.sequence, row, position, now),
                None => Outcome::Computed,
            });
        }
        self.scheduler.commit(plan, &outcomes);
        self.outcomes = outcomes;
    }

    /// Takes the scores of prompt rows; false if one of them is not a number.
    fn score(&mut self, id: SequenceId, rows: std::ops::Range<usize>) -> bool {
        if rows.is_empty() {
            return true;
        }
        let Some(choice) = self.choices.get(id) else { return true };
        let Some(scores) = self.requests.get_mut(choice.request).and_then(|request| request.prompt_scores.as_mut()) else { return true };
        for row in rows {
            if self.output.ids[row] == NO_TOKEN {
                return false;
            }
            scores.push(emit::token_logprobs(&self.output, row));
        }
        true
    }

    /// Takes the token of a logit row; it stands at `position` in its sequence.
    fn accept(&mut self, id: SequenceId, row: usize, position: usize, now: Instant) -> Outcome {
        let token = self.output.ids[row];
        if token == NO_TOKEN {
            return self.row_failed(id);
        }
        let Some(choice) = self.choices.get_mut(id) else { return Outcome::Failed };
        let stop = choice.sampler.accept(token);
        self.inbox.metrics().token(&mut choice.timing, now);
        let logprobs = choice.sampler.wants_logprobs().then(|| emit::token_logprobs(&self.output, row));
        let key = choice.request;
        if self.requests.start(key, self.inbox.metrics()) {
            self.release_held(key);
        }
        let Some(choice) = self.choices.get(id) else { return Outcome::Failed };
        self.requests.token(choice, position, token, logprobs);
        match stop {
            None => Outcome::Token(token),
            Some(stop) => {
                self.finish(id, stop, "");
                Outcome::Finished
            }
        }
    }

    fn row_failed(&mut self, id: SequenceId) -> Outcome {
        self.inbox.metrics().row_failed();
        let message = "the model gave no finite logits, or every token was banned";
        self.finish(id, Stop { reason: FinishReason::Error, token: None }, message);
        Outcome::Failed
    }

    fn release_held(&mut self, key: RequestKey) {
        let held = self.requests.get_mut(key).map(|request| std::mem::take(&mut request.held)).unwrap_or_default();
        for choice in held {
            self.queue(key, choice, -1);
        }
    }

    fn subscribe(&mut self, sender: mpsc::Sender<CacheEventBatch>) {
        // What is pending belongs to those who listen already, and its number to the snapshot.
        self.publish_cache_events();
        let cache = self.scheduler.cache_mut();
        cache.events().listen(true);
        let (epoch, sequence) = cache.events().position();
        let stored = cache.snapshot().into_iter().map(|(hash, parent)| stored_block(&hash.0, &parent.0)).collect();
        let snapshot = CacheEventBatch { epoch, sequence, snapshot: true, stored, removed: Vec::new() };
        if sender.try_send(snapshot).is_ok() {
            self.subscribers.push(sender);
        }
    }

    /// A subscriber that is too slow loses its channel, which tells it to start again from a snapshot.
    fn publish_cache_events(&mut self) {
        if self.subscribers.is_empty() {
            return;
        }
        if let Some(changes) = self.scheduler.cache_mut().events().flush() {
            let batch = wire_changes(&changes);
            self.subscribers.retain(|subscriber| subscriber.try_send(batch.clone()).is_ok());
        }
        if self.subscribers.is_empty() {
            self.scheduler.cache_mut().events().listen(false);
        }
    }
}

fn finished(choice: u32, reason: FinishReason, stop_token_id: Option<u32>, generated: usize, message: &str) -> Finished {
    Finished { choice, reason: reason.into(), stop_token_id, generated_tokens: generated as u32, message: message.to_owned() }
}

fn wire_changes(changes: &CacheChanges) -> CacheEventBatch {
    CacheEventBatch {
        epoch: changes.epoch,
        sequence: changes.sequence,
        snapshot: false,
        stored: changes.stored.iter().map(|block| stored_block(&block.hash.0, &block.parent.0)).collect(),
        removed: changes.removed.iter().map(|hash| hash.0.to_vec()).collect(),
    }
}

fn stored_block(hash: &[u8; 16], parent: &[u8; 16]) -> StoredBlock {
    StoredBlock { hash: hash.to_vec(), parent: parent.to_vec() }
}
