//! A model's files as named tensors, whatever container they came in.
//!
//! Owns which files make a model (a GGUF file with its parts; a Hugging Face folder with its shards), and how stored
//! tensors become ones that kernels read. Never knows what a tensor means: names are those of the container.
//!
//! - [`Checkpoint`]: a path → mapped files
//! - [`Tensors`]: their tensors by name, ready for the kernels

mod hf;
mod quantised;
mod tensors;

use std::{
    fs,
    path::{Path, PathBuf},
};

pub use hf::HfFolder;
pub use quantised::QuantConfig;
pub use tensors::{Tensor, TensorFacts, Tensors};

use super::{ContentError, ModelError, gguf::GgufFile};

/// A model's files in memory.
#[derive(Debug)]
pub enum Checkpoint {
    Gguf(GgufFile),
    HuggingFace(HfFolder),
}

impl Checkpoint {
    /// Opens what stands at a path:
    /// - a `.gguf` file, with its other parts if it is the first of several;
    /// - a `.safetensors` file or an index of shards, with the `config.json` beside it;
    /// - a folder: a Hugging Face one if it has a `config.json`, else the only GGUF model in it.
    ///
    /// # Errors
    /// [`ModelError`] names the file and what is wrong with it.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let is = |extension: &str| path.extension().is_some_and(|found| found.eq_ignore_ascii_case(extension));
        if path.is_dir() {
            if path.join("config.json").is_file() {
                return HfFolder::open(path).map(Self::HuggingFace);
            }
            return Self::open_gguf(&only_gguf(path)?);
        }
        if is("safetensors") || is("json") {
            return HfFolder::open(path).map(Self::HuggingFace);
        }
        Self::open_gguf(path)
    }

    fn open_gguf(path: &Path) -> Result<Self, ModelError> {
        GgufFile::open(path).map(Self::Gguf).map_err(|error| ContentError::from(error).at(path))
    }
}

/// The first part, or the only file, of the only model in a folder.
fn only_gguf(folder: &Path) -> Result<PathBuf, ModelError> {
    let problem = |problem: String| ModelError::Model { path: folder.to_owned(), problem };
    let entries = fs::read_dir(folder).map_err(|error| problem(format!("cannot be read: {error}")))?;
    let mut found: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "gguf"))
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            !name.starts_with("mmproj") && super::gguf::part_of(&name).is_none_or(|part| part.number == 1)
        })
        .collect();
    match found.len() {
        1 => Ok(found.remove(0)),
        0 => Err(problem("holds neither a config.json with .safetensors files nor a .gguf file".to_owned())),
        several => Err(problem(format!("holds {several} GGUF models; name one of them"))),
    }
}
