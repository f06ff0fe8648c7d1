//! Mixtures of experts.

use quire_kernels::backend::{Activation, ExpertGroups, GroupScore, PositionScale, RopeStyle, Scoring, Span};

use super::{
    Checkpoint,
    base::{self, Base, CHUNKED, FULL, SLIDING, activation, layer_types, rms, set_reach},
    config::Config,
    dense::{Translated, head_norms, qwen_window, rotations, window, windows_turn_alone},
    names, rope,
};
use crate::model::{
    description::{
        Dense, Description, Experts, HeadNorm, Norm, Router, TensorMap,
        limits::{CONTEXT, EXPERTS, LAYERS, WIDTH},
    },
    error::ContentError,
};

/// Softmax over all, the best ones' weights as they are.
const PLAIN: Router = Router {
    scoring: Scoring::Softmax,
    correction: false,
    groups: None,
    normalise: false,
    scale: 1.0,
    weighs_input: false,
    own_norm: None,
    expert_scale: false,
};

/// Number, choice and width under the first of several keys that is there.
fn sizes(config: &Config<'_>, width: &'static str, router: Router) -> Result<Experts, ContentError> {
    const COUNT: [&str; 3] = ["num_local_experts", "num_experts", "n_routed_experts"];
    let count = config.needed(COUNT[0], config.first_size(&COUNT, EXPERTS)?)?;
    Ok(Experts {
        count,
        used: config.needed_size("num_experts_per_tok", count as u64)?,
        width: config.needed_size(width, WIDTH)?,
        activation: activation(config, "silu")?,
        router,
        input_norm: None,
        norm: None,
    })
}

/// Experts in these layers, in place of the dense part or, with `shared`, beside another.
fn place(description: &mut Description, experts: Experts, shared: Option<Dense>, sparse: impl Fn(usize) -> bool) {
    for (number, layer) in description.layers.iter_mut().enumerate() {
        if sparse(number) {
            layer.feed_forward.experts = Some(experts);
            layer.feed_forward.dense = shared;
        }
    }
}

/// A Llama whose dense width may be missing, with names of experts.
fn start(
    config: &Config<'_>,
    checkpoint: &Checkpoint<'_>,
    tables: &[&'static [(crate::model::description::names::Role, &'static str)]],
    defaults: &rope::Defaults<'_>,
) -> Translated {
    let base = Base::read(config)?;
    let norm = rms(config, 1e-6)?;
    let width = config.size("intermediate_size", WIDTH)?.unwrap_or(1);
    let dense = Dense::gated(width, activation(config, "silu")?);
    let tensors = base::map(checkpoint, tables);
    let ropes = vec![rope::read(config, FULL, base.head_dim, defaults)?];
    Ok((base::describe(config, checkpoint, &tensors, &base, norm, dense, ropes)?, tensors))
}

pub fn mixtral(config: &Config<'_>, checkpoint: &Checkpoint<'_>) -> Translated {
    let defaults = rope::Defaults { base: 1e6, ..rope::Defaults::default() };
    let (mut description, tensors) = start(config, checkpoint, &[names::LLAMA, names::BLOCK_SPARSE], &defaults)?;
    window(config, &mut description)?;
    let experts = sizes(config, "intermediate_size", Router { normalise: true, ..PLAIN })?;
    place(&mut description, experts, None, |_| true);
    Ok((description, tensors))
}

/// Every n-th layer but the named ones has experts.
fn qwen_sparse(config: &Config<'_>) -> Result<impl Fn(usize) -> bool, ContentError> {
    let step = config.size("decoder_sparse_step", LAYERS)?.unwrap_or(1);
    let dense = config.wholes("mlp_only_layers")?.unwrap_or_default();
    Ok(move |layer: usize| !dense.contains(&(layer as u64)) && (layer + 1).is_multiple_of(step))
}

