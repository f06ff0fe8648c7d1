//! A small random model of one layer, run op by op on any backend.
#![allow(dead_code)] // Each test binary uses its part.

use quire_kernels::{
    KernelError,
    backend::{
        Activation, AttentionArgs, Backend, EmbedArgs, GateUpArgs, Join, KeysValues, KvShape, KvType, Linear, LogitsArgs, LowRank, Mask,
        Norm, Precision, QkvArgs, Rope, RopeStyle, WorkspaceShape,
    },
    plan::{GroupPlan, NO_ADAPTER, NO_TOKEN, SamplingPlan, StepLimits, StepOutput, StepPlan},
    quant::{TensorType, TensorView},
};

/// splitmix64.
#[derive(Clone)]
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }
    /// In [0, 1).
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 24) as f32
    }
    /// About normal.
    pub fn normal(&mut self) -> f32 {
        (0..6).map(|_| self.unit()).sum::<f32>() * 1.414 - 4.242
    }
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
    pub fn normals(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| self.normal() * scale).collect()
    }
}

/// A stored matrix.
pub struct Tensor {
    pub tensor_type: TensorType,
    pub rows: usize,
    pub columns: usize,
    pub data: Vec<u8>,
}

impl Tensor {
    pub fn view(&self) -> TensorView<'_> {
        TensorView { tensor_type: self.tensor_type, rows: self.rows, columns: self.columns, data: &self.data }
    }

    /// Random blocks whose values are of the order of `scale`.
    pub fn random(random: &mut Random, tensor_type: TensorType, rows: usize, columns: usize, scale: f32) -> Self {
        use TensorType as T;
        let half = |x: f32| half::f16::from_f32(x).to_le_bytes();
        let mut data = Vec::with_capacity(rows * tensor_type.row_bytes(columns));
        for _ in 0..rows * columns / tensor_type.block_len() {
            let mut block: Vec<u8> = (0..tensor_type.block_bytes()).map(|_| random.bits() as u8).collect();
            let jitter = 0.5 + random.unit();
            let mut put = |at: usize, x: f32| block[at..at + 2].copy_from_slice(&half(x * scale * jitter));
            match tensor_type {
                T::F32 => block = (random.normal() * scale).to_le_bytes().to_vec(),
                T::F16 => block = half(random.normal() * scale).to_vec(),
                T::BF16 => block = half::bf16::from_f32(random.normal() * scale).to_le_bytes().to_vec(),
                T::Q4_0 => put(0, 0.2),
                T::Q4_1 => {
                    put(0, 0.2);
                    put(2, -1.5);
                }
                T::Q5_0 => put(0, 0.1),
                T::Q5_1 => {
                    put(0, 0.1);
                    put(2, -1.5);
                }
                T::Q8_0 => put(0, 0.012),
                T::Q2_K => {
                    put(80, 0.08);
                    put(82, 0.1);
                }
                T::Q3_K => put(108, 0.02),
                T::Q4_K | T::Q5_K => {
                    let step = if tensor_type == T::Q4_K { 0.002 } else { 0.001 };
                    put(0, step);
                    put(2, 0.015);
                }
                T::Q6_K => put(208, 0.0005),
                T::IQ4_NL => put(0, 0.012),
                T::IQ4_XS => put(0, 0.0006),
                T::MXFP4 => block[0] = (127.0 + (0.12 * scale).log2()) as u8 + (block[0] & 1),
            }
            data.extend(block);
        }
        Self { tensor_type, rows, columns, data }
    }

    /// The identity, in f32.
    pub fn identity(n: usize) -> Self {
        let data = (0..n * n).flat_map(|i| (if i / n == i % n { 1.0_f32 } else { 0.0 }).to_le_bytes()).collect();
        Self { tensor_type: TensorType::F32, rows: n, columns: n, data }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub hidden: usize,
    pub feed_forward: usize,
    pub vocabulary: usize,
    pub block_size: usize,
    pub blocks: usize,
    pub layers: usize,
    pub kv_type: KvType,
    pub rope_style: RopeStyle,
    pub rope_dim: usize,
    pub activation: Activation,
    pub limits: StepLimits,
}

