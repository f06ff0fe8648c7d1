//! What a micro-kernel gets: one group of sixteen weight rows and one tile of activation rows.
//!
//! Every kernel, whatever its instruction set and tile width, computes each output by the same steps: the exact integer sum of
//! a block of 32 columns, then one fused multiply-add of (weight scale · activation scale) and the sum, then, for types
//! with an offset, one of offset and s; blocks in ascending order into one accumulator. Float weights: even and odd columns in
//! two accumulators, ascending, added at the end. So an output does not depend on what is computed beside it.

use super::layout::Packing;

/// Pointers into a group and a tile (see `layout` and `Activations` for the order of what they point to).
pub(super) struct Tile {
    pub(super) packing: Packing,
    /// Activation rows to compute.
    pub(super) width: usize,
    /// Activation rows that lie side by side: from a block to the next. Float kernels take it to be the width.
    pub(super) stride: usize,
    pub(super) scales: *const u8,
    pub(super) quants: *const u8,
    /// Blocks of 32 columns; pairs of columns for floats.
    pub(super) blocks: usize,
    pub(super) q: *const i8,
    pub(super) d: *const f32,
    pub(super) s: *const f32,
    pub(super) negative: *const i32,
    pub(super) negative_halves: *const [i32; 2],
    /// f32 activations.
    pub(super) x: *const f32,
    /// Bytes to ask for from memory meanwhile, this many a block: the next group's.
    pub(super) next: *const u8,
    pub(super) next_bytes: usize,
    /// Width × 16 results, aligned to 64 bytes.
    pub(super) out: *mut f32,
}

/// A micro-kernel. Safe to call if the machine has its instruction set, the tile has its packing and width, and all pointers
/// hold as much as these and `blocks` say.
pub(super) type Kernel = unsafe fn(&Tile);
