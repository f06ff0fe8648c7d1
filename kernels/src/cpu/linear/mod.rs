//! Packed weight matrices and their product with prepared activations.
//!
//! - [`layout`]: the packed bytes; [`memory`]: where they lie
//! - [`tile`]: what a micro-kernel gets, and the arithmetic that all of them share
//! - [`portable`], `avx2`, `avx512`: the micro-kernels; `amx`: a faster way for many rows to the bits of `avx512`
//!
//! Owns one copy of the weights that every batch size reads. Never decides who computes what: callers hand out groups of
//! rows to threads. An output does not depend on how they do, nor on how many activation rows there are.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod layout;
mod memory;
mod portable;
#[cfg(test)]
mod tests;
mod tile;

use std::ops::Range;

use self::{
    layout::{LANES, Packing, pack_group},
    memory::Memory,
    tile::{Kernel, Tile},
};
use super::{
    activations::{Activations, Forms, MATRIX_ROWS, MAX_TILE, Tiling},
    isa::{Isa, matrix_tiles},
    pool::{Chunks, Pool},
};
use crate::{
    KernelError,
    backend::Precision,
    quant::{ACTIVATION_BLOCK, TensorView},
};

/// Groups packed at a time by one thread.
const PACK_CHUNK: usize = 8;
/// Activation rows that a micro-kernel computes together at most.
const WIDEST_KERNEL: usize = 8;

/// A weight matrix, out × in: the rows of its parts one below the other.
pub struct PackedLinear {
    isa: Isa,
    rows: usize,
    columns: usize,
    segments: Vec<Segment>,
    bias: Option<Vec<f32>>,
    groups: usize,
    /// Of all parts.
    forms: Forms,
    /// Some part's many rows go through the matrix unit.
    matrix: bool,
}

/// One part.
struct Segment {
    packing: Packing,
    rows: usize,
    first_row: usize,
    first_group: usize,
    groups: usize,
    group_bytes: usize,
    /// Where a group's quants begin.
    scale_bytes: usize,
    memory: Memory,
    /// By width of the tile, from 1 on.
    kernels: [Kernel; WIDEST_KERNEL],
    /// Many rows go through the matrix unit.
    matrix: bool,
}

impl PackedLinear {
    /// Packs the rows of `parts`, one below the other (all with the same number of columns; types may differ), with an
    /// optional bias of as many values as there are rows. The pool shares the work.
    ///
    /// # Errors
    /// Shapes that don't fit, a type without kernels, no memory, or an instruction set that this machine lacks.
    pub fn pack(isa: Isa, pool: &Pool, parts: &[TensorView<'_>], bias: Option<&[f32]>, precision: Precision) -> Result<Self, KernelError> {
        if !isa.available() {
            return Err(KernelError::Unsupported(format!("instruction set {}", isa.name())));
        }
        let columns = parts.first().map_or(0, |part| part.columns);
        let mut linear = Self {
            isa,
            rows: 0,
            columns,
            segments: Vec::with_capacity(parts.len()),
            bias: None,
            groups: 0,
            forms: Forms::default(),
            matrix: false,
        };
        for part in parts {
            part.check("linear")?;
            if part.columns != columns {
                return Err(shape(format!("a part has {} columns, another {columns}", part.columns)));
            }
            let segment = Segment::pack(isa, pool, part, linear.rows, linear.groups)?;
            linear.rows += segment.rows;
            linear.groups += segment.groups;
            let float = segment.packing.is_float();
            linear.forms = linear.forms.or(Forms { quantised: !float, float, fine: !float && precision == Precision::TwoBytes });
            linear.matrix |= segment.matrix;
            linear.segments.push(segment);
        }
        if let Some(bias) = bias {
            if bias.len() != linear.rows {
                return Err(shape(format!("{} bias values for {} rows", bias.len(), linear.rows)));
            }
            linear.bias = Some(bias.to_vec());
        }
        Ok(linear)
    }

    /// Output width.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input width.
    #[must_use]
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Bytes that it holds.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let bias = self.bias.as_ref().map_or(0, |bias| size_of_val(bias.as_slice()));
        bias + self.segments.iter().map(|segment| segment.memory.bytes().len()).sum::<usize>()
    }

    /// Which forms of the activations it reads.
    #[must_use]
    pub fn forms(&self) -> Forms {
        self.forms
    }