impl Shape {
    pub fn qkv_rows(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }
}

/// One layer's weights, in host memory.
pub struct Weights {
    pub shape: Shape,
    pub table: Tensor,
    pub qkv: Vec<Tensor>,
    pub qkv_bias: Option<Vec<f32>>,
    pub out: Tensor,
    pub gate_up: Vec<Tensor>,
    pub down: Tensor,
    pub norm: Vec<f32>,
    /// A and B per linear (qkv, out, gate_up, down), for one adapter.
    pub adapters: Option<Vec<(Tensor, Tensor)>>,
}

impl Weights {
    /// Projections of these types; the embedding (and output) of `table`'s type.
    pub fn random(random: &mut Random, shape: Shape, types: [TensorType; 2], table: TensorType, adapters: bool) -> Self {
        let Shape { heads, kv_heads, head_dim, hidden, feed_forward, .. } = shape;
        let (attention, qkv_rows) = (heads * head_dim, shape.qkv_rows());
        let mut tensor = |t, rows, columns: usize| Tensor::random(random, t, rows, columns, 1.0 / (columns as f32).sqrt());
        let qkv = vec![
            tensor(types[0], attention, hidden),
            tensor(types[0], kv_heads * head_dim, hidden),
            tensor(types[1], kv_heads * head_dim, hidden),
        ];
        let out = tensor(types[0], hidden, attention);
        let gate_up = if types[0] == types[1] {
            vec![tensor(types[0], 2 * feed_forward, hidden)]
        } else {
            vec![tensor(types[0], feed_forward, hidden), tensor(types[1], feed_forward, hidden)]
        };
        let down = tensor(types[1], hidden, feed_forward);
        let table = tensor(table, shape.vocabulary, hidden);
        let mut pair = |rows, columns| (tensor(TensorType::F32, 4, columns), tensor(TensorType::F16, rows, 4));
        let adapters = adapters
            .then(|| vec![pair(qkv_rows, hidden), pair(hidden, attention), pair(2 * feed_forward, hidden), pair(hidden, feed_forward)]);
        let norm = (0..hidden).map(|_| 0.5 + random.unit()).collect();
        let qkv_bias = (random.below(2) == 0).then(|| random.normals(qkv_rows, 0.3));
        Self { shape, table, qkv, qkv_bias, out, gate_up, down, norm, adapters }
    }
}

/// What each op gave, in host memory.
#[derive(Clone, Default)]
pub struct Record {
    pub embed: Vec<f32>,
    pub rope: Vec<f32>,
    pub q: Vec<f32>,
    pub attention: Vec<f32>,
    pub after_out: Vec<f32>,
    pub gate_up: Vec<f32>,
    pub after_down: Vec<f32>,
    pub logits: Vec<f32>,
}

pub struct Model<B: Backend> {
    pub backend: B,
    pub shape: Shape,
    pub kv: B::Kv,
    pub inputs: B::Inputs,
    pub sampled: B::Sampled,
    pub workspace: B::Workspace,
    table: B::Linear,
    linears: [B::Linear; 4],
    adapters: [Vec<Option<LowRank<B>>>; 4],
    norm: B::Buffer,
    frequencies: B::Buffer,
    rope: B::Buffer,
    hidden: B::Buffer,
    q: B::Buffer,
    attention: B::Buffer,
    gate_up: B::Buffer,
    pub logits: B::Buffer,
}

