//! A checked copy of a step's plan, and the sampled tokens, in host memory: what backends that compute on the host keep.
//!
//! After [`HostInputs::load`] every index in the plan is known to lie inside the array that it names, as far as the plan
//! alone can tell; what depends on a cache or a table is checked per op against maxima kept here, in constant time.

use crate::{
    KernelError,
    backend::KvShape,
    plan::{GroupPlan, NO_TOKEN, SAMPLED_ROW, StepLimits, StepOutput, StepPlan},
    sampling::{MAX_VOCABULARY, require},
};

/// A checked plan.
pub struct HostInputs {
    plan: StepPlan,
    limits: StepLimits,
    vocabulary: usize,
    /// Per group.
    bounds: Vec<GroupBounds>,
    largest_copy: Option<u32>,
    any_adapter: bool,
}

#[derive(Clone, Copy, Default)]
struct GroupBounds {
    largest_slot: u32,
    largest_block: u32,
    stride: usize,
}

/// Shape errors of one op.
pub(crate) fn shape(op: &'static str, good: bool, detail: impl FnOnce() -> String) -> Result<(), KernelError> {
    if good { Ok(()) } else { Err(KernelError::Shape { op, detail: detail() }) }
}

impl HostInputs {
    /// Empty inputs for plans up to `limits` over ids below `vocabulary`.
    pub fn new(limits: &StepLimits, vocabulary: usize) -> Result<Self, KernelError> {
        shape("inputs", vocabulary <= MAX_VOCABULARY, || format!("a vocabulary of {vocabulary} is above {MAX_VOCABULARY}"))?;
        shape("inputs", limits.rows < SAMPLED_ROW as usize, || "too many rows".into())?;
        let mut plan = StepPlan::default();
        // Until the first plan tells how many groups there are.
        plan.reserve(limits, 1);
        plan.row_starts.push(0);
        Ok(Self { plan, limits: *limits, vocabulary, bounds: Vec::new(), largest_copy: None, any_adapter: false })
    }

    /// Checks `plan` and keeps a copy of it. After an error the inputs are empty.
    pub fn load(&mut self, plan: &StepPlan) -> Result<(), KernelError> {
        self.plan.clear();
        self.plan.row_starts.push(0);
        self.bounds.clear();
        self.largest_copy = None;
        self.any_adapter = false;
        self.check_rows(plan)?;
        self.check_sequences(plan)?;
        plan.sampling.check(plan.logit_rows.len(), self.vocabulary, self.limits.top_logprobs)?;
        for group in 0..plan.groups.len() {
            match check_group(plan, group, self.limits.blocks_per_sequence) {
                Ok(bounds) => self.bounds.push(bounds),
                Err(error) => {
                    self.bounds.clear();
                    return Err(error);
                }
            }
        }
        self.largest_copy = plan.block_copies.iter().map(|&(a, b)| a.max(b)).max();
        self.any_adapter = plan.adapters.iter().any(|&a| a >= 0);
        if self.plan.groups.len() < plan.groups.len() {
            self.plan.reserve(&self.limits, plan.groups.len());
        }
        self.plan.copy_from(plan);
        Ok(())
    }

    fn check_rows(&self, plan: &StepPlan) -> Result<(), KernelError> {
        let (rows, limits) = (plan.inputs.len(), &self.limits);
        require(rows <= limits.rows, || format!("inputs: {rows} rows, at most {}", limits.rows))?;
        require(plan.positions.len() == rows, || format!("positions: {} entries for {rows} rows", plan.positions.len()))?;
        require(plan.adapters.len() == rows, || format!("adapters: {} entries for {rows} rows", plan.adapters.len()))?;
        for &input in &plan.inputs {
            let (row, limit) =
                ((input & !SAMPLED_ROW) as usize, if input & SAMPLED_ROW == 0 { self.vocabulary } else { limits.logit_rows });
            require(row < limit, || format!("inputs: {row} is not below {limit}"))?;
        }
        require(plan.adapters.iter().all(|&a| a >= -1), || "adapters: below -1".into())?;
        let wanted = plan.logit_rows.len();
        require(wanted <= limits.logit_rows, || format!("logit_rows: {wanted} entries, at most {}", limits.logit_rows))?;
        require(plan.logit_rows.windows(2).all(|w| w[0] < w[1]), || "logit_rows: not ascending".into())?;
        require(plan.logit_rows.last().is_none_or(|&r| (r as usize) < rows), || "logit_rows: beyond the last row".into())
    }

    fn check_sequences(&self, plan: &StepPlan) -> Result<(), KernelError> {
        let (rows, sequences) = (plan.rows(), plan.sequences());
        require(sequences <= self.limits.sequences, || format!("context_lens: {sequences} sequences, at most {}", self.limits.sequences))?;
        let starts = &plan.row_starts;
        require(starts.len() == sequences + 1, || format!("row_starts: {} entries for {sequences} sequences", starts.len()))?;
        require(starts[0] == 0 && starts[sequences] as usize == rows, || format!("row_starts: not from 0 to {rows}"))?;
        require(starts.windows(2).all(|w| w[0] < w[1]), || "row_starts: not ascending".into())?;
        for (s, &len) in plan.context_lens.iter().enumerate() {
            let (start, end) = (starts[s] as usize, starts[s + 1] as usize);
            let first = (len as usize).checked_sub(end - start);
            require(first.is_some(), || format!("context_lens: {len} for {} rows", end - start))?;
            let first = first.unwrap_or(0);
            let ascending = plan.positions[start..end].iter().enumerate().all(|(i, &p)| p as usize == first + i);
            require(ascending, || format!("positions: of sequence {s} do not end at its context length {len} - 1"))?;
        }
        Ok(())
    }

