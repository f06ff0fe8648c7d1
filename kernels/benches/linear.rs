//! Packed linears beside what this machine can do at most, measured in the same run.
//!
//! `cargo bench -p quire-kernels --bench linear [-- FILTER]`. First the ceilings, per thread: bytes read from memory a second, and
//! multiply-accumulates a second of a loop that does nothing else. Then a table, one thread, per type, level and shape:
//! multiply-accumulates a second and their ratio to the ceiling, and for one row the bytes of weights a second and their ratio to
//! the read ceiling (small shapes stay in a cache and exceed it). Then all linears of a small model one after the other with all
//! threads, which is what a step does, under criterion.
//!
//! The byte ceiling is that of vectors; with many rows the matrix unit, where there is one, can exceed it (`QUIRE_CPU_AMX=off` compares).

// A benchmark that can't go on has nothing better to do than stop.
#![allow(clippy::unwrap_used)]

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use criterion::{Criterion, Throughput};
use quire_kernels::{
    backend::Precision,
    cpu::{
        activations::Activations,
        isa::Isa,
        linear::PackedLinear,
        pool::{Chunks, Pool, default_threads},
    },
    quant::{TensorType, TensorView},
};

const TYPES: [TensorType; 8] = [
    TensorType::Q4_0,
    TensorType::Q4_1,
    TensorType::Q4_K,
    TensorType::Q6_K,
    TensorType::Q8_0,
    TensorType::F16,
    TensorType::BF16,
    TensorType::F32,
];
const SHAPES: [(usize, usize); 3] = [(576, 512), (1536, 512), (4096, 4096)];
const ROWS: [usize; 6] = [1, 4, 8, 16, 64, 256];

/// Shortest time of a call, over at least 3 calls and about 30 ms.
fn seconds(mut call: impl FnMut()) -> f64 {
    let start = Instant::now();
    let (mut best, mut calls) = (f64::MAX, 0);
    while calls < 3 || start.elapsed() < Duration::from_millis(30) {
        let begin = Instant::now();
        call();
        best = best.min(begin.elapsed().as_secs_f64());
        calls += 1;
    }
    best
}

/// Blocks whose scales are small finite numbers; the rest is noise.
fn weights(tensor_type: TensorType, rows: usize, columns: usize) -> Vec<u8> {
    let mut state = 1_u64;
    let mut bytes: Vec<u8> = (0..rows * tensor_type.row_bytes(columns))
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
        .collect();
    for block in bytes.chunks_exact_mut(tensor_type.block_bytes()) {
        let at: &[usize] = match tensor_type {
            TensorType::Q4_1 | TensorType::Q4_K => &[1, 3],
            TensorType::Q6_K => &[209],
            TensorType::F32 => &[3],
            _ => &[1],
        };
        at.iter().for_each(|&at| block[at] = 0x21);
    }
    bytes
}

fn pack(isa: Isa, pool: &Pool, tensor_type: TensorType, (rows, columns): (usize, usize)) -> PackedLinear {
    let data = weights(tensor_type, rows, columns);
    PackedLinear::pack(isa, pool, &[TensorView { tensor_type, rows, columns, data: &data }], None, Precision::Byte).unwrap()
}

fn prepare(isa: Isa, pool: &Pool, linear: &PackedLinear, rows: usize) -> Activations {
    let mut activations = Activations::new(isa, rows, linear.columns(), pool.threads()).unwrap();
    let row = |r: usize, out: &mut [f32]| out.iter_mut().enumerate().for_each(|(i, x)| *x = ((i * 7 + r * 13) % 101) as f32 - 50.0);
    activations.fill(pool, rows, linear.columns(), linear.forms(), row).unwrap();
    activations
}

/// One product, its groups shared out over the pool.
fn multiply(pool: &Pool, linear: &PackedLinear, activations: &Activations) {
    let chunks = Chunks::new(linear.groups(), linear.groups().div_ceil(8 * pool.threads()));
    pool.run(|_| {
        while let Some(groups) = chunks.take() {
            linear
                .matmul(groups, activations, |_, _, values| {
                    black_box(values);
                })
                .unwrap();
        }
    });
}

