//! Attention over a ragged batch: cuts it into tiles, and long contexts of few tiles into runs of pieces, and shares them out.
//!
//! How it is cut changes nothing in the results, see [`super::attention_kernel`].

use std::sync::atomic::{AtomicU32, Ordering};

use super::{
    CpuBackend,
    attention_tile::{SUB_KEYS, State, Tile},
    dispatch::Kernels,
    kv::KvView,
    memory::{CpuBuffer, Shared},
    pool::{Chunks, Pool},
    simd::LANES,
};
use crate::{
    KernelError,
    backend::{AttentionArgs, CHUNK, KvType, Mask, WorkspaceShape},
    plan::StepPlan,
};

/// Rows of a tile, unless one token has more heads to a KV head: more reuse of widened keys, but more scratch.
const TILE_ROWS: usize = 96;
/// Multiply-adds below which other threads are not worth waking.
const SMALL: usize = 1 << 17;

/// What one thread computes at a time: some tokens of a sequence, the heads of one KV head, some pieces of the keys.
#[derive(Clone, Copy)]
struct Item {
    sequence: u32,
    kv_head: u32,
    first_row: u32,
    tokens: u32,
    /// Pieces of the whole tile begin here, for all its parts.
    tile_chunk: u32,
    first_chunk: u32,
    last_chunk: u32,
    /// Index of the [`Split`] that this is a part of, or [`WHOLE`].
    split: u32,
}

const WHOLE: u32 = u32::MAX;

/// A tile whose pieces several threads compute. The one that finishes last merges them.
struct Split {
    /// First piece row in the partial results.
    base: usize,
    chunks: usize,
    unfinished: AtomicU32,
}

/// Scratch, allocated once.
pub(super) struct AttentionScratch {
    items: Vec<Item>,
    splits: Vec<Split>,
    threads: CpuBuffer,
    partial: CpuBuffer,
    partial_rows: usize,
    sizes: Sizes,
}

/// Largest shapes, and the f32 values of one thread's scratch.
#[derive(Clone, Copy)]
struct Sizes {
    rows: usize,
    key_dim: usize,
    padded: usize,
    thread: usize,
}

impl AttentionScratch {
    pub(super) fn new(shape: &WorkspaceShape, threads: usize) -> Result<Self, KernelError> {
        let rows = TILE_ROWS.max(shape.heads);
        let key_dim = shape.key_dim;
        let padded = shape.value_dim.next_multiple_of(LANES);
        let values = rows * (key_dim + CHUNK + 2 * padded + 4) + SUB_KEYS * (key_dim + padded);
        let thread = values.next_multiple_of(LANES) + 16 * LANES;
        // Enough to split one sequence of full length: a piece has as many keys as a block or more.
        let partial_rows = (shape.limits.blocks_per_sequence * shape.heads).max(4 * threads * rows);
        Ok(Self {
            items: Vec::with_capacity(shape.limits.sequences * shape.heads + shape.limits.rows * shape.heads.div_ceil(8) + 8 * threads),
            splits: Vec::with_capacity(4 * threads),
            threads: CpuBuffer::new("attention scratch", threads * thread)?,
            partial: CpuBuffer::new("attention scratch", partial_rows * (padded + LANES))?,
            partial_rows,
            sizes: Sizes { rows, key_dim, padded, thread },
        })
    }

    /// Whether heads of this shape fit.
    pub(super) fn fits(&self, heads_per_kv: usize, key_dim: usize, value_dim: usize) -> bool {
        heads_per_kv <= self.sizes.rows && key_dim <= self.sizes.key_dim && value_dim <= self.sizes.padded
    }

    /// Cuts the batch. Returns the multiply-adds of a head element.
    fn cut(&mut self, plan: &StepPlan, kv_heads: usize, heads: usize, mask: Mask, threads: usize) -> usize {
        self.items.clear();
        self.splits.clear();
        let group = heads / kv_heads;
        let mut tokens = (TILE_ROWS / group).clamp(1, 32);
        let tiles = |tokens: usize| {
            let per_sequence = plan.row_starts.windows(2).map(|w| (w[1] - w[0]) as usize);
            kv_heads * per_sequence.map(|rows| rows.div_ceil(tokens)).sum::<usize>()
        };
        while tokens > 8 && tiles(tokens) < 4 * threads {
            tokens /= 2;
        }
        let count = tiles(tokens);
        // With few tiles, each is cut at pieces so that all threads have something to do.
        let wanted = if threads > 1 && count < 3 * threads { (4 * threads).div_ceil(count.max(1)) } else { 1 };
        let (mut work, mut base) = (0, 0);
        for (s, w) in plan.row_starts.windows(2).enumerate() {
            let mut first_row = w[0];
            while first_row < w[1] {
                let position = plan.positions[first_row as usize] as usize;
                // Rows of a tile see keys from the same border on.
                let here = if let Mask::Chunk(keys) = mask { tokens.min(keys - position % keys) } else { tokens };
                let n = (w[1] - first_row).min(here as u32);
                let (first, end) = (mask.first_key(position), position + n as usize);
                work += (end - first) * n as usize * heads;
                let (tile_chunk, last_chunk) = (first / CHUNK, end.div_ceil(CHUNK));
                let item = Item {
                    sequence: s as u32,
                    kv_head: 0,
                    first_row,
                    tokens: n,
                    tile_chunk: tile_chunk as u32,
                    first_chunk: tile_chunk as u32,
                    last_chunk: last_chunk as u32,
                    split: WHOLE,
                };
                for kv_head in 0..kv_heads as u32 {
                    self.share(Item { kv_head, ..item }, n as usize * group, wanted, &mut base);
                }
                first_row += n;
            }
        }
        2 * work
    }

