//! Which type each tensor gets: mixtures as llama.cpp chooses them, so that files of the same name are of the same kind.

use quire_kernels::quant::TensorType;

/// What a file is called: its general type, and for the K types how many tensors get more bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(non_camel_case_types)]
pub enum Mix {
    Plain(TensorType),
    Q2_K_S,
    Q2_K,
    Q3_K_S,
    Q3_K_M,
    Q3_K_L,
    Q4_K_S,
    Q4_K_M,
    Q5_K_S,
    Q5_K_M,
    /// Experts in MXFP4, all else in Q8_0.
    Mxfp4Moe,
}

/// Name, mix, its number in `general.file_type`.
const NAMES: &[(&str, Mix, u32)] = &[
    ("f32", Mix::Plain(TensorType::F32), 0),
    ("f16", Mix::Plain(TensorType::F16), 1),
    ("bf16", Mix::Plain(TensorType::BF16), 32),
    ("q8_0", Mix::Plain(TensorType::Q8_0), 7),
    ("q6_k", Mix::Plain(TensorType::Q6_K), 18),
    ("q5_k_m", Mix::Q5_K_M, 17),
    ("q5_k_s", Mix::Q5_K_S, 16),
    ("q5_1", Mix::Plain(TensorType::Q5_1), 9),
    ("q5_0", Mix::Plain(TensorType::Q5_0), 8),
    ("q4_k_m", Mix::Q4_K_M, 15),
    ("q4_k_s", Mix::Q4_K_S, 14),
    ("q4_1", Mix::Plain(TensorType::Q4_1), 3),
    ("q4_0", Mix::Plain(TensorType::Q4_0), 2),
    ("iq4_nl", Mix::Plain(TensorType::IQ4_NL), 25),
    ("iq4_xs", Mix::Plain(TensorType::IQ4_XS), 30),
    ("mxfp4_moe", Mix::Mxfp4Moe, 38),
    ("q3_k_l", Mix::Q3_K_L, 13),
    ("q3_k_m", Mix::Q3_K_M, 12),
    ("q3_k_s", Mix::Q3_K_S, 11),
    ("q2_k", Mix::Q2_K, 10),
    ("q2_k_s", Mix::Q2_K_S, 21),
];

impl Mix {
    /// By its name, in any case; `q4_k` and the like mean the middle one.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        let name = name.to_ascii_lowercase();
        let name = match name.as_str() {
            "q3_k" | "q4_k" | "q5_k" => format!("{name}_m"),
            "mxfp4" => "mxfp4_moe".to_owned(),
            _ => name,
        };
        NAMES.iter().find(|(known, ..)| *known == name).map(|(_, mix, _)| *mix)
    }

    /// All names, largest files first.
    pub fn names() -> impl Iterator<Item = &'static str> {
        NAMES.iter().map(|(name, ..)| *name)
    }

    /// The number of `general.file_type`.
    #[must_use]
    pub fn file_type(self) -> u32 {
        NAMES.iter().find(|(_, mix, _)| *mix == self).map_or(0, |(.., number)| *number)
    }

    #[must_use]
    pub fn name(self) -> &'static str {
        NAMES.iter().find(|(_, mix, _)| *mix == self).map_or("?", |(name, ..)| name)
    }

    /// What most tensors get.
    #[must_use]
    pub fn general(self) -> TensorType {
        match self {
            Self::Plain(tensor_type) => tensor_type,
            Self::Q2_K_S | Self::Q2_K => TensorType::Q2_K,
            Self::Q3_K_S | Self::Q3_K_M | Self::Q3_K_L => TensorType::Q3_K,
            Self::Q4_K_S | Self::Q4_K_M => TensorType::Q4_K,
            Self::Q5_K_S | Self::Q5_K_M => TensorType::Q5_K,
            Self::Mxfp4Moe => TensorType::MXFP4,
        }
    }
}

/// What the choice depends on besides the tensor.
#[derive(Clone, Debug, Default)]
pub struct ModelFacts {
    pub architecture: String,
    pub layers: usize,
    pub experts: usize,
    /// Query heads per key and value head.
    pub heads_per_kv: usize,
    pub tied_embeddings: bool,
    /// Tensors like attn_v, which are counted in the order of layers.
    pub values: usize,
    pub importance: bool,
}

/// A chooser of types; tensors are asked for in the order of layers.
#[derive(Debug)]
pub struct Choice<'f> {
    mix: Mix,
    facts: &'f ModelFacts,
    values_seen: usize,
    downs_seen: usize,
}

