//! `config.json` of a Hugging Face checkpoint → description and tensor names.
//!
//! Reads both the older style (`rope_theta`, `rope_scaling`, `sliding_window_pattern`) and the newer (`rope_parameters`,
//! `layer_types`). One function a family; all of them start from a Llama or from [`base::describe`].

mod base;
mod config;
mod dense;
mod experts;
mod gemma;
mod latent;
mod names;
mod parallel;
mod rope;

pub use config::Config;

use super::{Description, TensorMap};
use crate::model::{error::ContentError, gguf::clip};

type Translate = for<'a> fn(&Config<'a>, &Checkpoint<'_>) -> Result<(Description, TensorMap), ContentError>;

/// `model_type` → translation.
const FAMILIES: &[(&str, Translate)] = &[
    ("llama", dense::llama),
    ("mistral", dense::mistral),
    ("ministral", dense::mistral),
    ("ministral3", dense::ministral3),
    ("qwen2", dense::qwen2),
    ("qwen3", dense::qwen3),
    ("granite", dense::granite),
    ("smollm3", dense::smollm3),
    ("phi3", dense::phi3),
    ("olmo2", dense::olmo2),
    ("olmo3", dense::olmo3),
    ("ernie4_5", dense::ernie),
    ("glm4", dense::glm4),
    ("gemma", gemma::gemma),
    ("gemma2", gemma::gemma2),
    ("gemma3_text", gemma::gemma3),
    ("gemma4_text", gemma::gemma4),
    ("phi", parallel::phi),
    ("cohere2", parallel::cohere2),
    ("gpt_neox", parallel::neox),
    ("falcon", parallel::falcon),
    ("gpt2", parallel::gpt2),
    ("starcoder2", parallel::starcoder2),
    ("stablelm", parallel::stablelm),
    ("mixtral", experts::mixtral),
    ("qwen2_moe", experts::qwen2_moe),
    ("qwen3_moe", experts::qwen3_moe),
    ("gpt_oss", experts::gpt_oss),
    ("glm4_moe", experts::glm4_moe),
    ("minimax_m2", experts::minimax_m2),
    ("mimo_v2_flash", experts::mimo_v2_flash),
    ("llama4_text", experts::llama4),
    ("deepseek_v2", latent::deepseek_v2),
    ("deepseek_v3", latent::deepseek_v3),
];

/// Known families, and what they need that is not there.
const MISSING: &[(&str, &str)] = &[
    ("bert", "it is an encoder, and only decoders are served yet"),
    ("roberta", "it is an encoder, and only decoders are served yet"),
    ("xlm-roberta", "it is an encoder, and only decoders are served yet"),
    ("modernbert", "it is an encoder, and only decoders are served yet"),
    ("nomic_bert", "it is an encoder, and only decoders are served yet"),
    ("deepseek_v4", "its compressed sparse attention and hyper-connections are not supported yet"),
    ("falcon_h1", "its state-space layers are not supported yet"),
    ("granitemoehybrid", "its state-space layers are not supported yet"),
    ("kimi_linear", "its linear attention is not supported yet"),
    ("lfm2", "its short convolutions are not supported yet"),
    ("mamba", "its state-space layers are not supported yet"),
    ("mamba2", "its state-space layers are not supported yet"),
    ("nemotron_h", "its state-space layers are not supported yet"),
    ("qwen3_5_text", "its linear attention is not supported yet"),
    ("qwen3_5_moe_text", "its linear attention is not supported yet"),
    ("qwen3_next", "its linear attention is not supported yet"),
];

/// Parts of multimodal checkpoints beside the language model, and buffers of old ones.
const IGNORED: &[&str] = &[
    "rotary_emb.inv_freq",
    "vision_tower.",
    "vision_model.",
    "visual.",
    "multi_modal_projector.",
    "audio_tower.",
    "embed_vision.",
    "embed_audio.",
];

/// Which tensors a checkpoint holds.
pub struct Checkpoint<'a> {
    architecture: &'a str,
    has: &'a dyn Fn(&str) -> bool,
}

impl Checkpoint<'_> {
    /// A tensor by its name without `.weight`.
    #[must_use]
    pub fn has_tensor(&self, name: &str) -> bool {
        (self.has)(&format!("{name}.weight")) || (self.has)(name)
    }

    /// The first prefix with which `probe` is there; the first of all if it is with none, so that the loader names it.
    #[must_use]
    pub fn prefix<'p>(&self, prefixes: &[&'p str], probe: &str) -> &'p str {
        let there = prefixes.iter().find(|prefix| self.has_tensor(&format!("{prefix}{probe}")));
        there.or(prefixes.first()).copied().unwrap_or("")
    }
}

/// Translates a parsed `config.json`; `has` says whether a tensor of that full name is there.
///
/// # Errors
/// A family that is not supported; a field that is missing, of the wrong kind or at odds with another.
pub fn translate(json: &serde_json::Value, has: &dyn Fn(&str) -> bool) -> Result<(Description, TensorMap), ContentError> {
    let Some(whole) = json.as_object() else {
        return Err(ContentError::Model("config.json: is not an object".to_owned()));
    };
    let whole = Config::new(whole);
    // A multimodal model: its language model alone.
    let text = whole.object("text_config")?;
    let config = match text {
        Some(text) if text.get("model_type").is_some() => text,
        _ => whole,
    };
    let family = config.needed("model_type", config.text("model_type")?)?;
    let Some((_, translate)) = FAMILIES.iter().find(|(name, _)| *name == family) else {
        return Err(unsupported(family));
    };
    let (mut description, mut tensors) = translate(&config, &Checkpoint { architecture: family, has })?;
    if text.is_some() && whole.flag("tie_word_embeddings", false)? {
        description.tied_output = true;
    }
    tensors.ignored.extend(IGNORED.iter().map(|&name| name.to_owned()));
    Ok((description, tensors))
}

fn unsupported(family: &str) -> ContentError {
    let shown = clip(family);
    let problem = match MISSING.iter().find(|(name, _)| *name == family) {
        Some((_, reason)) => format!("`{shown}` can't be run: {reason}"),
        None => {
            let known: Vec<&str> = FAMILIES.iter().map(|(name, _)| *name).collect();
            format!("field `model_type` is `{shown}`, which is not supported; supported: {}", known.join(", "))
        }
    };
    ContentError::Model(format!("config.json: {problem}"))
}
