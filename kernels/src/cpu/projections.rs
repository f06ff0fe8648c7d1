//! The ops around a linear: prepare the activations once (norm, quantise), multiply, and do what follows where the outputs
//! are still warm.

use parking_lot::Mutex;

use super::{
    CpuBackend, CpuWorkspace,
    activations::Activations,
    kv::CpuKv,
    linear::PackedLinear,
    memory::{CpuBuffer, Shared},
    norm::rms_norm,
    pool::{Chunks, split},
    rope,
};
use crate::{
    KernelError,
    backend::{Activation, KvShape, Linear, LowRank, Norm, QkvArgs},
    inputs::{HostInputs, shape},
    plan::StepPlan,
};

/// Work units that a thread takes on average: small enough to even out threads that are slowed down.
const TAKES: usize = 6;
/// Rows from which element-wise work is shared out.
const SHARED_ROWS: usize = 4;

pub(super) fn expect_len(op: &'static str, what: &str, buffer: &[f32], least: usize) -> Result<(), KernelError> {
    shape(op, buffer.len() >= least, || format!("{what}: {} values, {least} needed", buffer.len()))
}

fn expect_adapters(op: &'static str, linear: &Linear<'_, CpuBackend>) -> Result<(), KernelError> {
    for low in linear.adapters.iter().flatten() {
        let good = low.a.columns() == linear.weight.columns() && low.b.rows() == linear.weight.rows() && low.b.columns() == low.a.rows();
        shape(op, good, || format!("adapter: {} × {} · {} × {}", low.b.rows(), low.b.columns(), low.a.rows(), low.a.columns()))?;
    }
    Ok(())
}

impl CpuBackend {
    /// Outputs of a linear: `sink(row, first output, values)`, from all threads; never twice for an output.
    fn multiply<F>(&self, linear: &PackedLinear, activations: &Activations, sink: F) -> Result<(), KernelError>
    where
        F: Fn(usize, usize, &[f32]) + Sync,
    {
        let groups = linear.groups();
        let chunks = Chunks::new(groups, groups.div_ceil(TAKES * self.pool.threads()));
        let failure = Mutex::new(None);
        self.pool.run(|_| {
            while let Some(range) = chunks.take() {
                if let Err(error) = linear.matmul(range, activations, &sink) {
                    failure.lock().get_or_insert(error);
                }
            }
        });
        failure.into_inner().map_or(Ok(()), Err)
    }

    /// Calls `f(row)` for all rows, on several threads where it pays.
    pub(super) fn each_row<F: Fn(usize) + Sync>(&self, rows: usize, f: F) {
        if rows < SHARED_ROWS {
            (0..rows).for_each(f);
        } else {
            self.pool.run(|thread| split(rows, 1, self.pool.threads(), thread).for_each(&f));
        }
    }

    /// out[row] += scale · B (A x[row]) for the rows that have an adapter; `x(row, out)` gives an input row.
    fn add_adapters<F>(
        &self,
        plan: &StepPlan,
        adapters: &[Option<LowRank<Self>>],
        x: F,
        out: &mut [f32],
        workspace: &mut CpuWorkspace,
    ) -> Result<(), KernelError>
    where
        F: Fn(usize, &mut [f32]) + Sync,
    {
        for (index, low) in adapters.iter().enumerate() {
            let Some(LowRank { a, b, scale }) = low else { continue };
            let CpuWorkspace { adapter_rows, low, activations, .. } = &mut *workspace;
            adapter_rows.clear();
            adapter_rows.extend((0..plan.rows()).filter(|&row| usize::try_from(plan.adapters[row]) == Ok(index)));
            if adapter_rows.is_empty() {
                continue;
            }
            let (rows, rank, width) = (adapter_rows.len(), a.rows(), b.rows());
            low.resize(rows * rank, 0.0);
            activations.fill(&self.pool, rows, a.columns(), a.forms(), |i, to| x(adapter_rows[i], to))?;
            let narrow = Shared::new(low);
            self.multiply(a, activations, |row, first, values| {
                // SAFETY: no output is computed twice.
                unsafe { narrow.part(row * rank + first, values.len()) }.copy_from_slice(values);
            })?;
            activations.fill(&self.pool, rows, rank, b.forms(), |i, to| to.copy_from_slice(&low[i * rank..][..rank]))?;
            let out = Shared::new(out);
            self.multiply(b, activations, |row, first, values| {
                // SAFETY: as above.
                let to = unsafe { out.part(adapter_rows[row] * width + first, values.len()) };
                to.iter_mut().zip(values).for_each(|(to, value)| *to += scale * value);
            })?;
        }
        Ok(())
    }

