//! Tensors by name, in types that kernels read.

use std::borrow::Cow;

use quire_kernels::quant::{TensorType, TensorView, dequantize};

use super::quantised::{self, Parts, QuantConfig, Recipe, Weight};
use crate::model::{
    ContentError,
    gguf::{GgmlType, Gguf, clip},
    quantize::fallback,
    safetensors::{Dtype, StoredTensor, decode_f8},
};

/// What is known of a tensor without reading it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorFacts {
    pub name: String,
    /// Outermost first: rows before columns, experts before rows.
    pub shape: Vec<usize>,
    /// As the container calls it: `Q4_K`, `BF16`, `F8_E4M3`.
    pub type_name: String,
    /// Stored bytes.
    pub bytes: u64,
}

/// A tensor in a type that kernels read: the file's own bytes where possible.
#[derive(Clone, Debug)]
pub struct Tensor<'a> {
    pub name: String,
    /// Outermost first.
    pub shape: Vec<usize>,
    pub tensor_type: TensorType,
    /// Rows one after the other, each a whole number of blocks.
    pub data: Cow<'a, [u8]>,
}

impl Tensor<'_> {
    /// The innermost size.
    #[must_use]
    pub fn columns(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// All other sizes together: a stack of matrices has the rows of all.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.shape.split_last().map_or(1, |(_, outer)| outer.iter().product())
    }

    #[must_use]
    pub fn view(&self) -> TensorView<'_> {
        TensorView { tensor_type: self.tensor_type, rows: self.rows(), columns: self.columns(), data: &self.data }
    }

    /// All values.
    ///
    /// # Errors
    /// [`ContentError`] where the data is not as long as the shape says.
    pub fn to_f32(&self) -> Result<Vec<f32>, ContentError> {
        let mut values = vec![0.0; self.rows() * self.columns()];
        dequantize(self.tensor_type, &self.data, &mut values)?;
        Ok(values)
    }
}

