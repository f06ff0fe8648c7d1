//! The forward pass of any [`Description`], as a sequence of fused ops.
//!
//! Owns the weights and the order of ops. Never owns activations or the cache, never allocates in a step: whoever runs it
//! brings the buffers, so that a range of layers can run here and the rest elsewhere.

use std::ops::Range;

use quire_kernels::{
    KernelError,
    backend::{
        self, AttentionArgs, Backend, Columns, EmbedArgs, GateUpArgs, Join, KeysValues, LatentArgs, LayerInputsArgs, Linear, LogitsArgs,
        Mask, MoeArgs, QkvArgs, Rope, Routing, SharedExpert,
    },
    quant::TensorType,
};

use super::{
    checkpoint::Tensors,
    description::{Attention, Branch, Description, Experts, FeedForward, HeadNorm, Keys, Reach, TensorMap},
    error::ContentError,
    scratch::Scratch,
    weights::{AttentionWeights, ExpertWeights, LayerWeights, NormWeights, Weights},
};
use crate::cache::{CacheLayout, Place};

/// A model on a device.
pub struct Decoder<B: Backend> {
    description: Description,
    weights: Weights<B>,
    /// Of each rotation.
    frequencies: Vec<B::Buffer>,
    layout: CacheLayout,
}

/// What the ops of a layer work on.
struct Step<'s, B: Backend> {
    backend: &'s B,
    inputs: &'s B::Inputs,
    hidden: &'s mut B::Buffer,
    scratch: &'s mut Scratch<B>,
}

impl<B: Backend> Decoder<B> {
    /// Packs a checkpoint's weights for the backend, for sequences of `context` tokens at most; matrices in the type
    /// `quantize` where that takes fewer bytes.
    ///
    /// # Errors
    /// What does not fit together in the checkpoint.
    pub fn load(
        backend: &B,
        description: Description,
        map: &TensorMap,
        tensors: &Tensors<'_>,
        quantize: Option<TensorType>,
        context: usize,
    ) -> Result<Self, ContentError> {
        let weights = Weights::load(backend, &description, map, tensors, quantize)?;
        let frequencies = description.ropes.iter().map(|rope| backend.buffer_from(rope.frequencies_for(context)));
        let frequencies = frequencies.collect::<Result<Vec<_>, _>>()?;
        Ok(Self { layout: description.cache_layout(), frequencies, weights, description })
    }

    #[must_use]
    pub fn description(&self) -> &Description {
        &self.description
    }

    /// Bytes of the packed matrices.
    pub fn weights_bytes(&self) -> usize {
        self.weights.bytes()
    }

    /// Token ids → hidden state (rows × hidden), and what layers get beside it.
    pub fn embed(
        &self,
        backend: &B,
        inputs: &B::Inputs,
        sampled: &B::Sampled,
        hidden: &mut B::Buffer,
        scratch: &mut Scratch<B>,
    ) -> Result<(), KernelError> {
        let weights = &self.weights;
        let args = EmbedArgs {
            table: &weights.embedding,
            scale: self.description.embedding_scale,
            positions: weights.positions.as_ref().map(|table| (table, 0)),
            norm: None,
        };
        backend.embed(inputs, &args, sampled, hidden)?;
        if let (Some(own), Some(width), Some(out)) = (&weights.layer_inputs, self.description.layer_input, &mut scratch.layer_inputs) {
            let args = LayerInputsArgs {
                table: &own.table,
                table_scale: (width as f32).sqrt(),
                projection: Linear::plain(&own.projection),
                projection_scale: (self.description.hidden as f32).sqrt().recip(),
                norm: own.norm.args(),
                width,
                scale: std::f32::consts::FRAC_1_SQRT_2,
            };
            backend.layer_inputs(inputs, &args, sampled, hidden, out, &mut scratch.workspace)?;
        }
        Ok(())
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
        if layers.end > self.weights.layers.len() {
            return Err(KernelError::Shape { op: "forward", detail: format!("layers {layers:?} of {}", self.weights.layers.len()) });
        }
        for ((rope, frequencies), rows) in self.description.ropes.iter().zip(&self.frequencies).zip(&mut scratch.ropes) {
            backend.rope_rows(inputs, frequencies, rope.magnitude, rows)?;
        }
        let mut step = Step { backend, inputs, hidden, scratch };
        for layer in layers {
            self.layer(layer, &mut step, kv)?;
        }
        Ok(())
    }

    fn layer(&self, layer: usize, step: &mut Step<'_, B>, kv: &mut B::Kv) -> Result<(), KernelError> {
        let (described, weights) = (&self.description.layers[layer], &self.weights.layers[layer]);
        let total = |last: bool| if last { weights.scale } else { 1.0 };
        let by_input = weights.layer_input.is_some();
        self.attend(layer, step, kv)?;
        // Side by side, both parts read the hidden state before either adds to it.
        if described.parallel {
            step.gate_up(&described.feed_forward, weights)?;
        }
        step.add_attention(&described.attention, &weights.attention)?;
        if !described.parallel {
            step.gate_up(&described.feed_forward, weights)?;
        }
        step.add_feed_forward(&described.feed_forward, weights, total(!by_input))?;
        match &weights.layer_input {
            Some(own) => step.add_layer_input(layer, &self.description, own, weights.scale),
            None => Ok(()),
        }
    }