/// Is it a matrix that anyone quantises? `rank`: dimensions that the file names.
#[must_use]
pub fn is_quantised(name: &str, rank: usize) -> bool {
    const KEPT: [&str; 12] = [
        "_norm.weight",
        "ffn_gate_inp",
        "altup",
        "laurel",
        "per_layer_model_proj",
        "position_embd",
        "token_types",
        "ssm_conv1d",
        "shortconv.conv",
        "time_mix_",
        "attn_rel_b",
        "rope_f",
    ];
    rank >= 2 && name.ends_with("weight") && !KEPT.iter().any(|kept| name.contains(kept))
}

/// Like attn_v: few values, on which much depends.
#[must_use]
pub fn is_value(name: &str) -> bool {
    ["attn_v.weight", "attn_qkv.weight", "attn_kv_b.weight"].iter().any(|part| name.contains(part))
}

/// The layer of `blk.7.…`; other tensors come before all layers.
#[must_use]
pub fn layer_of(name: &str) -> Option<usize> {
    name.strip_prefix("blk.")?.split('.').next()?.parse().ok()
}

impl<'f> Choice<'f> {
    #[must_use]
    pub fn new(mix: Mix, facts: &'f ModelFacts) -> Self {
        Self { mix, facts, values_seen: 0, downs_seen: 0 }
    }

    /// The type of the next tensor; `columns` long rows, `experts` of such matrices.
    pub fn next(&mut self, name: &str, columns: usize, stacked: bool) -> TensorType {
        let wanted = if self.mix.general().is_float() { self.mix.general() } else { self.mixed(name, columns, stacked) };
        fallback(wanted, columns)
    }

    fn mixed(&mut self, name: &str, columns: usize, stacked: bool) -> TensorType {
        use TensorType::{MXFP4, Q6_K, Q8_0};
        let general = self.mix.general();
        let embedding = name == "token_embd.weight" || name == "per_layer_token_embd.weight";
        if name == "output.weight" || (embedding && self.facts.tied_embeddings) {
            let fits = columns.is_multiple_of(general.block_len());
            let large = self.mix == Mix::Mxfp4Moe || self.facts.architecture == "falcon" || !fits || general == Q8_0;
            return if large { Q8_0 } else { Q6_K };
        }
        if self.mix == Mix::Mxfp4Moe {
            return if stacked { MXFP4 } else { Q8_0 };
        }
        if embedding {
            return general;
        }
        if is_value(name) {
            return self.value(name);
        }
        if name.contains("attn_k.weight") && self.facts.experts == 8 {
            return Q8_0;
        }
        if name.contains("ffn_down") {
            return self.down(name);
        }
        if name.contains("attn_output.weight") {
            return self.attention_output();
        }
        general
    }

    fn value(&mut self, name: &str) -> TensorType {
        use TensorType::{Q3_K, Q4_K, Q5_K, Q6_K, Q8_0};
        let (index, shared) = (self.values_seen, self.facts.heads_per_kv >= 4);
        self.values_seen += 1;
        let fused = name.contains("attn_qkv");
        let chosen = match self.mix {
            Mix::Q2_K => {
                if shared {
                    Q4_K
                } else {
                    Q3_K
                }
            }
            Mix::Q2_K_S if shared => Q4_K,
            Mix::Q3_K_M => {
                if index < 2 {
                    Q5_K
                } else {
                    Q4_K
                }
            }
            Mix::Q3_K_L => Q5_K,
            Mix::Q4_K_M | Mix::Q5_K_M if more_bits(index, self.facts.values) => Q6_K,
            Mix::Q4_K_S if index < 4 => Q5_K,
            Mix::Plain(TensorType::IQ4_NL | TensorType::IQ4_XS) if shared => Q5_K,
            _ => self.mix.general(),
        };
        let large = self.facts.layers == 80 && shared && matches!(chosen, Q3_K | Q4_K);
        if self.facts.experts == 8 {
            Q8_0
        } else if large && !fused {
            Q5_K
        } else {
            chosen
        }
    }

    fn down(&mut self, name: &str) -> TensorType {
        use TensorType::{Q3_K, Q4_1, Q4_K, Q5_1, Q5_K, Q6_K};
        let counted = self.downs_seen;
        self.downs_seen += 1;
        let layers = self.facts.layers;
        // A layer with experts may have several.
        let layer = if self.facts.experts > 1 { layer_of(name).unwrap_or(counted) } else { counted };
        let falcon = self.facts.architecture == "falcon";
        match self.mix {
            Mix::Q2_K => Q3_K,
            Mix::Q2_K_S if layer < layers / 8 => Q4_K,
            Mix::Q3_K_M if layer < layers / 16 => Q5_K,
            Mix::Q3_K_M if !falcon || more_bits(layer, layers) => Q4_K,
            Mix::Q3_K_L => {
                if falcon {
                    Q4_K
                } else {
                    Q5_K
                }
            }
            Mix::Q4_K_M if falcon && layer >= layers / 16 => {
                if more_bits(layer, layers) {
                    Q5_K
                } else {
                    Q4_K
                }
            }
            Mix::Q4_K_M if falcon || more_bits(layer, layers) => Q6_K,
            Mix::Q5_K_M if more_bits(layer, layers) => Q6_K,
            Mix::Q4_K_S if !falcon && layer < layers / 8 => Q5_K,
            Mix::Plain(TensorType::IQ4_NL | TensorType::IQ4_XS) if layer < layers / 8 && !self.facts.importance => Q5_K,
            Mix::Plain(TensorType::Q4_0) if layer < layers / 8 && self.facts.importance => Q4_1,
            Mix::Plain(TensorType::Q5_0) if layer < layers / 8 && self.facts.importance => Q5_1,
            _ => self.mix.general(),
        }
    }

