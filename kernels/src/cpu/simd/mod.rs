//! Sixteen lanes of f32, whatever the registers: the vocabulary that the kernels of this backend are written in.
//!
//! A kernel is one `#[inline(always)]` function generic over [`Simd`]; [`super::dispatch`] instantiates it once per
//! instruction set inside a function with the right target features. Lanes and the order of folds are the same at every
//! level; what differs is whether [`Simd::fma`] rounds once (AVX2, AVX-512) or twice (portable).

#![allow(clippy::undocumented_unsafe_blocks)] // One reason for all: callers keep the promises of `Simd`.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

#[cfg(target_arch = "x86_64")]
pub(super) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(super) use avx512::Avx512;
pub(super) use portable::Portable;

use crate::sampling::{EXP_MIN, EXP_POLY, LN_2_HIGH, LN_2_LOW, LOG2_E, ROUND};

/// Lanes of a vector.
pub(super) const LANES: usize = 16;

const TANH_POLY: [f32; 5] = [-5.704_988_7e-3, 2.063_909e-2, -5.373_971_6e-2, 1.333_144_2e-1, -3.333_328e-1];

/// One level's operations on 16 lanes.
///
/// # Safety
/// Every function needs the instruction set of its level; those with pointers need 16 readable or writable elements.
pub(super) trait Simd: 'static {
    type V: Copy;
    /// Sixteen double-precision sums.
    type Sums: Copy;
    /// Vectors that a micro-kernel can hold as accumulators are many (24) or few (6).
    const MANY_REGISTERS: bool;

    unsafe fn splat(x: f32) -> Self::V;
    unsafe fn load(p: *const f32) -> Self::V;
    unsafe fn store(p: *mut f32, v: Self::V);
    /// IEEE half precision, exact.
    unsafe fn load_f16(p: *const u16) -> Self::V;
    /// Signed bytes, exact.
    unsafe fn load_q8(p: *const u8) -> Self::V;
    /// 2⁻⁸ times E4M3 numbers (no NaN among them), exact.
    unsafe fn load_fp8(p: *const u8) -> Self::V;
    /// Asks for the cache line of any address, valid or not.
    unsafe fn prefetch(p: *const u8);
    /// To the nearest half, ties to even.
    unsafe fn store_f16(p: *mut u16, v: Self::V);
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// a · b + c.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `b` where one is NaN.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// `b` where one is NaN.
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V;
    /// Lanes below `n` from `a`, the others from `b`.
    unsafe fn first(n: usize, a: Self::V, b: Self::V) -> Self::V;
    /// 0 where x < limit, else v (also where x is NaN).
    unsafe fn zero_below(x: Self::V, limit: Self::V, v: Self::V) -> Self::V;
    /// y · 2ⁿ, n in the low bits of `shifted`.
    unsafe fn scale_by_power(y: Self::V, shifted: Self::V) -> Self::V;
    /// Bit i: lane i of a < lane i of b.
    unsafe fn less(a: Self::V, b: Self::V) -> u32;
    /// Bit i: lane i of a ≥ lane i of b.
    unsafe fn at_least(a: Self::V, b: Self::V) -> u32;
    unsafe fn no_sums() -> Self::Sums;
    /// Adds the lanes, each rounded to a multiple of 2⁻³⁴ (see [`crate::sampling::weight`]).
    unsafe fn add_weights(sums: Self::Sums, v: Self::V) -> Self::Sums;
    unsafe fn total(sums: Self::Sums) -> f64;

    /// Folded in halves: i with i + 8, + 4, + 2, + 1.
    #[inline(always)]
    unsafe fn reduce_add(v: Self::V) -> f32 {
        unsafe { fold::<Self>(v, |a, b| a + b) }
    }

    /// The largest lane.
    #[inline(always)]
    unsafe fn reduce_max(v: Self::V) -> f32 {
        unsafe { fold::<Self>(v, f32::max) }
    }

    #[inline(always)]
    unsafe fn zero() -> Self::V {
        unsafe { Self::splat(0.0) }
    }

    /// eˣ for x ≤ 88: the operations of [`crate::sampling::exp`], and its bits where `fma` rounds once.
    #[inline(always)]
    unsafe fn exp(x: Self::V) -> Self::V {
        unsafe {
            let round = Self::splat(ROUND);
            let shifted = Self::fma(x, Self::splat(LOG2_E), round);
            let n = Self::sub(shifted, round);
            let r = Self::fma(n, Self::splat(-LN_2_LOW), Self::fma(n, Self::splat(-LN_2_HIGH), x));
            let mut p = Self::splat(EXP_POLY[0]);
            p = Self::fma(p, r, Self::splat(EXP_POLY[1]));
            p = Self::fma(p, r, Self::splat(EXP_POLY[2]));
            p = Self::fma(p, r, Self::splat(EXP_POLY[3]));
            p = Self::fma(p, r, Self::splat(EXP_POLY[4]));
            p = Self::fma(p, r, Self::splat(EXP_POLY[5]));
            let y = Self::add(Self::fma(Self::mul(p, r), r, r), Self::splat(1.0));
            Self::zero_below(x, Self::splat(EXP_MIN), Self::scale_by_power(y, shifted))
        }
    }

    /// tanh x: near 0 by the polynomial of Cephes' `tanhf` (Moshier), elsewhere 1 − 2 / (e²ˣ + 1). To 2 ulp of 1 everywhere.
    #[inline(always)]
    unsafe fn tanh(x: Self::V) -> Self::V {
        unsafe {
            let square = Self::mul(x, x);
            let mut p = Self::splat(TANH_POLY[0]);
            for c in &TANH_POLY[1..] {
                p = Self::fma(p, square, Self::splat(*c));
            }
            let near = Self::fma(Self::mul(p, square), x, x);
            // The second operand survives where one is NaN.
            let power = Self::exp(Self::min(Self::splat(40.0), Self::add(x, x)));
            let far = Self::sub(Self::splat(1.0), Self::div(Self::splat(2.0), Self::add(power, Self::splat(1.0))));
            let size = Self::max(Self::sub(Self::zero(), x), x);
            // One of the two, as the size is below the limit or not; both where it is not a number.
            let limit = 0.625_f32;
            let far = Self::zero_below(size, Self::splat(limit), far);
            Self::add(far, Self::zero_below(Self::splat(limit.next_down()), size, near))
        }
    }

    /// [`Simd::exp`] of one number.
    #[inline(always)]
    unsafe fn exp_one(x: f32) -> f32 {
        let mut lanes = [0.0; LANES];
        unsafe { Self::store(lanes.as_mut_ptr(), Self::exp(Self::splat(x))) };
        lanes[0]
    }
}

#[inline(always)]
unsafe fn fold<S: Simd + ?Sized>(v: S::V, op: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    unsafe { S::store(lanes.as_mut_ptr(), v) };
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            lanes[i] = op(lanes[i], lanes[i + half]);
        }
    }
    lanes[0]
}
