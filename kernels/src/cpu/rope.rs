//! Rotary positions: the angles of a row, and the turning of a head.

use crate::backend::RopeStyle;

/// factor · (cos(p·f) …, sin(p·f) …).
pub(super) fn angles(position: u32, frequencies: &[f32], factor: f32, out: &mut [f32]) {
    let (cos, sin) = out.split_at_mut(frequencies.len());
    for ((cos, sin), f) in cos.iter_mut().zip(sin).zip(frequencies) {
        let (s, c) = (position as f32 * f).sin_cos();
        (*cos, *sin) = (factor * c, factor * s);
    }
}

/// Turns the first elements of a head, twice as many as there are cosines.
pub(super) fn turn(head: &mut [f32], cos: &[f32], sin: &[f32], style: RopeStyle) {
    match style {
        RopeStyle::Adjacent => {
            for ((pair, c), s) in head.as_chunks_mut::<2>().0.iter_mut().zip(cos).zip(sin) {
                let [a, b] = *pair;
                *pair = [a * c - b * s, a * s + b * c];
            }
        }
        RopeStyle::Half => {
            let (first, second) = head.split_at_mut(cos.len());
            for ((a, b), (c, s)) in first.iter_mut().zip(second).zip(cos.iter().zip(sin)) {
                (*a, *b) = (*a * c - *b * s, *a * s + *b * c);
            }
        }
    }
}
