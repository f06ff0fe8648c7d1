//! One layer.

use quire_kernels::backend::{Activation, ExpertGroups, NormKind, PositionScale, Scoring, Span};

use super::CacheShape;
use crate::cache::GroupKind;

/// A norm of the hidden state, of heads or of a latent vector. LayerNorms have a bias where the checkpoint holds one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Norm {
    pub kind: NormKind,
    pub epsilon: f32,
}

impl Norm {
    #[must_use]
    pub fn rms(epsilon: f32) -> Self {
        Self { kind: NormKind::Rms, epsilon }
    }

    #[must_use]
    pub fn layer(epsilon: f32) -> Self {
        Self { kind: NormKind::Layer, epsilon }
    }
}

/// What becomes of a block's result before it is added to the hidden state: hidden += scale · norm(result).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Branch {
    pub norm: Option<Norm>,
    pub scale: f32,
}

impl Branch {
    pub const PLAIN: Self = Self { norm: None, scale: 1.0 };
}

/// Attention, then feed-forward.
#[derive(Clone, Debug, PartialEq)]
pub struct Layer {
    pub attention: Attention,
    pub feed_forward: FeedForward,
    /// The feed-forward part reads the hidden state as it was before attention.
    pub parallel: bool,
    /// The layer's result is multiplied by a number that the checkpoint holds.
    pub scaled: bool,
}

/// Norm of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadNorm {
    pub norm: Norm,
    pub span: Span,
    /// There are no weights, and it comes after the rotation.
    pub plain_after_rope: bool,
}

/// How far back a row looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    All,
    /// So many keys, its own among them.
    Window(usize),
    /// From the last multiple of this.
    Chunk(usize),
}

impl Reach {
    /// What the cache has to keep.
    #[must_use]
    pub fn group_kind(self) -> GroupKind {
        match self {
            Self::All => GroupKind::Full,
            Self::Window(tokens) => GroupKind::Window { tokens },
            Self::Chunk(tokens) => GroupKind::Chunk { tokens },
        }
    }
}

/// Keys and values from a common low-rank vector (multi-head latent attention).
///
/// Per token: latent = norm(A x), and one rotated key part for all heads; per head, K = (B_k latent, rotated part) and
/// V = B_v latent. Queries come from the hidden state, or from a low-rank vector of their own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Latent {
    pub query_rank: Option<usize>,
    pub rank: usize,
    /// Elements of a head that do not turn; those that do follow them.
    pub plain_dim: usize,
    pub rope_dim: usize,
    pub norm: Norm,
}

/// Where keys and values come from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Keys {
    Own,
    /// Values come from the projection of keys.
    OwnForBoth,
    /// Those of an earlier layer.
    Shared(usize),
    Latent(Latent),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    /// `None`: the hidden state as it is.
    pub norm: Option<Norm>,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub value_dim: usize,
    /// Index into the description's rotations.
    pub rope: Option<usize>,
    pub head_norm: Option<HeadNorm>,
    /// Without weights, per head.
    pub value_norm: Option<Norm>,
    /// Multiplies q·k.
    pub scale: f32,
    /// Scores become cap · tanh(score / cap).
    pub softcap: Option<f32>,
    pub reach: Reach,
    /// Each head has a score that joins the softmax with a value of zero.
    pub sinks: bool,
    /// Of queries, by position.
    pub temperature: Option<PositionScale>,
    pub keys: Keys,
    pub output: Branch,
}

impl Attention {
    /// Without norms, windows and the like.
    #[must_use]
    pub fn plain(heads: usize, kv_heads: usize, head_dim: usize, norm: Norm) -> Self {
        Self {
            norm: Some(norm),
            heads,
            kv_heads,
            head_dim,
            value_dim: head_dim,
            rope: Some(0),
            head_norm: None,
            value_norm: None,
            scale: (1.0 / (head_dim as f64).sqrt()) as f32,
            softcap: None,
            reach: Reach::All,
            sinks: false,
            temperature: None,
            keys: Keys::Own,
            output: Branch::PLAIN,
        }
    }

    /// Does the layer write keys and values?
    #[must_use]
    pub fn own_keys(&self) -> bool {
        !matches!(self.keys, Keys::Shared(_))
    }

    /// Rows of the first projection: Q and, where the layer has them, K and V; or what a latent layer takes from the hidden state.
    #[must_use]
    pub fn qkv_rows(&self) -> usize {
        let queries = self.heads * self.head_dim;
        match self.keys {
            Keys::Own => queries + self.kv_heads * (self.head_dim + self.value_dim),
            Keys::OwnForBoth => queries + self.kv_heads * self.head_dim,
            Keys::Shared(_) => queries,
            Keys::Latent(latent) => latent.query_rank.unwrap_or(queries) + latent.rank + latent.rope_dim,
        }
    }

    /// Keys and values of a token, as they are cached: of latent attention the latent and the rotated part alone.
    #[must_use]
    pub fn cache_shape(&self) -> CacheShape {
        if let Keys::Latent(latent) = self.keys {
            let key_dim = latent.rank + latent.rope_dim;
            return CacheShape { kv_heads: 1, key_dim, value_dim: latent.rank, shared_values: true };
        }
        CacheShape { kv_heads: self.kv_heads, key_dim: self.head_dim, value_dim: self.value_dim, shared_values: false }
    }
}

/// One or both of a dense part and experts, from the same hidden state; their results are added.
#[derive(Clone, Debug, PartialEq)]
pub struct FeedForward {
    /// `None`: the hidden state as it is.
    pub norm: Option<Norm>,
    pub dense: Option<Dense>,
    pub experts: Option<Experts>,
    pub output: Branch,
}

impl FeedForward {
    /// Is the dense part an expert that all rows share: from the same input, added before anything is normed?
    #[must_use]
    pub fn shares(&self) -> bool {
        let (Some(dense), Some(experts)) = (&self.dense, &self.experts) else { return false };
        dense.norm.is_none() && dense.gated && experts.norm.is_none() && experts.input_norm.is_none()
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dense {
    pub width: usize,
    pub activation: Activation,
    /// activation(gate) · up; else activation(up).
    pub gated: bool,
    /// The result is multiplied by sigmoid(linear(x)), one number a row (a shared expert's gate).
    pub row_gate: bool,
    /// Of this part's result, before the other's is added.
    pub norm: Option<Norm>,
}

impl Dense {
    #[must_use]
    pub fn gated(width: usize, activation: Activation) -> Self {
        Self { width, activation, gated: true, row_gate: false, norm: None }
    }

    #[must_use]
    pub fn plain(width: usize, activation: Activation) -> Self {
        Self { gated: false, ..Self::gated(width, activation) }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Router {
    pub scoring: Scoring,
    /// The checkpoint holds a number per expert that is added to its score for the choice alone.
    pub correction: bool,
    pub groups: Option<ExpertGroups>,
    /// The weights of the chosen ones are divided by their sum.
    pub normalise: bool,
    pub scale: f32,
    /// The weight multiplies the expert's input, not its result.
    pub weighs_input: bool,
    /// The router sees norm(hidden) · vector / √width, with a vector of its own and a norm without weights.
    pub own_norm: Option<Norm>,
    /// The checkpoint holds a factor per expert for its weight.
    pub expert_scale: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Experts {
    pub count: usize,
    pub used: usize,
    pub width: usize,
    pub activation: Activation,
    pub router: Router,
    /// Of the experts' input; `None`: they see what the dense part sees.
    pub input_norm: Option<Norm>,
    /// Of their sum, before the dense part's result is added.
    pub norm: Option<Norm>,
}
