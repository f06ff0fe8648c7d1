//! Bytes → `.partial` → verified → renamed into place. Nothing that isn't whole and right ever has the final name.

use std::{
    fs::{self, File},
    io::{Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use sha2::{Digest, Sha256};

use super::{
    StoreError,
    cache::{FileEntry, modified, sync_folder},
};

/// What a file must be; None where nobody said.
#[derive(Clone, Debug, Default)]
pub(super) struct Expected {
    pub(super) bytes: Option<u64>,
    /// Hex.
    pub(super) sha256: Option<String>,
}

/// A file that is being written under its temporary name.
pub(super) struct Landing {
    target: PathBuf,
    partial: PathBuf,
    file: File,
    hasher: Sha256,
    written: u64,
}

/// The temporary name of a file.
pub(super) fn partial_of(target: &Path) -> PathBuf {
    let mut name = target.file_name().unwrap_or_default().to_os_string();
    name.push(".partial");
    target.with_file_name(name)
}

impl Landing {
    /// From nothing.
    pub(super) fn create(target: &Path) -> Result<Self, StoreError> {
        let mut landing = Self::resume(target)?;
        landing.restart()?;
        Ok(landing)
    }

    /// From what an earlier try left.
    pub(super) fn resume(target: &Path) -> Result<Self, StoreError> {
        let partial = partial_of(target);
        let mut file = File::options()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(&partial)
            .map_err(StoreError::io("create", &partial))?;
        let mut hasher = Sha256::new();
        let mut written = 0;
        let mut chunk = vec![0; 1 << 20];
        loop {
            let read = file.read(&mut chunk).map_err(StoreError::io("read", &partial))?;
            if read == 0 {
                break;
            }
            hasher.update(&chunk[..read]);
            written += read as u64;
        }
        Ok(Self { target: target.to_path_buf(), partial, file, hasher, written })
    }

    /// Forgets what there is.
    pub(super) fn restart(&mut self) -> Result<(), StoreError> {
        self.file.set_len(0).map_err(StoreError::io("write", &self.partial))?;
        self.file.seek(SeekFrom::Start(0)).map_err(StoreError::io("write", &self.partial))?;
        self.hasher = Sha256::new();
        self.written = 0;
        Ok(())
    }

    /// Bytes that are there.
    pub(super) fn written(&self) -> u64 {
        self.written
    }

    pub(super) fn write(&mut self, chunk: &[u8]) -> Result<(), StoreError> {
        self.file.write_all(chunk).map_err(StoreError::io("write", &self.partial))?;
        self.hasher.update(chunk);
        self.written += chunk.len() as u64;
        Ok(())
    }

    /// Checks, and gives the file its name. A file that is wrong is removed.
    pub(super) fn finish(self, expected: &Expected, etag: Option<String>) -> Result<FileEntry, StoreError> {
        let name = self.target.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if let Some(bytes) = expected.bytes.filter(|bytes| *bytes != self.written) {
            let _ = fs::remove_file(&self.partial);
            return Err(StoreError::WrongSize { file: name, expected: bytes, found: self.written });
        }
        let found = hex(&self.hasher.finalize());
        if let Some(sha256) = expected.sha256.as_ref().filter(|sha256| !sha256.eq_ignore_ascii_case(&found)) {
            let _ = fs::remove_file(&self.partial);
            return Err(StoreError::WrongHash { file: name, expected: sha256.clone(), found });
        }
        self.file.sync_all().map_err(StoreError::io("write", &self.partial))?;
        fs::rename(&self.partial, &self.target).map_err(StoreError::io("create", &self.target))?;
        if let Some(folder) = self.target.parent() {
            sync_folder(folder);
        }
        let metadata = fs::metadata(&self.target).map_err(StoreError::io("read", &self.target))?;
        Ok(FileEntry { file: name, bytes: self.written, sha256: found, modified: modified(&metadata), etag })
    }
}

/// Lower-case hexadecimal.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
