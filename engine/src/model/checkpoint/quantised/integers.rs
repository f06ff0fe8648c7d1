//! Packed integers with a scale and a zero point per group of columns: GPTQ, AWQ, compressed-tensors.

use half::f16;
use quire_kernels::quant::TensorType;
use rayon::prelude::*;

use super::exact;

/// Where the value of a row and a column stands among the 32-bit words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::model::checkpoint) enum Packing {
    /// A stream of bits down the columns of words: \[in·bits/32, out\].
    Gptq,
    /// Eight outputs a word, interleaved: \[in, out/8\].
    Awq,
    /// Whole values from the low bits up, each row padded to words: \[out, words\].
    Rows,
}

/// The nibble of AWQ's word that holds output 0, 1, … of its eight.
pub(super) const AWQ_NIBBLES: [u32; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// A weight of `rows` outputs and `columns` inputs: s·(q − z).
#[derive(Debug)]
pub(in crate::model::checkpoint) struct IntegerMatrix<'a> {
    pub rows: usize,
    pub columns: usize,
    pub bits: u32,
    pub packing: Packing,
    /// Little-endian 32-bit words.
    pub words: &'a [u8],
    pub group_of: Groups,
    /// As stored; \[groups, rows\] or \[rows, groups\].
    pub scales: Table<f32>,
    /// Zero points of the unsigned values.
    pub zeros: Table<i16>,
}

/// The group of each column.
#[derive(Debug)]
pub(in crate::model::checkpoint) enum Groups {
    /// Consecutive columns.
    Every(usize),
    Named(Vec<u32>),
}

/// A value per row and group.
#[derive(Debug)]
pub(in crate::model::checkpoint) enum Table<T> {
    One(T),
    ByGroup { values: Vec<T>, rows: usize },
    ByRow { values: Vec<T>, groups: usize },
}

impl<T: Copy + PartialEq> Table<T> {
    fn at(&self, row: usize, group: usize) -> T {
        match self {
            Self::One(value) => *value,
            Self::ByGroup { values, rows } => values[group * rows + row],
            Self::ByRow { values, groups } => values[row * groups + group],
        }
    }

    fn all(&self, is: impl Fn(T) -> bool) -> bool {
        match self {
            Self::One(value) => is(*value),
            Self::ByGroup { values, .. } | Self::ByRow { values, .. } => values.iter().all(|value| is(*value)),
        }
    }
}

/// Value `index` of a stream of `bits`-bit values in words that are `stride` words apart, from word `start`.
pub(super) fn stream(words: &[u8], start: usize, stride: usize, index: usize, bits: u32) -> u32 {
    let word = |at: usize| {
        let at = 4 * (start + at * stride);
        u64::from(u32::from_le_bytes([words[at], words[at + 1], words[at + 2], words[at + 3]]))
    };
    let bit = index * bits as usize;
    let (at, shift) = (bit / 32, (bit % 32) as u32);
    let mut both = word(at);
    if shift + bits > 32 {
        both |= word(at + 1) << 32;
    }
    (both >> shift) as u32 & ((1 << bits) - 1)
}

impl IntegerMatrix<'_> {
    pub fn bits(&self) -> u32 {
        self.bits
    }

    fn values(&self, row: usize, out: &mut [u8]) {
        match self.packing {
            Packing::Gptq => {
                out.iter_mut().enumerate().for_each(|(column, q)| *q = stream(self.words, row, self.rows, column, self.bits) as u8);
            }
            Packing::Awq => {
                let nibble = row / 8 * 8 + AWQ_NIBBLES[row % 8] as usize;
                for (column, q) in out.iter_mut().enumerate() {
                    *q = stream(self.words, column * (self.rows / 8), 1, nibble, 4) as u8;
                }
            }
            Packing::Rows => {
                let each = (32 / self.bits) as usize;
                let words = self.columns.div_ceil(each);
                for (column, q) in out.iter_mut().enumerate() {
                    // Values never cross words here.
                    let word = row * words + column / each;
                    *q = stream(self.words, word, 1, column % each, self.bits) as u8;
                }
            }
        }
    }

    fn group(&self, column: usize) -> usize {
        match &self.group_of {
            Groups::Every(size) => column / size,
            Groups::Named(groups) => groups[column] as usize,
        }
    }

    /// A block type of the same zero point, if blocks of 32 columns never cross groups and its f16 holds the scales.
    fn same_block(&self) -> Option<TensorType> {
        let whole = match &self.group_of {
            Groups::Every(size) => size.is_multiple_of(32),
            Groups::Named(groups) => groups.chunks(32).all(|block| block.iter().all(|group| *group == block[0])),
        };
        let symmetric = self.zeros.all(|zero| zero == 1 << (self.bits - 1));
        if !whole || !symmetric || !self.columns.is_multiple_of(32) || !self.scales.all(exact::is_f16) {
            return None;
        }
        match self.bits {
            4 => Some(TensorType::Q4_0),
            8 => Some(TensorType::Q8_0),
            _ => None,
        }
    }

    pub fn decode(&self) -> (TensorType, Vec<u8>) {
        match self.same_block() {
            Some(tensor_type) => (tensor_type, self.repack(tensor_type)),
            None => exact::smallest(&self.to_f32()),
        }
    }

    fn repack(&self, tensor_type: TensorType) -> Vec<u8> {
        let row_bytes = tensor_type.row_bytes(self.columns);
        let mut out = vec![0; self.rows * row_bytes];
        out.par_chunks_mut(row_bytes.max(1)).enumerate().for_each_init(
            || vec![0; self.columns],
            |q, (row, out)| {
                self.values(row, q);
                let blocks = q.as_chunks::<32>().0.iter().zip(out.chunks_exact_mut(tensor_type.block_bytes()));
                for (block, (q, out)) in blocks.enumerate() {
                    let scale = f16::from_f32(self.scales.at(row, self.group(32 * block)));
                    out[..2].copy_from_slice(&scale.to_le_bytes());
                    if tensor_type == TensorType::Q4_0 {
                        out[2..].iter_mut().enumerate().for_each(|(i, out)| *out = q[i] | q[i + 16] << 4);
                    } else {
                        out[2..].iter_mut().zip(q).for_each(|(out, q)| *out = q.wrapping_sub(128));
                    }
                }
            },
        );
        out
    }

    fn to_f32(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.rows * self.columns];
        out.par_chunks_mut(self.columns.max(1)).enumerate().for_each_init(
            || vec![0; self.columns],
            |q, (row, out)| {
                self.values(row, q);
                for (column, (out, q)) in out.iter_mut().zip(q).enumerate() {
                    let group = self.group(column);
                    *out = self.scales.at(row, group) * f32::from(i16::from(*q) - self.zeros.at(row, group));
                }
            },
        );
        out
    }
}
