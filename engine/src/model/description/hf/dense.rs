//! Families that differ from Llama in a few switches.

use quire_kernels::backend::{PositionScale, RopeStyle, Span};

use super::{
    Checkpoint,
    base::{self, FULL, SLIDING, activation, layer_types, rms, set_reach},
    config::Config,
    names, rope,
};
use crate::model::{
    description::{
        Branch, Dense, Description, HeadNorm, Norm, Reach, TensorMap,
        limits::{CONTEXT, LAYERS},
    },
    error::ContentError,
};

pub(super) type Translated = Result<(Description, TensorMap), ContentError>;

pub fn llama(config: &Config<'_>, checkpoint: &Checkpoint<'_>) -> Translated {
    base::llama(config, checkpoint)
}

/// A window in all layers, if there is one.
pub fn mistral(config: &Config<'_>, checkpoint: &Checkpoint<'_>) -> Translated {
    let (mut description, tensors) = base::llama(config, checkpoint)?;
    window(config, &mut description)?;
    Ok((description, tensors))
}

/// The same window in all layers, or by `layer_types`.
pub(super) fn window(config: &Config<'_>, description: &mut Description) -> Result<(), ContentError> {
    // 0 stands for none in some files.
    let window = config.whole("sliding_window", 0, CONTEXT)?.filter(|window| *window > 0);
    let kind = if window.is_some() { SLIDING } else { FULL };
    let types = layer_types(config, description.layers.len(), |_| kind)?;
    set_reach(config, &mut description.layers, &types)
}

/// Queries are scaled by position, as Llama 4 does it.
pub fn ministral3(config: &Config<'_>, checkpoint: &Checkpoint<'_>) -> Translated {
    let (mut description, tensors) = mistral(config, checkpoint)?;
    if let Some((slope, original)) = rope::beside(config, "llama_4_scaling_beta")? {
        let temperature = PositionScale { beta: slope as f32, offset: 0, interval: original as u32 };
        description.layers.iter_mut().for_each(|layer| layer.attention.temperature = Some(temperature));
    }
    Ok((description, tensors))
}

/// A window above some layer, if it is switched on. Biases of Q, K and V come with the checkpoint.
pub fn qwen2(config: &Config<'_>, checkpoint: &Checkpoint<'_>) -> Translated {
    let (mut description, tensors) = base::llama(config, checkpoint)?;
    qwen_window(config, &mut description)?;
    Ok((description, tensors))
}

pub(super) fn qwen_window(config: &Config<'_>, description: &mut Description) -> Result<(), ContentError> {
    if !config.flag("use_sliding_window", false)? {
        return Ok(());
    }
    let first = config.whole("max_window_layers", 0, LAYERS)?.unwrap_or(28);
    let types = layer_types(config, description.layers.len(), |layer| if layer >= first { SLIDING } else { FULL })?;
    set_reach(config, &mut description.layers, &types)
}

/// Qwen 2 with a norm of each head's queries and keys.
pub fn qwen3(config: &Config<'_>, checkpoint: &Checkpoint<'_>) -> Translated {
    let (mut description, tensors) = qwen2(config, checkpoint)?;
    head_norms(&mut description, rms(config, 1e-6)?, Span::Head);
    Ok((description, tensors))
}

pub(super) fn head_norms(description: &mut Description, norm: Norm, span: Span) {
    for layer in &mut description.layers {
        layer.attention.head_norm = Some(HeadNorm { norm, span, plain_after_rope: false });
    }
}

/// Four multipliers.
pub fn granite(config: &Config<'_>, checkpoint: &Checkpoint<'_>) -> Translated {
    let (mut description, tensors) = base::llama(config, checkpoint)?;
    let factor = |key: &str| Ok::<_, ContentError>(config.positive(key)?.unwrap_or(1.0));
    let residual = factor("residual_multiplier")? as f32;
    description.embedding_scale = factor("embedding_multiplier")? as f32;
    description.logit_scale = (1.0 / factor("logits_scaling")?) as f32;
    let scale = factor("attention_multiplier")? as f32;
    for layer in &mut description.layers {
        layer.attention.scale = scale;
        layer.attention.output.scale = residual;
        layer.feed_forward.output.scale = residual;
    }
    Ok((description, tensors))
}

/// Some layers have no rotation.
pub fn smollm3(config: &Config<'_>, checkpoint: &Checkpoint<'_>) -> Translated {
    let (mut description, tensors) = base::llama(config, checkpoint)?;
    let turning = rotations(config, description.layers.len())?;
    for (layer, turns) in description.layers.iter_mut().zip(&turning) {
        layer.attention.rope = turns.then_some(0);
    }
    if config.flag("use_sliding_window", false)? {
        let types = layer_types(config, turning.len(), |layer| if turning[layer] { FULL } else { SLIDING })?;
        set_reach(config, &mut description.layers, &types)?;
    }
    Ok((description, tensors))
}

