//! Keys, values and queries that follow from sequence and position, written and attended on any backend.

use quire_kernels::{
    KernelError,
    backend::{Activation, AttentionArgs, Backend, KvShape, KvType, Mask, RopeStyle, WorkspaceShape},
    cpu::{CpuBackend, CpuOptions, Isa},
    plan::StepPlan,
};

use crate::common::{Random, Shape, Tables, limits, no_adapter};

/// Blocks of every cache.
const BLOCKS: usize = 120;
/// Block that no table names but as a dead entry.
const DEAD: usize = BLOCKS;

#[derive(Clone, Debug)]
pub struct Case {
    pub heads: usize,
    pub kv: KvShape,
    pub mask: Mask,
    pub softcap: Option<f32>,
    pub sinks: Option<Vec<f32>>,
    /// Keys of each sequence.
    pub lengths: Vec<usize>,
    /// Multiplies keys and values, so that nothing depends on their being near 1.
    pub size: f32,
    pub seed: u64,
}

impl Case {
    pub fn random(random: &mut Random, kv_type: KvType, isa: Isa) -> Self {
        let kv_heads = random.pick(&[1, 1, 2, 3]);
        let (key_dim, value_dim, shared_values) = random.pick(&[
            (8, 8, false),
            (16, 16, false),
            (24, 24, false),
            (64, 64, false),
            (80, 80, false),
            (5, 33, false),
            (24, 16, false),
            (32, 24, true),
            (52, 37, true),
            (128, 128, false),
        ]);
        let mask = random.pick(&[
            Mask::Causal,
            Mask::Window(1),
            Mask::Window(24),
            Mask::Window(100),
            Mask::Window(300),
            Mask::Chunk(32),
            Mask::Chunk(50),
            Mask::Chunk(256),
        ]);
        let heads = kv_heads * random.pick(&[1, 2, 3, 4, 7, 8, 13]);
        let kv = KvShape {
            layers: 2,
            blocks: BLOCKS + 1,
            block_size: random.pick(&[16, 32, 64]),
            kv_heads,
            key_dim,
            value_dim,
            shared_values,
            kv_type,
        };
        let most = if isa == Isa::Portable { 300 } else { 700 };
        let lengths = (0..1 + random.below(4)).map(|_| 1 + random.pick(&[most, 40, 257, 80]).min(random.below(most))).collect();
        Self {
            heads,
            kv,
            mask,
            softcap: random.pick(&[None, None, Some(4.0), Some(30.0)]),
            sinks: (random.below(3) == 0).then(|| random.normals(heads, 2.0)),
            lengths,
            size: random.pick(&[1.0, 0.02, 30.0]),
            seed: random.bits(),
        }
    }

    pub fn key(&self, sequence: usize, position: usize) -> Vec<f32> {
        self.noise(1, sequence, position, self.kv.kv_heads * self.kv.key_dim, self.size)
    }

    pub fn value(&self, sequence: usize, position: usize) -> Vec<f32> {
        self.noise(2, sequence, position, self.kv.kv_heads * self.kv.value_dim, self.size)
    }

    pub fn query(&self, sequence: usize, position: usize) -> Vec<f32> {
        self.noise(3, sequence, position, self.heads * self.kv.key_dim, 1.5 / self.size)
    }

    fn noise(&self, what: u64, sequence: usize, position: usize, len: usize, size: f32) -> Vec<f32> {
        Random(self.seed ^ what << 50 ^ (sequence as u64) << 32 ^ position as u64).normals(len, size)
    }
}

/// Rows of a step: sequence, first position, end.
pub type Rows = [(usize, usize, usize)];

pub struct Run<'a, B: Backend> {
    pub backend: B,
    case: &'a Case,
    shape: Shape,
    tables: Tables,
    pub kv: B::Kv,
    inputs: B::Inputs,
    workspace: Option<B::Workspace>,
    sinks: Option<B::Buffer>,
}

pub const LAYER: usize = 1;

impl<'a, B: Backend> Run<'a, B> {
    /// An empty cache in which every slot holds numbers that must never be read.
    pub fn new(backend: B, case: &'a Case) -> Self {
        let limits = limits(case.kv.blocks * case.kv.block_size, case.kv.blocks);
        let shape = Shape {
            heads: case.heads,
            kv_heads: case.kv.kv_heads,
            head_dim: case.kv.key_dim,
            hidden: 32,
            feed_forward: 32,
            vocabulary: 40,
            block_size: case.kv.block_size,
            blocks: BLOCKS,
            layers: case.kv.layers,
            kv_type: case.kv.kv_type,
            rope_style: RopeStyle::Half,
            rope_dim: 2,
            activation: Activation::Silu,
            limits,
        };
        let workspace = WorkspaceShape {
            limits,
            max_in: 32,
            max_out: 32,
            vocabulary: 40,
            heads: case.heads,
            key_dim: case.kv.key_dim,
            value_dim: case.kv.value_dim,
            latent_queries: 0,
            copied_values: 0,
            moe: None,
        };
        let mut run = Self {
            kv: backend.kv(&case.kv).unwrap(),
            inputs: backend.inputs(&limits, 40).unwrap(),
            workspace: Some(backend.workspace(&workspace).unwrap()),
            sinks: case.sinks.as_ref().map(|sinks| backend.buffer_from(sinks).unwrap()),
            tables: Tables::new(&mut Random(case.seed), &shape, &case.lengths),
            backend,
            case,
            shape,
        };
        run.poison();
        run
    }

