//! Plain Rust.

#![allow(clippy::undocumented_unsafe_blocks)] // One reason for all: callers keep the promises of `Simd`.

use half::f16;

use super::{LANES, Simd};
use crate::sampling::WEIGHT_ROUND;

pub(in crate::cpu) struct Portable;

type V = [f32; LANES];

#[inline(always)]
fn zip(a: V, b: V, op: impl Fn(f32, f32) -> f32) -> V {
    std::array::from_fn(|i| op(a[i], b[i]))
}

#[inline(always)]
fn mask(a: V, b: V, test: impl Fn(f32, f32) -> bool) -> u32 {
    (0..LANES).fold(0, |mask, i| mask | u32::from(test(a[i], b[i])) << i)
}

impl Simd for Portable {
    type V = V;
    type Sums = f64;
    const MANY_REGISTERS: bool = false;

    #[inline(always)]
    unsafe fn splat(x: f32) -> V {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> V {
        unsafe { p.cast::<V>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: V) {
        unsafe { p.cast::<V>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> V {
        let bits = unsafe { p.cast::<[u16; LANES]>().read_unaligned() };
        bits.map(|b| f16::from_bits(b).to_f32())
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        let _ = p;
    }
    #[inline(always)]
    unsafe fn load_q8(p: *const u8) -> V {
        unsafe { p.cast::<[i8; LANES]>().read_unaligned() }.map(f32::from)
    }
    #[inline(always)]
    unsafe fn load_fp8(p: *const u8) -> V {
        let bytes = unsafe { p.cast::<[i8; LANES]>().read_unaligned() };
        // The bits of a half with a larger bias; the sign is bit 15, and not bit 14.
        bytes.map(|b| f16::from_bits((i16::from(b) << 7) as u16 & 0xBFFF).to_f32())
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u16, v: V) {
        unsafe { p.cast::<[u16; LANES]>().write_unaligned(v.map(|x| f16::from_f32(x).to_bits())) }
    }
    #[inline(always)]
    unsafe fn add(a: V, b: V) -> V {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn sub(a: V, b: V) -> V {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    unsafe fn mul(a: V, b: V) -> V {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn div(a: V, b: V) -> V {
        zip(a, b, |a, b| a / b)
    }
    #[inline(always)]
    unsafe fn fma(a: V, b: V, c: V) -> V {
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    unsafe fn max(a: V, b: V) -> V {
        zip(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    unsafe fn min(a: V, b: V) -> V {
        zip(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    unsafe fn first(n: usize, a: V, b: V) -> V {
        std::array::from_fn(|i| if i < n { a[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn zero_below(x: V, limit: V, v: V) -> V {
        std::array::from_fn(|i| if x[i] < limit[i] { 0.0 } else { v[i] })
    }
    #[inline(always)]
    unsafe fn scale_by_power(y: V, shifted: V) -> V {
        zip(y, shifted, |y, s| f32::from_bits(y.to_bits().wrapping_add(s.to_bits() << 23)))
    }
    #[inline(always)]
    unsafe fn less(a: V, b: V) -> u32 {
        mask(a, b, |a, b| a < b)
    }
    #[inline(always)]
    unsafe fn at_least(a: V, b: V) -> u32 {
        mask(a, b, |a, b| a >= b)
    }
    #[inline(always)]
    unsafe fn no_sums() -> f64 {
        0.0
    }
    #[inline(always)]
    unsafe fn add_weights(sums: f64, v: V) -> f64 {
        v.iter().fold(sums, |sum, &w| sum + ((f64::from(w) + WEIGHT_ROUND) - WEIGHT_ROUND))
    }
    #[inline(always)]
    unsafe fn total(sums: f64) -> f64 {
        sums
    }
}
