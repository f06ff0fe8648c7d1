//! Planning and committing a step.

use std::time::Duration;

use super::{Outcome, Plan, Scheduled, Scheduler, Sequence, SequenceId, plan::LastStep};

/// Which of the running sequences a pass looks at.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pass {
    /// One row left: they come first, so that no prefill makes a stream stutter.
    Decode,
    Prefill,
}

/// What became of one that needs blocks.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Room {
    Made,
    /// Nothing for it in this step.
    Later,
    /// It was the last of the running ones itself, and is waiting now.
    Gone,
}

impl Scheduler {
    /// Decides the next step at time `now` and advances `computed` of all that take part.
    pub fn plan(&mut self, now: Duration, plan: &mut Plan) {
        self.step += 1;
        plan.reset(self.step);
        self.expire(now, plan);
        if let Some(suspect) = self.suspect() {
            self.prefill_limit = usize::MAX;
            self.plan_alone(suspect, plan);
        } else {
            self.plan_running(Pass::Decode, plan);
            self.prefill_limit = self.pace.prefill_rows(plan.decode_rows);
            self.plan_running(Pass::Prefill, plan);
            // Whoever was preempted needs the memory more than anyone new.
            if plan.preempted.is_empty() {
                self.admit(now, plan);
            }
        }
        self.note_pending(plan);
    }

    /// Remembers where the tokens come from that this step draws, for a step that is planned before they are known.
    fn note_pending(&mut self, plan: &Plan) {
        let mut row = 0;
        for entry in &plan.entries {
            row += entry.logit_rows() as u32;
            if let (true, Some((sequence, _))) = (entry.samples, self.parts(entry.sequence)) {
                sequence.pending_row = row - 1;
            }
        }
    }

    /// The first that has to run alone.
    fn suspect(&mut self) -> Option<SequenceId> {
        while let Some(&id) = self.suspects.front() {
            if self.sequence(id).is_some_and(|sequence| sequence.suspect_until.is_some()) {
                return Some(id);
            }
            self.suspects.pop_front();
        }
        None
    }

    fn plan_alone(&mut self, id: SequenceId, plan: &mut Plan) {
        if self.sequence(id).is_some_and(|sequence| sequence.running) {
            self.advance(id, plan);
            return;
        }
        // Nobody is to be hurt by a suspect, but it must get its turn: the last of the others make room.
        while !self.admit_alone(id, plan) && self.fenced.is_empty() {
            let Some(&(_, _, victim)) = self.running.last() else { return };
            self.preempt(victim, plan);
        }
    }

    /// A planned step took so long, from its plan to its tokens. Call once a step, before the next plan.
    pub fn observe(&mut self, plan: &Plan, elapsed: Duration) {
        self.pace.observe(plan.decode_rows, plan.prefill_rows(), elapsed);
    }

    /// Sends the last of the running sequences back to the queue. Between plans only.
    pub fn preempt_last(&mut self) -> Option<SequenceId> {
        let &(_, _, id) = self.running.last()?;
        self.give_up(id);
        Some(id)
    }

