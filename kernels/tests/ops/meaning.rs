//! What options mean, by numbers worked out by hand or by another way of computing the same.

use quire_kernels::{
    backend::{
        AttentionArgs, Backend, Join, KeysValues, KvShape, KvType, LatentArgs, Linear, Mask, Norm, PositionScale, Precision, QkvArgs, Rope,
        RopeStyle, WorkspaceShape,
    },
    quant::TensorType,
    reference::{Numerics, Reference},
};

use crate::{
    common::{Random, Tables, Tensor, no_adapter},
    harness::{VOCABULARY, shape},
};

#[test]
fn position_scales_step() {
    let scale = PositionScale { beta: 0.5, offset: 1, interval: 4 };
    assert_eq!([0, 2].map(|p| scale.at(p)), [1.0; 2]);
    assert!((scale.at(3) - (1.0 + 0.5 * 2_f32.ln())).abs() < 1e-6);
    assert!((scale.at(11) - (1.0 + 0.5 * 4_f32.ln())).abs() < 1e-6);
}

#[test]
fn a_join_scales_adds_and_scales() {
    let b = Reference::new(Numerics::Exact);
    let shape = shape();
    let tables = Tables::new(&mut Random(1), &shape, &[1]);
    let mut inputs = b.inputs(&shape.limits, VOCABULARY).unwrap();
    b.upload(&tables.plan(&shape, &[(0, 0, 1)], no_adapter), &mut inputs).unwrap();
    let (x, mut to) = (vec![3.0, -4.0], vec![10.0, 20.0]);
    b.join(&inputs, 2, &Join { norm: None, scale: 0.5, add: true, total: 2.0 }, &x, &mut to).unwrap();
    assert_eq!(to, [23.0, 36.0]);
    let weight = vec![1.0, 2.0];
    b.join(&inputs, 2, &Join { norm: Some(Norm::rms(&weight, 0.0)), ..Join::SET }, &x, &mut to).unwrap();
    let rms = 12.5_f32.sqrt();
    assert!((to[0] - 3.0 / rms).abs() < 1e-6 && (to[1] + 8.0 / rms).abs() < 1e-6);
}

