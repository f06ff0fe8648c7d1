//! Multi-head latent attention: DeepSeek V2 and V3.

use quire_kernels::backend::RopeStyle;

use super::{
    Checkpoint,
    base::{self, Base, FULL, activation, rms},
    config::Config,
    dense::Translated,
    experts::{by_groups, corrected, ignore_prediction_layers},
    names, rope,
};
use crate::model::{
    description::{Dense, Keys, Latent, Norm, limits::WIDTH},
    error::ContentError,
};

/// The reference gives the norms inside attention no setting.
const LATENT_EPSILON: f32 = 1e-6;

pub fn deepseek_v2(config: &Config<'_>, checkpoint: &Checkpoint<'_>) -> Translated {
    let (mut description, mut tensors) = start(config, checkpoint, RopeStyle::Adjacent)?;
    by_groups(config, &mut description)?;
    ignore_prediction_layers(config, &description, &mut tensors)?;
    Ok((description, tensors))
}

pub fn deepseek_v3(config: &Config<'_>, checkpoint: &Checkpoint<'_>) -> Translated {
    let style = if config.flag("rope_interleave", true)? { RopeStyle::Adjacent } else { RopeStyle::Half };
    let (mut description, mut tensors) = start(config, checkpoint, style)?;
    corrected(config, &mut description)?;
    ignore_prediction_layers(config, &description, &mut tensors)?;
    Ok((description, tensors))
}

fn start(config: &Config<'_>, checkpoint: &Checkpoint<'_>, style: RopeStyle) -> Translated {
    let base = Base::read(config)?;
    let dims = Dims::read(config)?;
    let norm = rms(config, 1e-6)?;
    let dense = Dense::gated(base::feed_forward(config)?, activation(config, "silu")?);
    let tensors = base::map(checkpoint, &[names::LLAMA, names::EXPERTS, names::LATENT]);
    let defaults = rope::Defaults { style, ..rope::Defaults::default() };
    let ropes = vec![rope::read(config, FULL, dims.rope, &defaults)?];
    let mut description = base::describe(config, checkpoint, &tensors, &base, norm, dense, ropes)?;
    let head_dim = dims.plain + dims.rope;
    let scale = rope::attention_factor(config)? / (head_dim as f64).sqrt();
    for layer in &mut description.layers {
        let attention = &mut layer.attention;
        attention.kv_heads = attention.heads;
        (attention.head_dim, attention.value_dim) = (head_dim, dims.value);
        attention.scale = scale as f32;
        attention.keys = Keys::Latent(Latent {
            query_rank: dims.query_rank,
            rank: dims.rank,
            plain_dim: dims.plain,
            rope_dim: dims.rope,
            norm: Norm::rms(LATENT_EPSILON),
        });
    }
    Ok((description, tensors))
}

struct Dims {
    query_rank: Option<usize>,
    rank: usize,
    plain: usize,
    rope: usize,
    value: usize,
}

impl Dims {
    fn read(config: &Config<'_>) -> Result<Self, ContentError> {
        Ok(Self {
            query_rank: config.size("q_lora_rank", WIDTH)?,
            rank: config.needed_size("kv_lora_rank", WIDTH)?,
            plain: config.needed_size("qk_nope_head_dim", WIDTH)?,
            rope: config.needed_size("qk_rope_head_dim", WIDTH)?,
            value: config.needed_size("v_head_dim", WIDTH)?,
        })
    }
}