    /// `wide` = linear(norm(hidden)), adapters included.
    fn normed(
        &self,
        inputs: &HostInputs,
        norm: &Norm<'_, Self>,
        linear: &Linear<'_, Self>,
        hidden: &[f32],
        workspace: &mut CpuWorkspace,
    ) -> Result<(), KernelError> {
        let (rows, columns, width) = (inputs.plan().rows(), linear.weight.columns(), linear.weight.rows());
        let input = |row: usize, out: &mut [f32]| rms_norm(&hidden[row * columns..][..columns], norm.weight, norm.epsilon, out);
        workspace.activations.fill(&self.pool, rows, columns, linear.weight.forms(), input)?;
        let wide = Shared::new(&mut workspace.wide);
        self.multiply(linear.weight, &workspace.activations, |row, first, values| {
            // SAFETY: no output is computed twice.
            unsafe { wide.part(row * width + first, values.len()) }.copy_from_slice(values);
        })?;
        if inputs.any_adapter() {
            let mut wide = std::mem::replace(&mut workspace.wide, CpuBuffer::empty()?);
            let result = self.add_adapters(inputs.plan(), linear.adapters, input, &mut wide, workspace);
            workspace.wide = wide;
            result?;
        }
        Ok(())
    }

    fn expect_normed(
        op: &'static str,
        inputs: &HostInputs,
        norm: &Norm<'_, Self>,
        linear: &Linear<'_, Self>,
        hidden: &[f32],
        workspace: &CpuWorkspace,
    ) -> Result<(), KernelError> {
        let (rows, columns) = (inputs.plan().rows(), linear.weight.columns());
        expect_adapters(op, linear)?;
        expect_len(op, "norm", norm.weight, columns)?;
        expect_len(op, "hidden", hidden, rows * columns)?;
        expect_len(op, "workspace", &workspace.wide, rows * linear.weight.rows())
    }

    pub(super) fn run_qkv(
        &self,
        inputs: &HostInputs,
        args: &QkvArgs<'_, Self>,
        hidden: &[f32],
        kv: &mut CpuKv,
        q: &mut [f32],
        workspace: &mut CpuWorkspace,
    ) -> Result<(), KernelError> {
        let (rows, op) = (inputs.plan().rows(), "qkv_rope_write");
        let &QkvArgs { heads, kv_heads, head_dim, rope_dim, .. } = args;
        let KvShape { kv_heads: cached, key_dim, value_dim, shared_values, .. } = kv.shape;
        let width = (heads + kv_heads) * head_dim + kv_heads * value_dim;
        inputs.check_kv(op, args.group, args.layer, &kv.shape)?;
        shape(op, args.linear.weight.rows() == width, || format!("linear: {} rows, not {width}", args.linear.weight.rows()))?;
        shape(op, (cached, key_dim, shared_values) == (kv_heads, head_dim, false), || "the cache has other heads".into())?;
        shape(op, rope_dim <= head_dim && rope_dim.is_multiple_of(2), || format!("rope_dim: {rope_dim} of {head_dim}"))?;
        expect_len(op, "q", q, rows * heads * head_dim)?;
        expect_len(op, "rope", args.rope, rows * rope_dim)?;
        Self::expect_normed(op, inputs, &args.norm, &args.linear, hidden, workspace)?;
        self.normed(inputs, &args.norm, &args.linear, hidden, workspace)?;
        let slots = &inputs.plan().groups[args.group].slots;
        let (wide, q, writer) = (Shared::new(&mut workspace.wide), Shared::new(q), kv.writer(self.kernels, args.layer));
        self.each_row(rows, |row| {
            // SAFETY: each row has its own parts.
            let (y, q) = unsafe { (wide.part(row * width, width), q.part(row * heads * head_dim, heads * head_dim)) };
            let (cos, sin) = args.rope[row * rope_dim..][..rope_dim].split_at(rope_dim / 2);
            for head in y[..(heads + kv_heads) * head_dim].chunks_exact_mut(head_dim) {
                rope::turn(head, cos, sin, args.rope_style);
            }
            let (queries, rest) = y.split_at(heads * head_dim);
            q.copy_from_slice(queries);
            let (keys, values) = rest.split_at(kv_heads * head_dim);
            // SAFETY: slots were checked against this cache, and the backend checked its instruction set.
            unsafe { writer.write(slots[row] as usize, keys, values) };
        });
        Ok(())
    }

