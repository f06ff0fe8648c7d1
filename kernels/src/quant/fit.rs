//! Scales that lose least: weighted least squares over a few roundings.
//!
//! Given values x, weights w and integer levels, each search tries some scales near the obvious one, rounds the values to
//! levels l, solves for the scale (and offset) that minimise Σ w·(x − s·l − m)² under that rounding, and keeps the best.
//! Slices have a multiple of eight entries, which are summed in eight lanes.

/// Largest magnitude below which values count as zero: an f16 scale of them would be.
const TINY: f32 = 1e-15;
/// Adding and subtracting it rounds numbers below 2²² to the nearest integer, ties to even.
const ROUND: f32 = 12_582_912.0;

/// The nearest integer of a number between −2²² and 2²².
#[inline]
pub(super) fn nearest(x: f32) -> f32 {
    (x + ROUND) - ROUND
}

/// The nearest level of `low..=high`.
#[inline]
pub(super) fn level(x: f32, low: f32, high: f32) -> f32 {
    nearest(x.max(low).min(high))
}

/// 1/x, or 0 where there is none.
pub(super) fn inverse(x: f32) -> f32 {
    if x == 0.0 { 0.0 } else { 1.0 / x }
}

/// The value of the largest magnitude.
fn extreme(x: &[f32]) -> f32 {
    x.iter().fold(0.0, |most: f32, x| if x.abs() > most.abs() { *x } else { most })
}

/// Sums of w·x·l and w·l² with l the levels of x·inverse.
fn products(x: &[f32], w: &[f32], inverse: f32, low: f32, high: f32) -> (f32, f32) {
    let (mut xl, mut ll) = ([0.0; 8], [0.0; 8]);
    for (x, w) in x.as_chunks::<8>().0.iter().zip(w.as_chunks::<8>().0) {
        for i in 0..8 {
            let l = level(x[i] * inverse, low, high);
            let wl = w[i] * l;
            xl[i] += wl * x[i];
            ll[i] += wl * l;
        }
    }
    (xl.iter().sum(), ll.iter().sum())
}

/// The best of several inverse scales, and of what follows from it: least Σ w·(x − s·l)², so greatest (Σ w·x·l)² ÷ Σ w·l².
fn best(x: &[f32], w: &[f32], low: f32, high: f32, inverses: impl Iterator<Item = f32>) -> f32 {
    let (mut score, mut scale) = (0.0, 0.0);
    let mut try_one = |inverse: f32| {
        let (xl, ll) = products(x, w, inverse, low, high);
        let better = ll > 0.0 && xl * xl > score * ll;
        if better {
            (score, scale) = (xl * xl / ll, xl / ll);
        }
        (better, scale)
    };
    let mut found = 0.0;
    for inverse in inverses {
        (_, found) = try_one(inverse);
    }
    // Rounding with the solved scale may be better still.
    for _ in 0..3 {
        let (better, scale) = try_one(self::inverse(found));
        found = scale;
        if !better {
            break;
        }
    }
    found
}

/// s with x ≈ s·l, l from −half to half − 1. Negative where the extreme value is positive, as it takes the longer side.
pub(super) fn symmetric(x: &[f32], w: &[f32], half: f32) -> f32 {
    let extreme = extreme(x);
    if extreme.abs() < TINY {
        return 0.0;
    }
    best(x, w, -half, half - 1.0, (-9..=9).map(|step| -(half + 0.1 * step as f32) / extreme))
}

/// s with x ≈ s·l for x of 0 or more, l from 0 to `most`.
pub(super) fn positive(x: &[f32], w: &[f32], most: f32) -> f32 {
    let extreme = extreme(x);
    if extreme < TINY {
        return 0.0;
    }
    best(x, w, 0.0, most, (-9..=9).map(|step| (most + 0.1 * step as f32) / extreme))
}

/// Whether an offset may be above zero.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Offset {
    Any,
    /// The K types subtract theirs.
    NotAboveZero,
}

