//! Sampling on the CPU backend gives what the reference gives, and draws as often as the probabilities say.

#![allow(clippy::unwrap_used, clippy::panic, clippy::needless_range_loop)] // Helpers of tests.

mod common;

use common::{Model, Random, Shape, Weights, greedy, limits};
use quire_kernels::{
    backend::{Activation, KvType, RopeStyle},
    cpu::{CpuBackend, CpuOptions, Isa},
    plan::{NO_TOKEN, SamplingPlan, StepPlan},
    quant::TensorType,
    reference::{Numerics, Reference},
};

fn shape(vocabulary: usize, rows: usize) -> Shape {
    Shape {
        heads: 1,
        kv_heads: 1,
        head_dim: 16,
        hidden: 32,
        feed_forward: 32,
        vocabulary,
        block_size: 16,
        blocks: rows,
        layers: 1,
        kv_type: KvType::F32,
        rope_style: RopeStyle::Half,
        rope_dim: 16,
        activation: Activation::Silu,
        limits: quire_kernels::plan::StepLimits { sequences: rows, ..limits(rows, 1) },
    }
}

fn fast(isa: Isa, weights: &Weights) -> Model<CpuBackend> {
    Model::new(CpuBackend::new(CpuOptions { threads: 3, isa: Some(isa) }).unwrap(), weights).unwrap()
}

fn weights(vocabulary: usize, rows: usize) -> Weights {
    Weights::random(&mut Random(0), shape(vocabulary, rows), [TensorType::F32; 2], TensorType::F32, false)
}

/// A step of one-row sequences with these sampling parameters.
fn plan(sampling: SamplingPlan) -> StepPlan {
    let rows = sampling.targets.len();
    let mut plan = StepPlan {
        inputs: vec![0; rows],
        positions: vec![0; rows],
        adapters: vec![-1; rows],
        row_starts: (0..=rows as u32).collect(),
        context_lens: vec![1; rows],
        logit_rows: (0..rows as u32).collect(),
        sampling,
        ..StepPlan::default()
    };
    plan.groups.clear();
    plan
}

/// Logits: peaked, flat, with ties, with −∞, or bad.
fn random_logits(random: &mut Random, vocabulary: usize) -> Vec<f32> {
    let kind = random.below(9);
    let spread = random.pick(&[0.01, 1.0, 5.0, 30.0]);
    let mut logits = random.normals(vocabulary, spread);
    match kind {
        0 => logits.iter_mut().for_each(|z| *z = z.round()),
        1 => logits.iter_mut().for_each(|z| *z = (*z * 0.3).round() * 0.0),
        2 => logits.iter_mut().filter(|z| **z < 0.5).for_each(|z| *z = f32::NEG_INFINITY),
        3 => logits[random.below(vocabulary)] = random.pick(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY]),
        4 => logits.fill(f32::NEG_INFINITY),
        _ => {}
    }
    logits
}

fn random_sampling(random: &mut Random, rows: usize, vocabulary: usize) -> SamplingPlan {
    let mut plan = greedy(rows);
    let words = vocabulary.div_ceil(32);
    for row in 0..rows {
        plan.temperature[row] = random.pick(&[0.0, 0.3, 0.7, 1.0, 1.0, 1.7, 1e-6, 50.0]);
        plan.top_k[row] = random.pick(&[0, 0, 1, 2, 5, 40, 1000, 100_000]);
        plan.top_p[row] = random.pick(&[1.0, 1.0, 0.95, 0.5, 0.1, 0.0, 0.999]);
        plan.min_p[row] = random.pick(&[0.0, 0.0, 0.05, 0.5, 1.0, 1e-4]);
        plan.presence[row] = random.pick(&[0.0, 0.0, 0.5, -1.0]);
        plan.frequency[row] = random.pick(&[0.0, 0.0, 0.3, -0.2]);
        plan.repetition[row] = random.pick(&[1.0, 1.0, 1.2, 0.8]);
        plan.seed[row] = random.bits();
        plan.draw[row] = random.below(1000) as u32;
        plan.logprobs[row] = random.pick(&[-1, 0, 1, 5, 20]);
        if random.below(6) == 0 {
            plan.targets[row] = random.below(vocabulary) as u32;
        }
        for _ in 0..random.pick(&[0, 0, 3]) {
            plan.bias_ids.push(random.below(vocabulary) as u32);
            plan.bias_values.push(random.pick(&[2.0, -3.0, f32::NEG_INFINITY, 100.0]));
        }
        plan.bias_starts[row + 1] = plan.bias_ids.len() as u32;
        for _ in 0..random.pick(&[0, 4, 20]) {
            plan.history_ids.push(random.below(vocabulary) as u32);
            plan.history_counts.push(random.below(3) as u32);
        }
        plan.history_starts[row + 1] = plan.history_ids.len() as u32;
        if random.below(4) == 0 {
            plan.mask_rows[row] = (plan.masks.len() / words) as i32;
            let kind = random.below(3);
            plan.masks.extend((0..words).map(|_| match kind {
                0 => random.bits() as u32,
                1 => u32::MAX,
                _ => 0,
            }));
        }
    }
    plan
}