impl<B: Backend> Model<B> {
    pub fn new(backend: B, weights: &Weights) -> Result<Self, KernelError> {
        let shape = weights.shape;
        let Shape { heads, head_dim, hidden, limits, .. } = shape;
        let rows = limits.rows;
        let kv = KvShape {
            layers: shape.layers,
            blocks: shape.blocks,
            block_size: shape.block_size,
            kv_heads: shape.kv_heads,
            key_dim: head_dim,
            value_dim: head_dim,
            shared_values: false,
            kv_type: shape.kv_type,
        };
        let views = |tensors: &[Tensor]| -> Vec<B::Linear> {
            let views: Vec<_> = tensors.iter().map(Tensor::view).collect();
            vec![backend.linear(&views, None, Precision::Byte).unwrap()]
        };
        let qkv: Vec<_> = weights.qkv.iter().map(Tensor::view).collect();
        let linears = [
            backend.linear(&qkv, weights.qkv_bias.as_deref(), Precision::TwoBytes)?,
            backend.linear(&[weights.out.view()], None, Precision::Byte)?,
            views(&weights.gate_up).remove(0),
            backend.linear(&[weights.down.view()], None, Precision::TwoBytes)?,
        ];
        let adapters = std::array::from_fn(|i| match &weights.adapters {
            Some(pairs) => {
                let (a, b) = &pairs[i];
                // Number 0 does not touch this linear, 1 does.
                vec![
                    None,
                    Some(LowRank {
                        a: backend.linear(&[a.view()], None, Precision::Byte).unwrap(),
                        b: backend.linear(&[b.view()], None, Precision::Byte).unwrap(),
                        scale: 0.7,
                    }),
                ]
            }
            None => Vec::new(),
        });
        let frequencies: Vec<f32> = (0..shape.rope_dim / 2).map(|i| 1e4_f32.powf(-2.0 * i as f32 / shape.rope_dim as f32)).collect();
        let max_in = hidden.max(heads * head_dim).max(shape.feed_forward);
        let max_out = shape.qkv_rows().max(2 * shape.feed_forward).max(hidden);
        Ok(Self {
            kv: backend.kv(&kv)?,
            inputs: backend.inputs(&limits, shape.vocabulary)?,
            sampled: backend.sampled(&limits)?,
            workspace: backend.workspace(&WorkspaceShape {
                limits,
                max_in,
                max_out,
                vocabulary: shape.vocabulary,
                heads,
                key_dim: head_dim,
                value_dim: head_dim,
                latent_queries: 0,
                copied_values: 0,
                moe: None,
            })?,
            table: backend.linear(&[weights.table.view()], None, Precision::Byte)?,
            linears,
            adapters,
            norm: backend.buffer_from(&weights.norm)?,
            frequencies: backend.buffer_from(&frequencies)?,
            rope: backend.buffer(rows * shape.rope_dim)?,
            hidden: backend.buffer(rows * hidden)?,
            q: backend.buffer(rows * heads * head_dim)?,
            attention: backend.buffer(rows * heads * head_dim)?,
            gate_up: backend.buffer(rows * shape.feed_forward)?,
            logits: backend.buffer(limits.logit_rows * shape.vocabulary)?,
            backend,
            shape,
        })
    }

    fn read(&self, buffer: &B::Buffer, len: usize) -> Vec<f32> {
        let mut out = vec![0.0; len];
        self.backend.read(buffer, &mut out).unwrap();
        out
    }

