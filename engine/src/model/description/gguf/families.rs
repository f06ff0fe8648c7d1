//! What each architecture means beyond its metadata.

use quire_kernels::backend::{Activation, RopeStyle, Scoring, Span};

use super::{Keys, vocabulary};
use crate::model::{
    description::{
        Attention, Branch, Dense, Description, Experts, FeedForward, HeadNorm, Layer, Norm, Reach, Router, TensorMap,
        limits::{CONTEXT, EXPERTS, HEAD_WIDTH, HEADS, LAYERS, WIDTH},
        names::Role,
    },
    error::ContentError,
};

/// Switches of one architecture. The default is a Llama.
pub struct Family {
    pub name: &'static str,
    style: RopeStyle,
    activation: Activation,
    gated: bool,
    layer_norm: bool,
    parallel: bool,
    head_norm: Option<Span>,
    /// Each n-th layer sees everything, the others the window; 0: the window holds for all layers; 1: for none.
    full_every: usize,
    /// Which layers have a rotation.
    turning: Turning,
    /// The second of two projections in one tensor is `ffn_up`.
    fused_gate: bool,
    scaled_embedding: bool,
    /// Logits are divided by `logit_scale`, not multiplied.
    divides_logits: bool,
    normalises_experts: bool,
    scoring: Scoring,
    change: fn(&Keys<'_, '_>, &mut Description, &mut TensorMap) -> Result<(), ContentError>,
}

#[derive(Clone, Copy, PartialEq)]
enum Turning {
    All,
    None,
    /// Those with a window.
    Windows,
    /// All but each n-th.
    NotEvery(usize),
}

const LLAMA: Family = Family {
    name: "llama",
    style: RopeStyle::Adjacent,
    activation: Activation::Silu,
    gated: true,
    layer_norm: false,
    parallel: false,
    head_norm: None,
    full_every: 1,
    turning: Turning::All,
    fused_gate: false,
    scaled_embedding: false,
    divides_logits: false,
    normalises_experts: true,
    scoring: Scoring::Softmax,
    change: |_, _, _| Ok(()),
};
const HALF: Family = Family { style: RopeStyle::Half, ..LLAMA };
const GEMMA: Family = Family { name: "gemma", activation: Activation::Gelu, scaled_embedding: true, ..HALF };
const LAYER_NORM: Family = Family { activation: Activation::Gelu, gated: false, layer_norm: true, ..HALF };

pub const FAMILIES: &[Family] = &[
    LLAMA,
    Family { name: "qwen2", ..HALF },
    Family { name: "qwen2moe", normalises_experts: false, ..HALF },
    Family { name: "qwen3", head_norm: Some(Span::Head), ..HALF },
    Family { name: "qwen3moe", head_norm: Some(Span::Head), ..HALF },
    GEMMA,
    Family { name: "gemma2", full_every: 2, change: gemma2, ..GEMMA },
    Family { name: "gemma3", full_every: 6, head_norm: Some(Span::Head), change: gemma3, ..GEMMA },
    Family { name: "phi2", parallel: true, change: one_norm, ..LAYER_NORM },
    Family { name: "phi3", full_every: 0, fused_gate: true, ..HALF },
    Family { name: "olmo2", head_norm: Some(Span::Width), full_every: 4, change: olmo2, ..HALF },
    Family { name: "granite", divides_logits: true, ..LLAMA },
    Family { name: "granitemoe", divides_logits: true, ..LLAMA },
    Family { name: "smollm3", turning: Turning::NotEvery(4), ..LLAMA },
    Family { name: "ernie4_5", ..LLAMA },
    Family { name: "glm4", fused_gate: true, change: sandwich, ..LLAMA },
    Family { name: "gpt-oss", full_every: 2, scoring: Scoring::SoftmaxOfChosen, normalises_experts: false, change: gpt_oss, ..HALF },
    Family {
        name: "cohere2",
        activation: Activation::Silu,
        gated: true,
        style: RopeStyle::Adjacent,
        parallel: true,
        full_every: 4,
        turning: Turning::Windows,
        change: one_norm,
        ..LAYER_NORM
    },
    Family { name: "starcoder2", full_every: 0, ..LAYER_NORM },
    Family { name: "gpt2", turning: Turning::None, change: gpt2, ..LAYER_NORM },
    Family { name: "gptneox", activation: Activation::GeluExact, change: neox, ..LAYER_NORM },
    Family { name: "falcon", activation: Activation::GeluExact, parallel: true, change: falcon, ..LAYER_NORM },
    Family { name: "stablelm", activation: Activation::Silu, gated: true, change: stablelm, ..LAYER_NORM },
    Family { name: "minimax-m2", head_norm: Some(Span::Width), scoring: Scoring::Sigmoid, ..HALF },
];

