//! From scores to weights, and how pieces of 256 keys become one result. See [`super::attention_kernel`] for the order.

#![allow(clippy::undocumented_unsafe_blocks)] // One reason for all: `Tile` keeps what its fields promise.

use super::{
    attention_tile::{Element, State, Tile},
    simd::{LANES, Simd},
};
use crate::backend::CHUNK;

/// Starts `total` with no key seen; with a sink, as if a key with this score and the value zero had been.
#[inline(always)]
pub(super) unsafe fn clear<S: Simd>(tile: &Tile) {
    unsafe {
        for row in 0..tile.rows {
            let (max, sum) = if tile.sinks.is_null() { (f32::NEG_INFINITY, 0.0) } else { (*tile.sinks.add(row % tile.heads), 1.0) };
            *tile.total.max.add(row) = max;
            *tile.total.sum.add(row) = sum;
        }
        for i in (0..tile.rows * tile.padded).step_by(LANES) {
            S::store(tile.total.values.add(i), S::zero());
        }
    }
}

/// Turns a row's products into e^(s − max), times the values' scales; notes the maximum and the sum, and zeroes the row's values.
#[inline(always)]
pub(super) unsafe fn softmax<S: Simd, T: Element>(tile: &Tile, row: usize, start: usize) {
    let (from, to) = (tile.from(row, start), tile.to(row, start));
    if from >= to {
        return;
    }
    unsafe {
        let scores = tile.scores.add(row * CHUNK);
        let (first, last) = (from / LANES, to.div_ceil(LANES));
        let mut largest = S::splat(f32::NEG_INFINITY);
        for g in first..last {
            let mut s = S::mul(S::load(scores.add(g * LANES)), S::splat(tile.scale));
            if T::SCALED {
                let (block, slot) = tile.find(start + g * LANES);
                s = S::mul(s, S::load(block.add(tile.key_scales).cast::<f32>().add(slot)));
            }
            // An infinity becomes NaN: as a low score it would be no key at all, and a cap would make a number of it.
            s = S::fma(s, S::zero(), s);
            if tile.softcap > 0.0 {
                s = capped::<S>(s, tile.softcap);
            }
            s = within::<S>(s, g, from, to, f32::NEG_INFINITY);
            S::store(scores.add(g * LANES), s);
            largest = S::max(largest, s);
        }
        let max = S::reduce_max(largest);
        let shift = S::splat(max);
        let mut sums = S::zero();
        for g in first..last {
            let mut p = S::exp(S::sub(S::load(scores.add(g * LANES)), shift));
            p = within::<S>(p, g, from, to, 0.0);
            sums = S::add(sums, p);
            if T::SCALED {
                let (block, slot) = tile.find(start + g * LANES);
                p = S::mul(p, S::load(block.add(tile.value_scales).cast::<f32>().add(slot)));
            }
            S::store(scores.add(g * LANES), p);
        }
        *tile.piece.max.add(row) = max;
        *tile.piece.sum.add(row) = S::reduce_add(sums);
        for i in (0..tile.padded).step_by(LANES) {
            S::store(tile.piece.values.add(row * tile.padded + i), S::zero());
        }
    }
}

/// cap · tanh(s / cap).
#[inline(always)]
unsafe fn capped<S: Simd>(s: S::V, cap: f32) -> S::V {
    unsafe {
        let cap = S::splat(cap);
        S::mul(cap, S::tanh(S::div(s, cap)))
    }
}

/// Vector `g` of a row's piece, with `other` in the lanes of keys outside of `from .. to`.
#[inline(always)]
unsafe fn within<S: Simd>(mut v: S::V, g: usize, from: usize, to: usize, other: f32) -> S::V {
    unsafe {
        if g == to / LANES {
            v = S::first(to % LANES, v, S::splat(other));
        }
        if g == from / LANES {
            v = S::first(from % LANES, S::splat(other), v);
        }
        v
    }
}

/// Adds a later piece to `total`, for the rows that saw keys of it.
#[inline(always)]
pub(super) unsafe fn merge<S: Simd>(tile: &Tile, piece: &State, chunk: usize) {
    unsafe {
        for row in 0..tile.rows {
            if tile.from(row, chunk * CHUNK) >= tile.to(row, chunk * CHUNK) {
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

/// Writes total / Σ to `out`: rows × value_dim, token `t` from `t · stride` on.
#[inline(always)]
pub(super) unsafe fn finish<S: Simd>(tile: &Tile, out: *mut f32, stride: usize) {
    unsafe {
        for row in 0..tile.rows {
            let inverse = 1.0 / *tile.total.sum.add(row);
            let to = out.add(row / tile.heads * stride + row % tile.heads * tile.value_dim);
            let from = tile.total.values.add(row * tile.padded);
            for i in 0..tile.value_dim {
                *to.add(i) = *from.add(i) * inverse;
            }
        }
    }
}
