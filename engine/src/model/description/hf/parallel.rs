//! LayerNorm families, most of them with attention and feed-forward side by side.

use quire_kernels::backend::{RopeStyle, Span};

use super::{
    Checkpoint,
    base::{self, Base, FULL, SLIDING, activation, layer_norm, layer_types, set_reach},
    config::Config,
    dense::{Translated, window},
    names, rope,
};
use crate::model::{
    description::{
        Dense, Description, HeadNorm, Norm, Reach, TensorMap,
        limits::{HEADS, LAYERS, WIDTH},
        names::{Fused, Role},
    },
    error::ContentError,
};

type Names = &'static [(Role, &'static str)];

/// Falcon and NeoX: prefix of the names.
fn mapped(checkpoint: &Checkpoint<'_>, prefix: &'static str, layer: &'static str, table: Names) -> TensorMap {
    let probe = table.iter().find(|(role, _)| *role == Role::Embedding).map_or("", |(_, name)| *name);
    TensorMap::new(checkpoint.prefix(&[prefix, ""], probe), layer, &[table])
}

fn start(
    config: &Config<'_>,
    checkpoint: &Checkpoint<'_>,
    tensors: &TensorMap,
    base: &Base,
    norm: Norm,
    dense: Dense,
    defaults: &rope::Defaults<'_>,
) -> Result<Description, ContentError> {
    let ropes = vec![rope::read(config, FULL, base.head_dim, defaults)?];
    base::describe(config, checkpoint, tensors, base, norm, dense, ropes)
}

fn set_head_norms(config: &Config<'_>, description: &mut Description, norm: Norm, span: Span) -> Result<(), ContentError> {
    if config.flag("qk_layernorm", false)? {
        description.layers.iter_mut().for_each(|layer| {
            layer.attention.head_norm = Some(HeadNorm { norm, span, plain_after_rope: false });
        });
    }
    Ok(())
}

/// Phi 1 to 2: one norm for both parts.
pub fn phi(config: &Config<'_>, checkpoint: &Checkpoint<'_>) -> Translated {
    let base = Base::read(config)?;
    let norm = layer_norm(config, 1e-5)?;
    let dense = Dense::plain(base::feed_forward(config)?, activation(config, "gelu_new")?);
    let tensors = base::map(checkpoint, &[names::LLAMA, names::PHI]);
    let defaults = rope::Defaults { share: 0.5, ..rope::Defaults::default() };
    let mut description = start(config, checkpoint, &tensors, &base, norm, dense, &defaults)?;
    description.layers.iter_mut().for_each(|layer| layer.parallel = true);
    set_head_norms(config, &mut description, norm, Span::Head)?;
    Ok((description, tensors))
}

/// One norm for both parts; layers without a window have no rotation; neighbours turn together; logits are scaled.
pub fn cohere2(config: &Config<'_>, checkpoint: &Checkpoint<'_>) -> Translated {
    let base = Base::read(config)?;
    let norm = layer_norm(config, 1e-5)?;
    let dense = Dense::gated(base::feed_forward(config)?, activation(config, "silu")?);
    let tensors = base::map(checkpoint, &[names::LLAMA, &[(Role::FeedForwardNorm, "input_layernorm")]]);
    let defaults = rope::Defaults { style: RopeStyle::Adjacent, ..rope::Defaults::default() };
    let mut description = start(config, checkpoint, &tensors, &base, norm, dense, &defaults)?;
    let every = config.size("sliding_window_pattern", LAYERS)?.unwrap_or(4);
    let types = layer_types(config, base.layers, |layer| if (layer + 1) % every == 0 { FULL } else { SLIDING })?;
    set_reach(config, &mut description.layers, &types)?;
    for layer in &mut description.layers {
        layer.parallel = true;
        layer.attention.rope = (layer.attention.reach != Reach::All).then_some(0);
    }
    description.logit_scale = config.float("logit_scale")?.unwrap_or(0.0625) as f32;
    Ok((description, tensors))
}

pub fn neox(config: &Config<'_>, checkpoint: &Checkpoint<'_>) -> Translated {
    let base = Base::read(config)?;
    let norm = layer_norm(config, 1e-5)?;
    let dense = Dense::plain(base::feed_forward(config)?, activation(config, "gelu")?);
    let mut tensors = mapped(checkpoint, "gpt_neox.", "layers.{}.", names::NEOX);
    tensors.fused = Fused::PerKeyHead;
    tensors.ignored.extend(["attention.bias", "attention.masked_bias"].map(str::to_owned));
    let defaults = rope::Defaults { share: 0.25, ..rope::Defaults::default() };
    let mut description = start(config, checkpoint, &tensors, &base, norm, dense, &defaults)?;
    let parallel = config.flag("use_parallel_residual", true)?;
    description.layers.iter_mut().for_each(|layer| layer.parallel = parallel);
    Ok((description, tensors))
}