    pub(super) fn run_write_kv(
        &self,
        inputs: &HostInputs,
        group: usize,
        layer: usize,
        keys: &[f32],
        values: Option<&[f32]>,
        kv: &mut CpuKv,
    ) -> Result<(), KernelError> {
        let (op, rows, KvShape { kv_heads, key_dim, value_dim, shared_values, .. }) = ("write_kv", inputs.plan().rows(), kv.shape);
        inputs.check_kv(op, group, layer, &kv.shape)?;
        shape(op, values.is_none() == shared_values, || "values: given where keys hold them, or missing".into())?;
        let (key_width, value_width) = (kv_heads * key_dim, if shared_values { 0 } else { kv_heads * value_dim });
        let values = values.unwrap_or_default();
        expect_len(op, "keys", keys, rows * key_width)?;
        expect_len(op, "values", values, rows * value_width)?;
        let (slots, writer) = (&inputs.plan().groups[group].slots, kv.writer(self.kernels, layer));
        self.each_row(rows, |row| {
            let (keys, values) = (&keys[row * key_width..][..key_width], &values[row * value_width..][..value_width]);
            // SAFETY: slots were checked against this cache, and the backend checked its instruction set.
            unsafe { writer.write(slots[row] as usize, keys, values) };
        });
        Ok(())
    }

    pub(super) fn run_linear_add(
        &self,
        inputs: &HostInputs,
        linear: &Linear<'_, Self>,
        x: &[f32],
        residual: &mut [f32],
        workspace: &mut CpuWorkspace,
    ) -> Result<(), KernelError> {
        let (rows, columns, width) = (inputs.plan().rows(), linear.weight.columns(), linear.weight.rows());
        expect_adapters("linear_add", linear)?;
        expect_len("linear_add", "x", x, rows * columns)?;
        expect_len("linear_add", "residual", residual, rows * width)?;
        let input = |row: usize, out: &mut [f32]| out.copy_from_slice(&x[row * columns..][..columns]);
        workspace.activations.fill(&self.pool, rows, columns, linear.weight.forms(), input)?;
        let to = Shared::new(residual);
        self.multiply(linear.weight, &workspace.activations, |row, first, values| {
            // SAFETY: no output is computed twice.
            let to = unsafe { to.part(row * width + first, values.len()) };
            to.iter_mut().zip(values).for_each(|(to, value)| *to += value);
        })?;
        if inputs.any_adapter() {
            self.add_adapters(inputs.plan(), linear.adapters, input, residual, workspace)?;
        }
        Ok(())
    }