    /// Adds a tile as one item, or as about `wanted` parts if there is room for their results from row `base` on.
    fn share(&mut self, item: Item, rows: usize, wanted: usize, base: &mut usize) {
        let (first, chunks) = (item.first_chunk as usize, (item.last_chunk - item.first_chunk) as usize);
        let parts = wanted.min(chunks);
        if parts < 2 || *base + rows * chunks > self.partial_rows {
            self.items.push(item);
            return;
        }
        let split = self.splits.len() as u32;
        self.splits.push(Split { base: *base, chunks, unfinished: AtomicU32::new(parts as u32) });
        *base += rows * chunks;
        for part in 0..parts {
            let (first_chunk, last_chunk) = ((first + chunks * part / parts) as u32, (first + chunks * (part + 1) / parts) as u32);
            self.items.push(Item { first_chunk, last_chunk, split, ..item });
        }
    }
}

/// Everything that stays the same over one call.
struct Call<'a> {
    kernels: &'static Kernels,
    args: &'a AttentionArgs<'a, CpuBackend>,
    plan: &'a StepPlan,
    kv: &'a KvView<'a>,
    q: &'a [f32],
    out: Shared<f32>,
    sizes: Sizes,
    items: &'a [Item],
    splits: &'a [Split],
    threads: Shared<f32>,
    partial: Shared<f32>,
}

/// Runs attention; shapes have been checked against the plan, the cache and the scratch.
pub(super) fn attention(
    pool: &Pool,
    kernels: &'static Kernels,
    plan: &StepPlan,
    args: &AttentionArgs<'_, CpuBackend>,
    q: &[f32],
    kv: &KvView<'_>,
    out: &mut [f32],
    scratch: &mut AttentionScratch,
) {
    let work = scratch.cut(plan, args.kv_heads, args.heads, args.mask, pool.threads()) * args.key_dim.max(args.value_dim);
    let items = Chunks::new(scratch.items.len(), 1);
    let call = Call {
        kernels,
        args,
        plan,
        kv,
        q,
        out: Shared::new(out),
        sizes: scratch.sizes,
        items: &scratch.items,
        splits: &scratch.splits,
        threads: Shared::new(&mut scratch.threads),
        partial: Shared::new(&mut scratch.partial),
    };
    let run = |thread: usize| {
        while let Some(range) = items.take() {
            // Later tiles see more keys: large ones first leave small ones to fill the end.
            for index in range {
                call.item(&call.items[call.items.len() - 1 - index], thread);
            }
        }
    };
    if work < SMALL { run(0) } else { pool.run(run) }
}

/// Consecutive parts of one thread's scratch.
struct Carver<'a> {
    rest: &'a mut [f32],
}

impl Carver<'_> {
    fn take(&mut self, len: usize) -> *mut f32 {
        let len = len.next_multiple_of(LANES);
        let rest = std::mem::take(&mut self.rest);
        let (part, rest) = rest.split_at_mut(len.min(rest.len()));
        self.rest = rest;
        part.as_mut_ptr()
    }
}

