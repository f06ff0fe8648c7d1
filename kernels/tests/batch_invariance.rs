//! A row's bits depend on nothing but its sequence: not on what is computed beside it, how its prefill is cut, or on how many
//! threads.

#![allow(clippy::unwrap_used, clippy::panic, clippy::needless_range_loop)] // Helpers of tests.

mod common;

use common::{Model, Random, Shape, Tables, Weights, limits, no_adapter};
use quire_kernels::{
    backend::{Activation, Backend, KvType, RopeStyle},
    cpu::{CpuBackend, CpuOptions, Isa},
    quant::TensorType,
};

/// Per position of each sequence: bits of attention, hidden and logits.
type Rows = Vec<Vec<Option<Vec<u32>>>>;

fn shape(kv_type: KvType, block_size: usize, kv_heads: usize, heads: usize) -> Shape {
    Shape {
        heads,
        kv_heads,
        head_dim: 40,
        hidden: 128,
        feed_forward: 96,
        vocabulary: 70,
        block_size,
        blocks: 1600 / block_size,
        layers: 1,
        kv_type,
        rope_style: RopeStyle::Half,
        rope_dim: 40,
        activation: Activation::Silu,
        limits: limits(1300, 1600 / block_size),
    }
}

/// Runs the steps on a fresh cache and gathers what each row gave.
fn run(isa: Isa, threads: usize, weights: &Weights, tables: &Tables, lengths: &[usize], steps: &[Vec<(usize, usize, usize)>]) -> Rows {
    let backend = CpuBackend::new(CpuOptions { threads, isa: Some(isa) }).unwrap();
    let mut model = Model::new(backend, weights).unwrap();
    let mut rows: Rows = lengths.iter().map(|&n| vec![None; n]).collect();
    let shape = weights.shape;
    let adapters = weights.adapters.is_some();
    for chunks in steps {
        let plan = tables.plan(&shape, chunks, |s| if adapters { s as i32 % 3 - 1 } else { no_adapter(s) });
        let record = model.step(&plan, None).unwrap();
        let mut row = 0;
        for &(sequence, from, to) in chunks {
            for position in from..to {
                let part = |all: &[f32], width: usize| all[row * width..][..width].to_vec();
                let mut bits: Vec<u32> = Vec::new();
                for values in [
                    part(&record.attention, shape.heads * shape.head_dim),
                    part(&record.after_down, shape.hidden),
                    part(&record.logits, shape.vocabulary),
                ] {
                    assert!(values.iter().all(|v| v.is_finite()));
                    bits.extend(values.iter().map(|v| v.to_bits()));
                }
                rows[sequence][position] = Some(bits);
                row += 1;
            }
        }
    }
    rows
}

fn in_chunks(sequence: usize, length: usize, chunk: usize) -> Vec<Vec<(usize, usize, usize)>> {
    (0..length).step_by(chunk).map(|from| vec![(sequence, from, length.min(from + chunk))]).collect()
}

/// All sequences together: each in its own chunk size, decode rows among prefill rows.
fn mixed(lengths: &[usize], chunks: &[usize]) -> Vec<Vec<(usize, usize, usize)>> {
    let mut done = vec![0; lengths.len()];
    let mut steps = Vec::new();
    while done.iter().zip(lengths).any(|(d, l)| d < l) {
        let mut step = Vec::new();
        for s in 0..lengths.len() {
            let end = lengths[s].min(done[s] + chunks[s]);
            if end > done[s] {
                step.push((s, done[s], end));
                done[s] = end;
            }
        }
        steps.push(step);
    }
    steps
}

fn same(a: &Rows, b: &Rows, what: &str) {
    for (sequence, (a, b)) in a.iter().zip(b).enumerate() {
        for (position, (a, b)) in a.iter().zip(b).enumerate() {
            if let (Some(a), Some(b)) = (a, b) {
                assert!(a == b, "{what}: sequence {sequence}, position {position}");
            }
        }
    }
}