impl Family {
    pub fn describe(&self, keys: &Keys<'_, '_>, tensors: &mut TensorMap) -> Result<Description, ContentError> {
        let hidden = keys.needed_size("embedding_length", WIDTH)?;
        let layers = keys.needed_size("block_count", LAYERS)?;
        let heads = keys.needed_size("attention.head_count", HEADS)?;
        let head_dim = head_dim(keys, hidden, heads)?;
        let norm = if self.layer_norm { keys.layer_norm()? } else { keys.rms()? };
        let attention = self.attention(keys, heads, head_dim, norm)?;
        let dense_widths = keys.needed("feed_forward_length", keys.sizes("feed_forward_length", layers, 0, WIDTH)?)?;
        let dense = |width| Dense { gated: self.gated, ..Dense::gated(width, self.activation) };
        let layer = |width: &usize| Layer {
            attention,
            feed_forward: FeedForward { norm: Some(norm), dense: Some(dense(*width)), experts: None, output: Branch::PLAIN },
            parallel: self.parallel,
            scaled: false,
        };
        let rope = keys.rope(head_dim, self.style)?;
        let logit_scale = keys.positive("logit_scale")?.unwrap_or(1.0);
        let mut description = Description {
            architecture: keys.architecture.to_owned(),
            hidden,
            vocabulary: vocabulary(keys.gguf)?,
            trained_context: keys.needed_size("context_length", CONTEXT)?,
            embedding_scale: keys.positive("embedding_scale")?.unwrap_or(1.0) as f32,
            learned_positions: None,
            ropes: vec![rope],
            layers: dense_widths.iter().map(layer).collect(),
            output_norm: norm,
            tied_output: keys.gguf.tensor("output.weight").is_none(),
            logit_scale: (if self.divides_logits { 1.0 / logit_scale } else { logit_scale }) as f32,
            logit_softcap: keys.positive("final_logit_softcapping")?.map(|cap| cap as f32),
            layer_input: None,
        };
        if self.scaled_embedding {
            description.embedding_scale = (hidden as f64).sqrt() as f32;
        }
        if self.fused_gate {
            *tensors = tensors.clone().with(&[(Role::GateUp, "ffn_up"), (Role::Gate, ""), (Role::Up, "")]);
        }
        self.set_kv_heads(keys, &mut description)?;
        self.set_reach(keys, &mut description)?;
        self.set_experts(keys, &mut description, tensors)?;
        (self.change)(keys, &mut description, tensors)?;
        Ok(description)
    }

    fn attention(&self, keys: &Keys<'_, '_>, heads: usize, head_dim: usize, norm: Norm) -> Result<Attention, ContentError> {
        let mut attention = Attention::plain(heads, heads, head_dim, norm);
        attention.value_dim = keys.size("attention.value_length", WIDTH)?.unwrap_or(head_dim);
        attention.head_norm = self.head_norm.map(|span| HeadNorm { norm, span, plain_after_rope: false });
        attention.softcap = keys.positive("attn_logit_softcapping")?.map(|cap| cap as f32);
        if let Some(scale) = keys.positive("attention.scale")? {
            attention.scale = scale as f32;
        }
        Ok(attention)
    }

    fn set_kv_heads(&self, keys: &Keys<'_, '_>, description: &mut Description) -> Result<(), ContentError> {
        const KEY: &str = "attention.head_count_kv";
        let layers = description.layers.len();
        let residual = keys.positive("residual_scale")?.unwrap_or(1.0) as f32;
        let Some(kv_heads) = keys.sizes(KEY, layers, 1, HEADS)? else { return Ok(()) };
        for (layer, kv_heads) in description.layers.iter_mut().zip(kv_heads) {
            layer.attention.kv_heads = kv_heads;
            if !layer.attention.heads.is_multiple_of(kv_heads) {
                return Err(keys.error(KEY, format!("is {kv_heads}: {} query heads can't share so many key heads", layer.attention.heads)));
            }
            layer.attention.output.scale = residual;
            layer.feed_forward.output.scale = residual;
        }
        Ok(())
    }

