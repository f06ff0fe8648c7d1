//! What a decoder computes, as data.
//!
//! A family of models is a translation from its configuration to a [`Description`] and to the names of its tensors
//! ([`TensorMap`]); the decoder runs any description and never asks for a family's name.
//!
//! - [`hf`]: `config.json` → both
//! - [`gguf`]: metadata → both
//! - [`rope`]: frequencies of every kind of rotation
//! - [`names`]: roles of tensors, and where they lie

pub mod gguf;
pub mod hf;
mod layer;
pub mod names;
pub mod rope;

pub use layer::{Attention, Branch, Dense, Experts, FeedForward, HeadNorm, Keys, Latent, Layer, Norm, Reach, Router};
pub use names::TensorMap;
pub use rope::{LongRope, Rope};

use super::{error::ContentError, gguf::Gguf};
use crate::cache::{CacheLayout, LayerCache};

/// Largest sizes that are believed; far above any model, and small enough that no product of a few of them overflows.
pub(super) mod limits {
    pub const LAYERS: u64 = 4096;
    pub const WIDTH: u64 = 1 << 20;
    /// Elements of a head.
    pub const HEAD_WIDTH: u64 = 1 << 13;
    pub const HEADS: u64 = 1 << 14;
    pub const CONTEXT: u64 = 1 << 30;
    pub const VOCABULARY: u64 = 1 << 24;
    pub const EXPERTS: u64 = 1 << 14;
}

/// A decoder-only transformer.
///
/// Biases are not described: a linear has one where the checkpoint holds one.
#[derive(Clone, Debug, PartialEq)]
pub struct Description {
    pub architecture: String,
    pub hidden: usize,
    /// Tokens that exist; the tables may have more rows, which are padding.
    pub vocabulary: usize,
    pub trained_context: usize,
    pub embedding_scale: f32,
    /// A table of that many positions is added to the embedding.
    pub learned_positions: Option<usize>,
    /// The kinds of rotation; layers name theirs by index.
    pub ropes: Vec<Rope>,
    pub layers: Vec<Layer>,
    pub output_norm: Norm,
    /// The output is the transposed embedding.
    pub tied_output: bool,
    /// Multiplies the logits, before the softcap.
    pub logit_scale: f32,
    /// Logits become cap · tanh(logit / cap).
    pub logit_softcap: Option<f32>,
    /// Width of the input that every layer has of its own, beside the hidden state.
    pub layer_input: Option<usize>,
}

/// Keys and values of one token in one layer. Layers of one shape share a storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheShape {
    pub kv_heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
    /// Values are the beginning of their keys.
    pub shared_values: bool,
}

impl Description {
    /// The description in a GGUF file's metadata.
    ///
    /// # Errors
    /// An architecture that is not supported; a key that is missing, of the wrong kind or at odds with another.
    pub fn from_gguf(gguf: &Gguf<'_>) -> Result<Self, ContentError> {
        gguf::translate(gguf).map(|(description, _)| description)
    }

    /// Where the keys and values of each layer lie; none for layers that read another's.
    #[must_use]
    pub fn cache_layout(&self) -> CacheLayout {
        let shapes = self.cache_shapes();
        let layer = |layer: &Layer| {
            let own = layer.attention.own_keys().then(|| layer.attention.cache_shape())?;
            let shape = shapes.iter().position(|other| *other == own)?;
            let values = if own.shared_values { 0 } else { own.value_dim };
            Some(LayerCache { kind: layer.attention.reach.group_kind(), shape, width: own.kv_heads * (own.key_dim + values) })
        };
        CacheLayout::new(&self.layers.iter().map(layer).collect::<Vec<_>>())
    }

    /// Per cache group, the number of the shape that its layers have.
    #[must_use]
    pub fn shapes_of_groups(&self) -> Vec<usize> {
        let layout = self.cache_layout();
        let mut shapes = vec![0; layout.groups().len()];
        for place in (0..self.layers.len()).filter_map(|layer| layout.place(layer)) {
            shapes[place.group] = place.shape;
        }
        shapes
    }

    /// The shapes that layers have, without repetition.
    #[must_use]
    pub fn cache_shapes(&self) -> Vec<CacheShape> {
        let mut shapes = Vec::new();
        for attention in self.layers.iter().map(|layer| &layer.attention).filter(|attention| attention.own_keys()) {
            let shape = attention.cache_shape();
            if !shapes.contains(&shape) {
                shapes.push(shape);
            }
        }
        shapes
    }

    /// The layer whose keys and values this one reads.
    #[must_use]
    pub fn keys_of(&self, layer: usize) -> usize {
        match self.layers.get(layer).map(|layer| layer.attention.keys) {
            Some(Keys::Shared(from)) => from,
            _ => layer,
        }
    }

    /// The largest of a figure over all layers.
    #[must_use]
    pub fn widest(&self, figure: impl Fn(&Layer) -> usize) -> usize {
        self.layers.iter().map(figure).max().unwrap_or(0)
    }
}
