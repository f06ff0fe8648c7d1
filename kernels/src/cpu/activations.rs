//! Activations of one op, prepared once and read by every row of the weights.
//!
//! Owns their memory and its order; the values are defined by [`quantize_activations`](crate::quant::quantize_activations).
//! Rows are cut into tiles of as many rows as a micro-kernel computes together; within a tile, what a kernel reads in one
//! step lies side by side. Never depends on the weights, except that float weights read f32 and all others bytes.

use std::marker::PhantomData;

use super::{
    isa::{Isa, matrix_tiles},
    pool::{Pool, split},
};
#[cfg(doc)]
use crate::backend::Precision;
use crate::{
    KernelError,
    quant::{ACTIVATION_BLOCK, quantize_activations},
};

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

/// How rows are cut into tiles: as few as possible, as equal as possible.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tiling {
    rows: usize,
    tiles: usize,
}

impl Tiling {
    fn new(rows: usize, widest: usize) -> Self {
        Self { rows, tiles: rows.div_ceil(widest) }
    }

    pub(super) fn tiles(self) -> usize {
        self.tiles
    }

    /// First row of tile `tile`, or the number of rows behind the last.
    pub(super) fn start(self, tile: usize) -> usize {
        self.rows * tile / self.tiles
    }

    /// First row and width of the tile that holds `row`.
    fn around(self, row: usize) -> (usize, usize) {
        let tile = ((row + 1) * self.tiles - 1) / self.rows;
        let start = self.start(tile);
        (start, self.start(tile + 1) - start)
    }
}

