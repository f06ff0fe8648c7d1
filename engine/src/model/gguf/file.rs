//! A file in memory and what it says of itself.

use std::{collections::HashMap, fs::File, path::Path};

use memmap2::Mmap;

use super::{
    GgufError, Metadata, TensorInfo,
    reader::Reader,
    tensors::{self, Claim},
};

const MAGIC: &[u8] = b"GGUF";
const DEFAULT_ALIGNMENT: u64 = 32;
/// Length, type and the smallest value of a key.
const LEAST_KEY_BYTES: u64 = 8 + 4 + 1;

/// A mapped file.
#[derive(Debug)]
pub struct GgufFile {
    map: Mmap,
}

impl GgufFile {
    /// Maps the file; reads nothing yet.
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        let file = File::open(path)?;
        // SAFETY: the map is only read. Another process that shortens the file under us would end this one with a bus
        // error, as for every program that maps its weights; the store never changes a file in place (it renames).
        let map = unsafe { Mmap::map(&file)? };
        Ok(Self { map })
    }

    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Reads and checks everything but the tensors' values.
    pub fn parse(&self) -> Result<Gguf<'_>, GgufError> {
        Gguf::parse(&self.map)
    }
}

/// What a GGUF file holds; borrows the file's bytes.
#[derive(Debug)]
pub struct Gguf<'a> {
    pub version: u32,
    pub metadata: Metadata<'a>,
    tensors: Vec<TensorInfo<'a>>,
    by_name: HashMap<&'a str, usize>,
}

impl<'a> Gguf<'a> {
    /// Reads and checks a whole file in memory.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, GgufError> {
        let mut reader = Reader::new(bytes);
        let version = read_start(&mut reader)?;
        // The tensor count comes first but can only be checked once the keys are read: remember, then check.
        let tensor_count = reader.u64("the number of tensors")?;
        let key_count = reader.count(LEAST_KEY_BYTES, "the number of metadata keys")?;
        let metadata = Metadata::read(&mut reader, key_count)?;
        let left = reader.remaining() as u64;
        if tensor_count.checked_mul(tensors::LEAST_BYTES).is_none_or(|need| need > left) {
            return Err(GgufError::Truncated {
                what: format!("the directory of {tensor_count} tensors"),
                at: reader.position() as u64,
                need: tensor_count.saturating_mul(tensors::LEAST_BYTES),
                left,
            });
        }
        let claims = (0..tensor_count).map(|_| Claim::read(&mut reader)).collect::<Result<Vec<_>, _>>()?;
        let alignment = alignment(&metadata)?;
        let data_start = (reader.position() as u64).div_ceil(alignment).saturating_mul(alignment);
        let data = usize::try_from(data_start).ok().and_then(|start| bytes.get(start..)).unwrap_or(&[]);
        let (tensors, by_name) = tensors::place(&claims, data, alignment)?;
        Ok(Self { version, metadata, tensors, by_name })
    }

    /// In the file's order.
    #[must_use]
    pub fn tensors(&self) -> &[TensorInfo<'a>] {
        &self.tensors
    }

    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo<'a>> {
        self.by_name.get(name).map(|index| &self.tensors[*index])
    }

    /// Bytes of all tensors.
    #[must_use]
    pub fn tensor_bytes(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.data.len() as u64).sum()
    }
}

fn read_start(reader: &mut Reader<'_>) -> Result<u32, GgufError> {
    let magic = reader.take(4, "the magic number")?;
    if magic != MAGIC {
        return Err(GgufError::Magic { found: format!("`{}`", magic.escape_ascii()) });
    }
    match reader.u32("the version")? {
        version @ (2 | 3) => Ok(version),
        version if version & 0xFFFF == 0 && version != 0 => Err(GgufError::BigEndian),
        version => Err(GgufError::Version(version)),
    }
}

fn alignment(metadata: &Metadata<'_>) -> Result<u64, GgufError> {
    const KEY: &str = "general.alignment";
    let alignment = metadata.unsigned(KEY)?.unwrap_or(DEFAULT_ALIGNMENT);
    if alignment.is_power_of_two() && alignment <= 1 << 30 {
        Ok(alignment)
    } else {
        Err(GgufError::key(KEY, format!("is {alignment}, which is not a power of two of reasonable size")))
    }
}
