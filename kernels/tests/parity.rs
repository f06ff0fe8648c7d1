//! Every op of the CPU backend, on every instruction set of this machine, against the reference.
//!
//! Metric, per row of an op's output: the largest difference over the largest magnitude in the reference's row. Each op is
//! fed what the reference's ops gave, so that rounding does not add up from op to op (behind a quantiser, one that falls to
//! the other side would be a thousand times the bound).

#![allow(clippy::unwrap_used, clippy::panic, clippy::needless_range_loop)] // Helpers of tests.

mod common;

use common::{Model, Random, Record, Shape, Tables, Tensor, Weights, limits, no_adapter};
use quire_kernels::{
    backend::{Activation, Backend, KvType, Precision, RopeStyle},
    cpu::{CpuBackend, CpuOptions, Isa},
    plan::StepPlan,
    quant::TensorType,
    reference::{Numerics, Reference},
};

const BOUND: f32 = 1e-5;

fn distance(got: &[f32], want: &[f32], width: usize) -> f32 {
    assert_eq!(got.len(), want.len());
    got.chunks(width)
        .zip(want.chunks(width))
        .map(|(got, want)| {
            let scale = want.iter().fold(1e-20, |m: f32, v| m.max(v.abs()));
            got.iter()
                .zip(want)
                .map(|(g, w)| if g == w { 0.0 } else { (g - w).abs() / scale })
                .fold(0.0, |a: f32, b| if b > a || b.is_nan() { b } else { a })
        })
        .fold(0.0, |a: f32, b| if b > a || b.is_nan() { b } else { a })
}

