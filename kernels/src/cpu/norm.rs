//! Norms, to the bit as [`crate::reference`] defines them: 16 lanes, each operation rounded on its own. Plain Rust, which the
//! compiler turns into whatever registers there are without changing a bit.

use super::{CpuBackend, simd::LANES};
use crate::backend::{HeadNorm, Norm, NormKind, Span};

/// A norm on slices.
#[derive(Clone, Copy)]
pub(super) struct RowNorm<'a> {
    kind: NormKind,
    weight: Option<&'a [f32]>,
    bias: Option<&'a [f32]>,
    epsilon: f32,
}

impl<'a> RowNorm<'a> {
    pub(super) fn new(norm: &Norm<'a, CpuBackend>) -> Self {
        let slice = |buffer: Option<&'a super::CpuBuffer>| buffer.map(|buffer| &buffer[..]);
        Self { kind: norm.kind, weight: slice(norm.weight), bias: slice(norm.bias), epsilon: norm.epsilon }
    }

    /// With the weights from `start` on.
    fn from(self, start: usize) -> Self {
        Self { weight: self.weight.map(|w| &w[start..]), bias: self.bias.map(|b| &b[start..]), ..self }
    }

    /// What to subtract from and multiply with.
    fn statistics(&self, x: &[f32]) -> (f32, f32) {
        let n = x.len() as f32;
        let shift = match self.kind {
            NormKind::Rms => 0.0,
            NormKind::Layer => lane_sum(x, |v| v) / n,
        };
        let squares = if shift == 0.0 { lane_sum(x, |v| v * v) } else { lane_sum(x, |v| (v - shift) * (v - shift)) };
        (shift, 1.0 / (squares / n + self.epsilon).sqrt())
    }

    /// out = norm(x).
    pub(super) fn apply(&self, x: &[f32], out: &mut [f32]) {
        let (shift, factor) = self.statistics(x);
        let pairs = out.iter_mut().zip(x);
        match (self.weight, self.bias) {
            (Some(w), None) if shift == 0.0 => pairs.zip(w).for_each(|((out, v), w)| *out = v * factor * w),
            (Some(w), None) => pairs.zip(w).for_each(|((out, v), w)| *out = (v - shift) * factor * w),
            (Some(w), Some(b)) => pairs.zip(w.iter().zip(b)).for_each(|((out, v), (w, b))| *out = (v - shift) * factor * w + b),
            (None, Some(b)) => pairs.zip(b).for_each(|((out, v), b)| *out = (v - shift) * factor + b),
            (None, None) => pairs.for_each(|(out, v)| *out = (v - shift) * factor),
        }
    }

    /// to = f(to, norm(x)).
    pub(super) fn joined(&self, x: &[f32], to: &mut [f32], f: impl Fn(f32, f32) -> f32) {
        let (shift, factor) = self.statistics(x);
        for (i, (to, v)) in to.iter_mut().zip(x).enumerate() {
            let y = (v - shift) * factor * self.weight.map_or(1.0, |w| w[i]);
            *to = f(*to, self.bias.map_or(y, |b| y + b[i]));
        }
    }

    /// x = norm(x).
    pub(super) fn in_place(&self, x: &mut [f32]) {
        let (shift, factor) = self.statistics(x);
        x.iter_mut().for_each(|v| *v = (*v - shift) * factor);
        if let Some(weight) = self.weight {
            x.iter_mut().zip(weight).for_each(|(v, w)| *v *= w);
        }
        if let Some(bias) = self.bias {
            x.iter_mut().zip(bias).for_each(|(v, b)| *v += b);
        }
    }
}

/// out = norm(x), or x itself.
pub(super) fn norm_or_copy(norm: Option<&RowNorm<'_>>, x: &[f32], out: &mut [f32]) {
    match norm {
        Some(norm) => norm.apply(x, out),
        None => out.copy_from_slice(x),
    }
}

/// Norms heads of `dim` elements, if this is the place where it is done.
pub(super) fn norm_heads(norm: Option<&HeadNorm<'_, CpuBackend>>, after_rope: bool, dim: usize, x: &mut [f32]) {
    let Some(HeadNorm { norm, span, .. }) = norm.filter(|norm| norm.after_rope == after_rope) else { return };
    let norm = RowNorm::new(norm);
    match span {
        Span::Width => norm.in_place(x),
        Span::Head => x.chunks_exact_mut(dim).for_each(|head| norm.in_place(head)),
        Span::EachHead => x.chunks_exact_mut(dim).enumerate().for_each(|(i, head)| norm.from(i * dim).in_place(head)),
    }
}

/// Σ f(x) in lanes.
#[inline(always)]
fn lane_sum(x: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    let (chunks, rest) = x.as_chunks::<LANES>();
    let mut lanes = [0.0_f32; LANES];
    for chunk in chunks {
        for (lane, v) in lanes.iter_mut().zip(chunk) {
            *lane += f(*v);
        }
    }
    for (lane, v) in lanes.iter_mut().zip(rest) {
        *lane += f(*v);
    }
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
    }
    lanes[0]
}