/// A shared expert with a gate of its own.
pub fn qwen2_moe(config: &Config<'_>, checkpoint: &Checkpoint<'_>) -> Translated {
    let tables = [names::LLAMA, names::EXPERTS, names::QWEN2_SHARED];
    let (mut description, tensors) = start(config, checkpoint, &tables, &rope::Defaults::default())?;
    qwen_window(config, &mut description)?;
    let experts = sizes(config, "moe_intermediate_size", Router { normalise: config.flag("norm_topk_prob", false)?, ..PLAIN })?;
    let width = config.needed_size("shared_expert_intermediate_size", WIDTH)?;
    let shared = Dense { row_gate: true, ..Dense::gated(width, experts.activation) };
    place(&mut description, experts, Some(shared), qwen_sparse(config)?);
    Ok((description, tensors))
}

pub fn qwen3_moe(config: &Config<'_>, checkpoint: &Checkpoint<'_>) -> Translated {
    let tables = [names::LLAMA, names::EXPERTS];
    let (mut description, tensors) = start(config, checkpoint, &tables, &rope::Defaults::default())?;
    qwen_window(config, &mut description)?;
    head_norms(&mut description, rms(config, 1e-6)?, Span::Head);
    let experts = sizes(config, "moe_intermediate_size", Router { normalise: config.flag("norm_topk_prob", false)?, ..PLAIN })?;
    place(&mut description, experts, None, qwen_sparse(config)?);
    Ok((description, tensors))
}

/// Sinks, windows in every other layer, clamped gates, biases everywhere.
pub fn gpt_oss(config: &Config<'_>, checkpoint: &Checkpoint<'_>) -> Translated {
    let defaults = rope::Defaults { base: 150_000.0, ..rope::Defaults::default() };
    let (mut description, mut tensors) = start(config, checkpoint, &[names::LLAMA, names::GPT_OSS], &defaults)?;
    tensors.experts_transposed = true;
    tensors.experts_interleaved = true;
    (tensors.expert_weight, tensors.expert_bias) = ("", "_bias");
    let types = layer_types(config, description.layers.len(), |layer| if layer % 2 == 0 { SLIDING } else { FULL })?;
    set_reach(config, &mut description.layers, &types)?;
    description.layers.iter_mut().for_each(|layer| layer.attention.sinks = true);
    let mut experts = sizes(config, "intermediate_size", Router { scoring: Scoring::SoftmaxOfChosen, ..PLAIN })?;
    experts.activation = Activation::ClampedSwiglu {
        alpha: config.positive("swiglu_alpha")?.unwrap_or(1.702) as f32,
        limit: config.positive("swiglu_limit")?.unwrap_or(7.0) as f32,
    };
    place(&mut description, experts, None, |_| true);
    Ok((description, tensors))
}

/// DeepSeek V3's router: sigmoid, corrected choice, groups, shared experts; dense layers first.
pub(super) fn corrected(config: &Config<'_>, description: &mut Description) -> Result<(), ContentError> {
    let groups = groups(config, GroupScore::BestTwo)?;
    let router = Router {
        scoring: Scoring::Sigmoid,
        correction: true,
        groups,
        normalise: config.flag("norm_topk_prob", true)?,
        scale: config.positive("routed_scaling_factor")?.unwrap_or(1.0) as f32,
        ..PLAIN
    };
    let experts = sizes(config, "moe_intermediate_size", router)?;
    let first = config.whole("first_k_dense_replace", 0, LAYERS)?.unwrap_or(0);
    let shared = shared(config, &experts)?;
    place(description, experts, shared, |layer| layer >= first);
    Ok(())
}

pub(super) fn groups(config: &Config<'_>, score: GroupScore) -> Result<Option<ExpertGroups>, ContentError> {
    let count = config.size("n_group", EXPERTS)?.unwrap_or(1);
    let kept = config.size("topk_group", count as u64)?.unwrap_or(count);
    Ok((kept < count).then_some(ExpertGroups { count, kept, score }))
}

