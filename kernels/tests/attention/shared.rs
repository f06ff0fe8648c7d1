//! Cache groups of different shapes that share one memory of blocks, as blocks pass from one group to another.

use quire_kernels::{
    backend::{AttentionArgs, Backend, KvShape, KvType, Mask, WorkspaceShape},
    cpu::Isa,
    plan::{GroupPlan, NO_ADAPTER, StepPlan},
    reference::{Numerics, Reference},
};

use crate::{
    common::{Random, greedy, limits},
    harness::cpu,
};

const BLOCK: usize = 16;
const BLOCKS: usize = 8;

fn shapes(kv_type: KvType) -> [KvShape; 2] {
    let wide =
        KvShape { layers: 2, blocks: BLOCKS, block_size: BLOCK, kv_heads: 2, key_dim: 64, value_dim: 48, shared_values: false, kv_type };
    [wide, KvShape { layers: 5, kv_heads: 1, key_dim: 40, value_dim: 24, ..wide }]
}

/// One sequence of `len` tokens in these blocks of each group.
fn plan(tables: [&[u32]; 2], len: usize, copies: &[(u32, u32)]) -> StepPlan {
    let slot = |table: &[u32], position: usize| table[position / BLOCK] * BLOCK as u32 + (position % BLOCK) as u32;
    StepPlan {
        inputs: vec![1; len],
        positions: (0..len as u32).collect(),
        adapters: vec![NO_ADAPTER; len],
        row_starts: vec![0, len as u32],
        context_lens: vec![len as u32],
        groups: tables
            .iter()
            .map(|table| GroupPlan {
                slots: (0..len).map(|position| slot(table, position)).collect(),
                block_tables: table.to_vec(),
                stride: table.len(),
            })
            .collect(),
        sampling: greedy(0),
        block_copies: copies.to_vec(),
        ..StepPlan::default()
    }
}

/// What all layers of both groups say of noise that is written first if `write`.
fn run<B: Backend>(backend: &B, kv: &mut B::Kv, plan: &StepPlan, kv_type: KvType, seed: u64, write: bool) -> Vec<f32> {
    let limits = limits(64, BLOCKS);
    let mut inputs = backend.inputs(&limits, 40).unwrap();
    let mut workspace = backend
        .workspace(&WorkspaceShape {
            limits,
            max_in: 32,
            max_out: 32,
            vocabulary: 40,
            heads: 4,
            key_dim: 64,
            value_dim: 48,
            latent_queries: 0,
            copied_values: 0,
            moe: None,
        })
        .unwrap();
    backend.upload(plan, &mut inputs).unwrap();
    backend.copy_blocks(&inputs, kv).unwrap();
    let (rows, mut all) = (plan.rows(), Vec::new());
    let places = || [1, 0].into_iter().flat_map(|group| (0..shapes(kv_type)[group].layers).map(move |layer| (group, layer)));
    let noise = |what: u64, group: usize, layer: usize, len: usize| {
        Random(seed ^ what << 40 ^ (group as u64) << 20 ^ layer as u64).normals(len, 1.0)
    };
    for (group, layer) in places().filter(|_| write) {
        let KvShape { kv_heads, key_dim, value_dim, .. } = shapes(kv_type)[group];
        let keys = backend.buffer_from(&noise(1, group, layer, rows * kv_heads * key_dim)).unwrap();
        let values = backend.buffer_from(&noise(2, group, layer, rows * kv_heads * value_dim)).unwrap();
        backend.write_kv(&inputs, group, layer, &keys, Some(&values), kv).unwrap();
    }
    for (group, layer) in places() {
        let KvShape { kv_heads, key_dim, value_dim, .. } = shapes(kv_type)[group];
        let q = backend.buffer_from(&noise(3, group, layer, rows * 4 * key_dim)).unwrap();
        let mut out = backend.buffer(rows * 4 * value_dim).unwrap();
        let args = AttentionArgs {
            heads: 4,
            kv_heads,
            key_dim,
            value_dim,
            scale: 0.1,
            mask: Mask::Causal,
            softcap: None,
            sinks: None,
            group,
            layer,
        };
        backend.attention(&inputs, &args, &q, kv, &mut out, &mut workspace).unwrap();
        let mut values = vec![0.0; rows * 4 * value_dim];
        backend.read(&out, &mut values).unwrap();
        all.extend(values);
    }
    all
}

#[test]
#[allow(clippy::type_complexity)] // A table of cases.
fn blocks_pass_from_group_to_group() {
    for kv_type in KvType::ALL {
        let (fast, slow) = (cpu(Isa::all_available()[0], 2), Reference::new(Numerics::Exact));
        let mut fast_kv = fast.kv_of(&shapes(kv_type), &[0, 1]).unwrap();
        let mut slow_kv = slow.kv_of(&shapes(kv_type), &[0, 1]).unwrap();
        let steps: [([&[u32]; 2], usize, &[(u32, u32)], bool); 4] = [
            ([&[3, 1, 7], &[0, 5, 2]], 40, &[], true),
            // What a fork begins with: both groups read the copies.
            ([&[3, 1, 4], &[0, 5, 6]], 40, &[(7, 4), (2, 6)], false),
            // Each group gets blocks that were the other's.
            ([&[0, 5, 6], &[7, 4, 1]], 47, &[], true),
            ([&[0, 5, 2], &[7, 4, 3]], 47, &[(6, 2), (1, 3)], false),
        ];
        for (seed, (tables, len, copies, write)) in steps.into_iter().enumerate() {
            let plan = plan(tables, len, copies);
            let seed = seed as u64 / 2 + 77;
            let got = run(&fast, &mut fast_kv, &plan, kv_type, seed, write);
            let want = run(&slow, &mut slow_kv, &plan, kv_type, seed, write);
            let worst = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0_f32, f32::max);
            assert!(got.iter().all(|v| v.is_finite()) && worst < 1e-5, "{kv_type:?}: {worst:e}");
            assert!(want.iter().any(|v| v.abs() > 0.1));
        }
    }
}
