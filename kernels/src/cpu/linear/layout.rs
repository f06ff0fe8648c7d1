//! The packed form of weights: the one copy that every batch size reads.
//!
//! Sixteen rows (a group) are interleaved so that a lane of a vector is a row and no kernel ever sums across lanes. The same
//! bytes serve every instruction set. A group is its scales, padded to a cache line, then its quants:
//!
//! - quants, per 32 columns: words of 64 bytes, byte 4·lane + t of which belongs to row `lane`.
//!   - bytes: word k holds column 4k + t.
//!   - nibbles: word k holds column 4k + t (low) and 16 + 4k + t (high).
//!   - six bits: the four nibble words, then two words with the upper two bits: bits 2k and 2k + 1 of word h hold those of
//!     column 16h + 4k + t.
//! - scales, per record (32 columns, or 256 for the K types): 16 × f16 d, then what the type has more, each for 16 rows:
//!   Q4_1: f16 m. Q4_K: f16 dmin, then per 32 columns u8 scales, u8 mins. Q6_K: per 32 columns two times i8 scales.
//!   `Bytes`: f32 scale, f32 offset, no d.
//! - floats have no scales; per column 16 values, columns padded to an even number.
//!
//! Types without an own packing are re-coded without loss, to more bytes: Q5_0 and IQ4_NL as bytes with Q8_0's scale, Q3_K as
//! Q6_K, and Q5_1, Q5_K, IQ4_XS and MXFP4 as bytes with an f32 scale and an f32 offset (packing `Bytes`).

use crate::{
    KernelError,
    quant::{IQ4_VALUES, MXFP4_VALUES, TensorType, TensorView, e8m0_half, f16_at, iq4_xs_scale, q3_k_scales, scales_and_mins},
};

/// Rows of a group.
pub(super) const LANES: usize = 16;

/// How a part is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(non_camel_case_types)]
pub(super) enum Packing {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q8_0,
    /// Bytes with f32 scale and offset.
    Bytes,
    Q4_K,
    Q6_K,
}

impl Packing {
    pub(super) fn of(tensor_type: TensorType) -> Result<Self, KernelError> {
        match tensor_type {
            TensorType::F32 => Ok(Self::F32),
            TensorType::F16 => Ok(Self::F16),
            TensorType::BF16 => Ok(Self::BF16),
            TensorType::Q4_0 => Ok(Self::Q4_0),
            TensorType::Q4_1 => Ok(Self::Q4_1),
            TensorType::Q8_0 | TensorType::Q5_0 | TensorType::IQ4_NL => Ok(Self::Q8_0),
            TensorType::Q5_1 | TensorType::Q5_K | TensorType::IQ4_XS | TensorType::MXFP4 => Ok(Self::Bytes),
            TensorType::Q4_K => Ok(Self::Q4_K),
            TensorType::Q6_K | TensorType::Q3_K => Ok(Self::Q6_K),
            TensorType::Q2_K => Err(KernelError::Unsupported("weight type Q2_K".into())),
        }
    }

    pub(super) const fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F16 | Self::BF16)
    }

    /// Blocks of 32 columns in a record, and bytes of its scales.
    pub(super) const fn record(self) -> (usize, usize) {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => (1, 0),
            Self::Q4_0 | Self::Q8_0 => (1, 2 * LANES),
            Self::Q4_1 => (1, 4 * LANES),
            Self::Bytes => (1, 8 * LANES),
            Self::Q4_K => (8, 20 * LANES),
            Self::Q6_K => (8, 18 * LANES),
        }
    }

    /// Bytes of the quants of 32 columns; of two columns for floats.
    pub(super) const fn quant_bytes(self) -> usize {
        match self {
            Self::F32 => 8 * LANES,
            Self::F16 | Self::BF16 => 4 * LANES,
            Self::Q4_0 | Self::Q4_1 | Self::Q4_K => 16 * LANES,
            Self::Q8_0 | Self::Bytes => 32 * LANES,
            Self::Q6_K => 24 * LANES,
        }
    }

    /// Blocks of 32 columns; pairs of columns for floats.
    pub(super) const fn blocks(self, columns: usize) -> usize {
        columns.div_ceil(if self.is_float() { 2 } else { 32 })
    }

    /// Where a group's quants begin.
    pub(super) const fn scale_bytes(self, columns: usize) -> usize {
        let (sub, bytes) = self.record();
        (self.blocks(columns) / sub * bytes).next_multiple_of(64)
    }

    pub(super) const fn group_bytes(self, columns: usize) -> usize {
        self.scale_bytes(columns) + self.blocks(columns) * self.quant_bytes()
    }
}

