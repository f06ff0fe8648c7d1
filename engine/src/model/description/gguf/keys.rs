//! Metadata of one architecture, checked.

use quire_kernels::backend::RopeStyle;

use crate::model::{
    description::{
        LongRope, Norm, Rope,
        limits::{CONTEXT, WIDTH},
        rope::{Yarn, frequencies, narrow},
    },
    error::ContentError,
    gguf::{Gguf, GgufError},
};

/// Keys that begin with the architecture's name.
pub struct Keys<'g, 'a> {
    pub gguf: &'g Gguf<'a>,
    pub architecture: &'g str,
}

impl<'g, 'a> Keys<'g, 'a> {
    pub fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    pub fn error(&self, key: &str, problem: impl Into<String>) -> ContentError {
        GgufError::key(&self.name(key), problem).into()
    }

    /// A number above 0.
    pub fn positive(&self, key: &str) -> Result<Option<f64>, GgufError> {
        match self.gguf.metadata.float(&self.name(key))? {
            Some(value) if !value.is_finite() || value <= 0.0 => {
                Err(GgufError::key(&self.name(key), format!("is {value}; it should be above 0")))
            }
            value => Ok(value.map(f64::from)),
        }
    }

    pub fn boolean(&self, key: &str) -> Result<Option<bool>, GgufError> {
        self.gguf.metadata.boolean(&self.name(key))
    }

    /// Sizes per layer: from an array, or one for all.
    pub fn sizes(&self, key: &str, layers: usize, least: u64, most: u64) -> Result<Option<Vec<usize>>, GgufError> {
        let name = self.name(key);
        let Some(values) = self.gguf.metadata.unsigneds(&name)? else { return Ok(None) };
        if let Some(wrong) = values.iter().find(|value| !(least..=most).contains(value)) {
            return Err(GgufError::key(&name, format!("is {wrong}; it should lie between {least} and {most}")));
        }
        match values[..] {
            [one] => Ok(Some(vec![one as usize; layers])),
            _ if values.len() == layers => Ok(Some(values.iter().map(|value| *value as usize).collect())),
            _ => Err(GgufError::key(&name, format!("has {} values for {layers} layers", values.len()))),
        }
    }

    /// A size between 1 and `most`, which may be given per layer if it is the same in all.
    pub fn size(&self, key: &str, most: u64) -> Result<Option<usize>, GgufError> {
        self.whole(key, 1, most)
    }

    pub fn whole(&self, key: &str, least: u64, most: u64) -> Result<Option<usize>, GgufError> {
        let name = self.name(key);
        let Some(values) = self.gguf.metadata.unsigneds(&name)? else { return Ok(None) };
        let Some(&first) = values.first() else { return Err(GgufError::key(&name, "is an empty array")) };
        if values.iter().any(|value| *value != first) {
            return Err(GgufError::key(&name, "differs from layer to layer, which is not supported for this architecture"));
        }
        if !(least..=most).contains(&first) {
            return Err(GgufError::key(&name, format!("is {first}; it should lie between {least} and {most}")));
        }
        Ok(Some(first as usize))
    }

    pub fn needed<T>(&self, key: &str, value: Option<T>) -> Result<T, GgufError> {
        value.ok_or_else(|| GgufError::key(&self.name(key), "is missing"))
    }

    pub fn needed_size(&self, key: &str, most: u64) -> Result<usize, GgufError> {
        self.needed(key, self.size(key, most)?)
    }

    pub fn has_tensor(&self, name: &str) -> bool {
        self.gguf.tensor(name).is_some()
    }

    /// The norm by its epsilon's key.
    pub fn rms(&self) -> Result<Norm, GgufError> {
        const KEY: &str = "attention.layer_norm_rms_epsilon";
        Ok(Norm::rms(self.needed(KEY, self.positive(KEY)?)? as f32))
    }

    pub fn layer_norm(&self) -> Result<Norm, GgufError> {
        const KEY: &str = "attention.layer_norm_epsilon";
        Ok(Norm::layer(self.needed(KEY, self.positive(KEY)?)? as f32))
    }

