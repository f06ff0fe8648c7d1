//! Both backends store the same bytes, so they differ by the rounding of scores and sums alone.
//!
//! Metric: per row and head, the largest difference over the largest magnitude. Bound: a score of size s is a sum of key_dim
//! products in another order, and what that rounds (about 2⁻²⁴ · √key_dim · the scale · the root of Σ(q·k)², here 1e-6) multiplies
//! the weights; a cap of c adds the error of tanh, 2 · 2⁻²⁴ · c, below 4e-6 for 30. Seen: 2.1e-6.

use quire_kernels::{
    backend::{KvType, Mask},
    cpu::Isa,
    reference::{Numerics, Reference},
};

use crate::{
    common::Random,
    harness::{Case, Run, cpu},
};

const BOUND: f32 = 5e-6;

fn distance(got: &[f32], want: &[f32], width: usize) -> f32 {
    assert_eq!(got.len(), want.len());
    let mut worst = 0.0_f32;
    for (got, want) in got.chunks(width).zip(want.chunks(width)) {
        let scale = want.iter().fold(1e-20, |m: f32, v| m.max(v.abs()));
        for (g, w) in got.iter().zip(want) {
            assert!(g.is_finite() && w.is_finite(), "{g} for {w}");
            worst = worst.max((g - w).abs() / scale);
        }
    }
    worst
}

/// A ragged batch: the end of each sequence, one row or some.
fn rows(case: &Case, random: &mut Random) -> Vec<(usize, usize, usize)> {
    case.lengths.iter().enumerate().map(|(s, &n)| (s, n - random.pick(&[1, 1, 2, 17, 40]).min(n), n)).collect()
}

#[test]
fn every_type_and_feature_computes_what_the_reference_does() {
    for isa in Isa::all_available() {
        for kv_type in KvType::ALL {
            let mut worst = 0.0_f32;
            for seed in 0..if isa == Isa::Portable { 24 } else { 40 } {
                let random = &mut Random(seed + 1000);
                let case = Case::random(random, kv_type, isa);
                let all: Vec<_> = case.lengths.iter().enumerate().map(|(s, &n)| (s, 0, n)).collect();
                let rows = rows(&case, random);
                let (mut fast, mut slow) =
                    (Run::new(cpu(isa, 1 + seed as usize % 3), &case), Run::new(Reference::new(Numerics::Exact), &case));
                fast.write(&all);
                slow.write(&all);
                let d = distance(&fast.attend(&rows), &slow.attend(&rows), case.kv.value_dim);
                assert!(d <= BOUND, "{}: {d:e} from the reference; {rows:?} {case:?}", isa.name());
                worst = worst.max(d);
            }
            println!("{:<10} {:<4} {worst:.1e} from the reference", isa.name(), kv_type.name());
        }
    }
}

