//! Attention and sampling beside what this machine can do at most, measured in the same run.
//!
//! `cargo bench -p quire-kernels --bench attention [-- FILTER]`. Attention: multiply-accumulates a second over all threads, as a
//! ratio to a loop of f32 multiply-adds; for decode also bytes of KV a second, as a ratio to reading memory. Sampling: bytes of
//! logits a second, as a ratio to the same.

#![allow(clippy::unwrap_used)] // A benchmark may stop.

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use quire_kernels::{
    backend::{AttentionArgs, Backend, KeysValues, KvShape, KvType, Linear, Mask, Norm, Precision, QkvArgs, WorkspaceShape},
    cpu::{CpuBackend, CpuOptions, Isa, pool::Pool},
    plan::{GroupPlan, NO_TOKEN, SamplingPlan, StepLimits, StepPlan},
    quant::{TensorType, TensorView},
};

const COLUMNS: usize = 32;
const BLOCK: usize = 32;

/// Shortest time of a call, over at least 5 calls and about 200 ms.
fn seconds(mut call: impl FnMut()) -> f64 {
    let start = Instant::now();
    let (mut best, mut calls) = (f64::MAX, 0);
    while calls < 5 || start.elapsed() < Duration::from_millis(200) {
        let begin = Instant::now();
        call();
        best = best.min(begin.elapsed().as_secs_f64());
        calls += 1;
    }
    best
}

/// Bytes a second that all threads read from memory.
fn read_ceiling(pool: &Pool) -> f64 {
    let words = vec![1_u64; (256 << 20) / 8 * pool.threads()];
    let share = words.len() / pool.threads();
    let time = seconds(|| {
        pool.run(|thread| {
            let mut sums = [0_u64; 16];
            for chunk in words[thread * share..][..share].as_chunks::<16>().0 {
                sums.iter_mut().zip(chunk).for_each(|(sum, word)| *sum = sum.wrapping_add(*word));
            }
            black_box(sums);
        });
    });
    size_of_val(words.as_slice()) as f64 / time
}

#[cfg(target_arch = "x86_64")]
mod peak {
    //! Independent multiply-adds, as many as hide their latency.
    use std::{arch::x86_64::*, hint::black_box};

    macro_rules! peak {
        ($name:ident, $features:literal, $set:ident, $fma:ident) => {
            #[target_feature(enable = $features)]
            pub unsafe fn $name(steps: u64) {
                let x = black_box($set(1.0));
                let mut sums = [$set(0.0); 12];
                for _ in 0..steps {
                    for sum in &mut sums {
                        *sum = $fma(x, x, *sum);
                    }
                }
                black_box(sums);
            }
        };
    }
    peak!(avx512, "avx512f", _mm512_set1_ps, _mm512_fmadd_ps);
    peak!(avx2, "avx2,fma", _mm256_set1_ps, _mm256_fmadd_ps);
}

/// f32 multiply-accumulates a second of all threads.
fn arithmetic_ceiling(isa: Isa, pool: &Pool) -> Option<f64> {
    const STEPS: u64 = 1 << 20;
    let wide = isa > Isa::Avx2;
    if isa == Isa::Portable || cfg!(not(target_arch = "x86_64")) {
        return None;
    }
    let time = seconds(|| {
        pool.run(|_| {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the level was found.
            unsafe {
                if wide { peak::avx512(STEPS) } else { peak::avx2(STEPS) }
            }
        });
    });
    Some((STEPS * 12 * if wide { 16 } else { 8 } * pool.threads() as u64) as f64 / time)
}

#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    sequences: usize,
    /// Keys of a sequence, and how many of the last are rows of the step.
    keys: usize,
    rows: usize,
}

const CASES: [Case; 8] = [
    Case { name: "9/3×64 decode 1×1500", heads: 9, kv_heads: 3, head_dim: 64, sequences: 1, keys: 1500, rows: 1 },
    Case { name: "9/3×64 decode 16×600", heads: 9, kv_heads: 3, head_dim: 64, sequences: 16, keys: 600, rows: 1 },
    Case { name: "9/3×64 decode 1×8000", heads: 9, kv_heads: 3, head_dim: 64, sequences: 1, keys: 8000, rows: 1 },
    Case { name: "9/3×64 prefill 1500", heads: 9, kv_heads: 3, head_dim: 64, sequences: 1, keys: 1500, rows: 1500 },
    Case { name: "9/3×64 prefill 256 at 1500", heads: 9, kv_heads: 3, head_dim: 64, sequences: 1, keys: 1500, rows: 256 },
    Case { name: "32/8×128 decode 1×4000", heads: 32, kv_heads: 8, head_dim: 128, sequences: 1, keys: 4000, rows: 1 },
    Case { name: "32/8×128 prefill 512", heads: 32, kv_heads: 8, head_dim: 128, sequences: 1, keys: 512, rows: 512 },
    Case { name: "16/16×80 prefill 512", heads: 16, kv_heads: 16, head_dim: 80, sequences: 1, keys: 512, rows: 512 },
];

