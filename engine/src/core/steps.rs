//! One step: plan → fill → submit, wait → commit; and what to do when a step fails.
//!
//! With `ahead` = 1 a step is submitted before the one under way is waited for: its rows name tokens that the host doesn't
//! know yet. A step that fails takes the one planned on top of it along. Its sequences run again, one by one; whoever
//! fails alone is ended, and then the device is asked whether it can still compute.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    time::{Duration, Instant},
};

use quire_kernels::plan::NO_TOKEN;
use quire_proto::{block_hash::BlockHash, worker::v1::FinishReason};

use super::{emit, fill::fill, step_loop::StepLoop};
use crate::{
    runner::Ticket,
    sampling::Stop,
    scheduler::{NewSequence, Outcome, Plan, SequenceId},
};

/// A plan without rows while there is work should not be; if it is, the loop must not spin.
const EMPTY_PLAN_PAUSE: Duration = Duration::from_millis(5);

/// A step that was submitted.
pub(super) struct Flight {
    plan: Plan,
    ticket: Ticket,
    /// Logit rows.
    rows: usize,
    began: Instant,
}

/// The device fails whatever it is given.
#[derive(Debug)]
pub(super) struct Broken;

impl StepLoop {
    pub(super) fn step(&mut self) -> Result<(), Broken> {
        let began = Instant::now();
        let mut plan = self.plans.pop().unwrap_or_default();
        self.scheduler.plan(self.started.elapsed(), &mut plan);
        self.note_plan(&plan, began);
        let submitted = if plan.is_empty() { None } else { Some(self.submit(&plan)) };
        let rows = self.step_plan.logit_rows.len();
        let had_flight = self.flight.is_some();
        if let Some(flight) = self.flight.take() {
            if let Err(message) = self.wait(flight.ticket, flight.rows) {
                if let Some(Ok(ticket)) = submitted {
                    // Built on what failed: whatever it gave is void.
                    let _ = self.wait(ticket, rows);
                }
                return self.recover(&[&flight.plan, &plan], &message);
            }
            self.land(flight);
        }
        match submitted {
            Some(Ok(ticket)) => {
                let flight = Flight { plan, ticket, rows, began };
                if self.ahead > 0 {
                    self.flight = Some(flight);
                } else if let Err(message) = self.wait(ticket, rows) {
                    return self.recover(&[&flight.plan], &message);
                } else {
                    self.land(flight);
                }
            }
            Some(Err(message)) => return self.recover(&[&plan], &message),
            None => {
                self.plans.push(plan);
                if !had_flight && self.scheduler.running() + self.scheduler.waiting() > 0 {
                    std::thread::sleep(EMPTY_PLAN_PAUSE);
                }
            }
        }
        Ok(())
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

    /// Fills and submits. A panic in there is an error like any other.
    fn submit(&mut self, plan: &Plan) -> Result<Ticket, String> {
        self.steps += 1;
        let Self { executor, step_plan, scheduler, choices, .. } = self;
        let result = catch_unwind(AssertUnwindSafe(|| {
            fill(plan, scheduler, choices, step_plan);
            executor.submit(step_plan)
        }));
        match result {
            Ok(result) => result.map_err(|error| error.to_string()),
            Err(panic) => Err(panicked(&*panic)),
        }
    }

    /// Waits for a step of so many logit rows; their tokens are in `output`.
    fn wait(&mut self, ticket: Ticket, rows: usize) -> Result<(), String> {
        let Self { executor, output, .. } = self;
        output.clear();
        match catch_unwind(AssertUnwindSafe(|| executor.wait(ticket, output))) {
            Ok(Ok(())) if output.ids.len() == rows => Ok(()),
            Ok(Ok(())) => Err(format!("the device gave {} rows, not {rows}", output.ids.len())),
            Ok(Err(error)) => Err(error.to_string()),
            Err(panic) => Err(panicked(&*panic)),
        }
    }

    /// Commits a step whose output is there.
    fn land(&mut self, flight: Flight) {
        let Flight { plan, began, .. } = flight;
        self.commit(&plan);
        let now = Instant::now();
        // With a step ahead, this one began when the one before it ended.
        let elapsed = now - began.max(self.landed).min(now);
        self.landed = now;
        self.scheduler.observe(&plan, elapsed);
        self.inbox.metrics().step(plan.rows, elapsed);
        self.plans.push(plan);
    }

    /// The first of these plans failed, the second was built on it.
    fn recover(&mut self, plans: &[&Plan], message: &str) -> Result<(), Broken> {
        let Some(failed) = plans.first() else { return Ok(()) };
        tracing::error!(step = failed.step, sequences = failed.entries.len(), "a step failed: {message}");
        let before = self.scheduler.counters().reruns;
        let guilty = self.scheduler.fail(plans);
        self.inbox.metrics().step_failed(self.scheduler.counters().reruns - before);
        let Some(id) = guilty else { return Ok(()) };
        if let Some(request) = self.choices.get(id).map(|choice| choice.request).and_then(|key| self.requests.get_mut(key)) {
            tracing::error!(request_id = %request.request_id, "a step failed again with this request alone: {message}");
        }
        self.inbox.metrics().row_failed();
        self.finish(
            id,
            Stop { reason: FinishReason::Error, token: None },
            "a step with this request failed, and failed again with this request alone",
        );
        self.probe()
    }

    /// One row of a sequence of our own: can the device still compute?
    fn probe(&mut self) -> Result<(), Broken> {
        let root = BlockHash::root("", b"");
        let tokens = vec![0];
        let probe = NewSequence {
            prompt_len: 1,
            max_len: 2,
            root,
            hashes: Vec::new(),
            use_index: false,
            priority: i32::MIN,
            arrival: 0,
            arrived: Duration::ZERO,
            deadline: None,
            score_prompt: false,
            step_ahead: false,
            fork_of: None,
            tokens,
        };
        let Ok(id) = self.scheduler.add(probe) else { return Ok(()) };
        self.scheduler.isolate(id);
        let mut plan = self.plans.pop().unwrap_or_default();
        self.scheduler.plan(self.started.elapsed(), &mut plan);
        self.note_plan(&plan, Instant::now());
        if plan.is_empty() {
            self.scheduler.cancel(id);
            return Ok(());
        }
        let result = match self.submit(&plan) {
            Ok(ticket) => self.wait(ticket, self.step_plan.logit_rows.len()),
            Err(message) => Err(message),
        };
        self.scheduler.fail(&[&plan]);
        self.scheduler.cancel(id);
        self.plans.push(plan);
        result.map_err(|message| {
            tracing::error!("nor does the device compute a row of our own: {message}");
            Broken
        })
    }

    fn commit(&mut self, plan: &Plan) {
        let now = Instant::now();
        let mut outcomes = std::mem::take(&mut self.outcomes);
        outcomes.clear();
        let mut row = 0;
        for entry in &plan.entries {
            let position = entry.start + entry.len;
            let scored = row..row + entry.scored.1 - entry.scored.0;
            let sampled = scored.end;
            row = sampled + usize::from(entry.samples);
            if self.choices.get(entry.sequence).is_none() {
                // It left while the step was under way.
                outcomes.push(Outcome::Computed);
                continue;
            }
            let healthy = self.score(entry.sequence, scored);
            outcomes.push(match entry.samples {
                _ if !healthy => self.row_failed(entry.sequence),
                true => self.accept(entry.sequence, sampled, position, now),
                false => Outcome::Computed,
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
        let Ok(stop) = catch_unwind(AssertUnwindSafe(|| choice.sampler.accept(token))) else { return self.row_failed(id) };
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
}

/// What a panic said.
fn panicked(panic: &(dyn std::any::Any + Send)) -> String {
    let said = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("the step panicked: {}", said.unwrap_or("no message"))
}