    /// Units of work: each is up to 16 consecutive output rows of one part.
    #[must_use]
    pub fn groups(&self) -> usize {
        self.groups
    }

    /// Output rows of group `group`; empty where there is none.
    #[must_use]
    pub fn group_rows(&self, group: usize) -> Range<usize> {
        self.segment(group).map_or(0..0, |segment| segment.group_rows(group))
    }

    fn segment(&self, group: usize) -> Option<&Segment> {
        self.segments.get(self.segments.partition_point(|segment| segment.first_group + segment.groups <= group))
    }

    /// Decodes row `row` into `out`: exactly what [`crate::quant::dequantize`] gives for it.
    ///
    /// # Errors
    /// No such row, or `out` is not as long as a row.
    pub fn gather_row(&self, row: usize, out: &mut [f32]) -> Result<(), KernelError> {
        let Some(segment) = self.segment_of(row).filter(|_| out.len() == self.columns) else {
            return Err(shape(format!("row {row} into {} values, of {} × {}", out.len(), self.rows, self.columns)));
        };
        segment.gather(row - segment.first_row, 0, out);
        Ok(())
    }

    /// out += scale · row `row`; nothing where there is no such row.
    pub fn add_row(&self, row: usize, scale: f32, out: &mut [f32]) {
        let Some(segment) = self.segment_of(row).filter(|_| out.len() == self.columns) else { return };
        let row = row - segment.first_row;
        let mut part = [0.0; ACTIVATION_BLOCK];
        for (block, out) in out.chunks_mut(ACTIVATION_BLOCK).enumerate() {
            let part = &mut part[..out.len()];
            segment.gather(row, block * ACTIVATION_BLOCK, part);
            out.iter_mut().zip(part).for_each(|(out, part)| *out += scale * *part);
        }
    }

    fn segment_of(&self, row: usize) -> Option<&Segment> {
        let after = self.segments.partition_point(|segment| segment.first_row + segment.rows <= row);
        self.segments.get(after)
    }

    /// The groups that hold exactly these rows; none where a group holds others too.
    #[must_use]
    pub fn groups_of(&self, rows: Range<usize>) -> Option<Range<usize>> {
        let group = |row: usize| {
            let segment = self.segment_of(row)?;
            Some(segment.first_group + (row - segment.first_row) / LANES)
        };
        let last = rows.end.checked_sub(1)?;
        let groups = group(rows.start)?..group(last)? + 1;
        (self.group_rows(groups.start).start == rows.start && self.group_rows(groups.end - 1).end == rows.end).then_some(groups)
    }

    /// For each of these groups, ascending, and each activation row `r`: `sink(r, first, values)` with outputs `first ..` of
    /// that row, bias added; as many as the group has rows.
    ///
    /// # Errors
    /// The activations have other columns or instruction set than the weights, or lack a form; there are no such groups.
    pub fn matmul<S>(&self, groups: Range<usize>, activations: &Activations, sink: S) -> Result<(), KernelError>
    where
        S: FnMut(usize, usize, &[f32]),
    {
        self.matmul_span(groups, activations, 0, sink)
    }

    /// The same for the rows of one span; rows are counted from the beginning of all.
    pub(super) fn matmul_span<S>(
        &self,
        groups: Range<usize>,
        activations: &Activations,
        span: usize,
        mut sink: S,
    ) -> Result<(), KernelError>
    where
        S: FnMut(usize, usize, &[f32]),
    {
        let forms = self.forms();
        let given = activations.forms();
        let fits = given.or(forms) == given && (given.fine == forms.fine || !forms.quantised);
        if activations.columns() != self.columns || activations.isa() != self.isa || !fits {
            return Err(shape(format!("activations have {} columns, weights {}, or lack a form", activations.columns(), self.columns)));
        }
        if groups.end > self.groups {
            return Err(shape(format!("groups {groups:?} of {}", self.groups)));
        }
        let matrix = Matrix::begin(activations, span, self.matrix);
        let mut results = Results([0.0; MAX_TILE * LANES]);
        for group in groups {
            let Some(segment) = self.segment(group) else { continue };
            let rows = segment.group_rows(group);
            let bias = self.bias.as_ref().map(|bias| &bias[rows.clone()]);
            // Two bytes: the outputs of a row are those of its first bytes plus those of its second; they may lie in two tiles.
            let pairs = forms.fine && !segment.packing.is_float();
            let mut first = [0.0; LANES];
            segment.multiply(group - segment.first_group, activations, span, &matrix, &mut results, |start, results| {
                for (c, values) in results.iter_mut().enumerate() {
                    let mut row = start + c;
                    if pairs {
                        if row % 2 == 0 {
                            first = *values;
                            continue;
                        }
                        values.iter_mut().zip(first).for_each(|(value, first)| *value += first);
                        row /= 2;
                    }
                    let values = &mut values[..rows.len()];
                    if let Some(bias) = bias {
                        values.iter_mut().zip(bias).for_each(|(value, bias)| *value += bias);
                    }
                    sink(row, rows.start, values);
                }
            });
        }
        Ok(())
    }
}

