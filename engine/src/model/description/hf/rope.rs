//! Rotation: `rope_theta` and `rope_scaling` of older files, `rope_parameters` of newer ones, flat or per kind of layer.

use quire_kernels::backend::RopeStyle;

use super::config::Config;
use crate::model::{
    description::{
        LongRope, Rope,
        limits::CONTEXT,
        rope::{Llama3, Yarn, frequencies, narrow},
    },
    error::ContentError,
};

/// What holds where the file is silent.
#[derive(Clone, Copy)]
pub struct Defaults<'a> {
    pub style: RopeStyle,
    pub base: f64,
    /// Share of a head that turns.
    pub share: f64,
    /// Where older files keep the base of this kind of layer.
    pub base_key: &'a str,
    /// Does `rope_scaling` of older files hold for this kind of layer?
    pub scaled: bool,
}

impl Default for Defaults<'_> {
    fn default() -> Self {
        Self { style: RopeStyle::Half, base: 10_000.0, share: 1.0, base_key: "rope_theta", scaled: true }
    }
}

/// The parameters of a kind of layer: nested, flat, or an older file's `rope_scaling`.
fn parameters<'a>(config: &Config<'a>, kind: &'a str, scaled: bool) -> Result<Option<Config<'a>>, ContentError> {
    if let Some(all) = config.object("rope_parameters")? {
        if all.get(kind).is_some() {
            return all.object(kind);
        }
        return Ok(Some(all));
    }
    if scaled { config.object("rope_scaling") } else { Ok(None) }
}

/// The rotation of layers of `kind` (`full_attention`, `sliding_attention`).
pub fn read<'a>(config: &Config<'a>, kind: &'a str, head_dim: usize, defaults: &Defaults<'_>) -> Result<Rope, ContentError> {
    let given = parameters(config, kind, defaults.scaled)?;
    let own = |key: &str| given.map_or(Ok(None), |given| given.positive(key));
    let base = match own("rope_theta")? {
        Some(base) => base,
        None => match config.positive(defaults.base_key)? {
            Some(base) => base,
            None => config.positive("rotary_emb_base")?.unwrap_or(defaults.base),
        },
    };
    let share = match own("partial_rotary_factor")? {
        Some(share) => share,
        None => match config.positive("partial_rotary_factor")? {
            Some(share) => share,
            None => config.positive("rotary_pct")?.unwrap_or(defaults.share),
        },
    };
    let mut dim = (head_dim as f64 * share) as usize;
    if let Some(turning) = config.size("rotary_dim", head_dim as u64)? {
        dim = turning;
    }
    let scaling = match given {
        Some(given) => Scaling::read(config, given)?,
        None => Scaling::Plain,
    };
    if matches!(scaling, Scaling::Proportional { .. }) {
        return Ok(proportional(defaults.style, head_dim, dim, base, &scaling));
    }
    if dim == 0 || dim > head_dim || !dim.is_multiple_of(2) {
        return Err(config.error("partial_rotary_factor", format!("asks for {dim} turning elements of {head_dim}")));
    }
    scaling.rope(config, defaults.style, dim, base)
}

/// The first pairs turn, at the speeds of a whole head; the others stand still.
fn proportional(style: RopeStyle, head_dim: usize, dim: usize, base: f64, scaling: &Scaling) -> Rope {
    let factor = if let Scaling::Proportional { factor } = scaling { *factor } else { 1.0 };
    let mut values = frequencies(head_dim, base);
    for (i, value) in values.iter_mut().enumerate() {
        *value = if i < dim / 2 { *value / factor } else { 0.0 };
    }
    Rope { style, frequencies: narrow(&values), magnitude: 1.0, long: None }
}

enum Scaling {
    Plain,
    Linear(f64),
    Llama3(Llama3),
    Yarn(Yarn, f64),
    Long { short: Vec<f64>, long: Vec<f64>, original: usize, magnitude: f64 },
    Proportional { factor: f64 },
}

impl Scaling {
    fn read(config: &Config<'_>, given: Config<'_>) -> Result<Self, ContentError> {
        let kind = match given.text("rope_type")? {
            Some(kind) => kind,
            None => given.text("type")?.unwrap_or("default"),
        };
        let needed = |key: &str| given.needed(key, given.positive(key)?);
        match kind {
            // `dynamic` changes nothing within the trained context, and `mrope` nothing for text.
            "default" | "dynamic" | "mrope" => Ok(Self::Plain),
            "linear" => Ok(Self::Linear(needed("factor")?)),
            "proportional" => Ok(Self::Proportional { factor: given.positive("factor")?.unwrap_or(1.0) }),
            "llama3" => Ok(Self::Llama3(Llama3 {
                factor: needed("factor")?,
                low_frequency_factor: needed("low_freq_factor")?,
                high_frequency_factor: needed("high_freq_factor")?,
                original_context: original(config, given)? as f64,
            })),
            "yarn" => Self::yarn(config, given),
            "longrope" | "su" => Self::long(config, given),
            other => Err(given.error(
                "rope_type",
                format!(
                    "is `{}`, which is not supported; supported: default, linear, dynamic, llama3, yarn, longrope, proportional",
                    crate::model::gguf::clip(other)
                ),
            )),
        }
    }