/// All tensors of a model, by name.
#[derive(Debug)]
pub struct Tensors<'a> {
    /// By name.
    entries: Vec<(TensorFacts, Stored<'a>)>,
    /// What the files hold, by name: the same, but for weights that several stored tensors make.
    pieces: Vec<(TensorFacts, &'a [u8])>,
}

/// Where a tensor's values come from.
#[derive(Debug)]
enum Stored<'a> {
    Gguf { tensor_type: GgmlType, data: &'a [u8] },
    Plain { dtype: Dtype, data: &'a [u8] },
    Quantised(Recipe<'a>),
}

impl<'a> Tensors<'a> {
    /// Tensors of a GGUF file, under its names.
    #[must_use]
    pub fn from_gguf(gguf: &Gguf<'a>) -> Self {
        let mut pieces = Vec::with_capacity(gguf.tensors().len());
        let entries = gguf.tensors().iter().map(|tensor| {
            let facts = TensorFacts {
                name: tensor.name.to_owned(),
                shape: tensor.shape(),
                type_name: tensor.tensor_type.name.to_owned(),
                bytes: tensor.data.len() as u64,
            };
            pieces.push((facts.clone(), tensor.data));
            (facts, Stored::Gguf { tensor_type: tensor.tensor_type, data: tensor.data })
        });
        let entries = entries.collect();
        Self::sorted(entries, pieces)
    }

    /// Tensors of safetensors files, under their names; quantised weights under the name that a plain one would have.
    ///
    /// # Errors
    /// [`ContentError`]: the parts of a quantised weight do not fit together.
    pub fn from_safetensors(tensors: Vec<StoredTensor<'a>>, quantization: Option<&QuantConfig>) -> Result<Self, ContentError> {
        let pieces = tensors.iter().map(|tensor| (facts_of(tensor), tensor.data)).collect();
        let parts = match quantization {
            Some(config) => quantised::gather(tensors, config)?,
            None => Parts { plain: tensors, weights: Vec::new() },
        };
        let plain = parts.plain.into_iter().map(|tensor| (facts_of(&tensor), Stored::Plain { dtype: tensor.dtype, data: tensor.data }));
        let weights = parts.weights.into_iter().map(|Weight { name, shape, bytes, recipe }| {
            (TensorFacts { name, shape, type_name: recipe.type_name(), bytes }, Stored::Quantised(recipe))
        });
        Ok(Self::sorted(plain.chain(weights).collect(), pieces))
    }

    fn sorted(mut entries: Vec<(TensorFacts, Stored<'a>)>, mut pieces: Vec<(TensorFacts, &'a [u8])>) -> Self {
        entries.sort_unstable_by(|a, b| a.0.name.cmp(&b.0.name));
        pieces.sort_unstable_by(|a, b| a.0.name.cmp(&b.0.name));
        Self { entries, pieces }
    }

    /// By name.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &TensorFacts> {
        self.entries.iter().map(|(facts, _)| facts)
    }

    fn find(&self, name: &str) -> Option<&(TensorFacts, Stored<'a>)> {
        self.entries.binary_search_by(|(facts, _)| facts.name.as_str().cmp(name)).ok().map(|index| &self.entries[index])
    }

    #[must_use]
    pub fn facts(&self, name: &str) -> Option<&TensorFacts> {
        self.find(name).map(|(facts, _)| facts)
    }

    /// Stored bytes of all tensors.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.iter().map(|facts| facts.bytes).sum()
    }

    /// Bytes of all tensors if matrices were in this type wherever that takes fewer.
    #[must_use]
    pub fn bytes_in(&self, tensor_type: TensorType) -> u64 {
        let bytes = |facts: &TensorFacts| match facts.shape[..] {
            [ref rows @ .., columns] if !rows.is_empty() => {
                let row = fallback(tensor_type, columns).row_bytes(columns);
                facts.bytes.min((rows.iter().product::<usize>() * row) as u64)
            }
            _ => facts.bytes,
        };
        self.iter().map(bytes).sum()
    }

    /// A tensor as it is stored, for those that are no weights.
    #[must_use]
    pub fn raw(&self, name: &str) -> Option<(&TensorFacts, &'a [u8])> {
        let index = self.pieces.binary_search_by(|(facts, _)| facts.name.as_str().cmp(name)).ok()?;
        self.stored().nth(index)
    }

    /// Everything that is stored, in the order of names. For hashes.
    pub fn stored(&self) -> impl Iterator<Item = (&TensorFacts, &'a [u8])> {
        self.pieces.iter().map(|(facts, data)| (facts, *data))
    }

    /// The tensor of that name, if there is one.
    ///
    /// # Errors
    /// [`ContentError`]: it is there but of a type that is no weight.
    pub fn get(&self, name: &str) -> Result<Option<Tensor<'a>>, ContentError> {
        let Some((facts, stored)) = self.find(name) else { return Ok(None) };
        let (tensor_type, data) = match stored {
            Stored::Gguf { tensor_type, data } => {
                let kernel = tensor_type.kernel.ok_or_else(|| {
                    fail(name, format!("has type {}, which is not supported yet; supported: {}", tensor_type.name, GgmlType::supported()))
                })?;
                (kernel, Cow::Borrowed(*data))
            }
            Stored::Plain { dtype, data } => plain(name, *dtype, data)?,
            Stored::Quantised(recipe) => {
                let (tensor_type, data) = recipe.decode()?;
                (tensor_type, Cow::Owned(data))
            }
        };
        Ok(Some(Tensor { name: facts.name.clone(), shape: facts.shape.clone(), tensor_type, data }))
    }

    /// The tensor of that name.
    ///
    /// # Errors
    /// As [`Tensors::get`]; and where there is none.
    pub fn needed(&self, name: &str) -> Result<Tensor<'a>, ContentError> {
        self.get(name)?.ok_or_else(|| fail(name, "is missing"))
    }
}

fn facts_of(tensor: &StoredTensor<'_>) -> TensorFacts {
    TensorFacts {
        name: tensor.name.to_string(),
        shape: tensor.shape.clone(),
        type_name: tensor.dtype.name().to_owned(),
        bytes: tensor.data.len() as u64,
    }
}

fn fail(name: &str, problem: impl AsRef<str>) -> ContentError {
    ContentError::Model(format!("tensor `{}`: {}", clip(name), problem.as_ref()))
}

/// A stored element type as one that kernels read, exactly: 8-bit floats become BF16, which holds all their values.
fn plain<'a>(name: &str, dtype: Dtype, data: &'a [u8]) -> Result<(TensorType, Cow<'a, [u8]>), ContentError> {
    Ok(match dtype {
        Dtype::F32 => (TensorType::F32, Cow::Borrowed(data)),
        Dtype::F16 => (TensorType::F16, Cow::Borrowed(data)),
        Dtype::BF16 => (TensorType::BF16, Cow::Borrowed(data)),
        Dtype::F8_E4M3 | Dtype::F8_E5M2 => {
            let table: [[u8; 2]; 256] = std::array::from_fn(|byte| half::bf16::from_f32(decode_f8(dtype, byte as u8)).to_le_bytes());
            (TensorType::BF16, Cow::Owned(data.iter().flat_map(|byte| table[usize::from(*byte)]).collect()))
        }
        Dtype::F64 => {
            let values = data.as_chunks::<8>().0.iter().flat_map(|bytes| (f64::from_le_bytes(*bytes) as f32).to_le_bytes());
            (TensorType::F32, Cow::Owned(values.collect()))
        }
        other => return Err(fail(name, format!("has type {}, which is no type of weights", other.name()))),
    })
}
