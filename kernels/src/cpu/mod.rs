//! The CPU backend: every op over a thread pool, dispatched at run time to the instruction set.
//!
//! - [`isa`], [`pool`]: which instructions, which threads
//! - [`activations`], [`linear`]: inputs prepared once per op, weights packed once at load
//! - `projections`: the ops around a linear; `qkv`, `join`, `moe`: more of them; `norm`, `rope`, `activation_kernel`: their parts
//! - `attention`, `attention_kernel`, `attention_softmax`, `attention_tile`, `kv`: paged attention and its cache
//! - `sample`, `sample_kernel`: logits to tokens
//! - `simd`, `dispatch`: sixteen lanes on any instruction set, and the tables of kernels
//!
//! A row's result depends on nothing but the row: not on the batch, the chunk, the threads. It depends on the instruction
//! set (in rounding), which is part of [`BackendInfo`].

mod activation_kernel;
pub mod activations;
mod attention;
mod attention_kernel;
mod attention_softmax;
mod attention_tile;
mod dispatch;
pub mod isa;
mod join;
mod kv;
pub mod linear;
mod memory;
mod moe;
mod norm;
pub mod pool;
mod projections;
mod qkv;
mod rope;
mod sample;
mod sample_kernel;
mod simd;

use std::sync::Arc;

pub use self::{isa::Isa, kv::CpuKv, memory::CpuBuffer};

use self::{
    activations::Activations,
    attention::AttentionScratch,
    dispatch::Kernels,
    linear::PackedLinear,
    memory::Shared,
    moe::MoeScratch,
    pool::{Chunks, Pool},
    projections::{LinearScratch, expect_len},
    sample::SampleScratch,
};
use crate::{
    KernelError,
    backend::{
        AttentionArgs, Backend, BackendInfo, EmbedArgs, GateUpArgs, Join, KvShape, LatentArgs, LayerInputsArgs, Linear, LogitsArgs,
        MoeArgs, Precision, QkvArgs, WorkspaceShape,
    },
    checks::Check,
    inputs::{HostInputs, HostSampled, shape},
    plan::{StepLimits, StepOutput, StepPlan},
    quant::{ACTIVATION_BLOCK, TensorView},
};

/// How the backend runs.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuOptions {
    /// Threads, the caller's included; 0: one per physical core that the process may use.
    pub threads: usize,
    /// `None`: the highest level that the machine has, or what [`isa::ISA_VARIABLE`] says.
    pub isa: Option<Isa>,
}

/// The CPU as a device.
pub struct CpuBackend {
    isa: Isa,
    pool: Arc<Pool>,
    kernels: &'static Kernels,
}

/// Scratch of the ops.
pub struct CpuWorkspace {
    linear: LinearScratch,
    /// Rows × widest output: what waits for something else before it is stored.
    wide: CpuBuffer,
    /// The same for what comes second: projected queries of latent attention, values made from keys.
    second: CpuBuffer,
    moe: Option<Box<MoeScratch>>,
    attention: AttentionScratch,
    /// Per thread.
    sampling: Vec<SampleScratch>,
}

impl CpuBackend {
    /// Starts the threads.
    ///
    /// # Errors
    /// The machine lacks the instruction set, or threads can't be started.
    pub fn new(options: CpuOptions) -> Result<Self, KernelError> {
        let isa = options.isa.map_or_else(Isa::from_environment, Ok)?;
        if !isa.available() {
            return Err(KernelError::Unsupported(format!("instruction set {}, which this machine lacks,", isa.name())));
        }
        let threads = if options.threads == 0 { pool::default_threads() } else { options.threads };
        Ok(Self { isa, pool: Arc::new(Pool::new(threads)?), kernels: dispatch::kernels(isa) })
    }

    /// The instruction set that runs.
    #[must_use]
    pub fn isa(&self) -> Isa {
        self.isa
    }
}