/// The features do something: each changes the result of the reference, as its definition says in a case made by hand.
#[test]
fn masks_sinks_and_caps_mean_what_they_say() {
    let random = &mut Random(7);
    let base = loop {
        let case = Case::random(random, KvType::F32, Isa::detect());
        if !case.kv.shared_values && case.heads == 2 && case.kv.key_dim == 16 {
            break Case { lengths: vec![70], mask: Mask::Causal, softcap: None, sinks: None, size: 1.0, ..case };
        }
    };
    let attend = |case: &Case, p: usize| {
        let mut run = Run::new(Reference::new(Numerics::Exact), case);
        run.write(&[(0, 0, 70)]);
        run.attend(&[(0, p, p + 1)])
    };
    // By hand, in double precision.
    let by_hand = |case: &Case, p: usize, keys: std::ops::Range<usize>| -> Vec<f32> {
        let (d, per) = (16, case.heads / case.kv.kv_heads);
        let q = case.query(0, p);
        (0..case.heads)
            .flat_map(|head| {
                let kv_head = head / per;
                let score = |i: usize| {
                    let key = case.key(0, i);
                    let s = (0..d).map(|e| f64::from(q[head * d + e]) * f64::from(key[kv_head * d + e])).sum::<f64>() / 4.0;
                    case.softcap.map_or(s, |cap| f64::from(cap) * (s / f64::from(cap)).tanh())
                };
                let sink = case.sinks.as_ref().map_or(0.0, |sinks| f64::from(sinks[head]).exp());
                let weights: Vec<f64> = keys.clone().map(|i| score(i).exp()).collect();
                let sum = weights.iter().sum::<f64>() + sink;
                (0..d)
                    .map(|e| {
                        let weighted = keys.clone().zip(&weights).map(|(i, w)| w * f64::from(case.value(0, i)[kv_head * d + e]));
                        (weighted.sum::<f64>() / sum) as f32
                    })
                    .collect::<Vec<_>>()
            })
            .collect()
    };
    let plain = attend(&base, 69);
    for (case, p, keys) in [
        (base.clone(), 69, 0..70),
        (Case { mask: Mask::Window(24), ..base.clone() }, 69, 46..70),
        (Case { mask: Mask::Window(24), ..base.clone() }, 10, 0..11),
        (Case { mask: Mask::Chunk(32), ..base.clone() }, 69, 64..70),
        (Case { mask: Mask::Chunk(32), ..base.clone() }, 31, 0..32),
        (Case { softcap: Some(0.5), ..base.clone() }, 69, 0..70),
        (Case { sinks: Some(vec![5.0, -1.0]), ..base.clone() }, 69, 0..70),
        (Case { sinks: Some(vec![1.0, 2.0]), mask: Mask::Window(3), softcap: Some(2.0), ..base.clone() }, 69, 67..70),
    ] {
        let got = attend(&case, p);
        let d = distance(&got, &by_hand(&case, p, keys), 16);
        assert!(d < 2e-6, "{d:e}: {case:?}");
        let changed = case.mask != base.mask || case.softcap.is_some() || case.sinks.is_some();
        assert!(p != 69 || changed == (got != plain));
    }
}

#[test]
fn copied_blocks_read_as_the_original_with_their_scales() {
    for isa in Isa::all_available() {
        for kv_type in KvType::ALL {
            for seed in 0..4 {
                let case = Case::random(&mut Random(seed), kv_type, isa);
                let case = Case { lengths: vec![case.kv.block_size, case.kv.block_size], ..case };
                let n = case.kv.block_size;
                let mut run = Run::new(cpu(isa, 2), &case);
                run.write(&[(0, 0, n)]);
                let want = run.attend(&[(0, n - 5, n)]);
                let (from, to) = (run.tables().tables[0][0], run.tables().tables[1][0]);
                run.tables().tables[0][0] = to;
                assert!(run.attend(&[(0, n - 5, n)]).iter().all(|x| x.is_nan()), "nothing was copied yet");
                run.copy(from, to);
                assert_eq!(run.attend(&[(0, n - 5, n)]), want, "{} {case:?}", isa.name());
            }
        }
    }
}

#[test]
fn impossible_arguments_are_refused_by_name() {
    let case = Case { sinks: Some(vec![0.0; 64]), ..Case::random(&mut Random(3), KvType::Q8, Isa::detect()) };
    let case = Case { sinks: Some(vec![0.0; case.heads]), ..case };
    let mut run = Run::new(cpu(Isa::detect(), 1), &case);
    run.write(&[(0, 0, 1)]);
    assert!(run.refused(|a| a.mask = Mask::Window(0)).contains("mask"));
    assert!(run.refused(|a| a.mask = Mask::Chunk(0)).contains("mask"));
    assert!(run.refused(|a| a.softcap = Some(0.0)).contains("softcap"));
    assert!(run.refused(|a| a.softcap = Some(f32::NAN)).contains("softcap"));
    assert!(run.refused(|a| a.value_dim += 1).contains("other heads"));
    assert!(run.refused(|a| a.key_dim += 1).contains("other heads"));
    assert!(run.refused(|a| a.heads *= 100).contains("sinks"));
    assert!(run.refused(|a| a.layer = 2).contains("layer 2"));
}
