//! A single file, or the shards that an index names.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use serde::Deserialize;

use super::{Safetensors, SafetensorsError, StoredTensor};
use crate::model::map::MappedFile;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Names of a hundred thousand tensors.
const LARGEST_INDEX: u64 = 64 << 20;

/// Mapped files that make one checkpoint.
#[derive(Debug)]
pub struct SafetensorsFiles {
    files: Vec<(String, MappedFile)>,
    /// Whether errors name the file: whoever opened a folder or an index didn't.
    named: bool,
    /// Tensor → file, as the index says it.
    index: Option<BTreeMap<String, String>>,
}

impl SafetensorsFiles {
    /// Opens a `.safetensors` file, an index (`….index.json`), or a folder: its index, else its `model.safetensors`, else
    /// its only `.safetensors` file.
    ///
    /// # Errors
    /// [`SafetensorsError`] names the file that is missing or unreadable.
    pub fn open(path: &Path) -> Result<Self, SafetensorsError> {
        let named = path.is_dir();
        let path = if named { Self::in_folder(path)? } else { path.to_owned() };
        if path.extension().is_some_and(|extension| extension == "json") {
            return Self::open_index(&path);
        }
        Ok(Self { files: vec![(file_name(&path), MappedFile::open(&path)?)], named, index: None })
    }

    fn in_folder(folder: &Path) -> Result<PathBuf, SafetensorsError> {
        for name in [INDEX, SINGLE] {
            let path = folder.join(name);
            if path.is_file() {
                return Ok(path);
            }
        }
        let mut found: Vec<PathBuf> = Vec::new();
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "safetensors") {
                found.push(path);
            }
        }
        match found.len() {
            1 => Ok(found.remove(0)),
            0 => Err(SafetensorsError::Header("there is no .safetensors file in this folder".to_owned())),
            several => Err(SafetensorsError::Index(format!("there are {several} .safetensors files in this folder but no {INDEX}"))),
        }
    }

    fn open_index(path: &Path) -> Result<Self, SafetensorsError> {
        #[derive(Deserialize)]
        struct Index {
            weight_map: BTreeMap<String, String>,
        }
        let name = file_name(path);
        if fs::metadata(path)?.len() > LARGEST_INDEX {
            return Err(SafetensorsError::Index(format!("it has more than {LARGEST_INDEX} bytes")).inside(&name));
        }
        let index: Index =
            serde_json::from_slice(&fs::read(path)?).map_err(|error| SafetensorsError::Index(error.to_string()).inside(&name))?;
        let shards: BTreeSet<&String> = index.weight_map.values().collect();
        let files = shards.into_iter().map(|shard| open_shard(path, shard)).collect::<Result<Vec<_>, _>>()?;
        if files.is_empty() {
            return Err(SafetensorsError::Index("field `weight_map`: it names no tensor".to_owned()).inside(&name));
        }
        Ok(Self { files, named: true, index: Some(index.weight_map) })
    }

    /// File names and sizes, in order.
    pub fn files(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.files.iter().map(|(name, map)| (name.as_str(), map.bytes()))
    }

    /// All tensors of all files, by name.
    ///
    /// # Errors
    /// Names the file and what in it is wrong; also where index and files disagree.
    pub fn parse(&self) -> Result<Vec<StoredTensor<'_>>, SafetensorsError> {
        let mut all: Vec<StoredTensor<'_>> = Vec::new();
        for (name, map) in &self.files {
            let file = Safetensors::parse(map.bytes()).map_err(|error| if self.named { error.inside(name) } else { error })?;
            if let Some(index) = &self.index {
                self.check_shard(index, name, &file)?;
            }
            all.extend(file.into_tensors());
        }
        all.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        match all.windows(2).find(|pair| pair[0].name == pair[1].name) {
            Some(pair) => Err(SafetensorsError::tensor(&pair[0].name, "stands in two shards")),
            None => Ok(all),
        }
    }

    /// Every tensor that the index places in this shard is there.
    fn check_shard(&self, index: &BTreeMap<String, String>, name: &str, file: &Safetensors<'_>) -> Result<(), SafetensorsError> {
        let missing = index.iter().find(|(tensor, shard)| *shard == name && file.tensor(tensor).is_none());
        match missing {
            Some((tensor, _)) => Err(SafetensorsError::tensor(tensor, format!("is missing from `{name}`, where the index says it is"))),
            None => Ok(()),
        }
    }
}

/// A shard beside its index; nothing elsewhere.
fn open_shard(index: &Path, shard: &str) -> Result<(String, MappedFile), SafetensorsError> {
    let plain = Path::new(shard).file_name().is_some_and(|name| name == shard);
    if !plain || !shard.ends_with(".safetensors") {
        let problem = format!("field `weight_map`: `{}` is no .safetensors file beside it", crate::model::gguf::clip(shard));
        return Err(SafetensorsError::Index(problem));
    }
    let map = MappedFile::open(&index.with_file_name(shard)).map_err(|error| SafetensorsError::from(error).inside(shard))?;
    Ok((shard.to_owned(), map))
}

fn file_name(path: &Path) -> String {
    path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}
