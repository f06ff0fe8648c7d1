//! Metadata of a GGUF file → description and tensor names, as llama.cpp's converter writes them.
//!
//! What the metadata does not say (which rotation, which layers have a window, whether embeddings are scaled) follows from
//! the architecture's name. Norm weights of Gemma 1 to 3 hold their 1 already; queries and keys of Llama-like
//! architectures are permuted so that neighbours turn together; parts of fused tensors lie one below the other.

mod families;
mod keys;

use families::FAMILIES;
use keys::Keys;

use super::{
    Description, TensorMap,
    names::Role::{self, *},
};
use crate::model::{
    error::ContentError,
    gguf::{Gguf, GgufError, clip},
};

/// Names that are the same in all architectures.
const NAMES: &[(Role, &str)] = &[
    (Embedding, "token_embd"),
    (Positions, "position_embd"),
    (OutputNorm, "output_norm"),
    (Output, "output"),
    (AttentionNorm, "attn_norm"),
    (Query, "attn_q"),
    (Key, "attn_k"),
    (Value, "attn_v"),
    (QueryKeyValue, "attn_qkv"),
    (QueryNorm, "attn_q_norm"),
    (KeyNorm, "attn_k_norm"),
    (QueryDown, "attn_q_a"),
    (QueryDownNorm, "attn_q_a_norm"),
    (QueryUp, "attn_q_b"),
    (LatentDown, "attn_kv_a_mqa"),
    (LatentNorm, "attn_kv_a_norm"),
    (LatentUp, "attn_kv_b"),
    (LatentUpKey, "attn_k_b"),
    (LatentUpValue, "attn_v_b"),
    (Sinks, "attn_sinks"),
    (AttentionOutput, "attn_output"),
    (AttentionBranchNorm, "post_attention_norm"),
    (FeedForwardNorm, "ffn_norm"),
    (Gate, "ffn_gate"),
    (Up, "ffn_up"),
    (Down, "ffn_down"),
    (FeedForwardBranchNorm, "post_ffw_norm"),
    (RouterWeight, "ffn_gate_inp"),
    (RouterCorrection, "exp_probs_b"),
    (ExpertGate, "ffn_gate_exps"),
    (ExpertUp, "ffn_up_exps"),
    (ExpertDown, "ffn_down_exps"),
    (SharedGate, "ffn_gate_shexp"),
    (SharedUp, "ffn_up_shexp"),
    (SharedDown, "ffn_down_shexp"),
    (RowGate, "ffn_gate_inp_shexp"),
];

/// Tables of rotations, which are part of the description, and those of very old converters.
const IGNORED: &[&str] = &["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight", ".attn_rot_embd.weight"];

/// Translates and checks a file's metadata.
///
/// # Errors
/// An architecture that is not supported; a key that is missing, of the wrong kind or at odds with another.
pub fn translate(gguf: &Gguf<'_>) -> Result<(Description, TensorMap), ContentError> {
    let Some(architecture) = gguf.metadata.string("general.architecture")? else {
        return Err(ContentError::Model("the key `general.architecture` is missing: this is not a model".to_owned()));
    };
    let Some(family) = FAMILIES.iter().find(|family| family.name == architecture) else {
        let known: Vec<&str> = FAMILIES.iter().map(|family| family.name).collect();
        let problem = format!("architecture `{}` is not supported; supported: {}", clip(architecture), known.join(", "));
        return Err(ContentError::Model(problem));
    };
    let keys = Keys { gguf, architecture };
    let mut tensors = TensorMap::new("", "blk.{}.", &[NAMES]);
    tensors.ignored.extend(IGNORED.iter().map(|&name| name.to_owned()));
    let description = family.describe(&keys, &mut tensors)?;
    Ok((description, tensors))
}

/// The number of tokens; what the tables have beyond it is padding, which must never be drawn.
fn vocabulary(gguf: &Gguf<'_>) -> Result<usize, ContentError> {
    const TABLE: &str = "token_embd.weight";
    let table = gguf.tensor(TABLE).ok_or_else(|| GgufError::tensor(TABLE, "is missing: the file holds no weights, or not all"))?;
    let rows = table.rows();
    match gguf.metadata.get("tokenizer.ggml.tokens").map(|tokens| tokens.count) {
        Some(tokens) if tokens > rows => {
            Err(GgufError::tensor(TABLE, format!("has {rows} rows for the {tokens} tokens of the tokenizer")).into())
        }
        Some(tokens) if tokens > 0 => Ok(tokens),
        _ => Ok(rows),
    }
}
