//! Attention of one tile (some rows of one sequence × the query heads of one KV head) over one piece of 256 keys.
//!
//! The arithmetic of a (row, head) does not depend on the tile that it stands in:
//! - a score is one chain of fused multiply-adds over the head's elements, ascending, then times the scale;
//! - the piece's maximum; then e^(s − max), summed in 16 lanes (key i in lane i mod 16, ascending) and folded in halves;
//! - an element of the output is one chain of fused multiply-adds over the piece's keys, ascending;
//! - keys beyond the row's own limit are left out (not multiplied with zero: what lies there may be infinite).
//!
//! Micro-kernels keep R rows × J vectors in registers. Keys pass through in sub-blocks of 64 that stay in the first-level
//! cache while all rows of the tile use them; half-precision keys of a large tile are widened once per sub-block.

#![allow(clippy::undocumented_unsafe_blocks)] // One reason for all: `Tile` keeps what its fields promise.

use super::simd::{LANES, Simd};
use crate::backend::CHUNK;

/// Rows that a micro-kernel computes together at most.
const ROWS: usize = 6;
/// Vectors of keys in a sub-block.
const SUB: usize = 4;
/// Keys of a sub-block.
pub(super) const SUB_KEYS: usize = SUB * LANES;

/// Stored elements.
pub(super) trait Element: Copy + 'static {
    /// Widening them is worth a copy where many rows read them.
    const NARROW: bool;
    unsafe fn load<S: Simd>(p: *const Self) -> S::V;
}

impl Element for f32 {
    const NARROW: bool = false;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const f32) -> S::V {
        unsafe { S::load(p) }
    }
}

/// Bits of half-precision numbers.
impl Element for u16 {
    const NARROW: bool = true;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u16) -> S::V {
        unsafe { S::load_f16(p) }
    }
}

/// A tile and one thread's scratch for it. All pointers are valid for what is said beside them while the tile is used.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    /// Rows × head_dim: queries, head by head within a token.
    pub q: *const f32,
    /// (Token, head) rows, at least 1.
    pub rows: usize,
    /// Heads of a token in this tile: row r belongs to token r / heads.
    pub heads: usize,
    /// Keys that the first token sees; each later one sees one more. At least 1.
    pub first_limit: usize,
    pub head_dim: usize,
    pub padded: usize,
    pub block_size: usize,
    pub scale: f32,
    /// Keys and values of this KV head in block 0 of the layer, as the element type.
    pub base: *const u8,
    /// Elements from block to block.
    pub block: usize,
    /// Elements of a block's keys, before its values.
    pub keys: usize,
    /// Block ids, for all keys up to the last limit.
    pub table: *const u32,
    /// Rows × CHUNK.
    pub scores: *mut f32,
    /// head_dim × SUB_KEYS.
    pub wide_keys: *mut f32,
    /// SUB_KEYS × padded.
    pub wide_values: *mut f32,
    /// Of the piece, per row: Σ p·v (padded), its maximum and Σ p.
    pub piece: State,
    /// The same of all pieces so far.
    pub total: State,
}

/// Softmax-weighted sums of some rows.
#[derive(Clone, Copy)]
pub(super) struct State {
    /// Rows × padded.
    pub values: *mut f32,
    /// Rows.
    pub max: *mut f32,
    /// Rows.
    pub sum: *mut f32,
}

impl Tile {
    #[inline(always)]
    fn limit(&self, row: usize) -> usize {
        self.first_limit + row / self.heads
    }

    /// Keys of a piece that begins at `start` which `row` sees.
    #[inline(always)]
    fn seen(&self, row: usize, start: usize) -> usize {
        self.limit(row).saturating_sub(start).min(CHUNK)
    }

    /// First element of the block that holds key `key`, and the key's slot in it.
    #[inline(always)]
    unsafe fn find<T: Element>(&self, key: usize) -> (*const T, usize) {
        unsafe {
            let block = *self.table.add(key / self.block_size) as usize;
            (self.base.cast::<T>().add(block * self.block), key % self.block_size)
        }
    }
}

/// Starts `total` with no key seen.
#[inline(always)]
pub(super) unsafe fn clear<S: Simd>(tile: &Tile) {
    unsafe {
        for row in 0..tile.rows {
            *tile.total.max.add(row) = f32::NEG_INFINITY;
            *tile.total.sum.add(row) = 0.0;
        }
        for i in (0..tile.rows * tile.padded).step_by(LANES) {
            S::store(tile.total.values.add(i), S::zero());
        }
    }
}

