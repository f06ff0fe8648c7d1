//! Micro-kernels for AVX-512 VNNI: a vector is sixteen rows × four columns, one `vpdpbusd` multiplies it with four activations.

// One index runs through several arrays of registers; iterators would hide which.
#![allow(clippy::needless_range_loop)]

use std::arch::x86_64::*;

use super::{
    layout::{LANES, Packing},
    tile::{Kernel, Tile},
};

/// The kernel of a packing for tiles of `width` rows, 1 to 8.
pub(super) fn kernel(packing: Packing, width: usize) -> Kernel {
    match packing {
        Packing::F32 => pick_float::<F32>(width),
        Packing::F16 => pick_float::<F16>(width),
        Packing::BF16 => pick_float::<BF16>(width),
        Packing::Q4_0 => pick_whole::<Q4_0>(width),
        Packing::Q4_1 => pick_whole::<Q4_1>(width),
        Packing::Q8_0 => pick_whole::<Q8_0>(width),
        Packing::Bytes => pick_whole::<Bytes>(width),
        Packing::Q4_K => pick_whole::<Q4K>(width),
        Packing::Q6_K => pick_six_bits(width),
    }
}

/// A function that picks an instance of a kernel by width.
macro_rules! pick {
    ($(#[$meta:meta])* $name:ident $(<$format:ident: $bound:ident>)?, $kernel:ident) => {
        $(#[$meta])*
        fn $name$(<$format: $bound>)?(width: usize) -> Kernel {
            match width {
                1 => $kernel::<$($format,)? 1>,
                2 => $kernel::<$($format,)? 2>,
                3 => $kernel::<$($format,)? 3>,
                4 => $kernel::<$($format,)? 4>,
                5 => $kernel::<$($format,)? 5>,
                6 => $kernel::<$($format,)? 6>,
                7 => $kernel::<$($format,)? 7>,
                _ => $kernel::<$($format,)? 8>,
            }
        }
    };
}

pick!(pick_float<F: Float>, float);
pick!(pick_whole<F: Whole>, whole);
pick!(pick_six_bits, six_bits);

/// Packings with one scale per row and 32 columns. Methods are safe to call on a machine with AVX-512 VNNI with pointers as
/// `layout` says; they are inlined into functions that enable it.
pub(super) trait Whole {
    const PACKING: Packing;
    /// Values are d·q + m, not d·q.
    const OFFSET: bool;
    /// What [`Whole::values`] adds to the signed values.
    const ZERO: i8;
    /// Scale and offset of block `j` of a record.
    unsafe fn scales(record: *const u8, j: usize) -> (__m512, __m512);
    /// Words 0 to 7 of 32 columns, as unsigned bytes.
    unsafe fn values(quants: *const u8) -> [__m512i; 8];
    /// What the integer sum starts with, from −8 · Σ activations.
    unsafe fn start(negative: *const i32) -> __m512i;
}

pub(super) struct Q4_0;
pub(super) struct Q4_1;
pub(super) struct Q8_0;
pub(super) struct Bytes;
pub(super) struct Q4K;

#[inline(always)]
unsafe fn load(at: *const u8) -> __m512i {
    // SAFETY: the caller's pointer holds 64 bytes.
    unsafe { _mm512_loadu_si512(at.cast()) }
}

/// Sixteen f16.
#[inline(always)]
unsafe fn halves(at: *const u8) -> __m512 {
    // SAFETY: the caller's pointer holds 32 bytes.
    unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())) }
}

/// Sixteen unsigned bytes as f32.
#[inline(always)]
unsafe fn unsigned(at: *const u8) -> __m512 {
    // SAFETY: the caller's pointer holds 16 bytes.
    unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(at.cast()))) }
}

/// Sixteen signed bytes as f32.
#[inline(always)]
unsafe fn signed(at: *const u8) -> __m512 {
    // SAFETY: the caller's pointer holds 16 bytes.
    unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at.cast()))) }
}

#[inline(always)]
unsafe fn nibbles(quants: *const u8) -> [__m512i; 8] {
    // SAFETY: the caller's pointer holds 256 bytes.
    unsafe {
        let mask = _mm512_set1_epi8(15);
        let words = [load(quants), load(quants.add(64)), load(quants.add(128)), load(quants.add(192))];
        let low = |i: usize| _mm512_and_si512(words[i], mask);
        let high = |i: usize| _mm512_and_si512(_mm512_srli_epi16::<4>(words[i]), mask);
        [low(0), low(1), low(2), low(3), high(0), high(1), high(2), high(3)]
    }
}

