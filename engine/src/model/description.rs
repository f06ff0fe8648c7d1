//! What a decoder computes, as data.
//!
//! A family of models is a translation from its metadata to a [`Description`]; the decoder runs any description and
//! never asks for a family's name.

use quire_kernels::backend::{Activation, RopeStyle};

use crate::cache::{CacheLayout, GroupKind, LayerCache};

use super::{
    error::ContentError,
    gguf::{Gguf, GgufError, Metadata},
};

/// Families that can be translated.
pub const SUPPORTED: &[&str] = &["llama"];

/// How positions turn queries and keys.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    pub style: RopeStyle,
    /// Elements of a head that turn, from its start; even.
    pub dim: usize,
    pub base: f32,
    /// Positions are divided by this (linear scaling); 1: not.
    pub scaling: f32,
    /// Per pair: what its frequency is divided by (the tensor `rope_freqs`); empty: 1.
    pub frequency_factors: Vec<f32>,
    /// Multiplies cos and sin.
    pub magnitude: f32,
}

impl Rope {
    /// Radians per position of each pair: base^(−2i / dim) / factor_i / scaling.
    #[must_use]
    pub fn frequencies(&self) -> Vec<f32> {
        let pairs = self.dim / 2;
        (0..pairs)
            .map(|i| {
                let frequency = f64::from(self.base).powf(-2.0 * i as f64 / self.dim as f64);
                let own = self.frequency_factors.get(i).map_or(1.0, |factor| f64::from(*factor));
                (frequency / own / f64::from(self.scaling)) as f32
            })
            .collect()
    }
}

/// A decoder-only transformer: norm, attention, norm, gated feed-forward, each added to the hidden state.
///
/// Biases are not described: a linear has one where the file holds one.
#[derive(Clone, Debug, PartialEq)]
pub struct Description {
    pub architecture: String,
    pub layers: usize,
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub feed_forward: usize,
    /// Tokens that exist; the tables may have more rows, which are padding.
    pub vocabulary: usize,
    pub trained_context: usize,
    pub norm_epsilon: f32,
    pub rope: Rope,
    /// Multiplies q·k.
    pub attention_scale: f32,
    pub embedding_scale: f32,
    pub activation: Activation,
    /// The output is the transposed embedding.
    pub tied_output: bool,
}

impl Description {
    /// Translates and checks a file's metadata.
    ///
    /// # Errors
    /// An architecture that is not supported; a key that is missing, of the wrong kind or at odds with another.
    pub fn from_gguf(gguf: &Gguf<'_>) -> Result<Self, ContentError> {
        let Some(architecture) = gguf.metadata.string("general.architecture")? else {
            return Err(ContentError::Model("the key `general.architecture` is missing: this is not a model".to_owned()));
        };
        match architecture {
            "llama" => llama(gguf, architecture),
            other => {
                let shown = super::gguf::clip(other);
                Err(ContentError::Model(format!("architecture `{shown}` is not supported; supported: {}", SUPPORTED.join(", "))))
            }
        }
    }

    /// Where the keys and values of each layer lie.
    #[must_use]
    pub fn cache_layout(&self) -> CacheLayout {
        let layer = LayerCache { kind: GroupKind::Full, shape: 0, width: 2 * self.kv_heads * self.head_dim };
        CacheLayout::new(&vec![Some(layer); self.layers])
    }

    /// Rows of the fused Q, K and V projection.
    #[must_use]
    pub fn qkv_rows(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }
}

/// Keys of one architecture.
struct Keys<'a, 'm> {
    metadata: &'m Metadata<'a>,
    architecture: &'m str,
}

impl Keys<'_, '_> {
    fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    /// A number above 0.
    fn positive(&self, key: &str) -> Result<Option<f32>, GgufError> {
        match self.metadata.float(&self.name(key))? {
            Some(value) if !value.is_finite() || value <= 0.0 => {
                Err(GgufError::key(&self.name(key), format!("is {value}; it should be above 0")))
            }
            value => Ok(value),
        }
    }

    /// A size between 1 and `most`, which may be given per layer if it is the same in all.
    fn size(&self, key: &str, most: u64) -> Result<Option<usize>, GgufError> {
        let name = self.name(key);
        let Some(values) = self.metadata.unsigneds(&name)? else { return Ok(None) };
        let Some(&first) = values.first() else { return Err(GgufError::key(&name, "is an empty array")) };
        if values.iter().any(|value| *value != first) {
            return Err(GgufError::key(&name, "differs from layer to layer, which is not supported yet"));
        }
        if !(1..=most).contains(&first) {
            return Err(GgufError::key(&name, format!("is {first}; it should lie between 1 and {most}")));
        }
        Ok(Some(first as usize))
    }

    fn needed<T>(&self, key: &str, value: Option<T>) -> Result<T, GgufError> {
        value.ok_or_else(|| GgufError::key(&self.name(key), "is missing"))
    }
}