/// Which layers turn: `no_rope_layers` (where 1 means that the layer turns), else every layer but each n-th.
pub(super) fn rotations(config: &Config<'_>, layers: usize) -> Result<Vec<bool>, ContentError> {
    const KEY: &str = "no_rope_layers";
    if let Some(turning) = config.wholes(KEY)?.filter(|turning| !turning.is_empty()) {
        if turning.len() < layers {
            return Err(config.error(KEY, format!("has {} entries for {layers} layers", turning.len())));
        }
        return Ok(turning.iter().take(layers).map(|turns| *turns != 0).collect());
    }
    let interval = config.size("no_rope_layer_interval", LAYERS)?.unwrap_or(4);
    Ok((0..layers).map(|layer| !(layer + 1).is_multiple_of(interval)).collect())
}

/// Fused projections; perhaps a partial rotation, perhaps long and short frequencies. Also Phi 4.
pub fn phi3(config: &Config<'_>, checkpoint: &Checkpoint<'_>) -> Translated {
    mistral(config, checkpoint)
}

/// Norms after both parts instead of before, and of all queries and all keys together.
pub fn olmo2(config: &Config<'_>, checkpoint: &Checkpoint<'_>) -> Translated {
    let (mut description, _) = base::llama(config, checkpoint)?;
    let norm = rms(config, 1e-5)?;
    description.output_norm = norm;
    head_norms(&mut description, norm, Span::Width);
    for layer in &mut description.layers {
        (layer.attention.norm, layer.feed_forward.norm) = (None, None);
        layer.attention.output = Branch { norm: Some(norm), scale: 1.0 };
        layer.feed_forward.output = Branch { norm: Some(norm), scale: 1.0 };
    }
    Ok((description, base::map(checkpoint, &[names::LLAMA, names::AFTER])))
}

/// OLMo 2 with windows; layers with one have a rotation of their own.
pub fn olmo3(config: &Config<'_>, checkpoint: &Checkpoint<'_>) -> Translated {
    let (mut description, tensors) = olmo2(config, checkpoint)?;
    let types = layer_types(config, description.layers.len(), |layer| if (layer + 1) % 4 == 0 { FULL } else { SLIDING })?;
    set_reach(config, &mut description.layers, &types)?;
    let head_dim = description.layers.first().map_or(0, |layer| layer.attention.head_dim);
    let defaults = rope::Defaults { base: 500_000.0, ..rope::Defaults::default() };
    description.ropes = vec![
        rope::read(config, FULL, head_dim, &defaults)?,
        rope::read(config, SLIDING, head_dim, &rope::Defaults { scaled: false, ..defaults })?,
    ];
    windows_turn_alone(&mut description);
    Ok((description, tensors))
}

/// Layers with a window take the second rotation.
pub(super) fn windows_turn_alone(description: &mut Description) {
    for layer in &mut description.layers {
        layer.attention.rope = Some(usize::from(layer.attention.reach != Reach::All));
    }
}

/// Neighbours turn together.
pub fn ernie(config: &Config<'_>, checkpoint: &Checkpoint<'_>) -> Translated {
    let (mut description, tensors) = base::llama(config, checkpoint)?;
    description.ropes.iter_mut().for_each(|rope| rope.style = RopeStyle::Adjacent);
    Ok((description, tensors))
}

/// Norms before and after both parts; half of each head turns, neighbours together.
pub fn glm4(config: &Config<'_>, checkpoint: &Checkpoint<'_>) -> Translated {
    let base = base::Base::read(config)?;
    let norm = rms(config, 1e-5)?;
    let defaults = rope::Defaults { style: RopeStyle::Adjacent, share: 0.5, ..rope::Defaults::default() };
    let ropes = vec![rope::read(config, FULL, base.head_dim, &defaults)?];
    let dense = Dense::gated(base::feed_forward(config)?, activation(config, "silu")?);
    let tensors = base::map(checkpoint, &[names::LLAMA, names::GLM4]);
    let mut description = base::describe(config, checkpoint, &tensors, &base, norm, dense, ropes)?;
    for layer in &mut description.layers {
        layer.attention.output = Branch { norm: Some(norm), scale: 1.0 };
        layer.feed_forward.output = Branch { norm: Some(norm), scale: 1.0 };
    }
    Ok((description, tensors))
}