    fn set_reach(&self, keys: &Keys<'_, '_>, description: &mut Description) -> Result<(), ContentError> {
        let window = keys.whole("attention.sliding_window", 0, CONTEXT)?.filter(|window| *window > 0);
        let every = match keys.gguf.metadata.unsigneds(&keys.name("attention.sliding_window_pattern")) {
            Ok(Some(values)) if values.len() == 1 => values[0] as usize,
            _ => self.full_every,
        };
        for (number, layer) in description.layers.iter_mut().enumerate() {
            let full = every == 1 || (every > 0 && (number + 1).is_multiple_of(every));
            if let (Some(window), false) = (window, full) {
                layer.attention.reach = Reach::Window(window);
            }
            let turns = match self.turning {
                Turning::All => true,
                Turning::None => false,
                Turning::Windows => layer.attention.reach != Reach::All,
                Turning::NotEvery(n) => !(number + 1).is_multiple_of(n),
            };
            layer.attention.rope = turns.then_some(0);
        }
        Ok(())
    }

    /// Experts, in the layers whose router is there.
    fn set_experts(&self, keys: &Keys<'_, '_>, description: &mut Description, tensors: &mut TensorMap) -> Result<(), ContentError> {
        let count = keys.whole("expert_count", 0, EXPERTS)?.unwrap_or(0);
        if count == 0 {
            return Ok(());
        }
        if !keys.has_tensor("blk.0.ffn_down_exps.weight") && keys.has_tensor("blk.0.ffn_down.0.weight") {
            let old = [(Role::ExpertGate, "ffn_gate.{e}"), (Role::ExpertUp, "ffn_up.{e}"), (Role::ExpertDown, "ffn_down.{e}")];
            *tensors = tensors.clone().with(&old);
        }
        let scoring = match keys.whole("expert_gating_func", 0, 8)? {
            None => self.scoring,
            Some(1) => Scoring::Softmax,
            Some(2) => Scoring::Sigmoid,
            Some(3) => Scoring::SoftmaxOfChosen,
            Some(other) => return Err(keys.error("expert_gating_func", format!("is {other}, which is not supported; supported: 1, 2, 3"))),
        };
        let normalise = match keys.boolean("expert_weights_norm")? {
            Some(normalise) => normalise,
            None => self.normalises_experts,
        };
        let scale = keys.positive("expert_weights_scale")?.unwrap_or(1.0) as f32;
        let used = keys.needed_size("expert_used_count", count as u64)?;
        let width = keys.size("expert_feed_forward_length", WIDTH)?;
        let shared_width = keys.size("expert_shared_feed_forward_length", WIDTH)?;
        for (number, layer) in description.layers.iter_mut().enumerate() {
            let has = |name: &str| keys.has_tensor(&format!("blk.{number}.{name}"));
            if !has("ffn_gate_inp.weight") {
                continue;
            }
            let Some(dense) = layer.feed_forward.dense.take() else { continue };
            let router = Router {
                scoring,
                correction: has("exp_probs_b.bias") || has("exp_probs_b"),
                groups: None,
                normalise,
                scale,
                weighs_input: false,
                own_norm: None,
                expert_scale: false,
            };
            let width = width.unwrap_or(dense.width);
            layer.feed_forward.experts =
                Some(Experts { count, used, width, activation: dense.activation, router, input_norm: None, norm: None });
            if has("ffn_up_shexp.weight") {
                let width = shared_width.unwrap_or(width);
                layer.feed_forward.dense = Some(Dense { row_gate: has("ffn_gate_inp_shexp.weight"), width, ..dense });
            }
        }
        Ok(())
    }
}

fn head_dim(keys: &Keys<'_, '_>, hidden: usize, heads: usize) -> Result<usize, ContentError> {
    match keys.size("attention.key_length", HEAD_WIDTH)? {
        Some(head_dim) => Ok(head_dim),
        None if hidden.is_multiple_of(heads) && (hidden / heads) as u64 <= HEAD_WIDTH => Ok(hidden / heads),
        None => Err(ContentError::Model(format!("a width of {hidden} can't be shared by {heads} heads"))),
    }
}

/// Both parts read the same norm.
fn one_norm(_: &Keys<'_, '_>, _: &mut Description, tensors: &mut TensorMap) -> Result<(), ContentError> {
    *tensors = tensors.clone().with(&[(Role::FeedForwardNorm, "attn_norm")]);
    Ok(())
}

/// Norms after both parts, too.
fn sandwich(_: &Keys<'_, '_>, description: &mut Description, _: &mut TensorMap) -> Result<(), ContentError> {
    let norm = Some(description.output_norm);
    for layer in &mut description.layers {
        layer.attention.output.norm = norm;
        layer.feed_forward.output.norm = norm;
    }
    Ok(())
}

