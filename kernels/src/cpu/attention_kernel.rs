//! Attention of one tile (some rows of one sequence × the query heads of one KV head) over one piece of 256 keys.
//!
//! The arithmetic of a (row, head) does not depend on the tile that it stands in:
//! - a score is one chain of fused multiply-adds over the head's elements, ascending, then times the scale (and the key's own);
//! - the piece's maximum; then e^(s − max), summed in 16 lanes (key i in lane i mod 16, ascending) and folded in halves;
//! - an element of the output is one chain of fused multiply-adds over the piece's keys, ascending, of e^(s − max) (times the
//!   value's scale) and the stored element;
//! - keys outside of what the row sees are left out (not multiplied with zero: what lies there may be infinite).
//!
//! Micro-kernels keep R rows × J vectors in registers. Keys pass through in sub-blocks of 64 that stay in the first-level
//! cache while all rows of the tile use them; narrow elements of a large tile are widened once per sub-block, and values that are
//! part of their keys are turned from [element][key] to [key][element]. Tiles of few rows wait for memory, where blocks lie
//! apart: while they multiply keys they ask for the same keys' values, and with those for the keys of the next piece.

#![allow(clippy::undocumented_unsafe_blocks)] // One reason for all: `Tile` keeps what its fields promise.

use super::{
    attention_softmax::softmax,
    attention_tile::{Element, SUB, SUB_KEYS, Single, Tile},
    simd::{LANES, Simd},
};
use crate::backend::CHUNK;

/// Rows that a micro-kernel computes together at most.
const ROWS: usize = 6;

/// Computes `piece` for the keys from `chunk` · CHUNK on. Rows that see none of them are left as they were.
#[inline(always)]
pub(super) unsafe fn attend<S: Simd, T: Element>(tile: &Tile, chunk: usize) {
    unsafe {
        let start = chunk * CHUNK;
        // Rows come in ascending order of what they see first and last; no block before the first row's keys is touched.
        let (first, last) = (tile.from(0, start) / LANES, tile.to(tile.rows - 1, start).div_ceil(LANES));
        for sub in (first..last).step_by(SUB) {
            scores::<S, T>(tile, start, sub, SUB.min(last - sub));
        }
        for row in 0..tile.rows {
            softmax::<S, T>(tile, row, start);
        }
        for sub in (first..last).step_by(SUB) {
            values::<S, T>(tile, start, sub, SUB.min(last - sub));
        }
    }
}

/// Where vectors of keys or values lie, and what is asked for meanwhile.
struct Lines<T> {
    here: [*const T; SUB],
    ahead: [*const u8; SUB],
}

impl<T: Element> Lines<T> {
    /// Vectors that share a cache line.
    const PER_LINE: usize = if size_of::<T>() < 4 { 4 / size_of::<T>() } else { 1 };

    fn new() -> Self {
        Self { here: [std::ptr::null(); SUB], ahead: [std::ptr::null(); SUB] }
    }
}

/// Scores of `groups` vectors of keys from vector `sub` of the piece on, all rows.
#[inline(always)]
unsafe fn scores<S: Simd, T: Element>(tile: &Tile, start: usize, sub: usize, groups: usize) {
    unsafe {
        let mut keys = Lines::<T>::new();
        for g in 0..groups {
            let (block, slot) = tile.find(start + (sub + g) * LANES);
            keys.here[g] = block.cast::<T>().add(slot);
            // Values that are part of keys are here already.
            keys.ahead[g] = if tile.shared { block } else { block.add(tile.values).cast::<T>().add(slot * tile.padded).cast() };
            if T::SCALED && tile.rows <= ROWS {
                S::prefetch(block.add(tile.key_scales).cast::<f32>().add(slot).cast());
                S::prefetch(block.add(tile.value_scales).cast::<f32>().add(slot).cast());
            }
        }
        if tile.rows <= ROWS {
            score_rows::<S, T, true>(tile, start, sub, groups, &keys, tile.block_size);
        } else if T::NARROW {
            let mut wide = Lines::<Single>::new();
            for g in 0..groups {
                let to = tile.wide_keys.add(g * tile.key_dim * LANES);
                for d in 0..tile.key_dim {
                    S::store(to.add(d * LANES), T::load::<S>(keys.here[g].add(d * tile.block_size)));
                }
                wide.here[g] = to.cast();
            }
            score_rows::<S, Single, false>(tile, start, sub, groups, &wide, LANES);
        } else {
            score_rows::<S, T, false>(tile, start, sub, groups, &keys, tile.block_size);
        }
    }
}

