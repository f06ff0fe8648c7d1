//! Micro-kernels for AMX: the integer sums of sixteen weight rows, sixteen activation rows and 32 columns in one instruction.
//!
//! Owns the wide path of the AVX-512 level: for many activation rows, a group's weights are unpacked once into a panel of signed
//! bytes and f32 scales, and each tile runs over the panel. Integer sums are exact and the f32 steps are those of
//! `avx512`, so results are the same to the last bit and it doesn't matter where the path is taken.

// One index runs through several arrays of registers; iterators would hide which.
#![allow(clippy::needless_range_loop)]

use std::{arch::asm, arch::x86_64::*, cell::RefCell};

use super::{
    avx512,
    layout::{LANES, Packing},
    tile::Tile,
};

/// 32 columns of a group, unpacked.
#[repr(C, align(64))]
#[derive(Clone)]
pub(super) struct PanelBlock {
    /// Words as in `layout`, of signed bytes.
    words: [i8; 32 * LANES],
    scale: [f32; LANES],
    offset: [f32; LANES],
}

thread_local! {
    /// This thread's panel. Grows to the largest number of blocks seen, then stays.
    static PANEL: RefCell<Vec<PanelBlock>> = const { RefCell::new(Vec::new()) };
}

/// Does this packing have a wide path?
pub(super) fn supports(packing: Packing) -> bool {
    matches!(packing, Packing::Q4_0 | Packing::Q4_1 | Packing::Q4_K | Packing::Q8_0 | Packing::Bytes)
}

/// Tiles are configured and used while this lives, on this thread.
pub(super) struct Session(());

/// Shapes of the eight tile registers, as the processor reads them.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    column_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Session {
    /// # Safety
    /// The machine has AMX with bytes, and the system lets this process use it: [`crate::cpu::isa::matrix_tiles`].
    pub(super) unsafe fn begin() -> Self {
        let mut configuration = Configuration { palette: 1, start_row: 0, reserved: [0; 14], column_bytes: [0; 16], rows: [0; 16] };
        // 0, 1: sums (16 × 16 i32). 2, 3: activations (16 × 32 bytes). 4, 5: weights (8 words of 64 bytes).
        for (register, (rows, bytes)) in [(16, 64), (16, 64), (16, 32), (16, 32), (8, 64), (8, 64)].into_iter().enumerate() {
            configuration.rows[register] = rows;
            configuration.column_bytes[register] = bytes;
        }
        // SAFETY: reads 64 bytes that describe a valid configuration.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const configuration, options(nostack)) };
        Self(())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // SAFETY: a session can only be begun where AMX exists. Released, tiles cost nothing at a thread switch.
        unsafe { asm!("tilerelease", options(nostack)) };
    }
}