/// (s, m) with x ≈ s·l + m, l from 0 to `most`.
pub(super) fn affine(x: &[f32], w: &[f32], most: f32, offset: Offset) -> (f32, f32) {
    let (mut low, high) = x.iter().fold((f32::MAX, f32::MIN), |(low, high), x| (low.min(*x), high.max(*x)));
    if offset == Offset::NotAboveZero {
        low = low.min(0.0);
    }
    if high - low < TINY {
        return (0.0, low);
    }
    let lanes = |f: &dyn Fn(f32, f32) -> f32| x.iter().zip(w).map(|(x, w)| f(*x, *w)).sum::<f32>();
    let (sw, sx, sxx) = (lanes(&|_, w| w), lanes(&|x, w| w * x), lanes(&|x, w| w * x * x));
    let mut found = ((high - low) / most, low);
    let mut least = f32::MAX;
    let first = if most > 3.0 { -1.0 } else { -0.5 };
    for step in 0..=20 {
        let inverse = (first + 0.1 * step as f32 + most) / (high - low);
        let [sl, sll, sxl] = level_sums(x, w, low, inverse, most);
        let determinant = sw * sll - sl * sl;
        if determinant <= 0.0 {
            continue;
        }
        let mut scale = (sw * sxl - sx * sl) / determinant;
        let mut min = (sll * sx - sl * sxl) / determinant;
        if offset == Offset::NotAboveZero && min > 0.0 {
            (scale, min) = (sxl / sll, 0.0);
        }
        let error = sxx + scale * (scale * sll + 2.0 * (min * sl - sxl)) + min * (min * sw - 2.0 * sx);
        if error < least {
            (least, found) = (error, (scale, min));
        }
    }
    found
}

/// Sums of w·l, w·l² and w·x·l with l the levels of (x − low)·inverse.
fn level_sums(x: &[f32], w: &[f32], low: f32, inverse: f32, most: f32) -> [f32; 3] {
    let (mut sl, mut sll, mut sxl) = ([0.0; 8], [0.0; 8], [0.0; 8]);
    for (x, w) in x.as_chunks::<8>().0.iter().zip(w.as_chunks::<8>().0) {
        for i in 0..8 {
            let l = level((x[i] - low) * inverse, 0.0, most);
            let wl = w[i] * l;
            sl[i] += wl;
            sll[i] += wl * l;
            sxl[i] += wl * x[i];
        }
    }
    [sl, sll, sxl].map(|lanes| lanes.iter().sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exact_grids_are_found() {
        let w = [1.0; 16];
        let x: [f32; 16] = std::array::from_fn(|i| (i as f32 - 8.0) * 0.25);
        assert!((symmetric(&x, &w, 8.0) - 0.25).abs() < 1e-6);
        let negated = x.map(|x| -x);
        assert!((symmetric(&negated, &w, 8.0) + 0.25).abs() < 1e-6);
        let (scale, min) = affine(&x.map(|x| x + 5.0), &w, 15.0, Offset::Any);
        assert!((scale - 0.25).abs() < 1e-5 && (min - 3.0).abs() < 1e-4, "{scale} {min}");
        let (_, min) = affine(&x.map(|x| x + 5.0), &w, 15.0, Offset::NotAboveZero);
        assert!(min <= 0.0 && min > -0.1, "{min}");
        assert!((positive(&x.map(|x| x + 2.0), &w, 15.0) - 0.25).abs() < 1e-6);
    }

    #[test]
    fn zeros_have_no_scale() {
        let (x, w) = ([0.0; 16], [1.0; 16]);
        assert_eq!((symmetric(&x, &w, 8.0), positive(&x, &w, 15.0), affine(&x, &w, 15.0, Offset::Any)), (0.0, 0.0, (0.0, 0.0)));
        assert_eq!([nearest(-2.5), nearest(3.5), level(99.0, 0.0, 15.0)], [-2.0, 4.0, 15.0]);
    }
}
