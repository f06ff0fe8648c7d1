//! A Hugging Face folder: `config.json` and safetensors.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::{Map, Value};

use super::{QuantConfig, Tensors};
use crate::model::{ContentError, ModelError, safetensors::SafetensorsFiles};

/// Real ones have a few kilobytes; those with thousands of labels have hundreds.
const LARGEST_CONFIG: u64 = 4 << 20;

/// A folder with a model's weights and its description.
#[derive(Debug)]
pub struct HfFolder {
    pub folder: PathBuf,
    /// `config.json`.
    pub config: Map<String, Value>,
    pub weights: SafetensorsFiles,
}

impl HfFolder {
    /// Opens a folder, or a `.safetensors` file or index in it.
    ///
    /// # Errors
    /// [`ModelError`] names the file and what is wrong with it.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let folder = if path.is_dir() { path } else { path.parent().unwrap_or(Path::new("")) };
        let config = read_json(&folder.join("config.json"))?;
        let weights = SafetensorsFiles::open(path).map_err(|error| ContentError::from(error).at(path))?;
        Ok(Self { folder: folder.to_owned(), config, weights })
    }

    /// All tensors; quantised ones under the name that the plain one would have.
    ///
    /// # Errors
    /// [`ContentError`] names the file, the tensor or the field.
    pub fn tensors(&self) -> Result<Tensors<'_>, ContentError> {
        Tensors::from_safetensors(self.weights.parse()?, self.quantization()?.as_ref())
    }

    /// `generation_config.json`; empty where there is none.
    ///
    /// # Errors
    /// [`ContentError`] names the file and what is wrong with it.
    pub fn generation_config(&self) -> Result<Map<String, Value>, ContentError> {
        let path = self.folder.join("generation_config.json");
        if !path.is_file() {
            return Ok(Map::new());
        }
        read_json(&path).map_err(|error| ContentError::Model(error.to_string()))
    }

    /// How the weights are quantised, from `config.json` or, as older tools did, a file of its own.
    ///
    /// # Errors
    /// [`ContentError`] names the field and what is possible there.
    pub fn quantization(&self) -> Result<Option<QuantConfig>, ContentError> {
        if let Some(found) = QuantConfig::from_config(&self.config)? {
            return Ok(Some(found));
        }
        for name in ["quantize_config.json", "quant_config.json"] {
            let path = self.folder.join(name);
            if path.is_file() {
                let object = read_json(&path).map_err(|error| ContentError::Model(error.to_string()))?;
                return QuantConfig::from_quantization(&object).map(Some);
            }
        }
        Ok(None)
    }
}

/// A JSON object from a file of reasonable size.
fn read_json(path: &Path) -> Result<Map<String, Value>, ModelError> {
    let fail = |problem: String| ModelError::Model { path: path.to_owned(), problem };
    let length = fs::metadata(path).map_err(|error| fail(format!("cannot be read: {error}")))?.len();
    if length > LARGEST_CONFIG {
        return Err(fail(format!("has {length} bytes; a configuration has at most {LARGEST_CONFIG}")));
    }
    let bytes = fs::read(path).map_err(|error| fail(format!("cannot be read: {error}")))?;
    serde_json::from_slice(&bytes).map_err(|error| fail(format!("is no JSON object: {error}")))
}