#[test]
fn same_tokens_as_the_reference() {
    for isa in Isa::all_available() {
        let (mut drawn, mut refused) = (0, 0);
        for (vocabulary, seeds) in [(5, 20), (97, 40), (2000, 30), (20_011, 6)] {
            let rows = 16;
            let weights = weights(vocabulary, rows);
            let mut fast = fast(isa, &weights);
            let mut slow = Model::new(Reference::new(Numerics::Exact), &weights).unwrap();
            for seed in 0..seeds {
                let random = &mut Random(seed);
                let plan = plan(random_sampling(random, rows, vocabulary));
                let logits: Vec<f32> = (0..rows).flat_map(|_| random_logits(random, vocabulary)).collect();
                let (got, want) = (fast.sample(&plan, &logits).unwrap(), slow.sample(&plan, &logits).unwrap());
                for row in 0..rows {
                    let context = || {
                        format!("{} seed {seed} vocabulary {vocabulary} row {row}: {:?}", isa.name(), plan.sampling.row(row, vocabulary))
                    };
                    assert_eq!(got.ids[row], want.ids[row], "{}", context());
                    assert_eq!(got.logprobs[row].to_bits(), want.logprobs[row].to_bits(), "{}", context());
                    assert!(got.top(row).eq(want.top(row)), "{}", context());
                    *if got.ids[row] == NO_TOKEN { &mut refused } else { &mut drawn } += 1;
                }
            }
        }
        assert!(drawn > 500 && refused > 50, "{drawn} {refused}");
    }
}

#[test]
fn ties_go_to_the_lowest_id_and_logprobs_ignore_the_bias() {
    let weights = weights(40, 3);
    let mut model = fast(Isa::detect(), &weights);
    let mut logits = vec![0.0; 120];
    (logits[7], logits[23], logits[40 + 9]) = (2.0, 2.0, 1.0);
    let mut sampling = greedy(3);
    sampling.logprobs = vec![2, 1, 0];
    // Row 1 bans its favourite, row 2 is asked for a given token.
    (sampling.bias_ids, sampling.bias_values, sampling.bias_starts) = (vec![9], vec![f32::NEG_INFINITY], vec![0, 0, 1, 1]);
    sampling.targets[2] = 39;
    let out = model.sample(&plan(sampling), &logits).unwrap();
    assert_eq!(out.ids, [7, 0, 39]);
    assert_eq!(out.top(0).map(|t| t.0).collect::<Vec<_>>(), [7, 23]);
    assert_eq!(out.top(1).map(|t| t.0).collect::<Vec<_>>(), [9]);
    let log = |numerator: f32, sum: f32| numerator - sum.ln();
    let e = std::f32::consts::E;
    for (got, want) in out.logprobs.iter().zip([log(2.0, 38.0 + 2.0 * e * e), log(0.0, 39.0 + e), log(0.0, 40.0)]) {
        assert!((got - want).abs() < 1e-5, "{got} {want}");
    }
}

/// Chi-square of 20,000 draws against the filtered distribution, computed here in double precision.
#[test]
fn draws_follow_the_distribution() {
    let vocabulary = 12;
    let rows = 500;
    let weights = weights(vocabulary, rows);
    let mut model = fast(Isa::detect(), &weights);
    let logits: Vec<f32> = (0..vocabulary).map(|i| (i as f32 * 0.77).sin() * 2.0).collect();
    let all: Vec<f32> = (0..rows).flat_map(|_| logits.clone()).collect();
    for (temperature, top_k, top_p, min_p, by_seed) in [
        (1.0, 0, 1.0, 0.0, false),
        (0.6, 0, 1.0, 0.0, true),
        (1.3, 6, 1.0, 0.0, false),
        (1.0, 0, 0.8, 0.0, true),
        (1.0, 0, 1.0, 0.2, false),
    ] {
        let mut order: Vec<usize> = (0..vocabulary).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        let weight = |i: usize| (f64::from(logits[i]) / f64::from(temperature)).exp();
        order.truncate(if top_k == 0 { vocabulary } else { top_k as usize });
        let sum: f64 = order.iter().map(|&i| weight(i)).sum();
        let mut running = 0.0;
        let end = order.iter().position(|&i| {
            running += weight(i);
            running >= f64::from(top_p) * sum * (1.0 - 1e-12)
        });
        order.truncate(end.unwrap() + 1);
        let least = f64::from(min_p) * weight(order[0]);
        order.retain(|&i| weight(i) >= least);
        let sum: f64 = order.iter().map(|&i| weight(i)).sum();
        let mut counts = vec![0.0; vocabulary];
        for batch in 0..40_u64 {
            let mut sampling = greedy(rows);
            for row in 0..rows {
                let n = batch * rows as u64 + row as u64;
                (sampling.seed[row], sampling.draw[row]) = if by_seed { (n, 3) } else { (77, n as u32) };
                (sampling.temperature[row], sampling.top_k[row]) = (temperature, top_k);
                (sampling.top_p[row], sampling.min_p[row]) = (top_p, min_p);
            }
            for id in model.sample(&plan(sampling), &all).unwrap().ids {
                counts[id as usize] += 1.0;
            }
        }
        let total: f64 = 20_000.0;
        let chi: f64 = order.iter().map(|&i| (counts[i] - total * weight(i) / sum).powi(2) / (total * weight(i) / sum)).sum();
        let kept: f64 = order.iter().map(|&i| counts[i]).sum();
        assert_eq!(kept, total, "a token that the filters removed was drawn");
        // 99.9 % of a chi-square with 11 degrees of freedom is 31.3.
        assert!(chi < 31.3, "{chi} for {temperature} {top_k} {top_p} {min_p}");
    }
}
