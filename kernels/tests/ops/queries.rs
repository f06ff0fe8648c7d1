//! Queries, keys and values in all their forms; what is written shows through attention.

use quire_kernels::{
    backend::{
        AttentionArgs, Backend, HeadNorm, KeysValues, KvShape, KvType, LatentArgs, Mask, PositionScale, QkvArgs, Rope, RopeStyle, Span,
    },
    plan::StepPlan,
};

use crate::harness::{Adapted, OwnNorm, Setup, Step};

type Rows = Vec<Vec<Vec<f32>>>;

struct OwnHeadNorm<B: Backend> {
    norm: OwnNorm<B>,
    span: Span,
    after_rope: bool,
}

impl<B: Backend> OwnHeadNorm<B> {
    fn random(s: &mut Setup<B>, heads: usize, dim: usize) -> Option<Self> {
        if s.chance(3) {
            return None;
        }
        let span = s.random.pick(&[Span::Head, Span::EachHead, Span::Width]);
        let norm = s.norm(if span == Span::Head { dim } else { heads * dim });
        Some(Self { norm, span, after_rope: s.chance(3) })
    }

    fn norm(&self) -> HeadNorm<'_, B> {
        HeadNorm { norm: self.norm.norm(), span: self.span, after_rope: self.after_rope }
    }
}

/// Angles of the rows.
fn rope_rows<B: Backend>(s: &Setup<B>, inputs: &B::Inputs, dim: usize) -> B::Buffer {
    let frequencies: Vec<f32> = (0..dim / 2).map(|i| 50_f32.powf(-2.0 * i as f32 / dim as f32)).collect();
    let frequencies = s.backend.buffer_from(&frequencies).unwrap();
    let mut out = s.backend.buffer(s.limits.rows * dim).unwrap();
    s.backend.rope_rows(inputs, &frequencies, 1.2, &mut out).unwrap();
    out
}

fn position_scale<B: Backend>(s: &mut Setup<B>) -> Option<PositionScale> {
    s.chance(3).then(|| PositionScale { beta: 0.3, offset: s.random.below(2) as u32, interval: 16 })
}

struct Qkv<B: Backend> {
    norm: Option<OwnNorm<B>>,
    linear: Adapted<B>,
    clamp: Option<f32>,
    norms: [Option<OwnHeadNorm<B>>; 3],
    rope: Option<(RopeStyle, usize)>,
    query_scale: Option<PositionScale>,
    keys_values: KeysValues,
    columns: usize,
    heads: usize,
    kv_heads: usize,
    key_dim: usize,
    value_dim: usize,
    kv: B::Kv,
}

pub fn qkv<B: Backend>(s: &mut Setup<B>) -> Box<dyn Step<B>> {
    let (kv_heads, columns) = (s.random.pick(&[1, 2]), s.width());
    let heads = kv_heads * s.random.pick(&[1, 2, 5]);
    let keys_values = s.random.pick(&[KeysValues::Projected, KeysValues::Projected, KeysValues::ValuesAreKeys, KeysValues::Elsewhere]);
    let (key_dim, value_dim) = s.random.pick(&[(16, 16), (24, 16), (8, 8), (32, 32)]);
    let value_dim = if keys_values == KeysValues::ValuesAreKeys { key_dim } else { value_dim };
    let rows = match keys_values {
        KeysValues::Projected => (heads + kv_heads) * key_dim + kv_heads * value_dim,
        KeysValues::ValuesAreKeys => (heads + kv_heads) * key_dim,
        KeysValues::Elsewhere => heads * key_dim,
    };
    let shape = KvShape { layers: 2, blocks: 16, block_size: 16, kv_heads, key_dim, value_dim, shared_values: false, kv_type: KvType::F32 };
    Box::new(Qkv {
        norm: s.maybe_norm(columns),
        linear: s.adapted(rows, columns),
        clamp: s.random.pick(&[None, None, Some(0.8)]),
        norms: [
            OwnHeadNorm::random(s, heads, key_dim),
            OwnHeadNorm::random(s, kv_heads, key_dim),
            OwnHeadNorm::random(s, kv_heads, value_dim),
        ],
        rope: (!s.chance(4)).then(|| (s.random.pick(&[RopeStyle::Adjacent, RopeStyle::Half]), s.random.pick(&[key_dim, key_dim / 2]))),
        query_scale: position_scale(s),
        keys_values,
        columns,
        heads,
        kv_heads,
        key_dim,
        value_dim,
        kv: s.backend.kv(&shape).unwrap(),
    })
}

