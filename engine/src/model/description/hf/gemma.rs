//! Gemma 1 to 4.

use quire_kernels::backend::{Activation, Scoring, Span};

use super::{
    Checkpoint,
    base::{self, FULL, SLIDING, activation, layer_types, rms, set_reach},
    config::Config,
    dense::{Translated, head_norms, windows_turn_alone},
    names, rope,
};
use crate::model::{
    description::{
        Branch, Dense, Description, Experts, Keys, Reach, Router, TensorMap,
        limits::{EXPERTS, HEADS, LAYERS, WIDTH},
    },
    error::ContentError,
};

/// Sizes, scaled embeddings, one rotation.
fn start(
    config: &Config<'_>,
    checkpoint: &Checkpoint<'_>,
    tensors: &TensorMap,
    ropes: &[(&str, rope::Defaults<'_>)],
) -> Result<Description, ContentError> {
    let base = base::Base::read(config)?;
    let norm = rms(config, 1e-6)?;
    let ropes = ropes.iter().map(|(kind, defaults)| {
        // The kinds are constants; the lifetime of the file's texts is shorter.
        let kind = if *kind == SLIDING { SLIDING } else { FULL };
        rope::read(config, kind, base.head_dim, defaults)
    });
    let ropes = ropes.collect::<Result<Vec<_>, _>>()?;
    let dense = Dense::gated(base::feed_forward(config)?, activation(config, "gelu_pytorch_tanh")?);
    let mut description = base::describe(config, checkpoint, tensors, &base, norm, dense, ropes)?;
    description.embedding_scale = (base.hidden as f64).sqrt() as f32;
    Ok(description)
}

fn single() -> [(&'static str, rope::Defaults<'static>); 1] {
    [(FULL, rope::Defaults::default())]
}

/// Norms hold their weights less 1.
pub fn gemma(config: &Config<'_>, checkpoint: &Checkpoint<'_>) -> Translated {
    let mut tensors = base::map(checkpoint, &[names::LLAMA]);
    tensors.norm_offset = 1.0;
    // Old files say `gelu` and mean its approximation.
    let mut description = start(config, checkpoint, &tensors, &single())?;
    for dense in description.layers.iter_mut().filter_map(|layer| layer.feed_forward.dense.as_mut()) {
        dense.activation = Activation::Gelu;
    }
    Ok((description, tensors))
}

/// Norms before and after both parts, a scale of attention of its own.
fn sandwich(config: &Config<'_>, description: &mut Description) -> Result<(), ContentError> {
    let norm = rms(config, 1e-6)?;
    let scale = config.positive("query_pre_attn_scalar")?.unwrap_or(256.0);
    for layer in &mut description.layers {
        layer.attention.scale = (1.0 / scale.sqrt()) as f32;
        layer.attention.output = Branch { norm: Some(norm), scale: 1.0 };
        layer.feed_forward.output = Branch { norm: Some(norm), scale: 1.0 };
    }
    Ok(())
}

fn softcaps(config: &Config<'_>, description: &mut Description) -> Result<(), ContentError> {
    description.logit_softcap = config.positive("final_logit_softcapping")?.map(|cap| cap as f32);
    let cap = config.positive("attn_logit_softcapping")?.map(|cap| cap as f32);
    description.layers.iter_mut().for_each(|layer| layer.attention.softcap = cap);
    Ok(())
}

/// Softcaps; every other layer has a window.
pub fn gemma2(config: &Config<'_>, checkpoint: &Checkpoint<'_>) -> Translated {
    let mut tensors = base::map(checkpoint, &[names::LLAMA, names::SANDWICH]);
    tensors.norm_offset = 1.0;
    let mut description = start(config, checkpoint, &tensors, &single())?;
    sandwich(config, &mut description)?;
    softcaps(config, &mut description)?;
    let types = layer_types(config, description.layers.len(), |layer| if layer % 2 == 0 { SLIDING } else { FULL })?;
    set_reach(config, &mut description.layers, &types)?;
    Ok((description, tensors))
}

/// Norms of queries and keys; layers with a window, five of six, have a rotation of their own.
pub fn gemma3(config: &Config<'_>, checkpoint: &Checkpoint<'_>) -> Translated {
    if config.flag("use_bidirectional_attention", false)? {
        return Err(config.error("use_bidirectional_attention", "is true: that is an encoder, which is not supported yet"));
    }
    let mut tensors = base::map(checkpoint, &[names::LLAMA, names::SANDWICH]);
    tensors.norm_offset = 1.0;
    let full = rope::Defaults { base: 1e6, ..rope::Defaults::default() };
    let local = rope::Defaults { base_key: "rope_local_base_freq", scaled: false, ..rope::Defaults::default() };
    let mut description = start(config, checkpoint, &tensors, &[(FULL, full), (SLIDING, local)])?;
    sandwich(config, &mut description)?;
    softcaps(config, &mut description)?;
    let every = config.size("sliding_window_pattern", LAYERS)?.unwrap_or(6);
    let types = layer_types(config, description.layers.len(), |layer| if (layer + 1) % every == 0 { FULL } else { SLIDING })?;
    set_reach(config, &mut description.layers, &types)?;
    head_norms(&mut description, rms(config, 1e-6)?, Span::Head);
    windows_turn_alone(&mut description);
    Ok((description, tensors))
}

/// Larger heads without a window, values normed, keys of earlier layers reused, perhaps an input of each layer's own,
/// perhaps experts beside the dense part.
pub fn gemma4(config: &Config<'_>, checkpoint: &Checkpoint<'_>) -> Translated {
    let tensors = base::map(checkpoint, &[names::LLAMA, names::SANDWICH, names::GEMMA4]);
    let defaults = rope::Defaults::default();
    let mut description = start(config, checkpoint, &tensors, &[(SLIDING, defaults)])?;
    sandwich(config, &mut description)?;
    softcaps(config, &mut description)?;
    let every = |layer: usize| if (layer + 1).is_multiple_of(6) { FULL } else { SLIDING };
    let types = layer_types(config, description.layers.len(), every)?;
    set_reach(config, &mut description.layers, &types)?;
    head_norms(&mut description, rms(config, 1e-6)?, Span::Head);
    heads(config, &mut description)?;
    let full_head = description.layers.iter().find(|layer| layer.attention.reach == Reach::All).map(|layer| layer.attention.head_dim);
    if let Some(head_dim) = full_head {
        description.ropes.insert(0, rope::read(config, FULL, head_dim, &defaults)?);
        windows_turn_alone(&mut description);
    }
    shared_keys(config, &mut description)?;
    description.layer_input = config.whole("hidden_size_per_layer_input", 0, WIDTH)?.filter(|width| *width > 0);
    if config.flag("enable_moe_block", false)? {
        experts(config, &mut description)?;
    }
    description.layers.iter_mut().for_each(|layer| layer.scaled = true);
    Ok((description, tensors))
}

/// Heads of layers without a window differ: `per_layer_config`, or `global_head_dim` and `num_global_key_value_heads`.
fn heads(config: &Config<'_>, description: &mut Description) -> Result<(), ContentError> {
    let norm = rms(config, 1e-6)?;
    let per_layer = config.object("per_layer_config")?;
    let both = config.flag("attention_k_eq_v", false)?;
    let keys: Vec<String> = (0..description.layers.len()).map(|layer| layer.to_string()).collect();
    for (layer, key) in description.layers.iter_mut().zip(&keys) {
        let attention = &mut layer.attention;
        attention.scale = 1.0;
        attention.value_norm = Some(norm);
        if both && attention.reach == Reach::All {
            attention.keys = Keys::OwnForBoth;
        }
        let own = match per_layer {
            Some(per_layer) => own_sizes(config, &per_layer, key)?,
            None if attention.reach == Reach::All => {
                (config.size("global_head_dim", WIDTH)?, config.size("num_global_key_value_heads", HEADS)?)
            }
            None => (None, None),
        };
        if let Some(head_dim) = own.0 {
            (attention.head_dim, attention.value_dim) = (head_dim, head_dim);
        }
        attention.kv_heads = own.1.unwrap_or(attention.kv_heads);
        if !attention.heads.is_multiple_of(attention.kv_heads) {
            return Err(
                config.error("num_key_value_heads", format!("is {}, which {} heads can't share", attention.kv_heads, attention.heads))
            );
        }
    }
    Ok(())
}

/// Head size and number of key heads of one layer, where it has its own.
fn own_sizes(config: &Config<'_>, per_layer: &Config<'_>, key: &str) -> Result<(Option<usize>, Option<usize>), ContentError> {
    match per_layer.get(key) {
        None => Ok((None, None)),
        Some(value) => {
            let own = value.as_object().ok_or_else(|| config.error("per_layer_config", format!("has no object for layer {key}")))?;
            let own = Config::new(own);
            Ok((own.size("head_dim", WIDTH)?, own.size("num_key_value_heads", HEADS)?))
        }
    }
}

/// The last layers read keys and values of the last earlier layer of their kind.
fn shared_keys(config: &Config<'_>, description: &mut Description) -> Result<(), ContentError> {
    const KEY: &str = "num_kv_shared_layers";
    let layers = description.layers.len();
    let shared = config.whole(KEY, 0, layers as u64)?.unwrap_or(0);
    let first = layers - shared;
    let double = config.flag("use_double_wide_mlp", false)?;
    for layer in first..layers {
        let reach = description.layers[layer].attention.reach;
        let from = (0..first).rev().find(|from| description.layers[*from].attention.reach == reach);
        let from = from.ok_or_else(|| config.error(KEY, format!("leaves layer {layer} without a layer whose keys it could read")))?;
        let (own, other) = (description.layers[layer].attention, description.layers[from].attention);
        if own.cache_shape() != other.cache_shape() {
            return Err(config.error(KEY, format!("makes layer {layer} read keys of another size, from layer {from}")));
        }
        description.layers[layer].attention.keys = Keys::Shared(from);
        if let (true, Some(dense)) = (double, description.layers[layer].feed_forward.dense.as_mut()) {
            dense.width *= 2;
        }
    }
    Ok(())
}

fn experts(config: &Config<'_>, description: &mut Description) -> Result<(), ContentError> {
    let norm = rms(config, 1e-6)?;
    let count = config.needed_size("num_experts", EXPERTS)?;
    let experts = Experts {
        count,
        used: config.needed_size("top_k_experts", count as u64)?,
        width: config.needed_size("moe_intermediate_size", WIDTH)?,
        activation: activation(config, "gelu_pytorch_tanh")?,
        router: Router {
            scoring: Scoring::Softmax,
            correction: false,
            groups: None,
            normalise: true,
            scale: 1.0,
            weighs_input: false,
            own_norm: Some(norm),
            expert_scale: true,
        },
        input_norm: Some(norm),
        norm: Some(norm),
    };
    for layer in &mut description.layers {
        layer.feed_forward.experts = Some(experts);
        if let Some(dense) = &mut layer.feed_forward.dense {
            dense.norm = Some(norm);
        }
    }
    Ok(())
}
