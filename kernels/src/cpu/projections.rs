//! The ops around a linear: prepare the activations once (norm, quantise), multiply, and do what follows where the outputs
//! are still warm.

use std::ops::Range;

use parking_lot::Mutex;

use super::{
    CpuBackend, CpuWorkspace,
    activations::Activations,
    check,
    join::RowJoin,
    linear::PackedLinear,
    memory::{CpuBuffer, Shared},
    norm::{RowNorm, norm_or_copy},
    pool::{Chunks, split},
};
use crate::{
    KernelError,
    backend::{Activation, GateUpArgs, Join, Linear, LogitsArgs, LowRank},
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

/// What a linear needs besides its input and output.
pub(super) struct LinearScratch {
    pub activations: Activations,
    /// Rows that use the adapter in hand, and their low-rank values. They grow to the largest seen.
    adapter_rows: Vec<usize>,
    low: Vec<f32>,
}

impl LinearScratch {
    pub(super) fn new(activations: Activations) -> Self {
        Self { activations, adapter_rows: Vec::new(), low: Vec::new() }
    }
}

impl CpuBackend {
    /// Outputs of a linear: `sink(row, first output, values)`, from all threads; never twice for an output.
    pub(super) fn multiply<F>(&self, linear: &PackedLinear, activations: &Activations, sink: F) -> Result<(), KernelError>
    where
        F: Fn(usize, usize, &[f32]) + Sync,
    {
        self.share_out(linear.groups(), |range| linear.matmul(range, activations, &sink))
    }

    /// Outputs of some matrices of a stack of matrices of the same size, `outputs` rows each: span `i` of the activations goes
    /// through matrix `matrix(i)`. `sink(row, first output of its matrix, values)`, as for [`CpuBackend::multiply`].
    pub(super) fn multiply_stack<F>(
        &self,
        stack: &PackedLinear,
        outputs: usize,
        spans: usize,
        matrix: impl Fn(usize) -> usize + Sync,
        activations: &Activations,
        sink: F,
    ) -> Result<(), KernelError>
    where
        F: Fn(usize, usize, &[f32]) + Sync,
    {
        let groups = |span: usize| stack.groups_of(matrix(span) * outputs..(matrix(span) + 1) * outputs);
        // All matrices are cut alike, or their groups are not their own.
        let each = groups(0).map_or(0, |groups| groups.len());
        let apart = || KernelError::Shape { op: "stack", detail: "matrices are not parts of their own, or are cut differently".into() };
        if spans > 0 && each == 0 {
            return Err(apart());
        }
        self.share_out(spans * each, |range| {
            let mut unit = range.start;
            while unit < range.end {
                let span = unit / each;
                let end = range.end.min((span + 1) * each);
                let own = groups(span).filter(|own| own.len() == each).ok_or_else(apart)?;
                let first = matrix(span) * outputs;
                let some = own.start + unit - span * each..own.start + end - span * each;
                stack.matmul_span(some, activations, span, |row, output, values| sink(row, output - first, values))?;
                unit = end;
            }
            Ok(())
        })
    }

    /// Calls `f` with ranges that cover `units` once, on all threads.
    fn share_out<F>(&self, units: usize, f: F) -> Result<(), KernelError>
    where
        F: Fn(Range<usize>) -> Result<(), KernelError> + Sync,
    {
        let chunks = Chunks::new(units, units.div_ceil(TAKES * self.pool.threads()));
        let failure = Mutex::new(None);
        self.pool.run(|_| {
            while let Some(range) = chunks.take() {
                if let Err(error) = f(range) {
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

    /// out[row] += factor · scale · B (A x[row]) for the rows that have an adapter; `x(row, out)` gives an input row.
    fn add_adapters<F>(
        &self,
        plan: &StepPlan,
        adapters: &[Option<LowRank<Self>>],
        factor: f32,
        x: F,
        out: &mut [f32],
        scratch: &mut LinearScratch,
    ) -> Result<(), KernelError>
    where
        F: Fn(usize, &mut [f32]) + Sync,
    {
        for (index, low) in adapters.iter().enumerate() {
            let Some(LowRank { a, b, scale }) = low else { continue };
            let LinearScratch { adapter_rows, low, activations } = &mut *scratch;
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
                to.iter_mut().zip(values).for_each(|(to, value)| *to += factor * scale * value);
            })?;
        }
        Ok(())
    }

    /// out = linear(rows of `input`), adapters included.
    pub(super) fn linear_into<F>(
        &self,
        inputs: &HostInputs,
        linear: &Linear<'_, Self>,
        input: F,
        out: &mut [f32],
        scratch: &mut LinearScratch,
    ) -> Result<(), KernelError>
    where
        F: Fn(usize, &mut [f32]) + Sync,
    {
        let (rows, columns, width) = (inputs.plan().rows(), linear.weight.columns(), linear.weight.rows());
        expect_len("linear", "workspace", out, rows * width)?;
        scratch.activations.fill(&self.pool, rows, columns, linear.weight.forms(), &input)?;
        let to = Shared::new(out);
        self.multiply(linear.weight, &scratch.activations, |row, first, values| {
            // SAFETY: no output is computed twice.
            unsafe { to.part(row * width + first, values.len()) }.copy_from_slice(values);
        })?;
        if inputs.any_adapter() {
            self.add_adapters(inputs.plan(), linear.adapters, 1.0, input, out, scratch)?;
        }
        Ok(())
    }

    pub(super) fn run_linear_join(
        &self,
        inputs: &HostInputs,
        linear: &Linear<'_, Self>,
        join: &Join<'_, Self>,
        x: &CpuBuffer,
        to: &mut CpuBuffer,
        workspace: &mut CpuWorkspace,
    ) -> Result<(), KernelError> {
        check("linear_join").linear_join(inputs, linear, join, x, to)?;
        let (rows, columns, width) = (inputs.plan().rows(), linear.weight.columns(), linear.weight.rows());
        let input = |row: usize, out: &mut [f32]| out.copy_from_slice(&x[row * columns..][..columns]);
        let adapted = inputs.any_adapter() && !linear.adapters.is_empty();
        let join = RowJoin::new(join);
        if !join.element_wise() || (adapted && join.total != 1.0) {
            let CpuWorkspace { linear: scratch, wide, .. } = workspace;
            self.linear_into(inputs, linear, input, wide, scratch)?;
            let (wide, to) = (Shared::new(wide), Shared::new(to));
            self.each_row(rows, |row| {
                // SAFETY: each row has its own parts.
                unsafe { join.row(wide.part(row * width, width), to.part(row * width, width)) };
            });
            return Ok(());
        }
        workspace.linear.activations.fill(&self.pool, rows, columns, linear.weight.forms(), input)?;
        let shared = Shared::new(to);
        self.multiply(linear.weight, &workspace.linear.activations, |row, first, values| {
            // SAFETY: no output is computed twice.
            join.elements(values, unsafe { shared.part(row * width + first, values.len()) });
        })?;
        if adapted {
            self.add_adapters(inputs.plan(), linear.adapters, join.scale, input, to, &mut workspace.linear)?;
        }
        Ok(())
    }

    pub(super) fn run_gate_up(
        &self,
        inputs: &HostInputs,
        args: &GateUpArgs<'_, Self>,
        hidden: &CpuBuffer,
        out: &mut CpuBuffer,
        workspace: &mut CpuWorkspace,
    ) -> Result<(), KernelError> {
        let width = check("gate_up").gate_up(inputs, args, hidden, out)?;
        let &GateUpArgs { linear, activation, gated, factor, .. } = args;
        let (rows, columns) = (inputs.plan().rows(), linear.weight.columns());
        let adapted = inputs.any_adapter() && !linear.adapters.is_empty();
        let norm = args.norm.as_ref().map(RowNorm::new);
        let input = |row: usize, out: &mut [f32]| norm_or_copy(norm.as_ref(), &hidden[row * columns..][..columns], out);
        if gated && (adapted || !halves_align(linear.weight)) {
            let CpuWorkspace { linear: scratch, wide, .. } = workspace;
            self.linear_into(inputs, &linear, input, wide, scratch)?;
            let (wide, out) = (&*wide, Shared::new(out));
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
        if gated {
            workspace.linear.activations.fill(&self.pool, rows, columns, linear.weight.forms(), input)?;
            return self.multiply_gated(linear.weight, &workspace.linear.activations, activation, Shared::new(out));
        }
        // What follows the projection of some outputs of a row.
        let finish = |row: usize, first: usize, out: &mut [f32]| {
            // SAFETY: the backend checked its instruction set.
            unsafe { (self.kernels.activate)(activation, out) };
            if let Some(factor) = factor {
                let by = &factor.buffer[row * factor.stride + factor.start + first..];
                out.iter_mut().zip(by).for_each(|(out, by)| *out *= by);
            }
        };
        if adapted {
            self.linear_into(inputs, &linear, input, out, &mut workspace.linear)?;
            let out = Shared::new(out);
            // SAFETY: each row has its own part.
            self.each_row(rows, |row| finish(row, 0, unsafe { out.part(row * width, width) }));
            return Ok(());
        }
        workspace.linear.activations.fill(&self.pool, rows, columns, linear.weight.forms(), input)?;
        let out = Shared::new(out);
        self.multiply(linear.weight, &workspace.linear.activations, |row, first, values| {
            // SAFETY: no output is computed twice.
            let out = unsafe { out.part(row * width + first, values.len()) };
            out.copy_from_slice(values);
            finish(row, first, out);
        })
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
        self.share_out(groups, |range| {
            linear.matmul(range.clone(), activations, |row, first, values| {
                // SAFETY: no output is computed twice.
                unsafe { out.part(row * width + first, values.len()) }.copy_from_slice(values);
            })?;
            linear.matmul(range.start + groups..range.end + groups, activations, |row, first, values| {
                // SAFETY: the same outputs as above, by the same thread, after it has computed their gates.
                let out = unsafe { out.part(row * width + first - width, values.len()) };
                // SAFETY: the backend checked its instruction set.
                unsafe { (self.kernels.gate)(activation, out, values) };
            })
        })
    }

    pub(super) fn run_logits(
        &self,
        inputs: &HostInputs,
        args: &LogitsArgs<'_, Self>,
        hidden: &CpuBuffer,
        logits: &mut CpuBuffer,
        workspace: &mut CpuWorkspace,
    ) -> Result<(), KernelError> {
        check("logits").logits(inputs, args, hidden, logits)?;
        let &LogitsArgs { linear, scale, softcap, .. } = args;
        let (wanted, columns, width) = (&inputs.plan().logit_rows, linear.columns(), linear.rows());
        let norm = args.norm.as_ref().map(RowNorm::new);
        workspace.linear.activations.fill(&self.pool, wanted.len(), columns, linear.forms(), |i, out| {
            norm_or_copy(norm.as_ref(), &hidden[wanted[i] as usize * columns..][..columns], out);
        })?;
        let logits = Shared::new(logits);
        self.multiply(linear, &workspace.linear.activations, |row, first, values| {
            // SAFETY: no output is computed twice.
            let out = unsafe { logits.part(row * width + first, values.len()) };
            out.copy_from_slice(values);
            if scale != 1.0 {
                out.iter_mut().for_each(|z| *z *= scale);
            }
            if let Some(cap) = softcap {
                out.iter_mut().for_each(|z| *z = cap * (*z / cap).tanh());
            }
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
