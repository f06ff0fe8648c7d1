//! Buffers between the ops of one step, sized by its limits.

use quire_kernels::{
    KernelError,
    backend::{Backend, MoeShape, WorkspaceShape},
    plan::StepLimits,
};

use super::description::{Attention, Dense, Description, FeedForward, Keys, Layer};

/// Allocated once; every op writes to a buffer it is given.
pub struct Scratch<B: Backend> {
    /// Per rotation, rows × turning elements: cos, then sin.
    pub(super) ropes: Vec<B::Buffer>,
    /// Rows × queries.
    pub(super) q: B::Buffer,
    /// Rows × attention's result.
    pub(super) attended: B::Buffer,
    /// Rows × heads · value dim: that of latent attention, out of the latent.
    pub(super) values: Option<B::Buffer>,
    /// Rows × feed-forward width.
    pub(super) activated: B::Buffer,
    /// Rows × hidden: the sum of a dense part and experts, before it is normed.
    pub(super) branch: Option<B::Buffer>,
    /// Rows × layers · width.
    pub(super) layer_inputs: Option<B::Buffer>,
    pub(super) hidden: usize,
    pub(super) workspace: B::Workspace,
}

/// Widths that a model's ops need at most.
struct Widths {
    q: usize,
    attended: usize,
    values: usize,
    activated: usize,
    branch: usize,
    layer_inputs: usize,
    ropes: usize,
    max_in: usize,
    max_out: usize,
    latent_queries: usize,
    copied_values: usize,
    moe: Option<MoeShape>,
}

fn dense_width(layer: &Layer) -> usize {
    layer.feed_forward.dense.map_or(0, |dense: Dense| dense.width)
}

fn latent_of(attention: &Attention) -> Option<super::description::Latent> {
    if let Keys::Latent(latent) = attention.keys { Some(latent) } else { None }
}

impl Widths {
    fn of(d: &Description) -> Self {
        let attention = |figure: fn(&Attention) -> usize| d.widest(|layer| figure(&layer.attention));
        let values = attention(|a| a.heads * a.value_dim);
        let gate_up = d.widest(|layer| layer.feed_forward.dense.map_or(0, |dense| dense.width * if dense.gated { 2 } else { 1 }));
        let layer_inputs = d.layer_input.map_or(0, |width| width * d.layers.len());
        let latent_queries = attention(|a| latent_of(a).map_or(0, |_| a.heads * a.head_dim));
        let q = attention(|a| a.heads * a.cache_shape().key_dim);
        let attended = attention(|a| a.heads * a.cache_shape().value_dim);
        let activated = d.widest(dense_width).max(d.layer_input.unwrap_or(0));
        let experts = d.layers.iter().filter_map(|layer| Some((layer.feed_forward.experts?, dense_width(layer))));
        let moe = experts.fold(None, |most: Option<MoeShape>, (experts, shared)| {
            let most = most.unwrap_or(MoeShape { experts: 0, chosen: 0, hidden: d.hidden, width: 0, shared_width: 0 });
            Some(MoeShape {
                experts: most.experts.max(experts.count),
                chosen: most.chosen.max(experts.used),
                hidden: d.hidden,
                width: most.width.max(experts.width),
                shared_width: most.shared_width.max(shared),
            })
        });
        let both = |part: &FeedForward| part.dense.is_some() && part.experts.is_some() && !part.shares();
        let branch = d.layers.iter().any(|layer| both(&layer.feed_forward));
        Self {
            q,
            attended,
            values: if latent_queries > 0 { values } else { 0 },
            activated,
            branch: if branch { d.hidden } else { 0 },
            layer_inputs,
            ropes: d.ropes.iter().map(super::description::Rope::dim).sum(),
            max_in: d.hidden.max(values).max(attended).max(activated).max(latent_queries).max(moe.map_or(0, |moe| moe.width)),
            max_out: attention(Attention::qkv_rows).max(gate_up).max(d.hidden).max(layer_inputs).max(q).max(values),
            latent_queries,
            copied_values: attention(|a| if a.keys == Keys::OwnForBoth { a.kv_heads * a.value_dim } else { 0 }),
            moe,
        }
    }
}

impl<B: Backend> Scratch<B> {
    /// # Errors
    /// The device has no such memory.
    pub fn new(backend: &B, d: &Description, limits: &StepLimits) -> Result<Self, KernelError> {
        let widths = Widths::of(d);
        let buffer = |width: usize| backend.buffer(limits.rows * width);
        let maybe = |width: usize| if width > 0 { buffer(width).map(Some) } else { Ok(None) };
        Ok(Self {
            ropes: d.ropes.iter().map(|rope| buffer(rope.dim())).collect::<Result<_, _>>()?,
            q: buffer(widths.q)?,
            attended: buffer(widths.attended)?,
            values: maybe(widths.values)?,
            activated: buffer(widths.activated)?,
            branch: maybe(widths.branch)?,
            layer_inputs: maybe(widths.layer_inputs)?,
            hidden: d.hidden,
            workspace: backend.workspace(&WorkspaceShape {
                limits: *limits,
                max_in: widths.max_in,
                max_out: widths.max_out,
                vocabulary: d.vocabulary,
                heads: d.widest(|layer| layer.attention.heads),
                key_dim: d.widest(|layer| layer.attention.cache_shape().key_dim),
                value_dim: d.widest(|layer| layer.attention.cache_shape().value_dim),
                latent_queries: widths.latent_queries,
                copied_values: widths.copied_values,
                moe: widths.moe,
            })?,
        })
    }
}

/// Rough number of bytes of [`Scratch`], hidden state and logits, for the memory plan.
#[must_use]
pub fn scratch_bytes(d: &Description, limits: &StepLimits) -> usize {
    let w = Widths::of(d);
    let experts = w.moe.map_or(0, |moe| moe.chosen * (3 * moe.width + 2 * moe.hidden) + 3 * moe.shared_width + 3 * moe.experts);
    let own = w.ropes + w.q + w.attended + w.values + w.activated + w.branch + w.layer_inputs;
    let row = own + w.max_out + w.max_in + w.latent_queries + 2 * d.hidden + experts;
    (limits.rows * row + 2 * limits.logit_rows * d.vocabulary) * size_of::<f32>()
}
