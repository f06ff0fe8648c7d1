//! What almost all families share.

use quire_kernels::backend::Activation;

use super::{Checkpoint, config::Config, names, rope};
use crate::model::{
    description::{
        Attention, Branch, Dense, Description, FeedForward, Layer, Norm, Reach, Rope, TensorMap,
        limits::{CONTEXT, HEADS, LAYERS, VOCABULARY, WIDTH},
    },
    error::ContentError,
};

/// Sizes under their usual names.
pub struct Base {
    pub layers: usize,
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub vocabulary: usize,
    pub context: usize,
}

impl Base {
    pub fn read(config: &Config<'_>) -> Result<Self, ContentError> {
        let needed = |keys: &[&str], most| config.needed(keys[0], config.first_size(keys, most)?);
        let hidden = needed(&["hidden_size", "n_embd"], WIDTH)?;
        let heads = needed(&["num_attention_heads", "n_head"], HEADS)?;
        let kv_heads = config.first_size(&["num_key_value_heads"], HEADS)?.unwrap_or(heads);
        let head_dim = match config.size("head_dim", WIDTH)? {
            Some(head_dim) => head_dim,
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => return Err(config.error("hidden_size", format!("is {hidden}, which {heads} heads can't share"))),
        };
        let base = Self {
            layers: needed(&["num_hidden_layers", "n_layer"], LAYERS)?,
            hidden,
            heads,
            kv_heads,
            head_dim,
            vocabulary: needed(&["vocab_size"], VOCABULARY)?,
            context: needed(&["max_position_embeddings", "n_positions"], CONTEXT)?,
        };
        base.check_heads(config, kv_heads)?;
        Ok(base)
    }

    pub fn check_heads(&self, config: &Config<'_>, kv_heads: usize) -> Result<(), ContentError> {
        if kv_heads > 0 && self.heads.is_multiple_of(kv_heads) {
            return Ok(());
        }
        Err(config.error("num_key_value_heads", format!("is {kv_heads}, which {} heads can't share", self.heads)))
    }
}

/// The gate's activation.
pub fn activation(config: &Config<'_>, default: &str) -> Result<Activation, ContentError> {
    const KEYS: [&str; 4] = ["hidden_activation", "hidden_act", "activation_function", "activation"];
    let key = KEYS.into_iter().find(|key| config.get(key).is_some());
    let name = match key {
        Some(key) => config.text(key)?.unwrap_or(default),
        None => default,
    };
    match name {
        "silu" | "swish" => Ok(Activation::Silu),
        "gelu_pytorch_tanh" | "gelu_new" | "gelu_fast" | "gelu_python_tanh" | "gelu_accurate" => Ok(Activation::Gelu),
        "gelu" | "gelu_python" => Ok(Activation::GeluExact),
        other => {
            let shown = crate::model::gguf::clip(other);
            let problem = format!("is `{shown}`, which is not supported; supported: silu, gelu, gelu_new, gelu_pytorch_tanh");
            Err(config.error(key.unwrap_or(KEYS[1]), problem))
        }
    }
}

pub fn rms(config: &Config<'_>, default: f64) -> Result<Norm, ContentError> {
    Ok(Norm::rms(config.positive("rms_norm_eps")?.unwrap_or(default) as f32))
}

pub fn layer_norm(config: &Config<'_>, default: f64) -> Result<Norm, ContentError> {
    for key in ["layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"] {
        if let Some(epsilon) = config.positive(key)? {
            return Ok(Norm::layer(epsilon as f32));
        }
    }
    Ok(Norm::layer(default as f32))
}

/// A Llama of these sizes: pre-norms, one rotation, gated feed-forward, no windows.
pub fn llama(config: &Config<'_>, checkpoint: &Checkpoint<'_>) -> Result<(Description, TensorMap), ContentError> {
    let base = Base::read(config)?;
    let norm = rms(config, 1e-6)?;
    let dense = Dense::gated(feed_forward(config)?, activation(config, "silu")?);
    let ropes = vec![rope::read(config, FULL, base.head_dim, &rope::Defaults::default())?];
    let tensors = map(checkpoint, &[names::LLAMA]);
    Ok((describe(config, checkpoint, &tensors, &base, norm, dense, ropes)?, tensors))
}