/// 7B style: one key head, one norm for both parts. 40B and later: several key heads, two norms.
pub fn falcon(config: &Config<'_>, checkpoint: &Checkpoint<'_>) -> Translated {
    if config.flag("alibi", false)? {
        return Err(config.error("alibi", "is true: attention with linear biases is not supported yet"));
    }
    let mut base = Base::read(config)?;
    let new = config.flag("new_decoder_architecture", false)?;
    base.kv_heads = match (new, config.flag("multi_query", true)?) {
        (true, _) => config.first_size(&["num_kv_heads", "n_head_kv"], HEADS)?.unwrap_or(base.heads),
        (false, true) => 1,
        (false, false) => base.heads,
    };
    base.check_heads(config, base.kv_heads)?;
    let parallel = new || config.flag("parallel_attn", true)?;
    let norms = config.size("num_ln_in_parallel_attn", 2)?.unwrap_or(if new { 2 } else { 1 });
    let norm = layer_norm(config, 1e-5)?;
    let width = config.size("ffn_hidden_size", WIDTH)?.unwrap_or(4 * base.hidden);
    let dense = Dense::plain(width, activation(config, "gelu")?);
    let mut tensors = mapped(checkpoint, "transformer.", "h.{}.", names::FALCON);
    tensors.fused = Fused::PerKeyHead;
    if parallel {
        tensors = match (new, norms) {
            (true, 2) => tensors.with(&[(Role::AttentionNorm, "ln_attn"), (Role::FeedForwardNorm, "ln_mlp")]),
            _ => tensors.with(&[(Role::FeedForwardNorm, "input_layernorm")]),
        };
    }
    let mut description = start(config, checkpoint, &tensors, &base, norm, dense, &rope::Defaults::default())?;
    description.layers.iter_mut().for_each(|layer| layer.parallel = parallel);
    Ok((description, tensors))
}

/// Learned positions, matrices stored in × out.
pub fn gpt2(config: &Config<'_>, checkpoint: &Checkpoint<'_>) -> Translated {
    for key in ["scale_attn_by_inverse_layer_idx", "add_cross_attention"] {
        if config.flag(key, false)? {
            return Err(config.error(key, "is true, which is not supported"));
        }
    }
    let base = Base::read(config)?;
    let norm = layer_norm(config, 1e-5)?;
    let width = config.size("n_inner", WIDTH)?.unwrap_or(4 * base.hidden);
    let dense = Dense::plain(width, activation(config, "gelu_new")?);
    let mut tensors = mapped(checkpoint, "transformer.", "h.{}.", names::GPT2);
    tensors.transposed = true;
    tensors.ignored.extend([".attn.bias", ".attn.masked_bias"].map(str::to_owned));
    let mut description = base::describe(config, checkpoint, &tensors, &base, norm, dense, Vec::new())?;
    description.learned_positions = Some(base.context);
    let scaled = config.flag("scale_attn_weights", true)?;
    for layer in &mut description.layers {
        layer.attention.rope = None;
        if !scaled {
            layer.attention.scale = 1.0;
        }
    }
    Ok((description, tensors))
}

pub fn starcoder2(config: &Config<'_>, checkpoint: &Checkpoint<'_>) -> Translated {
    let base = Base::read(config)?;
    let norm = layer_norm(config, 1e-5)?;
    let dense = Dense::plain(base::feed_forward(config)?, activation(config, "gelu_pytorch_tanh")?);
    let tensors = base::map(checkpoint, &[names::LLAMA, names::STARCODER2]);
    let mut description = start(config, checkpoint, &tensors, &base, norm, dense, &rope::Defaults::default())?;
    window(config, &mut description)?;
    Ok((description, tensors))
}

/// A gated feed-forward with LayerNorm; a quarter of each head turns.
pub fn stablelm(config: &Config<'_>, checkpoint: &Checkpoint<'_>) -> Translated {
    let base = Base::read(config)?;
    let norm = layer_norm(config, 1e-5)?;
    let dense = Dense::gated(base::feed_forward(config)?, activation(config, "silu")?);
    let mut tensors = base::map(checkpoint, &[names::LLAMA, names::STABLELM]);
    let defaults = rope::Defaults { share: 0.25, ..rope::Defaults::default() };
    let mut description = start(config, checkpoint, &tensors, &base, norm, dense, &defaults)?;
    if config.flag("use_parallel_residual", false)? {
        tensors = tensors.with(&[(Role::FeedForwardNorm, "input_layernorm")]);
        description.layers.iter_mut().for_each(|layer| layer.parallel = true);
    }
    set_head_norms(config, &mut description, norm, Span::EachHead)?;
    Ok((description, tensors))
}
