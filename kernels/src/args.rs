//! Arguments of the ops: what a decoder family can choose, as data.
//!
//! Whatever a family may lack is an `Option`. Where these are used, and in which order: [`Backend`].

use crate::backend::Backend;

/// Which elements of a head turn together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeStyle {
    /// (0, 1), (2, 3), … as GGUF stores Llama.
    Adjacent,
    /// (0, d/2), (1, d/2 + 1), … as Hugging Face and NeoX do.
    Half,
}

/// What a feed-forward does to its first projection.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// x / (1 + e⁻ˣ).
    Silu,
    /// x · Φ(x), by the tanh approximation.
    Gelu,
    /// x · Φ(x), by the error function.
    GeluExact,
    Relu,
    /// max(x, 0)².
    ReluSquared,
    /// Gated only: g · σ(alpha · g) · (u + 1), with g = min(gate, limit) and u = up between −limit and limit.
    ClampedSwiglu {
        alpha: f32,
        limit: f32,
    },
}

/// What a norm divides by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// x / √(mean(x²) + epsilon).
    Rms,
    /// (x − mean(x)) / √(variance(x) + epsilon).
    Layer,
}

/// A norm, times `weight`, plus `bias` where there are any. A weight that a family stores as 1 + w is added up at load.
pub struct Norm<'a, B: Backend> {
    pub kind: NormKind,
    pub weight: Option<&'a B::Buffer>,
    pub bias: Option<&'a B::Buffer>,
    pub epsilon: f32,
}

impl<'a, B: Backend> Norm<'a, B> {
    /// An RMS norm with a weight.
    #[must_use]
    pub fn rms(weight: &'a B::Buffer, epsilon: f32) -> Self {
        Self { kind: NormKind::Rms, weight: Some(weight), bias: None, epsilon }
    }
}

impl<B: Backend> Clone for Norm<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for Norm<'_, B> {}

/// A low-rank addition to a linear: y += scale · B (A x).
pub struct LowRank<B: Backend> {
    /// rank × in.
    pub a: B::Linear,
    /// out × rank.
    pub b: B::Linear,
    pub scale: f32,
}

/// A linear with its adapters: row `r` uses `adapters[inputs.adapters[r]]`, if both exist.
pub struct Linear<'a, B: Backend> {
    pub weight: &'a B::Linear,
    /// Empty: no adapters are loaded for this linear.
    pub adapters: &'a [Option<LowRank<B>>],
}

impl<'a, B: Backend> Linear<'a, B> {
    /// Without adapters.
    #[must_use]
    pub fn plain(weight: &'a B::Linear) -> Self {
        Self { weight, adapters: &[] }
    }
}

impl<B: Backend> Clone for Linear<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for Linear<'_, B> {}

/// How the output y of a branch joins a buffer `to` of the same width, row by row:
/// to = ((to, if `add`) + scale · norm(y)) · total.
pub struct Join<'a, B: Backend> {
    /// Of a whole row of y.
    pub norm: Option<Norm<'a, B>>,
    pub scale: f32,
    /// Adds to what is there; otherwise replaces it.
    pub add: bool,
    pub total: f32,
}

impl<B: Backend> Join<'_, B> {
    /// to += y.
    pub const ADD: Self = Self { norm: None, scale: 1.0, add: true, total: 1.0 };
    /// to = y.
    pub const SET: Self = Self { norm: None, scale: 1.0, add: false, total: 1.0 };
}

impl<B: Backend> Clone for Join<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for Join<'_, B> {}

/// What becomes the hidden state at the beginning: norm(scale · table\[id\] + positions\[position + offset\]).
pub struct EmbedArgs<'a, B: Backend> {
    /// vocabulary × hidden.
    pub table: &'a B::Linear,
    pub scale: f32,
    /// A learned row per position, and its offset.
    pub positions: Option<(&'a B::Linear, u32)>,
    pub norm: Option<Norm<'a, B>>,
}

