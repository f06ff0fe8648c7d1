//! The trait that a device implements, cut at fusion size.
//!
//! Everything an op reads or writes is a buffer that the caller owns and that was sized at start: nothing allocates in a
//! step. What changes from step to step (ids, positions, slots, block tables, lengths, row choices, sampling parameters)
//! is in [`Backend::Inputs`], filled by one [`Backend::upload`]; ops take it and never a host slice, so the same sequence
//! of calls can be captured into a graph. A backend may build a fused op from smaller private ones; the trait does not
//! change when it gets faster.
//!
//! Activations are f32, row-major, `rows × width`. Weights are whatever the backend packed at load.

pub use crate::{
    args::{
        Activation, Columns, EmbedArgs, ExpertGroups, GateUpArgs, GroupScore, HeadNorm, Join, KeysValues, LatentArgs, LayerInputsArgs,
        Linear, LogitsArgs, LowRank, MoeArgs, Norm, NormKind, PositionScale, QkvArgs, Rope, RopeStyle, Routing, Scoring, SharedExpert,
        Span,
    },
    kv::{AttentionArgs, KvShape, KvType, Mask},
};

use crate::{
    KernelError,
    plan::{StepLimits, StepOutput, StepPlan},
    quant::TensorView,
};

/// Who computes, for the numerics fingerprint and for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackendInfo {
    /// `reference`, `cpu`, `cuda`.
    pub name: &'static str,
    /// What the arithmetic depends on, e.g. `avx2`.
    pub instruction_set: String,
    pub threads: usize,
}

/// Attention is cut at key positions that are multiples of this, whatever the chunk, batch or thread: partial softmax
/// results of the pieces merge in ascending order. So a row's result does not depend on who computes beside it.
pub const CHUNK: usize = 256;

/// How finely a linear sees its input where the weights are block-quantised (rows of float types always see f32).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Precision {
    /// As one signed byte per value and a scale per 32: [`quantize_activations`](crate::quant::quantize_activations).
    #[default]
    Byte,
    /// As two: the second holds what rounding left of the first. Twice the arithmetic, the same weight traffic, 250 times
    /// less noise: for the few linears whose inputs have outliers that make one byte too coarse.
    TwoBytes,
}

/// What scratch ops need at most, so that it is allocated once.
#[derive(Clone, Copy, Debug)]
pub struct WorkspaceShape {
    pub limits: StepLimits,
    /// Largest input width of any linear.
    pub max_in: usize,
    /// Largest output width of any linear but the logits.
    pub max_out: usize,
    pub vocabulary: usize,
    /// Of any layer.
    pub heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
    /// Largest width of the queries of latent attention before they are absorbed, heads · (plain_dim + rope.dim); 0: none.
    pub latent_queries: usize,
    /// Largest width of values that are made from keys, kv_heads · value_dim; 0: none.
    pub copied_values: usize,
    pub moe: Option<MoeShape>,
}

/// Largest sizes of any mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MoeShape {
    pub experts: usize,
    /// Experts of a row.
    pub chosen: usize,
    pub hidden: usize,
    /// Of one expert's activated values.
    pub width: usize,
    /// Of the shared expert's; 0: none.
    pub shared_width: usize,
}