/// Packs up to 16 rows from row `first` on into a zeroed group.
pub(super) fn pack_group(view: &TensorView<'_>, packing: Packing, first: usize, group: &mut [u8]) {
    let (scales, quants) = group.split_at_mut(packing.scale_bytes(view.columns));
    for lane in 0..LANES.min(view.rows - first) {
        let row = view.row(first + lane);
        let mut target = Lane { scales, quants, lane };
        match view.tensor_type {
            TensorType::F32 => target.floats::<4>(row),
            TensorType::F16 | TensorType::BF16 => target.floats::<2>(row),
            TensorType::Q4_0 => target.simple::<18, 2>(row),
            TensorType::Q4_1 => target.simple::<20, 4>(row),
            TensorType::Q8_0 => target.simple::<34, 2>(row),
            TensorType::Q5_0 => target.bytes::<22>(row, |block, i| {
                let high = u32::from_le_bytes([block[2], block[3], block[4], block[5]]) >> i & 1;
                ((block[6 + i % 16] >> (i / 16 * 4) & 15) | (high as u8) << 4).wrapping_sub(16)
            }),
            TensorType::IQ4_NL => target.bytes::<18>(row, |block, i| {
                let code = block[2 + i % 16] >> (i / 16 * 4) & 15;
                IQ4_VALUES[usize::from(code)] as u8
            }),
            TensorType::Q4_K => target.q4_k(row),
            TensorType::Q6_K => target.q6_k(row),
            TensorType::Q3_K => target.q3_k(row),
            TensorType::Q5_1 => target.q5_1(row),
            TensorType::Q5_K => target.q5_k(row),
            TensorType::IQ4_XS => target.iq4_xs(row),
            TensorType::MXFP4 => target.mxfp4(row),
            // `Packing::of` refuses it.
            TensorType::Q2_K => {}
        }
    }
}

/// One row's places in a group.
struct Lane<'a> {
    scales: &'a mut [u8],
    quants: &'a mut [u8],
    lane: usize,
}

