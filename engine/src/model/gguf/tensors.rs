//! The tensor directory.

use std::collections::HashMap;

use quire_kernels::quant::TensorView;

use super::{GgmlType, GgufError, reader::Reader};

/// Name (length), rank, type and offset of a tensor without name and dimensions.
pub(super) const LEAST_BYTES: u64 = 8 + 4 + 4 + 8;

/// A tensor whose place in the file has been checked.
#[derive(Clone, Copy, Debug)]
pub struct TensorInfo<'a> {
    pub name: &'a str,
    /// Columns first; unused ones are 1.
    pub dimensions: [usize; 4],
    /// Dimensions that the file names.
    pub rank: usize,
    pub tensor_type: GgmlType,
    /// From the start of the data section.
    pub offset: u64,
    pub data: &'a [u8],
}

impl<'a> TensorInfo<'a> {
    /// Outermost first, without the unused ones.
    #[must_use]
    pub fn shape(&self) -> Vec<usize> {
        self.dimensions[..self.rank].iter().rev().copied().collect()
    }

    #[must_use]
    pub fn columns(&self) -> usize {
        self.dimensions[0]
    }

    #[must_use]
    pub fn rows(&self) -> usize {
        self.dimensions[1..].iter().product()
    }

    #[must_use]
    pub fn elements(&self) -> usize {
        self.rows() * self.columns()
    }

    /// The tensor as a matrix for the kernels; an error if they do not know its type.
    pub fn view(&self) -> Result<TensorView<'a>, GgufError> {
        let Some(tensor_type) = self.tensor_type.kernel else {
            let problem = format!("has type {}, which is not supported yet; supported: {}", self.tensor_type.name, GgmlType::supported());
            return Err(GgufError::tensor(self.name, problem));
        };
        Ok(TensorView { tensor_type, rows: self.rows(), columns: self.columns(), data: self.data })
    }
}

/// A tensor as the file describes it.
pub(super) struct Claim<'a> {
    name: &'a str,
    dimensions: [usize; 4],
    rank: usize,
    tensor_type: GgmlType,
    offset: u64,
    bytes: u64,
}

impl<'a> Claim<'a> {
    pub fn read(reader: &mut Reader<'a>) -> Result<Self, GgufError> {
        let name = reader.name("a tensor name")?;
        let fail = |problem: String| GgufError::tensor(name, problem);
        let rank = reader.u32("a tensor's number of dimensions")?;
        if rank > 4 {
            return Err(fail(format!("has {rank} dimensions; there are 4 at most")));
        }
        let mut dimensions = [1; 4];
        for dimension in &mut dimensions[..rank as usize] {
            let size = reader.u64("a tensor's dimensions")?;
            *dimension = usize::try_from(size).map_err(|_| fail(format!("has a dimension of {size}")))?;
            if size == 0 {
                return Err(fail("has a dimension of 0".to_owned()));
            }
        }
        let tensor_type = GgmlType::from_number(reader.u32("a tensor's type")?).map_err(fail)?;
        let offset = reader.u64("a tensor's offset")?;
        let columns = dimensions[0];
        if !columns.is_multiple_of(tensor_type.block) {
            let problem = format!(
                "has rows of {columns} values, which is not a multiple of the {} that {} packs together",
                tensor_type.block, tensor_type.name
            );
            return Err(fail(problem));
        }
        let bytes = dimensions[1..]
            .iter()
            .try_fold((columns / tensor_type.block) as u64, |product, size| product.checked_mul(*size as u64))
            .and_then(|blocks| blocks.checked_mul(tensor_type.bytes as u64))
            // Elements must be countable too, not only bytes.
            .filter(|bytes| bytes.checked_mul(32).is_some())
            .ok_or_else(|| fail(format!("has dimensions {dimensions:?}, which no file can hold")))?;
        Ok(Self { name, dimensions, rank: rank as usize, tensor_type, offset, bytes })
    }

    /// Finds the tensor in the data section.
    fn place(&self, data: &'a [u8], alignment: u64) -> Result<TensorInfo<'a>, GgufError> {
        if !self.offset.is_multiple_of(alignment) {
            return Err(GgufError::tensor(
                self.name,
                format!("starts at {}, which is not a multiple of the alignment {alignment}", self.offset),
            ));
        }
        let place =
            self.offset.checked_add(self.bytes).filter(|end| *end <= data.len() as u64).map(|end| self.offset as usize..end as usize);
        let Some(place) = place else {
            let problem = format!(
                "lies outside the file: {} bytes from {} of {} bytes of data; the file is cut short or damaged: download it again",
                self.bytes,
                self.offset,
                data.len()
            );
            return Err(GgufError::tensor(self.name, problem));
        };
        Ok(TensorInfo {
            name: self.name,
            dimensions: self.dimensions,
            rank: self.rank,
            tensor_type: self.tensor_type,
            offset: self.offset,
            data: &data[place],
        })
    }
}

/// Places all tensors; no two may share a name or a byte.
pub(super) fn place<'a>(
    claims: &[Claim<'a>],
    data: &'a [u8],
    alignment: u64,
) -> Result<(Vec<TensorInfo<'a>>, HashMap<&'a str, usize>), GgufError> {
    let mut tensors = Vec::with_capacity(claims.len());
    let mut by_name = HashMap::with_capacity(claims.len());
    for claim in claims {
        if by_name.insert(claim.name, tensors.len()).is_some() {
            return Err(GgufError::tensor(claim.name, "stands in the file twice"));
        }
        tensors.push(claim.place(data, alignment)?);
    }
    let mut order: Vec<&TensorInfo<'_>> = tensors.iter().collect();
    order.sort_unstable_by_key(|tensor| tensor.offset);
    for pair in order.windows(2) {
        if pair[0].offset + pair[0].data.len() as u64 > pair[1].offset {
            return Err(GgufError::tensor(pair[1].name, format!("overlaps tensor `{}`", super::error::clip(pair[0].name))));
        }
    }
    Ok((tensors, by_name))
}
