//! Scalar f32 of every op: the definition that fast backends are tested against. Never optimised, never threaded.
//!
//! Arithmetic is single precision with plain loops. Double precision stands in one place: the sums and logarithms of
//! [`sample`] (see [`crate::sampling`]).

mod kv;
mod moe;
mod ops;
mod projections;
mod sample;

use std::ops::Range;

pub use kv::ReferenceKv;
pub use sample::{Drawn, sample};

use crate::{
    KernelError,
    backend::{
        AttentionArgs, Backend, BackendInfo, EmbedArgs, GateUpArgs, Join, KvShape, LatentArgs, LayerInputsArgs, Linear, LogitsArgs,
        LowRank, MoeArgs, Precision, QkvArgs, WorkspaceShape,
    },
    checks::Check,
    inputs::{HostInputs, HostSampled, shape},
    plan::{StepLimits, StepOutput, StepPlan},
    quant::{ACTIVATION_BLOCK, TensorView, dequantize, quantize_activations},
};

/// What a linear does to its input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Numerics {
    /// Nothing: f32 activations times decoded weights.
    Exact,
    /// What the CPU backend does: rows of block-quantised types see activations that went through
    /// [`quantize_activations`] as its [`Precision`] says; rows of float types see f32.
    Quantised,
}

/// The reference backend.
#[derive(Clone, Copy, Debug)]
pub struct Reference {
    numerics: Numerics,
}

/// A decoded matrix.
pub struct ReferenceLinear {
    rows: usize,
    columns: usize,
    weights: Vec<f32>,
    /// Per row: its type is block-quantised.
    quantised: Vec<bool>,
    bias: Vec<f32>,
    precision: Precision,
}

impl Reference {
    #[must_use]
    pub fn new(numerics: Numerics) -> Self {
        Self { numerics }
    }

    /// weight · x + bias.
    fn multiply(&self, linear: &ReferenceLinear, x: &[f32]) -> Vec<f32> {
        self.multiply_rows(linear, 0..linear.rows, x)
    }

    /// The outputs `rows` of it.
    fn multiply_rows(&self, linear: &ReferenceLinear, rows: Range<usize>, x: &[f32]) -> Vec<f32> {
        let rounded = match self.numerics {
            Numerics::Exact => x.to_vec(),
            Numerics::Quantised => {
                let mut rounded = through_bytes(x);
                if linear.precision == Precision::TwoBytes {
                    let left: Vec<f32> = x.iter().zip(&rounded).map(|(x, rounded)| x - rounded).collect();
                    rounded.iter_mut().zip(through_bytes(&left)).for_each(|(rounded, left)| *rounded += left);
                }
                rounded
            }
        };
        rows.map(|row| {
            let x = if linear.quantised[row] { &rounded } else { x };
            ops::dot(&linear.weights[row * linear.columns..][..linear.columns], x) + linear.bias[row]
        })
        .collect()
    }

    /// The linear with the adapter of a row of the plan.
    fn adapted(&self, linear: &Linear<'_, Self>, adapter: i32, x: &[f32]) -> Vec<f32> {
        let mut y = self.multiply(linear.weight, x);
        let adapter = usize::try_from(adapter).ok().and_then(|a| linear.adapters.get(a)).and_then(Option::as_ref);
        if let Some(LowRank { a, b, scale }) = adapter {
            for (y, add) in y.iter_mut().zip(self.multiply(b, &self.multiply(a, x))) {
                *y += scale * add;
            }
        }
        y
    }
}

/// Activations as they are once quantised.
fn through_bytes(x: &[f32]) -> Vec<f32> {
    let blocks = x.len().div_ceil(ACTIVATION_BLOCK);
    let (mut q, mut d, mut s) = (vec![0; x.len()], vec![0.0; blocks], vec![0.0; blocks]);
    quantize_activations(x, &mut q, &mut d, &mut s);
    q.iter().enumerate().map(|(i, &q)| f32::from(q) * d[i / ACTIVATION_BLOCK]).collect()
}

fn check(op: &'static str) -> Check<Reference> {
    Check { op, len: Vec::len, matrix: |linear| (linear.rows, linear.columns) }
}

fn expect_len(op: &'static str, what: &str, buffer: &[f32], least: usize) -> Result<(), KernelError> {
    shape(op, buffer.len() >= least, || format!("{what}: {} values, {least} needed", buffer.len()))
}

