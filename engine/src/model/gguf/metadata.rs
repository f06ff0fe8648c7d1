//! Keys and values, decoded when asked for.

use std::collections::HashMap;

use super::{GgufError, error::clip, reader::Reader};

/// Type of a metadata value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

impl ValueType {
    /// In the order of their numbers.
    const ALL: [Self; 13] = [
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::U32,
        Self::I32,
        Self::F32,
        Self::Bool,
        Self::String,
        Self::Array,
        Self::U64,
        Self::I64,
        Self::F64,
    ];

    fn from_number(number: u32) -> Option<Self> {
        Self::ALL.get(usize::try_from(number).ok()?).copied()
    }

    /// Its number in a file.
    pub(super) fn number(self) -> u32 {
        self as u32
    }

    /// Bytes of one value; `None` for those that carry a length.
    fn bytes(self) -> Option<u64> {
        match self {
            Self::U8 | Self::I8 | Self::Bool => Some(1),
            Self::U16 | Self::I16 => Some(2),
            Self::U32 | Self::I32 | Self::F32 => Some(4),
            Self::U64 | Self::I64 | Self::F64 => Some(8),
            Self::String | Self::Array => None,
        }
    }
}

/// A value that is one number or truth value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scalar {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
}

impl Scalar {
    fn unsigned(self) -> Option<u64> {
        match self {
            Self::Unsigned(value) => Some(value),
            Self::Signed(value) => u64::try_from(value).ok(),
            _ => None,
        }
    }

    fn float(self) -> Option<f64> {
        match self {
            Self::Float(value) => Some(value),
            Self::Unsigned(value) => Some(value as f64),
            Self::Signed(value) => Some(value as f64),
            Self::Bool(_) => None,
        }
    }
}

/// A checked value: its type and its bytes in the file.
#[derive(Clone, Copy, Debug)]
pub struct Entry<'a> {
    pub value_type: ValueType,
    /// Of an array: type of its elements; else the same as `value_type`.
    pub element: ValueType,
    /// Of an array: number of its elements; else 1.
    pub count: usize,
    /// The value as stored, without an array's own header.
    pub raw: &'a [u8],
}

impl<'a> Entry<'a> {
    fn read(reader: &mut Reader<'a>, key: &str) -> Result<Self, GgufError> {
        let value_type = Self::read_type(reader, key)?;
        let (element, count) = if value_type == ValueType::Array {
            let element = Self::read_type(reader, key)?;
            if element == ValueType::Array {
                return Err(GgufError::key(key, "is an array of arrays, which no model needs"));
            }
            (element, reader.count(element.bytes().unwrap_or(8), &format!("the array `{}`", clip(key)))?)
        } else {
            (value_type, 1)
        };
        let what = format!("the value of `{}`", clip(key));
        let raw = match element.bytes() {
            // `count` has been checked against the file, so this cannot overflow.
            Some(bytes) => reader.take(bytes * count as u64, &what)?,
            None => {
                let mut ahead = reader.clone();
                for _ in 0..count {
                    ahead.string(&what)?;
                }
                reader.take((ahead.position() - reader.position()) as u64, &what)?
            }
        };
        Ok(Self { value_type, element, count, raw })
    }

    fn read_type(reader: &mut Reader<'a>, key: &str) -> Result<ValueType, GgufError> {
        let number = reader.u32(&format!("the type of `{}`", clip(key)))?;
        ValueType::from_number(number).ok_or_else(|| GgufError::key(key, format!("has the unknown value type {number}")))
    }

    /// The numbers of an array, or the one of a scalar; empty for strings.
    pub fn scalars(&self) -> impl Iterator<Item = Scalar> + 'a {
        let element = self.element;
        // Strings have no fixed size: a chunk longer than any value yields none.
        let size = element.bytes().map_or(usize::MAX, |bytes| bytes as usize);
        self.raw.chunks_exact(size).map(move |bytes| {
            let mut wide = [0; 8];
            wide[..bytes.len()].copy_from_slice(bytes);
            let unsigned = u64::from_le_bytes(wide);
            match element {
                ValueType::I8 => Scalar::Signed(i64::from(unsigned as u8 as i8)),
                ValueType::I16 => Scalar::Signed(i64::from(unsigned as u16 as i16)),
                ValueType::I32 => Scalar::Signed(i64::from(unsigned as u32 as i32)),
                ValueType::I64 => Scalar::Signed(unsigned as i64),
                ValueType::F32 => Scalar::Float(f64::from(f32::from_bits(unsigned as u32))),
                ValueType::F64 => Scalar::Float(f64::from_bits(unsigned)),
                ValueType::Bool => Scalar::Bool(unsigned != 0),
                _ => Scalar::Unsigned(unsigned),
            }
        })
    }

    /// The strings of an array, or the one of a string; empty for numbers.
    pub fn strings(&self) -> impl Iterator<Item = &'a [u8]> + 'a {
        let mut reader = Reader::new(if self.element == ValueType::String { self.raw } else { &[] });
        std::iter::from_fn(move || reader.string("a string").ok())
    }
}

