//! A row's bits depend on nothing but its sequence.

use quire_kernels::{cpu::Isa, quant::TensorType};

use crate::{
    cases, experts,
    harness::{Chunks, LENGTHS, Outputs, cpu, run},
    queries,
};

/// Each sequence alone, one row at a time; all together; in odd chunks beside each other.
fn schedules() -> Vec<Vec<Chunks>> {
    let mut alone = Vec::new();
    for (s, &n) in LENGTHS.iter().enumerate() {
        alone.extend((0..n).map(|p| vec![(s, p, p + 1)]));
    }
    let together = vec![LENGTHS.iter().enumerate().map(|(s, &n)| (s, 0, n)).collect()];
    let mut chunked = Vec::new();
    let mut at = [0; LENGTHS.len()];
    for step in 0.. {
        let mut chunks = Chunks::new();
        for s in (0..LENGTHS.len()).rev() {
            let end = LENGTHS[s].min(at[s] + [13, 1, 7, 2, 30][(step + s) % 5]);
            if at[s] < end {
                chunks.push((s, at[s], end));
                at[s] = end;
            }
        }
        if chunks.is_empty() {
            break;
        }
        chunked.push(chunks);
    }
    vec![together, alone, chunked]
}

fn bits(outputs: &Outputs) -> Vec<((usize, usize), Vec<u32>)> {
    outputs.iter().map(|(key, parts)| (*key, parts.iter().flatten().map(|v| v.to_bits()).collect())).collect()
}

macro_rules! invariance {
    ($name:ident, $case:path, $seeds:expr) => {
        #[test]
        fn $name() {
            for types in [&[TensorType::F32, TensorType::BF16][..], &[TensorType::Q8_0, TensorType::Q4_1]] {
                for isa in Isa::all_available() {
                    for seed in 100..100 + $seeds {
                        let mut first = None;
                        for (i, steps) in schedules().iter().enumerate() {
                            let got = bits(&run(cpu(isa, 1 + i % 2), $case, seed, types, steps));
                            let want = first.get_or_insert_with(|| got.clone());
                            for (got, want) in got.iter().zip(want.iter()) {
                                assert!(got == want, "{}, seed {seed}, {types:?}: row {:?} of schedule {i}", isa.name(), got.0);
                            }
                        }
                    }
                }
            }
        }
    };
}

invariance!(joins, cases::linear_join, 6);
invariance!(feed_forward, cases::gate_up, 6);
invariance!(qkv, queries::qkv, 8);
invariance!(latent, queries::latent, 4);
invariance!(moe, experts::moe, 12);