// SAFETY of the blocks below: the caller's pointers hold what `layout` says for the packing.

impl Whole for Q4_0 {
    const PACKING: Packing = Packing::Q4_0;
    const OFFSET: bool = false;
    const ZERO: i8 = 8;
    #[inline(always)]
    unsafe fn scales(record: *const u8, _: usize) -> (__m512, __m512) {
        // SAFETY: see above.
        unsafe { (halves(record), _mm512_setzero_ps()) }
    }
    #[inline(always)]
    unsafe fn values(quants: *const u8) -> [__m512i; 8] {
        // SAFETY: see above.
        unsafe { nibbles(quants) }
    }
    #[inline(always)]
    unsafe fn start(negative: *const i32) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_set1_epi32(*negative) }
    }
}

impl Whole for Q4_1 {
    const PACKING: Packing = Packing::Q4_1;
    const OFFSET: bool = true;
    const ZERO: i8 = 0;
    #[inline(always)]
    unsafe fn scales(record: *const u8, _: usize) -> (__m512, __m512) {
        // SAFETY: see above.
        unsafe { (halves(record), halves(record.add(2 * LANES))) }
    }
    #[inline(always)]
    unsafe fn values(quants: *const u8) -> [__m512i; 8] {
        // SAFETY: see above.
        unsafe { nibbles(quants) }
    }
    #[inline(always)]
    unsafe fn start(_: *const i32) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_setzero_si512() }
    }
}

impl Whole for Q4K {
    const PACKING: Packing = Packing::Q4_K;
    const OFFSET: bool = true;
    const ZERO: i8 = 0;
    #[inline(always)]
    unsafe fn scales(record: *const u8, j: usize) -> (__m512, __m512) {
        // SAFETY: see above.
        unsafe {
            let small = record.add(4 * LANES + j * 2 * LANES);
            // Both products are exact: 11 bits by 6.
            let offset = _mm512_mul_ps(halves(record.add(2 * LANES)), unsigned(small.add(LANES)));
            (_mm512_mul_ps(halves(record), unsigned(small)), _mm512_sub_ps(_mm512_setzero_ps(), offset))
        }
    }
    #[inline(always)]
    unsafe fn values(quants: *const u8) -> [__m512i; 8] {
        // SAFETY: see above.
        unsafe { nibbles(quants) }
    }
    #[inline(always)]
    unsafe fn start(_: *const i32) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_setzero_si512() }
    }
}

/// Eight words of signed bytes, plus 128.
#[inline(always)]
unsafe fn bytes(quants: *const u8) -> [__m512i; 8] {
    // SAFETY: the caller's pointer holds 512 bytes.
    unsafe {
        let sign = _mm512_set1_epi8(-128);
        let word = |i: usize| _mm512_xor_si512(load(quants.add(64 * i)), sign);
        [word(0), word(1), word(2), word(3), word(4), word(5), word(6), word(7)]
    }
}

/// What sums of [`bytes`] start with: −128 · Σ.
#[inline(always)]
unsafe fn bytes_start(negative: *const i32) -> __m512i {
    // SAFETY: the caller's pointer holds a value.
    unsafe { _mm512_slli_epi32::<4>(_mm512_set1_epi32(*negative)) }
}

impl Whole for Q8_0 {
    const PACKING: Packing = Packing::Q8_0;
    const OFFSET: bool = false;
    const ZERO: i8 = -128;
    #[inline(always)]
    unsafe fn scales(record: *const u8, _: usize) -> (__m512, __m512) {
        // SAFETY: see above.
        unsafe { (halves(record), _mm512_setzero_ps()) }
    }
    #[inline(always)]
    unsafe fn values(quants: *const u8) -> [__m512i; 8] {
        // SAFETY: see above.
        unsafe { bytes(quants) }
    }
    #[inline(always)]
    unsafe fn start(negative: *const i32) -> __m512i {
        // SAFETY: see above.
        unsafe { bytes_start(negative) }
    }
}