/// Computes `piece` for the keys from `chunk` · CHUNK on. Rows that see none of them are left as they were.
#[inline(always)]
pub(super) unsafe fn attend<S: Simd, T: Element>(tile: &Tile, chunk: usize) {
    unsafe {
        let start = chunk * CHUNK;
        let groups = tile.seen(tile.rows - 1, start).div_ceil(LANES);
        for sub in (0..groups).step_by(SUB) {
            scores::<S, T>(tile, start, sub, SUB.min(groups - sub));
        }
        for row in 0..tile.rows {
            softmax::<S>(tile, row, tile.seen(row, start));
        }
        for sub in (0..groups).step_by(SUB) {
            values::<S, T>(tile, start, sub, SUB.min(groups - sub));
        }
    }
}

/// Scores of `groups` vectors of keys from vector `sub` of the piece on, all rows.
#[inline(always)]
unsafe fn scores<S: Simd, T: Element>(tile: &Tile, start: usize, sub: usize, groups: usize) {
    unsafe {
        let mut keys = [std::ptr::null::<T>(); SUB];
        for (g, key) in keys.iter_mut().enumerate().take(groups) {
            let (block, slot) = tile.find::<T>(start + (sub + g) * LANES);
            *key = block.add(slot);
        }
        if T::NARROW && tile.rows > ROWS {
            let mut wide = [std::ptr::null::<f32>(); SUB];
            for g in 0..groups {
                let to = tile.wide_keys.add(g * tile.head_dim * LANES);
                for d in 0..tile.head_dim {
                    S::store(to.add(d * LANES), T::load::<S>(keys[g].add(d * tile.block_size)));
                }
                wide[g] = to;
            }
            score_rows::<S, f32>(tile, start, sub, &wide[..groups], LANES);
        } else {
            score_rows::<S, T>(tile, start, sub, &keys[..groups], tile.block_size);
        }
    }
}

#[inline(always)]
unsafe fn score_rows<S: Simd, T: Element>(tile: &Tile, start: usize, sub: usize, keys: &[*const T], stride: usize) {
    unsafe {
        let mut row = 0;
        while row < tile.rows {
            let rows = ROWS.min(tile.rows - row);
            // Rows come in ascending order of limit: does the last one see any of these keys?
            if tile.seen(row + rows - 1, start) > sub * LANES {
                match rows {
                    1 => score_groups::<S, T, 1>(tile, row, sub, keys, stride),
                    2 => score_groups::<S, T, 2>(tile, row, sub, keys, stride),
                    3 => score_groups::<S, T, 3>(tile, row, sub, keys, stride),
                    4 => score_groups::<S, T, 4>(tile, row, sub, keys, stride),
                    5 => score_groups::<S, T, 5>(tile, row, sub, keys, stride),
                    _ => score_groups::<S, T, ROWS>(tile, row, sub, keys, stride),
                }
            }
            row += rows;
        }
    }
}

#[inline(always)]
unsafe fn score_groups<S: Simd, T: Element, const R: usize>(tile: &Tile, row: usize, sub: usize, keys: &[*const T], stride: usize) {
    unsafe {
        let mut g = 0;
        if S::MANY_REGISTERS && keys.len() == SUB {
            score_tile::<S, T, R, SUB>(tile, row, sub, keys.as_ptr(), stride);
            return;
        }
        if R <= 3 {
            while g + 2 <= keys.len() {
                score_tile::<S, T, R, 2>(tile, row, sub + g, keys.as_ptr().add(g), stride);
                g += 2;
            }
        }
        while g < keys.len() {
            score_tile::<S, T, R, 1>(tile, row, sub + g, keys.as_ptr().add(g), stride);
            g += 1;
        }
    }
}