/// All metadata of a file.
#[derive(Debug, Default)]
pub struct Metadata<'a> {
    entries: HashMap<&'a str, Entry<'a>>,
}

impl<'a> Metadata<'a> {
    pub(super) fn read(reader: &mut Reader<'a>, count: usize) -> Result<Self, GgufError> {
        // `count` was checked against the file, but a small entry in the file is a larger one in memory.
        let mut entries = HashMap::with_capacity(count.min(1024));
        for _ in 0..count {
            let key = reader.name("a metadata key")?;
            if key.is_empty() {
                return Err(GgufError::Header("a metadata key is empty".to_owned()));
            }
            let entry = Entry::read(reader, key)?;
            if entries.insert(key, entry).is_some() {
                return Err(GgufError::key(key, "stands in the file twice"));
            }
        }
        Ok(Self { entries })
    }

    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Entry<'a>> {
        self.entries.get(key)
    }

    /// All keys with their values, by key.
    #[must_use]
    pub fn sorted(&self) -> Vec<(&'a str, Entry<'a>)> {
        let mut all: Vec<_> = self.entries.iter().map(|(key, entry)| (*key, *entry)).collect();
        all.sort_unstable_by_key(|(key, _)| *key);
        all
    }

    fn typed<T>(&self, key: &str, wanted: &str, read: impl FnOnce(&Entry<'a>) -> Option<T>) -> Result<Option<T>, GgufError> {
        let Some(entry) = self.get(key) else { return Ok(None) };
        read(entry).map(Some).ok_or_else(|| GgufError::key(key, format!("is not {wanted} (it is stored as {:?})", entry.value_type)))
    }

    pub fn string(&self, key: &str) -> Result<Option<&'a str>, GgufError> {
        self.typed(key, "a string in UTF-8", |entry| match entry.value_type {
            ValueType::String => std::str::from_utf8(entry.strings().next()?).ok(),
            _ => None,
        })
    }

    /// Any integer that is not negative.
    pub fn unsigned(&self, key: &str) -> Result<Option<u64>, GgufError> {
        self.typed(key, "a number of 0 or more", |entry| match entry.value_type {
            ValueType::Array => None,
            _ => entry.scalars().next()?.unsigned(),
        })
    }

    pub fn float(&self, key: &str) -> Result<Option<f32>, GgufError> {
        self.typed(key, "a number", |entry| match entry.value_type {
            ValueType::Array => None,
            _ => entry.scalars().next()?.float().map(|value| value as f32),
        })
    }

    pub fn boolean(&self, key: &str) -> Result<Option<bool>, GgufError> {
        self.typed(key, "true or false", |entry| match (entry.value_type, entry.scalars().next()?) {
            (ValueType::Bool, Scalar::Bool(value)) => Some(value),
            _ => None,
        })
    }

    /// An array of strings.
    pub fn strings(&self, key: &str) -> Result<Option<Vec<&'a str>>, GgufError> {
        self.typed(key, "an array of strings in UTF-8", |entry| match (entry.value_type, entry.element) {
            (ValueType::Array, ValueType::String) => entry.strings().map(|text| std::str::from_utf8(text).ok()).collect(),
            _ => None,
        })
    }

    /// An array of numbers.
    pub fn floats(&self, key: &str) -> Result<Option<Vec<f32>>, GgufError> {
        self.typed(key, "an array of numbers", |entry| match (entry.value_type, entry.element) {
            (ValueType::Array, element) if element.bytes().is_some() => {
                entry.scalars().map(|scalar| scalar.float().map(|value| value as f32)).collect()
            }
            _ => None,
        })
    }

    /// An array of integers that are not negative; a scalar counts as an array of one.
    pub fn unsigneds(&self, key: &str) -> Result<Option<Vec<u64>>, GgufError> {
        self.typed(key, "a number of 0 or more, or an array of them", |entry| match entry.element.bytes() {
            Some(_) => entry.scalars().map(Scalar::unsigned).collect(),
            None => None,
        })
    }
}
