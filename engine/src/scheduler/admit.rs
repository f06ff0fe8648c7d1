//! Who of the waiting gets KV memory.

use std::{ops::Bound, time::Duration};

use super::{Plan, Scheduler, Sequence, SequenceId, forecast::Demand, fork::Fork, sequence::Rank};

/// Answer to one that wants in.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    In,
    /// The step has no rows left for it.
    NoRows,
    /// The memory has no room for it.
    NoRoom,
    /// It waits for something else than memory; others may go first.
    NotYet,
}

impl Scheduler {
    /// Lets waiting sequences in, in order. One for which there is no room may be passed by those behind it, if they fit:
    /// a few times, and for a while. Then all wait for it, so it gets in when enough of the running ones have ended.
    pub(super) fn admit(&mut self, now: Duration, plan: &mut Plan) {
        if self.waiting.is_empty() || self.running.len() >= self.config.max_sequences || plan.rows >= self.config.max_rows {
            return;
        }
        let mut promised: usize = self.running_ids().filter_map(|id| self.sequence(id)).map(|s| self.still_to_take(s)).sum();
        self.forecast_running();
        let mut after = None;
        let mut passed = std::mem::take(&mut self.passed);
        passed.clear();
        while self.running.len() < self.config.max_sequences && plan.rows < self.config.max_rows {
            let from = after.map_or(Bound::Unbounded, Bound::Excluded);
            let Some(&rank) = self.waiting.range((from, Bound::Unbounded)).next() else { break };
            let id = rank.2;
            let first = passed.first().and_then(|id| self.sequence(*id)).map(Sequence::rank);
            match self.let_in(rank, first, promised, plan) {
                Answer::In => {
                    promised += self.sequence(id).map_or(0, |sequence| self.still_to_take(sequence));
                    self.count_passes(&passed);
                }
                Answer::NoRows => break,
                Answer::NotYet => after = Some(rank),
                Answer::NoRoom if passed.len() < self.config.policy.bypass_depth => {
                    passed.push(id);
                    after = Some(rank);
                }
                Answer::NoRoom => break,
            }
            if !passed.iter().all(|id| self.may_be_passed(*id, now)) {
                break;
            }
        }
        self.passed = passed;
    }

    /// Somebody has passed all of these.
    fn count_passes(&mut self, passed: &[SequenceId]) {
        self.counters.bypasses += u64::from(!passed.is_empty());
        for id in passed {
            if let Some((sequence, _)) = self.parts(*id) {
                sequence.passes += 1;
            }
        }
    }

    /// Whether others may still pass a sequence for which there is no room. Never one that was preempted: it has waited.
    fn may_be_passed(&mut self, id: SequenceId, now: Duration) -> bool {
        let policy = self.config.policy;
        let Some((sequence, _)) = self.parts(id) else { return true };
        let since = *sequence.blocked_since.get_or_insert(now);
        !sequence.admitted && sequence.passes < policy.bypass_passes && now.saturating_sub(since) < policy.bypass_for
    }

    /// `passed`: the first of those that it passes.
    fn let_in(&mut self, rank: Rank, passed: Option<Rank>, promised: usize, plan: &mut Plan) -> Answer {
        let id = rank.2;
        // Alone, a sequence may have everything; beside others it leaves them room to grow, and what they were promised.
        let alone = self.running.is_empty();
        let spare = if alone { 0 } else { self.config.watermark_blocks + promised };
        let Some(sequence) = self.sequence(id) else { return Answer::NoRows };
        if sequence.pending > 0 {
            return Answer::NotYet;
        }
        if let Some(parent) = sequence.fork_of {
            match self.fork_state(id, parent) {
                Fork::Ready => return self.fork(rank, passed, parent, spare, plan),
                Fork::NotYet => return Answer::NotYet,
                Fork::Gone => {}
            }
        }
        let Some(sequence) = self.sequence(id) else { return Answer::NoRows };
        let total = sequence.tokens.len();
        let hit = self.found(sequence);
        let start = hit * self.config.block_size;
        let len = self.allowance(id, start, total - start, plan);
        if len == 0 {
            return Answer::NoRows;
        }
        let demand = self.demand(sequence, hit);
        if !self.cache.fits(&sequence.hashes, hit, total, spare) || (!alone && self.crowded(demand)) {
            return Answer::NoRoom;
        }
        let Some(revived) = self.take_blocks(id, hit, start, start + len) else { return Answer::NoRoom };
        self.forecast.fixed += revived;
        self.forecast.insert(demand);
        self.waiting.remove(&rank);
        if let (Some(passed), Some((sequence, _))) = (passed, self.parts(id)) {
            sequence.step_before(passed);
        }
        self.enter(id, hit, plan);
        self.schedule(id, start, len, plan);
        Answer::In
    }

