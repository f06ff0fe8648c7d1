use std::{
    collections::{BTreeSet, VecDeque},
    time::Duration,
};

use thiserror::Error;

use super::{
    NewSequence, Policy, Sequence, SequenceId,
    forecast::{Forecast, OutputLengths},
    pace::Pace,
    sequence::Rank,
};
use crate::cache::{Footprint, GroupKind, KvCache, KvConfig, SequenceKv};

/// Sizes and policy.
#[derive(Clone, Debug)]
pub struct SchedulerConfig {
    /// Sequences that run at a time; at most `max_rows` and `max_logit_rows`, so that each can decode in every step.
    pub max_sequences: usize,
    /// Rows of one step.
    pub max_rows: usize,
    /// Rows of one step whose logits are computed.
    pub max_logit_rows: usize,
    /// Rows of one sequence in one step.
    pub max_prefill_chunk: usize,
    /// Tokens per KV block.
    pub block_size: usize,
    /// What each cache group keeps.
    pub groups: Vec<GroupKind>,
    /// KV blocks of the pool that all groups share.
    pub blocks: usize,
    /// Blocks that admission keeps free while others run.
    pub watermark_blocks: usize,
    pub prefix_cache: bool,
    pub policy: Policy,
    /// Time between the tokens of running sequences that prompts beside them should leave; `None`: they take what they get.
    pub itl_target: Option<Duration>,
    /// Numbers the cache events.
    pub epoch: u64,
}

impl SchedulerConfig {
    fn kv(&self) -> KvConfig {
        KvConfig {
            footprint: Footprint {
                groups: self.groups.clone(),
                block_size: self.block_size,
                step_rows: self.max_prefill_chunk.clamp(1, self.max_rows.max(1)),
            },
            blocks: self.blocks,
            caching: self.prefix_cache,
            epoch: self.epoch,
        }
    }
}

/// The sequence would not fit into the KV memory even alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("needs {needed} KV blocks of {total}")]
pub struct NeverFits {
    pub needed: usize,
    pub total: usize,
}

/// Sums since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Tokens looked up in the prefix index and found there, at first admissions only.
    pub queried_tokens: u64,
    pub hit_tokens: u64,
    pub preemptions: u64,
    /// Sequences that ran again because a step failed.
    pub reruns: u64,
    /// Tokens that forked sequences took over.
    pub forked_tokens: u64,
    /// Tokens whose keys and values were given up by preemption.
    pub preempted_tokens: u64,
    /// Of these, what resumed sequences found in the prefix index again.
    pub recovered_tokens: u64,
    /// Admissions past a sequence that waits for room.
    pub bypasses: u64,
}

/// Blocks that become free when a step is settled.
pub(super) struct Fenced {
    pub step: u64,
    pub owner: SequenceId,
    pub kv: SequenceKv,
}

/// The state machine. See the module for its rule.
pub struct Scheduler {
    pub(super) config: SchedulerConfig,
    pub(super) cache: KvCache,
    slots: Vec<Option<Sequence>>,
    generations: Vec<u32>,
    vacant: Vec<u32>,
    /// Sequences with KV blocks, by rank: the last one is preempted first.
    pub(super) running: Vec<Rank>,
    /// Sequences without, by rank: the first one is admitted first.
    pub(super) waiting: BTreeSet<Rank>,
    /// Of those that wait for their first admission.
    pub(super) deadlines: BTreeSet<(Duration, SequenceId)>,
    pub(super) counters: Counters,
    /// The last step that was planned,
    pub(super) step: u64,
    /// and the last whose outcome is known.
    pub(super) settled: u64,
    /// Blocks of sequences that left or were preempted while a step under way still writes to them.
    pub(super) fenced: VecDeque<Fenced>,
    /// Sequences of a step that failed: each runs alone once.
    pub(super) suspects: VecDeque<SequenceId>,
    pub(super) lengths: OutputLengths,
    pub(super) pace: Pace,
    /// Prompt rows of the step that is being planned.
    pub(super) prefill_limit: usize,
    // Scratch of a plan.
    pub(super) forecast: Forecast,
    pub(super) passed: Vec<SequenceId>,
}

impl Scheduler {
    #[must_use]
    pub fn new(mut config: SchedulerConfig) -> Self {
        config.max_sequences = config.max_sequences.min(config.max_rows).min(config.max_logit_rows);
        let cache = KvCache::new(config.kv());
        Self {
            cache,
            slots: Vec::new(),
            generations: Vec::new(),
            vacant: Vec::new(),
            running: Vec::with_capacity(config.max_sequences),
            waiting: BTreeSet::new(),
            deadlines: BTreeSet::new(),
            counters: Counters::default(),
            step: 0,
            settled: 0,
            fenced: VecDeque::new(),
            suspects: VecDeque::new(),
            lengths: OutputLengths::default(),
            pace: Pace::new(config.itl_target, config.policy.prefill_floor),
            prefill_limit: usize::MAX,
            forecast: Forecast::default(),
            passed: Vec::with_capacity(config.policy.bypass_depth),
            config,
        }
    }