/// A row's own inputs of each layer:
/// (norm(projection_scale · projection · hidden) + table_scale · table\[id\]) · scale, the norm over `width` values at a time.
pub struct LayerInputsArgs<'a, B: Backend> {
    /// vocabulary × layers · width.
    pub table: &'a B::Linear,
    pub table_scale: f32,
    /// layers · width × hidden.
    pub projection: Linear<'a, B>,
    pub projection_scale: f32,
    pub norm: Norm<'a, B>,
    /// Of one layer.
    pub width: usize,
    pub scale: f32,
}

/// Rotation of queries and keys.
pub struct Rope<'a, B: Backend> {
    /// cos and sin per row, from [`Backend::rope_rows`].
    pub rows: &'a B::Buffer,
    pub style: RopeStyle,
    /// Elements of a head that turn, from its start (even).
    pub dim: usize,
}

impl<B: Backend> Clone for Rope<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for Rope<'_, B> {}

/// What a norm of queries or keys goes over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Span {
    /// Each head by itself, all with the same weights (as many as a head's elements).
    Head,
    /// Each head by itself, with weights of its own (heads · elements).
    EachHead,
    /// All heads together (heads · elements).
    Width,
}

/// A norm of queries, keys or values.
pub struct HeadNorm<'a, B: Backend> {
    pub norm: Norm<'a, B>,
    pub span: Span,
    /// After the rotation instead of before it.
    pub after_rope: bool,
}

impl<B: Backend> Clone for HeadNorm<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for HeadNorm<'_, B> {}

/// A factor that grows with the position p: 1 + beta · ln(1 + ⌊(p + offset) / interval⌋).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PositionScale {
    pub beta: f32,
    pub offset: u32,
    /// At least 1.
    pub interval: u32,
}

impl PositionScale {
    /// The factor.
    #[must_use]
    pub fn at(&self, position: u32) -> f32 {
        let steps = (u64::from(position) + u64::from(self.offset)) / u64::from(self.interval.max(1));
        1.0 + self.beta * (steps as f32).ln_1p()
    }
}

/// Where a layer's keys and values come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KeysValues {
    /// The linear's rows are Q, K, V.
    #[default]
    Projected,
    /// The linear's rows are Q, K; a value is its key before the key's norm and rotation (values as wide as keys).
    ValuesAreKeys,
    /// The linear's rows are Q: attention reads another layer's cache, and nothing is written.
    Elsewhere,
}

/// Q, K and V projection, norms, rotation, and the write of K and V into the cache, in this order: linear(norm(hidden)),
/// clamp, norms (or after the rotation), rotation of Q and K, `query_scale` on Q.
pub struct QkvArgs<'a, B: Backend> {
    pub norm: Option<Norm<'a, B>>,
    /// heads · key_dim rows of Q, kv_heads · key_dim of K, kv_heads · value_dim of V, as far as `keys_values` says; with its
    /// bias, if the model has one.
    pub linear: Linear<'a, B>,
    /// Cuts the projections to −clamp … clamp.
    pub clamp: Option<f32>,
    pub query_norm: Option<HeadNorm<'a, B>>,
    pub key_norm: Option<HeadNorm<'a, B>>,
    pub value_norm: Option<HeadNorm<'a, B>>,
    pub rope: Option<Rope<'a, B>>,
    pub query_scale: Option<PositionScale>,
    pub keys_values: KeysValues,
    pub heads: usize,
    pub kv_heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
    /// Cache group and layer within it.
    pub group: usize,
    pub layer: usize,
}

/// Multi-head latent attention's projections, in the absorbed form: the cache holds one latent and one rotated key per
/// token (kv_heads 1, key_dim latent + rope.dim, value_dim latent, shared values), and queries are brought to that form:
/// q of head h = (absorb_h · (its first `plain_dim` elements), rotated rest).
pub struct LatentArgs<'a, B: Backend> {
    pub norm: Option<Norm<'a, B>>,
    /// Rows: what queries come from (the queries themselves where `query_up` is none), latent, key to rotate (rope.dim).
    pub down: Linear<'a, B>,
    /// Norm and projection of what queries come from: heads · (plain_dim + rope.dim) rows.
    pub query_up: Option<(Norm<'a, B>, Linear<'a, B>)>,
    pub latent_norm: Norm<'a, B>,
    /// One matrix per head, latent × plain_dim: the transposed key rows of the up-projection. Every head is a part (or
    /// several) of its own.
    pub absorb: &'a B::Linear,
    pub rope: Rope<'a, B>,
    pub query_scale: Option<PositionScale>,
    pub heads: usize,
    /// Elements of a query that don't turn.
    pub plain_dim: usize,
    pub latent: usize,
    pub group: usize,
    pub layer: usize,
}

