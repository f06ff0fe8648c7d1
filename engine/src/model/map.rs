//! Files in memory: the weight map, and the one place in this crate with `unsafe`.

use std::{fs::File, io, path::Path};

use memmap2::Mmap;

/// A file whose bytes are read when they are touched.
#[derive(Debug)]
pub struct MappedFile {
    map: Option<Mmap>,
}

impl MappedFile {
    /// Maps the file; reads nothing yet.
    ///
    /// # Errors
    /// What the system says.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let metadata = file.metadata()?;
        if metadata.is_dir() {
            return Err(io::Error::from(io::ErrorKind::IsADirectory));
        }
        // No system maps zero bytes.
        if metadata.len() == 0 {
            return Ok(Self { map: None });
        }
        // SAFETY: the map is only read. Another process that shortens the file under us would end this one with a bus
        // error, as for every program that maps its weights; the store never changes a file in place (it renames).
        let map = unsafe { Mmap::map(&file)? };
        Ok(Self { map: Some(map) })
    }

    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        self.map.as_deref().unwrap_or(&[])
    }
}