    /// Lets a sequence in that is to run alone, however crowded it is. False: there is no room.
    pub(super) fn admit_alone(&mut self, id: SequenceId, plan: &mut Plan) -> bool {
        let Some(sequence) = self.sequence(id) else { return true };
        let (rank, total, hit) = (sequence.rank(), sequence.tokens.len(), self.found(sequence));
        let start = hit * self.config.block_size;
        let len = self.allowance(id, start, total - start, plan);
        let crowded = self.running.len() >= self.config.max_sequences;
        if crowded || !self.cache.fits(&sequence.hashes, hit, total, 0) || self.take_blocks(id, hit, start, start + len).is_none() {
            return false;
        }
        self.waiting.remove(&rank);
        self.enter(id, hit, plan);
        self.schedule(id, start, len, plan);
        true
    }

    /// Blocks at the start of a waiting sequence that the prefix index has.
    fn found(&self, sequence: &Sequence) -> usize {
        if looks_up(sequence) { self.cache.hit(&sequence.hashes, sequence.tokens.len()) } else { 0 }
    }

    /// What the running ones are expected to need beside a newcomer would not fit.
    pub(super) fn crowded(&self, demand: Demand) -> bool {
        let room = self.cache.total().saturating_sub(self.config.watermark_blocks);
        self.config.policy.growth_reserve > 0.0
            && self.forecast.peak_with(demand, self.config.block_size, self.cache.footprint().full_groups()) > room
    }

    /// Takes `hit` found blocks, and fresh ones for the tokens from `start` up to `tokens`; gives how many of the found ones nobody used.
    fn take_blocks(&mut self, id: SequenceId, hit: usize, start: usize, tokens: usize) -> Option<usize> {
        let (sequence, cache) = self.parts(id)?;
        let used = cache.used();
        cache.admit(&mut sequence.kv, &sequence.hashes, hit);
        let revived = cache.used() - used;
        if cache.grow(&mut sequence.kv, start, tokens) {
            return Some(revived);
        }
        debug_assert!(false, "the gate let in what does not fit");
        cache.release(&mut sequence.kv);
        None
    }

    /// Among the running, with `shared` blocks computed already.
    pub(super) fn enter(&mut self, id: SequenceId, shared: usize, plan: &mut Plan) {
        let block_size = self.config.block_size;
        let start = shared * block_size;
        let Some((sequence, _)) = self.parts(id) else { return };
        sequence.reserve(block_size);
        sequence.entered = plan.step;
        sequence.computed = start;
        sequence.shared = shared;
        sequence.running = true;
        let looked_up = if looks_up(sequence) { sequence.tokens.len() } else { 0 };
        let first = !std::mem::replace(&mut sequence.admitted, true);
        let forked = sequence.fork_of.take().is_some();
        let (rank, deadline) = (sequence.rank(), sequence.deadline);
        let place = self.running.partition_point(|other| *other < rank);
        self.running.insert(place, rank);
        if let Some(deadline) = deadline.filter(|_| first) {
            self.deadlines.remove(&(deadline, id));
        }
        if first {
            plan.admitted.push((id, start));
        }
        if forked {
            self.counters.forked_tokens += start as u64;
        } else if first {
            self.counters.queried_tokens += looked_up as u64;
            self.counters.hit_tokens += start as u64;
        } else {
            self.counters.recovered_tokens += start as u64;
        }
    }

    fn forecast_running(&mut self) {
        let mut forecast = std::mem::take(&mut self.forecast);
        forecast.clear();
        if self.config.policy.growth_reserve > 0.0 {
            let mut own = 0;
            for sequence in self.running_ids().filter_map(|id| self.sequence(id)) {
                own += sequence.kv.owned_beyond(sequence.shared);
                forecast.push(self.demand(sequence, sequence.shared));
            }
            forecast.sort();
            // A block that several found is counted once, here.
            forecast.fixed = self.cache.used().saturating_sub(own);
        }
        self.forecast = forecast;
    }

    /// What a sequence, `shared` blocks of which belong to others too, is expected to hold.
    pub(super) fn demand(&self, sequence: &Sequence, shared: usize) -> Demand {
        let policy = &self.config.policy;
        let len = sequence.tokens.len();
        let known = self.lengths.remaining(sequence.generated()).unwrap_or(policy.growth_cap);
        let remaining = known.min(policy.growth_cap).min(sequence.max_len.saturating_sub(len));
        let remaining = (remaining as f64 * policy.growth_reserve) as usize;
        Demand { blocks: self.cache.demand(shared, len, len + remaining), remaining }
    }

    /// Blocks that a running sequence was let in for but has not taken yet. A count, not taken blocks.
    fn still_to_take(&self, sequence: &Sequence) -> usize {
        self.cache.still_to_take(&sequence.kv, sequence.tokens.len())
    }
}

/// Reads the prefix index: not while its prompt has to be scored, since that needs the rows.
fn looks_up(sequence: &Sequence) -> bool {
    sequence.use_index && sequence.scored >= sequence.score_until
}
