//! The cache folder: one folder per model with its files, a manifest and a lock.
//!
//! A model is there when its manifest is: that is written last. Manifests are trusted by size and modification time, so
//! that a start reads no model file twice.

use std::{
    fs::{self, File, TryLockError},
    io::{Read, Write},
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{LocalModel, ModelRef, Progress, StoreError, landing::hex};

/// What is known of a cached model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Of this format.
    pub version: u32,
    /// As the user writes it.
    pub name: String,
    /// The reference that delivered it.
    pub source: String,
    /// Seconds since 1970.
    pub fetched: u64,
    /// The file to load first.
    pub files: Vec<FileEntry>,
}

/// One file of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Its name in the model's folder.
    pub file: String,
    pub bytes: u64,
    /// Hex.
    pub sha256: String,
    /// Modification time, nanoseconds since 1970.
    pub modified: u64,
    /// As the server called this content.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etag: Option<String>,
}

const FORMAT: u32 = 1;
const MANIFEST: &str = "manifest.json";

impl Manifest {
    pub(super) fn new(name: String, source: String, files: Vec<FileEntry>) -> Self {
        let fetched = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |age| age.as_secs());
        Self { version: FORMAT, name, source, fetched, files }
    }
}

/// The folder of all models.
pub(super) struct Cache {
    root: PathBuf,
}

impl Cache {
    pub(super) fn new(root: PathBuf) -> Self {
        Self { root }
    }

    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// The folder of one model: its name with what file systems dislike replaced, and for names that aren't ours a digest,
    /// so that no two names share one.
    pub(super) fn folder(&self, model: &ModelRef) -> ModelFolder {
        let name = model.to_string();
        let mut folder: String = name.chars().map(|c| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '-' }).collect();
        folder.truncate(120);
        if model.pin().is_none() {
            folder.push('-');
            folder.push_str(&hex(&Sha256::digest(&name))[..8]);
        }
        ModelFolder { path: self.root.join("models").join(folder) }
    }

    /// Everything that is there and whole, by name.
    pub(super) fn list(&self) -> Result<Vec<(Manifest, LocalModel)>, StoreError> {
        let models = self.root.join("models");
        let entries = match fs::read_dir(&models) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(StoreError::io("read", &models)(error)),
        };
        let mut found = Vec::new();
        for entry in entries {
            let folder = ModelFolder { path: entry.map_err(StoreError::io("read", &models))?.path() };
            let Some(manifest) = folder.manifest().filter(|manifest| folder.complete(manifest)) else { continue };
            let Ok(model) = ModelRef::parse(&manifest.name) else { continue };
            let local = folder.local(&manifest, &model);
            found.push((manifest, local));
        }
        found.sort_by(|(a, _), (b, _)| a.name.cmp(&b.name));
        Ok(found)
    }
}

/// One model's folder; may not exist yet.
pub(super) struct ModelFolder {
    path: PathBuf,
}

/// Held while a model's folder changes; let go when dropped, or when the process dies.
pub(super) struct FolderLock {
    _file: File,
}