/// The 27B models scale attention by the width of a head's share of the hidden state, which no key says.
fn odd_scale(description: &mut Description, layers: usize) {
    if description.layers.len() == layers {
        let hidden = description.hidden;
        for layer in &mut description.layers {
            layer.attention.scale = (1.0 / (hidden as f64 / layer.attention.heads as f64).sqrt()) as f32;
        }
    }
}

fn gemma2(keys: &Keys<'_, '_>, description: &mut Description, tensors: &mut TensorMap) -> Result<(), ContentError> {
    odd_scale(description, 46);
    sandwich(keys, description, tensors)
}

/// Layers with a window turn at their own base, without scaling.
fn gemma3(keys: &Keys<'_, '_>, description: &mut Description, tensors: &mut TensorMap) -> Result<(), ContentError> {
    odd_scale(description, 62);
    let base = keys.positive("rope.freq_base_swa")?.unwrap_or(10_000.0);
    let local = description.ropes.first().map(|rope| crate::model::description::Rope::new(rope.style, rope.dim(), base));
    description.ropes.extend(local);
    for layer in &mut description.layers {
        layer.attention.rope = Some(usize::from(layer.attention.reach != Reach::All));
    }
    sandwich(keys, description, tensors)
}

/// Norms after both parts alone. With windows it is OLMo 3, whose windows turn without scaling.
fn olmo2(keys: &Keys<'_, '_>, description: &mut Description, tensors: &mut TensorMap) -> Result<(), ContentError> {
    *tensors = tensors.clone().with(&[(Role::AttentionNorm, ""), (Role::FeedForwardNorm, "")]);
    sandwich(keys, description, tensors)?;
    let base = keys.positive("rope.freq_base")?.unwrap_or(10_000.0);
    let local = description.ropes.first().map(|rope| crate::model::description::Rope::new(rope.style, rope.dim(), base));
    description.ropes.extend(local);
    for layer in &mut description.layers {
        (layer.attention.norm, layer.feed_forward.norm) = (None, None);
        layer.attention.rope = Some(usize::from(layer.attention.reach != Reach::All));
    }
    Ok(())
}

fn gpt_oss(_: &Keys<'_, '_>, description: &mut Description, tensors: &mut TensorMap) -> Result<(), ContentError> {
    *tensors = tensors.clone().with(&[(Role::FeedForwardNorm, "post_attention_norm"), (Role::AttentionBranchNorm, "")]);
    for layer in &mut description.layers {
        layer.attention.sinks = true;
        if let Some(experts) = &mut layer.feed_forward.experts {
            experts.activation = Activation::ClampedSwiglu { alpha: 1.702, limit: 7.0 };
        }
    }
    Ok(())
}

fn gpt2(_: &Keys<'_, '_>, description: &mut Description, _: &mut TensorMap) -> Result<(), ContentError> {
    description.learned_positions = Some(description.trained_context);
    Ok(())
}

fn neox(keys: &Keys<'_, '_>, description: &mut Description, _: &mut TensorMap) -> Result<(), ContentError> {
    let parallel = keys.boolean("use_parallel_residual")?.unwrap_or(true);
    description.layers.iter_mut().for_each(|layer| layer.parallel = parallel);
    Ok(())
}

/// Files of the 40B style hold a second norm, and that one is for attention.
fn falcon(keys: &Keys<'_, '_>, description: &mut Description, tensors: &mut TensorMap) -> Result<(), ContentError> {
    one_norm(keys, description, tensors)?;
    if keys.has_tensor("blk.0.attn_norm_2.weight") {
        *tensors = tensors.clone().with(&[(Role::AttentionNorm, "attn_norm_2")]);
    }
    Ok(())
}

fn stablelm(keys: &Keys<'_, '_>, description: &mut Description, tensors: &mut TensorMap) -> Result<(), ContentError> {
    let norm = description.output_norm;
    if keys.has_tensor("blk.0.attn_q_norm.weight") {
        let head_norm = HeadNorm { norm, span: Span::EachHead, plain_after_rope: false };
        description.layers.iter_mut().for_each(|layer| layer.attention.head_norm = Some(head_norm));
    }
    if !keys.has_tensor("blk.0.ffn_norm.weight") {
        description.layers.iter_mut().for_each(|layer| layer.parallel = true);
        one_norm(keys, description, tensors)?;
    }
    Ok(())
}
