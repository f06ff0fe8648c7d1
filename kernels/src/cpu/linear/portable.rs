//! Micro-kernels in plain Rust, for any architecture; and the decoder behind row look-up.
//!
//! Multiplications and additions are rounded apart here: a fused one is a library call where hardware lacks it.

// One index runs through several arrays of registers; iterators would hide which.
#![allow(clippy::needless_range_loop)]

use half::{bf16, f16};

use super::{
    layout::{LANES, Packing},
    tile::Tile,
};
use crate::cpu::activations::MAX_TILE;

/// 32 columns of sixteen rows, decoded.
pub(super) struct Block {
    /// Byte 4·lane + t of word k: column 4k + t of row `lane`.
    pub(super) values: [[i8; 4 * LANES]; 8],
    pub(super) scale: [f32; LANES],
    pub(super) offset: [f32; LANES],
    /// Integer factors of the two halves of the columns.
    pub(super) halves: [[i32; LANES]; 2],
}

fn halves_at(bytes: &[u8], at: usize) -> [f32; LANES] {
    std::array::from_fn(|lane| f16::from_le_bytes([bytes[at + 2 * lane], bytes[at + 2 * lane + 1]]).to_f32())
}

fn singles_at(bytes: &[u8], at: usize) -> [f32; LANES] {
    std::array::from_fn(|lane| f32::from_le_bytes(std::array::from_fn(|i| bytes[at + 4 * lane + i])))
}

/// Block `b` of a group.
pub(super) fn decode(packing: Packing, scales: &[u8], quants: &[u8], b: usize) -> Block {
    let (sub, scale_bytes) = packing.record();
    let record = &scales[b / sub * scale_bytes..][..scale_bytes];
    let quants = &quants[b * packing.quant_bytes()..][..packing.quant_bytes()];
    let scale = if packing == Packing::Bytes { singles_at(record, 0) } else { halves_at(record, 0) };
    let mut block = Block { values: [[0; 4 * LANES]; 8], scale, offset: [0.0; LANES], halves: [[1; LANES]; 2] };
    match packing {
        Packing::Q4_0 => nibbles(quants, 8, &mut block.values),
        Packing::Q4_1 => {
            nibbles(quants, 0, &mut block.values);
            block.offset = halves_at(record, 2 * LANES);
        }
        Packing::Q4_K => {
            nibbles(quants, 0, &mut block.values);
            let dmin = halves_at(record, 2 * LANES);
            let small = &record[4 * LANES + b % sub * 2 * LANES..];
            for lane in 0..LANES {
                block.scale[lane] *= f32::from(small[lane]);
                block.offset[lane] = -(dmin[lane] * f32::from(small[LANES + lane]));
            }
        }
        Packing::Q8_0 | Packing::Bytes => {
            if packing == Packing::Bytes {
                block.offset = singles_at(record, 4 * LANES);
            }
            for (word, bytes) in block.values.iter_mut().zip(quants.as_chunks::<{ 4 * LANES }>().0) {
                *word = bytes.map(|byte| byte as i8);
            }
        }
        Packing::Q6_K => {
            let small = &record[2 * LANES + b % sub * 2 * LANES..];
            for lane in 0..LANES {
                block.halves[0][lane] = i32::from(small[lane] as i8);
                block.halves[1][lane] = i32::from(small[LANES + lane] as i8);
            }
            nibbles(quants, 32, &mut block.values);
            for (k, word) in block.values.iter_mut().enumerate() {
                let upper = &quants[16 * LANES + k / 4 * 4 * LANES..];
                for (value, &bits) in word.iter_mut().zip(upper) {
                    *value += ((bits >> (k % 4 * 2) & 3) << 4) as i8;
                }
            }
        }
        Packing::F32 | Packing::F16 | Packing::BF16 => {}
    }
    block
}

fn nibbles(quants: &[u8], zero: i8, values: &mut [[i8; 4 * LANES]; 8]) {
    let (low, high) = values.split_at_mut(4);
    for ((low, high), bytes) in low.iter_mut().zip(high).zip(quants.as_chunks::<{ 4 * LANES }>().0) {
        *low = bytes.map(|byte| (byte & 15) as i8 - zero);
        *high = bytes.map(|byte| (byte >> 4) as i8 - zero);
    }
}

