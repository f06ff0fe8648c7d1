//! What a cache of bytes loses.

use quire_kernels::{
    backend::{KvType, Mask},
    cpu::Isa,
    kv::codec::stored,
    reference::{Numerics, Reference},
};

use crate::{
    common::Random,
    harness::{Case, Run, cpu},
};

fn largest(x: &[f32]) -> f32 {
    x.iter().fold(0.0, |m: f32, x| m.max(x.abs()))
}

/// Rows of several kinds.
fn row(random: &mut Random, kind: usize, len: usize) -> Vec<f32> {
    let mut row = random.normals(len, [1.0, 1e-6, 3e4, 0.1, 1.0][kind]);
    match kind {
        // One element far above the others, as keys have.
        3 => row[len / 3] = 25.0,
        // Magnitudes over many powers of two.
        4 => row.iter_mut().for_each(|x| *x *= 2_f32.powi(-(random.below(14) as i32))),
        _ => (),
    }
    row
}

/// Distance of |x| / unit to the next number that the type has, at most: half a step.
fn half_step(x: f32, unit: f32, kv_type: KvType) -> f32 {
    let y = x.abs() / unit;
    match kv_type {
        KvType::Q8 => 0.5 * unit,
        // 3 bits of mantissa; below 2⁻⁶ steps of 2⁻⁹.
        KvType::Fp8 => 2_f32.powi((y.log2().floor() as i32).clamp(-6, 8) - 4) * unit,
        KvType::F16 => (x.abs() / 2048.0).max(2_f32.powi(-25)),
        KvType::F32 => 0.0,
    }
}

/// Each element within half a step of what was stored, the mean square error as an even spread over the steps gives.
#[test]
fn stored_rows_are_within_half_a_step() {
    for (kv_type, top) in [(KvType::Q8, 127.0), (KvType::Fp8, 448.0)] {
        for kind in 0..5 {
            let random = &mut Random(kind as u64);
            let (mut error, mut expected, mut power) = (0.0_f64, 0.0_f64, 0.0_f64);
            for len in [8, 24, 64, 128, 576].repeat(60) {
                let x = row(random, kind, len);
                let largest = largest(&x);
                let unit = largest / top;
                for (x, y) in x.iter().zip(stored(&x, kv_type)) {
                    let half = half_step(*x, unit, kv_type);
                    // Two roundings of the factor and the product may move a tie.
                    assert!((x - y).abs() <= half * (1.0 + 1e-4), "{kv_type:?}: {x} became {y}, {half} allowed");
                    power += f64::from(*x).powi(2);
                    // The largest is stored exactly.
                    if x.abs() == largest {
                        assert!((x - y).abs() <= 1e-6 * largest);
                        continue;
                    }
                    error += f64::from(x - y).powi(2);
                    expected += f64::from(half).powi(2) / 3.0;
                }
            }
            let relative = (error / power).sqrt();
            println!("{:<4} rows of kind {kind}: error {relative:.4} of the root mean square", kv_type.name());
            // What is far below a step of Q8 becomes 0, and loses less than the even spread.
            let least = if kind == 4 { 0.5 } else { 0.92 };
            assert!((least..1.08).contains(&(error / expected)), "{kv_type:?} kind {kind}: {} of what is expected", error / expected);
        }
    }
}

/// A row that sees one key gives that value back: the same bits that the definition of the type gives, at every level.
#[test]
fn values_read_back_as_defined() {
    for isa in Isa::all_available() {
        for kv_type in KvType::ALL {
            for seed in 0..12 {
                let case = Case::random(&mut Random(500 + seed), kv_type, isa);
                let case = Case { mask: Mask::Window(1), sinks: None, lengths: vec![70], ..case };
                let mut run = Run::new(cpu(isa, 2), &case);
                run.write(&[(0, 0, 70)]);
                let out = run.attend(&[(0, 0, 70)]);
                let (dim, per) = (case.kv.value_dim, case.heads / case.kv.kv_heads);
                for (p, row) in out.chunks(case.heads * dim).enumerate() {
                    for (head, got) in row.chunks(dim).enumerate() {
                        let (all, width) = if case.kv.shared_values { (case.key(0, p), case.kv.key_dim) } else { (case.value(0, p), dim) };
                        let want = &stored(&all[head / per * width..][..width], kv_type)[..dim];
                        assert_eq!(got, want, "{} {p} {case:?}", isa.name());
                    }
                }
            }
        }
    }
}

/// The result moves no further than errors of half a step in every key and value can move it: e^(2δ) − 1 of the largest value,
/// where δ = scale · Σ|q| · half step is what a score may change, and half a step of a value.
#[test]
fn attention_moves_no_further_than_the_steps_allow() {
    for kv_type in [KvType::F16, KvType::Q8, KvType::Fp8] {
        let (mut moved, mut power) = (0.0_f64, 0.0_f64);
        for seed in 0..12 {
            let mut case = Case::random(&mut Random(900 + seed), KvType::F32, Isa::detect());
            (case.size, case.lengths, case.softcap, case.sinks) = (1.0, vec![200], None, None);
            let rows = [(0, 150, 200)];
            let mut exact = Run::new(Reference::new(Numerics::Exact), &case);
            exact.write(&[(0, 0, 200)]);
            let want = exact.attend(&rows);
            let case = Case { kv: quire_kernels::backend::KvShape { kv_type, ..case.kv }, ..case };
            let mut run = Run::new(cpu(Isa::detect(), 2), &case);
            run.write(&[(0, 0, 200)]);
            let got = run.attend(&rows);
            let top = if kv_type == KvType::Q8 { 127.0 } else { 448.0 };
            let dims = (case.kv.key_dim, if case.kv.shared_values { case.kv.key_dim } else { case.kv.value_dim });
            let step = |x: &[f32], dim: usize| {
                let step = |row: &[f32]| row.iter().map(|&x| half_step(x, largest(row) / top, kv_type)).fold(0.0, f32::max);
                x.chunks(dim).map(step).fold(0.0, f32::max)
            };
            let values = |p| if case.kv.shared_values { case.key(0, p) } else { case.value(0, p) };
            let key_step = (0..200).map(|p| step(&case.key(0, p), dims.0)).fold(0.0, f32::max);
            let value_step = (0..200).map(|p| step(&values(p), dims.1)).fold(0.0, f32::max);
            let value = (0..200).map(|p| largest(&values(p))).fold(0.0, f32::max);
            let width = case.kv.value_dim;
            for (i, (got, want)) in got.chunks(width).zip(want.chunks(width)).enumerate() {
                let (p, head) = (150 + i / case.heads, i % case.heads);
                let q = &case.query(0, p)[head * case.kv.key_dim..][..case.kv.key_dim];
                let delta = key_step * q.iter().map(|q| q.abs()).sum::<f32>() / (case.kv.key_dim as f32).sqrt();
                let bound = ((2.0 * delta).exp() - 1.0) * value + value_step + 1e-5 * value;
                for (g, w) in got.iter().zip(want) {
                    assert!((g - w).abs() <= bound, "{kv_type:?}: {g} for {w}, {bound} allowed; {case:?}");
                    moved += f64::from(g - w).powi(2);
                    power += f64::from(*w).powi(2);
                }
            }
        }
        println!("{:<4} attention moved by {:.5} of its root mean square", kv_type.name(), (moved / power).sqrt());
        let most = if kv_type == KvType::F16 {
            1e-3
        } else if kv_type == KvType::Q8 {
            0.02
        } else {
            0.08
        };
        assert!((moved / power).sqrt() < most, "{kv_type:?}");
    }
}