impl ModelFolder {
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Where a file of the model lives. File names from elsewhere are flattened: `a/b.gguf` → `a--b.gguf`.
    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.path.join(name.replace('/', "--"))
    }

    /// Waits for other processes that fetch the same model.
    pub(super) fn lock(&self, progress: &dyn Progress) -> Result<FolderLock, StoreError> {
        fs::create_dir_all(&self.path).map_err(StoreError::io("create", &self.path))?;
        let path = self.path.join(".lock");
        let file = File::options().create(true).truncate(false).write(true).open(&path).map_err(StoreError::io("create", &path))?;
        let mut told = false;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(FolderLock { _file: file }),
                Err(TryLockError::Error(error)) => return Err(StoreError::io("lock", &path)(error)),
                Err(TryLockError::WouldBlock) if progress.cancelled() => return Err(StoreError::Cancelled),
                Err(TryLockError::WouldBlock) => {
                    if !told {
                        progress.note("another process is fetching this model; waiting for it");
                        told = true;
                    }
                    std::thread::sleep(std::time::Duration::from_millis(100));
                }
            }
        }
    }

    /// None if there is none, or none that can be read.
    pub(super) fn manifest(&self) -> Option<Manifest> {
        let text = fs::read(self.path.join(MANIFEST)).ok()?;
        let manifest: Manifest = serde_json::from_slice(&text).ok()?;
        let names_stay = manifest.files.iter().all(|entry| !entry.file.contains(['/', '\\']) && entry.file != "..");
        (manifest.version == FORMAT && !manifest.files.is_empty() && names_stay).then_some(manifest)
    }

    pub(super) fn write_manifest(&self, manifest: &Manifest) -> Result<(), StoreError> {
        let target = self.path.join(MANIFEST);
        let partial = self.path.join(".manifest.partial");
        let text = serde_json::to_vec_pretty(manifest).map_err(|error| StoreError::Io {
            action: "write",
            path: target.clone(),
            source: error.into(),
        })?;
        let mut file = File::create(&partial).map_err(StoreError::io("create", &partial))?;
        file.write_all(&text).and_then(|()| file.sync_all()).map_err(StoreError::io("write", &partial))?;
        fs::rename(&partial, &target).map_err(StoreError::io("create", &target))?;
        sync_folder(&self.path);
        Ok(())
    }

    /// All files are there with the sizes they had.
    pub(super) fn complete(&self, manifest: &Manifest) -> bool {
        self.all(manifest, |entry, metadata| metadata.len() == entry.bytes)
    }

    /// All files are there with the sizes and modification times they had.
    pub(super) fn untouched(&self, manifest: &Manifest) -> bool {
        self.all(manifest, |entry, metadata| metadata.len() == entry.bytes && modified(metadata) == entry.modified)
    }

    fn all(&self, manifest: &Manifest, check: impl Fn(&FileEntry, &fs::Metadata) -> bool) -> bool {
        manifest.files.iter().all(|entry| fs::metadata(self.path.join(&entry.file)).is_ok_and(|metadata| check(entry, &metadata)))
    }

    /// Hashes all files again. What is right but was touched gets its new time noted, if the folder may be written.
    pub(super) fn verify(&self, manifest: &Manifest, progress: &dyn Progress) -> Result<bool, StoreError> {
        let mut fresh = manifest.clone();
        for entry in &mut fresh.files {
            let path = self.path.join(&entry.file);
            let Ok(metadata) = fs::metadata(&path) else { return Ok(false) };
            if metadata.len() != entry.bytes || digest(&path, progress)? != entry.sha256 {
                return Ok(false);
            }
            entry.modified = modified(&metadata);
        }
        if fresh != *manifest {
            // A cache that is read-only still serves.
            let _ = self.write_manifest(&fresh);
        }
        Ok(true)
    }

    /// A file that was put there by hand, or landed just before a crash, is taken if it is the very one that is wanted.
    pub(super) fn adopt(&self, model: &ModelRef, progress: &dyn Progress) -> Result<Option<LocalModel>, StoreError> {
        let Some(pin) = model.pin() else { return Ok(None) };
        let path = self.file(pin.file);
        let Ok(metadata) = fs::metadata(&path) else { return Ok(None) };
        if metadata.len() != pin.bytes || digest(&path, progress)? != pin.sha256 {
            return Ok(None);
        }
        let entry = FileEntry {
            file: pin.file.to_owned(),
            bytes: pin.bytes,
            sha256: pin.sha256.to_owned(),
            modified: modified(&metadata),
            etag: None,
        };
        let manifest = Manifest::new(model.to_string(), "found in the cache folder".to_owned(), vec![entry]);
        self.write_manifest(&manifest)?;
        Ok(Some(self.local(&manifest, model)))
    }

    /// The model that a manifest describes.
    pub(super) fn local(&self, manifest: &Manifest, model: &ModelRef) -> LocalModel {
        let files: Vec<PathBuf> = manifest.files.iter().map(|entry| self.path.join(&entry.file)).collect();
        LocalModel {
            name: model.served_name(),
            path: files.first().cloned().unwrap_or_else(|| self.path.clone()),
            files,
            bytes: manifest.files.iter().map(|entry| entry.bytes).sum(),
            source: manifest.source.clone(),
            sha256: manifest.files.first().map(|entry| entry.sha256.clone()),
        }
    }
}

/// Nanoseconds since 1970; 0 where the file system doesn't say.
pub(super) fn modified(metadata: &fs::Metadata) -> u64 {
    let age = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    age.and_then(|age| u64::try_from(age.as_nanos()).ok()).unwrap_or(0)
}

/// Makes a rename in the folder outlive a power cut, where the system can.
pub(super) fn sync_folder(folder: &Path) {
    if let Ok(folder) = File::open(folder) {
        let _ = folder.sync_all();
    }
}

fn digest(path: &Path, progress: &dyn Progress) -> Result<String, StoreError> {
    let mut file = File::open(path).map_err(StoreError::io("read", path))?;
    let total = file.metadata().ok().map(|metadata| metadata.len());
    progress.started(&format!("verifying {}", path.file_name().unwrap_or_default().to_string_lossy()), total);
    let mut hasher = Sha256::new();
    let mut chunk = vec![0; 1 << 20];
    let mut done = 0;
    loop {
        if progress.cancelled() {
            return Err(StoreError::Cancelled);
        }
        let read = file.read(&mut chunk).map_err(StoreError::io("read", path))?;
        if read == 0 {
            progress.finished();
            return Ok(hex(&hasher.finalize()));
        }
        hasher.update(&chunk[..read]);
        done += read as u64;
        progress.advanced(done);
    }
}