    fn poison(&mut self) {
        let KvShape { blocks, block_size, kv_heads, key_dim, value_dim, shared_values, .. } = self.case.kv;
        let slots = blocks * block_size;
        let all = Tables { tables: vec![(0..blocks as u32).collect()], block_size };
        let plan = all.plan(&self.shape, &[(0, 0, slots)], no_adapter);
        let nan = |width: usize| vec![f32::NAN; slots * width];
        self.store(&plan, &nan(kv_heads * key_dim), (!shared_values).then(|| nan(kv_heads * value_dim)).as_deref()).unwrap();
    }

    fn store(&mut self, plan: &StepPlan, keys: &[f32], values: Option<&[f32]>) -> Result<(), KernelError> {
        self.backend.upload(plan, &mut self.inputs)?;
        let keys = self.backend.buffer_from(keys)?;
        let values = values.map(|values| self.backend.buffer_from(values)).transpose()?;
        self.backend.write_kv(&self.inputs, 0, LAYER, &keys, values.as_ref(), &mut self.kv)
    }

    /// The plan of these rows; blocks that none of them sees are dead.
    fn plan(&self, rows: &Rows) -> StepPlan {
        let mut plan = self.tables.plan(&self.shape, rows, no_adapter);
        let stride = plan.groups[0].stride;
        for (i, &(_, from, _)) in rows.iter().enumerate() {
            let dead = self.case.mask.first_key(from) / self.case.kv.block_size;
            plan.groups[0].block_tables[i * stride..][..dead].fill(DEAD as u32);
        }
        plan
    }

    /// Stores the keys and values of some rows; `change` may change them.
    pub fn write_changed(&mut self, rows: &Rows, change: impl Fn(usize, usize, &mut [f32], &mut [f32])) {
        let plan = self.plan(rows);
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for &(sequence, from, to) in rows {
            for position in from..to {
                let (mut key, mut value) = (self.case.key(sequence, position), self.case.value(sequence, position));
                change(sequence, position, &mut key, &mut value);
                keys.extend(key);
                values.extend(value);
            }
        }
        self.store(&plan, &keys, (!self.case.kv.shared_values).then_some(&values[..])).unwrap();
    }

    pub fn write(&mut self, rows: &Rows) {
        self.write_changed(rows, |_, _, _, _| ());
    }

    pub fn args(&self) -> AttentionArgs<'_, B> {
        let Case { heads, kv, mask, softcap, .. } = self.case;
        AttentionArgs {
            heads: *heads,
            kv_heads: kv.kv_heads,
            key_dim: kv.key_dim,
            value_dim: kv.value_dim,
            scale: 1.0 / (kv.key_dim as f32).sqrt(),
            mask: *mask,
            softcap: *softcap,
            sinks: self.sinks.as_ref(),
            group: 0,
            layer: LAYER,
        }
    }

    /// Attention of some rows, one after the other: heads × value_dim each.
    pub fn attend(&mut self, rows: &Rows) -> Vec<f32> {
        let plan = self.plan(rows);
        self.backend.upload(&plan, &mut self.inputs).unwrap();
        let case = self.case;
        let q: Vec<f32> = rows.iter().flat_map(|&(s, from, to)| (from..to).flat_map(move |p| case.query(s, p))).collect();
        let q = self.backend.buffer_from(&q).unwrap();
        let len = plan.rows() * self.case.heads * self.case.kv.value_dim;
        let mut out = self.backend.buffer(len).unwrap();
        let mut workspace = self.workspace.take().unwrap();
        self.backend.attention(&self.inputs, &self.args(), &q, &self.kv, &mut out, &mut workspace).unwrap();
        self.workspace = Some(workspace);
        let mut values = vec![0.0; len];
        self.backend.read(&out, &mut values).unwrap();
        values
    }

    /// What attention with other arguments says.
    pub fn refused(&mut self, change: impl FnOnce(&mut AttentionArgs<'_, B>)) -> String {
        let mut workspace = self.workspace.take().unwrap();
        let (q, mut out) = (self.backend.buffer(1 << 14).unwrap(), self.backend.buffer(1 << 14).unwrap());
        let mut args = self.args();
        change(&mut args);
        let error = self.backend.attention(&self.inputs, &args, &q, &self.kv, &mut out, &mut workspace).err().unwrap().to_string();
        self.workspace = Some(workspace);
        error
    }

    /// Copies a block onto another.
    pub fn copy(&mut self, from: u32, to: u32) {
        let plan = StepPlan { row_starts: vec![0], block_copies: vec![(from, to)], ..StepPlan::default() };
        let plan = StepPlan { sampling: crate::common::greedy(0), ..plan };
        self.backend.upload(&plan, &mut self.inputs).unwrap();
        self.backend.copy_blocks(&self.inputs, &mut self.kv).unwrap();
    }

    pub fn tables(&mut self) -> &mut Tables {
        &mut self.tables
    }
}

pub fn cpu(isa: Isa, threads: usize) -> CpuBackend {
    CpuBackend::new(CpuOptions { threads, isa: Some(isa) }).unwrap()
}