/// Column `k` (0 to 1) of pair `pair` of a float group.
pub(super) fn floats(packing: Packing, quants: &[u8], column: usize) -> [f32; LANES] {
    let bytes = &quants[column * packing.quant_bytes() / 2..][..packing.quant_bytes() / 2];
    std::array::from_fn(|lane| match packing {
        Packing::F32 => f32::from_le_bytes(std::array::from_fn(|i| bytes[4 * lane + i])),
        Packing::BF16 => bf16::from_le_bytes([bytes[2 * lane], bytes[2 * lane + 1]]).to_f32(),
        _ => f16::from_le_bytes([bytes[2 * lane], bytes[2 * lane + 1]]).to_f32(),
    })
}

/// Kernel of the quantised packings.
///
/// # Safety
/// As [`super::tile::Kernel`].
pub(super) unsafe fn quantised(tile: &Tile) {
    let (width, stride, blocks, packing) = (tile.width.min(MAX_TILE), tile.stride, tile.blocks, tile.packing);
    let (sub, scale_bytes) = packing.record();
    // SAFETY: the caller says that the pointers hold a group and a tile of this packing, width and number of blocks.
    let (scales, quants, q, d, s) = unsafe {
        (
            std::slice::from_raw_parts(tile.scales, blocks / sub * scale_bytes),
            std::slice::from_raw_parts(tile.quants, blocks * packing.quant_bytes()),
            std::slice::from_raw_parts(tile.q, (blocks.saturating_sub(1) * stride + width) * 32),
            std::slice::from_raw_parts(tile.d, blocks.saturating_sub(1) * stride + width),
            std::slice::from_raw_parts(tile.s, blocks.saturating_sub(1) * stride + width),
        )
    };
    let mut sums = [[0.0_f32; LANES]; MAX_TILE];
    for b in 0..blocks {
        let block = decode(packing, scales, quants, b);
        for (c, sums) in sums[..width].iter_mut().enumerate() {
            let at = b * stride + c;
            let parts = integer_sums(&block, &q[at * 32..][..32]);
            for lane in 0..LANES {
                let sum = parts[0][lane] * block.halves[0][lane] + parts[1][lane] * block.halves[1][lane];
                sums[lane] += block.scale[lane] * d[at] * sum as f32;
                sums[lane] += block.offset[lane] * s[at];
            }
        }
    }
    // SAFETY: the caller says that there is room for width × 16 values.
    unsafe { std::slice::from_raw_parts_mut(tile.out, width * LANES) }.copy_from_slice(sums[..width].as_flattened());
}

fn integer_sums(block: &Block, q: &[i8]) -> [[i32; LANES]; 2] {
    let mut sums = [[0_i32; LANES]; 2];
    for (k, word) in block.values.iter().enumerate() {
        for (sum, values) in sums[k / 4].iter_mut().zip(word.as_chunks::<4>().0) {
            for (t, &value) in values.iter().enumerate() {
                *sum += i32::from(value) * i32::from(q[4 * k + t]);
            }
        }
    }
    sums
}

/// Kernel of the float packings.
///
/// # Safety
/// As [`super::tile::Kernel`].
pub(super) unsafe fn float(tile: &Tile) {
    let (width, columns, packing) = (tile.width.min(MAX_TILE), 2 * tile.blocks, tile.packing);
    // SAFETY: the caller says that the pointers hold a group and a tile of this packing, width and number of columns.
    let (quants, x) = unsafe {
        (std::slice::from_raw_parts(tile.quants, tile.blocks * packing.quant_bytes()), std::slice::from_raw_parts(tile.x, columns * width))
    };
    let mut sums = [[[0.0_f32; LANES]; MAX_TILE]; 2];
    for k in 0..columns {
        let weights = floats(packing, quants, k);
        for (c, sums) in sums[k % 2][..width].iter_mut().enumerate() {
            for (sum, weight) in sums.iter_mut().zip(weights) {
                *sum += weight * x[k * width + c];
            }
        }
    }
    // SAFETY: the caller says that there is room for width × 16 values.
    let out = unsafe { std::slice::from_raw_parts_mut(tile.out, width * LANES) };
    for (i, out) in out.iter_mut().enumerate() {
        *out = sums[0][i / LANES][i % LANES] + sums[1][i / LANES][i % LANES];
    }
}