impl Backend for Reference {
    type Buffer = Vec<f32>;
    type Linear = ReferenceLinear;
    type Kv = ReferenceKv;
    type Inputs = HostInputs;
    type Sampled = HostSampled;
    type Workspace = ();

    fn info(&self) -> BackendInfo {
        BackendInfo { name: "reference", instruction_set: "scalar".into(), threads: 1 }
    }

    fn buffer(&self, len: usize) -> Result<Self::Buffer, KernelError> {
        Ok(vec![0.0; len])
    }

    fn buffer_from(&self, data: &[f32]) -> Result<Self::Buffer, KernelError> {
        Ok(data.to_vec())
    }

    fn linear(&self, parts: &[TensorView<'_>], bias: Option<&[f32]>, precision: Precision) -> Result<Self::Linear, KernelError> {
        let columns = parts.first().map_or(0, |p| p.columns);
        let rows = parts.iter().map(|p| p.rows).sum();
        shape("linear", parts.iter().all(|p| p.columns == columns) && columns > 0, || "parts differ in columns".into())?;
        shape("linear", bias.is_none_or(|b| b.len() == rows), || format!("bias: not {rows} values"))?;
        let mut linear = ReferenceLinear {
            rows,
            columns,
            weights: vec![0.0; rows * columns],
            quantised: Vec::new(),
            bias: bias.map_or_else(|| vec![0.0; rows], <[f32]>::to_vec),
            precision,
        };
        for part in parts {
            part.check("linear")?;
            let start = linear.quantised.len() * columns;
            dequantize(part.tensor_type, part.data, &mut linear.weights[start..start + part.rows * columns])?;
            linear.quantised.extend(std::iter::repeat_n(!part.tensor_type.is_float(), part.rows));
        }
        Ok(linear)
    }

    fn linear_shape(&self, linear: &Self::Linear) -> (usize, usize) {
        (linear.rows, linear.columns)
    }

    fn linear_bytes(&self, linear: &Self::Linear) -> usize {
        4 * (linear.weights.len() + linear.bias.len())
    }

    fn kv_of(&self, shapes: &[KvShape], groups: &[usize]) -> Result<Self::Kv, KernelError> {
        ReferenceKv::new(shapes, groups)
    }

    fn inputs(&self, limits: &StepLimits, vocabulary: usize) -> Result<Self::Inputs, KernelError> {
        HostInputs::new(limits, vocabulary)
    }

    fn sampled(&self, limits: &StepLimits) -> Result<Self::Sampled, KernelError> {
        Ok(HostSampled::new(limits))
    }

    fn workspace(&self, _: &WorkspaceShape) -> Result<Self::Workspace, KernelError> {
        Ok(())
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
        _: &mut Self::Workspace,
    ) -> Result<(), KernelError> {
        self.run_layer_inputs(inputs, args, sampled, hidden, out)
    }

    fn rope_rows(&self, inputs: &Self::Inputs, frequencies: &Self::Buffer, factor: f32, out: &mut Self::Buffer) -> Result<(), KernelError> {
        let half = frequencies.len();
        expect_len("rope_rows", "out", out, inputs.plan().rows() * 2 * half)?;
        for (row, &position) in inputs.plan().positions.iter().enumerate() {
            for (i, f) in frequencies.iter().enumerate() {
                let angle = position as f32 * f;
                out[row * 2 * half + i] = factor * angle.cos();
                out[row * 2 * half + half + i] = factor * angle.sin();
            }
        }
        Ok(())
    }

    fn qkv_rope_write(
        &self,
        inputs: &Self::Inputs,
        args: &QkvArgs<'_, Self>,
        hidden: &Self::Buffer,
        kv: &mut Self::Kv,
        q: &mut Self::Buffer,
        _: &mut Self::Workspace,
    ) -> Result<(), KernelError> {
        self.run_qkv(inputs, args, hidden, kv, q)
    }

    fn latent_rope_write(
        &self,
        inputs: &Self::Inputs,
        args: &LatentArgs<'_, Self>,
        hidden: &Self::Buffer,
        kv: &mut Self::Kv,
        q: &mut Self::Buffer,
        _: &mut Self::Workspace,
    ) -> Result<(), KernelError> {
        self.run_latent(inputs, args, hidden, kv, q)
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
        kv.of_mut("write_kv", group)?.write_rows(inputs, group, layer, keys, values.map(Vec::as_slice))
    }

    fn attention(
        &self,
        inputs: &Self::Inputs,
        args: &AttentionArgs<'_, Self>,
        q: &Self::Buffer,
        kv: &Self::Kv,
        out: &mut Self::Buffer,
        _: &mut Self::Workspace,
    ) -> Result<(), KernelError> {
        let (rows, op) = (inputs.plan().rows(), "attention");
        let kv = kv.of(op, args.group)?;
        inputs.check_kv(op, args.group, args.layer, &kv.shape)?;
        args.check(op, &kv.shape, args.sinks.map_or(0, Vec::len))?;
        expect_len(op, "q", q, rows * args.heads * args.key_dim)?;
        expect_len(op, "out", out, rows * args.heads * args.value_dim)?;
        kv.attention(inputs.plan(), args, q, out);
        Ok(())
    }

    fn head_linear(
        &self,
        inputs: &Self::Inputs,
        linear: &Self::Linear,
        heads: usize,
        x: &Self::Buffer,
        out: &mut Self::Buffer,
        _: &mut Self::Workspace,
    ) -> Result<(), KernelError> {
        self.run_head_linear(inputs, linear, heads, x, out)
    }

    fn linear_join(
        &self,
        inputs: &Self::Inputs,
        linear: &Linear<'_, Self>,
        join: &Join<'_, Self>,
        x: &Self::Buffer,
        to: &mut Self::Buffer,
        _: &mut Self::Workspace,
    ) -> Result<(), KernelError> {
        self.run_linear_join(inputs, linear, join, x, to)
    }

    fn join(
        &self,
        inputs: &Self::Inputs,
        width: usize,
        join: &Join<'_, Self>,
        x: &Self::Buffer,
        to: &mut Self::Buffer,
    ) -> Result<(), KernelError> {
        let (check, rows) = (check("join"), inputs.plan().rows());
        check.join(join, width)?;
        check.len("x", x, rows * width)?;
        check.len("to", to, rows * width)?;
        for (x, to) in x.chunks(width.max(1)).zip(to.chunks_mut(width.max(1))).take(rows) {
            projections::join_row(join, x, to);
        }
        Ok(())
    }

    fn gate_up(
        &self,
        inputs: &Self::Inputs,
        args: &GateUpArgs<'_, Self>,
        hidden: &Self::Buffer,
        out: &mut Self::Buffer,
        _: &mut Self::Workspace,
    ) -> Result<(), KernelError> {
        self.run_gate_up(inputs, args, hidden, out)
    }

    fn moe(
        &self,
        inputs: &Self::Inputs,
        args: &MoeArgs<'_, Self>,
        hidden: &mut Self::Buffer,
        branch: Option<&mut Self::Buffer>,
        _: &mut Self::Workspace,
    ) -> Result<(), KernelError> {
        self.run_moe(inputs, args, hidden, branch)
    }

    fn logits(
        &self,
        inputs: &Self::Inputs,
        args: &LogitsArgs<'_, Self>,
        hidden: &Self::Buffer,
        logits: &mut Self::Buffer,
        _: &mut Self::Workspace,
    ) -> Result<(), KernelError> {
        self.run_logits(inputs, args, hidden, logits)
    }

    fn sample(
        &self,
        inputs: &Self::Inputs,
        logits: &mut Self::Buffer,
        sampled: &mut Self::Sampled,
        _: &mut Self::Workspace,
    ) -> Result<(), KernelError> {
        let (plan, vocabulary) = (inputs.plan(), inputs.vocabulary());
        let rows = plan.logit_rows.len();
        expect_len("sample", "logits", logits, rows * vocabulary)?;
        shape("sample", rows <= sampled.ids.len(), || format!("sampled: {} rows for {rows}", sampled.ids.len()))?;
        sampled.rows = rows;
        for (row, logits) in logits.chunks_mut(vocabulary).take(rows).enumerate() {
            let drawn = sample(logits, &plan.sampling.row(row, vocabulary));
            sampled.ids[row] = drawn.id;
            sampled.logprobs[row] = drawn.logprob;
            sampled.top_counts[row] = drawn.top.len() as u32;
            sampled.tops[row * sampled.top_stride..][..drawn.top.len()].copy_from_slice(&drawn.top);
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