/// Some columns of a buffer of rows.
pub struct Columns<'a, B: Backend> {
    pub buffer: &'a B::Buffer,
    /// Width of the buffer's rows.
    pub stride: usize,
    pub start: usize,
}

impl<B: Backend> Clone for Columns<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for Columns<'_, B> {}

/// The first half of a feed-forward: with y = linear(norm(hidden)),
/// gated: activation(first half of y) · (second half); plain: activation(y), times `factor` where there is one.
pub struct GateUpArgs<'a, B: Backend> {
    pub norm: Option<Norm<'a, B>>,
    pub linear: Linear<'a, B>,
    pub activation: Activation,
    pub gated: bool,
    /// Plain only.
    pub factor: Option<Columns<'a, B>>,
}

/// How a router's logits become scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scoring {
    /// Softmax over all experts.
    Softmax,
    /// Softmax over the chosen experts; the choice goes by logits.
    SoftmaxOfChosen,
    /// Each by itself.
    Sigmoid,
}

/// What a group of experts is worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupScore {
    Best,
    /// Sum of the best two.
    BestTwo,
}

/// Experts are chosen from some groups only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Groups of consecutive experts, all of the same size.
    pub count: usize,
    /// Groups to choose from.
    pub kept: usize,
    pub score: GroupScore,
}

/// Which experts a row goes to and with what weights: [`crate::routing::route`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routing {
    pub experts: usize,
    /// Experts of a row.
    pub chosen: usize,
    pub scoring: Scoring,
    pub groups: Option<ExpertGroups>,
    /// Divides the weights of a row by their sum.
    pub normalise: bool,
    /// Multiplies the weights.
    pub scale: f32,
    /// Weights multiply an expert's input instead of its output.
    pub weigh_input: bool,
}

/// An expert that all rows go to.
pub struct SharedExpert<'a, B: Backend> {
    pub gate_up: Linear<'a, B>,
    pub down: Linear<'a, B>,
    /// One row: the output is multiplied by σ(gate · x).
    pub gate: Option<&'a B::Linear>,
}

/// A mixture of gated experts: y = Σ weight · down(activation(gate(x)) · up(x)) + shared(x), with x = norm(hidden).
pub struct MoeArgs<'a, B: Backend> {
    pub norm: Option<Norm<'a, B>>,
    /// The router's own view of `hidden`; none: x.
    pub router_norm: Option<Norm<'a, B>>,
    /// experts × hidden.
    pub router: &'a B::Linear,
    pub routing: Routing,
    /// Per expert: added to scores for the choice only.
    pub correction: Option<&'a B::Buffer>,
    /// Per expert: multiplies its weight.
    pub expert_scale: Option<&'a B::Buffer>,
    /// experts · 2 · width rows: gate, then up, expert after expert. Every expert is a part (or several) of its own.
    pub gate_up: &'a B::Linear,
    /// experts · hidden rows, expert after expert, each a part (or several) of its own.
    pub down: &'a B::Linear,
    pub activation: Activation,
    pub shared: Option<SharedExpert<'a, B>>,
    pub join: Join<'a, B>,
}

/// The end: softcap(scale · linear(norm(hidden))), with softcap(z) = cap · tanh(z / cap).
pub struct LogitsArgs<'a, B: Backend> {
    pub norm: Option<Norm<'a, B>>,
    pub linear: &'a B::Linear,
    pub scale: f32,
    /// Above 0.
    pub softcap: Option<f32>,
}