/// One device's arithmetic.
pub trait Backend: Send + Sync + Sized + 'static {
    /// f32 memory on the device.
    type Buffer: Send + Sync;
    /// A packed weight matrix, out × in, with its bias. Serves every batch size, and row look-up for embeddings.
    type Linear: Send + Sync;
    /// Paged keys and values of all cache groups.
    type Kv: Send + Sync;
    /// A step's inputs on the device.
    type Inputs: Send + Sync;
    /// Sampled tokens and their log-probabilities on the device; read by the next step's `embed`.
    type Sampled: Send + Sync;
    /// Private scratch of the ops.
    type Workspace: Send;

    fn info(&self) -> BackendInfo;

    // Start: allocate and pack.

    /// `len` zeros.
    fn buffer(&self, len: usize) -> Result<Self::Buffer, KernelError>;
    /// A copy of `data` on the device.
    fn buffer_from(&self, data: &[f32]) -> Result<Self::Buffer, KernelError>;
    /// Packs the rows of `parts`, one below the other (all with the same number of columns; types may differ), with an
    /// optional bias of as many values as there are rows.
    fn linear(&self, parts: &[TensorView<'_>], bias: Option<&[f32]>, precision: Precision) -> Result<Self::Linear, KernelError>;
    /// Rows (out) and columns (in).
    fn linear_shape(&self, linear: &Self::Linear) -> (usize, usize);
    /// Bytes that the packed matrix holds in device memory.
    fn linear_bytes(&self, linear: &Self::Linear) -> usize;
    /// A cache whose groups all have one shape.
    fn kv(&self, shape: &KvShape) -> Result<Self::Kv, KernelError> {
        self.kv_of(std::slice::from_ref(shape), &[])
    }
    /// One memory of blocks for all cache groups; layers of group g have shape `shapes[groups[g]]`. The shapes have the same
    /// blocks, each of [`KvShape::shared_block_bytes`] bytes: which group a block belongs to says how it is laid out.
    fn kv_of(&self, shapes: &[KvShape], groups: &[usize]) -> Result<Self::Kv, KernelError>;
    fn inputs(&self, limits: &StepLimits, vocabulary: usize) -> Result<Self::Inputs, KernelError>;
    fn sampled(&self, limits: &StepLimits) -> Result<Self::Sampled, KernelError>;
    fn workspace(&self, shape: &WorkspaceShape) -> Result<Self::Workspace, KernelError>;

    // A step, in this order.

    /// Checks the plan against the limits and copies it to the device. The only op that sees host arrays.
    fn upload(&self, plan: &StepPlan, inputs: &mut Self::Inputs) -> Result<(), KernelError>;
    /// Copies the plan's `block_copies` in all layers.
    fn copy_blocks(&self, inputs: &Self::Inputs, kv: &mut Self::Kv) -> Result<(), KernelError>;
    /// The hidden state, rows × hidden. An input may name a row of the last step's `sampled`.
    fn embed(
        &self,
        inputs: &Self::Inputs,
        args: &EmbedArgs<'_, Self>,
        sampled: &Self::Sampled,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError>;
    /// The inputs of all layers, rows × layers · width, from the embedded `hidden`.
    fn layer_inputs(
        &self,
        inputs: &Self::Inputs,
        args: &LayerInputsArgs<'_, Self>,
        sampled: &Self::Sampled,
        hidden: &Self::Buffer,
        out: &mut Self::Buffer,
        workspace: &mut Self::Workspace,
    ) -> Result<(), KernelError>;
    /// out[row] = factor · (cos(p·f_0) …, sin(p·f_0) …) for position p of the row; `frequencies` has rope_dim / 2 values.
    fn rope_rows(&self, inputs: &Self::Inputs, frequencies: &Self::Buffer, factor: f32, out: &mut Self::Buffer) -> Result<(), KernelError>;
    /// Norm, projection, rotation; K and V go to their slots as stored in the cache, Q to `q` (rows × heads · key_dim).
    fn qkv_rope_write(
        &self,
        inputs: &Self::Inputs,
        args: &QkvArgs<'_, Self>,
        hidden: &Self::Buffer,
        kv: &mut Self::Kv,
        q: &mut Self::Buffer,
        workspace: &mut Self::Workspace,
    ) -> Result<(), KernelError>;
    /// The same for latent attention: latent and rotated key go to the cache, queries in its form to `q` (rows × heads ·
    /// (latent + rope.dim)).
    fn latent_rope_write(
        &self,
        inputs: &Self::Inputs,
        args: &LatentArgs<'_, Self>,
        hidden: &Self::Buffer,
        kv: &mut Self::Kv,
        q: &mut Self::Buffer,
        workspace: &mut Self::Workspace,
    ) -> Result<(), KernelError>;
    /// Stores keys (rows × kv_heads · key_dim) and values (rows × kv_heads · value_dim; none where the cache shares them) of one
    /// layer at the rows' slots, as the cache stores: for models whose keys don't come from one projection.
    fn write_kv(
        &self,
        inputs: &Self::Inputs,
        group: usize,
        layer: usize,
        keys: &Self::Buffer,
        values: Option<&Self::Buffer>,
        kv: &mut Self::Kv,
    ) -> Result<(), KernelError>;
    /// Paged attention over the ragged batch, prefill and decode rows together; `q` is rows × heads · key_dim, `out` is rows ×
    /// heads · value_dim.
    fn attention(
        &self,
        inputs: &Self::Inputs,
        args: &AttentionArgs<'_, Self>,
        q: &Self::Buffer,
        kv: &Self::Kv,
        out: &mut Self::Buffer,
        workspace: &mut Self::Workspace,
    ) -> Result<(), KernelError>;
    /// out of head h = its matrix · x of head h; `linear` has one matrix of the same size per head, each a part (or several) of
    /// its own. `x` is rows × heads · in, `out` rows × heads · out.
    fn head_linear(
        &self,
        inputs: &Self::Inputs,
        linear: &Self::Linear,
        heads: usize,
        x: &Self::Buffer,
        out: &mut Self::Buffer,
        workspace: &mut Self::Workspace,
    ) -> Result<(), KernelError>;
    /// linear(x) joins `to`.
    fn linear_join(
        &self,
        inputs: &Self::Inputs,
        linear: &Linear<'_, Self>,
        join: &Join<'_, Self>,
        x: &Self::Buffer,
        to: &mut Self::Buffer,
        workspace: &mut Self::Workspace,
    ) -> Result<(), KernelError>;
    /// x joins `to`; both are rows × width.
    fn join(
        &self,
        inputs: &Self::Inputs,
        width: usize,
        join: &Join<'_, Self>,
        x: &Self::Buffer,
        to: &mut Self::Buffer,
    ) -> Result<(), KernelError>;
    /// `out` is rows × width of the activated values.
    fn gate_up(
        &self,
        inputs: &Self::Inputs,
        args: &GateUpArgs<'_, Self>,
        hidden: &Self::Buffer,
        out: &mut Self::Buffer,
        workspace: &mut Self::Workspace,
    ) -> Result<(), KernelError>;
    /// The mixture's output for `hidden` joins `branch`, or `hidden` itself where that is none.
    fn moe(
        &self,
        inputs: &Self::Inputs,
        args: &MoeArgs<'_, Self>,
        hidden: &mut Self::Buffer,
        branch: Option<&mut Self::Buffer>,
        workspace: &mut Self::Workspace,
    ) -> Result<(), KernelError>;
    /// Of the rows that want them; `logits` is logit rows × vocabulary.
    fn logits(
        &self,
        inputs: &Self::Inputs,
        args: &LogitsArgs<'_, Self>,
        hidden: &Self::Buffer,
        logits: &mut Self::Buffer,
        workspace: &mut Self::Workspace,
    ) -> Result<(), KernelError>;
    /// Turns each logit row into a token; see [`crate::reference::sample`] for the definition. May overwrite `logits`.
    fn sample(
        &self,
        inputs: &Self::Inputs,
        logits: &mut Self::Buffer,
        sampled: &mut Self::Sampled,
        workspace: &mut Self::Workspace,
    ) -> Result<(), KernelError>;

    // Read back.

    /// Waits for the step and copies its tokens to the host.
    fn read_sampled(&self, inputs: &Self::Inputs, sampled: &Self::Sampled, out: &mut StepOutput) -> Result<(), KernelError>;
    /// The first `out.len()` values of a buffer (tests, diagnosis).
    fn read(&self, buffer: &Self::Buffer, out: &mut [f32]) -> Result<(), KernelError>;
}
