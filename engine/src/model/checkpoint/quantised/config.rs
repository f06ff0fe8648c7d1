//! `quantization_config`: which layout, and what its tensors do not say themselves.

use std::fmt;

use serde_json::{Map, Value};

use crate::model::{ContentError, gguf::clip};

/// A family of layouts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    Gptq,
    Awq,
    CompressedTensors,
    /// Scales beside 8-bit weights, whoever wrote them.
    Scaled,
    Mxfp4,
}

impl fmt::Display for Method {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Gptq => "gptq",
            Self::Awq => "awq",
            Self::CompressedTensors => "compressed-tensors",
            Self::Scaled => "fp8",
            Self::Mxfp4 => "mxfp4",
        })
    }
}

/// What `config.json` says of a checkpoint's quantisation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuantConfig {
    pub method: Method,
    /// Bits of a value, where the config has one for all.
    pub bits: Option<u32>,
    /// GPTQ's first format stores zero points less one.
    pub zeros_less_one: bool,
    /// Rows and columns that share a scale, where those are blocks.
    pub block: Option<[usize; 2]>,
}

const KEY: &str = "quantization_config";
const SUPPORTED: &str = "gptq, awq, compressed-tensors, fp8, fbgemm_fp8, modelopt, mxfp4";

impl QuantConfig {
    /// From `config.json`; none: the weights are plain.
    ///
    /// # Errors
    /// Names the field and what is possible there.
    pub fn from_config(config: &Map<String, Value>) -> Result<Option<Self>, ContentError> {
        match config.get(KEY).or_else(|| config.get("compression_config")) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Object(quantization)) => Self::from_quantization(quantization).map(Some),
            Some(_) => Err(fail("is not an object")),
        }
    }

    /// From the object itself, as it stands in `config.json`, `quantize_config.json` or `quant_config.json`.
    pub fn from_quantization(quantization: &Map<String, Value>) -> Result<Self, ContentError> {
        let text = |key: &str| quantization.get(key).and_then(Value::as_str);
        let has = |key: &str| quantization.contains_key(key);
        let method = match text("quant_method") {
            Some(name) => name.to_ascii_lowercase(),
            // Files of their own name no method.
            None if has("w_bit") || has("q_group_size") => "awq".to_owned(),
            None if has("desc_act") => "gptq".to_owned(),
            None if has("config_groups") => "compressed-tensors".to_owned(),
            None => return Err(fail(format!("has no `quant_method`; supported: {SUPPORTED}"))),
        };
        let bits = ["bits", "w_bit"].iter().find_map(|key| quantization.get(*key).and_then(Value::as_u64)).map(|bits| bits as u32);
        let mut found = Self { method: Method::Scaled, bits, zeros_less_one: false, block: block(quantization.get("weight_block_size"))? };
        found.method = match method.as_str() {
            "gptq" => {
                found.zeros_less_one = match text("checkpoint_format").unwrap_or("gptq") {
                    "gptq" => true,
                    "gptq_v2" => false,
                    other => return Err(fail(format!("has the `checkpoint_format` `{}`; supported: gptq, gptq_v2", clip(other)))),
                };
                Method::Gptq
            }
            "awq" => {
                let version = text("version").unwrap_or("gemm");
                if !version.eq_ignore_ascii_case("gemm") {
                    return Err(fail(format!("has the AWQ `version` `{}`; supported: gemm", clip(version))));
                }
                Method::Awq
            }
            "compressed-tensors" | "compressed_tensors" => {
                found.compressed(quantization)?;
                Method::CompressedTensors
            }
            "fp8" | "fbgemm_fp8" | "modelopt" | "modelopt_fp4" => Method::Scaled,
            "mxfp4" => Method::Mxfp4,
            other => return Err(fail(format!("has the `quant_method` `{}`; supported: {SUPPORTED}", clip(other)))),
        };
        if let Some(bits) = found.bits.filter(|bits| !matches!(bits, 2..=4 | 8)) {
            return Err(fail(format!("has weights of {bits} bits; supported: 2, 3, 4, 8")));
        }
        Ok(found)
    }

    /// The groups of a compressed-tensors config: bits and blocks, if all agree.
    fn compressed(&mut self, quantization: &Map<String, Value>) -> Result<(), ContentError> {
        const FORMATS: [&str; 8] = [
            "dense",
            "pack-quantized",
            "int-quantized",
            "float-quantized",
            "naive-quantized",
            "nvfp4-pack-quantized",
            "mxfp4-pack-quantized",
            "mixed-precision",
        ];
        let groups = quantization.get("config_groups").and_then(Value::as_object);
        let own = quantization.get("format");
        for format in own.into_iter().chain(groups.into_iter().flat_map(|groups| groups.values().filter_map(|group| group.get("format")))) {
            match format {
                Value::Null => {}
                Value::String(format) if FORMATS.contains(&format.as_str()) => {}
                other => {
                    return Err(fail(format!("has the `format` {}; supported: {}", clip(&other.to_string()), FORMATS.join(", "))));
                }
            }
        }
        let sparsity = quantization.get("sparsity_config").and_then(|sparsity| sparsity.get("format")).and_then(Value::as_str);
        if let Some(format) = sparsity.filter(|format| *format != "dense") {
            return Err(fail(format!("has the sparse `format` `{}`, which is not supported", clip(format))));
        }
        let weights: Vec<&Value> = groups.into_iter().flat_map(|groups| groups.values().filter_map(|group| group.get("weights"))).collect();
        let bits: Vec<u64> = weights.iter().filter_map(|weights| weights.get("num_bits").and_then(Value::as_u64)).collect();
        self.bits = bits.first().filter(|first| bits.iter().all(|bits| bits == *first)).map(|bits| *bits as u32);
        for weights in weights {
            self.block = self.block.or(block(weights.get("block_structure"))?);
        }
        Ok(())
    }
}

fn block(value: Option<&Value>) -> Result<Option<[usize; 2]>, ContentError> {
    let Some(value) = value.filter(|value| !value.is_null()) else { return Ok(None) };
    let sizes: Option<Vec<usize>> = match value {
        Value::Array(sizes) => sizes.iter().map(|size| size.as_u64().and_then(|size| usize::try_from(size).ok())).collect(),
        Value::String(text) => text.split('x').map(|size| size.parse().ok()).collect(),
        _ => None,
    };
    match sizes.as_deref() {
        Some(&[rows, columns]) if rows > 0 && columns > 0 => Ok(Some([rows, columns])),
        _ => Err(fail(format!("has the block {}; it needs two sizes of 1 or more", clip(&value.to_string())))),
    }
}

fn fail(problem: impl AsRef<str>) -> ContentError {
    ContentError::Model(format!("config.json: `{KEY}` {}", problem.as_ref()))
}