fn step(case: &Case, from: usize) -> StepPlan {
    let stride = case.keys.div_ceil(BLOCK);
    let mut plan = StepPlan { row_starts: vec![0], groups: vec![GroupPlan { stride, ..GroupPlan::default() }], ..StepPlan::default() };
    plan.sampling.bias_starts.push(0);
    plan.sampling.history_starts.push(0);
    for sequence in 0..case.sequences {
        let table = |i: usize| (sequence * stride + i) as u32;
        for position in from..case.keys {
            plan.inputs.push(0);
            plan.positions.push(position as u32);
            plan.adapters.push(-1);
            plan.groups[0].slots.push(table(position / BLOCK) * BLOCK as u32 + (position % BLOCK) as u32);
        }
        plan.row_starts.push(plan.inputs.len() as u32);
        plan.context_lens.push(case.keys as u32);
        plan.groups[0].block_tables.extend((0..stride).map(table));
    }
    plan
}

/// Multiply-accumulates and bytes of KV of one call, and its time.
fn attention(isa: Isa, threads: usize, case: &Case) -> (f64, f64, f64) {
    let backend = CpuBackend::new(CpuOptions { threads, isa: Some(isa) }).unwrap();
    let &Case { heads, kv_heads, head_dim, sequences, keys, rows, .. } = case;
    let stride = keys.div_ceil(BLOCK);
    let shape = KvShape {
        layers: 1,
        blocks: stride * sequences,
        block_size: BLOCK,
        kv_heads,
        key_dim: head_dim,
        value_dim: head_dim,
        shared_values: false,
        kv_type: KvType::F16,
    };
    let limits = StepLimits { rows: sequences * keys, sequences, logit_rows: 1, blocks_per_sequence: stride, top_logprobs: 0 };
    let qkv_rows = (heads + 2 * kv_heads) * head_dim;
    let noise = |n: usize| (0..n).map(|i| ((i * 7919 + 13) % 1009) as f32 / 504.5 - 1.0).collect::<Vec<f32>>();
    let bytes: Vec<u8> = noise(qkv_rows * COLUMNS).iter().flat_map(|v| v.to_le_bytes()).collect();
    let linear = backend
        .linear(&[TensorView { tensor_type: TensorType::F32, rows: qkv_rows, columns: COLUMNS, data: &bytes }], None, Precision::Byte)
        .unwrap();
    let mut kv = backend.kv(&shape).unwrap();
    let mut inputs = backend.inputs(&limits, 1).unwrap();
    let workspace = WorkspaceShape {
        limits,
        max_in: COLUMNS,
        max_out: qkv_rows,
        vocabulary: 1,
        heads,
        key_dim: head_dim,
        value_dim: head_dim,
        latent_queries: 0,
        copied_values: 0,
        moe: None,
    };
    let mut workspace = backend.workspace(&workspace).unwrap();
    let hidden = backend.buffer_from(&noise(sequences * keys * COLUMNS)).unwrap();
    let norm = backend.buffer_from(&[1.0; COLUMNS]).unwrap();
    let mut q = backend.buffer(sequences * keys * heads * head_dim).unwrap();
    let mut out = backend.buffer(sequences * rows * heads * head_dim).unwrap();
    let fill = QkvArgs {
        norm: Some(Norm::rms(&norm, 1e-5)),
        linear: Linear::plain(&linear),
        clamp: None,
        query_norm: None,
        key_norm: None,
        value_norm: None,
        rope: None,
        query_scale: None,
        keys_values: KeysValues::Projected,
        heads,
        kv_heads,
        key_dim: head_dim,
        value_dim: head_dim,
        group: 0,
        layer: 0,
    };
    backend.upload(&step(case, 0), &mut inputs).unwrap();
    backend.qkv_rope_write(&inputs, &fill, &hidden, &mut kv, &mut q, &mut workspace).unwrap();
    backend.upload(&step(case, keys - rows), &mut inputs).unwrap();
    let args = AttentionArgs {
        heads,
        kv_heads,
        key_dim: head_dim,
        value_dim: head_dim,
        scale: 0.1,
        mask: Mask::Causal,
        softcap: None,
        sinks: None,
        group: 0,
        layer: 0,
    };
    let time = seconds(|| backend.attention(&inputs, &args, &q, &kv, &mut out, &mut workspace).unwrap());
    let seen: usize = (keys - rows + 1..=keys).sum();
    let macs = 2 * sequences * heads * head_dim * seen;
    let bytes = 2 * sequences * kv_heads * head_dim * keys * 2;
    (macs as f64, bytes as f64, time)
}

