//! How branches join the hidden state, and where it comes from.

use super::{
    CpuBackend, CpuBuffer, CpuWorkspace, check,
    memory::Shared,
    norm::{RowNorm, norm_or_copy},
};
use crate::{
    KernelError,
    backend::{EmbedArgs, Join, LayerInputsArgs},
    inputs::{HostInputs, HostSampled},
};

/// A join on slices.
#[derive(Clone, Copy)]
pub(super) struct RowJoin<'a> {
    pub norm: Option<RowNorm<'a>>,
    pub scale: f32,
    pub add: bool,
    pub total: f32,
}

impl<'a> RowJoin<'a> {
    pub(super) fn new(join: &Join<'a, CpuBackend>) -> Self {
        let &Join { scale, add, total, .. } = join;
        Self { norm: join.norm.as_ref().map(RowNorm::new), scale, add, total }
    }

    /// Parts of y can join one by one.
    pub(super) fn element_wise(&self) -> bool {
        self.norm.is_none()
    }

    /// Joins elements of y that need no norm any more.
    pub(super) fn elements(&self, y: &[f32], to: &mut [f32]) {
        let pairs = to.iter_mut().zip(y);
        match (self.add, self.scale == 1.0 && self.total == 1.0) {
            (true, true) => pairs.for_each(|(to, y)| *to += y),
            (true, false) => pairs.for_each(|(to, y)| *to = (*to + self.scale * y) * self.total),
            (false, true) => to.copy_from_slice(y),
            (false, false) => pairs.for_each(|(to, y)| *to = self.scale * y * self.total),
        }
    }

    /// Joins a whole row, which it may overwrite.
    pub(super) fn row(&self, y: &mut [f32], to: &mut [f32]) {
        if let Some(norm) = &self.norm {
            norm.in_place(y);
        }
        self.elements(y, to);
    }
}

impl CpuBackend {
    pub(super) fn run_join(
        &self,
        inputs: &HostInputs,
        width: usize,
        join: &Join<'_, Self>,
        x: &CpuBuffer,
        to: &mut CpuBuffer,
    ) -> Result<(), KernelError> {
        let (check, rows) = (check("join"), inputs.plan().rows());
        check.join(join, width)?;
        check.len("x", x, rows * width)?;
        check.len("to", to, rows * width)?;
        let (join, to) = (RowJoin::new(join), Shared::new(to));
        self.each_row(rows, |row| {
            // SAFETY: each row has its own part.
            let (x, to) = (&x[row * width..][..width], unsafe { to.part(row * width, width) });
            match join.norm {
                // Norm in place where nothing else is kept there.
                Some(norm) if !join.add => {
                    norm.apply(x, to);
                    to.iter_mut().for_each(|v| *v = join.scale * *v * join.total);
                }
                Some(norm) => norm.joined(x, to, |to, y| (to + join.scale * y) * join.total),
                None => join.elements(x, to),
            }
        });
        Ok(())
    }

    pub(super) fn run_embed(
        &self,
        inputs: &HostInputs,
        args: &EmbedArgs<'_, Self>,
        sampled: &HostSampled,
        out: &mut CpuBuffer,
    ) -> Result<(), KernelError> {
        let width = check("embed").embed(inputs, args, out)?;
        let plan = inputs.plan();
        let (out, norm) = (Shared::new(out), args.norm.as_ref().map(RowNorm::new));
        self.each_row(plan.rows(), |row| {
            // SAFETY: each row has its own part.
            let out = unsafe { out.part(row * width, width) };
            // A row whose token could not be sampled has none: it computes from zeros, and whoever asked is told by its id.
            match args.table.gather_row(sampled.resolve(plan.inputs[row]) as usize, out) {
                Ok(()) if args.scale == 1.0 => {}
                Ok(()) => out.iter_mut().for_each(|v| *v *= args.scale),
                Err(_) => out.fill(0.0),
            }
            if let Some((table, offset)) = args.positions {
                table.add_row(plan.positions[row] as usize + offset as usize, 1.0, out);
            }
            if let Some(norm) = &norm {
                norm.in_place(out);
            }
        });
        Ok(())
    }

    pub(super) fn run_layer_inputs(
        &self,
        inputs: &HostInputs,
        args: &LayerInputsArgs<'_, Self>,
        sampled: &HostSampled,
        hidden: &CpuBuffer,
        out: &mut CpuBuffer,
        workspace: &mut CpuWorkspace,
    ) -> Result<(), KernelError> {
        let width = check("layer_inputs").layer_inputs(inputs, args, hidden, out)?;
        let (plan, columns, norm) = (inputs.plan(), args.projection.weight.columns(), RowNorm::new(&args.norm));
        let input = |row: usize, to: &mut [f32]| norm_or_copy(None, &hidden[row * columns..][..columns], to);
        self.linear_into(inputs, &args.projection, input, out, &mut workspace.linear)?;
        let out = Shared::new(out);
        self.each_row(plan.rows(), |row| {
            // SAFETY: each row has its own part.
            let out = unsafe { out.part(row * width, width) };
            for part in out.chunks_exact_mut(args.width) {
                part.iter_mut().for_each(|v| *v *= args.projection_scale);
                norm.in_place(part);
            }
            args.table.add_row(sampled.resolve(plan.inputs[row]) as usize, args.table_scale, out);
            out.iter_mut().for_each(|v| *v *= args.scale);
        });
        Ok(())
    }
}
