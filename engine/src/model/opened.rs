//! A checkpoint with what its configuration says.

use serde_json::Value;

use super::{
    SamplingDefaults,
    checkpoint::{Checkpoint, HfFolder, Tensors},
    description::{Description, TensorMap, gguf as gguf_description, hf},
    error::ContentError,
    gguf::{Gguf, GgufError},
    tokenizer::Tokenizer,
};

/// Everything but the weights' values.
pub struct Opened<'a> {
    pub description: Description,
    pub map: TensorMap,
    pub tensors: Tensors<'a>,
    pub sampling: SamplingDefaults,
    /// What of the configuration decides the arithmetic, for the fingerprint: names and values.
    pub settings: Vec<(String, Vec<u8>)>,
    gguf: Option<Gguf<'a>>,
    folder: Option<&'a HfFolder>,
}

impl<'a> Opened<'a> {
    /// Reads and checks the configuration.
    ///
    /// # Errors
    /// What is wrong with it, or not supported.
    pub fn new(checkpoint: &'a Checkpoint) -> Result<Self, ContentError> {
        match checkpoint {
            Checkpoint::Gguf(file) => Self::from_gguf(file.parse()?),
            Checkpoint::HuggingFace(folder) => Self::from_folder(folder),
        }
    }

    fn from_gguf(gguf: Gguf<'a>) -> Result<Self, ContentError> {
        let (description, map) = gguf_description::translate(&gguf)?;
        let prefix = format!("{}.", description.architecture);
        let decides = |key: &str| key.starts_with(&prefix) || key == "general.architecture";
        let settings = gguf.metadata.sorted().into_iter().filter(|(key, _)| decides(key)).map(|(key, entry)| {
            let kind = format!("{key} {:?} {:?}", entry.value_type, entry.element);
            (kind, entry.raw.to_vec())
        });
        let settings = settings.collect();
        let (tensors, sampling) = (Tensors::from_gguf(&gguf), gguf_sampling(&gguf)?);
        Ok(Self { description, map, tensors, sampling, settings, gguf: Some(gguf), folder: None })
    }

    fn from_folder(folder: &'a HfFolder) -> Result<Self, ContentError> {
        let tensors = folder.tensors()?;
        let config = Value::Object(folder.config.clone());
        let (description, map) = hf::translate(&config, &|name| tensors.facts(name).is_some())?;
        let generation = folder.generation_config()?;
        let settings = vec![("config.json".to_owned(), config.to_string().into_bytes())];
        Ok(Self { description, map, tensors, sampling: folder_sampling(&generation)?, settings, gguf: None, folder: Some(folder) })
    }

    /// The tokenizer beside the weights.
    ///
    /// # Errors
    /// What is missing or malformed in it.
    pub fn tokenizer(&self) -> Result<Tokenizer, ContentError> {
        match (&self.gguf, self.folder) {
            (Some(gguf), _) => Tokenizer::from_gguf(&gguf.metadata),
            (None, Some(folder)) => Tokenizer::from_folder(&folder.folder),
            (None, None) => Err(ContentError::Model("there is no tokenizer".to_owned())),
        }
    }
}

fn gguf_sampling(gguf: &Gguf<'_>) -> Result<SamplingDefaults, GgufError> {
    let float = |name: &str| gguf.metadata.float(&format!("general.sampling.{name}"));
    Ok(SamplingDefaults {
        temperature: float("temp")?,
        top_p: float("top_p")?,
        top_k: gguf.metadata.unsigned("general.sampling.top_k")?.and_then(|k| u32::try_from(k).ok()),
        min_p: float("min_p")?,
        repetition_penalty: float("penalty_repeat")?,
    })
}

/// What `generation_config.json` recommends.
fn folder_sampling(generation: &serde_json::Map<String, Value>) -> Result<SamplingDefaults, ContentError> {
    let float = |key: &str| match generation.get(key).filter(|value| !value.is_null()) {
        None => Ok(None),
        Some(value) => match value.as_f64().filter(|number| number.is_finite() && *number >= 0.0) {
            Some(number) => Ok(Some(number as f32)),
            None => {
                let shown = super::gguf::clip(&value.to_string());
                Err(ContentError::Model(format!("generation_config.json: field `{key}` is {shown}; it should be a number of 0 or more")))
            }
        },
    };
    Ok(SamplingDefaults {
        temperature: float("temperature")?,
        top_p: float("top_p")?,
        top_k: float("top_k")?.map(|k| k as u32),
        min_p: float("min_p")?,
        repetition_penalty: float("repetition_penalty")?.filter(|penalty| *penalty > 0.0),
    })
}