#[inline(always)]
unsafe fn score_rows<S: Simd, T: Element, const AHEAD: bool>(
    tile: &Tile,
    start: usize,
    sub: usize,
    groups: usize,
    keys: &Lines<T>,
    stride: usize,
) {
    unsafe {
        let mut row = 0;
        while row < tile.rows {
            let rows = ROWS.min(tile.rows - row);
            // Does any of them see any of these keys?
            if tile.to(row + rows - 1, start) > sub * LANES && tile.from(row, start) < (sub + groups) * LANES {
                match rows {
                    1 => score_groups::<S, T, 1, AHEAD>(tile, row, sub, groups, keys, stride),
                    2 => score_groups::<S, T, 2, AHEAD>(tile, row, sub, groups, keys, stride),
                    3 => score_groups::<S, T, 3, AHEAD>(tile, row, sub, groups, keys, stride),
                    4 => score_groups::<S, T, 4, AHEAD>(tile, row, sub, groups, keys, stride),
                    5 => score_groups::<S, T, 5, AHEAD>(tile, row, sub, groups, keys, stride),
                    _ => score_groups::<S, T, ROWS, AHEAD>(tile, row, sub, groups, keys, stride),
                }
            }
            row += rows;
        }
    }
}

#[inline(always)]
unsafe fn score_groups<S: Simd, T: Element, const R: usize, const AHEAD: bool>(
    tile: &Tile,
    row: usize,
    sub: usize,
    groups: usize,
    keys: &Lines<T>,
    stride: usize,
) {
    unsafe {
        let mut g = 0;
        if S::MANY_REGISTERS && groups == SUB {
            score_tile::<S, T, R, SUB, AHEAD>(tile, row, sub, g, keys, stride);
            return;
        }
        if R <= 3 {
            while g + 2 <= groups {
                score_tile::<S, T, R, 2, AHEAD>(tile, row, sub, g, keys, stride);
                g += 2;
            }
        }
        while g < groups {
            score_tile::<S, T, R, 1, AHEAD>(tile, row, sub, g, keys, stride);
            g += 1;
        }
    }
}

/// q·k of R rows and J vectors of keys, from vector `g` of the sub-block on.
#[inline(always)]
unsafe fn score_tile<S: Simd, T: Element, const R: usize, const J: usize, const AHEAD: bool>(
    tile: &Tile,
    row: usize,
    sub: usize,
    g: usize,
    keys: &Lines<T>,
    stride: usize,
) {
    unsafe {
        let q = tile.q.add(row * tile.key_dim);
        let (mut pointers, mut ahead) = ([std::ptr::null::<T>(); J], [std::ptr::null::<u8>(); J]);
        pointers.copy_from_slice(&keys.here[g..g + J]);
        ahead.copy_from_slice(&keys.ahead[g..g + J]);
        let mut sums = [[S::zero(); J]; R];
        for d in 0..tile.key_dim {
            let mut k = [S::zero(); J];
            for j in 0..J {
                k[j] = T::load::<S>(pointers[j].add(d * stride));
            }
            if AHEAD && d % Lines::<T>::PER_LINE == 0 {
                for j in 0..J {
                    S::prefetch(ahead[j].wrapping_add(d * LANES * size_of::<T>()));
                }
            }
            for r in 0..R {
                let x = S::splat(*q.add(r * tile.key_dim + d));
                for j in 0..J {
                    sums[r][j] = S::fma(x, k[j], sums[r][j]);
                }
            }
        }
        for r in 0..R {
            for j in 0..J {
                S::store(tile.scores.add((row + r) * CHUNK + (sub + g + j) * LANES), sums[r][j]);
            }
        }
    }
}

/// Adds p·v of `groups` vectors of keys from vector `sub` of the piece on, all rows.
#[inline(always)]
unsafe fn values<S: Simd, T: Element>(tile: &Tile, start: usize, sub: usize, groups: usize) {
    unsafe {
        if tile.shared {
            value_rows::<S, Single, false>(tile, start, sub, &turned::<S, T>(tile, start, sub, groups));
            return;
        }
        let mut values = Lines::<T>::new();
        let limit = tile.first_limit + (tile.rows - 1) / tile.heads;
        for g in 0..groups {
            let key = start + (sub + g) * LANES;
            let (block, slot) = tile.find(key);
            values.here[g] = block.add(tile.values).cast::<T>().add(slot * tile.padded);
            values.ahead[g] = values.here[g].cast();
            if key + CHUNK < limit {
                let (block, slot) = tile.find(key + CHUNK);
                values.ahead[g] = block.cast::<T>().add(slot).cast();
            }
        }
        if tile.rows <= ROWS {
            value_rows::<S, T, true>(tile, start, sub, &values);
        } else if T::NARROW {
            let mut wide = Lines::<Single>::new();
            let run = LANES * tile.padded;
            for g in 0..groups {
                let to = tile.wide_values.add(g * run);
                for i in (0..run).step_by(LANES) {
                    S::store(to.add(i), T::load::<S>(values.here[g].add(i)));
                }
                wide.here[g] = to.cast();
            }
            value_rows::<S, Single, false>(tile, start, sub, &wide);
        } else {
            value_rows::<S, T, false>(tile, start, sub, &values);
        }
    }
}