impl WorkspaceShape {
    /// Values that a row of the step may become as the input of a linear, or of a stack of them.
    fn widest_input(&self) -> usize {
        let padded = |rows: usize, columns: usize| rows.saturating_mul(columns.next_multiple_of(ACTIVATION_BLOCK));
        let experts = self.moe.map_or(0, |moe| padded(moe.chosen, moe.hidden.max(moe.width)));
        // Latent attention: queries before they are absorbed, values before they are brought back.
        let latent =
            if self.latent_queries > 0 { padded(self.heads, self.value_dim.max(self.latent_queries / self.heads.max(1))) } else { 0 };
        padded(1, self.max_in).max(experts).max(latent)
    }
}

fn check(op: &'static str) -> Check<CpuBackend> {
    Check { op, len: |buffer| buffer.len(), matrix: |linear| (linear.rows(), linear.columns()) }
}

impl Backend for CpuBackend {
    type Buffer = CpuBuffer;
    type Linear = PackedLinear;
    type Kv = CpuKv;
    type Inputs = HostInputs;
    type Sampled = HostSampled;
    type Workspace = CpuWorkspace;

    fn info(&self) -> BackendInfo {
        BackendInfo { name: "cpu", instruction_set: self.isa.name().into(), threads: self.pool.threads() }
    }

    fn buffer(&self, len: usize) -> Result<Self::Buffer, KernelError> {
        CpuBuffer::new("buffer", len)
    }

    fn buffer_from(&self, data: &[f32]) -> Result<Self::Buffer, KernelError> {
        let mut buffer = CpuBuffer::new("buffer", data.len())?;
        buffer.copy_from_slice(data);
        Ok(buffer)
    }

