//! What one step computes, as flat host arrays that [`upload`](crate::backend::Backend::upload) copies to the device.
//!
//! A step is a ragged batch: sequences one after the other, each with one or more rows (tokens) to compute. Prefill,
//! chunk and decode rows differ in nothing. The arrays have no pointer and no request in them, so a device can keep
//! them in fixed staging buffers and a captured graph can read them again.

/// Set in [`StepPlan::inputs`]: the other bits are a row of the last step's sampled buffer, not a token id.
pub const SAMPLED_ROW: u32 = 1 << 31;
/// In [`SamplingPlan::targets`]: draw a token. In [`StepOutput::ids`]: the row had non-finite logits.
pub const NO_TOKEN: u32 = u32::MAX;
/// In [`StepPlan::adapters`]: the base model.
pub const NO_ADAPTER: i32 = -1;

/// What the largest step may hold; buffers are sized by it once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLimits {
    /// Rows of one step.
    pub rows: usize,
    /// Sequences of one step.
    pub sequences: usize,
    /// Rows whose logits are computed in one step.
    pub logit_rows: usize,
    /// Entries of one block table.
    pub blocks_per_sequence: usize,
    /// Top log-probabilities of one row.
    pub top_logprobs: usize,
}

/// One step. Row `r` of sequence `s` lies in `row_starts[s] .. row_starts[s + 1]`.
#[derive(Clone, Debug, Default)]
pub struct StepPlan {
    /// Per row: a token id, or [`SAMPLED_ROW`] | row of the last step's sampled buffer.
    pub inputs: Vec<u32>,
    /// Per row: absolute position in its sequence.
    pub positions: Vec<u32>,
    /// Per row: index of its adapter, or [`NO_ADAPTER`].
    pub adapters: Vec<i32>,
    /// Sequences + 1 entries, ascending, from 0 to the number of rows.
    pub row_starts: Vec<u32>,
    /// Per sequence: keys in its cache once this step's rows are written (= position of its last row + 1).
    pub context_lens: Vec<u32>,
    /// Per cache group: where rows are written and what they read.
    pub groups: Vec<GroupPlan>,
    /// Rows whose logits are wanted, ascending.
    pub logit_rows: Vec<u32>,
    /// Per entry of `logit_rows`.
    pub sampling: SamplingPlan,
    /// Blocks to copy before anything else (source, destination), all layers of each. All groups share the blocks.
    pub block_copies: Vec<(u32, u32)>,
}

/// Slots and block tables of one cache group.
#[derive(Clone, Debug, Default)]
pub struct GroupPlan {
    /// Per row: block · block size + offset, where its K and V are stored.
    pub slots: Vec<u32>,
    /// Sequences × `stride`: block ids in order of position; unused entries are 0. So may be those of blocks that lie wholly before
    /// what the sequence's first row sees (its mask's [`first_key`](crate::kv::Mask::first_key)): they are not read.
    pub block_tables: Vec<u32>,
    /// Entries of one block table in `block_tables`.
    pub stride: usize,
}

/// How each logit row becomes a token. All arrays have one entry per row unless they say otherwise.
#[derive(Clone, Debug, Default)]
pub struct SamplingPlan {
    /// [`NO_TOKEN`]: draw. A token id: draw nothing, give this token's log-probability (prompt scoring).
    pub targets: Vec<u32>,
    /// 0: greedy.
    pub temperature: Vec<f32>,
    /// 0: off.
    pub top_k: Vec<u32>,
    /// 1: off.
    pub top_p: Vec<f32>,
    /// 0: off.
    pub min_p: Vec<f32>,
    pub presence: Vec<f32>,
    pub frequency: Vec<f32>,
    /// 1: off.
    pub repetition: Vec<f32>,
    /// The random stream of the choice.
    pub seed: Vec<u64>,
    /// Index of the draw in its stream: tokens generated before this one.
    pub draw: Vec<u32>,
    /// -1: none. k: log-probability of the token and of the k likeliest.
    pub logprobs: Vec<i32>,
    /// Rows + 1: row `r` adds `bias_values[i]` to logit `bias_ids[i]` for i in `bias_starts[r] .. bias_starts[r + 1]`.
    /// Minus infinity bans a token.
    pub bias_starts: Vec<u32>,
    pub bias_ids: Vec<u32>,
    pub bias_values: Vec<f32>,
    /// Rows + 1: the distinct tokens that penalties look at.
    pub history_starts: Vec<u32>,
    pub history_ids: Vec<u32>,
    /// How often the token was generated; 0: it stands in the prompt only (repetition sees it, presence and frequency don't).
    pub history_counts: Vec<u32>,
    /// Per row: row of `masks`, or -1.
    pub mask_rows: Vec<i32>,
    /// Bit sets over the vocabulary (word w, bit b: token 32·w + b may be drawn), ⌈vocabulary / 32⌉ words a row.
    pub masks: Vec<u32>,
}

/// What a step gave, on the host. One entry per logit row.
#[derive(Clone, Debug, Default)]
pub struct StepOutput {
    /// The token (drawn or given), or [`NO_TOKEN`] where the row's logits were not finite or nothing may be drawn.
    pub ids: Vec<u32>,
    /// Natural log of its probability under the model's own distribution (before bias, penalties, temperature, filters);
    /// NaN where the row asked for none.
    pub logprobs: Vec<f32>,
    /// Rows + 1 offsets into the two arrays below.
    pub top_starts: Vec<u32>,
    /// The likeliest tokens, likeliest first, equal ones by id.
    pub top_ids: Vec<u32>,
    pub top_logprobs: Vec<f32>,
}

