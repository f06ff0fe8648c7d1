//! The forward pass of any [`Description`], as a sequence of fused ops.
//!
//! Owns the weights and the order of ops. Never owns activations or the cache, never allocates in a step: whoever runs it
//! brings the buffers, so that a range of layers can run here and the rest elsewhere.

use std::ops::Range;

use quire_kernels::{
    KernelError,
    backend::{AttentionArgs, Backend, Linear, Mask, Norm, QkvArgs, WorkspaceShape},
    plan::StepLimits,
};

use crate::cache::{CacheLayout, Place};

use super::{description::Description, error::ContentError, gguf::Gguf, weights::Weights};

/// A model on a device.
pub struct Decoder<B: Backend> {
    description: Description,
    weights: Weights<B>,
    frequencies: B::Buffer,
    layout: CacheLayout,
}

/// Buffers between the ops of one step; sized by the step's limits.
pub struct Scratch<B: Backend> {
    /// Rows × rope dim: cos, then sin.
    rope: B::Buffer,
    /// Rows × heads · head dim.
    q: B::Buffer,
    /// Rows × heads · head dim.
    attended: B::Buffer,
    /// Rows × feed-forward width.
    activated: B::Buffer,
    workspace: B::Workspace,
}

impl<B: Backend> Scratch<B> {
    pub fn new(backend: &B, description: &Description, limits: &StepLimits) -> Result<Self, KernelError> {
        let d = description;
        let attention = d.heads * d.head_dim;
        Ok(Self {
            rope: backend.buffer(limits.rows * d.rope.dim)?,
            q: backend.buffer(limits.rows * attention)?,
            attended: backend.buffer(limits.rows * attention)?,
            activated: backend.buffer(limits.rows * d.feed_forward)?,
            workspace: backend.workspace(&WorkspaceShape {
                limits: *limits,
                max_in: d.hidden.max(attention).max(d.feed_forward),
                max_out: d.qkv_rows().max(2 * d.feed_forward).max(d.hidden),
                vocabulary: d.vocabulary,
                heads: d.heads,
                key_dim: d.head_dim,
                value_dim: d.head_dim,
            })?,
        })
    }
}

/// Rough number of bytes of [`Scratch`], hidden state and logits, for the memory plan.
#[must_use]
pub fn scratch_bytes(description: &Description, limits: &StepLimits) -> usize {
    let d = description;
    let row = d.rope.dim + 2 * d.heads * d.head_dim + d.qkv_rows() + 4 * d.feed_forward + 3 * d.hidden;
    (limits.rows * row + 2 * limits.logit_rows * d.vocabulary) * size_of::<f32>()
}

impl<B: Backend> Decoder<B> {
    /// Packs a file's weights for the backend.
    pub fn load(backend: &B, description: Description, gguf: &Gguf<'_>) -> Result<Self, ContentError> {
        let weights = Weights::load(backend, &description, gguf)?;
        let frequencies = backend.buffer_from(&description.rope.frequencies())?;
        Ok(Self { layout: description.cache_layout(), description, weights, frequencies })
    }

    #[must_use]
    pub fn description(&self) -> &Description {
        &self.description
    }

    /// Bytes of the packed matrices.
    pub fn weights_bytes(&self, backend: &B) -> usize {
        self.weights.bytes(backend)
    }

    /// Token ids → hidden state (rows × hidden).
    pub fn embed(&self, backend: &B, inputs: &B::Inputs, sampled: &B::Sampled, hidden: &mut B::Buffer) -> Result<(), KernelError> {
        backend.embed(inputs, &self.weights.embedding, sampled, self.description.embedding_scale, hidden)
    }

    /// Runs `layers` on the hidden state (rows × hidden), in place; reads and writes their keys and values.
    pub fn forward(
        &self,
        backend: &B,
        layers: Range<usize>,
        inputs: &B::Inputs,
        hidden: &mut B::Buffer,
        kv: &mut B::Kv,
        scratch: &mut Scratch<B>,
    ) -> Result<(), KernelError> {
        let d = &self.description;
        let Some(selected) = self.weights.layers.get(layers.clone()) else {
            return Err(KernelError::Shape { op: "forward", detail: format!("layers {layers:?} of {}", d.layers) });
        };
        let norm = |weight| Norm { weight, epsilon: d.norm_epsilon };
        // No adapter is loaded yet: against an empty list, every row's adapter is the base model.
        let linear = |weight| Linear { weight, adapters: &[] };
        let Scratch { rope, q, attended, activated, workspace } = scratch;
        backend.rope_rows(inputs, &self.frequencies, d.rope.magnitude, rope)?;
        for (layer, weights) in layers.zip(selected) {
            let Some(Place { group, layer }) = self.layout.place(layer) else {
                return Err(KernelError::Shape { op: "forward", detail: format!("layer {layer} has no cache") });
            };
            let qkv = QkvArgs {
                norm: norm(&weights.attention_norm),
                linear: linear(&weights.qkv),
                rope,
                rope_style: d.rope.style,
                rope_dim: d.rope.dim,
                heads: d.heads,
                kv_heads: d.kv_heads,
                head_dim: d.head_dim,
                group,
                layer,
            };
            let attention = AttentionArgs {
                heads: d.heads,
                kv_heads: d.kv_heads,
                key_dim: d.head_dim,
                value_dim: d.head_dim,
                scale: d.attention_scale,
                mask: Mask::Causal,
                softcap: None,
                sinks: None,
                group,
                layer,
            };
            backend.qkv_rope_write(inputs, &qkv, hidden, kv, q, workspace)?;
            backend.attention(inputs, &attention, q, kv, attended, workspace)?;
            backend.linear_add(inputs, &linear(&weights.attention_output), attended, hidden, workspace)?;
            let feed_forward_norm = norm(&weights.feed_forward_norm);
            backend.gate_up(inputs, &feed_forward_norm, &linear(&weights.gate_up), d.activation, hidden, activated, workspace)?;
            backend.linear_add(inputs, &linear(&weights.down), activated, hidden, workspace)?;
        }
        Ok(())
    }

    /// Hidden state → logits of the rows that the plan names (logit rows × vocabulary).
    pub fn logits(
        &self,
        backend: &B,
        inputs: &B::Inputs,
        hidden: &B::Buffer,
        logits: &mut B::Buffer,
        scratch: &mut Scratch<B>,
    ) -> Result<(), KernelError> {
        let norm = Norm { weight: &self.weights.output_norm, epsilon: self.description.norm_epsilon };
        let output = self.weights.output.as_ref().unwrap_or(&self.weights.embedding);
        backend.logits(inputs, &norm, output, hidden, logits, &mut scratch.workspace)
    }

    /// Logits → tokens.
    pub fn sample(
        &self,
        backend: &B,
        inputs: &B::Inputs,
        logits: &mut B::Buffer,
        sampled: &mut B::Sampled,
        scratch: &mut Scratch<B>,
    ) -> Result<(), KernelError> {
        backend.sample(inputs, logits, sampled, &mut scratch.workspace)
    }
}