/// Shared experts are one dense part of their common width.
pub(super) fn shared(config: &Config<'_>, experts: &Experts) -> Result<Option<Dense>, ContentError> {
    let count = config.whole("n_shared_experts", 0, EXPERTS)?.unwrap_or(0);
    Ok((count > 0).then(|| Dense::gated(count * experts.width, experts.activation)))
}

/// Softmax router of DeepSeek V2.
pub(super) fn by_groups(config: &Config<'_>, description: &mut Description) -> Result<(), ContentError> {
    let groups = match config.text("topk_method")? {
        None | Some("greedy") => None,
        Some("group_limited_greedy") => groups(config, GroupScore::Best)?,
        Some(other) => {
            let shown = crate::model::gguf::clip(other);
            return Err(config.error("topk_method", format!("is `{shown}`; supported: greedy, group_limited_greedy")));
        }
    };
    let scale = config.positive("routed_scaling_factor")?.unwrap_or(1.0) as f32;
    let experts = sizes(config, "moe_intermediate_size", Router { groups, scale, ..PLAIN })?;
    let first = config.whole("first_k_dense_replace", 0, LAYERS)?.unwrap_or(0);
    let shared = shared(config, &experts)?;
    place(description, experts, shared, |layer| layer >= first);
    Ok(())
}

/// Tensors of layers beyond the last: heads that predict further tokens, which are not used.
pub(super) fn ignore_prediction_layers(
    config: &Config<'_>,
    description: &Description,
    tensors: &mut TensorMap,
) -> Result<(), ContentError> {
    for key in ["num_nextn_predict_layers", "num_mtp_layers"] {
        let further = config.whole(key, 0, 16)?.unwrap_or(0);
        let layers = description.layers.len();
        tensors.ignored.extend((layers..layers + further).map(|layer| format!("{}layers.{layer}.", tensors.prefix)));
    }
    Ok(())
}

pub fn glm4_moe(config: &Config<'_>, checkpoint: &Checkpoint<'_>) -> Translated {
    let defaults = rope::Defaults { share: 0.5, ..rope::Defaults::default() };
    let (mut description, mut tensors) = start(config, checkpoint, &[names::LLAMA, names::EXPERTS], &defaults)?;
    if config.flag("use_qk_norm", false)? {
        head_norms(&mut description, rms(config, 1e-5)?, Span::Head);
    }
    corrected(config, &mut description)?;
    ignore_prediction_layers(config, &description, &mut tensors)?;
    Ok((description, tensors))
}

/// Norms over all queries and all keys together; a sigmoid router.
pub fn minimax_m2(config: &Config<'_>, checkpoint: &Checkpoint<'_>) -> Translated {
    let defaults = rope::Defaults { base: 5e6, ..rope::Defaults::default() };
    let (mut description, mut tensors) = start(config, checkpoint, &[names::LLAMA, names::BLOCK_SPARSE], &defaults)?;
    head_norms(&mut description, rms(config, 1e-6)?, Span::Width);
    let router = Router { scoring: Scoring::Sigmoid, correction: true, normalise: true, ..PLAIN };
    let experts = sizes(config, "intermediate_size", router)?;
    place(&mut description, experts, None, |_| true);
    ignore_prediction_layers(config, &description, &mut tensors)?;
    Ok((description, tensors))
}