impl Whole for Bytes {
    const PACKING: Packing = Packing::Bytes;
    const OFFSET: bool = true;
    const ZERO: i8 = -128;
    #[inline(always)]
    unsafe fn scales(record: *const u8, _: usize) -> (__m512, __m512) {
        // SAFETY: see above.
        unsafe { (_mm512_loadu_ps(record.cast()), _mm512_loadu_ps(record.add(4 * LANES).cast())) }
    }
    #[inline(always)]
    unsafe fn values(quants: *const u8) -> [__m512i; 8] {
        // SAFETY: see above.
        unsafe { bytes(quants) }
    }
    #[inline(always)]
    unsafe fn start(negative: *const i32) -> __m512i {
        // SAFETY: see above.
        unsafe { bytes_start(negative) }
    }
}

/// Four activations of one row, in every lane.
#[inline(always)]
unsafe fn four(q: *const i8) -> __m512i {
    // SAFETY: the caller's pointer holds 4 bytes.
    unsafe { _mm512_set1_epi32(q.cast::<i32>().read_unaligned()) }
}

/// # Safety
/// As [`Kernel`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn whole<F: Whole, const N: usize>(tile: &Tile) {
    let (sub, scale_bytes) = F::PACKING.record();
    let mut sums = [_mm512_setzero_ps(); N];
    let (mut record, mut quants, mut q, mut d, mut s, mut negative) = (tile.scales, tile.quants, tile.q, tile.d, tile.s, tile.negative);
    for _ in 0..tile.blocks / sub {
        for j in 0..sub {
            // SAFETY: the pointers advance by a block at a time and there are `blocks` of them.
            unsafe {
                let (scale, offset) = F::scales(record, j);
                let words = F::values(quants);
                let mut integers = [_mm512_setzero_si512(); N];
                for c in 0..N {
                    integers[c] = F::start(negative.add(c));
                }
                for k in [0, 4, 1, 5, 2, 6, 3, 7] {
                    for c in 0..N {
                        integers[c] = _mm512_dpbusd_epi32(integers[c], words[k], four(q.add(32 * c + 4 * k)));
                    }
                }
                for c in 0..N {
                    let factor = _mm512_mul_ps(scale, _mm512_set1_ps(*d.add(c)));
                    sums[c] = _mm512_fmadd_ps(factor, _mm512_cvtepi32_ps(integers[c]), sums[c]);
                    if F::OFFSET {
                        sums[c] = _mm512_fmadd_ps(offset, _mm512_set1_ps(*s.add(c)), sums[c]);
                    }
                }
                quants = quants.add(F::PACKING.quant_bytes());
                (q, d, s, negative) = (q.add(32 * tile.stride), d.add(tile.stride), s.add(tile.stride), negative.add(tile.stride));
            }
        }
        // SAFETY: as above.
        record = unsafe { record.add(scale_bytes) };
    }
    // SAFETY: there is room for N × 16 values.
    unsafe { store(&sums, tile.out) };
}

#[inline(always)]
pub(super) unsafe fn store<const N: usize>(sums: &[__m512; N], out: *mut f32) {
    for (c, &sum) in sums.iter().enumerate() {
        // SAFETY: the caller's pointer holds N × 16 values.
        unsafe { _mm512_storeu_ps(out.add(LANES * c), sum) };
    }
}

/// Words 0 to 7 of 32 columns of Q6_K, q + 32.
#[inline(always)]
unsafe fn six_bit_values(quants: *const u8) -> [__m512i; 8] {
    // SAFETY: the caller's pointer holds 384 bytes.
    unsafe {
        let low = nibbles(quants);
        let mask = _mm512_set1_epi8(0x30);
        let upper = [load(quants.add(256)), load(quants.add(320))];
        // (a & mask) | low
        let merge = |a: __m512i, low: __m512i| _mm512_ternarylogic_epi32::<0b1110_1010>(a, mask, low);
        [
            merge(_mm512_slli_epi16::<4>(upper[0]), low[0]),
            merge(_mm512_slli_epi16::<2>(upper[0]), low[1]),
            merge(upper[0], low[2]),
            merge(_mm512_srli_epi16::<2>(upper[0]), low[3]),
            merge(_mm512_slli_epi16::<4>(upper[1]), low[4]),
            merge(_mm512_slli_epi16::<2>(upper[1]), low[5]),
            merge(upper[1], low[6]),
            merge(_mm512_srli_epi16::<2>(upper[1]), low[7]),
        ]
    }
}

