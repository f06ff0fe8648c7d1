//! A file or folder that the user has: which file in it is the model.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::{LocalModel, ModelRef, StoreError};
use crate::model::gguf::{Part, part_of};

/// Finds the model at a path. In a folder: its only `.gguf`, or the parts of its only split one; a folder with a
/// `config.json` and safetensors is a model itself.
pub(super) fn resolve(path: &Path) -> Result<LocalModel, StoreError> {
    let metadata = fs::metadata(path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => no_model(path, "there is no such file or folder"),
        _ => StoreError::Io { action: "read", path: path.to_path_buf(), source: error },
    })?;
    let (model, files) = if metadata.is_dir() { in_folder(path)? } else { (None, with_siblings(path)?) };
    let mut bytes = 0;
    for file in &files {
        bytes += fs::metadata(file).map_err(StoreError::io("read", file))?.len();
    }
    let name = ModelRef::Path(path.to_path_buf()).served_name();
    let first = model.or_else(|| files.first().cloned()).unwrap_or_else(|| path.to_path_buf());
    Ok(LocalModel { name, source: first.display().to_string(), path: first, files, bytes, sha256: None })
}

fn no_model(path: &Path, reason: impl Into<String>) -> StoreError {
    StoreError::NoModel { path: path.to_path_buf(), reason: reason.into() }
}

/// All parts of the split file that `file` is the first part of, in order; other files are themselves.
pub(super) fn parts(file: &str) -> Option<Vec<String>> {
    match part_of(file) {
        None => Some(vec![file.to_owned()]),
        Some(Part { stem, number: 1, total }) => Some((1..=total).map(|part| format!("{stem}-{part:05}-of-{total:05}.gguf")).collect()),
        Some(_) => None,
    }
}

/// The models among file names: whole files, and the first parts of split ones.
pub(super) fn models<'a>(names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut found: Vec<&str> = names
        .filter(|name| name.ends_with(".gguf") && !name.rsplit('/').next().unwrap_or(name).starts_with("mmproj"))
        .filter(|name| part_of(name).is_none_or(|part| part.number == 1))
        .collect();
    found.sort_unstable();
    found
}

fn with_siblings(path: &Path) -> Result<Vec<PathBuf>, StoreError> {
    let Some(name) = path.file_name().and_then(|name| name.to_str()) else { return Ok(vec![path.to_path_buf()]) };
    let names = parts(name).ok_or_else(|| no_model(path, "this is a later part of a split model; give the one with -00001-of-"))?;
    names
        .iter()
        .map(|part| {
            let file = path.with_file_name(part);
            if file.is_file() { Ok(file) } else { Err(no_model(&file, "this part of a split model is missing")) }
        })
        .collect()
}

/// What the loader opens, if not the first of the files; and the files.
fn in_folder(folder: &Path) -> Result<(Option<PathBuf>, Vec<PathBuf>), StoreError> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(StoreError::io("read", folder))? {
        let entry = entry.map_err(StoreError::io("read", folder))?;
        if let Ok(name) = entry.file_name().into_string() {
            names.push(name);
        }
    }
    match models(names.iter().map(String::as_str)).as_slice() {
        [only] => with_siblings(&folder.join(only)).map(|files| (None, files)),
        [] => {
            let mut weights: Vec<PathBuf> =
                names.iter().filter(|name| name.ends_with(".safetensors")).map(|name| folder.join(name)).collect();
            weights.sort_unstable();
            match (weights.is_empty(), folder.join("config.json").is_file()) {
                (true, _) => Err(no_model(folder, "there is no .gguf file in it, and there are no .safetensors files")),
                (false, false) => Err(no_model(folder, "it holds safetensors, but no config.json that describes them")),
                (false, true) => Ok((Some(folder.to_path_buf()), weights)),
            }
        }
        several => Err(no_model(folder, format!("it holds several models; name one of them: {}", several.join(", ")))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_of_safetensors_is_a_model() {
        let folder = std::env::temp_dir().join(format!("quire-local-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let refused = |word: &str| assert!(resolve(&folder).unwrap_err().to_string().contains(word), "{word}");
        refused("there is no .gguf file");
        fs::write(folder.join("model-00001-of-00002.safetensors"), "ab").unwrap();
        refused("no config.json");
        fs::write(folder.join("model-00002-of-00002.safetensors"), "c").unwrap();
        fs::write(folder.join("config.json"), "{}").unwrap();
        let found = resolve(&folder).unwrap();
        assert_eq!((found.path.as_path(), found.files.len(), found.bytes), (folder.as_path(), 2, 3));
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn parts_of_split_files() {
        assert_eq!(parts("m-00001-of-00002.gguf").unwrap(), ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]);
        assert_eq!(parts("m-00002-of-00002.gguf"), None);
        assert_eq!(
            models(["b.gguf", "mmproj-x.gguf", "README.md", "m-00002-of-00002.gguf", "d/m-00001-of-00002.gguf"].into_iter()),
            ["b.gguf", "d/m-00001-of-00002.gguf"]
        );
    }
}