    /// Projections, the cache, and attention; the result is in the scratch.
    fn attend(&self, layer: usize, step: &mut Step<'_, B>, kv: &mut B::Kv) -> Result<(), KernelError> {
        let (attention, weights) = (&self.description.layers[layer].attention, &self.weights.layers[layer].attention);
        let place = self.layout.place(self.description.keys_of(layer));
        let Some(Place { group, layer, .. }) = place else {
            return Err(KernelError::Shape { op: "forward", detail: format!("layer {layer} has no cache") });
        };
        let Step { backend, inputs, hidden, scratch } = step;
        let Scratch { ropes, q, attended, workspace, .. } = &mut **scratch;
        let rope = attention.rope.and_then(|index| {
            let described = self.description.ropes.get(index)?;
            Some(Rope { rows: ropes.get(index)?, style: described.style, dim: described.dim() })
        });
        match (attention.keys, &weights.latent) {
            (Keys::Latent(latent), Some(own)) => {
                let Some(rope) = rope else {
                    return Err(KernelError::Shape { op: "forward", detail: "latent attention without a rotation".to_owned() });
                };
                let args = LatentArgs {
                    norm: weights.norm.as_ref().map(NormWeights::args),
                    down: Linear::plain(&weights.qkv),
                    query_up: own.query_up.as_ref().map(|(norm, up)| (norm.args(), Linear::plain(up))),
                    latent_norm: own.norm.args(),
                    absorb: &own.absorb,
                    rope,
                    query_scale: attention.temperature,
                    heads: attention.heads,
                    plain_dim: latent.plain_dim,
                    latent: latent.rank,
                    group,
                    layer,
                };
                backend.latent_rope_write(inputs, &args, hidden, kv, q, workspace)?;
            }
            _ => backend.qkv_rope_write(inputs, &qkv_args(attention, weights, rope, group, layer), hidden, kv, q, workspace)?,
        }
        let cached = attention.cache_shape();
        let args = AttentionArgs {
            heads: attention.heads,
            kv_heads: cached.kv_heads,
            key_dim: cached.key_dim,
            value_dim: cached.value_dim,
            scale: attention.scale,
            mask: mask(attention.reach),
            softcap: attention.softcap,
            sinks: weights.sinks.as_ref(),
            group,
            layer,
        };
        backend.attention(inputs, &args, q, kv, attended, workspace)
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
            norm: Some(self.weights.output_norm.args()),
            linear: self.weights.output.as_ref().unwrap_or(&self.weights.embedding),
            scale: self.description.logit_scale,
            softcap: self.description.logit_softcap,
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

fn mask(reach: Reach) -> Mask {
    match reach {
        Reach::All => Mask::Causal,
        Reach::Window(tokens) => Mask::Window(tokens),
        Reach::Chunk(tokens) => Mask::Chunk(tokens),
    }
}

fn qkv_args<'a, B: Backend>(
    attention: &Attention,
    weights: &'a AttentionWeights<B>,
    rope: Option<Rope<'a, B>>,
    group: usize,
    layer: usize,
) -> QkvArgs<'a, B> {
    let head_norm = |norm: &'a Option<NormWeights<B>>| {
        let own = norm.as_ref()?.args();
        let HeadNorm { span, plain_after_rope, .. } = attention.head_norm?;
        Some(backend::HeadNorm { norm: own, span, after_rope: plain_after_rope })
    };
    QkvArgs {
        norm: weights.norm.as_ref().map(NormWeights::args),
        linear: Linear::plain(&weights.qkv),
        clamp: None,
        query_norm: head_norm(&weights.query_norm),
        key_norm: head_norm(&weights.key_norm),
        value_norm: weights.value_norm.as_ref().map(|norm| backend::HeadNorm {
            norm: norm.args(),
            span: backend::Span::Head,
            after_rope: false,
        }),
        rope,
        query_scale: attention.temperature,
        keys_values: match attention.keys {
            Keys::Own | Keys::Latent(_) => KeysValues::Projected,
            Keys::OwnForBoth => KeysValues::ValuesAreKeys,
            Keys::Shared(_) => KeysValues::Elsewhere,
        },
        heads: attention.heads,
        kv_heads: attention.kv_heads,
        key_dim: attention.head_dim,
        value_dim: attention.value_dim,
        group,
        layer,
    }
}

/// How a part's result is added to the hidden state.
fn added<'a, B: Backend>(branch: &Branch, norm: Option<&'a NormWeights<B>>, total: f32) -> Join<'a, B> {
    Join { norm: norm.map(NormWeights::args), scale: branch.scale, add: true, total }
}

