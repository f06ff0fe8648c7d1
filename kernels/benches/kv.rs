//! Decode attention by type of cache: how much of the bytes that a smaller type saves comes back as time.
//!
//! `cargo bench -p quire-kernels --bench kv [-- FILTER]`. Types take turns call by call, so that what else the machine does hits
//! all alike; medians. Calls go round as many layers as hold 192 MiB of halves: nothing is left in the caches of a core, as in a
//! model's step. Printed beside each time: the ratio to f16 (below 1: faster), and bytes of KV a second as a ratio to reading memory.

#![allow(clippy::unwrap_used)] // A benchmark may stop.

use std::{hint::black_box, time::Instant};

use quire_kernels::{
    backend::{AttentionArgs, Backend, KvShape, KvType, Mask, WorkspaceShape},
    cpu::{CpuBackend, CpuKv, CpuOptions, Isa, pool::Pool},
    plan::{GroupPlan, StepLimits, StepPlan},
};

const BLOCK: usize = 16;
const ROUNDS: usize = 41;
const SPREAD: usize = 192 << 20;

/// Bytes a second that all threads read from memory: the best of some runs.
fn read_ceiling(pool: &Pool) -> f64 {
    let words = vec![1_u64; (128 << 20) / 8 * pool.threads()];
    let share = words.len() / pool.threads();
    let best = (0..5).map(|_| {
        let start = Instant::now();
        pool.run(|thread| {
            let mut sums = [0_u64; 16];
            for chunk in words[thread * share..][..share].as_chunks::<16>().0 {
                sums.iter_mut().zip(chunk).for_each(|(sum, word)| *sum = sum.wrapping_add(*word));
            }
            black_box(sums);
        });
        start.elapsed().as_secs_f64()
    });
    size_of_val(words.as_slice()) as f64 / best.fold(f64::MAX, f64::min)
}

#[derive(Clone, Copy)]
struct Case {
    heads: usize,
    kv_heads: usize,
    dim: usize,
    sequences: usize,
    keys: usize,
}

impl Case {
    fn shape(&self, kv_type: KvType) -> KvShape {
        let stride = self.keys.div_ceil(BLOCK);
        KvShape {
            layers: 1,
            blocks: stride * self.sequences,
            block_size: BLOCK,
            kv_heads: self.kv_heads,
            key_dim: self.dim,
            value_dim: self.dim,
            shared_values: false,
            kv_type,
        }
    }

    fn layers(&self) -> usize {
        let kv = self.shape(KvType::F16);
        (SPREAD / (kv.block_bytes() * kv.blocks)).clamp(2, 400)
    }

    /// Rows from position `from` on of every sequence.
    fn step(&self, from: usize) -> StepPlan {
        let stride = self.keys.div_ceil(BLOCK);
        let mut plan = StepPlan { row_starts: vec![0], groups: vec![GroupPlan { stride, ..GroupPlan::default() }], ..StepPlan::default() };
        plan.sampling.bias_starts.push(0);
        plan.sampling.history_starts.push(0);
        for sequence in 0..self.sequences {
            // Neighbouring blocks of a sequence lie apart, as in a pool that has been used.
            let table = |i: usize| ((i * 7 % stride.max(1)) * self.sequences + sequence) as u32;
            let table = |i: usize| if stride.is_multiple_of(7) { (sequence * stride + i) as u32 } else { table(i) };
            for position in from..self.keys {
                plan.inputs.push(0);
                plan.positions.push(position as u32);
                plan.adapters.push(-1);
                plan.groups[0].slots.push(table(position / BLOCK) * BLOCK as u32 + (position % BLOCK) as u32);
            }
            plan.row_starts.push(plan.inputs.len() as u32);
            plan.context_lens.push(self.keys as u32);
            plan.groups[0].block_tables.extend((0..stride).map(table));
        }
        plan
    }
}

fn noise(n: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 7919 + 13) % 1009) as f32 / 504.5 - 1.0).collect()
}

