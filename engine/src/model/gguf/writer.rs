//! Writes GGUF version 3.

use std::io::{self, Write};

use super::{Entry, ValueType};

pub(in crate::model) const ALIGNMENT: u64 = 32;

/// A metadata value as it is stored: its type, and its bytes with an array's own header.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredValue {
    value_type: u32,
    bytes: Vec<u8>,
}

impl StoredValue {
    #[must_use]
    pub fn u32(value: u32) -> Self {
        Self { value_type: ValueType::U32.number(), bytes: value.to_le_bytes().into() }
    }

    #[must_use]
    pub fn i32(value: i32) -> Self {
        Self { value_type: ValueType::I32.number(), bytes: value.to_le_bytes().into() }
    }

    #[must_use]
    pub fn string(value: &str) -> Self {
        Self { value_type: ValueType::String.number(), bytes: text(value) }
    }
}

impl From<&Entry<'_>> for StoredValue {
    fn from(entry: &Entry<'_>) -> Self {
        let mut bytes = Vec::with_capacity(entry.raw.len() + 12);
        if entry.value_type == ValueType::Array {
            bytes.extend(entry.element.number().to_le_bytes());
            bytes.extend((entry.count as u64).to_le_bytes());
        }
        bytes.extend(entry.raw);
        Self { value_type: entry.value_type.number(), bytes }
    }
}

/// A tensor that will be written.
#[derive(Clone, Debug)]
pub struct Planned {
    pub name: String,
    /// Columns first.
    pub dimensions: Vec<u64>,
    /// GGUF's number.
    pub tensor_type: u32,
    pub bytes: u64,
}

fn text(value: &str) -> Vec<u8> {
    let mut bytes = (value.len() as u64).to_le_bytes().to_vec();
    bytes.extend(value.as_bytes());
    bytes
}

/// A file in the making: the header is written, the tensors' bytes follow in the planned order.
pub struct GgufWriter<W> {
    out: W,
    planned: std::vec::IntoIter<Planned>,
}

impl<W: Write> GgufWriter<W> {
    /// Writes everything before the data.
    ///
    /// # Errors
    /// What the destination says.
    pub fn new(mut out: W, keys: &[(String, StoredValue)], planned: Vec<Planned>) -> io::Result<Self> {
        let mut header = b"GGUF".to_vec();
        header.extend(3_u32.to_le_bytes());
        header.extend((planned.len() as u64).to_le_bytes());
        header.extend((keys.len() as u64).to_le_bytes());
        for (key, value) in keys {
            header.extend(text(key));
            header.extend(value.value_type.to_le_bytes());
            header.extend(&value.bytes);
        }
        let mut offset = 0_u64;
        for tensor in &planned {
            header.extend(text(&tensor.name));
            header.extend((tensor.dimensions.len() as u32).to_le_bytes());
            tensor.dimensions.iter().for_each(|size| header.extend(size.to_le_bytes()));
            header.extend(tensor.tensor_type.to_le_bytes());
            header.extend(offset.to_le_bytes());
            offset += tensor.bytes.next_multiple_of(ALIGNMENT);
        }
        header.resize(header.len().next_multiple_of(ALIGNMENT as usize), 0);
        out.write_all(&header)?;
        Ok(Self { out, planned: planned.into_iter() })
    }

    /// Writes the bytes of the next planned tensor, padded.
    ///
    /// # Errors
    /// What the destination says; and where there is no such tensor, or it has another length.
    pub fn tensor(&mut self, bytes: &[u8]) -> io::Result<()> {
        let fits = self.planned.next().is_some_and(|planned| planned.bytes == bytes.len() as u64);
        if !fits {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the tensor is not the one that was planned"));
        }
        self.out.write_all(bytes)?;
        let padding = (bytes.len() as u64).next_multiple_of(ALIGNMENT) - bytes.len() as u64;
        self.out.write_all(&[0; ALIGNMENT as usize][..padding as usize])
    }

    /// The destination, once all tensors are written.
    ///
    /// # Errors
    /// Where some are not.
    pub fn finish(self) -> io::Result<W> {
        match self.planned.len() {
            0 => Ok(self.out),
            missing => Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{missing} tensors were not written"))),
        }
    }
}
