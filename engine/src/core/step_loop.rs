//! Commands in, steps (see `steps`), figures and events out.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Instant,
};

use quire_kernels::plan::{StepOutput, StepPlan};
use quire_proto::worker::v1::{FinishReason, Finished};

use super::{
    admission::{NewChoice, NewRequest},
    emit::{self, Choice, Choices, Request, Requests},
    inbox::{Command, Figures, Inbox, RequestKey},
    publisher::Publisher,
    steps::{Broken, Flight},
};
use crate::{
    runner::Executor,
    sampling::Stop,
    scheduler::{Counters, Outcome, Plan, Scheduler, SequenceId},
    telemetry::Timing,
};

/// What the step thread starts with.
pub(crate) struct StepLoopParts {
    pub inbox: Arc<Inbox>,
    pub scheduler: Scheduler,
    pub executor: Box<dyn Executor>,
    /// Zero of the scheduler's time.
    pub started: Instant,
    /// Steps to plan while one is under way.
    pub step_ahead: usize,
}

pub(crate) struct StepLoop {
    pub(super) inbox: Arc<Inbox>,
    pub(super) scheduler: Scheduler,
    pub(super) executor: Box<dyn Executor>,
    pub(super) started: Instant,
    pub(super) requests: Requests,
    pub(super) choices: Choices,
    next_arrival: u64,
    publisher: Publisher,
    pub(super) counted: Counters,
    pub(super) steps: u64,
    /// Steps that are planned while one is under way: 0 or 1.
    pub(super) ahead: usize,
    /// The step under way that was not waited for.
    pub(super) flight: Option<Flight>,
    /// When the last step ended.
    pub(super) landed: Instant,
    // Reused from step to step.
    commands: Vec<Command>,
    pub(super) plans: Vec<Plan>,
    pub(super) step_plan: StepPlan,
    pub(super) output: StepOutput,
    pub(super) outcomes: Vec<Outcome>,
    deserted: Vec<RequestKey>,
}

impl StepLoop {
    /// Runs until the inbox says stop. Whatever happens, the inbox learns that it is over.
    pub fn run(parts: StepLoopParts) {
        let mut step_loop = Self::new(parts);
        let result = catch_unwind(AssertUnwindSafe(|| step_loop.main()));
        match result {
            Ok(Ok(())) => {}
            Ok(Err(Broken)) => tracing::error!("the device computes no more; the engine ends, and its requests with it"),
            Err(_) => tracing::error!("the step loop panicked; its requests are lost"),
        }
        // Streams end when the loop is dropped: whoever sees one end finds the engine dead already.
        step_loop.inbox.died();
    }

    fn new(parts: StepLoopParts) -> Self {
        let mut step_plan = StepPlan::default();
        step_plan.reserve(&parts.executor.limits(), parts.scheduler.cache().groups().len());
        Self {
            inbox: parts.inbox,
            scheduler: parts.scheduler,
            executor: parts.executor,
            started: parts.started,
            requests: Requests::default(),
            choices: Choices::default(),
            next_arrival: 0,
            publisher: Publisher::default(),
            counted: Counters::default(),
            steps: 0,
            ahead: parts.step_ahead.min(1),
            flight: None,
            landed: parts.started,
            commands: Vec::new(),
            plans: Vec::new(),
            step_plan,
            output: StepOutput::default(),
            outcomes: Vec::new(),
            deserted: Vec::new(),
        }
    }

    fn main(&mut self) -> Result<(), Broken> {
        loop {
            let idle = self.requests.is_empty() && self.flight.is_none();
            let go_on = self.inbox.receive(idle, &mut self.commands);
            let mut commands = std::mem::take(&mut self.commands);
            commands.drain(..).for_each(|command| self.obey(command));
            self.commands = commands;
            if !go_on {
                self.abort_all("the engine is shutting down");
            }
            if !self.requests.is_empty() || self.flight.is_some() {
                self.step()?;
            }
            self.publisher.publish(self.scheduler.cache_mut());
            self.report();
            if !go_on && self.flight.is_none() {
                return Ok(());
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
            Command::Subscribe(sender) => self.publisher.subscribe(self.scheduler.cache_mut(), sender),
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

    /// The first choice computes the prompt; the others take it over.
    fn queue(&mut self, key: RequestKey, mut new: NewChoice, prompt_logprobs: i32) {
        new.sequence.fork_of = self.requests.get_mut(key).and_then(|request| request.first);
        let waiting_tokens = new.sequence.tokens.len();
        let generated = new.sampler.generated();
        match self.scheduler.add(new.sequence) {
            Ok(id) => {
                let Some(request) = self.requests.get_mut(key) else { return };
                request.sequences.push(id);
                request.first.get_or_insert(id);
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
    pub(super) fn finish(&mut self, id: SequenceId, stop: Stop, message: &str) {
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

    pub(super) fn release_held(&mut self, key: RequestKey) {
        let held = self.requests.get_mut(key).map(|request| std::mem::take(&mut request.held)).unwrap_or_default();
        for choice in held {
            self.queue(key, choice, -1);
        }
    }
}

fn finished(choice: u32, reason: FinishReason, stop_token_id: Option<u32>, generated: usize, message: &str) -> Finished {
    Finished { choice, reason: reason.into(), stop_token_id, generated_tokens: generated as u32, message: message.to_owned() }
}