    pub(super) fn run_gate_up(
        &self,
        inputs: &HostInputs,
        norm: &Norm<'_, Self>,
        linear: &Linear<'_, Self>,
        activation: Activation,
        hidden: &[f32],
        out: &mut [f32],
        workspace: &mut CpuWorkspace,
    ) -> Result<(), KernelError> {
        let (rows, columns, width) = (inputs.plan().rows(), linear.weight.columns(), linear.weight.rows() / 2);
        shape("gate_up", linear.weight.rows().is_multiple_of(2), || format!("linear: an odd number of rows, {}", linear.weight.rows()))?;
        expect_len("gate_up", "out", out, rows * width)?;
        Self::expect_normed("gate_up", inputs, norm, linear, hidden, workspace)?;
        let adapted = inputs.any_adapter() && !linear.adapters.is_empty();
        let out = Shared::new(out);
        if adapted || !halves_align(linear.weight) {
            self.normed(inputs, norm, linear, hidden, workspace)?;
            let wide = &workspace.wide;
            self.each_row(rows, |row| {
                let (gate, up) = wide[row * 2 * width..][..2 * width].split_at(width);
                // SAFETY: each row has its own part.
                let out = unsafe { out.part(row * width, width) };
                out.copy_from_slice(gate);
                // SAFETY: the backend checked its instruction set.
                unsafe { (self.kernels.gate)(activation, out, up) };
            });
            return Ok(());
        }
        let input = |row: usize, out: &mut [f32]| rms_norm(&hidden[row * columns..][..columns], norm.weight, norm.epsilon, out);
        workspace.activations.fill(&self.pool, rows, columns, linear.weight.forms(), input)?;
        self.multiply_gated(linear.weight, &workspace.activations, activation, out)
    }

    /// Gate and up of the same outputs by the same thread: the gate waits in `out` for its partner.
    fn multiply_gated(
        &self,
        linear: &PackedLinear,
        activations: &Activations,
        activation: Activation,
        out: Shared<f32>,
    ) -> Result<(), KernelError> {
        let (groups, width) = (linear.groups() / 2, linear.rows() / 2);
        let chunks = Chunks::new(groups, groups.div_ceil(TAKES * self.pool.threads()));
        let failure = Mutex::new(None);
        self.pool.run(|_| {
            while let Some(range) = chunks.take() {
                let gate = linear.matmul(range.clone(), activations, |row, first, values| {
                    // SAFETY: no output is computed twice.
                    unsafe { out.part(row * width + first, values.len()) }.copy_from_slice(values);
                });
                let up = linear.matmul(range.start + groups..range.end + groups, activations, |row, first, values| {
                    // SAFETY: the same outputs as above, by the same thread, after it has computed their gates.
                    let out = unsafe { out.part(row * width + first - width, values.len()) };
                    // SAFETY: the backend checked its instruction set.
                    unsafe { (self.kernels.gate)(activation, out, values) };
                });
                if let Err(error) = gate.and(up) {
                    failure.lock().get_or_insert(error);
                }
            }
        });
        failure.into_inner().map_or(Ok(()), Err)
    }

    pub(super) fn run_logits(
        &self,
        inputs: &HostInputs,
        norm: &Norm<'_, Self>,
        linear: &PackedLinear,
        hidden: &[f32],
        logits: &mut [f32],
        workspace: &mut CpuWorkspace,
    ) -> Result<(), KernelError> {
        let (wanted, columns, width) = (&inputs.plan().logit_rows, linear.columns(), linear.rows());
        expect_len("logits", "norm", norm.weight, columns)?;
        expect_len("logits", "hidden", hidden, inputs.plan().rows() * columns)?;
        expect_len("logits", "logits", logits, wanted.len() * width)?;
        workspace.activations.fill(&self.pool, wanted.len(), columns, linear.forms(), |i, out| {
            rms_norm(&hidden[wanted[i] as usize * columns..][..columns], norm.weight, norm.epsilon, out);
        })?;
        let logits = Shared::new(logits);
        self.multiply(linear, &workspace.activations, |row, first, values| {
            // SAFETY: no output is computed twice.
            unsafe { logits.part(row * width + first, values.len()) }.copy_from_slice(values);
        })
    }
}

/// Whether the groups of the two halves of the rows cut at the same places.
fn halves_align(linear: &PackedLinear) -> bool {
    let (groups, width) = (linear.groups() / 2, linear.rows() / 2);
    linear.groups().is_multiple_of(2)
        && (0..groups).all(|g| {
            let (gate, up) = (linear.group_rows(g), linear.group_rows(g + groups));
            gate.start + width == up.start && gate.end + width == up.end
        })
}