/// q·k of R rows and J vectors of keys.
#[inline(always)]
unsafe fn score_tile<S: Simd, T: Element, const R: usize, const J: usize>(
    tile: &Tile,
    row: usize,
    group: usize,
    keys: *const *const T,
    stride: usize,
) {
    unsafe {
        let q = tile.q.add(row * tile.head_dim);
        let mut pointers = [std::ptr::null::<T>(); J];
        for j in 0..J {
            pointers[j] = *keys.add(j);
        }
        let mut sums = [[S::zero(); J]; R];
        for d in 0..tile.head_dim {
            let mut k = [S::zero(); J];
            for j in 0..J {
                k[j] = T::load::<S>(pointers[j].add(d * stride));
            }
            for r in 0..R {
                let x = S::splat(*q.add(r * tile.head_dim + d));
                for j in 0..J {
                    sums[r][j] = S::fma(x, k[j], sums[r][j]);
                }
            }
        }
        for r in 0..R {
            for j in 0..J {
                S::store(tile.scores.add((row + r) * CHUNK + (group + j) * LANES), sums[r][j]);
            }
        }
    }
}

/// Turns a row's scores into e^(scale · s − max); notes the maximum and the sum, and zeroes the row's values.
#[inline(always)]
unsafe fn softmax<S: Simd>(tile: &Tile, row: usize, seen: usize) {
    if seen == 0 {
        return;
    }
    unsafe {
        let scores = tile.scores.add(row * CHUNK);
        let (whole, rest) = (seen / LANES, seen % LANES);
        let groups = seen.div_ceil(LANES);
        let scale = S::splat(tile.scale);
        let mut largest = S::splat(f32::NEG_INFINITY);
        for g in 0..groups {
            let mut s = S::mul(S::load(scores.add(g * LANES)), scale);
            if g == whole {
                s = S::first(rest, s, S::splat(f32::NEG_INFINITY));
            }
            S::store(scores.add(g * LANES), s);
            largest = S::max(largest, s);
        }
        let max = S::reduce_max(largest);
        let shift = S::splat(max);
        let mut sums = S::zero();
        for g in 0..groups {
            let mut p = S::exp(S::sub(S::load(scores.add(g * LANES)), shift));
            if g == whole {
                p = S::first(rest, p, S::zero());
            }
            S::store(scores.add(g * LANES), p);
            sums = S::add(sums, p);
        }
        *tile.piece.max.add(row) = max;
        *tile.piece.sum.add(row) = S::reduce_add(sums);
        for i in (0..tile.padded).step_by(LANES) {
            S::store(tile.piece.values.add(row * tile.padded + i), S::zero());
        }
    }
}

/// Adds p·v of `groups` vectors of keys from vector `sub` of the piece on, all rows.
#[inline(always)]
unsafe fn values<S: Simd, T: Element>(tile: &Tile, start: usize, sub: usize, groups: usize) {
    unsafe {
        let mut values = [std::ptr::null::<T>(); SUB];
        for (g, value) in values.iter_mut().enumerate().take(groups) {
            let (block, slot) = tile.find::<T>(start + (sub + g) * LANES);
            *value = block.add(tile.keys + slot * tile.padded);
        }
        if T::NARROW && tile.rows > ROWS {
            let mut wide = [std::ptr::null::<f32>(); SUB];
            let run = LANES * tile.padded;
            for g in 0..groups {
                let to = tile.wide_values.add(g * run);
                for i in (0..run).step_by(LANES) {
                    S::store(to.add(i), T::load::<S>(values[g].add(i)));
                }
                wide[g] = to;
            }
            value_rows::<S, f32>(tile, start, sub, &wide);
        } else {
            value_rows::<S, T>(tile, start, sub, &values);
        }
    }
}

#[inline(always)]
unsafe fn value_rows<S: Simd, T: Element>(tile: &Tile, start: usize, sub: usize, values: &[*const T; SUB]) {
    unsafe {
        let seen = |row: usize| tile.seen(row, start).saturating_sub(sub * LANES).min(SUB_KEYS);
        let mut row = 0;
        while row < tile.rows {
            let rows = ROWS.min(tile.rows - row);
            // What all of these rows see together, then what only the later ones see.
            let common = seen(row);
            match rows {
                1 => value_columns::<S, T, 1>(tile, row, sub, values, 0, common),
                2 => value_columns::<S, T, 2>(tile, row, sub, values, 0, common),
                3 => value_columns::<S, T, 3>(tile, row, sub, values, 0, common),
                4 => value_columns::<S, T, 4>(tile, row, sub, values, 0, common),
                5 => value_columns::<S, T, 5>(tile, row, sub, values, 0, common),
                _ => value_columns::<S, T, ROWS>(tile, row, sub, values, 0, common),
            }
            for row in row..row + rows {
                value_columns::<S, T, 1>(tile, row, sub, values, common, seen(row));
            }
            row += rows;
        }
    }
}

