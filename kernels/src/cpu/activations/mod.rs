//! Activations of one op, prepared once and read by every row of the weights.
//!
//! Owns their memory and its order; the values are defined by [`quantize_activations`](crate::quant::quantize_activations).
//! Rows are cut into tiles of as many rows as a micro-kernel computes together; within a tile, what a kernel reads in one
//! step lies side by side. Never depends on the weights, except that float weights read f32 and all others bytes.

//!
//! - `tiling`: which rows go together; `quantiser`: bytes and scales of a block; `writer`: rows from several threads

mod quantiser;
mod tiling;
mod writer;

use std::{marker::PhantomData, ops::Range};

pub(super) use self::tiling::Tiling;

use self::{tiling::Span, writer::RowWriter};
use super::{
    isa::Isa,
    pool::{Pool, split},
};
#[cfg(doc)]
use crate::backend::Precision;
use crate::{KernelError, quant::ACTIVATION_BLOCK};

/// Values up to which a copy of rows is not worth waking threads.
const COPIED_ALONE: usize = 1 << 16;

/// Rows that any kernel computes together at most.
pub(super) const MAX_TILE: usize = 16;
/// Rows from which on the matrix unit, if there is one, is faster than vectors: with fewer, unpacking to memory doesn't pay.
pub(super) const MATRIX_ROWS: usize = 12;

/// Which forms of the activations the weights read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Forms {
    /// Bytes with scales, for block-quantised weights. Needs a multiple of 32 columns.
    pub quantised: bool,
    /// f32, for float weights.
    pub float: bool,
    /// With `quantised`: every row twice, as bytes and as the bytes of what rounding left of it ([`Precision::TwoBytes`]).
    pub fine: bool,
}

impl Forms {
    /// What either needs.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self { quantised: self.quantised || other.quantised, float: self.float || other.float, fine: self.fine || other.fine }
    }
}

/// Activations (rows × columns) in the forms that packed weights of one instruction set read. Allocates only when made.
///
/// Within a tile of `w` rows that starts at row `r0`, with `b` a block of 32 columns:
/// bytes of row `r0 + i` lie at `r0 · columns + (b · w + i) · 32`, per-block values at `r0 · blocks + b · w + i`,
/// f32 column `k` at `r0 · padded columns + k · w + i`.
///
/// In the fine form there are two rows of bytes for each row: 2r, and 2r + 1 with what rounding left of r.
pub struct Activations {
    isa: Isa,
    /// Values that there is room for, in rows of a multiple of 32, and the widest row that threads can prepare.
    room: usize,
    max_columns: usize,
    rows: usize,
    columns: usize,
    forms: Forms,
    /// Not empty. They grow to the most seen.
    spans: Vec<Span>,
    q: Vec<i8>,
    d: Vec<f32>,
    s: Vec<f32>,
    /// −8 · Σq of a block, and of its two halves.
    negative: Vec<i32>,
    negative_halves: Vec<[i32; 2]>,
    x: Vec<f32>,
    /// One row per thread, for [`Activations::fill`].
    scratch: Vec<f32>,
}

impl Activations {
    /// Room for `max_rows × max_columns`, and for `threads` threads that fill it.
    ///
    /// # Errors
    /// The sizes overflow.
    pub fn new(isa: Isa, max_rows: usize, max_columns: usize, threads: usize) -> Result<Self, KernelError> {
        let room = max_rows.checked_mul(max_columns.next_multiple_of(ACTIVATION_BLOCK));
        Self::with_room(isa, room.unwrap_or(usize::MAX), max_columns, threads)
    }