/// Unpacks a group, then calls `run` with it.
///
/// # Safety
/// The machine has AVX-512 VNNI; scales and quants are a group of the packing with as many blocks.
pub(super) unsafe fn with_panel(packing: Packing, scales: &[u8], quants: &[u8], blocks: usize, run: impl FnOnce(&[PanelBlock])) {
    PANEL.with_borrow_mut(|panel| {
        if panel.len() < blocks {
            let empty = PanelBlock { words: [0; 32 * LANES], scale: [0.0; LANES], offset: [0.0; LANES] };
            panel.resize(blocks, empty);
        }
        let panel = &mut panel[..blocks];
        // SAFETY: as the caller says.
        unsafe {
            match packing {
                Packing::Q4_0 => unpack::<avx512::Q4_0>(scales, quants, panel),
                Packing::Q4_1 => unpack::<avx512::Q4_1>(scales, quants, panel),
                Packing::Q4_K => unpack::<avx512::Q4K>(scales, quants, panel),
                Packing::Bytes => unpack::<avx512::Bytes>(scales, quants, panel),
                _ => unpack::<avx512::Q8_0>(scales, quants, panel),
            }
        }
        run(panel);
    });
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn unpack<F: avx512::Whole>(scales: &[u8], quants: &[u8], panel: &mut [PanelBlock]) {
    let (sub, scale_bytes) = F::PACKING.record();
    let zero = _mm512_set1_epi8(F::ZERO);
    for (b, block) in panel.iter_mut().enumerate() {
        // SAFETY: the group has as many blocks as the panel.
        unsafe {
            let (scale, offset) = F::scales(scales.as_ptr().add(b / sub * scale_bytes), b % sub);
            _mm512_store_ps(block.scale.as_mut_ptr(), scale);
            _mm512_store_ps(block.offset.as_mut_ptr(), offset);
            let words = F::values(quants.as_ptr().add(b * F::PACKING.quant_bytes()));
            for (k, &word) in words.iter().enumerate() {
                _mm512_store_si512(block.words.as_mut_ptr().add(64 * k).cast(), _mm512_sub_epi8(word, zero));
            }
        }
    }
}

/// Multiplies a panel with a tile of activations.
///
/// # Safety
/// A [`Session`] lives on this thread; `tile`'s activations and results are as [`super::tile::Kernel`] says, with 16 rows of
/// bytes readable from the start of its last block, whatever its width (1 to 16).
pub(super) unsafe fn multiply(panel: &[PanelBlock], tile: &Tile) {
    let offset = matches!(tile.packing, Packing::Q4_1 | Packing::Q4_K | Packing::Bytes);
    macro_rules! by_width {
        ($($width:literal)*) => {
            match (tile.width, offset) {
                // SAFETY: as the caller says.
                $(($width, true) => unsafe { wide::<true, $width>(panel, tile) },
                // SAFETY: as the caller says.
                ($width, false) => unsafe { wide::<false, $width>(panel, tile) },)*
                _ => {}
            }
        };
    }
    by_width!(1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16);
}

/// Integer sums of a block: row i for activation row i, a lane for each weight row.
#[repr(align(64))]
struct Sums([i32; 16 * LANES]);

/// Starts the integer sums of a block. Even and odd blocks use registers of their own, so that they overlap.
macro_rules! start {
    ($sum:literal, $q:literal, $w:literal, $block:expr, $q_at:expr, $sums:expr) => {
        asm!(
            concat!("tilezero ", $sum),
            concat!("tileloadd ", $q, ", [{q} + {row}]"),
            concat!("tileloadd ", $w, ", [{w} + {word}]"),
            concat!("tdpbssd ", $sum, ", ", $q, ", ", $w),
            concat!("tilestored [{sums} + {word}], ", $sum),
            q = in(reg) $q_at,
            w = in(reg) $block.words.as_ptr(),
            sums = in(reg) $sums.0.as_mut_ptr(),
            row = in(reg) 32_usize,
            word = in(reg) 64_usize,
            options(nostack),
        )
    };
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn wide<const OFFSET: bool, const N: usize>(panel: &[PanelBlock], tile: &Tile) {
    let mut totals = [_mm512_setzero_ps(); N];
    let (mut even, mut odd) = (Sums([0; 16 * LANES]), Sums([0; 16 * LANES]));
    let Some(first) = panel.first() else {
        // SAFETY: there is room for N × 16 values.
        unsafe { avx512::store(&totals, tile.out) };
        return;
    };
    // SAFETY: the caller says that a session lives and that 16 rows of bytes can be read from each block on.
    unsafe { start!("tmm0", "tmm2", "tmm4", first, tile.q, even) };
    for (b, block) in panel.iter().enumerate() {
        for line in (0..tile.next_bytes).step_by(64) {
            _mm_prefetch::<_MM_HINT_T0>(tile.next.wrapping_add(tile.next_bytes * b + line).cast());
        }
        // The next block's sums are under way while this one's are scaled.
        if let Some(next) = panel.get(b + 1) {
            // SAFETY: as above.
            unsafe {
                let q = tile.q.add(32 * N * (b + 1));
                if b % 2 == 0 { start!("tmm1", "tmm3", "tmm5", next, q, odd) } else { start!("tmm0", "tmm2", "tmm4", next, q, even) }
            }
        }
        let sums = if b % 2 == 0 { &even } else { &odd };
        // SAFETY: `d` and `s` have N values a block.
        unsafe {
            let (scale, offset) = (_mm512_load_ps(block.scale.as_ptr()), _mm512_load_ps(block.offset.as_ptr()));
            for c in 0..N {
                let integers = _mm512_load_si512(sums.0.as_ptr().add(LANES * c).cast());
                let factor = _mm512_mul_ps(scale, _mm512_set1_ps(*tile.d.add(N * b + c)));
                totals[c] = _mm512_fmadd_ps(factor, _mm512_cvtepi32_ps(integers), totals[c]);
                if OFFSET {
                    totals[c] = _mm512_fmadd_ps(offset, _mm512_set1_ps(*tile.s.add(N * b + c)), totals[c]);
                }
            }
        }
    }
    // SAFETY: there is room for N × 16 values.
    unsafe { avx512::store(&totals, tile.out) };
}
