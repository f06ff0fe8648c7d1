//! Planning and committing a step.

use std::time::Duration;

use super::{Outcome, Plan, Scheduled, Scheduler, SequenceId};

/// Which of the running sequences a pass looks at.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pass {
    /// One row left: they come first, so that no prefill makes a stream stutter.
    Decode,
    Prefill,
}

impl Scheduler {
    /// Decides the next step at time `now` and advances `computed` of all that take part.
    pub fn plan(&mut self, now: Duration, plan: &mut Plan) {
        self.step += 1;
        plan.reset(self.step);
        self.expire(now, plan);
        self.plan_running(Pass::Decode, plan);
        self.prefill_limit = self.pace.prefill_rows(plan.decode_rows);
        self.plan_running(Pass::Prefill, plan);
        // Whoever was preempted needs the memory more than anyone new.
        if plan.preempted.is_empty() {
            self.admit(now, plan);
        }
    }

    /// A planned step took so long, from its plan to its tokens. Call once a step, before the next plan.
    pub fn observe(&mut self, plan: &Plan, elapsed: Duration) {
        self.pace.observe(plan.decode_rows, plan.prefill_rows(), elapsed);
    }

    /// Sends the last of the running sequences back to the queue. Between a commit and the next plan only.
    pub fn preempt_last(&mut self) -> Option<SequenceId> {
        let &(_, _, id) = self.running.last()?;
        self.give_up(id);
        Some(id)
    }

    /// Applies what the step gave: one outcome an entry. Sequences that are gone since are skipped.
    pub fn commit(&mut self, plan: &Plan, outcomes: &[Outcome]) {
        debug_assert_eq!(plan.entries.len(), outcomes.len());
        for (entry, outcome) in plan.entries.iter().zip(outcomes) {
            let id = entry.sequence;
            let Some((sequence, cache)) = self.parts(id) else { continue };
            sequence.scored = sequence.scored.max(entry.start + entry.scored.1).min(sequence.score_until);
            match *outcome {
                Outcome::Computed => {}
                Outcome::Token(token) => {
                    sequence.tokens.push(token);
                    let size = cache.block_size();
                    let full = sequence.tokens.len() / size;
                    if sequence.use_index && full > sequence.hashes.len() {
                        let parent = sequence.hashes.last().copied().unwrap_or(sequence.root);
                        sequence.hashes.push(parent.child(&sequence.tokens[(full - 1) * size..full * size]));
                    }
                }
                Outcome::Finished => {
                    // The last token is not among those that the sequence holds.
                    let len = sequence.generated() + 1;
                    self.lengths.record(len);
                    self.cancel(id);
                }
                Outcome::Failed => {
                    cache.withdraw_all(&sequence.kv, &sequence.hashes);
                    self.cancel(id);
                }
            }
        }
    }

    /// The step did not happen: blocks that it named hold nothing. Ends all sequences that took part.
    pub fn fail(&mut self, plan: &Plan) {
        for &registered in &plan.registered {
            self.cache.withdraw(registered);
        }
        for entry in &plan.entries {
            self.cancel(entry.sequence);
        }
    }

    fn expire(&mut self, now: Duration, plan: &mut Plan) {
        while let Some(&(deadline, id)) = self.deadlines.first() {
            if deadline > now {
                break;
            }
            self.deadlines.pop_first();
            if self.cancel(id) {
                plan.expired.push(id);
            }
        }
    }

    fn plan_running(&mut self, pass: Pass, plan: &mut Plan) {
        let mut i = 0;
        while let Some(&(_, _, id)) = self.running.get(i) {
            let Some(sequence) = self.sequence(id) else { break };
            let (start, wanted) = (sequence.computed, sequence.wanted());
            let mine = match pass {
                Pass::Decode => wanted == 1,
                Pass::Prefill => wanted > 1,
            };
            let len = if mine { self.allowance(id, start, wanted, plan) } else { 0 };
            if len > 0 {
                if !self.make_room(id, start, start + len, plan) {
                    // It was the last one itself, and it is waiting now.
                    break;
                }
                self.schedule(id, start, len, plan);
            }
            i += 1;
        }
    }

    /// Rows that the budget leaves for a sequence.
    pub(super) fn allowance(&self, id: SequenceId, start: usize, wanted: usize, plan: &Plan) -> usize {
        let Some(sequence) = self.sequence(id) else { return 0 };
        let mut rows = wanted.min(self.config.max_rows - plan.rows).min(self.config.max_prefill_chunk.max(1));
        if wanted > 1 {
            rows = rows.min(self.prefill_limit.saturating_sub(plan.prefill_rows()));
        }
        sequence.fit(start, rows, self.config.max_logit_rows - plan.logit_rows)
    }

    /// Makes a running sequence hold `tokens` tokens, those from `start` on to be computed now, preempting from the end of
    /// the order. False: it was preempted itself.
    fn make_room(&mut self, id: SequenceId, start: usize, tokens: usize, plan: &mut Plan) -> bool {
        loop {
            let Some((sequence, cache)) = self.parts(id) else { return false };
            if cache.grow(&mut sequence.kv, start, tokens) {
                return true;
            }
            let Some(&(_, _, victim)) = self.running.last() else { return false };
            self.preempt(victim, plan);
            if victim == id {
                return false;
            }
        }
    }

    /// Back to the queue, by rank: before all that arrived later. What it computed is computed again, unless the prefix
    /// index still has it by then.
    fn preempt(&mut self, id: SequenceId, plan: &mut Plan) {
        if let Some(place) = plan.entries.iter().position(|entry| entry.sequence == id) {
            self.unschedule(place, plan);
        }
        self.give_up(id);
        plan.preempted.push(id);
    }

    /// `id` is the last of the running sequences.
    fn give_up(&mut self, id: SequenceId) {
        let Some((sequence, cache)) = self.parts(id) else { return };
        let rank = sequence.rank();
        let lost = sequence.computed;
        cache.release(&mut sequence.kv);
        sequence.computed = 0;
        sequence.running = false;
        self.running.pop();
        self.waiting.insert(rank);
        self.counters.preemptions += 1;
        self.counters.preempted_tokens += lost as u64;
    }

    /// Takes an entry out of the plan: its rows return to the budget, and blocks that it would have filled lose their names.
    fn unschedule(&mut self, place: usize, plan: &mut Plan) {
        let entry = plan.entries.remove(place);
        plan.rows -= entry.len;
        plan.decode_rows -= usize::from(entry.is_decode());
        plan.logit_rows -= entry.logit_rows();
        for &registered in &plan.registered[entry.registered.0..entry.registered.1] {
            self.cache.withdraw(registered);
        }
    }

    /// Enters rows for which there is room. Full blocks are named now, so that others of this very step may share them:
    /// all rows of a step write their keys and values before any of them reads.
    pub(super) fn schedule(&mut self, id: SequenceId, start: usize, len: usize, plan: &mut Plan) {
        let from = plan.registered.len();
        let Some((sequence, cache)) = self.parts(id) else { return };
        let end = start + len;
        cache.register(&mut sequence.kv, sequence.root, &sequence.hashes, end, &mut plan.registered);
        sequence.computed = end;
        let entry = Scheduled {
            sequence: id,
            start,
            len,
            samples: end == sequence.tokens.len(),
            scored: sequence.scored_rows(start, len),
            registered: (from, plan.registered.len()),
        };
        plan.rows += len;
        plan.decode_rows += usize::from(entry.is_decode());
        plan.logit_rows += entry.logit_rows();
        plan.entries.push(entry);
    }
}