/// Q6_K: the two halves of 32 columns have integer factors; factor · sum is exact in f32, and so is the sum of both
/// (below 2^24).
///
/// # Safety
/// As [`Kernel`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn six_bits<const N: usize>(tile: &Tile) {
    let (sub, scale_bytes) = Packing::Q6_K.record();
    let mut sums = [_mm512_setzero_ps(); N];
    let (mut record, mut quants, mut q, mut d, mut negative) = (tile.scales, tile.quants, tile.q, tile.d, tile.negative_halves);
    for _ in 0..tile.blocks / sub {
        for j in 0..sub {
            // SAFETY: the pointers advance by a block at a time and there are `blocks` of them.
            unsafe {
                let scale = halves(record);
                let small = record.add(2 * LANES + j * 2 * LANES);
                let factors = [signed(small), signed(small.add(LANES))];
                let words = six_bit_values(quants);
                let mut exact = [_mm512_setzero_ps(); N];
                for half in 0..2 {
                    let mut integers = [_mm512_setzero_si512(); N];
                    for c in 0..N {
                        integers[c] = _mm512_slli_epi32::<2>(_mm512_set1_epi32((*negative.add(c))[half]));
                    }
                    for k in 4 * half..4 * half + 4 {
                        for c in 0..N {
                            integers[c] = _mm512_dpbusd_epi32(integers[c], words[k], four(q.add(32 * c + 4 * k)));
                        }
                    }
                    for c in 0..N {
                        exact[c] = _mm512_fmadd_ps(factors[half], _mm512_cvtepi32_ps(integers[c]), exact[c]);
                    }
                }
                for c in 0..N {
                    sums[c] = _mm512_fmadd_ps(_mm512_mul_ps(scale, _mm512_set1_ps(*d.add(c))), exact[c], sums[c]);
                }
                quants = quants.add(Packing::Q6_K.quant_bytes());
                (q, d, negative) = (q.add(32 * tile.stride), d.add(tile.stride), negative.add(tile.stride));
            }
        }
        // SAFETY: as above.
        record = unsafe { record.add(scale_bytes) };
    }
    // SAFETY: there is room for N × 16 values.
    unsafe { store(&sums, tile.out) };
}

/// Float packings.
trait Float {
    const BYTES: usize;
    /// Sixteen values.
    unsafe fn weights(at: *const u8) -> __m512;
}

struct F32;
struct F16;
struct BF16;

impl Float for F32 {
    const BYTES: usize = 4;
    #[inline(always)]
    unsafe fn weights(at: *const u8) -> __m512 {
        // SAFETY: the caller's pointer holds 64 bytes.
        unsafe { _mm512_loadu_ps(at.cast()) }
    }
}

impl Float for F16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn weights(at: *const u8) -> __m512 {
        // SAFETY: the caller's pointer holds 32 bytes.
        unsafe { halves(at) }
    }
}

impl Float for BF16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn weights(at: *const u8) -> __m512 {
        // SAFETY: the caller's pointer holds 32 bytes.
        unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(at.cast())))) }
    }
}

/// # Safety
/// As [`Kernel`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn float<F: Float, const N: usize>(tile: &Tile) {
    let mut sums = [[_mm512_setzero_ps(); N]; 2];
    let (mut weights, mut x) = (tile.quants, tile.x);
    for _ in 0..tile.blocks {
        for sums in &mut sums {
            // SAFETY: there are 2 · blocks columns of sixteen weights and N activations.
            unsafe {
                let w = F::weights(weights);
                for c in 0..N {
                    sums[c] = _mm512_fmadd_ps(w, _mm512_set1_ps(*x.add(c)), sums[c]);
                }
                weights = weights.add(F::BYTES * LANES);
                x = x.add(N);
            }
        }
    }
    let mut total = sums[0];
    for c in 0..N {
        total[c] = _mm512_add_ps(sums[0][c], sums[1][c]);
    }
    // SAFETY: there is room for N × 16 values.
    unsafe { store(&total, tile.out) };
}