impl Lane<'_> {
    fn floats<const SIZE: usize>(&mut self, row: &[u8]) {
        for (value, place) in row.as_chunks::<SIZE>().0.iter().zip(self.quants.chunks_exact_mut(SIZE * LANES)) {
            place[SIZE * self.lane..][..SIZE].copy_from_slice(value);
        }
    }

    /// Puts the f16s at the start of a block, one per 32 bytes from `at` on.
    fn put_halves(&mut self, at: usize, halves: &[u8]) {
        for (i, half) in halves.as_chunks::<2>().0.iter().enumerate() {
            self.scales[at + 32 * i + 2 * self.lane..][..2].copy_from_slice(half);
        }
    }

    fn put_word(quants: &mut [u8], lane: usize, index: usize, word: [u8; 4]) {
        quants[64 * index + 4 * lane..][..4].copy_from_slice(&word);
    }

    /// Blocks of f16s (`HEAD` bytes), then bytes that are packed as they are.
    fn simple<const BLOCK: usize, const HEAD: usize>(&mut self, row: &[u8]) {
        for (b, block) in row.as_chunks::<BLOCK>().0.iter().enumerate() {
            self.put_halves(b * HEAD * LANES, &block[..HEAD]);
            let quants = &mut self.quants[b * (BLOCK - HEAD) * LANES..][..(BLOCK - HEAD) * LANES];
            for (k, &word) in block[HEAD..].as_chunks::<4>().0.iter().enumerate() {
                Self::put_word(quants, self.lane, k, word);
            }
        }
    }

    /// Blocks of 32 columns with d first, re-coded as bytes.
    fn bytes<const BLOCK: usize>(&mut self, row: &[u8], code: impl Fn(&[u8; BLOCK], usize) -> u8) {
        for (b, block) in row.as_chunks::<BLOCK>().0.iter().enumerate() {
            self.put_halves(b * 2 * LANES, &block[..2]);
            let quants = &mut self.quants[b * 32 * LANES..][..32 * LANES];
            for k in 0..8 {
                Self::put_word(quants, self.lane, k, std::array::from_fn(|t| code(block, 4 * k + t)));
            }
        }
    }

    /// Nibble words of the quants of 32 columns (the low four bits of `code`).
    fn put_nibbles(&mut self, at: usize, code: impl Fn(usize) -> u8) {
        for k in 0..4 {
            let word = std::array::from_fn(|t| code(4 * k + t) & 15 | code(16 + 4 * k + t) << 4);
            Self::put_word(&mut self.quants[at..], self.lane, k, word);
        }
    }

    /// Block `b` of packing `Bytes`.
    fn put_bytes(&mut self, b: usize, scale: f32, offset: f32, code: impl Fn(usize) -> u8) {
        for (i, value) in [scale, offset].into_iter().enumerate() {
            self.scales[(b * 8 + i * 4) * LANES + 4 * self.lane..][..4].copy_from_slice(&value.to_le_bytes());
        }
        let quants = &mut self.quants[b * 32 * LANES..][..32 * LANES];
        for k in 0..8 {
            Self::put_word(quants, self.lane, k, std::array::from_fn(|t| code(4 * k + t)));
        }
    }

    fn q5_1(&mut self, row: &[u8]) {
        for (b, block) in row.as_chunks::<24>().0.iter().enumerate() {
            let high = u32::from_le_bytes([block[4], block[5], block[6], block[7]]);
            self.put_bytes(b, f16_at(block, 0), f16_at(block, 2), |i| {
                block[8 + i % 16] >> (i / 16 * 4) & 15 | ((high >> i & 1) as u8) << 4
            });
        }
    }

    fn q5_k(&mut self, row: &[u8]) {
        for (record, block) in row.as_chunks::<176>().0.iter().enumerate() {
            let (d, dmin) = (f16_at(block, 0), f16_at(block, 2));
            let packed: [u8; 12] = std::array::from_fn(|i| block[4 + i]);
            for (j, (scale, min)) in scales_and_mins(&packed).into_iter().enumerate() {
                let low = &block[48 + 32 * (j / 2)..];
                self.put_bytes(record * 8 + j, d * f32::from(scale), -(dmin * f32::from(min)), |i| {
                    low[i] >> (j % 2 * 4) & 15 | (block[16 + i] >> j & 1) << 4
                });
            }
        }
    }

    fn iq4_xs(&mut self, row: &[u8]) {
        for (record, block) in row.as_chunks::<136>().0.iter().enumerate() {
            for j in 0..8 {
                let codes = &block[8 + 16 * j..];
                self.put_bytes(record * 8 + j, f16_at(block, 0) * f32::from(iq4_xs_scale(block, j)), 0.0, |i| {
                    IQ4_VALUES[usize::from(codes[i % 16] >> (i / 16 * 4) & 15)] as u8
                });
            }
        }
    }

    fn mxfp4(&mut self, row: &[u8]) {
        for (b, block) in row.as_chunks::<17>().0.iter().enumerate() {
            self.put_bytes(b, e8m0_half(block[0]), 0.0, |i| MXFP4_VALUES[usize::from(block[1 + i % 16] >> (i / 16 * 4) & 15)] as u8);
        }
    }

    fn q4_k(&mut self, row: &[u8]) {
        for (record, block) in row.as_chunks::<144>().0.iter().enumerate() {
            let at = record * 20 * LANES;
            self.put_halves(at, &block[..4]);
            let packed: [u8; 12] = std::array::from_fn(|i| block[4 + i]);
            for (j, (scale, min)) in scales_and_mins(&packed).into_iter().enumerate() {
                let small = at + 4 * LANES + j * 2 * LANES + self.lane;
                self.scales[small] = scale;
                self.scales[small + LANES] = min;
                let bytes = &block[16 + 32 * (j / 2)..];
                self.put_nibbles((record * 8 + j) * 16 * LANES, |i| bytes[i] >> (j % 2 * 4) & 15);
            }
        }
    }

    fn q6_k(&mut self, row: &[u8]) {
        for (record, block) in row.as_chunks::<210>().0.iter().enumerate() {
            let scales: [i8; 16] = std::array::from_fn(|i| block[192 + i] as i8);
            self.put_six_bits(record, &block[208..210], &scales, |i| {
                let (half, l) = (i / 128, i % 128);
                let low = block[64 * half + l % 64] >> (4 * (l / 64)) & 15;
                let high = block[128 + 32 * half + l % 32] >> (2 * (l / 32)) & 3;
                low | high << 4
            });
        }
    }

    fn q3_k(&mut self, row: &[u8]) {
        for (record, block) in row.as_chunks::<110>().0.iter().enumerate() {
            let packed: [u8; 12] = std::array::from_fn(|i| block[96 + i]);
            self.put_six_bits(record, &block[108..110], &q3_k_scales(&packed), |i| {
                let low = block[32 + i / 128 * 32 + i % 32] >> (2 * (i % 128 / 32)) & 3;
                let high = block[i % 32] >> (i / 32) & 1;
                // q − 4 there is q − 32 here.
                (low | high << 2) + 28
            });
        }
    }

    /// A Q6_K record: 256 codes of six bits.
    fn put_six_bits(&mut self, record: usize, d: &[u8], scales: &[i8; 16], code: impl Fn(usize) -> u8) {
        let at = record * 18 * LANES;
        self.put_halves(at, d);
        for j in 0..8 {
            for half in 0..2 {
                self.scales[at + 2 * LANES + (2 * j + half) * LANES + self.lane] = scales[2 * j + half] as u8;
            }
            let quants = (record * 8 + j) * 24 * LANES;
            let code = |i: usize| code(32 * j + i);
            self.put_nibbles(quants, code);
            for half in 0..2 {
                let word = std::array::from_fn(|t| (0..4).fold(0, |byte, k| byte | code(16 * half + 4 * k + t) >> 4 << (2 * k)));
                Self::put_word(&mut self.quants[quants + 256..], self.lane, half, word);
            }
        }
    }
}
