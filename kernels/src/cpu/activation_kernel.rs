//! Element-wise kernels: gated activations, and rounding to half precision.

#![allow(clippy::undocumented_unsafe_blocks)] // One reason for all: vectors lie inside the slices.

use super::simd::{LANES, Simd};
use crate::backend::Activation;

/// gate = activation(gate) · up.
///
/// Both activations are x / (1 + e^(−y)): y = x for SiLU; for the tanh form of GELU y = 2·√(2/π)·(x + 0.044715·x³), since
/// (1 + tanh u) / 2 = 1 / (1 + e^(−2u)).
#[inline(always)]
pub(super) unsafe fn gate<S: Simd>(activation: Activation, gate: &mut [f32], up: &[f32]) {
    let len = gate.len().min(up.len());
    let whole = len - len % LANES;
    unsafe {
        for i in (0..whole).step_by(LANES) {
            let y = gate_vector::<S>(activation, S::load(gate.as_ptr().add(i)), S::load(up.as_ptr().add(i)));
            S::store(gate.as_mut_ptr().add(i), y);
        }
        if whole < len {
            let mut lanes = [[0.0; LANES]; 2];
            lanes[0][..len - whole].copy_from_slice(&gate[whole..len]);
            lanes[1][..len - whole].copy_from_slice(&up[whole..len]);
            let y = gate_vector::<S>(activation, S::load(lanes[0].as_ptr()), S::load(lanes[1].as_ptr()));
            S::store(lanes[0].as_mut_ptr(), y);
            gate[whole..len].copy_from_slice(&lanes[0][..len - whole]);
        }
    }
}

#[inline(always)]
unsafe fn gate_vector<S: Simd>(activation: Activation, x: S::V, up: S::V) -> S::V {
    unsafe {
        let y = match activation {
            Activation::Silu => x,
            Activation::Gelu => {
                let cubic = S::fma(S::mul(S::mul(x, x), x), S::splat(0.044_715), x);
                S::mul(S::splat(2.0 * 0.797_884_6), cubic)
            }
        };
        // The second operand survives where one is NaN.
        let negative = S::min(S::splat(88.0), S::sub(S::zero(), y));
        let sigmoid = S::div(x, S::add(S::splat(1.0), S::exp(negative)));
        S::mul(sigmoid, up)
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
