use super::SequenceId;
use crate::cache::{BlockId, Registered};

/// The rows that one sequence computes in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scheduled {
    pub sequence: SequenceId,
    /// Position of the first row.
    pub start: usize,
    /// Rows.
    pub len: usize,
    /// The last row's logits give the next token.
    pub samples: bool,
    /// Rows (of the `len`) whose logits score the prompt token that follows them: from and to, relative to `start`.
    pub scored: (usize, usize),
    /// The last row's token is drawn by a step that has not been committed: the row of its logits there.
    pub placeholder: Option<u32>,
    /// What the sequence's last step was before this one.
    pub(super) before: LastStep,
    /// Where its new blocks lie in [`Plan::registered`].
    pub(super) registered: (usize, usize),
}

impl Scheduled {
    /// Rows whose logits are wanted.
    #[must_use]
    pub fn logit_rows(&self) -> usize {
        usize::from(self.samples) + self.scored.1 - self.scored.0
    }

    /// A sequence that only wants its next token.
    #[must_use]
    pub fn is_decode(&self) -> bool {
        self.len == 1 && self.samples
    }
}

/// A step that a sequence took part in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct LastStep {
    /// 0: none.
    pub number: u64,
    /// Position of its first row there.
    pub start: usize,
}

/// One step, as the scheduler decided it. Reused from step to step.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// Ascends by one a plan.
    pub step: u64,
    pub entries: Vec<Scheduled>,
    /// Sequences that got KV memory for the first time, with the tokens that they found in the prefix index.
    pub admitted: Vec<(SequenceId, usize)>,
    /// Sequences that went back to the queue and lost their blocks.
    pub preempted: Vec<SequenceId>,
    /// Sequences whose deadline passed while they waited; they are gone.
    pub expired: Vec<SequenceId>,
    /// Blocks that this step fills and that have been named already.
    pub registered: Vec<Registered>,
    /// Blocks to copy before any row is written (from, to): what forked sequences take over and go on in, each in its own way.
    pub copies: Vec<(BlockId, BlockId)>,
    pub rows: usize,
    /// Of the rows, those of sequences that only want their next token.
    pub decode_rows: usize,
    pub logit_rows: usize,
}

impl Plan {
    pub(super) fn reset(&mut self, step: u64) {
        self.step = step;
        self.entries.clear();
        self.admitted.clear();
        self.preempted.clear();
        self.expired.clear();
        self.registered.clear();
        self.copies.clear();
        self.rows = 0;
        self.decode_rows = 0;
        self.logit_rows = 0;
    }

    /// Rows of prompts, and of what is computed again.
    #[must_use]
    pub fn prefill_rows(&self) -> usize {
        self.rows - self.decode_rows
    }

    /// Nothing to compute.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

/// What a step gave for one entry of its plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Rows were computed; no token was due.
    Computed,
    /// A token, after which the sequence goes on.
    Token(u32),
    /// The sequence has ended; its blocks may be found by others.
    Finished,
    /// The sequence has ended and its blocks must not be found again.
    Failed,
}