    /// The rotation of layers without a window.
    pub fn rope(&self, head_dim: usize, style: RopeStyle) -> Result<Rope, ContentError> {
        const DIM: &str = "rope.dimension_count";
        let dim = self.size(DIM, WIDTH)?.unwrap_or(head_dim);
        if dim > head_dim || !dim.is_multiple_of(2) {
            return Err(self.error(DIM, format!("is {dim} for heads of {head_dim}")));
        }
        let base = self.positive("rope.freq_base")?.unwrap_or(10_000.0);
        let mut values = frequencies(dim, base);
        let mut magnitude = self.positive("rope.scaling.attn_factor")?.unwrap_or(1.0);
        match self.gguf.metadata.string(&self.name("rope.scaling.type"))? {
            // Files before `scaling.type` had the factor alone.
            None => self.linear("rope.scale_linear", &mut values)?,
            Some("none" | "longrope") => {}
            Some("linear") => self.linear("rope.scaling.factor", &mut values)?,
            Some("yarn") => magnitude *= self.yarn(base, &mut values)?,
            Some(other) => {
                let shown = crate::model::gguf::clip(other);
                let problem = format!("is `{shown}`, which is not supported; supported: none, linear, yarn, longrope");
                return Err(self.error("rope.scaling.type", problem));
            }
        }
        let divided = |name: &str| self.factors(name, &values);
        let long = divided("rope_factors_long.weight")?;
        let frequencies = match divided("rope_factors_short.weight")? {
            Some(short) => short,
            None => divided("rope_freqs.weight")?.unwrap_or_else(|| narrow(&values)),
        };
        let above = self.size("rope.scaling.original_context_length", CONTEXT)?;
        let long = match long {
            None => None,
            Some(frequencies) => {
                let above = self.needed("rope.scaling.original_context_length", above)?;
                Some(LongRope { above, frequencies })
            }
        };
        Ok(Rope { style, frequencies, magnitude: magnitude as f32, long })
    }

    fn linear(&self, key: &str, values: &mut [f64]) -> Result<(), ContentError> {
        let factor = self.positive(key)?.unwrap_or(1.0);
        values.iter_mut().for_each(|value| *value /= factor);
        Ok(())
    }

    /// YaRN; gives what multiplies cos and sin.
    fn yarn(&self, base: f64, values: &mut [f64]) -> Result<f64, ContentError> {
        let factor = self.needed("rope.scaling.factor", self.positive("rope.scaling.factor")?)?;
        const ORIGINAL: &str = "rope.scaling.original_context_length";
        let yarn = Yarn {
            factor,
            beta_fast: self.positive("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
            beta_slow: self.positive("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
            original_context: self.needed_size(ORIGINAL, CONTEXT)? as f64,
            // What no key says: gpt-oss was trained without.
            truncate: self.architecture != "gpt-oss",
        };
        yarn.apply(values, base);
        Ok(Yarn::magnitude(factor, 1.0))
    }

    /// Frequencies divided by a tensor's factors, if it is there.
    fn factors(&self, name: &str, values: &[f64]) -> Result<Option<Vec<f32>>, ContentError> {
        let Some(tensor) = self.gguf.tensor(name) else { return Ok(None) };
        let view = tensor.view()?;
        if view.rows * view.columns != values.len() {
            return Err(GgufError::tensor(name, format!("has {} factors for {} pairs", view.rows * view.columns, values.len())).into());
        }
        let mut factors = vec![0.0; values.len()];
        quire_kernels::quant::dequantize(view.tensor_type, view.data, &mut factors)?;
        if factors.iter().any(|factor| !factor.is_finite() || *factor <= 0.0) {
            return Err(GgufError::tensor(name, "holds a factor that is not a positive number").into());
        }
        Ok(Some(values.iter().zip(factors).map(|(value, factor)| (value / f64::from(factor)) as f32).collect()))
    }
}
