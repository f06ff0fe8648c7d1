//! The forward pass of any [`Description`], as a sequence of fused ops.
//!
//! Owns the weights and the order of ops. Never owns activations or the cache, never allocates in a step: whoever runs it
//! brings the buffers, so that a range of layers can run here and the rest elsewhere.

use std::ops::Range;

use quire_kernels::{
    KernelError,
    backend::{
        AttentionArgs, Backend, EmbedArgs, GateUpArgs, Join, KeysValues, Linear, LogitsArgs, Mask, Norm, QkvArgs, Rope, WorkspaceShape,
    },
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
                latent_queries: 0,
                copied_values: 0,
                moe: None,
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
        let args = EmbedArgs { table: &self.weights.embedding, scale: self.description.embedding_scale, positions: None, norm: None };
        backend.embed(inputs, &args, sampled, hidden)
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
        let norm = |weight| Norm::rms(weight, d.norm_epsilon);
        let Scratch { rope, q, attended, activated, workspace } = scratch;
        backend.rope_rows(inputs, &self.frequencies, d.rope.magnitude, rope)?;
        for (layer, weights) in layers.zip(selected) {
            let Some(Place { group, layer, .. }) = self.layout.place(layer) else {
                return Err(KernelError::Shape { op: "forward", detail: format!("layer {layer} has no cache") });
            };
            // No adapter is loaded yet.
            let qkv = QkvArgs {
                norm: Some(norm(&weights.attention_norm)),
                linear: Linear::plain(&weights.qkv),
                clamp: None,
                query_norm: None,
                key_norm: None,
                value_norm: None,
                rope: Some(Rope { rows: rope, style: d.rope.style, dim: d.rope.dim }),
                query_scale: None,
                keys_values: KeysValues::Projected,
                heads: d.heads,
                kv_heads: d.kv_heads,
                key_dim: d.head_dim,
                value_dim: d.head_dim,
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
            backend.linear_join(inputs, &Linear::plain(&weights.attention_output), &Join::ADD, attended, hidden, workspace)?;
            let gate_up = GateUpArgs {
                norm: Some(norm(&weights.feed_forward_norm)),
                linear: Linear::plain(&weights.gate_up),
                activation: d.activation,
                gated: true,
                factor: None,
            };
            backend.gate_up(inputs, &gate_up, hidden, activated, workspace)?;
            backend.linear_join(inputs, &Linear::plain(&weights.down), &Join::ADD, activated, hidden, workspace)?;
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
        let args = LogitsArgs {
            norm: Some(Norm::rms(&self.weights.output_norm, self.description.norm_epsilon)),
            linear: self.weights.output.as_ref().unwrap_or(&self.weights.embedding),
            scale: 1.0,
            softcap: None,
        };
        backend.logits(inputs, &args, hidden, logits, &mut scratch.workspace)
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