/// The width of a dense feed-forward part.
pub fn feed_forward(config: &Config<'_>) -> Result<usize, ContentError> {
    config.needed_size("intermediate_size", WIDTH)
}

pub const FULL: &str = "full_attention";
pub const SLIDING: &str = "sliding_attention";
pub const CHUNKED: &str = "chunked_attention";

/// A map of Llama-like names.
pub fn map(checkpoint: &Checkpoint<'_>, tables: &[&[(crate::model::description::names::Role, &'static str)]]) -> TensorMap {
    let prefix = checkpoint.prefix(&["model.", "model.language_model.", "language_model.model.", "language_model.", ""], "embed_tokens");
    TensorMap::new(prefix, "layers.{}.", tables)
}

/// Layers that are all alike.
pub fn describe(
    config: &Config<'_>,
    checkpoint: &Checkpoint<'_>,
    tensors: &TensorMap,
    base: &Base,
    norm: Norm,
    dense: Dense,
    ropes: Vec<Rope>,
) -> Result<Description, ContentError> {
    let layer = Layer {
        attention: Attention::plain(base.heads, base.kv_heads, base.head_dim, norm),
        feed_forward: FeedForward { norm: Some(norm), dense: Some(dense), experts: None, output: Branch::PLAIN },
        parallel: false,
        scaled: false,
    };
    Ok(Description {
        architecture: checkpoint.architecture.to_owned(),
        hidden: base.hidden,
        vocabulary: base.vocabulary,
        trained_context: base.context,
        embedding_scale: 1.0,
        learned_positions: None,
        ropes,
        layers: vec![layer; base.layers],
        output_norm: norm,
        tied_output: tied(config, checkpoint, tensors)?,
        logit_scale: 1.0,
        logit_softcap: None,
        layer_input: None,
    })
}

/// Tied where the file says so, or holds no output matrix.
fn tied(config: &Config<'_>, checkpoint: &Checkpoint<'_>, tensors: &TensorMap) -> Result<bool, ContentError> {
    let output = tensors.once(crate::model::description::names::Role::Output);
    let there = output.is_some_and(|name| checkpoint.has_tensor(&name));
    Ok(!there || config.flag("tie_word_embeddings", false)?)
}

/// What the layers see: `layer_types`, or a window for all where `pattern` gives none.
pub fn layer_types<'a>(config: &Config<'a>, layers: usize, pattern: impl Fn(usize) -> &'static str) -> Result<Vec<&'a str>, ContentError> {
    const KEY: &str = "layer_types";
    let Some(types) = config.texts(KEY)? else { return Ok((0..layers).map(pattern).collect()) };
    if types.len() != layers {
        return Err(config.error(KEY, format!("has {} entries for {layers} layers", types.len())));
    }
    match types.iter().find(|kind| ![FULL, SLIDING, CHUNKED].contains(kind)) {
        Some(other) => Err(config.error(
            KEY,
            format!("names `{}`, which is not supported; supported: {FULL}, {SLIDING}, {CHUNKED}", crate::model::gguf::clip(other)),
        )),
        None => Ok(types),
    }
}

/// Windows by kind of layer.
pub fn set_reach(config: &Config<'_>, layers: &mut [Layer], types: &[&str]) -> Result<(), ContentError> {
    for (layer, kind) in layers.iter_mut().zip(types) {
        layer.attention.reach = match *kind {
            SLIDING => Reach::Window(config.needed_size("sliding_window", CONTEXT)?),
            CHUNKED => Reach::Chunk(config.needed_size("attention_chunk_size", CONTEXT)?),
            _ => Reach::All,
        };
    }
    Ok(())
}