/// Largest sizes that are believed; far above any model, and small enough that no product of a few of them overflows.
const MOST_LAYERS: u64 = 4096;
const MOST_WIDTH: u64 = 1 << 20;
const MOST_HEADS: u64 = 1 << 14;
const MOST_CONTEXT: u64 = 1 << 30;

fn llama(gguf: &Gguf<'_>, architecture: &str) -> Result<Description, ContentError> {
    let keys = Keys { metadata: &gguf.metadata, architecture };
    if keys.metadata.unsigned(&keys.name("expert_count"))?.unwrap_or(0) > 0 {
        return Err(ContentError::Model("mixture-of-experts models are not supported yet".to_owned()));
    }
    let needed = |key: &str, most| keys.needed(key, keys.size(key, most)?);
    let hidden = needed("embedding_length", MOST_WIDTH)?;
    let heads = needed("attention.head_count", MOST_HEADS)?;
    let kv_heads = keys.size("attention.head_count_kv", MOST_HEADS)?.unwrap_or(heads);
    if !heads.is_multiple_of(kv_heads) {
        return Err(ContentError::Model(format!("{heads} query heads can't share {kv_heads} key heads")));
    }
    let head_dim = match keys.size("attention.key_length", MOST_WIDTH)? {
        Some(head_dim) => head_dim,
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => return Err(ContentError::Model(format!("a width of {hidden} can't be shared by {heads} heads"))),
    };
    if keys.size("attention.value_length", MOST_WIDTH)?.is_some_and(|value_dim| value_dim != head_dim) {
        return Err(ContentError::Model("values are longer or shorter than keys, which is not supported yet".to_owned()));
    }
    const EPSILON: &str = "attention.layer_norm_rms_epsilon";
    Ok(Description {
        architecture: architecture.to_owned(),
        layers: needed("block_count", MOST_LAYERS)?,
        hidden,
        heads,
        kv_heads,
        head_dim,
        feed_forward: needed("feed_forward_length", MOST_WIDTH)?,
        vocabulary: vocabulary(gguf)?,
        trained_context: needed("context_length", MOST_CONTEXT)?,
        norm_epsilon: keys.needed(EPSILON, keys.positive(EPSILON)?)?,
        // Converters permute the rows of Q and K of this family, so that neighbours turn together.
        rope: rope(gguf, &keys, head_dim, RopeStyle::Adjacent)?,
        attention_scale: (1.0 / (head_dim as f64).sqrt()) as f32,
        embedding_scale: 1.0,
        activation: Activation::Silu,
        tied_output: gguf.tensor("output.weight").is_none(),
    })
}

/// The number of tokens; what the tables have beyond it is padding, which must never be drawn.
fn vocabulary(gguf: &Gguf<'_>) -> Result<usize, ContentError> {
    const TABLE: &str = "token_embd.weight";
    let table = gguf.tensor(TABLE).ok_or_else(|| GgufError::tensor(TABLE, "is missing: the file holds no weights, or not all"))?;
    let rows = table.rows();
    match gguf.metadata.get("tokenizer.ggml.tokens").map(|tokens| tokens.count) {
        Some(tokens) if tokens > rows => {
            Err(GgufError::tensor(TABLE, format!("has {rows} rows for the {tokens} tokens of the tokenizer")).into())
        }
        Some(tokens) if tokens > 0 => Ok(tokens),
        _ => Ok(rows),
    }
}

fn rope(gguf: &Gguf<'_>, keys: &Keys<'_, '_>, head_dim: usize, style: RopeStyle) -> Result<Rope, ContentError> {
    let dim = keys.size("rope.dimension_count", MOST_WIDTH)?.unwrap_or(head_dim);
    if dim > head_dim || !dim.is_multiple_of(2) {
        return Err(GgufError::key(&keys.name("rope.dimension_count"), format!("is {dim} for heads of {head_dim}")).into());
    }
    let scaling = match keys.metadata.string(&keys.name("rope.scaling.type"))? {
        // Files before `scaling.type` had the factor alone.
        None => keys.positive("rope.scale_linear")?,
        Some("none") => None,
        Some("linear") => keys.positive("rope.scaling.factor")?,
        Some(other) => {
            let shown = super::gguf::clip(other);
            let problem = format!("is `{shown}`, which is not supported yet; supported: none, linear, or the tensor `rope_freqs`");
            return Err(GgufError::key(&keys.name("rope.scaling.type"), problem).into());
        }
    };
    const FACTORS: &str = "rope_freqs.weight";
    let frequency_factors = match gguf.tensor(FACTORS) {
        None => Vec::new(),
        Some(tensor) => super::weights::vector(tensor, dim / 2)?,
    };
    if frequency_factors.iter().any(|factor| !factor.is_finite() || *factor <= 0.0) {
        return Err(GgufError::tensor(FACTORS, "holds a factor that is not a positive number").into());
    }
    Ok(Rope {
        style,
        dim,
        base: keys.positive("rope.freq_base")?.unwrap_or(10_000.0),
        scaling: scaling.unwrap_or(1.0),
        frequency_factors,
        magnitude: keys.positive("rope.scaling.attn_factor")?.unwrap_or(1.0),
    })
}