    /// The plan as loaded.
    #[must_use]
    pub fn plan(&self) -> &StepPlan {
        &self.plan
    }

    /// Largest step.
    #[must_use]
    pub fn limits(&self) -> &StepLimits {
        &self.limits
    }

    /// Ids are below this.
    #[must_use]
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// Whether any row uses an adapter.
    #[must_use]
    pub fn any_adapter(&self) -> bool {
        self.any_adapter
    }

    /// Checks that every slot and block of a group lies inside a cache.
    pub fn check_kv(&self, op: &'static str, group: usize, layer: usize, kv: &KvShape) -> Result<(), KernelError> {
        let Some(bounds) = self.bounds.get(group) else {
            return Err(KernelError::Shape { op, detail: format!("groups: {} in the plan, group {group} asked for", self.bounds.len()) });
        };
        shape(op, layer < kv.layers, || format!("layer {layer} of a cache with {}", kv.layers))?;
        let slots = kv.blocks * kv.block_size;
        shape(op, self.plan.rows() == 0 || (bounds.largest_slot as usize) < slots, || {
            format!("slots: {} is not below {slots}", bounds.largest_slot)
        })?;
        shape(op, (bounds.largest_block as usize) < kv.blocks || self.plan.sequences() == 0, || {
            format!("block_tables: {} is not below {}", bounds.largest_block, kv.blocks)
        })?;
        let longest = self.plan.context_lens.iter().max().copied().unwrap_or(0) as usize;
        shape(op, longest <= bounds.stride * kv.block_size, || format!("block_tables: {} blocks do not hold {longest} keys", bounds.stride))
    }

    /// Checks that every block to copy lies inside a cache.
    pub fn check_copies(&self, kv: &KvShape) -> Result<(), KernelError> {
        let good = self.largest_copy.is_none_or(|block| (block as usize) < kv.blocks);
        shape("copy_blocks", good, || format!("block_copies: {:?} is not below {}", self.largest_copy, kv.blocks))
    }
}

fn check_group(plan: &StepPlan, group: usize, limit: usize) -> Result<GroupBounds, KernelError> {
    let GroupPlan { slots, block_tables: tables, stride } = &plan.groups[group];
    let stride = *stride;
    require(slots.len() == plan.rows(), || format!("groups[{group}].slots: {} entries for {} rows", slots.len(), plan.rows()))?;
    require(stride <= limit, || format!("groups[{group}].stride: {stride}, at most {limit}"))?;
    require(tables.len() == plan.sequences() * stride, || {
        format!("groups[{group}].block_tables: {} entries, not sequences × stride", tables.len())
    })?;
    let largest_slot = slots.iter().max().copied().unwrap_or(0);
    let largest_block = tables.iter().max().copied().unwrap_or(0);
    Ok(GroupBounds { largest_slot, largest_block, stride })
}

/// Sampled tokens in host memory, `limits.logit_rows` rows.
pub struct HostSampled {
    /// Rows of the last step.
    pub(crate) rows: usize,
    pub(crate) ids: Vec<u32>,
    pub(crate) logprobs: Vec<f32>,
    pub(crate) top_counts: Vec<u32>,
    /// Rows × `top_stride`.
    pub(crate) tops: Vec<(u32, f32)>,
    pub(crate) top_stride: usize,
}

impl HostSampled {
    /// Nothing sampled yet: every row is [`NO_TOKEN`].
    #[must_use]
    pub fn new(limits: &StepLimits) -> Self {
        let rows = limits.logit_rows;
        Self {
            rows: 0,
            ids: vec![NO_TOKEN; rows],
            logprobs: vec![f32::NAN; rows],
            top_counts: vec![0; rows],
            tops: vec![(0, 0.0); rows * limits.top_logprobs],
            top_stride: limits.top_logprobs,
        }
    }

    /// Token id of an input: itself, or what the named row sampled ([`NO_TOKEN`] if that row failed).
    #[must_use]
    pub fn resolve(&self, input: u32) -> u32 {
        if input & SAMPLED_ROW == 0 { input } else { self.ids.get((input & !SAMPLED_ROW) as usize).copied().unwrap_or(NO_TOKEN) }
    }

    /// Copies the last step's rows out.
    pub fn read(&self, out: &mut StepOutput) {
        out.clear();
        out.ids.extend_from_slice(&self.ids[..self.rows]);
        out.logprobs.extend_from_slice(&self.logprobs[..self.rows]);
        out.top_starts.push(0);
        for row in 0..self.rows {
            for &(id, logprob) in &self.tops[row * self.top_stride..][..self.top_counts[row] as usize] {
                out.top_ids.push(id);
                out.top_logprobs.push(logprob);
            }
            out.top_starts.push(out.top_ids.len() as u32);
        }
    }
}