/// Bytes a second that every thread reads at once, all threads together, from memory that no cache holds.
fn read_ceiling(pool: &Pool) -> f64 {
    let words = vec![1_u64; (384 << 20) / 8 * pool.threads()];
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

/// Multiply-accumulates a second of one thread: (bytes, f32).
fn arithmetic_ceiling(isa: Isa) -> Option<(f64, f64)> {
    const STEPS: u64 = 1 << 18;
    // A loop and the multiply-accumulates of one of its steps.
    let rate = |macs: u64, call: unsafe fn(u64)| {
        // SAFETY: called for levels that were found.
        (macs * STEPS) as f64 / seconds(|| unsafe { call(STEPS) })
    };
    match isa {
        Isa::Portable => None,
        Isa::Avx2 => Some((rate(12 * 32, peak::bytes_avx2), rate(10 * 8, peak::float_avx2))),
        Isa::Avx512Vnni => Some((rate(16 * 64, peak::bytes_avx512), rate(16 * 16, peak::float_avx512))),
    }
}

#[cfg(target_arch = "x86_64")]
mod peak {
    //! Loops of independent multiply-adds, as many as hide their latency. `black_box` keeps the compiler from knowing them.
    use std::{arch::x86_64::*, hint::black_box};

    macro_rules! peak {
        ($name:ident, $features:literal, $count:literal, $zero:expr, $operand:expr, $step:expr) => {
            /// # Safety
            /// Needs the features.
            #[target_feature(enable = $features)]
            pub unsafe fn $name(steps: u64) {
                let operand = black_box($operand);
                let mut sums = [$zero; $count];
                for _ in 0..steps {
                    for sum in &mut sums {
                        *sum = $step(*sum, operand);
                    }
                }
                black_box(sums);
            }
        };
    }
    peak!(bytes_avx512, "avx512f,avx512vnni", 16, _mm512_setzero_si512(), _mm512_set1_epi8(1), |s, x| _mm512_dpbusd_epi32(s, x, x));
    peak!(float_avx512, "avx512f", 16, _mm512_setzero_ps(), _mm512_set1_ps(1.0), |s, x| _mm512_fmadd_ps(x, x, s));
    // Multiplied by what is added up, or the product would leave the loop.
    peak!(bytes_avx2, "avx2", 12, _mm256_set1_epi8(1), _mm256_set1_epi8(1), |s, x| _mm256_add_epi16(s, _mm256_maddubs_epi16(x, s)));
    peak!(float_avx2, "avx2,fma", 10, _mm256_setzero_ps(), _mm256_set1_ps(1.0), |s, x| _mm256_fmadd_ps(x, x, s));
}

#[cfg(not(target_arch = "x86_64"))]
mod peak {
    pub unsafe fn bytes_avx512(_: u64) {}
    pub unsafe fn float_avx512(_: u64) {}
    pub unsafe fn bytes_avx2(_: u64) {}
    pub unsafe fn float_avx2(_: u64) {}
}

fn table(filter: &str) {
    let one = Pool::new(1).unwrap();
    let read = read_ceiling(&one);
    println!("one thread reads {:.1} GB/s from memory; {} threads {:.1} GB/s", read / 1e9, default_threads(), {
        read_ceiling(&Pool::new(default_threads()).unwrap()) / 1e9
    });
    for isa in Isa::all_available().into_iter().rev() {
        let ceiling = arithmetic_ceiling(isa);
        if let Some((bytes, float)) = ceiling {
            println!("\n{}: at most {:.0} GMAC/s of bytes, {:.0} of f32, one thread", isa.name(), bytes / 1e9, float / 1e9);
        } else {
            println!("\n{}", isa.name());
        }
        println!("{:24}{:>16}{}", "GMAC/s (of ceiling)", "1 row: GB/s", ROWS.map(|rows| format!("{rows:>8} rows   ")).concat());
        for tensor_type in TYPES {
            for shape in SHAPES {
                let name = format!("{} {} {}×{}", isa.name(), tensor_type.name(), shape.0, shape.1);
                if !name.contains(filter) || (isa == Isa::Portable && shape.0 != 576 || (shape.0 == 4096 && isa != Isa::Avx512Vnni)) {
                    continue;
                }
                let linear = pack(isa, &one, tensor_type, shape);
                let times = ROWS.map(|rows| {
                    let activations = prepare(isa, &one, &linear, rows);
                    seconds(|| multiply(&one, &linear, &activations))
                });
                let bytes = linear.bytes() as f64 / times[0];
                print!("{name:24}{:>7.1} ({:.2}) ", bytes / 1e9, bytes / read);
                for (rows, time) in ROWS.into_iter().zip(times) {
                    let macs = (rows * shape.0 * shape.1) as f64 / time;
                    let of = ceiling.map_or(0.0, |(bytes, float)| macs / if tensor_type.is_float() { float } else { bytes });
                    print!("{:>8.1} ({of:.2})", macs / 1e9);
                }
                println!();
            }
        }
    }
}

/// All linears of a model of SmolLM2-135M's shapes, in the types of its Q4_1 file.
fn model(criterion: &mut Criterion) {
    let pool = Pool::new(default_threads()).unwrap();
    for isa in Isa::all_available().into_iter().filter(|&isa| isa != Isa::Portable) {
        let shapes = [(960, 576), (576, 576), (3072, 576), (576, 1536)];
        let layers: Vec<PackedLinear> = (0..30).flat_map(|_| shapes).map(|shape| pack(isa, &pool, TensorType::Q4_1, shape)).collect();
        let output = pack(isa, &pool, TensorType::Q8_0, (49152, 576));
        let bytes: usize = layers.iter().chain([&output]).map(PackedLinear::bytes).sum();
        let mut group = criterion.benchmark_group(format!("model linears, {} threads, {}", pool.threads(), isa.name()));
        group.sample_size(10).warm_up_time(Duration::from_millis(100)).measurement_time(Duration::from_secs(1));
        for rows in [1, 4, 8, 12, 16, 32, 64, 512] {
            let inputs = layers[..4].iter().map(|linear| prepare(isa, &pool, linear, rows)).collect::<Vec<_>>();
            let last = prepare(isa, &pool, &output, rows.min(64));
            let step = || {
                layers.iter().enumerate().for_each(|(i, linear)| multiply(&pool, linear, &inputs[i % 4]));
                multiply(&pool, &output, &last);
            };
            let time = seconds(step);
            println!(
                "{rows} rows: {:.2} ms, {:.0} rows/s, weights at {:.1} GB/s",
                time * 1e3,
                rows as f64 / time,
                bytes as f64 / time / 1e9
            );
            group.throughput(Throughput::Elements(rows as u64)).bench_function(format!("{rows} rows"), |bencher| bencher.iter(step));
        }
        group.finish();
    }
}

fn main() {
    let filter = std::env::args().skip(1).find(|argument| !argument.starts_with('-')).unwrap_or_default();
    table(&filter);
    if !filter.is_empty() && !"model".starts_with(&filter) {
        return;
    }
    let mut criterion = Criterion::default().without_plots();
    model(&mut criterion);
    criterion.final_summary();
}