    /// Room for `room` values, in rows of up to `max_columns`, each counting as a multiple of 32.
    ///
    /// # Errors
    /// The sizes overflow.
    pub(super) fn with_room(isa: Isa, room: usize, max_columns: usize, threads: usize) -> Result<Self, KernelError> {
        let Some(_) = room.checked_mul(8).filter(|&bytes| bytes < isize::MAX as usize) else {
            return Err(KernelError::OutOfMemory { what: "activations", bytes: usize::MAX });
        };
        let blocks = 2 * room / ACTIVATION_BLOCK;
        Ok(Self {
            isa,
            room,
            max_columns,
            rows: 0,
            columns: 0,
            forms: Forms::default(),
            spans: vec![Span::new(isa, 0, 0, Forms::default())],
            // The matrix unit reads 16 rows whatever the width of the last tile.
            q: vec![0; 2 * room + MAX_TILE * ACTIVATION_BLOCK],
            d: vec![0.0; blocks],
            s: vec![0.0; blocks],
            negative: vec![0; blocks],
            negative_halves: vec![[0; 2]; blocks],
            x: vec![0.0; room],
            scratch: vec![0.0; threads.max(1) * max_columns.next_multiple_of(ACTIVATION_BLOCK)],
        })
    }

    /// Starts a new op: rows of `columns` are to be written by the returned writer, in these forms; as many as all `spans`
    /// together have.
    ///
    /// # Errors
    /// They don't fit, or the quantised form is wanted of columns that are no multiple of 32.
    fn begin(&mut self, spans: impl IntoIterator<Item = usize>, columns: usize, forms: Forms) -> Result<RowWriter<'_>, KernelError> {
        self.rows = 0;
        self.spans.clear();
        for rows in spans {
            self.spans.push(Span::new(self.isa, self.rows, rows, forms));
            self.rows += rows;
        }
        let values = self.rows.saturating_mul(columns.next_multiple_of(ACTIVATION_BLOCK));
        if values > self.room || columns > self.max_columns || self.spans.is_empty() {
            let detail = format!("{} × {columns}, with room for {} values in rows of {}", self.rows, self.room, self.max_columns);
            return Err(self.refuse(detail));
        }
        if forms.quantised && !columns.is_multiple_of(ACTIVATION_BLOCK) {
            return Err(self.refuse(format!("{columns} columns are no multiple of 32")));
        }
        self.columns = columns;
        self.forms = forms;
        Ok(RowWriter {
            isa: self.isa,
            rows: self.rows,
            columns,
            forms,
            spans: &self.spans,
            q: self.q.as_mut_ptr(),
            d: self.d.as_mut_ptr(),
            s: self.s.as_mut_ptr(),
            negative: self.negative.as_mut_ptr(),
            negative_halves: self.negative_halves.as_mut_ptr(),
            x: self.x.as_mut_ptr(),
            lifetime: PhantomData,
        })
    }

    /// Holds nothing from here on.
    fn refuse(&mut self, detail: String) -> KernelError {
        (self.rows, self.columns) = (0, 0);
        self.spans.clear();
        self.spans.push(Span::new(self.isa, 0, 0, Forms::default()));
        KernelError::Shape { op: "activations", detail }
    }

    /// Starts a new op and writes all rows: `row(r, out)` puts row `r` into `out` (`columns` long, content unspecified).
    /// Rows are shared out over the pool's threads where there are several.
    ///
    /// # Errors
    /// They don't fit; the quantised form is wanted of columns that are no multiple of 32; the pool has more threads than this
    /// was made for.
    pub fn fill<F>(&mut self, pool: &Pool, rows: usize, columns: usize, forms: Forms, row: F) -> Result<(), KernelError>
    where
        F: Fn(usize, &mut [f32]) + Sync,
    {
        self.fill_spans(pool, [rows], columns, forms, row)
    }

    /// The same for spans of rows, one after the other, which are multiplied each by itself.
    pub(super) fn fill_spans<F>(
        &mut self,
        pool: &Pool,
        spans: impl IntoIterator<Item = usize>,
        columns: usize,
        forms: Forms,
        row: F,
    ) -> Result<(), KernelError>
    where
        F: Fn(usize, &mut [f32]) + Sync,
    {
        let stride = self.max_columns.next_multiple_of(ACTIVATION_BLOCK);
        let (scratch, room) = (SendPointer(self.scratch.as_mut_ptr()), self.scratch.len());
        let writer = self.begin(spans, columns, forms)?;
        let (rows, threads) = (writer.rows, if writer.rows < 2 { 1 } else { pool.threads() });
        if room < threads * stride {
            return Err(KernelError::Shape { op: "activations", detail: format!("a pool of {threads} threads, more than planned") });
        }
        let share = |thread: usize| {
            // SAFETY: `thread` is below `threads`, so the row lies within `scratch`, which nobody else touches meanwhile, and each
            // thread has its own; columns ≤ stride.
            let scratch = unsafe { std::slice::from_raw_parts_mut(scratch.get().add(thread * stride), columns) };
            for r in split(rows, 1, threads, thread) {
                row(r, scratch);
                // SAFETY: shares of rows are disjoint.
                unsafe { writer.write(r, scratch) };
            }
        };
        if threads == 1 {
            share(0)
        } else {
            pool.run(share)
        }
        Ok(())
    }

    /// Spans of rows that are copies: row `r` is row `source(r)` of `from`, which holds every row as a span of its own.
    ///
    /// # Errors
    /// They don't fit, or `from` is of another kind.
    pub(super) fn copy_spans<F>(
        &mut self,
        pool: &Pool,
        spans: impl IntoIterator<Item = usize>,
        from: &Self,
        source: F,
    ) -> Result<(), KernelError>
    where
        F: Fn(usize) -> usize + Sync,
    {
        if from.spans.len() != from.rows || from.isa != self.isa {
            return Err(KernelError::Shape { op: "activations", detail: "rows to copy are not apart".into() });
        }
        let writer = self.begin(spans, from.columns, from.forms)?;
        let copy = |rows: Range<usize>| {
            for r in rows {
                let at = source(r).min(from.rows.saturating_sub(1));
                // SAFETY: shares of rows are disjoint.
                unsafe { writer.copy(r, from, at) };
            }
        };
        let (rows, threads) = (writer.rows, pool.threads());
        if rows * from.columns <= COPIED_ALONE {
            copy(0..rows);
        } else {
            pool.run(|thread| copy(split(rows, 1, threads, thread)));
        }
        Ok(())
    }

    /// Rows of the current op.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns of the current op.
    #[must_use]
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Forms of the current op.
    #[must_use]
    pub fn forms(&self) -> Forms {
        self.forms
    }

    pub(super) fn isa(&self) -> Isa {
        self.isa
    }

    /// How a span is cut; None where there is no such span.
    pub(super) fn tiling(&self, float: bool, span: usize) -> Option<Tiling> {
        self.spans.get(span).map(|span| if float { span.float } else { span.quantised })
    }

    /// What the quantised kernels read of the tile that starts at `row`.
    pub(super) fn quantised_tile(&self, row: usize) -> QuantisedTile<'_> {
        let blocks = self.columns / ACTIVATION_BLOCK;
        QuantisedTile {
            q: &self.q[row * self.columns..],
            d: &self.d[row * blocks..],
            s: &self.s[row * blocks..],
            negative: &self.negative[row * blocks..],
            negative_halves: &self.negative_halves[row * blocks..],
        }
    }

    /// What the float kernels read of the tile that starts at `row`.
    pub(super) fn float_tile(&self, row: usize) -> &[f32] {
        &self.x[row * self.columns.next_multiple_of(2)..]
    }
}

/// A tile's quantised rows, from its start on.
pub(super) struct QuantisedTile<'a> {
    pub(super) q: &'a [i8],
    pub(super) d: &'a [f32],
    pub(super) s: &'a [f32],
    pub(super) negative: &'a [i32],
    pub(super) negative_halves: &'a [[i32; 2]],
}

#[derive(Clone, Copy)]
struct SendPointer(*mut f32);

// SAFETY: threads use disjoint parts of what it points to.
unsafe impl Send for SendPointer {}
// SAFETY: as above.
unsafe impl Sync for SendPointer {}

impl SendPointer {
    fn get(self) -> *mut f32 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_shapes_are_refused() {
        let mut activations = Activations::new(Isa::Portable, 4, 64, 1).unwrap();
        let quantised = Forms { quantised: true, ..Forms::default() };
        assert!(activations.begin([5], 64, quantised).is_err());
        assert!(activations.begin([4], 65, quantised).is_err());
        assert!(activations.begin([4], 33, quantised).is_err());
        assert!(activations.begin([4], 33, Forms { float: true, ..Forms::default() }).is_ok());
        assert!(Activations::new(Isa::Portable, usize::MAX, 64, 1).is_err());
    }
}
