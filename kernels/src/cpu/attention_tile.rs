//! What one call of an attention kernel works on: a tile's place in the cache and its scratch.

#![allow(clippy::undocumented_unsafe_blocks)] // One reason for all: `Tile` keeps what its fields promise.

use super::simd::{LANES, Simd};
use crate::backend::CHUNK;

/// Vectors of keys in a sub-block.
pub(super) const SUB: usize = 4;
/// Keys of a sub-block.
pub(super) const SUB_KEYS: usize = SUB * LANES;

/// Stored elements.
pub(super) trait Element: Copy + 'static {
    /// Widening them is worth a copy where many rows read them.
    const NARROW: bool;
    /// Each key and each value has a scale.
    const SCALED: bool;
    unsafe fn load<S: Simd>(p: *const Self) -> S::V;
}

macro_rules! element {
    ($(#[$about:meta])* $name:ident($bits:ty), $load:ident, narrow: $narrow:literal, scaled: $scaled:literal) => {
        $(#[$about])*
        #[derive(Clone, Copy)]
        #[repr(transparent)]
        pub(super) struct $name($bits);

        impl Element for $name {
            const NARROW: bool = $narrow;
            const SCALED: bool = $scaled;
            #[inline(always)]
            unsafe fn load<S: Simd>(p: *const Self) -> S::V {
                unsafe { S::$load(p.cast()) }
            }
        }
    };
}

element!(Single(f32), load, narrow: false, scaled: false);
element!(Half(u16), load_f16, narrow: true, scaled: false);
element!(Q8(u8), load_q8, narrow: true, scaled: true);
element!(
    /// As 2⁻⁸ of what they are.
    Fp8(u8), load_fp8, narrow: true, scaled: true
);

/// A tile and one thread's scratch for it. All pointers are valid for what is said beside them while the tile is used.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    /// Rows × key_dim: queries, head by head within a token.
    pub q: *const f32,
    /// (Token, head) rows, at least 1.
    pub rows: usize,
    /// Heads of a token in this tile: row r belongs to token r / heads.
    pub heads: usize,
    /// Keys up to the first token's own; each later token has one more. At least 1.
    pub first_limit: usize,
    /// Keys that a row sees at most, its own the last.
    pub window: usize,
    /// Keys before this one are seen by no row.
    pub floor: usize,
    pub key_dim: usize,
    pub value_dim: usize,
    pub padded: usize,
    pub block_size: usize,
    pub scale: f32,
    /// 0: none.
    pub softcap: f32,
    /// One per head of a token; null: none.
    pub sinks: *const f32,
    /// This KV head in block 0 of the layer.
    pub base: *const u8,
    /// Bytes from block to block.
    pub block: usize,
    /// Bytes of a block before its values; its keys' scales; its values' scales.
    pub values: usize,
    pub key_scales: usize,
    pub value_scales: usize,
    /// Values are the first elements of the keys.
    pub shared: bool,
    /// Block ids, for all keys from the first that the first row sees to the last limit.
    pub table: *const u32,
    /// Rows × CHUNK.
    pub scores: *mut f32,
    /// key_dim × SUB_KEYS.
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
    /// What `row` sees of the piece that begins at key `start`: from this key of the piece …
    #[inline(always)]
    pub(super) fn from(&self, row: usize, start: usize) -> usize {
        let limit = self.first_limit + row / self.heads;
        limit.saturating_sub(self.window).max(self.floor).saturating_sub(start).min(CHUNK)
    }

    /// … up to this one.
    #[inline(always)]
    pub(super) fn to(&self, row: usize, start: usize) -> usize {
        (self.first_limit + row / self.heads).saturating_sub(start).min(CHUNK)
    }

    /// First byte of the block that holds key `key`, and the key's slot in it.
    #[inline(always)]
    pub(super) unsafe fn find(&self, key: usize) -> (*const u8, usize) {
        unsafe {
            let block = *self.table.add(key / self.block_size) as usize;
            (self.base.add(block * self.block), key % self.block_size)
        }
    }
}
