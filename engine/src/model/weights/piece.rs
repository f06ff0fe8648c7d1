//! A stored matrix, cut and turned as a layout asks.

use std::borrow::Cow;

use quire_kernels::quant::{TensorType, TensorView};

use crate::model::{ContentError, checkpoint::Tensor, gguf::clip};

/// Rows × columns of one type.
#[derive(Clone, Debug)]
pub struct Piece<'a> {
    /// For errors.
    pub name: String,
    pub tensor_type: TensorType,
    pub rows: usize,
    pub columns: usize,
    pub data: Cow<'a, [u8]>,
}

impl<'a> Piece<'a> {
    /// A tensor as a matrix; a stack of matrices lies one below the other.
    pub fn new(tensor: Tensor<'a>) -> Self {
        let (rows, columns) = (tensor.rows(), tensor.columns());
        Self { name: tensor.name, tensor_type: tensor.tensor_type, rows, columns, data: tensor.data }
    }

    pub fn view(&self) -> TensorView<'_> {
        TensorView { tensor_type: self.tensor_type, rows: self.rows, columns: self.columns, data: &self.data }
    }

    pub fn fail(&self, problem: impl std::fmt::Display) -> ContentError {
        ContentError::Model(format!("tensor `{}`: {problem}", clip(&self.name)))
    }

    /// An error unless it has this shape.
    pub fn expect(self, rows: usize, columns: usize) -> Result<Self, ContentError> {
        if (self.rows, self.columns) == (rows, columns) {
            return Ok(self);
        }
        Err(self.fail(format!("has {} × {} values; the configuration asks for {rows} × {columns}", self.rows, self.columns)))
    }

    fn row_bytes(&self) -> usize {
        self.tensor_type.row_bytes(self.columns)
    }

    /// Rows `start .. start + rows`.
    pub fn cut(&self, start: usize, rows: usize) -> Result<Piece<'a>, ContentError> {
        let bytes = self.row_bytes();
        let short = || self.fail(format!("has {} rows, fewer than the configuration asks for", self.rows));
        let range = start * bytes..(start + rows) * bytes;
        let data = match &self.data {
            Cow::Borrowed(data) => Cow::Borrowed(data.get(range).ok_or_else(short)?),
            Cow::Owned(data) => Cow::Owned(data.get(range).ok_or_else(short)?.to_vec()),
        };
        Ok(Piece { name: self.name.clone(), tensor_type: self.tensor_type, rows, columns: self.columns, data })
    }

    /// Of every `period` rows those from `offset`, `rows` of them.
    pub fn every(&self, period: usize, offset: usize, rows: usize) -> Piece<'a> {
        let bytes = self.row_bytes();
        let groups = self.data.chunks_exact(period * bytes);
        let data: Vec<u8> = groups.flat_map(|group| &group[offset * bytes..(offset + rows) * bytes]).copied().collect();
        let rows = self.rows / period * rows;
        Piece { name: self.name.clone(), tensor_type: self.tensor_type, rows, columns: self.columns, data: Cow::Owned(data) }
    }

    /// Columns become rows. Only types without blocks can be turned.
    pub fn turned(&self) -> Result<Piece<'a>, ContentError> {
        if !self.tensor_type.is_float() {
            return Err(self.fail(format!("is of type {} and stored in × out, which is not supported", self.tensor_type.name())));
        }
        let size = self.tensor_type.block_bytes();
        let mut data = Vec::with_capacity(self.data.len());
        for column in 0..self.columns {
            for row in 0..self.rows {
                let at = (row * self.columns + column) * size;
                data.extend_from_slice(self.data.get(at..at + size).unwrap_or(&[]));
            }
        }
        let (rows, columns) = (self.columns, self.rows);
        Ok(Piece { name: self.name.clone(), tensor_type: self.tensor_type, rows, columns, data: Cow::Owned(data) })
    }
}

/// Of every `period` values those from `offset`, `count` of them.
pub fn every(values: &[f32], period: usize, offset: usize, count: usize) -> Vec<f32> {
    values.chunks_exact(period).flat_map(|group| &group[offset..offset + count]).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(rows: usize, columns: usize) -> Piece<'static> {
        let data = (0..rows * columns).flat_map(|i| (i as f32).to_le_bytes()).collect();
        Piece { name: "t".to_owned(), tensor_type: TensorType::F32, rows, columns, data: Cow::Owned(data) }
    }

    fn values(piece: &Piece<'_>) -> Vec<f32> {
        piece.data.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
    }

    #[test]
    fn cuts_and_turns() {
        let whole = piece(4, 2);
        assert_eq!(values(&whole.cut(1, 2).unwrap()), [2.0, 3.0, 4.0, 5.0]);
        assert!(whole.cut(3, 2).is_err());
        let odd = whole.every(2, 1, 1);
        assert_eq!((odd.rows, values(&odd)), (2, vec![2.0, 3.0, 6.0, 7.0]));
        let turned = whole.turned().unwrap();
        assert_eq!((turned.rows, turned.columns, values(&turned)), (2, 4, vec![0.0, 2.0, 4.0, 6.0, 1.0, 3.0, 5.0, 7.0]));
        assert_eq!(every(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0], 3, 1, 2), [1.0, 2.0, 4.0, 5.0]);
        assert!(whole.expect(2, 4).is_err());
    }
}