/// Latent attention in the absorbed form equals its naive form: full keys (up-projected latents and the shared rotated
/// key) and values per head.
#[test]
fn absorbed_latents_are_ordinary_attention() {
    const HEADS: usize = 3;
    const PLAIN: usize = 16;
    const TURNED: usize = 8;
    const LATENT: usize = 24;
    const VALUE: usize = 20;
    const COLUMNS: usize = 48;
    const KEY: usize = PLAIN + TURNED;
    const ROWS: usize = 33;
    let (b, random) = (Reference::new(Numerics::Exact), &mut Random(9));
    let shape = shape();
    let tables = Tables::new(random, &shape, &[ROWS]);
    let mut inputs = b.inputs(&shape.limits, VOCABULARY).unwrap();
    b.upload(&tables.plan(&shape, &[(0, 0, ROWS)], no_adapter), &mut inputs).unwrap();
    let workspace = WorkspaceShape {
        limits: shape.limits,
        max_in: 0,
        max_out: 0,
        vocabulary: VOCABULARY,
        heads: HEADS,
        key_dim: 0,
        value_dim: 0,
        latent_queries: 0,
        copied_values: 0,
        moe: None,
    };
    b.workspace(&workspace).unwrap();
    let pack = |rows: usize, columns: usize, values: &[f32]| {
        let data: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let tensor = Tensor { tensor_type: TensorType::F32, rows, columns, data };
        b.linear(&[tensor.view()], None, Precision::Byte).unwrap()
    };
    let down = random.normals((HEADS * KEY + LATENT + TURNED) * COLUMNS, 0.2);
    // Per head: key rows, then value rows, over the latent.
    let up = random.normals(HEADS * (PLAIN + VALUE) * LATENT, 0.3);
    let (latent_norm, hidden) = (random.normals(LATENT, 1.0), random.normals(ROWS * COLUMNS, 1.0));
    let frequencies: Vec<f32> = (0..TURNED / 2).map(|i| 0.7 / (i + 1) as f32).collect();
    let mut angles = b.buffer(ROWS * TURNED).unwrap();
    b.rope_rows(&inputs, &frequencies, 1.0, &mut angles).unwrap();
    let rope = Rope::<Reference> { rows: &angles, style: RopeStyle::Adjacent, dim: TURNED };

    let part = |head: usize, from: usize, rows: usize| &up[(head * (PLAIN + VALUE) + from) * LATENT..][..rows * LATENT];
    let absorbed: Vec<f32> = (0..HEADS)
        .flat_map(|h| {
            let keys = part(h, 0, PLAIN);
            (0..LATENT).flat_map(move |l| (0..PLAIN).map(move |p| keys[p * LATENT + l]))
        })
        .collect();
    let values: Vec<f32> = (0..HEADS).flat_map(|h| part(h, PLAIN, VALUE).to_vec()).collect();
    let cache = |kv_heads, key_dim, value_dim, shared_values| {
        b.kv(&KvShape { layers: 1, blocks: 16, block_size: 16, kv_heads, key_dim, value_dim, shared_values, kv_type: KvType::F32 }).unwrap()
    };
    let attend = |kv: &_, q: &Vec<f32>, kv_heads, key_dim, value_dim| {
        let scale = 1.0 / (KEY as f32).sqrt();
        let args = AttentionArgs {
            heads: HEADS,
            kv_heads,
            key_dim,
            value_dim,
            scale,
            mask: Mask::Causal,
            softcap: None,
            sinks: None,
            group: 0,
            layer: 0,
        };
        let mut out = vec![0.0; ROWS * HEADS * value_dim];
        b.attention(&inputs, &args, q, kv, &mut out, &mut ()).unwrap();
        out
    };

    let mut kv = cache(1, LATENT + TURNED, LATENT, true);
    let mut q = vec![0.0; ROWS * HEADS * (LATENT + TURNED)];
    let (down_linear, absorb) = (pack(HEADS * KEY + LATENT + TURNED, COLUMNS, &down), pack(HEADS * LATENT, PLAIN, &absorbed));
    let args = LatentArgs {
        norm: None,
        down: Linear::plain(&down_linear),
        query_up: None,
        latent_norm: Norm::rms(&latent_norm, 1e-6),
        absorb: &absorb,
        rope,
        query_scale: None,
        heads: HEADS,
        plain_dim: PLAIN,
        latent: LATENT,
        group: 0,
        layer: 0,
    };
    b.latent_rope_write(&inputs, &args, &hidden, &mut kv, &mut q, &mut ()).unwrap();
    let latents = attend(&kv, &q, 1, LATENT + TURNED, LATENT);
    let mut got = vec![0.0; ROWS * HEADS * VALUE];
    b.head_linear(&inputs, &pack(HEADS * VALUE, LATENT, &values), HEADS, &latents, &mut got, &mut ()).unwrap();

    // The naive form: project, norm and rotate by other ops, build keys and values by hand.
    let project = |rows: std::ops::Range<usize>| {
        let linear = pack(rows.len(), COLUMNS, &down[rows.start * COLUMNS..rows.end * COLUMNS]);
        let mut out = vec![0.0; ROWS * rows.len()];
        b.linear_join(&inputs, &Linear::plain(&linear), &Join::SET, &hidden, &mut out, &mut ()).unwrap();
        out
    };
    let mut latent = vec![0.0; ROWS * LATENT];
    let join = Join { norm: Some(Norm::rms(&latent_norm, 1e-6)), ..Join::SET };
    b.join(&inputs, LATENT, &join, &project(HEADS * KEY..HEADS * KEY + LATENT), &mut latent).unwrap();
    let turned = project(HEADS * KEY + LATENT..HEADS * KEY + LATENT + TURNED);
    // Rotation of lone vectors, as a projection by the identity.
    let rotate = |x: &Vec<f32>, heads: usize| {
        let identity = Tensor::identity(heads * TURNED);
        let linear = b.linear(&[identity.view()], None, Precision::Byte).unwrap();
        let args = QkvArgs {
            norm: None,
            linear: Linear::plain(&linear),
            clamp: None,
            query_norm: None,
            key_norm: None,
            value_norm: None,
            rope: Some(rope),
            query_scale: None,
            keys_values: KeysValues::Elsewhere,
            heads,
            kv_heads: 1,
            key_dim: TURNED,
            value_dim: TURNED,
            group: 0,
            layer: 0,
        };
        let mut out = vec![0.0; ROWS * heads * TURNED];
        b.qkv_rope_write(&inputs, &args, x, &mut cache(1, TURNED, TURNED, false), &mut out, &mut ()).unwrap();
        out
    };
    let turned = rotate(&turned, 1);
    let queries = project(0..HEADS * KEY);
    let loose: Vec<f32> = queries.chunks(KEY).flat_map(|q| q[PLAIN..].to_vec()).collect();
    let loose = rotate(&loose, HEADS);
    let (mut naive_q, mut keys, mut naive_values) = (Vec::new(), Vec::new(), Vec::new());
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    for row in 0..ROWS {
        let latent = &latent[row * LATENT..][..LATENT];
        for h in 0..HEADS {
            let i = row * HEADS + h;
            naive_q.extend_from_slice(&queries[i * KEY..][..PLAIN]);
            naive_q.extend_from_slice(&loose[i * TURNED..][..TURNED]);
            keys.extend(part(h, 0, PLAIN).chunks(LATENT).map(|w| dot(w, latent)));
            keys.extend_from_slice(&turned[row * TURNED..][..TURNED]);
            naive_values.extend(part(h, PLAIN, VALUE).chunks(LATENT).map(|w| dot(w, latent)));
        }
    }
    let mut kv = cache(HEADS, KEY, VALUE, false);
    b.write_kv(&inputs, 0, 0, &keys, Some(&naive_values), &mut kv).unwrap();
    let want = attend(&kv, &naive_q, HEADS, KEY, VALUE);
    let worst = got.iter().zip(&want).map(|(g, w)| (g - w).abs()).fold(0.0, f32::max);
    assert!(worst < 2e-5, "{worst:e}");
    assert!(want.iter().any(|w| w.abs() > 0.3));
}
