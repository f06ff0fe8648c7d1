use std::time::Duration;

use quire_proto::block_hash::BlockHash;

use super::{Policy, plan::LastStep};
use crate::cache::{BlockId, SequenceKv};

/// Names a sequence; a name is never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId {
    pub(super) slot: u32,
    pub(super) generation: u32,
}

impl SequenceId {
    /// A small number that no other living sequence has: index for tables beside the scheduler's.
    #[must_use]
    pub fn slot(self) -> usize {
        self.slot as usize
    }
}

/// A sequence to be run.
#[derive(Clone, Debug)]
pub struct NewSequence {
    /// Prompt, and what was generated elsewhere.
    pub tokens: Vec<u32>,
    /// How many of `tokens` are the prompt.
    pub prompt_len: usize,
    /// Parent of the first block.
    pub root: BlockHash,
    /// Names of the full blocks of `tokens`; empty unless `use_index`.
    pub hashes: Vec<BlockHash>,
    /// Reads and fills the prefix index.
    pub use_index: bool,
    /// Tokens that the sequence may have at its end (the last is never fed back).
    pub max_len: usize,
    /// Lower runs first, as far as [`Policy::ageing`](super::Policy) lets it.
    pub priority: i32,
    /// Ascends; decides between equals.
    pub arrival: u64,
    /// When it arrived, on the clock of [`plan`](super::Scheduler::plan).
    pub arrived: Duration,
    /// When to give up waiting.
    pub deadline: Option<Duration>,
    /// Logits of the prompt rows are wanted; so the prefix index is not read.
    pub score_prompt: bool,
    /// The next token can be drawn without knowing the last one on the host (no penalties): a step may be planned while
    /// the one that draws the last token is under way.
    pub step_ahead: bool,
    /// Another sequence that begins with the same tokens. This one waits until they are computed and takes them over; if
    /// the other is gone by then, it is on its own.
    pub fork_of: Option<SequenceId>,
}

/// Place in the order of who runs first and who is preempted last.
pub(super) type Rank = (i64, u64, SequenceId);

/// A sequence in the scheduler.
#[derive(Clone, Debug)]
pub struct Sequence {
    pub(super) id: SequenceId,
    pub(super) tokens: Vec<u32>,
    pub(super) prompt_len: usize,
    pub(super) root: BlockHash,
    pub(super) hashes: Vec<BlockHash>,
    pub(super) use_index: bool,
    pub(super) max_len: usize,
    score: i64,
    /// Twice its number and one, so that there is a place before each.
    arrival: u64,
    pub(super) deadline: Option<Duration>,
    step_ahead: bool,
    pub(super) fork_of: Option<SequenceId>,
    /// Tokens that steps under way draw: they will follow `tokens`.
    pub(super) pending: usize,
    /// Row of the logits of the last of these, in the step that draws it.
    pub(super) pending_row: u32,
    pub(super) last_step: LastStep,
    /// The step of its last admission.
    pub(super) entered: u64,
    /// Took part in a step that failed: it runs alone until so many tokens are computed.
    pub(super) suspect_until: Option<usize>,
    /// Tokens whose keys and values are in the cache, those of the step under way included.
    pub(super) computed: usize,
    /// Rows 0 .. this have been scored.
    pub(super) scored: usize,
    /// Rows 0 .. this want scoring.
    pub(super) score_until: usize,
    pub(super) kv: SequenceKv,
    pub(super) running: bool,
    /// Was admitted once, so its deadline is met and it is not counted as a first admission again.
    pub(super) admitted: bool,
    /// Blocks at its start that it found.
    pub(super) shared: usize,
    /// When there was first no room for it,
    pub(super) blocked_since: Option<Duration>,
    /// and how many have passed it since.
    pub(super) passes: u32,
}

impl Sequence {
    pub(super) fn new(id: SequenceId, new: NewSequence, policy: &Policy) -> Self {
        let score_until = if new.score_prompt { new.prompt_len.saturating_sub(1) } else { 0 };
        Self {
            id,
            tokens: new.tokens,
            prompt_len: new.prompt_len,
            root: new.root,
            hashes: new.hashes,
            use_index: new.use_index,
            max_len: new.max_len,
            score: policy.score(new.priority, new.arrived),
            arrival: 2 * new.arrival + 1,
            deadline: new.deadline,
            step_ahead: new.step_ahead,
            fork_of: new.fork_of,
            pending: 0,
            pending_row: 0,
            last_step: LastStep::default(),
            entered: 0,
            suspect_until: None,
            computed: 0,
            scored: 0,
            score_until,
            kv: SequenceKv::default(),
            running: false,
            admitted: false,
            shared: 0,
            blocked_since: None,
            passes: 0,
        }
    }

    pub(super) fn rank(&self) -> Rank {
        (self.score, self.arrival, self.id)
    }

    /// Takes the place just before another. Those that pass somebody do: preempted, they would wait behind it else.
    pub(super) fn step_before(&mut self, (score, arrival, _): Rank) {
        (self.score, self.arrival) = (score, arrival & !1);
    }

    /// Every token that is known: prompt and generated.
    #[must_use]
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    #[must_use]
    pub fn prompt_len(&self) -> usize {
        self.prompt_len
    }

    /// Tokens in the cache, those of the step under way included.
    #[must_use]
    pub fn computed(&self) -> usize {
        self.computed
    }

    /// Holds KV blocks.
    #[must_use]
    pub fn running(&self) -> bool {
        self.running
    }

    /// Block table of a cache group.
    #[must_use]
    pub fn table(&self, group: usize) -> &[BlockId] {
        self.kv.table(group)
    }

    /// Tokens generated, here and elsewhere.
    pub(super) fn generated(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// Tokens that it has, those included that steps under way draw.
    pub(super) fn len(&self) -> usize {
        self.tokens.len() + self.pending
    }

    /// Tokens that can be computed now. A token under way that may be the last, or that the next draw depends on, is waited
    /// for.
    fn target(&self) -> usize {
        if self.step_ahead && self.len() < self.max_len { self.len() } else { self.tokens.len() }
    }

    /// Takes memory for all that the sequence may still say, so that its steps take none.
    pub(super) fn reserve(&mut self, block_size: usize) {
        let (known, longest) = (self.tokens.len(), self.max_len.max(self.tokens.len()));
        self.tokens.reserve_exact(longest - known);
        if self.use_index {
            self.hashes.reserve_exact((longest / block_size).saturating_sub(self.hashes.len()));
        }
        self.kv.reserve(longest.div_ceil(block_size));
    }

    /// Rows still to compute.
    pub(super) fn wanted(&self) -> usize {
        self.target().saturating_sub(self.computed)
    }

    /// The rows among `start .. start + len` that score the prompt, relative to `start`.
    pub(super) fn scored_rows(&self, start: usize, len: usize) -> (usize, usize) {
        let from = self.scored.clamp(start, start + len);
        let to = self.score_until.clamp(from, (start + len).max(from));
        (from - start, to - start)
    }

    /// The largest number of rows, at most `len`, that need at most `logit_rows` logit rows.
    pub(super) fn fit(&self, start: usize, mut len: usize, logit_rows: usize) -> usize {
        loop {
            let (from, to) = self.scored_rows(start, len);
            let needed = to - from + usize::from(len > 0 && start + len == self.len());
            if needed <= logit_rows {
                return len;
            }
            len -= needed - logit_rows;
        }
    }
}
