//! How rows are cut into tiles of as many as a micro-kernel computes together.

use super::{Forms, MATRIX_ROWS, MAX_TILE};
use crate::cpu::isa::{Isa, matrix_tiles};

/// Consecutive rows, cut into as few tiles as possible, as equal as possible.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::cpu) struct Tiling {
    first: usize,
    rows: usize,
    tiles: usize,
}

impl Tiling {
    fn new(first: usize, rows: usize, widest: usize) -> Self {
        Self { first, rows, tiles: rows.div_ceil(widest) }
    }

    pub(in crate::cpu) fn rows(self) -> usize {
        self.rows
    }

    pub(in crate::cpu) fn tiles(self) -> usize {
        self.tiles
    }

    /// First row of tile `tile`, or where the last one ends.
    pub(in crate::cpu) fn start(self, tile: usize) -> usize {
        self.first + self.rows * tile / self.tiles
    }

    /// First row and width of the tile that holds `row`.
    pub(super) fn around(self, row: usize) -> (usize, usize) {
        let tile = ((row - self.first + 1) * self.tiles - 1) / self.rows;
        let start = self.start(tile);
        (start, self.start(tile + 1) - start)
    }
}

/// Rows that are multiplied together: no tile reaches into another span.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    pub first: usize,
    /// Of rows of bytes, of which there are twice as many in the fine form.
    pub quantised: Tiling,
    pub float: Tiling,
}

impl Span {
    pub(super) fn new(isa: Isa, first: usize, rows: usize, forms: Forms) -> Self {
        let copies = if forms.fine { 2 } else { 1 };
        Self {
            first,
            quantised: Tiling::new(copies * first, copies * rows, widest(isa, false, copies * rows)),
            float: Tiling::new(first, rows, widest(isa, true, rows)),
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_are_balanced_and_rows_are_found() {
        for first in [0, 5] {
            for rows in 1..70 {
                let tiling = Tiling::new(first, rows, 8);
                for tile in 0..tiling.tiles() {
                    let (start, end) = (tiling.start(tile), tiling.start(tile + 1));
                    assert!(end > start && end - start <= 8);
                    for row in start..end {
                        assert_eq!(tiling.around(row), (start, end - start));
                    }
                }
                assert_eq!((tiling.start(0), tiling.start(tiling.tiles())), (first, first + rows));
            }
        }
    }
}
