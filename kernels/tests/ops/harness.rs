//! Runs one op with random arguments, which follow from a seed, on any backend.

use std::collections::BTreeMap;

use quire_kernels::{
    backend::{Activation, Backend, Join, KvType, Linear, LowRank, MoeShape, Norm, NormKind, Precision, RopeStyle, WorkspaceShape},
    cpu::{CpuBackend, CpuOptions, Isa},
    plan::{StepLimits, StepPlan},
    quant::TensorType,
};

use crate::common::{Random, Shape, Tables, Tensor, limits};

pub const VOCABULARY: usize = 70;
/// Keys that any sequence may have.
pub const LENGTHS: [usize; 4] = [24, 9, 45, 3];
const BLOCK: usize = 16;

/// Rows of a step: sequence, first position, end.
pub type Chunks = Vec<(usize, usize, usize)>;
/// Per sequence and position: what the op gave, in parts that are compared each by itself.
pub type Outputs = BTreeMap<(usize, usize), Vec<Vec<f32>>>;

/// One op on one backend, with its weights.
pub trait Step<B: Backend> {
    /// Per row of the plan: parts.
    fn run(&mut self, setup: &mut Setup<B>, inputs: &B::Inputs, plan: &StepPlan) -> Vec<Vec<Vec<f32>>>;
}

/// A backend, and random things on it.
pub struct Setup<B: Backend> {
    pub backend: B,
    pub random: Random,
    pub types: Vec<TensorType>,
    /// Whether linears have adapters.
    pub adapted: bool,
    pub workspace: B::Workspace,
    pub limits: StepLimits,
    pub sampled: B::Sampled,
    rows: Vec<(usize, usize)>,
}

/// A linear with two adapters, of which the first doesn't touch it.
pub struct Adapted<B: Backend> {
    pub weight: B::Linear,
    pub adapters: Vec<Option<LowRank<B>>>,
}

impl<B: Backend> Adapted<B> {
    pub fn linear(&self) -> Linear<'_, B> {
        Linear { weight: &self.weight, adapters: &self.adapters }
    }
}

/// The buffers of a norm.
pub struct OwnNorm<B: Backend> {
    kind: NormKind,
    weight: Option<B::Buffer>,
    bias: Option<B::Buffer>,
    epsilon: f32,
}

impl<B: Backend> OwnNorm<B> {
    pub fn norm(&self) -> Norm<'_, B> {
        Norm { kind: self.kind, weight: self.weight.as_ref(), bias: self.bias.as_ref(), epsilon: self.epsilon }
    }
}

pub struct OwnJoin<B: Backend> {
    norm: Option<OwnNorm<B>>,
    scale: f32,
    add: bool,
    total: f32,
}

impl<B: Backend> OwnJoin<B> {
    pub fn join(&self) -> Join<'_, B> {
        Join { norm: self.norm.as_ref().map(OwnNorm::norm), scale: self.scale, add: self.add, total: self.total }
    }
}

impl<B: Backend> Setup<B> {
    pub fn chance(&mut self, one_in: usize) -> bool {
        self.random.below(one_in) == 0
    }

    pub fn float(&self) -> bool {
        self.types.iter().all(|t| t.is_float())
    }

    /// A width: any for float types.
    pub fn width(&mut self) -> usize {
        let odd = self.float() && self.chance(2);
        if odd { self.random.pick(&[17, 24, 48, 50]) } else { self.random.pick(&[32, 64, 96]) }
    }

    pub fn buffer(&mut self, n: usize, scale: f32) -> B::Buffer {
        let values = self.random.normals(n, scale);
        self.backend.buffer_from(&values).unwrap()
    }

    /// Weights near 1.
    pub fn weights(&mut self, n: usize) -> B::Buffer {
        let values: Vec<f32> = (0..n).map(|_| 0.5 + self.random.unit()).collect();
        self.backend.buffer_from(&values).unwrap()
    }

    pub fn tensors(&mut self, parts: usize, rows: usize, columns: usize) -> Vec<Tensor> {
        let scale = 1.0 / (columns as f32).sqrt();
        (0..parts)
            .map(|_| {
                let tensor_type = self.random.pick(&self.types.clone());
                Tensor::random(&mut self.random, tensor_type, rows, columns, scale)
            })
            .collect()
    }

    pub fn pack(&mut self, tensors: &[Tensor]) -> B::Linear {
        let rows = tensors.iter().map(|t| t.rows).sum();
        let bias = self.chance(2).then(|| self.random.normals(rows, 0.3));
        let precision = self.random.pick(&[Precision::Byte, Precision::TwoBytes]);
        let views: Vec<_> = tensors.iter().map(Tensor::view).collect();
        self.backend.linear(&views, bias.as_deref(), precision).unwrap()
    }

    /// Matrices of the same size one below the other.
    pub fn stack(&mut self, parts: usize, rows: usize, columns: usize) -> B::Linear {
        let tensors = self.tensors(parts, rows, columns);
        self.pack(&tensors)
    }

    pub fn adapted(&mut self, rows: usize, columns: usize) -> Adapted<B> {
        let weight = self.stack(1, rows, columns);
        let mut adapters = Vec::new();
        if self.adapted {
            let a = Tensor::random(&mut self.random, TensorType::F32, 4, columns, 1.0 / (columns as f32).sqrt());
            let b = Tensor::random(&mut self.random, TensorType::F16, rows, 4, 0.5);
            let pack = |t: &Tensor| self.backend.linear(&[t.view()], None, Precision::Byte).unwrap();
            adapters = vec![None, Some(LowRank { a: pack(&a), b: pack(&b), scale: 0.7 })];
        }
        Adapted { weight, adapters }
    }

