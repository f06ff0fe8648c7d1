//! Micro-kernels for AVX2 and FMA: a vector is eight rows × four columns, two of them are a group's word.
//!
//! `vpmaddubsw` adds two products of an unsigned and a signed byte into 16 bits and saturates; sums are widened before they
//! can. With activations of at most 127: eight steps of nibbles reach 8 · 2 · 15 · 127 = 30,480, two steps of six bits
//! 2 · 2 · 63 · 127 = 32,004, one step of bytes (|weight| up to 128) 2 · 128 · 127 = 32,512.

// One index runs through several arrays of registers; iterators would hide which.
#![allow(clippy::needless_range_loop)]

use std::arch::x86_64::*;

use super::{
    layout::{LANES, Packing},
    tile::{Kernel, Tile},
};

/// The kernel of a packing for tiles of `width` rows: 1 to 4, for floats 1 to 3.
pub(super) fn kernel(packing: Packing, width: usize) -> Kernel {
    match packing {
        Packing::F32 => pick_float::<F32>(width),
        Packing::F16 => pick_float::<F16>(width),
        Packing::BF16 => pick_float::<BF16>(width),
        Packing::Q4_0 => pick_nibbles::<Q4_0>(width),
        Packing::Q4_1 => pick_nibbles::<Q4_1>(width),
        Packing::Q4_K => pick_nibbles::<Q4K>(width),
        Packing::Q8_0 => pick_bytes::<Q8_0>(width),
        Packing::Bytes => pick_bytes::<Bytes>(width),
        Packing::Q6_K => pick_six_bits(width),
    }
}

/// A function that picks an instance of a kernel by width.
macro_rules! pick {
    ($name:ident $(<$format:ident: $bound:ident>)?, $kernel:ident) => {
        fn $name$(<$format: $bound>)?(width: usize) -> Kernel {
            match width {
                1 => $kernel::<$($format,)? 1>,
                2 => $kernel::<$($format,)? 2>,
                3 => $kernel::<$($format,)? 3>,
                _ => $kernel::<$($format,)? 4>,
            }
        }
    };
}

pick!(pick_float<F: Float>, float);
pick!(pick_nibbles<F: Scaled>, nibbles);
pick!(pick_bytes<F: Scaled>, bytes);
pick!(pick_six_bits, six_bits);

/// Sixteen rows.
type Pair = [__m256; 2];

#[inline(always)]
unsafe fn load(at: *const u8) -> __m256i {
    // SAFETY: the caller's pointer holds 32 bytes.
    unsafe { _mm256_loadu_si256(at.cast()) }
}

/// Sixteen f16.
#[inline(always)]
unsafe fn halves(at: *const u8) -> Pair {
    // SAFETY: the caller's pointer holds 32 bytes.
    unsafe { [_mm256_cvtph_ps(_mm_loadu_si128(at.cast())), _mm256_cvtph_ps(_mm_loadu_si128(at.add(16).cast()))] }
}

/// Sixteen unsigned bytes as f32.
#[inline(always)]
unsafe fn unsigned(at: *const u8) -> Pair {
    // SAFETY: the caller's pointer holds 16 bytes.
    unsafe {
        let eight = |at: *const u8| _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(at.cast())));
        [eight(at), eight(at.add(8))]
    }
}

/// Sixteen signed bytes as f32.
#[inline(always)]
unsafe fn signed(at: *const u8) -> Pair {
    // SAFETY: the caller's pointer holds 16 bytes.
    unsafe {
        let eight = |at: *const u8| _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(at.cast())));
        [eight(at), eight(at.add(8))]
    }
}

/// Four activations of one row, in every lane.
#[inline(always)]
unsafe fn four(q: *const i8) -> __m256i {
    // SAFETY: the caller's pointer holds 4 bytes.
    unsafe { _mm256_set1_epi32(q.cast::<i32>().read_unaligned()) }
}

/// Packings with one scale per row and 32 columns. Methods are safe to call on a machine with AVX2, FMA and F16C
/// with pointers as `layout` says; they are inlined into functions that enable these.
trait Scaled {
    const PACKING: Packing;
    /// Values are d·q + m; without, d·(q − 8) for nibbles and d·q for bytes.
    const OFFSET: bool;
    /// Scale and offset of block `j` of a record.
    unsafe fn scales(record: *const u8, j: usize) -> (Pair, Pair);
}