fn sampling(isa: Isa, threads: usize, read: f64) {
    let (vocabulary, rows) = (49_152, 16);
    let backend = CpuBackend::new(CpuOptions { threads, isa: Some(isa) }).unwrap();
    let limits = StepLimits { rows, sequences: rows, logit_rows: rows, blocks_per_sequence: 1, top_logprobs: 20 };
    let workspace = WorkspaceShape {
        limits,
        max_in: 1,
        max_out: 1,
        vocabulary,
        heads: 1,
        key_dim: 16,
        value_dim: 16,
        latent_queries: 0,
        copied_values: 0,
        moe: None,
    };
    let (mut inputs, mut sampled) = (backend.inputs(&limits, vocabulary).unwrap(), backend.sampled(&limits).unwrap());
    let mut workspace = backend.workspace(&workspace).unwrap();
    // Like a language model's: most far below a few.
    let logits: Vec<f32> =
        (0..vocabulary * rows).map(|i| (((i * 7919) % 10_007) as f32 / 10_007.0).powi(12) * 25.0 + (i % 83) as f32 * 0.03).collect();
    let mut logits = backend.buffer_from(&logits).unwrap();
    for (name, temperature, top_k, top_p, min_p, logprobs) in [
        ("greedy", 0.0, 0, 1.0, 0.0, -1),
        ("greedy, 5 logprobs", 0.0, 0, 1.0, 0.0, 5),
        ("temperature 1", 1.0, 0, 1.0, 0.0, -1),
        ("top-p 0.95", 0.8, 0, 0.95, 0.0, -1),
        ("top-k 40", 0.8, 40, 1.0, 0.0, -1),
        ("min-p 0.05", 0.8, 0, 1.0, 0.05, -1),
        ("flat, temperature 1000", 1000.0, 0, 1.0, 0.0, -1),
    ] {
        for rows in [1, 16] {
            let plan = StepPlan {
                inputs: vec![0; rows],
                positions: vec![0; rows],
                adapters: vec![-1; rows],
                row_starts: (0..=rows as u32).collect(),
                context_lens: vec![1; rows],
                logit_rows: (0..rows as u32).collect(),
                sampling: SamplingPlan {
                    targets: vec![NO_TOKEN; rows],
                    temperature: vec![temperature; rows],
                    top_k: vec![top_k; rows],
                    top_p: vec![top_p; rows],
                    min_p: vec![min_p; rows],
                    presence: vec![0.0; rows],
                    frequency: vec![0.0; rows],
                    repetition: vec![1.0; rows],
                    seed: (0..rows as u64).collect(),
                    draw: vec![0; rows],
                    logprobs: vec![logprobs; rows],
                    bias_starts: vec![0; rows + 1],
                    history_starts: vec![0; rows + 1],
                    mask_rows: vec![-1; rows],
                    ..SamplingPlan::default()
                },
                ..StepPlan::default()
            };
            backend.upload(&plan, &mut inputs).unwrap();
            let time = seconds(|| backend.sample(&inputs, &mut logits, &mut sampled, &mut workspace).unwrap());
            let bytes = (rows * vocabulary * 4) as f64 / time;
            println!("  {name:24} {rows:>2} rows {:>8.1} µs  {:>6.1} GB/s ({:.2} of reading)", time * 1e6, bytes / 1e9, bytes / read);
        }
    }
}

fn main() {
    let filter = std::env::args().skip(1).find(|a| !a.starts_with('-')).unwrap_or_default();
    let threads = quire_kernels::cpu::pool::default_threads();
    let mut read = 1.0;
    for threads in if threads > 1 { vec![1, threads] } else { vec![1] } {
        let pool = Pool::new(threads).unwrap();
        read = read_ceiling(&pool);
        println!("{threads} threads read {:.1} GB/s", read / 1e9);
        for isa in Isa::all_available().into_iter().rev() {
            let peak = arithmetic_ceiling(isa, &pool);
            println!("{} at most {:.0} GMAC/s", isa.name(), peak.unwrap_or(f64::NAN) / 1e9);
            for case in &CASES {
                if !format!("{} {}", isa.name(), case.name).contains(&filter) || (isa == Isa::Portable && case.rows > 300) {
                    continue;
                }
                let (macs, bytes, time) = attention(isa, threads, case);
                let (rate, speed) = (macs / time, bytes / time);
                print!("  {:28} {:>9.1} µs {:>7.1} GMAC/s ({:.2})", case.name, time * 1e6, rate / 1e9, rate / peak.unwrap_or(f64::NAN));
                println!("{}", if case.rows == 1 { format!("  {:>5.1} GB/s ({:.2})", speed / 1e9, speed / read) } else { String::new() });
            }
        }
    }
    println!("sampling, {threads} threads, {}", Isa::detect().name());
    sampling(Isa::detect(), threads, read);
}