    fn attention_output(&self) -> TensorType {
        use TensorType::{Q3_K, Q4_K, Q5_K};
        let falcon = self.facts.architecture == "falcon";
        if !falcon && self.facts.experts == 8 {
            let few = matches!(self.mix, Mix::Q2_K | Mix::Q3_K_S | Mix::Q3_K_M | Mix::Q4_K_S | Mix::Q4_K_M)
                || matches!(self.mix, Mix::Plain(TensorType::IQ4_NL | TensorType::IQ4_XS));
            return if few { Q5_K } else { self.mix.general() };
        }
        match self.mix {
            Mix::Q2_K if !falcon => Q3_K,
            Mix::Q3_K_M if !falcon => Q4_K,
            Mix::Q3_K_L => {
                if falcon {
                    Q4_K
                } else {
                    Q5_K
                }
            }
            _ => self.mix.general(),
        }
    }
}

/// The first and the last eighth of the layers, and every third one between.
fn more_bits(layer: usize, layers: usize) -> bool {
    layer < layers / 8 || layer >= 7 * layers / 8 || (layer - layers / 8) % 3 == 2
}

/// A type of shorter blocks where rows are no whole number of the wanted ones.
#[must_use]
pub fn fallback(wanted: TensorType, columns: usize) -> TensorType {
    use TensorType::{F16, IQ4_NL, IQ4_XS, Q2_K, Q3_K, Q4_0, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0};
    if columns.is_multiple_of(wanted.block_len()) {
        return wanted;
    }
    let shorter = match wanted {
        IQ4_XS => IQ4_NL,
        Q2_K | Q3_K => Q4_0,
        Q4_K => Q5_0,
        Q5_K => Q5_1,
        Q6_K => Q8_0,
        other => other,
    };
    if columns.is_multiple_of(shorter.block_len()) { shorter } else { F16 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        for (name, mix, number) in NAMES {
            assert_eq!((Mix::from_name(name), mix.name(), mix.file_type()), (Some(*mix), *name, *number));
        }
        assert_eq!(Mix::from_name("Q4_K"), Some(Mix::Q4_K_M));
        assert_eq!(Mix::from_name("iq1_s"), None);
    }

    #[test]
    fn the_middle_mixture_of_thirty_two_layers() {
        let facts = ModelFacts { layers: 32, values: 32, heads_per_kv: 4, experts: 0, ..ModelFacts::default() };
        let mut choice = Choice::new(Mix::Q4_K_M, &facts);
        let large: Vec<usize> =
            (0..32).filter(|layer| choice.next(&format!("blk.{layer}.attn_v.weight"), 4096, false) == TensorType::Q6_K).collect();
        assert_eq!(large, [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]);
        assert_eq!(choice.next("output.weight", 4096, false), TensorType::Q6_K);
        assert_eq!(choice.next("token_embd.weight", 4096, false), TensorType::Q4_K);
        assert_eq!(choice.next("blk.0.attn_q.weight", 4096, false), TensorType::Q4_K);
        // Rows of 576 are no whole blocks of 256.
        assert_eq!(choice.next("blk.0.attn_q.weight", 576, false), TensorType::Q5_0);
        assert_eq!(choice.next("output.weight", 576, false), TensorType::Q8_0);
        assert_eq!(choice.next("blk.0.attn_q.weight", 30, false), TensorType::F16);
    }

    #[test]
    fn what_stays_as_it_is() {
        assert!(is_quantised("blk.0.ffn_gate.weight", 2) && is_quantised("blk.0.ffn_up_exps.weight", 3));
        for (name, rank) in [("output_norm.weight", 1), ("blk.0.attn_q_norm.weight", 2), ("blk.0.ffn_gate_inp.weight", 2), ("a.bias", 2)] {
            assert!(!is_quantised(name, rank), "{name}");
        }
        assert_eq!((layer_of("blk.17.attn_v.weight"), layer_of("output.weight")), (Some(17), None));
    }
}
