//! Element-wise kernels: activations, gated or not, and rounding to half precision.

#![allow(clippy::undocumented_unsafe_blocks)] // One reason for all: vectors lie inside the slices.

use super::simd::{LANES, Simd};
use crate::backend::Activation;

/// gate = activation(gate) · up; for [`Activation::ClampedSwiglu`] up is clamped and 1 added first.
#[inline(always)]
pub(super) unsafe fn gate<S: Simd>(activation: Activation, gate: &mut [f32], up: &[f32]) {
    unsafe {
        match activation {
            Activation::ClampedSwiglu { limit, .. } => zip::<S>(gate, up, |x, up| {
                let up = S::min(S::splat(limit), S::max(S::splat(-limit), up));
                S::mul(activate_vector::<S>(activation, x), S::add(up, S::splat(1.0)))
            }),
            _ => zip::<S>(gate, up, |x, up| S::mul(activate_vector::<S>(activation, x), up)),
        }
    }
}

/// x = activation(x).
#[inline(always)]
pub(super) unsafe fn activate<S: Simd>(activation: Activation, x: &mut [f32]) {
    unsafe {
        let len = x.len();
        let whole = len - len % LANES;
        for i in (0..whole).step_by(LANES) {
            let at = x.as_mut_ptr().add(i);
            S::store(at, activate_vector::<S>(activation, S::load(at)));
        }
        if whole < len {
            let mut lanes = [0.0; LANES];
            lanes[..len - whole].copy_from_slice(&x[whole..len]);
            let y = activate_vector::<S>(activation, S::load(lanes.as_ptr()));
            S::store(lanes.as_mut_ptr(), y);
            x[whole..len].copy_from_slice(&lanes[..len - whole]);
        }
    }
}

/// a = f(a, b), lane by lane.
#[inline(always)]
unsafe fn zip<S: Simd>(a: &mut [f32], b: &[f32], f: impl Fn(S::V, S::V) -> S::V) {
    let len = a.len().min(b.len());
    let whole = len - len % LANES;
    unsafe {
        for i in (0..whole).step_by(LANES) {
            let y = f(S::load(a.as_ptr().add(i)), S::load(b.as_ptr().add(i)));
            S::store(a.as_mut_ptr().add(i), y);
        }
        if whole < len {
            let mut lanes = [[0.0; LANES]; 2];
            lanes[0][..len - whole].copy_from_slice(&a[whole..len]);
            lanes[1][..len - whole].copy_from_slice(&b[whole..len]);
            let y = f(S::load(lanes[0].as_ptr()), S::load(lanes[1].as_ptr()));
            S::store(lanes[0].as_mut_ptr(), y);
            a[whole..len].copy_from_slice(&lanes[0][..len - whole]);
        }
    }
}

/// For the tanh form of GELU, (1 + tanh u) / 2 = 1 / (1 + e^(−2u)): all sigmoids are one.
/// Where one operand of a minimum or maximum is NaN the second survives, so that NaN stays NaN.
#[inline(always)]
unsafe fn activate_vector<S: Simd>(activation: Activation, x: S::V) -> S::V {
    unsafe {
        match activation {
            Activation::Silu => times_sigmoid::<S>(x, x),
            Activation::Gelu => {
                let cubic = S::fma(S::mul(S::mul(x, x), x), S::splat(0.044_715), x);
                times_sigmoid::<S>(x, S::mul(S::splat(2.0 * 0.797_884_6), cubic))
            }
            Activation::GeluExact => gelu_exact::<S>(x),
            Activation::Relu => S::max(S::zero(), x),
            Activation::ReluSquared => {
                let x = S::max(S::zero(), x);
                S::mul(x, x)
            }
            Activation::ClampedSwiglu { alpha, limit } => {
                let x = S::min(S::splat(limit), x);
                times_sigmoid::<S>(x, S::mul(S::splat(alpha), x))
            }
        }
    }
}

/// x / (1 + e^(−y)).
#[inline(always)]
unsafe fn times_sigmoid<S: Simd>(x: S::V, y: S::V) -> S::V {
    unsafe {
        let negative = S::min(S::splat(88.0), S::sub(S::zero(), y));
        S::div(x, S::add(S::splat(1.0), S::exp(negative)))
    }
}

/// Coefficients of erfc(z) · e^(z²) in t = 1 / (1 + 0.3275911 z), z ≥ 0, from the highest power down to t¹; the error is at
/// most 1.5e-7 (Abramowitz and Stegun, 7.1.26).
const ERFC: [f32; 5] = [1.061_405_4, -1.453_152, 1.421_413_7, -0.284_496_74, 0.254_829_6];

/// x · Φ(x) = max(x, 0) − |x| · erfc(|x| / √2) / 2.
#[inline(always)]
unsafe fn gelu_exact<S: Simd>(x: S::V) -> S::V {
    unsafe {
        let magnitude = S::max(S::sub(S::zero(), x), x);
        let z = S::mul(magnitude, S::splat(std::f32::consts::FRAC_1_SQRT_2));
        let t = S::div(S::splat(1.0), S::fma(z, S::splat(0.327_591_1), S::splat(1.0)));
        let mut p = S::splat(ERFC[0]);
        p = S::fma(p, t, S::splat(ERFC[1]));
        p = S::fma(p, t, S::splat(ERFC[2]));
        p = S::fma(p, t, S::splat(ERFC[3]));
        p = S::fma(p, t, S::splat(ERFC[4]));
        let erfc = S::mul(S::mul(p, t), S::exp(S::sub(S::zero(), S::mul(z, z))));
        S::sub(S::max(S::zero(), x), S::mul(S::mul(magnitude, S::splat(0.5)), erfc))
    }
}

/// Bits of the nearest half-precision numbers.
#[inline(always)]
pub(super) unsafe fn narrow<S: Simd>(x: &[f32], out: &mut [u16]) {
    let len = x.len().min(out.len());
    let whole = len - len % LANES;
    unsafe {
        for i in (0..whole).step_by(LANES) {
            S::store_f16(out.as_mut_ptr().add(i), S::load(x.as_ptr().add(i)));
        }
        if whole < len {
            let (mut from, mut to) = ([0.0; LANES], [0; LANES]);
            from[..len - whole].copy_from_slice(&x[whole..len]);
            S::store_f16(to.as_mut_ptr(), S::load(from.as_ptr()));
            out[whole..len].copy_from_slice(&to[..len - whole]);
        }
    }
}