fn check(isa: Isa, weights: &Weights, lengths: &[usize], random: &mut Random) {
    let tables = Tables::new(random, &weights.shape, lengths);
    let whole: Vec<_> = (0..lengths.len()).flat_map(|s| in_chunks(s, lengths[s], usize::MAX)).collect();
    let want = run(isa, 1, weights, &tables, lengths, &whole);
    for threads in [2, 3] {
        same(&want, &run(isa, threads, weights, &tables, lengths, &whole), &format!("{} {threads} threads", isa.name()));
    }
    // The portable level is slow, and has the same code around it.
    let sizes: &[usize] = if isa == Isa::Portable { &[7, 300] } else { &[1, 7, 16, 300] };
    for &chunk in sizes {
        let steps: Vec<_> = (0..lengths.len()).flat_map(|s| in_chunks(s, lengths[s], chunk)).collect();
        same(&want, &run(isa, 2, weights, &tables, lengths, &steps), &format!("{} chunks of {chunk}", isa.name()));
    }
    let chunks: Vec<usize> = (0..lengths.len()).map(|s| [300, 1, 7, 16][s % 4]).collect();
    same(&want, &run(isa, 3, weights, &tables, lengths, &mixed(lengths, &chunks)), &format!("{} mixed batch", isa.name()));
}

#[test]
fn same_bits_quantised_halves_small_blocks() {
    for isa in Isa::all_available() {
        let random = &mut Random(1);
        // Attention widths of 40 · 8 = 320 fit blocks of 32 columns, and rank-4 adapters are f32.
        let weights = Weights::random(random, shape(KvType::F16, 16, 2, 8), [TensorType::Q4_1, TensorType::Q8_0], TensorType::Q8_0, true);
        check(isa, &weights, &[530, 40, 258, 17], random);
    }
}

#[test]
fn same_bits_floats_large_blocks() {
    for isa in Isa::all_available() {
        let random = &mut Random(2);
        let weights = Weights::random(random, shape(KvType::F32, 64, 1, 4), [TensorType::F32, TensorType::F16], TensorType::BF16, false);
        check(isa, &weights, &[300, 600, 65], random);
    }
}

/// What lies in a block behind a sequence's end, or in the rows of its neighbours, must not matter.
#[test]
fn a_row_with_infinities_poisons_no_other() {
    for isa in Isa::all_available() {
        let random = &mut Random(3);
        let shape = shape(KvType::F16, 64, 2, 8);
        let weights = Weights::random(random, shape, [TensorType::F32; 2], TensorType::F32, false);
        // Token 0 alone has values beyond half precision: its keys and values are infinite.
        let poisoned = {
            let mut random = Random(3);
            let mut weights = Weights::random(&mut random, shape, [TensorType::F32; 2], TensorType::F32, false);
            weights.norm = vec![1e6; shape.hidden];
            weights
        };
        let tables = Tables::new(random, &shape, &[100]);
        let backend = || CpuBackend::new(CpuOptions { threads: 2, isa: Some(isa) }).unwrap();
        let plan = tables.plan(&shape, &[(0, 0, 50)], no_adapter);
        let mut clean = Model::new(backend(), &weights).unwrap();
        let want = clean.step(&plan, None).unwrap().attention;
        let mut dirty = Model::new(backend(), &poisoned).unwrap();
        dirty.step(&tables.plan(&shape, &[(0, 0, 100)], no_adapter), None).unwrap();
        // The same cache, now with the clean weights: only positions 0 to 49 are written again.
        let mut model = Model::new(backend(), &weights).unwrap();
        model.kv = dirty.kv;
        assert_eq!(model.step(&plan, None).unwrap().attention, want, "{}", isa.name());
        // One bad row in the middle of a prefill: rows before it have the same bits.
        let width = shape.heads * shape.head_dim;
        let mut fed = clean.step(&plan, None).unwrap();
        fed.embed[30 * shape.hidden] = f32::NAN;
        let got = clean.step(&plan, Some(&fed)).unwrap().attention;
        assert_eq!(got[..30 * width], want[..30 * width], "{}", isa.name());
        assert!(got[31 * width].is_nan());
        let _ = clean.backend.info();
    }
}