struct Q4_0;
struct Q4_1;
struct Q4K;
struct Q8_0;
struct Bytes;

impl Scaled for Q4_0 {
    const PACKING: Packing = Packing::Q4_0;
    const OFFSET: bool = false;
    #[inline(always)]
    unsafe fn scales(record: *const u8, _: usize) -> (Pair, Pair) {
        // SAFETY: the caller's pointer holds a record.
        unsafe { (halves(record), [_mm256_setzero_ps(); 2]) }
    }
}

impl Scaled for Q4_1 {
    const PACKING: Packing = Packing::Q4_1;
    const OFFSET: bool = true;
    #[inline(always)]
    unsafe fn scales(record: *const u8, _: usize) -> (Pair, Pair) {
        // SAFETY: the caller's pointer holds a record.
        unsafe { (halves(record), halves(record.add(2 * LANES))) }
    }
}

impl Scaled for Q8_0 {
    const PACKING: Packing = Packing::Q8_0;
    const OFFSET: bool = false;
    #[inline(always)]
    unsafe fn scales(record: *const u8, _: usize) -> (Pair, Pair) {
        // SAFETY: the caller's pointer holds a record.
        unsafe { (halves(record), [_mm256_setzero_ps(); 2]) }
    }
}

impl Scaled for Bytes {
    const PACKING: Packing = Packing::Bytes;
    const OFFSET: bool = true;
    #[inline(always)]
    unsafe fn scales(record: *const u8, _: usize) -> (Pair, Pair) {
        // SAFETY: the caller's pointer holds a record.
        unsafe {
            let eight = |i: usize| _mm256_loadu_ps(record.add(32 * i).cast());
            ([eight(0), eight(1)], [eight(2), eight(3)])
        }
    }
}

impl Scaled for Q4K {
    const PACKING: Packing = Packing::Q4_K;
    const OFFSET: bool = true;
    #[inline(always)]
    unsafe fn scales(record: *const u8, j: usize) -> (Pair, Pair) {
        // SAFETY: the caller's pointer holds a record.
        unsafe {
            let small = record.add(4 * LANES + j * 2 * LANES);
            let (d, dmin) = (halves(record), halves(record.add(2 * LANES)));
            let (scale, min) = (unsigned(small), unsigned(small.add(LANES)));
            // All products are exact: 11 bits by 6.
            let offset = |i: usize| _mm256_sub_ps(_mm256_setzero_ps(), _mm256_mul_ps(dmin[i], min[i]));
            ([_mm256_mul_ps(d[0], scale[0]), _mm256_mul_ps(d[1], scale[1])], [offset(0), offset(1)])
        }
    }
}