    fn yarn(config: &Config<'_>, given: Config<'_>) -> Result<Self, ContentError> {
        let original = original(config, given)?;
        let factor = match given.positive("factor")? {
            Some(factor) => factor,
            None => trained(config)? as f64 / original as f64,
        };
        let scale = |key: &str| Ok::<_, ContentError>(given.float(key)?.filter(|scale| *scale != 0.0));
        let magnitude = match (given.positive("attention_factor")?, scale("mscale")?, scale("mscale_all_dim")?) {
            (Some(factor), ..) => factor,
            (None, Some(scale), Some(all)) => Yarn::magnitude(factor, scale) / Yarn::magnitude(factor, all),
            _ => Yarn::magnitude(factor, 1.0),
        };
        let yarn = Yarn {
            factor,
            beta_fast: given.positive("beta_fast")?.unwrap_or(32.0),
            beta_slow: given.positive("beta_slow")?.unwrap_or(1.0),
            original_context: original as f64,
            truncate: given.flag("truncate", true)?,
        };
        Ok(Self::Yarn(yarn, magnitude))
    }

    fn long(config: &Config<'_>, given: Config<'_>) -> Result<Self, ContentError> {
        let original = original(config, given)?;
        let factor = match given.positive("factor")? {
            Some(factor) => factor,
            None => trained(config)? as f64 / original as f64,
        };
        let magnitude = match given.positive("attention_factor")? {
            Some(magnitude) => magnitude,
            None if factor <= 1.0 => 1.0,
            None => (1.0 + factor.ln() / (original as f64).ln()).sqrt(),
        };
        let factors = |key: &str| {
            let factors = given.needed(key, given.floats(key)?)?;
            match factors.iter().all(|factor| *factor > 0.0) {
                true => Ok(factors),
                false => Err(given.error(key, "holds a factor that is not above 0")),
            }
        };
        Ok(Self::Long { short: factors("short_factor")?, long: factors("long_factor")?, original, magnitude })
    }

    fn rope(self, config: &Config<'_>, style: RopeStyle, dim: usize, base: f64) -> Result<Rope, ContentError> {
        let mut values = frequencies(dim, base);
        let mut magnitude = 1.0;
        let mut long_values = None;
        match self {
            Self::Plain | Self::Proportional { .. } => {}
            Self::Linear(factor) => values.iter_mut().for_each(|value| *value /= factor),
            Self::Llama3(llama) => llama.apply(&mut values),
            Self::Yarn(yarn, scale) => {
                yarn.apply(&mut values, base);
                magnitude = scale;
            }
            Self::Long { short, long, original, magnitude: scale } => {
                for (key, factors) in [("short_factor", &short), ("long_factor", &long)] {
                    if factors.len() != values.len() {
                        return Err(config.error(key, format!("has {} factors for {} pairs", factors.len(), values.len())));
                    }
                }
                let divided = |factors: &[f64]| values.iter().zip(factors).map(|(value, factor)| value / factor).collect::<Vec<_>>();
                long_values = Some(LongRope { above: original, frequencies: narrow(&divided(&long)) });
                values = divided(&short);
                magnitude = scale;
            }
        }
        Ok(Rope { style, frequencies: narrow(&values), magnitude: magnitude as f32, long: long_values })
    }
}

/// Context of the pre-training that a scaling starts from.
pub fn original(config: &Config<'_>, given: Config<'_>) -> Result<usize, ContentError> {
    const KEY: &str = "original_max_position_embeddings";
    match config.size(KEY, CONTEXT)? {
        Some(original) => Ok(original),
        None => match given.size(KEY, CONTEXT)? {
            Some(original) => Ok(original),
            None => trained(config),
        },
    }
}

fn trained(config: &Config<'_>) -> Result<usize, ContentError> {
    config.needed_size("max_position_embeddings", CONTEXT)
}

/// YaRN's factor for the scale of attention, where a family applies it there: (0.1 · `mscale_all_dim` · ln factor + 1)².
pub fn attention_factor(config: &Config<'_>) -> Result<f64, ContentError> {
    let Some(given) = parameters(config, "full_attention", true)? else { return Ok(1.0) };
    let kind = given.text("rope_type")?.or(given.text("type")?).unwrap_or("default");
    match (kind, given.float("mscale_all_dim")?, given.positive("factor")?) {
        ("default", ..) => Ok(1.0),
        (_, Some(scale), Some(factor)) if scale != 0.0 => Ok(Yarn::magnitude(factor, scale).powi(2)),
        _ => Ok(1.0),
    }
}

/// A number beside the rotation's parameters, with its scaling's original context.
pub fn beside<'a>(config: &Config<'a>, key: &str) -> Result<Option<(f64, usize)>, ContentError> {
    let Some(given) = parameters(config, "full_attention", true)? else { return Ok(None) };
    match given.float(key)? {
        Some(value) => Ok(Some((value, original(config, given)?))),
        None => Ok(None),
    }
}