impl<B: Backend> Step<B> for Qkv<B> {
    fn run(&mut self, s: &mut Setup<B>, inputs: &B::Inputs, _: &StepPlan) -> Rows {
        let &mut Self { heads, kv_heads, key_dim, value_dim, .. } = self;
        let (group, layer) = (0, 1);
        if self.keys_values == KeysValues::Elsewhere {
            let (keys, values) = (s.rows_buffer(5, kv_heads * key_dim), s.rows_buffer(6, kv_heads * value_dim));
            s.backend.write_kv(inputs, group, layer, &keys, Some(&values), &mut self.kv).unwrap();
        }
        let rows = self.rope.map(|(style, dim)| (rope_rows(s, inputs, dim), style, dim));
        let [query_norm, key_norm, value_norm] = self.norms.each_ref().map(|norm| norm.as_ref().map(OwnHeadNorm::norm));
        let args = QkvArgs {
            norm: self.norm.as_ref().map(OwnNorm::norm),
            linear: self.linear.linear(),
            clamp: self.clamp,
            query_norm,
            key_norm,
            value_norm,
            rope: rows.as_ref().map(|(rows, style, dim)| Rope { rows, style: *style, dim: *dim }),
            query_scale: self.query_scale,
            keys_values: self.keys_values,
            heads,
            kv_heads,
            key_dim,
            value_dim,
            group,
            layer,
        };
        let (hidden, mut q, mut out) =
            (s.rows_buffer(1, self.columns), s.rows_buffer(0, heads * key_dim), s.rows_buffer(0, heads * value_dim));
        s.backend.qkv_rope_write(inputs, &args, &hidden, &mut self.kv, &mut q, &mut s.workspace).unwrap();
        // With the same queries everywhere: what differs is what was written.
        let asked = s.rows_buffer(7, heads * key_dim);
        let args = attention(heads, kv_heads, key_dim, value_dim, layer);
        s.backend.attention(inputs, &args, &asked, &self.kv, &mut out, &mut s.workspace).unwrap();
        s.parts(&[(&q, heads * key_dim), (&out, heads * value_dim)])
    }
}

fn attention<'a, B: Backend>(heads: usize, kv_heads: usize, key_dim: usize, value_dim: usize, layer: usize) -> AttentionArgs<'a, B> {
    let scale = 0.5 / (key_dim as f32).sqrt();
    AttentionArgs { heads, kv_heads, key_dim, value_dim, scale, mask: Mask::Causal, softcap: None, sinks: None, group: 0, layer }
}

struct Latent<B: Backend> {
    norm: Option<OwnNorm<B>>,
    down: Adapted<B>,
    query_up: Option<(OwnNorm<B>, Adapted<B>)>,
    latent_norm: OwnNorm<B>,
    absorb: B::Linear,
    up: B::Linear,
    style: RopeStyle,
    query_scale: Option<PositionScale>,
    columns: usize,
    heads: usize,
    plain_dim: usize,
    latent: usize,
    turned: usize,
    outputs: usize,
    kv: B::Kv,
}

pub fn latent<B: Backend>(s: &mut Setup<B>) -> Box<dyn Step<B>> {
    let (columns, heads) = (s.width(), s.random.pick(&[1, 3, 12]));
    // What quantised weights multiply is a multiple of 32 wide.
    let (plain_dim, latent, source) = if s.float() { (s.random.pick(&[16, 10]), s.random.pick(&[24, 20, 32]), 20) } else { (32, 32, 64) };
    let (turned, outputs) = (s.random.pick(&[8, 4]), s.random.pick(&[16, 24]));
    let queries = heads * (plain_dim + turned);
    let compressed = s.chance(2);
    let shape = KvShape {
        layers: 1,
        blocks: 16,
        block_size: 16,
        kv_heads: 1,
        key_dim: latent + turned,
        value_dim: latent,
        shared_values: true,
        kv_type: KvType::F32,
    };
    Box::new(Latent {
        norm: s.maybe_norm(columns),
        down: s.adapted(if compressed { source } else { queries } + latent + turned, columns),
        query_up: compressed.then(|| (s.norm(source), s.adapted(queries, source))),
        latent_norm: s.norm(latent),
        absorb: s.stack(heads, latent, plain_dim),
        up: s.stack(heads, outputs, latent),
        style: s.random.pick(&[RopeStyle::Adjacent, RopeStyle::Half]),
        query_scale: position_scale(s),
        columns,
        heads,
        plain_dim,
        latent,
        turned,
        outputs,
        kv: s.backend.kv(&shape).unwrap(),
    })
}

impl<B: Backend> Step<B> for Latent<B> {
    fn run(&mut self, s: &mut Setup<B>, inputs: &B::Inputs, _: &StepPlan) -> Rows {
        let &mut Self { heads, plain_dim, latent, turned, outputs, .. } = self;
        let rows = rope_rows(s, inputs, turned);
        let args = LatentArgs {
            norm: self.norm.as_ref().map(OwnNorm::norm),
            down: self.down.linear(),
            query_up: self.query_up.as_ref().map(|(norm, up)| (norm.norm(), up.linear())),
            latent_norm: self.latent_norm.norm(),
            absorb: &self.absorb,
            rope: Rope { rows: &rows, style: self.style, dim: turned },
            query_scale: self.query_scale,
            heads,
            plain_dim,
            latent,
            group: 0,
            layer: 0,
        };
        let key = latent + turned;
        let (hidden, mut q, mut attended) =
            (s.rows_buffer(1, self.columns), s.rows_buffer(0, heads * key), s.rows_buffer(0, heads * latent));
        s.backend.latent_rope_write(inputs, &args, &hidden, &mut self.kv, &mut q, &mut s.workspace).unwrap();
        let asked = s.rows_buffer(7, heads * key);
        s.backend.attention(inputs, &attention(heads, 1, key, latent, 0), &asked, &self.kv, &mut attended, &mut s.workspace).unwrap();
        let (x, mut out) = (s.rows_buffer(8, heads * latent), s.rows_buffer(0, heads * outputs));
        s.backend.head_linear(inputs, &self.up, heads, &x, &mut out, &mut s.workspace).unwrap();
        s.parts(&[(&q, heads * key), (&attended, heads * latent), (&out, heads * outputs)])
    }
}
