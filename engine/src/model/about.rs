//! What a model's files are, without loading them: for people who ask `quire show`.

use std::{collections::BTreeMap, fs, io::Read, path::Path};

use serde::Deserialize;
use serde_json::{Map, Value};

use super::{
    ContentError,
    checkpoint::{Checkpoint, HfFolder, Tensors},
    gguf::{Gguf, GgufError, GgufFile},
};

/// Tensors of one type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TypeShare {
    pub tensors: usize,
    pub bytes: u64,
    pub parameters: u64,
}

/// Facts of a model; what its files do not say is missing.
#[derive(Clone, Debug, Default)]
pub struct About {
    /// `GGUF version 3`, `safetensors, awq`.
    pub container: String,
    pub files: usize,
    pub architecture: String,
    pub name: Option<String>,
    pub licence: Option<String>,
    pub parameters: u64,
    pub tensors: usize,
    /// Of all tensors.
    pub bytes: u64,
    /// By the container's name of the type.
    pub types: BTreeMap<String, TypeShare>,
    /// Tokens that the model was trained for.
    pub context: Option<u64>,
    pub layers: Option<u64>,
    pub hidden: Option<u64>,
    pub heads: Option<u64>,
    pub kv_heads: Option<u64>,
    pub head_dim: Option<u64>,
    pub experts: Option<u64>,
    pub vocabulary: Option<u64>,
    /// `gpt2 (llama-bpe)`, `tokenizer.json (BPE)`.
    pub tokenizer: Option<String>,
    pub chat_template: bool,
    /// Bytes of keys and values per token at two bytes a number, if all layers keep them in full.
    pub kv_bytes_per_token: Option<u64>,
}

impl About {
    /// # Errors
    /// [`ContentError`]: the files do not read.
    pub fn of(checkpoint: &Checkpoint) -> Result<Self, ContentError> {
        match checkpoint {
            Checkpoint::Gguf(file) => Self::gguf(file),
            Checkpoint::HuggingFace(folder) => Self::folder(folder),
        }
    }

    fn gguf(file: &GgufFile) -> Result<Self, ContentError> {
        let gguf = file.parse()?;
        let metadata = &gguf.metadata;
        let text = |key: &str| Ok::<_, GgufError>(metadata.string(key)?.map(str::to_owned));
        let architecture = text("general.architecture")?.unwrap_or_default();
        let mut about = Self {
            container: format!("GGUF version {}", gguf.version),
            files: file.parts().len(),
            name: text("general.name")?,
            licence: text("general.license")?,
            tokenizer: tokenizer_of(&gguf)?,
            chat_template: metadata.string("tokenizer.chat_template")?.is_some_and(|template| !template.is_empty()),
            vocabulary: metadata.get("tokenizer.ggml.tokens").map(|tokens| tokens.count as u64),
            ..Self::default()
        };
        // Per-layer lists count by their largest entry.
        let number = |key: &str| -> Result<Option<u64>, GgufError> {
            Ok(metadata.unsigneds(&format!("{architecture}.{key}"))?.and_then(|values| values.into_iter().max()))
        };
        about.context = number("context_length")?;
        about.layers = number("block_count")?;
        about.hidden = number("embedding_length")?;
        about.heads = number("attention.head_count")?;
        about.kv_heads = number("attention.head_count_kv")?.or(about.heads);
        about.head_dim = number("attention.key_length")?.or_else(|| about.hidden?.checked_div(about.heads?));
        about.experts = number("expert_count")?.filter(|experts| *experts > 0);
        about.architecture = architecture;
        about.weigh(&Tensors::from_gguf(&gguf));
        about.kv_bytes_per_token = about.kv_bytes();
        Ok(about)
    }

