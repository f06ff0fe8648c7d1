//! Against the reference.
//!
//! Metric, per row and part of an op's output: the largest difference over the largest magnitude (or over 0.1: outputs that
//! cancel are not asked for more). Where an op quantises what it
//! has computed itself (experts, latent queries), a rounding before may move one value by a step of the quantiser, 1/127 of the
//! largest of its 32: the bound for block types is that of such a step times a weight of an output, not that of rounding.

use quire_kernels::{
    cpu::Isa,
    quant::TensorType,
    reference::{Numerics, Reference},
};

use crate::{
    cases, experts,
    harness::{Chunks, LENGTHS, Outputs, cpu, run},
    queries,
};

const FLOATS: [TensorType; 3] = [TensorType::F32, TensorType::F16, TensorType::BF16];
const BLOCKS: [TensorType; 4] = [TensorType::Q8_0, TensorType::Q4_1, TensorType::Q4_0, TensorType::F16];

fn distance(got: &Outputs, want: &Outputs) -> f32 {
    assert_eq!(got.len(), want.len());
    let mut worst = 0.0_f32;
    for (key, want) in want {
        for (got, want) in got[key].iter().zip(want) {
            let scale = want.iter().fold(0.1, |m: f32, v| m.max(v.abs()));
            for (g, w) in got.iter().zip(want) {
                assert!(g.is_finite() && w.is_finite(), "{g} for {w}");
                worst = worst.max((g - w).abs() / scale);
            }
        }
    }
    worst
}

/// Two steps: the past, then the ends, of all sequences.
fn steps() -> Vec<Chunks> {
    let past = [10, 0, 25, 2];
    let first = past.iter().enumerate().filter(|(_, n)| **n > 0).map(|(s, &n)| (s, 0, n)).collect();
    vec![first, past.iter().enumerate().map(|(s, &n)| (s, n, LENGTHS[s])).collect()]
}

macro_rules! parity {
    ($name:ident, $case:path, $floats:expr, $blocks:expr, $seeds:expr) => {
        #[test]
        fn $name() {
            for (types, bound) in [(&FLOATS[..], $floats), (&BLOCKS[..], $blocks)] {
                let mut worst = 0.0_f32;
                for seed in 0..$seeds {
                    let want = run(Reference::new(Numerics::Quantised), $case, seed, types, &steps());
                    for isa in Isa::all_available() {
                        let got = run(cpu(isa, 1 + seed as usize % 3), $case, seed, types, &steps());
                        let d = distance(&got, &want);
                        assert!(d <= bound, "{}, seed {seed}, {types:?}: {d:e} from the reference", isa.name());
                        worst = worst.max(d);
                    }
                }
                println!("{} {:?}: {worst:.1e} from the reference", stringify!($name), types[0]);
            }
        }
    };
}

parity!(embed, cases::embed, 1e-5, 1e-5, 30);
parity!(linear_join, cases::linear_join, 1e-5, 1e-5, 60);
parity!(gate_up, cases::gate_up, 1e-5, 1e-5, 60);
parity!(logits, cases::logits, 1e-5, 1e-5, 20);
parity!(qkv, queries::qkv, 1e-5, 1e-5, 60);
parity!(latent, queries::latent, 2e-5, 2e-2, 30);
parity!(moe, experts::moe, 2e-5, 2e-2, 60);
