//! Importance matrices: how much each column of a weight matters, measured on text by llama.cpp's `llama-imatrix`.
//!
//! Two forms: GGUF (tensors `NAME.in_sum2` and `NAME.counts`), and the older one (little-endian: entries i32; each: name
//! length i32, name, calls i32, values i32, f32 values).

use std::{collections::HashMap, path::Path};

use super::QuantizeError;
use crate::model::{
    checkpoint::Tensors,
    gguf::{Gguf, clip},
    map::MappedFile,
};

/// Numbers per tensor: one per column, or one set of them per expert.
#[derive(Debug, Default)]
pub struct Importance {
    by_name: HashMap<String, Vec<f32>>,
}

impl Importance {
    /// Reads either form.
    ///
    /// # Errors
    /// [`QuantizeError::Importance`] says what is wrong with the file.
    pub fn open(path: &Path) -> Result<Self, QuantizeError> {
        let fail = |problem: String| QuantizeError::Importance { path: path.to_owned(), problem };
        let file = MappedFile::open(path).map_err(|error| fail(format!("cannot be read: {error}")))?;
        let by_name = if file.bytes().starts_with(b"GGUF") { from_gguf(file.bytes()) } else { from_old(file.bytes()) };
        let by_name = by_name.map_err(fail)?;
        if let Some((name, _)) = by_name.iter().find(|(_, values)| values.iter().any(|value| !value.is_finite() || *value < 0.0)) {
            return Err(fail(format!("tensor `{}` has values that are no numbers of 0 or more", clip(name))));
        }
        Ok(Self { by_name })
    }

    /// The numbers of a tensor of so many columns, if there are any for it.
    ///
    /// # Errors
    /// They are of another length.
    pub fn of(&self, name: &str, columns: usize) -> Result<Option<&[f32]>, String> {
        match self.by_name.get(name) {
            Some(values) if columns == 0 || values.is_empty() || !values.len().is_multiple_of(columns) => {
                Err(format!("its importance matrix has {} values for rows of {columns}", values.len()))
            }
            found => Ok(found.map(Vec::as_slice)),
        }
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.by_name.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_name.is_empty()
    }
}

fn from_gguf(bytes: &[u8]) -> Result<HashMap<String, Vec<f32>>, String> {
    let gguf = Gguf::parse(bytes).map_err(|error| error.to_string())?;
    let tensors = Tensors::from_gguf(&gguf);
    let mut found = HashMap::new();
    for facts in tensors.iter() {
        let Some(name) = facts.name.strip_suffix(".in_sum2") else { continue };
        let read = |name: &str| tensors.needed(name).and_then(|tensor| tensor.to_f32()).map_err(|error| error.to_string());
        let (mut sums, counts) = (read(&facts.name)?, read(&format!("{name}.counts"))?);
        if counts.is_empty() || !sums.len().is_multiple_of(counts.len()) {
            return Err(format!("tensor `{}` does not fit its counts", clip(&facts.name)));
        }
        let each = sums.len() / counts.len();
        for (sums, count) in sums.chunks_mut(each.max(1)).zip(counts) {
            // An expert that was never called says nothing of its columns.
            sums.iter_mut().for_each(|sum| *sum = if count > 0.0 { *sum / count } else { 1.0 });
        }
        found.insert(name.to_owned(), sums);
    }
    Ok(found)
}

fn from_old(bytes: &[u8]) -> Result<HashMap<String, Vec<f32>>, String> {
    let short = || "is cut short, or no importance matrix".to_owned();
    let mut left = bytes;
    let mut take = |count: usize| -> Result<&[u8], String> {
        let (taken, rest) = left.split_at_checked(count).ok_or_else(short)?;
        left = rest;
        Ok(taken)
    };
    let number = |bytes: &[u8]| bytes.first_chunk().and_then(|bytes| usize::try_from(i32::from_le_bytes(*bytes)).ok()).ok_or_else(short);
    let entries = number(take(4)?)?;
    let mut found = HashMap::new();
    for _ in 0..entries {
        let length = number(take(4)?)?;
        let name = std::str::from_utf8(take(length)?).map_err(|_| "holds a name that is not UTF-8".to_owned())?.to_owned();
        let calls = number(take(4)?)?.max(1) as f32;
        let values = number(take(4)?)?;
        let values = take(values.checked_mul(4).ok_or_else(short)?)?;
        found.insert(name, values.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes) / calls).collect());
    }
    Ok(found)
}