/// Per op: name and distance.
fn distances(shape: &Shape, got: &Record, want: &Record) -> [(&'static str, f32); 8] {
    let attention = shape.heads * shape.head_dim;
    [
        ("embed", distance(&got.embed, &want.embed, shape.hidden)),
        ("rope_rows", distance(&got.rope, &want.rope, shape.rope_dim)),
        ("qkv_rope_write", distance(&got.q, &want.q, attention)),
        ("attention", distance(&got.attention, &want.attention, shape.head_dim)),
        ("linear_add (out)", distance(&got.after_out, &want.after_out, shape.hidden)),
        ("gate_up", distance(&got.gate_up, &want.gate_up, shape.feed_forward)),
        ("linear_add (down)", distance(&got.after_down, &want.after_down, shape.hidden)),
        ("logits", distance(&got.logits, &want.logits, shape.vocabulary)),
    ]
}

fn cpu(isa: Isa, threads: usize) -> CpuBackend {
    CpuBackend::new(CpuOptions { threads, isa: Some(isa) }).unwrap()
}

fn random_shape(random: &mut Random) -> Shape {
    let kv_heads = random.pick(&[1, 2, 3]);
    let head_dim = random.pick(&[5, 16, 33, 40, 64, 80, 128]) & !1 | random.below(2);
    let head_dim = head_dim.max(4);
    Shape {
        heads: kv_heads * (1 + random.below(8)),
        kv_heads,
        head_dim,
        hidden: random.pick(&[64, 96, 160]),
        feed_forward: random.pick(&[32, 64, 96, 128]),
        vocabulary: random.pick(&[40, 97, 130]),
        block_size: random.pick(&[16, 32, 64, 128, 256]),
        blocks: 120,
        layers: 2,
        kv_type: KvType::F32,
        rope_style: random.pick(&[RopeStyle::Adjacent, RopeStyle::Half]),
        rope_dim: (random.pick(&[head_dim, head_dim, head_dim / 2]) & !1).max(2),
        activation: random.pick(&[Activation::Silu, Activation::Gelu]),
        limits: limits(700, 120),
    }
}

/// Per step: sequence, first position, rows.
type Steps = Vec<Vec<(usize, usize, usize)>>;

/// First all the past, then a ragged batch of prefill and decode rows.
fn random_steps(random: &mut Random, shape: &Shape) -> (Tables, Steps) {
    let lengths = [1, 2, 15, 16, 17, 31, 33, 64, 255, 256, 257];
    let sequences = 1 + random.below(4);
    let mut past: Vec<usize> = (0..sequences).map(|_| if random.below(3) == 0 { 0 } else { random.pick(&lengths) }).collect();
    let mut now: Vec<usize> = (0..sequences).map(|_| if random.below(2) == 0 { 1 } else { random.pick(&lengths[..8]) }).collect();
    // Keep within the limits of a step, and the reference quick.
    while past.iter().sum::<usize>() > 550 {
        past.pop();
        now.pop();
    }
    let keys: Vec<usize> = past.iter().zip(&now).map(|(p, n)| p + n).collect();
    let blocks: usize = keys.iter().map(|k| k.div_ceil(shape.block_size)).sum();
    assert!(blocks <= shape.blocks);
    let tables = Tables::new(random, shape, &keys);
    let first: Vec<_> = past.iter().enumerate().filter(|(_, p)| **p > 0).map(|(s, &p)| (s, 0, p)).collect();
    let second = past.iter().zip(&now).enumerate().map(|(s, (&p, &n))| (s, p, p + n)).collect();
    (tables, if first.is_empty() { vec![second] } else { vec![first, second] })
}

struct Worst(Vec<(&'static str, f32, f32)>);

impl Worst {
    fn note(&mut self, quantised: [(&'static str, f32); 8], exact: [(&'static str, f32); 8], context: &str) {
        for ((name, d), (_, e)) in quantised.into_iter().zip(exact) {
            assert!(d <= BOUND, "{name}: {d:e} from the reference; {context}");
            match self.0.iter_mut().find(|w| w.0 == name) {
                Some(w) => (w.1, w.2) = (w.1.max(d), w.2.max(e)),
                None => self.0.push((name, d, e)),
            }
        }
    }

    fn print(&self, title: &str) {
        for (name, d, e) in &self.0 {
            println!("{title:<10} {name:<18} {d:.1e} from quantised reference, {e:.1e} from exact");
        }
    }
}

fn compare(isa: Isa, threads: usize, weights: &Weights, plans: &[StepPlan], worst: &mut Worst, context: &str) {
    let mut fast = Model::new(cpu(isa, threads), weights).unwrap();
    let mut slow = Model::new(Reference::new(Numerics::Quantised), weights).unwrap();
    let mut exact = Model::new(Reference::new(Numerics::Exact), weights).unwrap();
    for plan in plans {
        let want = slow.step(plan, None).unwrap();
        let real = exact.step(plan, Some(&want)).unwrap();
        let got = fast.step(plan, Some(&want)).unwrap();
        worst.note(distances(&weights.shape, &got, &want), distances(&weights.shape, &got, &real), context);
    }
}

fn supported(isa: Isa) -> Vec<TensorType> {
    let backend = cpu(isa, 1);
    TensorType::ALL
        .into_iter()
        .filter(|&t| backend.linear(&[Tensor::random(&mut Random(1), t, 32, 256, 1.0).view()], None, Precision::Byte).is_ok())
        .collect()
}

#[test]
fn every_weight_type() {
    for isa in Isa::all_available() {
        let types = supported(isa);
        for needed in [
            TensorType::F32,
            TensorType::F16,
            TensorType::BF16,
            TensorType::Q8_0,
            TensorType::Q4_0,
            TensorType::Q4_1,
            TensorType::Q4_K,
            TensorType::Q6_K,
        ] {
            assert!(types.contains(&needed), "{}: {needed:?}", isa.name());
        }
        let mut worst = Worst(Vec::new());
        for (i, &t) in types.iter().enumerate() {
            let random = &mut Random(100 + i as u64);
            let shape = Shape { heads: 8, kv_heads: 4, head_dim: 32, hidden: 256, feed_forward: 256, ..random_shape(random) };
            let shape = Shape { rope_dim: 32, ..shape };
            // The same type throughout, then mixed with another (parts of one linear may differ).
            let other = types[(i + 3) % types.len()];
            for (types, adapters) in [([t, t], false), ([t, other], true)] {
                let weights = Weights::random(random, shape, types, t, adapters);
                let tables = Tables::new(random, &shape, &[20, 3]);
                let adapter = |s: usize| if adapters { s as i32 } else { -1 };
                let plans = [tables.plan(&shape, &[(0, 0, 7), (1, 0, 2)], adapter), tables.plan(&shape, &[(1, 2, 3), (0, 7, 20)], adapter)];
                compare(isa, 2, &weights, &plans, &mut worst, &format!("{} {types:?} {shape:?}", isa.name()));
            }
        }
        worst.print(isa.name());
    }
}

#[test]
fn random_shapes_and_ragged_batches() {
    for isa in Isa::all_available() {
        let mut worst = Worst(Vec::new());
        for seed in 0..40 {
            let random = &mut Random(seed);
            let mut shape = random_shape(random);
            if shape.heads * shape.head_dim > 1024 {
                shape.heads = shape.kv_heads;
            }
            // Widths of all kinds need float weights; the quantised types have their own test.
            let types =
                [random.pick(&[TensorType::F32, TensorType::F16, TensorType::BF16]), random.pick(&[TensorType::F32, TensorType::F16])];
            let adapters = random.below(2) == 0;
            let weights = Weights::random(random, shape, types, TensorType::Q8_0, adapters);
            let (tables, steps) = random_steps(random, &shape);
            let plans: Vec<_> = steps.iter().map(|chunks| tables.plan(&shape, chunks, |s| s as i32 % 3 - 1)).collect();
            compare(isa, 1 + seed as usize % 3, &weights, &plans, &mut worst, &format!("{} seed {seed} {shape:?} {steps:?}", isa.name()));
        }
        worst.print(isa.name());
    }
}

/// With the identity as projection and no rounding before it, both backends store the same bits, in either type.
#[test]
fn attention_from_the_same_cache() {
    for isa in Isa::all_available() {
        let mut worst = Worst(Vec::new());
        for seed in 0..40 {
            let random = &mut Random(1000 + seed);
            let mut shape = random_shape(random);
            shape.heads = shape.kv_heads * random.pick(&[1, 2, 3, 4, 7, 8]);
            while shape.qkv_rows() > 900 {
                shape.heads = shape.kv_heads;
                shape.head_dim -= shape.head_dim / 2;
                shape.rope_dim = shape.head_dim & !1;
            }
            shape.hidden = shape.qkv_rows();
            shape.kv_type = random.pick(&KvType::ALL);
            let mut weights = Weights::random(random, shape, [TensorType::F32; 2], TensorType::F32, false);
            weights.qkv = vec![Tensor::identity(shape.hidden)];
            weights.qkv_bias = None;
            let (tables, steps) = random_steps(random, &shape);
            let plans: Vec<_> = steps.iter().map(|chunks| tables.plan(&shape, chunks, no_adapter)).collect();
            compare(isa, 1 + seed as usize % 3, &weights, &plans, &mut worst, &format!("{} seed {seed} {shape:?} {steps:?}", isa.name()));
            let q = worst.0.iter().find(|w| w.0 == "qkv_rope_write").unwrap().1;
            assert_eq!(q, 0.0, "norm and rope must have the reference's bits; seed {seed}");
        }
        worst.print(isa.name());
    }
}

#[test]
fn copied_blocks_read_as_the_original() {
    for isa in Isa::all_available() {
        let random = &mut Random(5);
        let shape = Shape { block_size: 16, kv_type: KvType::F16, ..random_shape(random) };
        let weights = Weights::random(random, shape, [TensorType::F32; 2], TensorType::F32, false);
        let mut tables = Tables::new(random, &shape, &[40, 16]);
        let mut model = Model::new(cpu(isa, 2), &weights).unwrap();
        model.step(&tables.plan(&shape, &[(0, 0, 39)], no_adapter), None).unwrap();
        let want = model.step(&tables.plan(&shape, &[(0, 39, 40)], no_adapter), None).unwrap();
        let (original, copy) = (tables.tables[0][1], tables.tables[1][0]);
        tables.tables[0][1] = copy;
        let mut plan = tables.plan(&shape, &[(0, 39, 40)], no_adapter);
        let before = model.step(&plan, None).unwrap();
        assert_ne!(before.attention, want.attention, "the other block was empty");
        plan.block_copies = vec![(original, copy)];
        assert_eq!(model.step(&plan, None).unwrap().attention, want.attention);
    }
}

#[test]
fn malformed_plans_and_shapes_are_refused_by_name() {
    let random = &mut Random(9);
    let shape = random_shape(random);
    let weights = Weights::random(random, shape, [TensorType::F32; 2], TensorType::F32, false);
    let tables = Tables::new(random, &shape, &[20, 9]);
    let mut model = Model::new(cpu(Isa::detect(), 2), &weights).unwrap();
    let good = tables.plan(&shape, &[(0, 0, 20), (1, 0, 9)], no_adapter);
    assert!(model.step(&good, None).is_ok());
    type Break = fn(&mut StepPlan);
    let breaks: [(&str, Break); 12] = [
        ("inputs", |p| p.inputs[3] = 1 << 20),
        ("inputs", |p| p.inputs[3] = 1 << 31 | 5000),
        ("positions", |p| p.positions[2] = 9),
        ("positions", |p| p.positions.truncate(3)),
        ("adapters", |p| p.adapters[0] = -2),
        ("row_starts", |p| p.row_starts[1] = 40),
        ("context_lens", |p| p.context_lens[1] = 3),
        ("slots", |p| p.groups[0].slots[1] = u32::MAX),
        ("block_tables", |p| p.groups[0].block_tables[0] = 1 << 20),
        ("block_tables", |p| p.groups[0].block_tables.truncate(1)),
        ("logit_rows", |p| p.logit_rows[1] = 0),
        ("block_copies", |p| p.block_copies.push((0, 1 << 20))),
    ];
    for (name, break_it) in breaks {
        let mut plan = good.clone();
        break_it(&mut plan);
        let error = model.step(&plan, None).err().unwrap_or_else(|| panic!("{name} was accepted")).to_string();
        assert!(error.contains(name), "{name}: {error}");
    }
    assert!(model.step(&good, None).is_ok(), "good plans still run");
}