/// The first elements of the keys of a sub-block, widened, as [key][element].
#[inline(always)]
unsafe fn turned<S: Simd, T: Element>(tile: &Tile, start: usize, sub: usize, groups: usize) -> Lines<Single> {
    unsafe {
        let mut wide = Lines::<Single>::new();
        let mut lanes = [0.0; LANES];
        for g in 0..groups {
            let (block, slot) = tile.find(start + (sub + g) * LANES);
            let (from, to) = (block.cast::<T>().add(slot), tile.wide_values.add(g * LANES * tile.padded));
            for d in 0..tile.padded {
                let v = if d < tile.value_dim { T::load::<S>(from.add(d * tile.block_size)) } else { S::zero() };
                S::store(lanes.as_mut_ptr(), v);
                for (key, x) in lanes.iter().enumerate() {
                    *to.add(key * tile.padded + d) = *x;
                }
            }
            wide.here[g] = to.cast();
        }
        wide
    }
}

#[inline(always)]
unsafe fn value_rows<S: Simd, T: Element, const AHEAD: bool>(tile: &Tile, start: usize, sub: usize, values: &Lines<T>) {
    unsafe {
        let from = |row: usize| tile.from(row, start).saturating_sub(sub * LANES).min(SUB_KEYS);
        let to = |row: usize| tile.to(row, start).saturating_sub(sub * LANES).min(SUB_KEYS);
        let mut row = 0;
        while row < tile.rows {
            let rows = ROWS.min(tile.rows - row);
            // What only some of these rows see, the earlier ones, then what all see, then what only the later ones see.
            let (common, end) = (from(row + rows - 1), to(row));
            for row in row..row + rows {
                value_columns::<S, T, 1, AHEAD>(tile, row, sub, values, from(row), common.min(to(row)));
            }
            match rows {
                1 => value_columns::<S, T, 1, AHEAD>(tile, row, sub, values, common, end),
                2 => value_columns::<S, T, 2, AHEAD>(tile, row, sub, values, common, end),
                3 => value_columns::<S, T, 3, AHEAD>(tile, row, sub, values, common, end),
                4 => value_columns::<S, T, 4, AHEAD>(tile, row, sub, values, common, end),
                5 => value_columns::<S, T, 5, AHEAD>(tile, row, sub, values, common, end),
                _ => value_columns::<S, T, ROWS, AHEAD>(tile, row, sub, values, common, end),
            }
            for row in row..row + rows {
                value_columns::<S, T, 1, AHEAD>(tile, row, sub, values, common.max(end), to(row));
            }
            row += rows;
        }
    }
}

#[inline(always)]
unsafe fn value_columns<S: Simd, T: Element, const R: usize, const AHEAD: bool>(
    tile: &Tile,
    row: usize,
    sub: usize,
    values: &Lines<T>,
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
                value_tile::<S, T, R, 4, AHEAD>(tile, row, sub, values, from, to, column);
                column += 4;
            }
            if columns - column == 3 || columns - column == 5 {
                value_tile::<S, T, R, 3, AHEAD>(tile, row, sub, values, from, to, column);
                column += 3;
            }
        }
        if S::MANY_REGISTERS || R <= 3 {
            while column + 2 <= columns {
                value_tile::<S, T, R, 2, AHEAD>(tile, row, sub, values, from, to, column);
                column += 2;
            }
        }
        while column < columns {
            value_tile::<S, T, R, 1, AHEAD>(tile, row, sub, values, from, to, column);
            column += 1;
        }
    }
}

/// Adds p·v of keys `from .. to` of the sub-block, for R rows and J vectors of elements.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn value_tile<S: Simd, T: Element, const R: usize, const J: usize, const AHEAD: bool>(
    tile: &Tile,
    row: usize,
    sub: usize,
    values: &Lines<T>,
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
            let group = values.here[key / LANES].add(column * LANES);
            let ahead = values.ahead[key / LANES];
            while key < end {
                let value = group.add(key % LANES * tile.padded);
                let mut v = [S::zero(); J];
                for j in 0..J {
                    v[j] = T::load::<S>(value.add(j * LANES));
                }
                if AHEAD {
                    // As many vectors as these come from the next piece's keys, a line after the other.
                    for j in 0..J {
                        let vector = key % LANES * (tile.padded / LANES) + column + j;
                        if tile.block_size > LANES || (column + j).is_multiple_of(Lines::<T>::PER_LINE) {
                            S::prefetch(ahead.wrapping_add(vector * tile.block_size * size_of::<T>()));
                        }
                    }
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