    /// Runs all ops of a step. With `feed`, each op sees what another backend's ops gave.
    pub fn step(&mut self, plan: &StepPlan, feed: Option<&Record>) -> Result<Record, KernelError> {
        let Shape { heads, kv_heads, head_dim, hidden, feed_forward, vocabulary, rope_style, rope_dim, activation, layers, .. } =
            self.shape;
        let (rows, group, layer) = (plan.rows(), 0, layers - 1);
        let mut record = Record::default();
        self.backend.upload(plan, &mut self.inputs)?;
        self.backend.copy_blocks(&self.inputs, &mut self.kv)?;
        let args = EmbedArgs { table: &self.table, scale: 1.5, positions: None, norm: None };
        self.backend.embed(&self.inputs, &args, &self.sampled, &mut self.hidden)?;
        record.embed = self.read(&self.hidden, rows * hidden);
        self.backend.rope_rows(&self.inputs, &self.frequencies, 1.1, &mut self.rope)?;
        record.rope = self.read(&self.rope, rows * rope_dim);
        if let Some(feed) = feed {
            self.hidden = self.backend.buffer_from(&feed.embed)?;
            self.rope = self.backend.buffer_from(&feed.rope)?;
        }
        let linear = |i: usize| Linear { weight: &self.linears[i], adapters: &self.adapters[i][..] };
        let norm = || Some(Norm::rms(&self.norm, 1e-5));
        let args = QkvArgs {
            norm: norm(),
            linear: linear(0),
            clamp: None,
            query_norm: None,
            key_norm: None,
            value_norm: None,
            rope: Some(Rope { rows: &self.rope, style: rope_style, dim: rope_dim }),
            query_scale: None,
            keys_values: KeysValues::Projected,
            heads,
            kv_heads,
            key_dim: head_dim,
            value_dim: head_dim,
            group,
            layer,
        };
        self.backend.qkv_rope_write(&self.inputs, &args, &self.hidden, &mut self.kv, &mut self.q, &mut self.workspace)?;
        record.q = self.read(&self.q, rows * heads * head_dim);
        if let Some(feed) = feed {
            self.q = self.backend.buffer_from(&feed.q)?;
        }
        let args = AttentionArgs {
            heads,
            kv_heads,
            key_dim: head_dim,
            value_dim: head_dim,
            scale: 1.0 / (head_dim as f32).sqrt(),
            mask: Mask::Causal,
            softcap: None,
            sinks: None,
            group,
            layer,
        };
        self.backend.attention(&self.inputs, &args, &self.q, &self.kv, &mut self.attention, &mut self.workspace)?;
        record.attention = self.read(&self.attention, rows * heads * head_dim);
        if let Some(feed) = feed {
            self.attention = self.backend.buffer_from(&feed.attention)?;
        }
        self.backend.linear_join(&self.inputs, &linear(1), &Join::ADD, &self.attention, &mut self.hidden, &mut self.workspace)?;
        record.after_out = self.read(&self.hidden, rows * hidden);
        if let Some(feed) = feed {
            self.hidden = self.backend.buffer_from(&feed.after_out)?;
        }
        let args = GateUpArgs { norm: norm(), linear: linear(2), activation, gated: true, factor: None };
        self.backend.gate_up(&self.inputs, &args, &self.hidden, &mut self.gate_up, &mut self.workspace)?;
        record.gate_up = self.read(&self.gate_up, rows * feed_forward);
        if let Some(feed) = feed {
            self.gate_up = self.backend.buffer_from(&feed.gate_up)?;
        }
        self.backend.linear_join(&self.inputs, &linear(3), &Join::ADD, &self.gate_up, &mut self.hidden, &mut self.workspace)?;
        record.after_down = self.read(&self.hidden, rows * hidden);
        if let Some(feed) = feed {
            self.hidden = self.backend.buffer_from(&feed.after_down)?;
        }
        let args = LogitsArgs { norm: norm(), linear: &self.table, scale: 1.0, softcap: None };
        self.backend.logits(&self.inputs, &args, &self.hidden, &mut self.logits, &mut self.workspace)?;
        record.logits = self.read(&self.logits, plan.logit_rows.len() * vocabulary);
        if feed.is_some() {
            // Fed buffers are as long as their step was.
            let rows = self.shape.limits.rows;
            self.hidden = self.backend.buffer(rows * hidden)?;
            self.rope = self.backend.buffer(rows * rope_dim)?;
            self.q = self.backend.buffer(rows * heads * head_dim)?;
            self.attention = self.backend.buffer(rows * heads * head_dim)?;
            self.gate_up = self.backend.buffer(rows * feed_forward)?;
        }
        Ok(record)
    }

