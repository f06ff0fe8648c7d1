//! Planning and committing a step.

use std::time::Duration;

use super::{Outcome, Plan, Scheduled, Scheduler, Sequence, SequenceId};

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
        self.plan_running(Pass::Prefill, plan);
        // Whoever was preempted needs the memory more than anyone new.
        if plan.preempted.is_empty() {
            self.admit(plan);
        }
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
                    self.cancel(id);
                }
                Outcome::Failed => {
                    cache.withdraw_all(&sequence.kv);
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
                if !self.make_room(id, start + len, plan) {
                    // It was the last one itself, and it is waiting now.
                    break;
                }
                self.schedule(id, start, len, plan);
            }
            i += 1;
        }
    }

    /// Rows that the budget leaves for a sequence.
    fn allowance(&self, id: SequenceId, start: usize, wanted: usize, plan: &Plan) -> usize {
        let Some(sequence) = self.sequence(id) else { return 0 };
        let rows = wanted.min(self.config.max_rows - plan.rows).min(self.config.max_prefill_chunk.max(1));
        sequence.fit(start, rows, self.config.max_logit_rows - plan.logit_rows)
    }

    /// Makes a running sequence hold `tokens` tokens, preempting from the end of the order. False: it was preempted itself.
    fn make_room(&mut self, id: SequenceId, tokens: usize, plan: &mut Plan) -> bool {
        loop {
            let Some((sequence, cache)) = self.parts(id) else { return false };
            if cache.grow(&mut sequence.kv, tokens) {
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
        plan.preempted.push(id);
    }

    /// Takes an entry out of the plan: its rows return to the budget, and blocks that it would have filled lose their names.
    fn unschedule(&mut self, place: usize, plan: &mut Plan) {
        let entry = plan.entries.remove(place);
        plan.rows -= entry.len;
        plan.logit_rows -= entry.logit_rows();
        for &registered in &plan.registered[entry.registered.0..entry.registered.1] {
            self.cache.withdraw(registered);
        }
    }

    fn admit(&mut self, plan: &mut Plan) {
        let mut reserved: usize = self.running_ids().filter_map(|id| self.sequence(id)).map(|s| self.still_to_take(s)).sum();
        while self.running.len() < self.config.max_sequences && plan.rows < self.config.max_rows {
            let Some(&rank) = self.waiting.first() else { break };
            let id = rank.2;
            let Some(sequence) = self.sequence(id) else { break };
            let total = sequence.tokens.len();
            let looked_up = sequence.use_index && sequence.scored >= sequence.score_until;
            let hit = if looked_up { self.cache.hit(&sequence.hashes, total) } else { 0 };
            let start = hit * self.config.block_size;
            let len = self.allowance(id, start, total - start, plan);
            // Alone, a sequence may have everything; beside others it leaves them room to grow, and what they were promised.
            let spare = if self.running.is_empty() { 0 } else { self.config.watermark_blocks + reserved };
            // First come, first served: nobody behind this one gets in before it.
            if len == 0 || !self.cache.fits(&sequence.hashes, hit, total, spare) {
                break;
            }
            let Some((sequence, cache)) = self.parts(id) else { break };
            cache.admit(&mut sequence.kv, &sequence.hashes, hit);
            if !cache.grow(&mut sequence.kv, start + len) {
                debug_assert!(false, "the gate let in what does not fit");
                cache.release(&mut sequence.kv);
                break;
            }
            sequence.computed = start;
            sequence.running = true;
            let first = !std::mem::replace(&mut sequence.admitted, true);
            let deadline = sequence.deadline;
            self.waiting.remove(&rank);
            let place = self.running.partition_point(|other| *other < rank);
            self.running.insert(place, rank);
            if let Some(deadline) = deadline.filter(|_| first) {
                self.deadlines.remove(&(deadline, id));
            }
            if first {
                plan.admitted.push((id, start));
                self.counters.queried_tokens += if looked_up { total as u64 } else { 0 };
                self.counters.hit_tokens += start as u64;
            } else {
                self.counters.recovered_tokens += start as u64;
            }
            self.schedule(id, start, len, plan);
            reserved += self.sequence(id).map_or(0, |sequence| self.still_to_take(sequence));
        }
    }

    /// Blocks that a running sequence was let in for but has not taken yet. A count, not taken blocks.
    fn still_to_take(&self, sequence: &Sequence) -> usize {
        self.cache.blocks_for(sequence.tokens.len()).saturating_sub(sequence.kv.blocks())
    }

    /// Enters rows for which there is room. Full blocks are named now, so that others of this very step may share them:
    /// all rows of a step write their keys and values before any of them reads.
    fn schedule(&mut self, id: SequenceId, start: usize, len: usize, plan: &mut Plan) {
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
        plan.logit_rows += entry.logit_rows();
        plan.entries.push(entry);
    }
}