    pub fn norm(&mut self, width: usize) -> OwnNorm<B> {
        let kind = self.random.pick(&[NormKind::Rms, NormKind::Rms, NormKind::Layer]);
        let weight = (!self.chance(4)).then(|| self.weights(width));
        let bias = (kind == NormKind::Layer && self.chance(2)).then(|| self.buffer(width, 0.5));
        OwnNorm { kind, weight, bias, epsilon: 1e-5 }
    }

    pub fn maybe_norm(&mut self, width: usize) -> Option<OwnNorm<B>> {
        (!self.chance(3)).then(|| self.norm(width))
    }

    pub fn join(&mut self, width: usize) -> OwnJoin<B> {
        let norm = self.chance(2).then(|| self.norm(width));
        OwnJoin { norm, scale: self.random.pick(&[1.0, 0.4]), add: !self.chance(4), total: self.random.pick(&[1.0, 1.0, 0.8]) }
    }

    /// Values of rows, by sequence and position.
    pub fn values(&self, what: u64, width: usize) -> Vec<f32> {
        let row = |&(s, p): &(usize, usize)| Random(what << 40 ^ (s as u64) << 20 ^ p as u64).normals(width, 1.0);
        self.rows.iter().flat_map(row).collect()
    }

    pub fn rows_buffer(&self, what: u64, width: usize) -> B::Buffer {
        let mut values = self.values(what, width);
        values.resize(self.limits.rows * width, 0.0);
        self.backend.buffer_from(&values).unwrap()
    }

    /// Rows of a buffer.
    pub fn read(&self, buffer: &B::Buffer, width: usize) -> Vec<Vec<f32>> {
        let mut out = vec![0.0; self.rows.len() * width];
        self.backend.read(buffer, &mut out).unwrap();
        out.chunks(width).map(<[f32]>::to_vec).collect()
    }

    /// The rows of each buffer as a part.
    pub fn parts(&self, buffers: &[(&B::Buffer, usize)]) -> Vec<Vec<Vec<f32>>> {
        let read: Vec<_> = buffers.iter().map(|(buffer, width)| self.read(buffer, *width)).collect();
        (0..self.rows.len()).map(|row| read.iter().map(|rows| rows[row].clone()).collect()).collect()
    }
}

pub fn activation(random: &mut Random, gated: bool) -> Activation {
    let all = [
        Activation::ClampedSwiglu { alpha: 1.702, limit: 1.1 },
        Activation::Silu,
        Activation::Gelu,
        Activation::GeluExact,
        Activation::Relu,
        Activation::ReluSquared,
    ];
    random.pick(&all[usize::from(!gated)..])
}

pub fn cpu(isa: Isa, threads: usize) -> CpuBackend {
    CpuBackend::new(CpuOptions { threads, isa: Some(isa) }).unwrap()
}

pub fn shape() -> Shape {
    Shape {
        heads: 1,
        kv_heads: 1,
        head_dim: 2,
        hidden: 2,
        feed_forward: 2,
        vocabulary: VOCABULARY,
        block_size: BLOCK,
        blocks: 16,
        layers: 1,
        kv_type: KvType::F32,
        rope_style: RopeStyle::Half,
        rope_dim: 2,
        activation: Activation::Silu,
        limits: limits(130, 16),
    }
}

/// Runs `steps` of a case.
pub fn run<B: Backend>(
    backend: B,
    case: impl Fn(&mut Setup<B>) -> Box<dyn Step<B>>,
    seed: u64,
    types: &[TensorType],
    steps: &[Chunks],
) -> Outputs {
    let shape = shape();
    let limits = shape.limits;
    let tables = Tables::new(&mut Random(seed), &shape, &LENGTHS);
    let workspace = WorkspaceShape {
        limits,
        max_in: 512,
        max_out: 2048,
        vocabulary: VOCABULARY,
        heads: 12,
        key_dim: 96,
        value_dim: 96,
        latent_queries: 1024,
        copied_values: 512,
        moe: Some(MoeShape { experts: 32, chosen: 8, hidden: 96, width: 96, shared_width: 96 }),
    };
    let workspace = backend.workspace(&workspace).unwrap();
    let (mut inputs, sampled) = (backend.inputs(&limits, VOCABULARY).unwrap(), backend.sampled(&limits).unwrap());
    let mut random = Random(seed);
    let adapted = random.below(4) == 0;
    let mut setup = Setup { backend, random, types: types.to_vec(), adapted, workspace, limits, sampled, rows: Vec::new() };
    let mut step = case(&mut setup);
    let mut outputs = Outputs::new();
    for chunks in steps {
        let plan = tables.plan(&shape, chunks, |s| if adapted { s as i32 % 3 - 1 } else { -1 });
        setup.backend.upload(&plan, &mut inputs).unwrap();
        setup.rows = chunks.iter().flat_map(|&(s, from, to)| (from..to).map(move |p| (s, p))).collect();
        let rows = step.run(&mut setup, &inputs, &plan);
        assert_eq!(rows.len(), setup.rows.len());
        outputs.extend(setup.rows.iter().copied().zip(rows));
    }
    outputs
}