/// # Safety
/// As [`Kernel`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn nibbles<F: Scaled, const N: usize>(tile: &Tile) {
    let (sub, scale_bytes) = F::PACKING.record();
    let (mask, ones) = (_mm256_set1_epi8(15), _mm256_set1_epi16(1));
    let mut sums = [[_mm256_setzero_ps(); 2]; N];
    let (mut record, mut quants, mut q, mut d, mut s, mut negative) = (tile.scales, tile.quants, tile.q, tile.d, tile.s, tile.negative);
    for _ in 0..tile.blocks / sub {
        for j in 0..sub {
            // SAFETY: the pointers advance by a block at a time and there are `blocks` of them.
            unsafe {
                let mut words = [[_mm256_setzero_si256(); 2]; N];
                for k in 0..4 {
                    let packed = [load(quants.add(64 * k)), load(quants.add(64 * k + 32))];
                    for i in 0..2 {
                        let low = _mm256_and_si256(packed[i], mask);
                        let high = _mm256_and_si256(_mm256_srli_epi16::<4>(packed[i]), mask);
                        for c in 0..N {
                            let x = q.add(32 * c + 4 * k);
                            words[c][i] = _mm256_add_epi16(words[c][i], _mm256_maddubs_epi16(low, four(x)));
                            words[c][i] = _mm256_add_epi16(words[c][i], _mm256_maddubs_epi16(high, four(x.add(16))));
                        }
                    }
                }
                let (scale, offset) = F::scales(record, j);
                for c in 0..N {
                    for i in 0..2 {
                        let mut integer = _mm256_madd_epi16(words[c][i], ones);
                        if !F::OFFSET {
                            integer = _mm256_add_epi32(integer, _mm256_set1_epi32(*negative.add(c)));
                        }
                        let factor = _mm256_mul_ps(scale[i], _mm256_set1_ps(*d.add(c)));
                        sums[c][i] = _mm256_fmadd_ps(factor, _mm256_cvtepi32_ps(integer), sums[c][i]);
                        if F::OFFSET {
                            sums[c][i] = _mm256_fmadd_ps(offset[i], _mm256_set1_ps(*s.add(c)), sums[c][i]);
                        }
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
unsafe fn store<const N: usize>(sums: &[Pair; N], out: *mut f32) {
    for (c, &[first, second]) in sums.iter().enumerate() {
        // SAFETY: the caller's pointer holds N × 16 values.
        unsafe {
            _mm256_storeu_ps(out.add(LANES * c), first);
            _mm256_storeu_ps(out.add(LANES * c + 8), second);
        }
    }
}

/// Bytes: |weight| as the unsigned byte, the weight's sign moved to the activation.
///
/// # Safety
/// As [`Kernel`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn bytes<F: Scaled, const N: usize>(tile: &Tile) {
    let (_, scale_bytes) = F::PACKING.record();
    let ones = _mm256_set1_epi16(1);
    let mut sums = [[_mm256_setzero_ps(); 2]; N];
    let (mut record, mut quants, mut q, mut d, mut s) = (tile.scales, tile.quants, tile.q, tile.d, tile.s);
    for _ in 0..tile.blocks {
        // SAFETY: the pointers advance by a block at a time and there are `blocks` of them.
        unsafe {
            let mut integers = [[_mm256_setzero_si256(); 2]; N];
            for k in 0..8 {
                for i in 0..2 {
                    let w = load(quants.add(64 * k + 32 * i));
                    let magnitude = _mm256_abs_epi8(w);
                    for c in 0..N {
                        let x = _mm256_sign_epi8(four(q.add(32 * c + 4 * k)), w);
                        let products = _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, x), ones);
                        integers[c][i] = _mm256_add_epi32(integers[c][i], products);
                    }
                }
            }
            let (scale, offset) = F::scales(record, 0);
            for c in 0..N {
                for i in 0..2 {
                    let factor = _mm256_mul_ps(scale[i], _mm256_set1_ps(*d.add(c)));
                    sums[c][i] = _mm256_fmadd_ps(factor, _mm256_cvtepi32_ps(integers[c][i]), sums[c][i]);
                    if F::OFFSET {
                        sums[c][i] = _mm256_fmadd_ps(offset[i], _mm256_set1_ps(*s.add(c)), sums[c][i]);
                    }
                }
            }
            quants = quants.add(F::PACKING.quant_bytes());
            record = record.add(scale_bytes);
            (q, d, s) = (q.add(32 * tile.stride), d.add(tile.stride), s.add(tile.stride));
        }
    }
    // SAFETY: there is room for N × 16 values.
    unsafe { store(&sums, tile.out) };
}

/// Q6_K: the two halves of 32 columns have integer factors; factor · sum is exact in f32, and so is the sum of both
/// (below 2^24).
///
/// # Safety
/// As [`Kernel`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn six_bits<const N: usize>(tile: &Tile) {
    let (sub, scale_bytes) = Packing::Q6_K.record();
    let mut sums = [[_mm256_setzero_ps(); 2]; N];
    let (mut record, mut quants, mut q, mut d, mut negative) = (tile.scales, tile.quants, tile.q, tile.d, tile.negative_halves);
    for _ in 0..tile.blocks / sub {
        for j in 0..sub {
            // SAFETY: the pointers advance by a block at a time and there are `blocks` of them.
            unsafe {
                let scale = halves(record);
                let small = record.add(2 * LANES + j * 2 * LANES);
                let factors = [signed(small), signed(small.add(LANES))];
                let mut exact = [[_mm256_setzero_ps(); 2]; N];
                for half in 0..2 {
                    let integers = six_bit_sums::<N>(quants, q.add(16 * half), half);
                    for c in 0..N {
                        let start = _mm256_slli_epi32::<2>(_mm256_set1_epi32((*negative.add(c))[half]));
                        for i in 0..2 {
                            let integer = _mm256_add_epi32(integers[c][i], start);
                            exact[c][i] = _mm256_fmadd_ps(factors[half][i], _mm256_cvtepi32_ps(integer), exact[c][i]);
                        }
                    }
                }
                for c in 0..N {
                    for i in 0..2 {
                        let factor = _mm256_mul_ps(scale[i], _mm256_set1_ps(*d.add(c)));
                        sums[c][i] = _mm256_fmadd_ps(factor, exact[c][i], sums[c][i]);
                    }
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

/// Integer sums of half `half` of 32 columns of Q6_K, of q + 32.
#[inline(always)]
unsafe fn six_bit_sums<const N: usize>(quants: *const u8, q: *const i8, half: usize) -> [[__m256i; 2]; N] {
    // SAFETY: the caller's pointers hold a block and N times 32 activations less what lies before this half.
    unsafe {
        let (mask, upper_mask, ones) = (_mm256_set1_epi8(15), _mm256_set1_epi8(0x30), _mm256_set1_epi16(1));
        let mut integers = [[_mm256_setzero_si256(); 2]; N];
        for i in 0..2 {
            let upper = load(quants.add(256 + 64 * half + 32 * i));
            let shifted = [_mm256_slli_epi16::<4>(upper), _mm256_slli_epi16::<2>(upper), upper, _mm256_srli_epi16::<2>(upper)];
            for pair in 0..2 {
                let mut words = [_mm256_setzero_si256(); N];
                for k in [2 * pair, 2 * pair + 1] {
                    let packed = load(quants.add(64 * k + 32 * i));
                    let packed = if half == 0 { packed } else { _mm256_srli_epi16::<4>(packed) };
                    let value = _mm256_or_si256(_mm256_and_si256(packed, mask), _mm256_and_si256(shifted[k], upper_mask));
                    for c in 0..N {
                        words[c] = _mm256_add_epi16(words[c], _mm256_maddubs_epi16(value, four(q.add(32 * c + 4 * k))));
                    }
                }
                for c in 0..N {
                    integers[c][i] = _mm256_add_epi32(integers[c][i], _mm256_madd_epi16(words[c], ones));
                }
            }
        }
        integers
    }
}

/// Float packings.
trait Float {
    const BYTES: usize;
    /// Eight values.
    unsafe fn weights(at: *const u8) -> __m256;
}

struct F32;
struct F16;
struct BF16;

impl Float for F32 {
    const BYTES: usize = 4;
    #[inline(always)]
    unsafe fn weights(at: *const u8) -> __m256 {
        // SAFETY: the caller's pointer holds 32 bytes.
        unsafe { _mm256_loadu_ps(at.cast()) }
    }
}

impl Float for F16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn weights(at: *const u8) -> __m256 {
        // SAFETY: the caller's pointer holds 16 bytes.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(at.cast())) }
    }
}

impl Float for BF16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn weights(at: *const u8) -> __m256 {
        // SAFETY: the caller's pointer holds 16 bytes.
        unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(at.cast())))) }
    }
}

/// # Safety
/// As [`Kernel`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn float<F: Float, const N: usize>(tile: &Tile) {
    let mut sums = [[[_mm256_setzero_ps(); 2]; N]; 2];
    let (mut weights, mut x) = (tile.quants, tile.x);
    for _ in 0..tile.blocks {
        for sums in &mut sums {
            // SAFETY: there are 2 · blocks columns of sixteen weights and N activations.
            unsafe {
                let w = [F::weights(weights), F::weights(weights.add(8 * F::BYTES))];
                for c in 0..N {
                    let x = _mm256_set1_ps(*x.add(c));
                    for i in 0..2 {
                        sums[c][i] = _mm256_fmadd_ps(w[i], x, sums[c][i]);
                    }
                }
                weights = weights.add(F::BYTES * LANES);
                x = x.add(N);
            }
        }
    }
    let [mut total, odd] = sums;
    for c in 0..N {
        for i in 0..2 {
            total[c][i] = _mm256_add_ps(total[c][i], odd[c][i]);
        }
    }
    // SAFETY: there is room for N × 16 values.
    unsafe { store(&total, tile.out) };
}