    fn linear(&self, parts: &[TensorView<'_>], bias: Option<&[f32]>, precision: Precision) -> Result<Self::Linear, KernelError> {
        let columns = parts.first().map_or(0, |part| part.columns);
        shape("linear", columns > 0, || "no columns".into())?;
        PackedLinear::pack(self.isa, &self.pool, parts, bias, precision)
    }

    fn linear_shape(&self, linear: &Self::Linear) -> (usize, usize) {
        (linear.rows(), linear.columns())
    }

    fn linear_bytes(&self, linear: &Self::Linear) -> usize {
        linear.bytes()
    }

    fn kv_of(&self, shapes: &[KvShape], groups: &[usize]) -> Result<Self::Kv, KernelError> {
        CpuKv::new(shapes, groups)
    }

    fn inputs(&self, limits: &StepLimits, vocabulary: usize) -> Result<Self::Inputs, KernelError> {
        HostInputs::new(limits, vocabulary)
    }

    fn sampled(&self, limits: &StepLimits) -> Result<Self::Sampled, KernelError> {
        Ok(HostSampled::new(limits))
    }

    fn workspace(&self, shape: &WorkspaceShape) -> Result<Self::Workspace, KernelError> {
        let (rows, threads) = (shape.limits.rows.max(shape.limits.logit_rows), self.pool.threads());
        let values = |width: usize| rows.checked_mul(width).ok_or(KernelError::OutOfMemory { what: "workspace", bytes: usize::MAX });
        let widest = shape.widest_input();
        let (wide, second) = (values(shape.max_out)?, values(shape.latent_queries.max(shape.copied_values))?);
        Ok(CpuWorkspace {
            linear: LinearScratch::new(Activations::with_room(self.isa, values(widest)?, shape.max_in, threads)?),
            wide: CpuBuffer::new("workspace", wide)?,
            second: CpuBuffer::new("workspace", second)?,
            moe: shape.moe.map(|moe| MoeScratch::new(self.isa, moe, &shape.limits, threads).map(Box::new)).transpose()?,
            attention: AttentionScratch::new(shape, threads)?,
            sampling: (0..threads).map(|_| SampleScratch::new(shape.vocabulary)).collect(),
        })
    }

    fn upload(&self, plan: &StepPlan, inputs: &mut Self::Inputs) -> Result<(), KernelError> {
        inputs.load(plan)
    }

    fn copy_blocks(&self, inputs: &Self::Inputs, kv: &mut Self::Kv) -> Result<(), KernelError> {
        kv.copy_blocks(inputs)
    }

    fn embed(
        &self,
        inputs: &Self::Inputs,
        args: &EmbedArgs<'_, Self>,
        sampled: &Self::Sampled,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError> {
        self.run_embed(inputs, args, sampled, out)
    }

    fn layer_inputs(
        &self,
        inputs: &Self::Inputs,
        args: &LayerInputsArgs<'_, Self>,
        sampled: &Self::Sampled,
        hidden: &Self::Buffer,
        out: &mut Self::Buffer,
        workspace: &mut Self::Workspace,
    ) -> Result<(), KernelError> {
        self.run_layer_inputs(inputs, args, sampled, hidden, out, workspace)
    }

    fn rope_rows(&self, inputs: &Self::Inputs, frequencies: &Self::Buffer, factor: f32, out: &mut Self::Buffer) -> Result<(), KernelError> {
        let (positions, width) = (&inputs.plan().positions, 2 * frequencies.len());
        expect_len("rope_rows", "out", out, positions.len() * width)?;
        let out = Shared::new(out);
        self.each_row(positions.len(), |row| {
            // SAFETY: each row has its own part.
            rope::angles(positions[row], frequencies, factor, unsafe { out.part(row * width, width) });
        });
        Ok(())
    }

    fn qkv_rope_write(
        &self,
        inputs: &Self::Inputs,
        args: &QkvArgs<'_, Self>,
        hidden: &Self::Buffer,
        kv: &mut Self::Kv,
        q: &mut Self::Buffer,
        workspace: &mut Self::Workspace,
    ) -> Result<(), KernelError> {
        self.run_qkv(inputs, args, hidden, kv, q, workspace)
    }

    fn latent_rope_write(
        &self,
        inputs: &Self::Inputs,
        args: &LatentArgs<'_, Self>,
        hidden: &Self::Buffer,
        kv: &mut Self::Kv,
        q: &mut Self::Buffer,
        workspace: &mut Self::Workspace,
    ) -> Result<(), KernelError> {
        self.run_latent(inputs, args, hidden, kv, q, workspace)
    }

    fn write_kv(
        &self,
        inputs: &Self::Inputs,
        group: usize,
        layer: usize,
        keys: &Self::Buffer,
        values: Option<&Self::Buffer>,
        kv: &mut Self::Kv,
    ) -> Result<(), KernelError> {
        self.run_write_kv(inputs, group, layer, keys, values.map(|values| &**values), kv)
    }

    fn attention(
        &self,
        inputs: &Self::Inputs,
        args: &AttentionArgs<'_, Self>,
        q: &Self::Buffer,
        kv: &Self::Kv,
        out: &mut Self::Buffer,
        workspace: &mut Self::Workspace,
    ) -> Result<(), KernelError> {
        let (plan, op, scratch) = (inputs.plan(), "attention", &mut workspace.attention);
        let kv = kv.of(op, args.group)?;
        inputs.check_kv(op, args.group, args.layer, kv.shape)?;
        args.check(op, kv.shape, args.sinks.map_or(0, |sinks| sinks.len()))?;
        let &AttentionArgs { heads, kv_heads, key_dim, value_dim, .. } = args;
        shape(op, scratch.fits(heads / kv_heads, key_dim, value_dim), || {
            format!("{heads} heads of {key_dim} and {value_dim}: more than the workspace was made for")
        })?;
        expect_len(op, "q", q, plan.rows() * heads * key_dim)?;
        expect_len(op, "out", out, plan.rows() * heads * value_dim)?;
        attention::attention(&self.pool, self.kernels, plan, args, q, &kv, out, scratch);
        Ok(())
    }

    fn head_linear(
        &self,
        inputs: &Self::Inputs,
        linear: &Self::Linear,
        heads: usize,
        x: &Self::Buffer,
        out: &mut Self::Buffer,
        workspace: &mut Self::Workspace,
    ) -> Result<(), KernelError> {
        self.run_head_linear(inputs, linear, heads, x, out, workspace)
    }

    fn linear_join(
        &self,
        inputs: &Self::Inputs,
        linear: &Linear<'_, Self>,
        join: &Join<'_, Self>,
        x: &Self::Buffer,
        to: &mut Self::Buffer,
        workspace: &mut Self::Workspace,
    ) -> Result<(), KernelError> {
        self.run_linear_join(inputs, linear, join, x, to, workspace)
    }

    fn join(
        &self,
        inputs: &Self::Inputs,
        width: usize,
        join: &Join<'_, Self>,
        x: &Self::Buffer,
        to: &mut Self::Buffer,
    ) -> Result<(), KernelError> {
        self.run_join(inputs, width, join, x, to)
    }

    fn gate_up(
        &self,
        inputs: &Self::Inputs,
        args: &GateUpArgs<'_, Self>,
        hidden: &Self::Buffer,
        out: &mut Self::Buffer,
        workspace: &mut Self::Workspace,
    ) -> Result<(), KernelError> {
        self.run_gate_up(inputs, args, hidden, out, workspace)
    }

    fn moe(
        &self,
        inputs: &Self::Inputs,
        args: &MoeArgs<'_, Self>,
        hidden: &mut Self::Buffer,
        branch: Option<&mut Self::Buffer>,
        workspace: &mut Self::Workspace,
    ) -> Result<(), KernelError> {
        self.run_moe(inputs, args, hidden, branch, workspace)
    }

    fn logits(
        &self,
        inputs: &Self::Inputs,
        args: &LogitsArgs<'_, Self>,
        hidden: &Self::Buffer,
        logits: &mut Self::Buffer,
        workspace: &mut Self::Workspace,
    ) -> Result<(), KernelError> {
        self.run_logits(inputs, args, hidden, logits, workspace)
    }

    fn sample(
        &self,
        inputs: &Self::Inputs,
        logits: &mut Self::Buffer,
        sampled: &mut Self::Sampled,
        workspace: &mut Self::Workspace,
    ) -> Result<(), KernelError> {
        let (plan, vocabulary) = (inputs.plan(), inputs.vocabulary());
        let rows = plan.logit_rows.len();
        expect_len("sample", "logits", logits, rows * vocabulary)?;
        shape("sample", rows <= sampled.ids.len(), || format!("sampled: {} rows for {rows}", sampled.ids.len()))?;
        sampled.rows = rows;
        let stride = sampled.top_stride;
        let (logits, scratch) = (Shared::new(logits), Shared::new(&mut workspace.sampling));
        let (ids, logprobs) = (Shared::new(&mut sampled.ids), Shared::new(&mut sampled.logprobs));
        let (counts, tops) = (Shared::new(&mut sampled.top_counts), Shared::new(&mut sampled.tops));
        let next = Chunks::new(rows, 1);
        let run = |thread: usize| {
            // SAFETY: each thread has its own.
            let [scratch] = (unsafe { scratch.part(thread, 1) }) else { return };
            while let Some(range) = next.take() {
                for row in range {
                    // SAFETY: each row has its own parts, and is taken once.
                    let parts = unsafe {
                        (
                            logits.part(row * vocabulary, vocabulary),
                            ids.part(row, 1),
                            logprobs.part(row, 1),
                            counts.part(row, 1),
                            tops.part(row * stride, stride),
                        )
                    };
                    let (logits, [id], [logprob], [count], top) = parts else { continue };
                    // SAFETY: `new` checked the instruction set.
                    (*id, *logprob, *count) =
                        unsafe { sample::sample(self.kernels, logits, &plan.sampling.row(row, vocabulary), scratch, top) };
                }
            }
        };
        if rows > 1 {
            self.pool.run(run)
        } else {
            run(0)
        }
        Ok(())
    }

    fn read_sampled(&self, _: &Self::Inputs, sampled: &Self::Sampled, out: &mut StepOutput) -> Result<(), KernelError> {
        sampled.read(out);
        Ok(())
    }

    fn read(&self, buffer: &Self::Buffer, out: &mut [f32]) -> Result<(), KernelError> {
        expect_len("read", "buffer", buffer, out.len())?;
        out.copy_from_slice(&buffer[..out.len()]);
        Ok(())
    }
}