impl<B: Backend> Step<'_, B> {
    fn add_attention(&mut self, attention: &Attention, weights: &AttentionWeights<B>) -> Result<(), KernelError> {
        let Scratch { attended, values, workspace, .. } = &mut *self.scratch;
        let mut from = &*attended;
        if let (Some(latent), Some(values)) = (&weights.latent, values) {
            self.backend.head_linear(self.inputs, &latent.values, attention.heads, attended, values, workspace)?;
            from = &*values;
        }
        let join = added(&attention.output, weights.branch_norm.as_ref(), 1.0);
        self.backend.linear_join(self.inputs, &Linear::plain(&weights.output), &join, from, self.hidden, workspace)
    }

    /// The first half of the dense part, unless it is an expert that all rows share.
    fn gate_up(&mut self, part: &FeedForward, weights: &LayerWeights<B>) -> Result<(), KernelError> {
        let (Some(dense), Some(own)) = (&part.dense, &weights.dense) else { return Ok(()) };
        if part.shares() {
            return Ok(());
        }
        let args = GateUpArgs {
            norm: weights.feed_forward_norm.as_ref().map(NormWeights::args),
            linear: Linear::plain(&own.gate_up),
            activation: dense.activation,
            gated: dense.gated,
            factor: None,
        };
        let Scratch { activated, workspace, .. } = &mut *self.scratch;
        self.backend.gate_up(self.inputs, &args, self.hidden, activated, workspace)
    }

    /// The rest of the feed-forward part: dense, experts, or both.
    fn add_feed_forward(&mut self, part: &FeedForward, weights: &LayerWeights<B>, total: f32) -> Result<(), KernelError> {
        let Self { backend, inputs, hidden, scratch } = self;
        let Scratch { activated, branch, workspace, hidden: width, .. } = &mut **scratch;
        let join = added(&part.output, weights.feed_forward_branch_norm.as_ref(), total);
        let (Some(experts), Some(own)) = (&part.experts, &weights.experts) else {
            let Some(dense) = &weights.dense else { return Ok(()) };
            return backend.linear_join(inputs, &Linear::plain(&dense.down), &join, activated, hidden, workspace);
        };
        if part.shares() {
            return backend.moe(inputs, &moe_args(experts, own, weights, true, join), hidden, None, workspace);
        }
        let (Some(dense), Some(branch)) = (&weights.dense, branch) else {
            return backend.moe(inputs, &moe_args(experts, own, weights, false, join), hidden, None, workspace);
        };
        let first = Join { norm: dense.norm.as_ref().map(NormWeights::args), ..Join::SET };
        backend.linear_join(inputs, &Linear::plain(&dense.down), &first, activated, branch, workspace)?;
        let second = Join { norm: own.norm.as_ref().map(NormWeights::args), ..Join::ADD };
        backend.moe(inputs, &moe_args(experts, own, weights, false, second), hidden, Some(&mut *branch), workspace)?;
        backend.join(inputs, *width, &join, branch, hidden)
    }

    /// hidden += norm(up(activation(gate(hidden)) · the layer's own input)).
    fn add_layer_input(
        &mut self,
        layer: usize,
        d: &Description,
        own: &super::weights::LayerInputPart<B>,
        total: f32,
    ) -> Result<(), KernelError> {
        let (Some(width), Some(dense)) = (d.layer_input, d.layers[layer].feed_forward.dense) else { return Ok(()) };
        let Self { backend, inputs, hidden, scratch } = self;
        let Scratch { activated, layer_inputs, workspace, .. } = &mut **scratch;
        let factor = layer_inputs.as_ref().map(|buffer| Columns { buffer, stride: d.layers.len() * width, start: layer * width });
        let args = GateUpArgs { norm: None, linear: Linear::plain(&own.gate), activation: dense.activation, gated: false, factor };
        backend.gate_up(inputs, &args, hidden, activated, workspace)?;
        let join = Join { norm: Some(own.branch_norm.args()), scale: 1.0, add: true, total };
        backend.linear_join(inputs, &Linear::plain(&own.up), &join, activated, hidden, workspace)
    }
}

fn moe_args<'a, B: Backend>(
    experts: &Experts,
    own: &'a ExpertWeights<B>,
    layer: &'a LayerWeights<B>,
    shares: bool,
    join: Join<'a, B>,
) -> MoeArgs<'a, B> {
    let router = &experts.router;
    let shared = layer.dense.as_ref().filter(|_| shares).map(|dense| SharedExpert {
        gate_up: Linear::plain(&dense.gate_up),
        down: Linear::plain(&dense.down),
        gate: dense.row_gate.as_ref(),
    });
    MoeArgs {
        norm: own.input_norm.as_ref().or(layer.feed_forward_norm.as_ref()).map(NormWeights::args),
        router_norm: own.router_norm.as_ref().map(NormWeights::args),
        router: &own.router,
        routing: Routing {
            experts: experts.count,
            chosen: experts.used,
            scoring: router.scoring,
            groups: router.groups,
            normalise: router.normalise,
            scale: router.scale,
            weigh_input: router.weighs_input,
        },
        correction: own.correction.as_ref(),
        expert_scale: own.expert_scale.as_ref(),
        gate_up: &own.gate_up,
        down: &own.down,
        activation: experts.activation,
        shared,
        join,
    }
}
