//! Sequences that begin as others did: the prompt of several choices is computed and stored once.

use super::{Plan, Scheduler, SequenceId, admit::Answer, sequence::Rank};

/// Whether a sequence can take its beginning over.
pub(super) enum Fork {
    Ready,
    /// The other one has still to compute it.
    NotYet,
    /// The other one has ended, or has given up what is needed.
    Gone,
}

impl Scheduler {
    pub(super) fn fork_state(&self, id: SequenceId, parent: SequenceId) -> Fork {
        let (Some(sequence), Some(parent)) = (self.sequence(id), self.sequence(parent)) else { return Fork::Gone };
        let tokens = sequence.tokens.len();
        // Copies are made before any row of their step is written, so an earlier step must have computed what is copied; what
        // the parent found in the index in this very step may be computed in it.
        if !parent.running || parent.entered == self.step {
            return Fork::NotYet;
        }
        let computed = if parent.last_step.number == self.step { parent.last_step.start } else { parent.computed };
        match () {
            () if computed < tokens => Fork::NotYet,
            // A window of the parent may have moved on.
            () if !self.cache.can_fork(&parent.kv, tokens) => Fork::Gone,
            () => Fork::Ready,
        }
    }

    /// Lets a sequence in on the blocks of `parent`. It computes its last token again, for the logits; the block with that
    /// token is copied, since both go on in it. All blocks before it are shared for as long as both live.
    /// `passed`: the first of those that it passes.
    pub(super) fn fork(&mut self, rank: Rank, passed: Option<Rank>, parent: SequenceId, spare: usize, plan: &mut Plan) -> Answer {
        let id = rank.2;
        let Some(sequence) = self.sequence(id) else { return Answer::NoRows };
        let start = sequence.tokens.len() - 1;
        let shared = start / self.config.block_size;
        if self.allowance(id, start, 1, plan) == 0 {
            return Answer::NoRows;
        }
        let demand = self.demand(sequence, shared);
        if self.cache.free() < spare + self.cache.groups().len() || self.crowded(demand) || !self.share(id, parent, start, plan) {
            return Answer::NoRoom;
        }
        self.forecast.insert(demand);
        self.waiting.remove(&rank);
        if let (Some(passed), Some((sequence, _))) = (passed, self.parts(id)) {
            sequence.step_before(passed);
        }
        self.enter(id, shared, plan);
        if let Some((sequence, _)) = self.parts(id) {
            sequence.computed = start;
        }
        self.schedule(id, start, 1, plan);
        Answer::In
    }

    /// Takes the parent's blocks for `start` tokens, and a fresh one for what follows. False: there is none.
    fn share(&mut self, id: SequenceId, parent: SequenceId, start: usize, plan: &mut Plan) -> bool {
        // Both are in the same table, so the parent's blocks step out of it for a moment.
        let Some((parent_sequence, _)) = self.parts(parent) else { return false };
        let theirs = std::mem::take(&mut parent_sequence.kv);
        let mut forked = false;
        if let Some((sequence, cache)) = self.parts(id) {
            forked = cache.fork(&theirs, &mut sequence.kv, start + 1);
            let last = start / cache.block_size();
            // Where the last token begins a block there is nothing before it to copy.
            if forked && !start.is_multiple_of(cache.block_size()) {
                plan.copies.extend((0..cache.groups().len()).map(|group| (theirs.table(group)[last], sequence.kv.table(group)[last])));
            }
        }
        if let Some((parent, _)) = self.parts(parent) {
            parent.kv = theirs;
        }
        forked
    }
}