    /// Samples these logits as if they were a step's.
    pub fn sample(&mut self, plan: &StepPlan, logits: &[f32]) -> Result<StepOutput, KernelError> {
        self.backend.upload(plan, &mut self.inputs)?;
        self.logits = self.backend.buffer_from(logits)?;
        self.backend.sample(&self.inputs, &mut self.logits, &mut self.sampled, &mut self.workspace)?;
        let mut out = StepOutput::default();
        self.backend.read_sampled(&self.inputs, &self.sampled, &mut out)?;
        Ok(out)
    }
}

/// Blocks in random order, dealt to sequences of up to `keys` keys.
pub struct Tables {
    pub tables: Vec<Vec<u32>>,
    pub block_size: usize,
}

impl Tables {
    pub fn new(random: &mut Random, shape: &Shape, keys: &[usize]) -> Self {
        let mut ids: Vec<u32> = (0..shape.blocks as u32).collect();
        for i in (1..ids.len()).rev() {
            ids.swap(i, random.below(i + 1));
        }
        let mut ids = ids.into_iter();
        let tables = keys.iter().map(|&n| ids.by_ref().take(n.div_ceil(shape.block_size)).collect::<Vec<_>>()).collect::<Vec<_>>();
        assert!(tables.iter().zip(keys).all(|(t, &n)| t.len() * shape.block_size >= n), "too few blocks");
        Self { tables, block_size: shape.block_size }
    }

    /// A step of these (sequence, first position, end position); token and adapter follow from sequence and position.
    pub fn plan(&self, shape: &Shape, chunks: &[(usize, usize, usize)], adapter: impl Fn(usize) -> i32) -> StepPlan {
        let stride = self.tables.iter().map(Vec::len).max().unwrap_or(0);
        let mut plan = StepPlan { row_starts: vec![0], groups: vec![GroupPlan { stride, ..GroupPlan::default() }], ..StepPlan::default() };
        for &(sequence, from, to) in chunks {
            let table = &self.tables[sequence];
            for position in from..to {
                let mut random = Random((sequence * 1_000_003 + position) as u64);
                plan.inputs.push(random.below(shape.vocabulary) as u32);
                plan.positions.push(position as u32);
                plan.adapters.push(adapter(sequence));
                plan.groups[0].slots.push(table[position / self.block_size] * self.block_size as u32 + (position % self.block_size) as u32);
            }
            plan.row_starts.push(plan.inputs.len() as u32);
            plan.context_lens.push(to as u32);
            plan.groups[0].block_tables.extend_from_slice(table);
            plan.groups[0].block_tables.extend(std::iter::repeat_n(0, stride - table.len()));
        }
        plan.logit_rows = (0..plan.inputs.len() as u32).collect();
        plan.sampling = greedy(plan.inputs.len());
        plan
    }
}

pub fn no_adapter(_: usize) -> i32 {
    NO_ADAPTER
}

/// Greedy without anything.
pub fn greedy(rows: usize) -> SamplingPlan {
    SamplingPlan {
        targets: vec![NO_TOKEN; rows],
        temperature: vec![0.0; rows],
        top_k: vec![0; rows],
        top_p: vec![1.0; rows],
        min_p: vec![0.0; rows],
        presence: vec![0.0; rows],
        frequency: vec![0.0; rows],
        repetition: vec![1.0; rows],
        seed: vec![0; rows],
        draw: vec![0; rows],
        logprobs: vec![-1; rows],
        bias_starts: vec![0; rows + 1],
        history_starts: vec![0; rows + 1],
        mask_rows: vec![-1; rows],
        ..SamplingPlan::default()
    }
}

pub fn limits(rows: usize, blocks_per_sequence: usize) -> StepLimits {
    StepLimits { rows, sequences: 16, logit_rows: rows, blocks_per_sequence, top_logprobs: 20 }
}