/// A tile's outputs, 16 per activation row.
#[repr(align(64))]
struct Results([f32; MAX_TILE * LANES]);

impl Segment {
    fn pack(isa: Isa, pool: &Pool, part: &TensorView<'_>, first_row: usize, first_group: usize) -> Result<Self, KernelError> {
        let packing = Packing::of(part.tensor_type)?;
        let groups = part.rows.div_ceil(LANES);
        let group_bytes = packing.group_bytes(part.columns);
        let bytes = groups.checked_mul(group_bytes).ok_or(KernelError::OutOfMemory { what: "weights", bytes: usize::MAX })?;
        let mut memory = Memory::new(bytes)?;
        if bytes > 0 {
            let places = parking_lot::Mutex::new(memory.bytes_mut().chunks_mut(PACK_CHUNK * group_bytes).map(Some).collect::<Vec<_>>());
            let chunks = Chunks::new(groups.div_ceil(PACK_CHUNK), 1);
            pool.run(|_| {
                while let Some(chunk) = chunks.take() {
                    let place = places.lock()[chunk.start].take();
                    for (i, group) in place.into_iter().flat_map(|place| place.chunks_exact_mut(group_bytes)).enumerate() {
                        pack_group(part, packing, (chunk.start * PACK_CHUNK + i) * LANES, group);
                    }
                }
            });
        }
        Ok(Self {
            packing,
            rows: part.rows,
            first_row,
            first_group,
            groups,
            group_bytes,
            scale_bytes: packing.scale_bytes(part.columns),
            memory,
            kernels: std::array::from_fn(|i| kernel(isa, packing, i + 1)),
            matrix: isa == Isa::Avx512Vnni && supports_matrix(packing) && matrix_tiles(),
        })
    }

    fn group_rows(&self, group: usize) -> Range<usize> {
        let start = (group - self.first_group) * LANES;
        self.first_row + start..self.first_row + self.rows.min(start + LANES)
    }

    /// Scales and quants of the part's group `local`.
    fn group(&self, local: usize) -> (&[u8], &[u8]) {
        self.memory.bytes()[local * self.group_bytes..][..self.group_bytes].split_at(self.scale_bytes)
    }

    /// Multiplies the part's group `local` with all activations, a tile at a time: `done(first row, outputs)`.
    fn multiply<D>(&self, local: usize, activations: &Activations, span: usize, matrix: &Matrix, results: &mut Results, mut done: D)
    where
        D: FnMut(usize, &mut [[f32; LANES]]),
    {
        let (scales, quants) = self.group(local);
        let Some(tiling) = activations.tiling(self.packing.is_float(), span) else { return };
        let blocks = self.packing.blocks(activations.columns());
        let mut each_tile = |run: &mut dyn FnMut(&Tile)| {
            for tile in 0..tiling.tiles() {
                let (start, end) = (tiling.start(tile), tiling.start(tile + 1));
                let quantised = activations.quantised_tile(start);
                run(&Tile {
                    packing: self.packing,
                    width: end - start,
                    stride: end - start,
                    scales: scales.as_ptr(),
                    quants: quants.as_ptr(),
                    blocks,
                    q: quantised.q.as_ptr(),
                    d: quantised.d.as_ptr(),
                    s: quantised.s.as_ptr(),
                    negative: quantised.negative.as_ptr(),
                    negative_halves: quantised.negative_halves.as_ptr(),
                    // Bytes may have twice as many rows as floats.
                    x: if self.packing.is_float() { activations.float_tile(start).as_ptr() } else { std::ptr::null() },
                    next: scales.as_ptr().wrapping_add(self.group_bytes),
                    next_bytes: if tile == 0 { self.group_bytes / blocks.max(1) } else { 0 },
                    out: results.0.as_mut_ptr(),
                });
                done(start, &mut results.0.as_chunks_mut::<LANES>().0[..end - start]);
            }
        };
        // SAFETY of both ways: `pack` checked that the machine has the instruction set. The group holds as many blocks of this
        // packing as the tile says; `matmul` checked that the activations hold as many columns, in this form and tiling;
        // results hold the widest tile.
        #[cfg(target_arch = "x86_64")]
        if self.matrix && matrix.0.is_some() {
            // SAFETY: see above; a session lives, and activations have room for 16 rows behind the last block.
            let with_panel = |panel: &[amx::PanelBlock]| each_tile(&mut |tile| unsafe { amx::multiply(panel, tile) });
            // SAFETY: see above.
            unsafe { amx::with_panel(self.packing, scales, quants, blocks, with_panel) };
            return;
        }
        let _ = matrix;
        // SAFETY: see above; `run_kernels` cuts tiles to the width that kernels have.
        each_tile(&mut |tile| unsafe { self.run_kernels(tile) });
    }

