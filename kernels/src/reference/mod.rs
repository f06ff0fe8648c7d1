//! Scalar f32 of every op: the definition that fast backends are tested against. Never optimised, never threaded.
//!
//! Arithmetic is single precision with plain loops. Double precision stands in one place: the sums and logarithms of
//! [`sample`] (see [`crate::sampling`]).

mod kv;
mod ops;
mod sample;

pub use kv::ReferenceKv;
pub use sample::{Drawn, sample};

use crate::{
    KernelError,
    backend::{Activation, AttentionArgs, Backend, BackendInfo, KvShape, Linear, LowRank, Norm, Precision, QkvArgs, WorkspaceShape},
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
        (0..linear.rows)
            .map(|row| {
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

/// Checks that a matrix has this shape.
fn expect(op: &'static str, what: &str, linear: &ReferenceLinear, rows: usize, columns: usize) -> Result<(), KernelError> {
    shape(op, (linear.rows, linear.columns) == (rows, columns), || {
        format!("{what}: {} × {}, not {rows} × {columns}", linear.rows, linear.columns)
    })
}

fn expect_adapters(op: &'static str, linear: &Linear<'_, Reference>) -> Result<(), KernelError> {
    for low in linear.adapters.iter().flatten() {
        expect(op, "adapter A", &low.a, low.a.rows, linear.weight.columns)?;
        expect(op, "adapter B", &low.b, linear.weight.rows, low.a.rows)?;
    }
    Ok(())
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

    fn kv(&self, kv_shape: &KvShape) -> Result<Self::Kv, KernelError> {
        ReferenceKv::new(kv_shape)
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
        inputs.check_copies(&kv.shape)?;
        for &(from, to) in &inputs.plan().block_copies {
            kv.copy(from as usize, to as usize);
        }
        Ok(())
    }

    fn embed(
        &self,
        inputs: &Self::Inputs,
        table: &Self::Linear,
        sampled: &Self::Sampled,
        scale: f32,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError> {
        expect_len("embed", "out", out, inputs.plan().rows() * table.columns)?;
        for (&input, out) in inputs.plan().inputs.iter().zip(out.chunks_mut(table.columns)) {
            let id = sampled.resolve(input) as usize;
            match table.weights.get(id.saturating_mul(table.columns)..).and_then(|w| w.get(..table.columns)) {
                Some(row) => out.iter_mut().zip(row).for_each(|(o, w)| *o = scale * w),
                None => out.fill(0.0),
            }
        }
        Ok(())
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
        let &QkvArgs { heads, kv_heads, head_dim, rope_dim, .. } = args;
        let (rows, columns, op) = (inputs.plan().rows(), args.linear.weight.columns, "qkv_rope_write");
        let value_dim = kv.shape.value_dim;
        inputs.check_kv(op, args.group, args.layer, &kv.shape)?;
        expect(op, "linear", args.linear.weight, (heads + kv_heads) * head_dim + kv_heads * value_dim, columns)?;
        expect_adapters(op, &args.linear)?;
        expect_len(op, "norm", args.norm.weight, columns)?;
        expect_len(op, "hidden", hidden, rows * columns)?;
        expect_len(op, "q", q, rows * heads * head_dim)?;
        expect_len(op, "rope", args.rope, rows * rope_dim)?;
        shape(op, rope_dim <= head_dim && rope_dim.is_multiple_of(2), || format!("rope_dim: {rope_dim} of {head_dim}"))?;
        let KvShape { kv_heads: cached, key_dim, shared_values, .. } = kv.shape;
        shape(op, (cached, key_dim, shared_values) == (kv_heads, head_dim, false), || "the cache has other heads".into())?;
        let slots = &inputs.plan().groups[args.group].slots;
        for (row, &slot) in slots.iter().enumerate() {
            let x = ops::rms_norm(&hidden[row * columns..][..columns], args.norm.weight, args.norm.epsilon);
            let mut y = self.adapted(&args.linear, inputs.plan().adapters[row], &x);
            let (cos, sin) = args.rope[row * rope_dim..][..rope_dim].split_at(rope_dim / 2);
            for head in y[..(heads + kv_heads) * head_dim].chunks_mut(head_dim) {
                ops::rope(head, cos, sin, args.rope_style);
            }
            let (queries, rest) = y.split_at(heads * head_dim);
            q[row * heads * head_dim..][..heads * head_dim].copy_from_slice(queries);
            let (keys, values) = rest.split_at(kv_heads * head_dim);
            kv.write(args.layer, slot as usize, keys, values);
        }
        Ok(())
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
        kv.write_rows(inputs, group, layer, keys, values.map(Vec::as_slice))
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
        inputs.check_kv(op, args.group, args.layer, &kv.shape)?;
        args.check(op, &kv.shape, args.sinks.map_or(0, Vec::len))?;
        expect_len(op, "q", q, rows * args.heads * args.key_dim)?;
        expect_len(op, "out", out, rows * args.heads * args.value_dim)?;
        kv.attention(inputs.plan(), args, q, out);
        Ok(())
    }

    fn linear_add(
        &self,
        inputs: &Self::Inputs,
        linear: &Linear<'_, Self>,
        x: &Self::Buffer,
        residual: &mut Self::Buffer,
        _: &mut Self::Workspace,
    ) -> Result<(), KernelError> {
        let (rows, out, columns) = (inputs.plan().rows(), linear.weight.rows, linear.weight.columns);
        expect_adapters("linear_add", linear)?;
        expect_len("linear_add", "x", x, rows * columns)?;
        expect_len("linear_add", "residual", residual, rows * out)?;
        for (row, &adapter) in inputs.plan().adapters.iter().enumerate() {
            let y = self.adapted(linear, adapter, &x[row * columns..][..columns]);
            for (r, y) in residual[row * out..].iter_mut().zip(y) {
                *r += y;
            }
        }
        Ok(())
    }

    fn gate_up(
        &self,
        inputs: &Self::Inputs,
        norm: &Norm<'_, Self>,
        linear: &Linear<'_, Self>,
        activation: Activation,
        hidden: &Self::Buffer,
        out: &mut Self::Buffer,
        _: &mut Self::Workspace,
    ) -> Result<(), KernelError> {
        let (rows, columns, width) = (inputs.plan().rows(), linear.weight.columns, linear.weight.rows / 2);
        shape("gate_up", linear.weight.rows.is_multiple_of(2), || "an odd number of rows".into())?;
        expect_adapters("gate_up", linear)?;
        expect_len("gate_up", "norm", norm.weight, columns)?;
        expect_len("gate_up", "hidden", hidden, rows * columns)?;
        expect_len("gate_up", "out", out, rows * width)?;
        for (row, &adapter) in inputs.plan().adapters.iter().enumerate() {
            let x = ops::rms_norm(&hidden[row * columns..][..columns], norm.weight, norm.epsilon);
            let y = self.adapted(linear, adapter, &x);
            for i in 0..width {
                out[row * width + i] = ops::activate(y[i], activation) * y[width + i];
            }
        }
        Ok(())
    }

    fn logits(
        &self,
        inputs: &Self::Inputs,
        norm: &Norm<'_, Self>,
        linear: &Self::Linear,
        hidden: &Self::Buffer,
        logits: &mut Self::Buffer,
        _: &mut Self::Workspace,
    ) -> Result<(), KernelError> {
        expect_len("logits", "norm", norm.weight, linear.columns)?;
        expect_len("logits", "hidden", hidden, inputs.plan().rows() * linear.columns)?;
        expect_len("logits", "logits", logits, inputs.plan().logit_rows.len() * linear.rows)?;
        for (&row, out) in inputs.plan().logit_rows.iter().zip(logits.chunks_mut(linear.rows)) {
            let x = ops::rms_norm(&hidden[row as usize * linear.columns..][..linear.columns], norm.weight, norm.epsilon);
            out.copy_from_slice(&self.multiply(linear, &x));
        }
        Ok(())
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