impl StepPlan {
    /// Takes memory for the largest plan of `groups` groups within `limits`, histories, biases, masks and copies aside, so that
    /// filling it takes none.
    pub fn reserve(&mut self, limits: &StepLimits, groups: usize) {
        fn most<T>(array: &mut Vec<T>, length: usize) {
            array.reserve_exact(length.saturating_sub(array.len()));
        }
        most(&mut self.inputs, limits.rows);
        most(&mut self.positions, limits.rows);
        most(&mut self.adapters, limits.rows);
        most(&mut self.row_starts, limits.sequences + 1);
        most(&mut self.context_lens, limits.sequences);
        most(&mut self.logit_rows, limits.logit_rows);
        self.groups.resize_with(groups, GroupPlan::default);
        for group in &mut self.groups {
            most(&mut group.slots, limits.rows);
            most(&mut group.block_tables, limits.sequences.saturating_mul(limits.blocks_per_sequence));
        }
        let (s, rows) = (&mut self.sampling, limits.logit_rows);
        for array in [&mut s.targets, &mut s.top_k, &mut s.draw] {
            most(array, rows);
        }
        for array in [&mut s.temperature, &mut s.top_p, &mut s.min_p, &mut s.presence, &mut s.frequency, &mut s.repetition] {
            most(array, rows);
        }
        most(&mut s.seed, rows);
        for array in [&mut s.logprobs, &mut s.mask_rows] {
            most(array, rows);
        }
        for array in [&mut s.bias_starts, &mut s.history_starts] {
            most(array, rows + 1);
        }
    }

    /// Empties every array, keeping the memory.
    pub fn clear(&mut self) {
        self.inputs.clear();
        self.positions.clear();
        self.adapters.clear();
        self.row_starts.clear();
        self.context_lens.clear();
        for group in &mut self.groups {
            group.slots.clear();
            group.block_tables.clear();
        }
        self.logit_rows.clear();
        self.sampling.clear();
        self.block_copies.clear();
    }

    /// Becomes a copy of `other`, keeping the memory (a derived `clone_from` would not).
    pub fn copy_from(&mut self, other: &Self) {
        copy(&mut self.inputs, &other.inputs);
        copy(&mut self.positions, &other.positions);
        copy(&mut self.adapters, &other.adapters);
        copy(&mut self.row_starts, &other.row_starts);
        copy(&mut self.context_lens, &other.context_lens);
        self.groups.resize_with(other.groups.len(), GroupPlan::default);
        for (group, other) in self.groups.iter_mut().zip(&other.groups) {
            copy(&mut group.slots, &other.slots);
            copy(&mut group.block_tables, &other.block_tables);
            group.stride = other.stride;
        }
        copy(&mut self.logit_rows, &other.logit_rows);
        self.sampling.copy_from(&other.sampling);
        copy(&mut self.block_copies, &other.block_copies);
    }

    /// Rows of this step.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.inputs.len()
    }

    /// Sequences of this step.
    #[must_use]
    pub fn sequences(&self) -> usize {
        self.context_lens.len()
    }
}

fn copy<T: Copy>(to: &mut Vec<T>, from: &[T]) {
    to.clear();
    to.extend_from_slice(from);
}

impl SamplingPlan {
    /// Becomes a copy of `other`, keeping the memory.
    pub fn copy_from(&mut self, other: &Self) {
        copy(&mut self.targets, &other.targets);
        copy(&mut self.temperature, &other.temperature);
        copy(&mut self.top_k, &other.top_k);
        copy(&mut self.top_p, &other.top_p);
        copy(&mut self.min_p, &other.min_p);
        copy(&mut self.presence, &other.presence);
        copy(&mut self.frequency, &other.frequency);
        copy(&mut self.repetition, &other.repetition);
        copy(&mut self.seed, &other.seed);
        copy(&mut self.draw, &other.draw);
        copy(&mut self.logprobs, &other.logprobs);
        copy(&mut self.bias_starts, &other.bias_starts);
        copy(&mut self.bias_ids, &other.bias_ids);
        copy(&mut self.bias_values, &other.bias_values);
        copy(&mut self.history_starts, &other.history_starts);
        copy(&mut self.history_ids, &other.history_ids);
        copy(&mut self.history_counts, &other.history_counts);
        copy(&mut self.mask_rows, &other.mask_rows);
        copy(&mut self.masks, &other.masks);
    }

    /// Empties every array, keeping the memory.
    pub fn clear(&mut self) {
        self.targets.clear();
        self.temperature.clear();
        self.top_k.clear();
        self.top_p.clear();
        self.min_p.clear();
        self.presence.clear();
        self.frequency.clear();
        self.repetition.clear();
        self.seed.clear();
        self.draw.clear();
        self.logprobs.clear();
        self.bias_starts.clear();
        self.bias_ids.clear();
        self.bias_values.clear();
        self.history_starts.clear();
        self.history_ids.clear();
        self.history_counts.clear();
        self.mask_rows.clear();
        self.masks.clear();
    }
}

impl StepOutput {
    /// Empties every array, keeping the memory.
    pub fn clear(&mut self) {
        self.ids.clear();
        self.logprobs.clear();
        self.top_starts.clear();
        self.top_ids.clear();
        self.top_logprobs.clear();
    }

    /// Top tokens of logit row `row` with their log-probabilities.
    pub fn top(&self, row: usize) -> impl Iterator<Item = (u32, f32)> + '_ {
        let range = match (self.top_starts.get(row), self.top_starts.get(row + 1)) {
            (Some(&start), Some(&end)) => start as usize..end as usize,
            _ => 0..0,
        };
        range.map(|i| (self.top_ids[i], self.top_logprobs[i]))
    }
}