    /// Runs micro-kernels over a tile of any width.
    ///
    /// # Safety
    /// As [`Kernel`].
    unsafe fn run_kernels(&self, tile: &Tile) {
        let parts = tile.width.div_ceil(WIDEST_KERNEL);
        for part in 0..parts {
            let (start, end) = (tile.width * part / parts, tile.width * (part + 1) / parts);
            // SAFETY: rows start .. end lie side by side in each block of the tile, and so do their results.
            unsafe {
                let part = Tile {
                    width: end - start,
                    q: tile.q.add(ACTIVATION_BLOCK * start),
                    d: tile.d.add(start),
                    s: tile.s.add(start),
                    negative: tile.negative.add(start),
                    negative_halves: tile.negative_halves.add(start),
                    out: tile.out.add(LANES * start),
                    ..*tile
                };
                self.kernels[end - start - 1](&part);
            }
        }
    }

    /// Columns `start ..` of a row; `start` is a multiple of 32.
    fn gather(&self, row: usize, start: usize, out: &mut [f32]) {
        let (scales, quants) = self.group(row / LANES);
        let lane = row % LANES;
        if self.packing.is_float() {
            for (column, out) in out.iter_mut().enumerate() {
                *out = portable::floats(self.packing, quants, start + column)[lane];
            }
            return;
        }
        for (b, out) in out.chunks_exact_mut(ACTIVATION_BLOCK).enumerate() {
            let block = portable::decode(self.packing, scales, quants, start / ACTIVATION_BLOCK + b);
            for (i, out) in out.iter_mut().enumerate() {
                // The order of operations of `quant`: (d · scale) · q + offset.
                let scale = block.scale[lane] * block.halves[i / 16][lane] as f32;
                *out = scale * f32::from(block.values[i / 4][4 * lane + i % 4]) + block.offset[lane];
            }
        }
    }
}

/// The matrix unit, configured on this thread while this lives; None where it isn't used.
#[cfg(target_arch = "x86_64")]
struct Matrix(Option<amx::Session>);
#[cfg(not(target_arch = "x86_64"))]
struct Matrix;

impl Matrix {
    /// For a span with enough rows of bytes, if `wanted` by a part.
    #[cfg(target_arch = "x86_64")]
    fn begin(activations: &Activations, span: usize, wanted: bool) -> Self {
        let rows = activations.tiling(false, span).map_or(0, Tiling::rows);
        // SAFETY: parts want it only where it may be used.
        Self((wanted && rows >= MATRIX_ROWS).then(|| unsafe { amx::Session::begin() }))
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn begin(_: &Activations, _: usize, _: bool) -> Self {
        Self
    }
}

#[cfg(target_arch = "x86_64")]
use amx::supports as supports_matrix;
#[cfg(not(target_arch = "x86_64"))]
fn supports_matrix(_: Packing) -> bool {
    false
}

fn kernel(isa: Isa, packing: Packing, width: usize) -> Kernel {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Vnni => avx512::kernel(packing, width),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => avx2::kernel(packing, width),
        _ if packing.is_float() => portable::float,
        _ => portable::quantised,
    }
}

fn shape(detail: String) -> KernelError {
    KernelError::Shape { op: "linear", detail }
}