    /// Applies what the step gave: one outcome an entry. Sequences that are gone since are skipped. Steps are committed in
    /// the order of their plans; the next one may have been planned already.
    pub fn commit(&mut self, plan: &Plan, outcomes: &[Outcome]) {
        debug_assert_eq!(plan.entries.len(), outcomes.len());
        for (entry, outcome) in plan.entries.iter().zip(outcomes) {
            let id = entry.sequence;
            let Some((sequence, cache)) = self.parts(id) else { continue };
            sequence.pending -= usize::from(entry.samples).min(sequence.pending);
            sequence.scored = sequence.scored.max(entry.start + entry.scored.1).min(sequence.score_until);
            if sequence.suspect_until.is_some_and(|until| entry.start + entry.len >= until) {
                sequence.suspect_until = None;
            }
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
                    self.withdraw_fenced(id);
                    self.cancel(id);
                }
            }
        }
        self.settle(plan.step);
    }

    /// Takes the names of blocks away that a sequence gave up while a step was under way.
    fn withdraw_fenced(&mut self, owner: SequenceId) {
        let mut fenced = std::mem::take(&mut self.fenced);
        if let Some((sequence, cache)) = self.parts(owner) {
            fenced.iter().filter(|fenced| fenced.owner == owner).for_each(|fenced| cache.withdraw_all(&fenced.kv, &sequence.hashes));
        }
        std::mem::swap(&mut self.fenced, &mut fenced);
    }

    /// The first of these steps failed, and the others, planned on top of it, did not happen either: blocks that they
    /// named hold nothing. All sequences that took part go back to the queue and start again; those of the first one are
    /// suspects, who run alone, one after the other, as far as they had come. One that fails alone has had its second
    /// chance: it is ended, and its name given back.
    pub fn fail(&mut self, plans: &[&Plan]) -> Option<SequenceId> {
        for plan in plans {
            for &registered in &plan.registered {
                self.cache.withdraw(registered);
            }
            self.settle(plan.step);
        }
        let mut guilty = None;
        let first = plans.first().map_or(&[][..], |plan| &plan.entries);
        for entry in first {
            let Some((sequence, cache)) = self.parts(entry.sequence) else { continue };
            let until = entry.start + entry.len;
            if first.len() == 1 && sequence.suspect_until.is_some() {
                cache.withdraw_all(&sequence.kv, &sequence.hashes);
                self.cancel(entry.sequence);
                guilty = Some(entry.sequence);
                continue;
            }
            sequence.suspect_until = sequence.suspect_until.max(Some(until));
            self.suspects.push_back(entry.sequence);
            self.counters.reruns += 1;
        }
        let mut suspects = std::mem::take(&mut self.suspects);
        suspects.make_contiguous().sort_by_key(|id| self.sequence(*id).map(Sequence::rank));
        self.suspects = suspects;
        for entry in plans.iter().flat_map(|plan| &plan.entries) {
            self.start_again(entry.sequence);
        }
        guilty
    }

    /// Before any other, `id` runs alone until its present tokens are computed.
    pub fn isolate(&mut self, id: SequenceId) {
        let Some((sequence, _)) = self.parts(id) else { return };
        sequence.suspect_until = Some(sequence.tokens.len());
        self.suspects.push_front(id);
    }

    /// Back to the queue with nothing computed. No step is under way.
    fn start_again(&mut self, id: SequenceId) {
        let Some((sequence, cache)) = self.parts(id) else { return };
        sequence.pending = 0;
        if !std::mem::take(&mut sequence.running) {
            return;
        }
        sequence.computed = 0;
        let rank = sequence.rank();
        cache.release(&mut sequence.kv);
        if let Ok(place) = self.running.binary_search(&rank) {
            self.running.remove(place);
        }
        self.waiting.insert(rank);
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
            let wanted = sequence.wanted();
            let mine = match pass {
                Pass::Decode => wanted == 1,
                Pass::Prefill => wanted > 1,
            };
            if mine && self.advance(id, plan) == Room::Gone {
                break;
            }
            i += 1;
        }
    }

    /// Schedules what the budget and the memory leave for a running sequence.
    fn advance(&mut self, id: SequenceId, plan: &mut Plan) -> Room {
        let Some(sequence) = self.sequence(id) else { return Room::Gone };
        let (start, wanted) = (sequence.computed, sequence.wanted());
        let len = self.allowance(id, start, wanted, plan);
        if len == 0 {
            return Room::Later;
        }
        let room = self.make_room(id, start, start + len, plan);
        if room == Room::Made {
            self.schedule(id, start, len, plan);
        }
        room
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
    /// the order.
    fn make_room(&mut self, id: SequenceId, start: usize, tokens: usize, plan: &mut Plan) -> Room {
        loop {
            let Some((sequence, cache)) = self.parts(id) else { return Room::Gone };
            if cache.grow(&mut sequence.kv, start, tokens) {
                return Room::Made;
            }
            // Blocks are on their way back: nobody is preempted for the moment until then.
            if !self.fenced.is_empty() {
                return Room::Later;
            }
            let Some(&(_, _, victim)) = self.running.last() else { return Room::Gone };
            self.preempt(victim, plan);
            if victim == id {
                return Room::Gone;
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
        let Some((sequence, _)) = self.parts(id) else { return };
        let rank = sequence.rank();
        let lost = std::mem::take(&mut sequence.computed);
        let (step, kv) = (sequence.last_step.number, std::mem::take(&mut sequence.kv));
        sequence.running = false;
        self.release(id, step, kv);
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
        if let Some((sequence, _)) = self.parts(entry.sequence) {
            sequence.pending -= usize::from(entry.samples);
            sequence.last_step = entry.before;
        }
    }

    /// Enters rows for which there is room. Full blocks are named now, so that others of this very step may share them:
    /// all rows of a step write their keys and values before any of them reads.
    pub(super) fn schedule(&mut self, id: SequenceId, start: usize, len: usize, plan: &mut Plan) {
        let (from, number) = (plan.registered.len(), plan.step);
        let Some((sequence, cache)) = self.parts(id) else { return };
        let end = start + len;
        cache.register(&mut sequence.kv, sequence.root, &sequence.hashes, end, &mut plan.registered);
        sequence.computed = end;
        let entry = Scheduled {
            sequence: id,
            start,
            len,
            samples: end == sequence.len(),
            scored: sequence.scored_rows(start, len),
            placeholder: (end > sequence.tokens.len()).then_some(sequence.pending_row),
            before: std::mem::replace(&mut sequence.last_step, LastStep { number, start }),
            registered: (from, plan.registered.len()),
        };
        sequence.pending += usize::from(entry.samples);
        plan.rows += len;
        plan.decode_rows += usize::from(entry.is_decode());
        plan.logit_rows += entry.logit_rows();
        plan.entries.push(entry);
    }
}