impl Call<'_> {
    fn item(&self, item: &Item, thread: usize) {
        let tile = self.tile(item, thread);
        if item.split == WHOLE {
            // SAFETY: `tile` is valid, see there; the backend checked the instruction set.
            unsafe { (self.kernels.clear)(&tile) };
            for chunk in item.first_chunk as usize..item.last_chunk as usize {
                self.attend(&tile, chunk);
                // SAFETY: as above.
                unsafe { (self.kernels.merge)(&tile, &tile.piece, chunk) };
            }
            self.finish(&tile, item);
            return;
        }
        let (split, tile_chunk) = (&self.splits[item.split as usize], item.tile_chunk as usize);
        for chunk in item.first_chunk as usize..item.last_chunk as usize {
            self.attend(&Tile { piece: self.part(split, &tile, chunk - tile_chunk), ..tile }, chunk);
        }
        // Release what this thread wrote, acquire what the others did.
        if split.unfinished.fetch_sub(1, Ordering::AcqRel) == 1 {
            // SAFETY: as above.
            unsafe { (self.kernels.clear)(&tile) };
            for chunk in 0..split.chunks {
                // SAFETY: as above; all pieces are written.
                unsafe { (self.kernels.merge)(&tile, &self.part(split, &tile, chunk), tile_chunk + chunk) };
            }
            self.finish(&tile, item);
        }
    }

    fn attend(&self, tile: &Tile, chunk: usize) {
        match self.kv.shape.kv_type {
            // SAFETY: as in `item`; the element type is the cache's.
            KvType::F32 => unsafe { (self.kernels.attend_f32)(tile, chunk) },
            // SAFETY: as above.
            KvType::F16 => unsafe { (self.kernels.attend_f16)(tile, chunk) },
            // SAFETY: as above.
            KvType::Q8 => unsafe { (self.kernels.attend_q8)(tile, chunk) },
            // SAFETY: as above.
            KvType::Fp8 => unsafe { (self.kernels.attend_fp8)(tile, chunk) },
        }
    }

    fn finish(&self, tile: &Tile, item: &Item) {
        let width = self.args.heads * self.args.value_dim;
        let start = item.first_row as usize * width + item.kv_head as usize * tile.heads * self.args.value_dim;
        // A pointer, not a slice: heads of other tiles lie between this tile's.
        // SAFETY: rows and heads of this tile lie inside `out` (its length was checked), and no other tile writes them.
        unsafe { (self.kernels.finish)(tile, self.out.at(start), width) };
    }

    /// Where the piece with this number goes, counted from the first of a split tile.
    fn part(&self, split: &Split, tile: &Tile, chunk: usize) -> State {
        let stride = tile.padded + LANES;
        let start = (split.base + chunk * tile.rows) * stride;
        // SAFETY: `cut` gave this split as many rows as this; each piece is written by one thread and read after all are done.
        let values = unsafe { self.partial.part(start, tile.rows * stride) }.as_mut_ptr();
        // SAFETY: rows · padded values, then maxima and sums: together less than rows · stride.
        unsafe { State { values, max: values.add(tile.rows * tile.padded), sum: values.add(tile.rows * (tile.padded + 1)) } }
    }

    /// The tile of an item, with its queries gathered into this thread's scratch.
    fn tile(&self, item: &Item, thread: usize) -> Tile {
        let &AttentionArgs { heads, kv_heads, key_dim, value_dim, scale, mask, softcap, sinks, group, layer } = self.args;
        let (per_kv, layout) = (heads / kv_heads, self.kv.layout);
        let rows = item.tokens as usize * per_kv;
        let padded = layout.padded;
        // SAFETY: each thread has its own part.
        let mut carver = Carver { rest: unsafe { self.threads.part(thread * self.sizes.thread, self.sizes.thread) } };
        let q = carver.take(rows * key_dim);
        for token in 0..item.tokens as usize {
            let from = (item.first_row as usize + token) * heads * key_dim + item.kv_head as usize * per_kv * key_dim;
            let from = &self.q[from..from + per_kv * key_dim];
            // SAFETY: rows · key_dim values were taken.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), q.add(token * per_kv * key_dim), from.len()) };
        }
        let mut state = || State { values: carver.take(rows * padded), max: carver.take(rows), sum: carver.take(rows) };
        let (piece, total) = (state(), state());
        let tables = &self.plan.groups[group];
        let table = &tables.block_tables[item.sequence as usize * tables.stride..];
        let position = self.plan.positions[item.first_row as usize] as usize;
        Tile {
            q,
            rows,
            heads: per_kv,
            first_limit: position + 1,
            window: if let Mask::Window(keys) = mask { keys } else { usize::MAX },
            floor: if let Mask::Chunk(_) = mask { mask.first_key(position) } else { 0 },
            key_dim,
            value_dim,
            padded,
            block_size: self.kv.shape.block_size,
            scale,
            softcap: softcap.unwrap_or(0.0),
            sinks: sinks.map_or(std::ptr::null(), |sinks| sinks[item.kv_head as usize * per_kv..].as_ptr()),
            // SAFETY: the layer and the head exist (checked by the caller).
            base: unsafe { self.kv.layer(layer).add(item.kv_head as usize * layout.unit) },
            block: layout.block,
            values: layout.values,
            key_scales: layout.key_scales,
            value_scales: layout.value_scales,
            shared: self.kv.shape.shared_values,
            table: table.as_ptr(),
            scores: carver.take(rows * CHUNK),
            wide_keys: carver.take(key_dim * SUB_KEYS),
            wide_values: carver.take(padded * SUB_KEYS),
            piece,
            total,
        }
    }
}