    /// Queues a sequence, unless it could never run.
    pub fn add(&mut self, new: NewSequence) -> Result<SequenceId, NeverFits> {
        // The last token is drawn but not fed back.
        let longest = new.max_len.max(new.tokens.len() + 1) - 1;
        let (needed, total) = (self.cache.footprint().peak(longest), self.cache.total());
        if needed > total {
            return Err(NeverFits { needed, total });
        }
        let slot = self.vacant.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.generations.push(0);
            self.slots.len() as u32 - 1
        });
        let id = SequenceId { slot, generation: self.generations[slot as usize] };
        let sequence = Sequence::new(id, new, &self.config.policy);
        self.waiting.insert(sequence.rank());
        if let Some(deadline) = sequence.deadline {
            self.deadlines.insert((deadline, id));
        }
        self.slots[slot as usize] = Some(sequence);
        Ok(id)
    }

    /// Ends a sequence, whatever it is doing, and frees what it holds. False if there is none of this name.
    pub fn cancel(&mut self, id: SequenceId) -> bool {
        let Some(mut sequence) = self.take(id) else { return false };
        let kv = std::mem::take(&mut sequence.kv);
        self.release(id, sequence.last_step.number, kv);
        let rank = sequence.rank();
        if sequence.running {
            if let Ok(place) = self.running.binary_search(&rank) {
                self.running.remove(place);
            }
        } else {
            self.waiting.remove(&rank);
            if let Some(deadline) = sequence.deadline {
                self.deadlines.remove(&(deadline, id));
            }
        }
        true
    }

    /// Gives blocks back, at once or when the step is settled that may still write to them.
    pub(super) fn release(&mut self, owner: SequenceId, step: u64, mut kv: SequenceKv) {
        if step > self.settled && kv.blocks() > 0 {
            self.fenced.push_back(Fenced { step, owner, kv });
        } else {
            self.cache.release(&mut kv);
        }
    }

    /// The outcome of all steps up to `step` is known.
    pub(super) fn settle(&mut self, step: u64) {
        self.settled = self.settled.max(step);
        let Self { fenced, cache, settled, .. } = self;
        fenced.retain_mut(|fenced| {
            let waits = fenced.step > *settled;
            if !waits {
                cache.release(&mut fenced.kv);
            }
            waits
        });
    }

    fn take(&mut self, id: SequenceId) -> Option<Sequence> {
        let sequence = self.slots.get_mut(id.slot as usize)?.take_if(|sequence| sequence.id == id)?;
        self.generations[id.slot as usize] += 1;
        self.vacant.push(id.slot);
        Some(sequence)
    }

    /// A sequence that has not ended.
    #[must_use]
    pub fn sequence(&self, id: SequenceId) -> Option<&Sequence> {
        self.slots.get(id.slot as usize)?.as_ref().filter(|sequence| sequence.id == id)
    }

    /// A sequence and the cache, to change both.
    pub(super) fn parts(&mut self, id: SequenceId) -> Option<(&mut Sequence, &mut KvCache)> {
        let sequence = self.slots.get_mut(id.slot as usize)?.as_mut().filter(|sequence| sequence.id == id)?;
        Some((sequence, &mut self.cache))
    }

    /// Sequences that hold KV blocks.
    #[must_use]
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Sequences that do not.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Block tables of those that left or were preempted while a step under way writes to them.
    pub fn fenced(&self) -> impl Iterator<Item = &SequenceKv> + '_ {
        self.fenced.iter().map(|fenced| &fenced.kv)
    }

    /// Sequences of a failed step are run again, one by one.
    #[must_use]
    pub fn isolating(&self) -> bool {
        self.suspects.iter().any(|id| self.sequence(*id).is_some_and(|sequence| sequence.suspect_until.is_some()))
    }

    /// Names of the running sequences, the one that is preempted last first.
    pub fn running_ids(&self) -> impl Iterator<Item = SequenceId> + '_ {
        self.running.iter().map(|(_, _, id)| *id)
    }

    /// Names of the waiting sequences, the one that is admitted first first.
    pub fn waiting_ids(&self) -> impl Iterator<Item = SequenceId> + '_ {
        self.waiting.iter().map(|(_, _, id)| *id)
    }

    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters
    }

    #[must_use]
    pub fn cache(&self) -> &KvCache {
        &self.cache
    }

    /// For the event log.
    pub fn cache_mut(&mut self) -> &mut KvCache {
        &mut self.cache
    }
}
