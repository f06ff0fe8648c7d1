//! Writes rows of activations in the order that kernels read.

use std::marker::PhantomData;

use super::{
    Activations, Forms,
    quantiser::{QuantisedBlock, quantise},
    tiling::{Span, Tiling},
};
use crate::{cpu::isa::Isa, quant::ACTIVATION_BLOCK};

/// Writes rows of [`Activations`], from several threads at once if they write different rows.
pub(super) struct RowWriter<'a> {
    pub isa: Isa,
    pub rows: usize,
    pub columns: usize,
    pub forms: Forms,
    pub spans: &'a [Span],
    pub q: *mut i8,
    pub d: *mut f32,
    pub s: *mut f32,
    pub negative: *mut i32,
    pub negative_halves: *mut [i32; 2],
    pub x: *mut f32,
    pub lifetime: PhantomData<&'a mut Activations>,
}

// SAFETY: it holds the only borrow of the activations; `write` asks its callers for disjoint rows.
unsafe impl Send for RowWriter<'_> {}
// SAFETY: as above.
unsafe impl Sync for RowWriter<'_> {}

impl RowWriter<'_> {
    /// Writes row `row` in all forms of the op. A row that doesn't exist, or of the wrong length, is ignored in release builds.
    ///
    /// # Safety
    /// No other thread writes the same row at the same time.
    pub(super) unsafe fn write(&self, row: usize, values: &[f32]) {
        debug_assert!(row < self.rows && values.len() == self.columns);
        if row >= self.rows || values.len() != self.columns {
            return;
        }
        if self.forms.quantised {
            // SAFETY: the row exists; only this thread writes it.
            unsafe { self.write_quantised(row, values) };
        }
        if self.forms.float {
            // SAFETY: as above.
            unsafe { self.write_float(row, values) };
        }
    }

    /// # Safety
    /// As [`RowWriter::write`].
    unsafe fn write_float(&self, row: usize, values: &[f32]) {
        let (start, width) = self.span(row).float.around(row);
        let padded = self.columns.next_multiple_of(2);
        // SAFETY: the tile has width · padded values from start · padded on, within `x`, which has a multiple of 32 per row.
        let tile = unsafe { self.x.add(start * padded + row - start) };
        for (k, &value) in values.iter().enumerate() {
            // SAFETY: as above.
            unsafe { *tile.add(k * width) = value };
        }
        if padded != self.columns {
            // SAFETY: as above; the padding column.
            unsafe { *tile.add(self.columns * width) = 0.0 };
        }
    }

    /// The span that holds a row.
    fn span(&self, row: usize) -> &Span {
        match self.spans {
            [span] => span,
            // Spans without rows begin where the next one does.
            spans => &spans[spans.partition_point(|span| span.first <= row) - 1],
        }
    }

    unsafe fn write_quantised(&self, row: usize, values: &[f32]) {
        let tiling = self.span(row).quantised;
        let (blocks, copies) = (self.columns / ACTIVATION_BLOCK, if self.forms.fine { 2 } else { 1 });
        let places: [Place; 2] = std::array::from_fn(|copy| Place::new(tiling, copies * row + copy.min(copies - 1), blocks));
        for (b, values) in values.as_chunks::<ACTIVATION_BLOCK>().0.iter().enumerate() {
            let block = quantise(self.isa, values);
            // SAFETY: the row exists, only this thread writes it; rows 2r and 2r + 1 of bytes belong to this row alone.
            unsafe { self.put(places[0].block(b), &block) };
            if self.forms.fine {
                let left = quantise(self.isa, &std::array::from_fn(|i| values[i] - block.d * f32::from(block.q[i])));
                // SAFETY: as above.
                unsafe { self.put(places[1].block(b), &left) };
            }
        }
    }

    /// # Safety
    /// `at` is a block of a row of bytes that no other thread writes at the same time.
    unsafe fn put(&self, at: usize, block: &QuantisedBlock) {
        // SAFETY: a block's place is below rows · blocks, the length of these arrays (times 32 for q).
        unsafe {
            self.q.add(at * ACTIVATION_BLOCK).cast::<[i8; ACTIVATION_BLOCK]>().write(block.q);
            *self.d.add(at) = block.d;
            *self.s.add(at) = block.s;
            *self.negative.add(at) = -8 * (block.sums[0] + block.sums[1]);
            *self.negative_halves.add(at) = [-8 * block.sums[0], -8 * block.sums[1]];
        }
    }

    /// Copies row `from_row` of `from`, whose spans are single rows, in all forms of the op.
    ///
    /// # Safety
    /// Both rows exist; columns and forms are the same; no other thread writes `row` at the same time.
    pub(super) unsafe fn copy(&self, row: usize, from: &Activations, from_row: usize) {
        let blocks = self.columns / ACTIVATION_BLOCK;
        if self.forms.quantised {
            let copies = if self.forms.fine { 2 } else { 1 };
            let (to, own) = (self.span(row).quantised, from.spans[from_row].quantised);
            for copy in 0..copies {
                let (to, own) = (Place::new(to, copies * row + copy, blocks), Place::new(own, copies * from_row + copy, blocks));
                for b in 0..blocks {
                    let (at, old) = (to.block(b), own.block(b));
                    // SAFETY: the caller's promise; the blocks lie inside the arrays of both.
                    unsafe {
                        let q = from.q.as_ptr().add(old * ACTIVATION_BLOCK);
                        self.q.add(at * ACTIVATION_BLOCK).copy_from_nonoverlapping(q, ACTIVATION_BLOCK);
                        *self.d.add(at) = from.d[old];
                        *self.s.add(at) = from.s[old];
                        *self.negative.add(at) = from.negative[old];
                        *self.negative_halves.add(at) = from.negative_halves[old];
                    }
                }
            }
        }
        if self.forms.float {
            let padded = self.columns.next_multiple_of(2);
            // SAFETY: the caller's promise.
            unsafe { self.write_float(row, &from.x[from_row * padded..][..self.columns]) };
        }
    }
}

/// Where the blocks of a row of bytes lie.
#[derive(Clone, Copy)]
struct Place {
    first: usize,
    width: usize,
}

impl Place {
    fn new(tiling: Tiling, row: usize, blocks: usize) -> Self {
        let (start, width) = tiling.around(row);
        Self { first: start * blocks + row - start, width }
    }

    fn block(self, b: usize) -> usize {
        self.first + b * self.width
    }
}