/// Median seconds of a call per type.
fn medians(backend: &CpuBackend, case: &Case) -> [f64; 4] {
    let &Case { heads, kv_heads, dim, sequences, keys } = case;
    let limits =
        StepLimits { rows: sequences * keys, sequences, logit_rows: 1, blocks_per_sequence: keys.div_ceil(BLOCK), top_logprobs: 0 };
    let mut inputs = backend.inputs(&limits, 1).unwrap();
    let workspace = StepLimits { rows: sequences, ..limits };
    let workspace = WorkspaceShape {
        limits: workspace,
        max_in: 32,
        max_out: 32,
        vocabulary: 1,
        heads,
        key_dim: dim,
        value_dim: dim,
        copied_values: 0,
        latent_queries: 0,
        moe: None,
    };
    let mut workspace = backend.workspace(&workspace).unwrap();
    let layers = case.layers();
    let stored = backend.buffer_from(&noise(sequences * keys * kv_heads * dim)).unwrap();
    backend.upload(&case.step(0), &mut inputs).unwrap();
    let mut caches: Vec<CpuKv> = KvType::ALL.iter().map(|&t| backend.kv(&KvShape { layers, ..case.shape(t) }).unwrap()).collect();
    for kv in &mut caches {
        for layer in 0..layers {
            backend.write_kv(&inputs, 0, layer, &stored, Some(&stored), kv).unwrap();
        }
    }
    backend.upload(&case.step(keys - 1), &mut inputs).unwrap();
    let q = backend.buffer_from(&noise(sequences * heads * dim)).unwrap();
    let mut out = backend.buffer(sequences * heads * dim).unwrap();
    let mut times = [const { Vec::new() }; 4];
    for round in 0..ROUNDS {
        for (kv, times) in caches.iter().zip(&mut times) {
            let args = AttentionArgs {
                heads,
                kv_heads,
                key_dim: dim,
                value_dim: dim,
                scale: 0.1,
                mask: Mask::Causal,
                softcap: None,
                sinks: None,
                group: 0,
                layer: round % layers,
            };
            let start = Instant::now();
            backend.attention(&inputs, &args, &q, kv, &mut out, &mut workspace).unwrap();
            times.push(start.elapsed().as_secs_f64());
        }
    }
    times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    })
}

fn main() {
    let filter = std::env::args().skip(1).find(|a| !a.starts_with('-')).unwrap_or_default();
    let all = quire_kernels::cpu::pool::default_threads();
    for threads in if all > 1 { vec![1, all] } else { vec![1] } {
        let read = read_ceiling(&Pool::new(threads).unwrap());
        println!("{threads} threads read {:.1} GB/s", read / 1e9);
        for isa in Isa::all_available().into_iter().rev().filter(|&isa| isa != Isa::Portable) {
            let backend = CpuBackend::new(CpuOptions { threads, isa: Some(isa) }).unwrap();
            for (heads, kv_heads, dim) in [(9, 3, 64), (32, 8, 128), (8, 8, 64)] {
                for (sequences, keys) in [(1, 512), (1, 2048), (1, 8192), (1, 32_768), (16, 600), (8, 4096)] {
                    let case = Case { heads, kv_heads, dim, sequences, keys };
                    let name = format!("{} {threads}t {heads}/{kv_heads}×{dim} {sequences}×{keys}", isa.name());
                    if !name.contains(&filter) || sequences * keys * kv_heads * dim > 32 << 20 {
                        continue;
                    }
                    let times = medians(&backend, &case);
                    print!("  {name:34}");
                    for (&kv_type, time) in KvType::ALL.iter().zip(times) {
                        let kv = case.shape(kv_type);
                        let bytes = (kv.token_bytes() * sequences * keys) as f64;
                        print!("  {} {:>8.1} µs {:>4.2} ({:.2})", kv_type.name(), time * 1e6, time / times[1], bytes / time / read);
                    }
                    println!();
                }
            }
        }
    }
}