/// Rows that a kernel computes together at most: what fits the registers.
fn widest(isa: Isa, float: bool, rows: usize) -> usize {
    match (isa, float) {
        (Isa::Portable, _) => 4,
        (Isa::Avx2, false) => 4,
        (Isa::Avx2, true) => 3,
        (Isa::Avx512Vnni, false) if rows >= MATRIX_ROWS && matrix_tiles() => MAX_TILE,
        (Isa::Avx512Vnni, _) => 8,
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
    max_rows: usize,
    max_columns: usize,
    rows: usize,
    columns: usize,
    forms: Forms,
    quantised_tiling: Tiling,
    float_tiling: Tiling,
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
        let padded = max_columns.next_multiple_of(ACTIVATION_BLOCK);
        let bytes = max_rows.checked_mul(padded).and_then(|values| values.checked_mul(8)).filter(|&bytes| bytes < isize::MAX as usize);
        let Some(_) = bytes else {
            return Err(KernelError::OutOfMemory { what: "activations", bytes: usize::MAX });
        };
        let (values, blocks) = (max_rows * padded, 2 * max_rows * padded / ACTIVATION_BLOCK);
        Ok(Self {
            isa,
            max_rows,
            max_columns,
            rows: 0,
            columns: 0,
            forms: Forms::default(),
            quantised_tiling: Tiling::default(),
            float_tiling: Tiling::default(),
            // The matrix unit reads 16 rows whatever the width of the last tile.
            q: vec![0; 2 * values + MAX_TILE * ACTIVATION_BLOCK],
            d: vec![0.0; blocks],
            s: vec![0.0; blocks],
            negative: vec![0; blocks],
            negative_halves: vec![[0; 2]; blocks],
            x: vec![0.0; values],
            scratch: vec![0.0; threads.max(1) * padded],
        })
    }

    /// Starts a new op: `rows × columns` are to be written by the returned writer, in these forms.
    ///
    /// # Errors
    /// They don't fit, or the quantised form is wanted of columns that are no multiple of 32.
    pub fn begin(&mut self, rows: usize, columns: usize, forms: Forms) -> Result<RowWriter<'_>, KernelError> {
        if rows > self.max_rows || columns > self.max_columns {
            let detail = format!("{rows} × {columns}, with room for {} × {}", self.max_rows, self.max_columns);
            return Err(KernelError::Shape { op: "activations", detail });
        }
        if forms.quantised && !columns.is_multiple_of(ACTIVATION_BLOCK) {
            return Err(KernelError::Shape { op: "activations", detail: format!("{columns} columns are no multiple of 32") });
        }
        self.columns = columns;
        self.forms = forms;
        self.rows = rows;
        let byte_rows = if forms.fine { 2 * rows } else { rows };
        self.quantised_tiling = Tiling::new(byte_rows, widest(self.isa, false, byte_rows));
        self.float_tiling = Tiling::new(rows, widest(self.isa, true, rows));
        Ok(RowWriter {
            isa: self.isa,
            rows,
            columns,
            forms,
            quantised_tiling: self.quantised_tiling,
            float_tiling: self.float_tiling,
            q: self.q.as_mut_ptr(),
            d: self.d.as_mut_ptr(),
            s: self.s.as_mut_ptr(),
            negative: self.negative.as_mut_ptr(),
            negative_halves: self.negative_halves.as_mut_ptr(),
            x: self.x.as_mut_ptr(),
            lifetime: PhantomData,
        })
    }

    /// Starts a new op and writes all rows: `row(r, out)` puts row `r` into `out` (`columns` long, content unspecified).
    /// Rows are shared out over the pool's threads where there are several.
    ///
    /// # Errors
    /// As [`Activations::begin`]; also where the pool has more threads than this was made for.
    pub fn fill<F>(&mut self, pool: &Pool, rows: usize, columns: usize, forms: Forms, row: F) -> Result<(), KernelError>
    where
        F: Fn(usize, &mut [f32]) + Sync,
    {
        let mut scratch = std::mem::take(&mut self.scratch);
        let result = self.fill_with(&mut scratch, pool, rows, columns, forms, row);
        self.scratch = scratch;
        result
    }

    fn fill_with<F>(
        &mut self,
        scratch: &mut [f32],
        pool: &Pool,
        rows: usize,
        columns: usize,
        forms: Forms,
        row: F,
    ) -> Result<(), KernelError>
    where
        F: Fn(usize, &mut [f32]) + Sync,
    {
        let stride = self.max_columns.next_multiple_of(ACTIVATION_BLOCK);
        let writer = self.begin(rows, columns, forms)?;
        if rows < 2 {
            let scratch = &mut scratch[..columns];
            for r in 0..rows {
                row(r, scratch);
                // SAFETY: only this thread writes.
                unsafe { writer.write(r, scratch) };
            }
            return Ok(());
        }
        let threads = pool.threads();
        if scratch.len() < threads * stride {
            return Err(KernelError::Shape { op: "activations", detail: format!("a pool of {threads} threads, more than planned") });
        }
        let base = SendPointer(scratch.as_mut_ptr());
        pool.run(|thread| {
            // SAFETY: `thread` is below `threads`, so the row lies within `scratch`, and each thread has its own.
            let scratch = unsafe { std::slice::from_raw_parts_mut(base.get().add(thread * stride), columns) };
            for r in split(rows, 1, threads, thread) {
                row(r, scratch);
                // SAFETY: shares of rows are disjoint.
                unsafe { writer.write(r, scratch) };
            }
        });
        Ok(())
    }

    /// Rows of the current op.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Rows of bytes: twice as many in the fine form.
    pub(super) fn byte_rows(&self) -> usize {
        self.quantised_tiling.rows
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

    pub(super) fn tiling(&self, float: bool) -> Tiling {
        if float { self.float_tiling } else { self.quantised_tiling }
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

/// Writes rows of [`Activations`], from several threads at once if they write different rows.
pub struct RowWriter<'a> {
    isa: Isa,
    rows: usize,
    columns: usize,
    forms: Forms,
    quantised_tiling: Tiling,
    float_tiling: Tiling,
    q: *mut i8,
    d: *mut f32,
    s: *mut f32,
    negative: *mut i32,
    negative_halves: *mut [i32; 2],
    x: *mut f32,
    lifetime: PhantomData<&'a mut Activations>,
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
    pub unsafe fn write(&self, row: usize, values: &[f32]) {
        debug_assert!(row < self.rows && values.len() == self.columns);
        if row >= self.rows || values.len() != self.columns {
            return;
        }
        if self.forms.quantised {
            // SAFETY: the row exists; only this thread writes it.
            unsafe { self.write_quantised(row, values) };
        }
        if self.forms.float {
            let (start, width) = self.float_tiling.around(row);
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
    }

    unsafe fn write_quantised(&self, row: usize, values: &[f32]) {
        for (b, values) in values.as_chunks::<ACTIVATION_BLOCK>().0.iter().enumerate() {
            if self.forms.fine {
                // SAFETY: rows 2r and 2r + 1 of bytes belong to this row alone.
                unsafe {
                    let block = self.write_block(2 * row, b, values);
                    let left: [f32; ACTIVATION_BLOCK] = std::array::from_fn(|i| values[i] - block.d * f32::from(block.q[i]));
                    self.write_block(2 * row + 1, b, &left);
                }
            } else {
                // SAFETY: as the caller says.
                unsafe { self.write_block(row, b, values) };
            }
        }
    }

    /// Quantises block `b` of row `row` of bytes.
    ///
    /// # Safety
    /// The row of bytes exists, and no other thread writes it at the same time.
    unsafe fn write_block(&self, row: usize, b: usize, values: &[f32; ACTIVATION_BLOCK]) -> QuantisedBlock {
        let (start, width) = self.quantised_tiling.around(row);
        let at = start * (self.columns / ACTIVATION_BLOCK) + b * width + row - start;
        let mut block = QuantisedBlock { q: [0; ACTIVATION_BLOCK], d: 0.0, s: 0.0, sums: [0; 2] };
        match self.isa {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: both levels include AVX2, which was detected.
            Isa::Avx2 | Isa::Avx512Vnni => unsafe { quantise_avx2(values, &mut block) },
            _ => quantise(values, &mut block),
        }
        // SAFETY: start · blocks + b · width + (row − start) < rows · blocks, the length of these arrays (times 32 for q).
        unsafe {
            self.q.add(at * ACTIVATION_BLOCK).cast::<[i8; ACTIVATION_BLOCK]>().write(block.q);
            *self.d.add(at) = block.d;
            *self.s.add(at) = block.s;
            *self.negative.add(at) = -8 * (block.sums[0] + block.sums[1]);
            *self.negative_halves.add(at) = [-8 * block.sums[0], -8 * block.sums[1]];
        }
        block
    }
}

/// One block of 32 columns of one row.
struct QuantisedBlock {
    q: [i8; ACTIVATION_BLOCK],
    d: f32,
    s: f32,
    /// Σq of columns 0 to 15 and 16 to 31.
    sums: [i32; 2],
}

fn quantise(x: &[f32; ACTIVATION_BLOCK], block: &mut QuantisedBlock) {
    quantize_activations(x, &mut block.q, std::slice::from_mut(&mut block.d), std::slice::from_mut(&mut block.s));
    let (first, second) = block.q.split_at(16);
    block.sums = [first, second].map(|half| half.iter().map(|&q| i32::from(q)).sum());
}

/// [`quantise`], 32 columns at once; the same bits.
///
/// # Safety
/// Needs AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn quantise_avx2(x: &[f32; ACTIVATION_BLOCK], block: &mut QuantisedBlock) {
    use std::arch::x86_64::*;
    // SAFETY: four loads of 8 values from 32.
    let x: [__m256; 4] = std::array::from_fn(|i| unsafe { _mm256_loadu_ps(x.as_ptr().add(8 * i)) });
    let magnitude = |x: __m256| _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fff_ffff));
    let largest = _mm256_max_epu32(_mm256_max_epu32(magnitude(x[0]), magnitude(x[1])), _mm256_max_epu32(magnitude(x[2]), magnitude(x[3])));
    let largest = _mm_max_epu32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256::<1>(largest));
    let largest = _mm_max_epu32(largest, _mm_shuffle_epi32::<0b01_00_11_10>(largest));
    let largest = _mm_max_epu32(largest, _mm_shuffle_epi32::<0b10_11_00_01>(largest));
    let amax = f32::from_bits(_mm_cvtsi128_si32(largest) as u32);
    if !amax.is_finite() || amax < 1e-30 {
        block.q = [0; ACTIVATION_BLOCK];
        block.d = if amax.is_finite() { 0.0 } else { f32::NAN };
        block.s = block.d;
        block.sums = [0; 2];
        return;
    }
    let inverse = _mm256_set1_ps(127.0 / amax);
    // The default rounding mode is to nearest, ties to even.
    let q = x.map(|x| _mm256_cvtps_epi32(_mm256_mul_ps(x, inverse)));
    let total = |v: __m256i| {
        let v = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v));
        let v = _mm_add_epi32(v, _mm_shuffle_epi32::<0b01_00_11_10>(v));
        _mm_cvtsi128_si32(_mm_add_epi32(v, _mm_shuffle_epi32::<0b10_11_00_01>(v)))
    };
    block.sums = [total(_mm256_add_epi32(q[0], q[1])), total(_mm256_add_epi32(q[2], q[3]))];
    // Packing works within 128-bit halves; the permutation puts the 4-byte words in order again.
    let words = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
    let bytes = _mm256_permutevar8x32_epi32(words, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    // SAFETY: 32 bytes into an array of 32.
    unsafe { _mm256_storeu_si256(block.q.as_mut_ptr().cast(), bytes) };
    block.d = amax / 127.0;
    block.s = block.d * (block.sums[0] + block.sums[1]) as f32;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_are_balanced_and_rows_are_found() {
        for rows in 1..70 {
            let tiling = Tiling::new(rows, 8);
            for tile in 0..tiling.tiles() {
                let (start, end) = (tiling.start(tile), tiling.start(tile + 1));
                assert!(end > start && end - start <= 8);
                for row in start..end {
                    assert_eq!(tiling.around(row), (start, end - start));
                }
            }
            assert_eq!(tiling.start(tiling.tiles()), rows);
        }
    }

    #[test]
    fn fast_quantisation_gives_the_same_bits() {
        let mut state = 1_u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / 8_388_608.0 - 1.0
        };
        for case in 0..3000 {
            let scale = 2.0_f32.powi(case % 60 - 40) * if case % 50 == 0 { 1e-25 } else { 1.0 };
            let mut x: [f32; 32] = std::array::from_fn(|_| random() * scale);
            match case % 100 {
                7 => x[case as usize / 100] = f32::NAN,
                8 => x[case as usize / 100] = f32::NEG_INFINITY,
                9 => x = [0.0; 32],
                // Ties.
                10 => x = std::array::from_fn(|i| if i == 0 { 127.0 } else { i as f32 - 15.5 }),
                _ => {}
            }
            let empty = || QuantisedBlock { q: [1; 32], d: 1.0, s: 1.0, sums: [1; 2] };
            let mut slow = empty();
            quantise(&x, &mut slow);
            #[cfg(target_arch = "x86_64")]
            if Isa::Avx2.available() {
                let mut fast = empty();
                // SAFETY: AVX2 was detected.
                unsafe { quantise_avx2(&x, &mut fast) };
                assert_eq!((fast.q, fast.sums), (slow.q, slow.sums), "{x:?}");
                let bits = |b: &QuantisedBlock| [b.d, b.s].map(|v| if v.is_nan() { 0x7fc0_0000 } else { v.to_bits() });
                assert_eq!(bits(&fast), bits(&slow), "{x:?}");
            }
        }
    }

    #[test]
    fn wrong_shapes_are_refused() {
        let mut activations = Activations::new(Isa::Portable, 4, 64, 1).unwrap();
        let quantised = Forms { quantised: true, ..Forms::default() };
        assert!(activations.begin(5, 64, quantised).is_err());
        assert!(activations.begin(4, 65, quantised).is_err());
        assert!(activations.begin(4, 33, quantised).is_err());
        assert!(activations.begin(4, 33, Forms { float: true, ..Forms::default() }).is_ok());
        assert!(Activations::new(Isa::Portable, usize::MAX, 64, 1).is_err());
    }
}
