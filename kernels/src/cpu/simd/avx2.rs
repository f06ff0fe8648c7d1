//! AVX2 with FMA and F16C: two registers of 8.

#![allow(clippy::undocumented_unsafe_blocks)] // One reason for all: callers keep the promises of `Simd`.

use std::arch::x86_64::*;

use super::Simd;
use crate::sampling::WEIGHT_ROUND;

pub(in crate::cpu) struct Avx2;

type V = [__m256; 2];

macro_rules! lanewise {
    ($($name:ident($($arg:ident),+) = $intrinsic:ident;)+) => {
        $(
            #[inline(always)]
            unsafe fn $name($($arg: V),+) -> V {
                unsafe { [$intrinsic($($arg[0]),+), $intrinsic($($arg[1]),+)] }
            }
        )+
    };
}

impl Simd for Avx2 {
    type V = V;
    type Sums = [__m256d; 2];
    const MANY_REGISTERS: bool = false;

    lanewise! {
        add(a, b) = _mm256_add_ps;
        sub(a, b) = _mm256_sub_ps;
        mul(a, b) = _mm256_mul_ps;
        div(a, b) = _mm256_div_ps;
        fma(a, b, c) = _mm256_fmadd_ps;
        max(a, b) = _mm256_max_ps;
        min(a, b) = _mm256_min_ps;
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> V {
        unsafe { [_mm256_set1_ps(x); 2] }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> V {
        unsafe { [_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))] }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: V) {
        unsafe {
            _mm256_storeu_ps(p, v[0]);
            _mm256_storeu_ps(p.add(8), v[1]);
        }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> V {
        unsafe { [_mm256_cvtph_ps(_mm_loadu_si128(p.cast())), _mm256_cvtph_ps(_mm_loadu_si128(p.add(8).cast()))] }
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
    #[inline(always)]
    unsafe fn load_q8(p: *const u8) -> V {
        unsafe {
            let low = _mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast()));
            let high = _mm256_cvtepi8_epi32(_mm_loadl_epi64(p.add(8).cast()));
            [_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high)]
        }
    }
    #[inline(always)]
    unsafe fn load_fp8(p: *const u8) -> V {
        unsafe {
            let wide = _mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(_mm_loadu_si128(p.cast())));
            // The bits of halves with a larger bias; the sign is bit 15, and not bit 14.
            let halves = _mm256_and_si256(wide, _mm256_set1_epi16(0xBFFF_u16 as i16));
            [_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(halves))]
        }
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u16, v: V) {
        unsafe {
            _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v[0]));
            _mm_storeu_si128(p.add(8).cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v[1]));
        }
    }
    #[inline(always)]
    unsafe fn first(n: usize, a: V, b: V) -> V {
        unsafe {
            [
                first_of_half(n, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), a[0], b[0]),
                first_of_half(n, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15), a[1], b[1]),
            ]
        }
    }
    #[inline(always)]
    unsafe fn zero_below(x: V, limit: V, v: V) -> V {
        unsafe {
            [
                _mm256_andnot_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(x[0], limit[0]), v[0]),
                _mm256_andnot_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(x[1], limit[1]), v[1]),
            ]
        }
    }
    #[inline(always)]
    unsafe fn scale_by_power(y: V, shifted: V) -> V {
        unsafe { [scale_half(y[0], shifted[0]), scale_half(y[1], shifted[1])] }
    }
    #[inline(always)]
    unsafe fn less(a: V, b: V) -> u32 {
        unsafe {
            let low = _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(a[0], b[0])) as u32;
            low | (_mm256_movemask_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(a[1], b[1])) as u32) << 8
        }
    }
    #[inline(always)]
    unsafe fn at_least(a: V, b: V) -> u32 {
        unsafe { Self::less_or_equal(b, a) }
    }
    #[inline(always)]
    unsafe fn no_sums() -> Self::Sums {
        unsafe { [_mm256_setzero_pd(); 2] }
    }
    #[inline(always)]
    unsafe fn add_weights(mut sums: Self::Sums, v: V) -> Self::Sums {
        unsafe {
            let round = _mm256_set1_pd(WEIGHT_ROUND);
            for half in v {
                let parts = [_mm256_castps256_ps128(half), _mm256_extractf128_ps::<1>(half)];
                for i in 0..2 {
                    let weights = _mm256_sub_pd(_mm256_add_pd(_mm256_cvtps_pd(parts[i]), round), round);
                    sums[i] = _mm256_add_pd(sums[i], weights);
                }
            }
            sums
        }
    }
    #[inline(always)]
    unsafe fn total(sums: Self::Sums) -> f64 {
        let mut lanes = [0.0; 4];
        unsafe { _mm256_storeu_pd(lanes.as_mut_ptr(), _mm256_add_pd(sums[0], sums[1])) };
        lanes.iter().sum()
    }
}

impl Avx2 {
    #[inline(always)]
    unsafe fn less_or_equal(a: V, b: V) -> u32 {
        unsafe {
            let low = _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_LE_OQ>(a[0], b[0])) as u32;
            low | (_mm256_movemask_ps(_mm256_cmp_ps::<_CMP_LE_OQ>(a[1], b[1])) as u32) << 8
        }
    }
}

// Functions, not closures: a closure would not be sure to inline to where the instruction set is known.

#[inline(always)]
unsafe fn first_of_half(n: usize, index: __m256i, a: __m256, b: __m256) -> __m256 {
    unsafe {
        let mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), index);
        _mm256_blendv_ps(b, a, _mm256_castsi256_ps(mask))
    }
}

#[inline(always)]
unsafe fn scale_half(y: __m256, shifted: __m256) -> __m256 {
    unsafe {
        let power = _mm256_slli_epi32::<23>(_mm256_castps_si256(shifted));
        _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(y), power))
    }
}