#[inline(always)]
unsafe fn value_columns<S: Simd, T: Element, const R: usize>(
    tile: &Tile,
    row: usize,
    sub: usize,
    values: &[*const T; SUB],
    from: usize,
    to: usize,
) {
    if from >= to {
        return;
    }
    unsafe {
        let (mut column, columns) = (0, tile.padded / LANES);
        if S::MANY_REGISTERS {
            // Not 4 and a lone one, which would wait for its own sums.
            while column + 4 <= columns && columns - column != 5 {
                value_tile::<S, T, R, 4>(tile, row, sub, values, from, to, column);
                column += 4;
            }
            if columns - column == 3 || columns - column == 5 {
                value_tile::<S, T, R, 3>(tile, row, sub, values, from, to, column);
                column += 3;
            }
        }
        if S::MANY_REGISTERS || R <= 3 {
            while column + 2 <= columns {
                value_tile::<S, T, R, 2>(tile, row, sub, values, from, to, column);
                column += 2;
            }
        }
        while column < columns {
            value_tile::<S, T, R, 1>(tile, row, sub, values, from, to, column);
            column += 1;
        }
    }
}

/// Adds p·v of keys `from .. to` of the sub-block, for R rows and J vectors of elements.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn value_tile<S: Simd, T: Element, const R: usize, const J: usize>(
    tile: &Tile,
    row: usize,
    sub: usize,
    values: &[*const T; SUB],
    from: usize,
    to: usize,
    column: usize,
) {
    unsafe {
        let out = tile.piece.values.add(row * tile.padded + column * LANES);
        let p = tile.scores.add(row * CHUNK + sub * LANES);
        let mut sums = [[S::zero(); J]; R];
        for r in 0..R {
            for j in 0..J {
                sums[r][j] = S::load(out.add(r * tile.padded + j * LANES));
            }
        }
        let mut key = from;
        while key < to {
            let end = to.min((key / LANES + 1) * LANES);
            let group = values[key / LANES].add(column * LANES);
            while key < end {
                let value = group.add(key % LANES * tile.padded);
                let mut v = [S::zero(); J];
                for j in 0..J {
                    v[j] = T::load::<S>(value.add(j * LANES));
                }
                for r in 0..R {
                    let x = S::splat(*p.add(r * CHUNK + key));
                    for j in 0..J {
                        sums[r][j] = S::fma(x, v[j], sums[r][j]);
                    }
                }
                key += 1;
            }
        }
        for r in 0..R {
            for j in 0..J {
                S::store(out.add(r * tile.padded + j * LANES), sums[r][j]);
            }
        }
    }
}

/// Adds a later piece to `total`, for the rows that saw keys of it.
#[inline(always)]
pub(super) unsafe fn merge<S: Simd>(tile: &Tile, piece: &State, chunk: usize) {
    unsafe {
        for row in 0..tile.rows {
            if tile.seen(row, chunk * CHUNK) == 0 {
                continue;
            }
            let (before, later) = (*tile.total.max.add(row), *piece.max.add(row));
            let max = if later > before || later.is_nan() { later } else { before };
            let (a, b) = (S::exp_one(before - max), S::exp_one(later - max));
            *tile.total.max.add(row) = max;
            let sum = tile.total.sum.add(row);
            *sum = *sum * a + *piece.sum.add(row) * b;
            let (a, b) = (S::splat(a), S::splat(b));
            for i in (row * tile.padded..(row + 1) * tile.padded).step_by(LANES) {
                let total = tile.total.values.add(i);
                S::store(total, S::fma(S::load(piece.values.add(i)), b, S::mul(S::load(total), a)));
            }
        }
    }
}

/// Writes total / Σ to `out`: rows × head_dim, token `t` from `t · stride` on.
#[inline(always)]
pub(super) unsafe fn finish<S: Simd>(tile: &Tile, out: *mut f32, stride: usize) {
    unsafe {
        for row in 0..tile.rows {
            let inverse = 1.0 / *tile.total.sum.add(row);
            let to = out.add(row / tile.heads * stride + row % tile.heads * tile.head_dim);
            let from = tile.total.values.add(row * tile.padded);
            for i in 0..tile.head_dim {
                *to.add(i) = *from.add(i) * inverse;
            }
        }
    }
}
