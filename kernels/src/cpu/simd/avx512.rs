//! AVX-512 F, DQ, BW and VL: one register.

#![allow(clippy::undocumented_unsafe_blocks)] // One reason for all: callers keep the promises of `Simd`.

use std::arch::x86_64::*;

use super::Simd;
use crate::sampling::WEIGHT_ROUND;

pub(in crate::cpu) struct Avx512;

macro_rules! lanewise {
    ($($name:ident($($arg:ident),+) = $intrinsic:ident;)+) => {
        $(
            #[inline(always)]
            unsafe fn $name($($arg: __m512),+) -> __m512 {
                unsafe { $intrinsic($($arg),+) }
            }
        )+
    };
}

impl Simd for Avx512 {
    type V = __m512;
    type Sums = [__m512d; 2];
    const MANY_REGISTERS: bool = true;

    lanewise! {
        add(a, b) = _mm512_add_ps;
        sub(a, b) = _mm512_sub_ps;
        mul(a, b) = _mm512_mul_ps;
        div(a, b) = _mm512_div_ps;
        fma(a, b, c) = _mm512_fmadd_ps;
        max(a, b) = _mm512_max_ps;
        min(a, b) = _mm512_min_ps;
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m512 {
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: __m512) {
        unsafe { _mm512_storeu_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
    #[inline(always)]
    unsafe fn load_q8(p: *const u8) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_fp8(p: *const u8) -> __m512 {
        unsafe {
            let wide = _mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(_mm_loadu_si128(p.cast())));
            // The bits of halves with a larger bias; the sign is bit 15, and not bit 14.
            _mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16(0xBFFF_u16 as i16)))
        }
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u16, v: __m512) {
        unsafe { _mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v)) }
    }
    #[inline(always)]
    unsafe fn first(n: usize, a: __m512, b: __m512) -> __m512 {
        let mask = if n >= 16 { u16::MAX } else { (1 << n) - 1 };
        unsafe { _mm512_mask_blend_ps(mask, b, a) }
    }
    #[inline(always)]
    unsafe fn zero_below(x: __m512, limit: __m512, v: __m512) -> __m512 {
        unsafe { _mm512_maskz_mov_ps(!_mm512_cmp_ps_mask::<_CMP_LT_OQ>(x, limit), v) }
    }
    #[inline(always)]
    unsafe fn scale_by_power(y: __m512, shifted: __m512) -> __m512 {
        unsafe {
            let power = _mm512_slli_epi32::<23>(_mm512_castps_si512(shifted));
            _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(y), power))
        }
    }
    #[inline(always)]
    unsafe fn less(a: __m512, b: __m512) -> u32 {
        unsafe { u32::from(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b)) }
    }
    #[inline(always)]
    unsafe fn at_least(a: __m512, b: __m512) -> u32 {
        unsafe { u32::from(_mm512_cmp_ps_mask::<_CMP_GE_OQ>(a, b)) }
    }
    #[inline(always)]
    unsafe fn no_sums() -> Self::Sums {
        unsafe { [_mm512_setzero_pd(); 2] }
    }
    #[inline(always)]
    unsafe fn add_weights(sums: Self::Sums, v: __m512) -> Self::Sums {
        unsafe {
            let round = _mm512_set1_pd(WEIGHT_ROUND);
            let low = _mm512_add_pd(_mm512_cvtps_pd(_mm512_castps512_ps256(v)), round);
            let high = _mm512_add_pd(_mm512_cvtps_pd(_mm512_extractf32x8_ps::<1>(v)), round);
            let (low, high) = (_mm512_sub_pd(low, round), _mm512_sub_pd(high, round));
            [_mm512_add_pd(sums[0], low), _mm512_add_pd(sums[1], high)]
        }
    }
    #[inline(always)]
    unsafe fn total(sums: Self::Sums) -> f64 {
        unsafe { _mm512_reduce_add_pd(_mm512_add_pd(sums[0], sums[1])) }
    }
    #[inline(always)]
    unsafe fn reduce_max(v: __m512) -> f32 {
        unsafe { _mm512_reduce_max_ps(v) }
    }
}
