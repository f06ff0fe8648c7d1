//! A file in memory and what it says of itself.

use std::{collections::HashMap, path::Path};

use super::{
    GgufError, Metadata, TensorInfo, part_of,
    reader::Reader,
    split,
    tensors::{self, Claim},
};
use crate::model::map::MappedFile;

const MAGIC: &[u8] = b"GGUF";
const DEFAULT_ALIGNMENT: u64 = 32;
/// Length, type and the smallest value of a key.
const LEAST_KEY_BYTES: u64 = 8 + 4 + 1;

/// A mapped model: one file, or all parts of a split one.
#[derive(Debug)]
pub struct GgufFile {
    /// File names and bytes, in order.
    parts: Vec<(String, MappedFile)>,
}

impl GgufFile {
    /// Maps the file, and its siblings if it is the first part of a split model; reads nothing yet.
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let names: Vec<String> = match part_of(&name) {
            Some(part) if part.number != 1 => {
                return Err(GgufError::Header(format!("this is part {} of {}; open the first one", part.number, part.total)));
            }
            Some(part) if part.total > 1 => part.siblings().collect(),
            _ => return Ok(Self { parts: vec![(name, MappedFile::open(path)?)] }),
        };
        let map = |name: String| match MappedFile::open(&path.with_file_name(&name)) {
            Ok(map) => Ok((name, map)),
            Err(error) => Err(GgufError::from(error).inside(&name)),
        };
        Ok(Self { parts: names.into_iter().map(map).collect::<Result<_, _>>()? })
    }

    /// File names and bytes, in order.
    pub fn parts(&self) -> impl ExactSizeIterator<Item = (&str, &[u8])> {
        self.parts.iter().map(|(name, map)| (name.as_str(), map.bytes()))
    }

    /// Reads and checks everything but the tensors' values: the metadata of the first part, the tensors of all.
    pub fn parse(&self) -> Result<Gguf<'_>, GgufError> {
        let count = self.parts.len();
        let read = |index: usize| {
            let (name, map) = &self.parts[index];
            let part = Gguf::parse_part(map.bytes());
            let part = part.and_then(|part| split::check_part(&part, index as u64, count as u64).map(|()| part));
            part.map_err(|error| if count > 1 { error.inside(name) } else { error })
        };
        let mut whole = read(0)?;
        for index in 1..count {
            whole.append(read(index)?)?;
        }
        split::check_whole(&whole)?;
        Ok(whole)
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
    /// Reads and checks a whole file in memory, which must not be a part of a split model.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, GgufError> {
        let whole = Self::parse_part(bytes)?;
        split::check_part(&whole, 0, 1)?;
        Ok(whole)
    }

    fn parse_part(bytes: &'a [u8]) -> Result<Self, GgufError> {
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

    /// Takes over another part's tensors.
    fn append(&mut self, part: Self) -> Result<(), GgufError> {
        for tensor in part.tensors {
            if self.by_name.insert(tensor.name, self.tensors.len()).is_some() {
                return Err(GgufError::tensor(tensor.name, "stands in two parts"));
            }
            self.tensors.push(tensor);
        }
        Ok(())
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
