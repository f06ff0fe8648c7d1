//! One row of logits to a token: [`crate::reference::sample`] without its sort, with the same result.
//!
//! Weights and their sums are exact (see [`crate::sampling`]), so candidates may be found by any selection. Most rows are
//! peaked: the few logits within reach of the largest usually hold what is needed; else all are taken.

use super::dispatch::Kernels;
use crate::{
    plan::NO_TOKEN,
    sampling::{RowParams, from_order_key, logprob, uniform, weight},
};

/// Up to this many candidates are sorted; above, they are halved first.
const SORT: usize = 64;

/// One thread's scratch.
#[derive(Default)]
pub(super) struct SampleScratch {
    keys: Vec<u64>,
    raw: Vec<f32>,
}

impl SampleScratch {
    pub(super) fn new(vocabulary: usize) -> Self {
        Self { keys: Vec::with_capacity(vocabulary), raw: Vec::with_capacity(vocabulary) }
    }
}

/// Token and log-probability of a row. `top` has room for the row's `logprobs`; the count that was written comes third.
///
/// # Safety
/// The machine has the instruction set of `kernels`.
pub(super) unsafe fn sample(
    kernels: &Kernels,
    logits: &mut [f32],
    params: &RowParams<'_>,
    scratch: &mut SampleScratch,
    top: &mut [(u32, f32)],
) -> (u32, f32, u32) {
    // SAFETY: the caller's promise.
    let Some(max) = (unsafe { (kernels.largest)(logits) }) else { return (NO_TOKEN, f32::NAN, 0) };
    if params.logprobs < 0 {
        // SAFETY: as above.
        let id = if params.target == NO_TOKEN { unsafe { draw(kernels, logits, params, max, scratch) } } else { params.target };
        return (id, f32::NAN, 0);
    }
    // SAFETY: as above.
    let total = unsafe { (kernels.mass)(logits, max, 1.0) };
    let count = (params.logprobs as usize).min(top.len()).min(logits.len());
    if count > 0 {
        // SAFETY: as above.
        unsafe { likeliest(kernels, logits, max, 1.0, count, &mut scratch.keys) };
        for (out, key) in top.iter_mut().zip(&scratch.keys) {
            let (z, id) = from_order_key(*key);
            *out = (id, logprob(z, max, total));
        }
    }
    let given = params.target != NO_TOKEN;
    // Adjusting overwrites logits, and which one will be wanted is not known before the draw.
    let changed = !given && !params.plain();
    if changed {
        scratch.raw.clear();
        scratch.raw.extend_from_slice(logits);
    }
    // SAFETY: as above.
    let id = if given { params.target } else { unsafe { draw(kernels, logits, params, max, scratch) } };
    let raw = if changed { &scratch.raw } else { &*logits };
    match raw.get(id as usize) {
        Some(&z) => (id, logprob(z, max, total), count as u32),
        None => (NO_TOKEN, f32::NAN, 0),
    }
}

/// # Safety
/// As [`sample`].
unsafe fn draw(kernels: &Kernels, logits: &mut [f32], params: &RowParams<'_>, mut max: f32, scratch: &mut SampleScratch) -> u32 {
    if !params.plain() {
        params.adjust(logits);
        // SAFETY: the caller's promise.
        match unsafe { (kernels.largest)(logits) } {
            Some(largest) => max = largest,
            None => return NO_TOKEN,
        }
    }
    if params.greedy() || params.top_k == 1 {
        // SAFETY: as above.
        return unsafe { (kernels.find)(logits, max) } as u32;
    }
    let t = params.temperature;
    let mut candidates = Candidates { kernels, keys: &mut scratch.keys, max, temperature: t };
    let keys = &mut *candidates.keys;
    let top_k = params.top_k as usize;
    // The sum of all weights that the filters have left.
    let mut sum;
    if top_k > 0 && top_k < logits.len() {
        // SAFETY: as above.
        unsafe { likeliest(kernels, logits, max, t, top_k, keys) };
        sum = candidates.sum();
    } else if params.min_p > 0.0 && params.top_p >= 1.0 {
        keys.clear();
        // A little further than min-p reaches: the weights decide below.
        // SAFETY: as above.
        unsafe { (kernels.collect)(logits, max - (0.1 - params.min_p.ln()) * t, keys) };
        sum = candidates.sum();
    } else {
        // SAFETY: as above.
        sum = unsafe { (kernels.mass)(logits, max, t) };
        let share = if params.top_p < 1.0 { f64::from(params.top_p) } else { uniform(params.seed, params.draw) };
        // SAFETY: as above.
        unsafe { heaviest(kernels, logits, max, t, share * sum, keys) };
    }
    if params.top_p < 1.0 {
        sum = candidates.keep_share(params.top_p, sum);
    }
    if params.min_p > 0.0 {
        sum = candidates.keep_above(params.min_p);
    }
    candidates.at(uniform(params.seed, params.draw) * sum)
}