/// Layers with a window have sinks, twice as many key heads and a rotation of their own; values are narrower than keys.
pub fn mimo_v2_flash(config: &Config<'_>, checkpoint: &Checkpoint<'_>) -> Translated {
    let defaults = rope::Defaults::default();
    let (mut description, mut tensors) = start(config, checkpoint, &[names::LLAMA, names::EXPERTS], &defaults)?;
    tensors = tensors.with(&[(crate::model::description::names::Role::Sinks, "self_attn.attention_sink_bias")]);
    let types = layer_types(config, description.layers.len(), |layer| if layer % 6 == 0 { FULL } else { SLIDING })?;
    set_reach(config, &mut description.layers, &types)?;
    let head_dim = description.layers.first().map_or(0, |layer| layer.attention.head_dim);
    description.ropes.push(rope::read(config, SLIDING, head_dim, &defaults)?);
    windows_turn_alone(&mut description);
    let value_dim = config.size("v_head_dim", WIDTH)?.unwrap_or(head_dim);
    let scale = config.positive("attention_value_scale")?.unwrap_or(1.0) as f32;
    for layer in &mut description.layers {
        let attention = &mut layer.attention;
        attention.value_dim = value_dim;
        // Attention is linear in its values, so their scale may come after it.
        attention.output.scale = scale;
        if attention.rope == Some(1) {
            attention.kv_heads *= 2;
            attention.sinks = true;
            if !attention.heads.is_multiple_of(attention.kv_heads) {
                return Err(config.error("num_key_value_heads", "is not half a divisor of `num_attention_heads`"));
            }
        }
    }
    corrected(config, &mut description)?;
    let kinds = config.texts("mlp_layer_types")?.unwrap_or_default();
    for (layer, kind) in description.layers.iter_mut().zip(kinds) {
        if kind == "dense" {
            layer.feed_forward.experts = None;
            layer.feed_forward.dense = Some(Dense::gated(base::feed_forward(config)?, activation(config, "silu")?));
        }
    }
    Ok((description, tensors))
}

/// Chunks instead of windows, some layers without rotation but with queries scaled by position, weights of experts on
/// their input.
pub fn llama4(config: &Config<'_>, checkpoint: &Checkpoint<'_>) -> Translated {
    let defaults = rope::Defaults { style: RopeStyle::Adjacent, base: 500_000.0, ..rope::Defaults::default() };
    let (mut description, mut tensors) = start(config, checkpoint, &[names::LLAMA, names::LLAMA4], &defaults)?;
    tensors.experts_transposed = true;
    tensors.expert_weight = "";
    let layers = description.layers.len();
    let turning = rotations(config, layers)?;
    let types = layer_types(config, layers, |layer| if turning[layer] { CHUNKED } else { FULL })?;
    set_reach(config, &mut description.layers, &types)?;
    let norm = Norm::rms(config.positive("rms_norm_eps")?.unwrap_or(1e-5) as f32);
    let normed = config.flag("use_qk_norm", true)?;
    let temperature = PositionScale {
        beta: config.float("attn_scale")?.unwrap_or(0.1) as f32,
        offset: 1,
        interval: config.size("floor_scale", CONTEXT)?.unwrap_or(8192) as u32,
    };
    let tuned = config.flag("attn_temperature_tuning", true)?;
    for (layer, turns) in description.layers.iter_mut().zip(&turning) {
        let attention = &mut layer.attention;
        attention.rope = turns.then_some(0);
        attention.head_norm = (*turns && normed).then_some(HeadNorm { norm, span: Span::Head, plain_after_rope: true });
        attention.temperature = (!*turns && tuned).then_some(temperature);
    }
    let dense = Dense::gated(config.needed_size("intermediate_size_mlp", WIDTH)?, activation(config, "silu")?);
    description.layers.iter_mut().for_each(|layer| layer.feed_forward.dense = Some(dense));
    let router = Router { scoring: Scoring::Sigmoid, weighs_input: true, ..PLAIN };
    let experts = sizes(config, "intermediate_size", router)?;
    let step = config.size("interleave_moe_layer_step", LAYERS)?.unwrap_or(1);
    let sparse = config.wholes("moe_layers")?;
    let shared = Dense::gated(experts.width, experts.activation);
    place(&mut description, experts, Some(shared), |layer| match &sparse {
        Some(sparse) => sparse.contains(&(layer as u64)),
        None => (layer + 1).is_multiple_of(step),
    });
    Ok((description, tensors))
}
