//! Passes over a row of logits.

#![allow(clippy::undocumented_unsafe_blocks)] // One reason for all: vectors lie inside the slices.

use super::simd::{LANES, Simd};
use crate::sampling::{from_order_key, order_key, weight};

/// Vector `i` of the logits; beyond the end it is filled with −∞.
#[inline(always)]
unsafe fn vector<S: Simd>(logits: &[f32], i: usize) -> S::V {
    unsafe {
        if i + LANES <= logits.len() {
            return S::load(logits.as_ptr().add(i));
        }
        let mut lanes = [f32::NEG_INFINITY; LANES];
        std::ptr::copy_nonoverlapping(logits.as_ptr().add(i), lanes.as_mut_ptr(), logits.len() - i);
        S::load(lanes.as_ptr())
    }
}

/// The largest logit; None if that is −∞, or a NaN or +∞ is among them.
#[inline(always)]
pub(super) unsafe fn largest<S: Simd>(logits: &[f32]) -> Option<f32> {
    unsafe {
        let mut max = S::splat(f32::NEG_INFINITY);
        let mut fine = u32::from(u16::MAX);
        for i in (0..logits.len()).step_by(LANES) {
            let v = vector::<S>(logits, i);
            fine &= S::less(v, S::splat(f32::INFINITY));
            max = S::max(max, v);
        }
        let max = S::reduce_max(max);
        (fine == u32::from(u16::MAX) && max > f32::NEG_INFINITY).then_some(max)
    }
}

/// Index of the first logit that equals `value`, or 0.
#[inline(always)]
pub(super) unsafe fn find<S: Simd>(logits: &[f32], value: f32) -> usize {
    unsafe {
        for i in (0..logits.len()).step_by(LANES) {
            let mask = S::at_least(vector::<S>(logits, i), S::splat(value));
            if mask != 0 {
                return i + mask.trailing_zeros() as usize;
            }
        }
        0
    }
}

/// Σ [`weight`].
#[inline(always)]
pub(super) unsafe fn mass<S: Simd>(logits: &[f32], max: f32, temperature: f32) -> f64 {
    unsafe {
        let mut sums = S::no_sums();
        let (max, divisor) = (S::splat(max), S::splat(temperature));
        for i in (0..logits.len()).step_by(LANES) {
            let x = S::sub(vector::<S>(logits, i), max);
            let x = if temperature == 1.0 { x } else { S::div(x, divisor) };
            sums = S::add_weights(sums, S::exp(x));
        }
        S::total(sums)
    }
}

/// The same where [`Simd::fma`] rounds twice: weights must have the bits of the definition.
#[inline(always)]
pub(super) unsafe fn mass_by_definition<S: Simd>(logits: &[f32], max: f32, temperature: f32) -> f64 {
    logits.iter().map(|&z| weight(z, max, temperature)).sum()
}

/// Σ [`weight`] of what order keys hold.
#[inline(always)]
pub(super) unsafe fn mass_of_keys<S: Simd>(keys: &[u64], max: f32, temperature: f32) -> f64 {
    unsafe {
        let mut sums = S::no_sums();
        let (max, divisor) = (S::splat(max), S::splat(temperature));
        for keys in keys.chunks(LANES) {
            let mut lanes = [f32::NEG_INFINITY; LANES];
            for (lane, key) in lanes.iter_mut().zip(keys) {
                *lane = from_order_key(*key).0;
            }
            sums = S::add_weights(sums, S::exp(S::div(S::sub(S::load(lanes.as_ptr()), max), divisor)));
        }
        S::total(sums)
    }
}

/// The same where [`Simd::fma`] rounds twice.
#[inline(always)]
pub(super) unsafe fn mass_of_keys_by_definition<S: Simd>(keys: &[u64], max: f32, temperature: f32) -> f64 {
    keys.iter().map(|&key| weight(from_order_key(key).0, max, temperature)).sum()
}

/// Pushes the order keys of all logits ≥ `least`.
#[inline(always)]
pub(super) unsafe fn collect<S: Simd>(logits: &[f32], least: f32, keys: &mut Vec<u64>) {
    unsafe {
        for i in (0..logits.len()).step_by(LANES) {
            let mut mask = S::at_least(vector::<S>(logits, i), S::splat(least));
            while mask != 0 {
                let at = i + mask.trailing_zeros() as usize;
                if let Some(&z) = logits.get(at) {
                    keys.push(order_key(z, at as u32));
                }
                mask &= mask - 1;
            }
        }
    }
}