fn key_weight(key: u64, max: f32, temperature: f32) -> f64 {
    weight(from_order_key(key).0, max, temperature)
}

/// Puts the `count` likeliest into `keys`, in order.
///
/// # Safety
/// As [`sample`].
unsafe fn likeliest(kernels: &Kernels, logits: &[f32], max: f32, temperature: f32, count: usize, keys: &mut Vec<u64>) {
    for reach in [8.0, 20.0, f32::INFINITY] {
        keys.clear();
        // SAFETY: the caller's promise.
        unsafe { (kernels.collect)(logits, max - reach * temperature, keys) };
        if keys.len() >= count {
            break;
        }
    }
    if count < keys.len() {
        keys.select_nth_unstable(count);
        keys.truncate(count);
    }
    keys.sort_unstable();
}

/// Puts so many of the likeliest into `keys`, in any order, that their weights sum to more than `reach`; or all.
///
/// # Safety
/// As [`sample`].
unsafe fn heaviest(kernels: &Kernels, logits: &[f32], max: f32, temperature: f32, reach: f64, keys: &mut Vec<u64>) {
    for distance in [3.0, 6.0, 12.0, f32::INFINITY] {
        keys.clear();
        // SAFETY: the caller's promise.
        unsafe { (kernels.collect)(logits, max - distance * temperature, keys) };
        // SAFETY: as above.
        if distance < f32::INFINITY && unsafe { (kernels.mass_of_keys)(keys, max, temperature) } > reach {
            return;
        }
    }
}

/// The beginning of the order (as a set: order comes when it is looked at), long enough for what is asked of it.
struct Candidates<'a> {
    kernels: &'a Kernels,
    keys: &'a mut Vec<u64>,
    max: f32,
    temperature: f32,
}

impl Candidates<'_> {
    fn weights(&self, range: std::ops::Range<usize>) -> f64 {
        // SAFETY: whoever made this promised the instruction set.
        unsafe { (self.kernels.mass_of_keys)(&self.keys[range], self.max, self.temperature) }
    }

    fn sum(&self) -> f64 {
        self.weights(0..self.keys.len())
    }

    /// Top-p of a list with sum `sum`; the sum of what is kept.
    fn keep_share(&mut self, share: f32, sum: f64) -> f64 {
        let wanted = f64::from(share) * sum;
        if let Some(last) = self.first_where(|running| running >= wanted) {
            self.keys.truncate(last + 1);
        }
        self.sum()
    }

    /// Min-p; the sum of what is kept. (The likeliest token's weight is 1.)
    fn keep_above(&mut self, least: f32) -> f64 {
        let (max, temperature) = (self.max, self.temperature);
        self.keys.retain(|&key| key_weight(key, max, temperature) >= f64::from(least));
        self.sum()
    }

    /// The first token whose running sum is above `target`, else the last with a weight.
    fn at(&mut self, target: f64) -> u32 {
        let key = match self.first_where(|running| running > target) {
            Some(index) => Some(self.keys[index]),
            None => self.keys.iter().copied().filter(|&key| key_weight(key, self.max, self.temperature) > 0.0).max(),
        };
        key.map_or(NO_TOKEN, |key| from_order_key(key).1)
    }

    /// Index in order of the first candidate whose running sum fulfils `good`. Keys before it are then those before it in
    /// the order. Halves the range until it is worth sorting: sums are exact, so halves add up to what a walk would give.
    fn first_where(&mut self, good: impl Fn(f64) -> bool) -> Option<usize> {
        let (mut from, mut to, mut before) = (0, self.keys.len(), 0.0);
        while to - from > SORT {
            let middle = from.midpoint(to);
            self.keys[from..to].select_nth_unstable(middle - from);
            let half = self.weights(from..middle);
            if good(before + half) {
                to = middle;
            } else {
                before += half;
                from = middle;
            }
        }
        self.keys[from..to].sort_unstable();
        (from..to).find(|&i| {
            before += key_weight(self.keys[i], self.max, self.temperature);
            good(before)
        })
    }
}