    fn folder(folder: &HfFolder) -> Result<Self, ContentError> {
        // Multimodal configs keep the language model's in an object of its own.
        let config = folder.config.get("text_config").and_then(Value::as_object).unwrap_or(&folder.config);
        let number = |keys: &[&str]| keys.iter().find_map(|key| config.get(*key).and_then(Value::as_u64));
        let quantization = folder.quantization()?.map_or_else(String::new, |config| format!(", {}", config.method));
        let mut about = Self {
            container: format!("safetensors{quantization}"),
            files: folder.weights.files().count(),
            architecture: config.get("model_type").and_then(Value::as_str).unwrap_or_default().to_owned(),
            licence: licence_of(&folder.folder),
            context: number(&["max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length"]),
            layers: number(&["num_hidden_layers", "n_layer", "num_layers"]),
            hidden: number(&["hidden_size", "n_embd", "d_model"]),
            heads: number(&["num_attention_heads", "n_head"]),
            experts: number(&["num_local_experts", "num_experts", "n_routed_experts"]),
            vocabulary: number(&["vocab_size"]),
            tokenizer: tokenizer_in(&folder.folder),
            chat_template: has_template(&folder.folder),
            ..Self::default()
        };
        about.kv_heads = number(&["num_key_value_heads", "num_kv_heads"]).or(about.heads);
        about.head_dim = number(&["head_dim"]).or_else(|| about.hidden?.checked_div(about.heads?));
        about.weigh(&folder.tensors()?);
        about.kv_bytes_per_token = about.kv_bytes();
        Ok(about)
    }

    fn weigh(&mut self, tensors: &Tensors<'_>) {
        for facts in tensors.iter() {
            let parameters: u64 = facts.shape.iter().map(|size| *size as u64).product();
            let share = self.types.entry(facts.type_name.clone()).or_default();
            share.tensors += 1;
            share.bytes += facts.bytes;
            share.parameters += parameters;
            self.tensors += 1;
            self.bytes += facts.bytes;
            self.parameters += parameters;
        }
    }

    fn kv_bytes(&self) -> Option<u64> {
        [self.kv_heads?, self.head_dim?, 2 * 2].into_iter().try_fold(self.layers?, u64::checked_mul)
    }
}

fn tokenizer_of(gguf: &Gguf<'_>) -> Result<Option<String>, GgufError> {
    let Some(model) = gguf.metadata.string("tokenizer.ggml.model")? else { return Ok(None) };
    Ok(Some(match gguf.metadata.string("tokenizer.ggml.pre")? {
        Some(pre) => format!("{model} ({pre})"),
        None => model.to_owned(),
    }))
}

fn tokenizer_in(folder: &Path) -> Option<String> {
    #[derive(Deserialize)]
    struct File {
        model: Model,
    }
    #[derive(Deserialize)]
    struct Model {
        #[serde(rename = "type")]
        kind: Option<String>,
    }
    let bytes = read_some(&folder.join("tokenizer.json"), 256 << 20)?;
    let kind = serde_json::from_slice::<File>(&bytes).ok().and_then(|file| file.model.kind);
    Some(format!("tokenizer.json ({})", kind.unwrap_or_else(|| "of unknown kind".to_owned())))
}

fn has_template(folder: &Path) -> bool {
    let config =
        || -> Option<Map<String, Value>> { serde_json::from_slice(&read_some(&folder.join("tokenizer_config.json"), 64 << 20)?).ok() };
    ["chat_template.jinja", "chat_template.json"].iter().any(|name| folder.join(name).is_file())
        || config().is_some_and(|config| config.contains_key("chat_template"))
}

/// From the front matter of the model card.
fn licence_of(folder: &Path) -> Option<String> {
    let card = read_some(&folder.join("README.md"), 1 << 20)?;
    let card = String::from_utf8_lossy(&card);
    let front = card.strip_prefix("---")?.split("\n---").next()?;
    let line = front.lines().find_map(|line| line.strip_prefix("license:"))?;
    Some(line.trim().trim_matches(['"', '\'']).to_owned()).filter(|licence| !licence.is_empty())
}

/// A file of at most so many bytes.
fn read_some(path: &Path, most: u64) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    fs::File::open(path).ok()?.take(most + 1).read_to_end(&mut bytes).ok()?;
    (bytes.len() as u64 <= most).then_some(bytes)
}
