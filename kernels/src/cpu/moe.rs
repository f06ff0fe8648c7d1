//! A mixture of experts: route all rows, then each expert over the rows that chose it.

use super::{
    CpuBackend, CpuBuffer, CpuWorkspace,
    activations::Activations,
    check,
    isa::Isa,
    join::RowJoin,
    memory::Shared,
    norm::{RowNorm, norm_or_copy},
    projections::LinearScratch,
};
use crate::{
    KernelError,
    backend::{Linear, MoeArgs, MoeShape, SharedExpert},
    inputs::{HostInputs, shape},
    plan::StepLimits,
    routing::{route, sigmoid},
};

/// Scratch, sized once.
pub(super) struct MoeScratch {
    room: MoeShape,
    rows: usize,
    /// Rows × experts.
    logits: CpuBuffer,
    /// Rows × 2 · experts.
    scores: CpuBuffer,
    /// Rows × chosen.
    chosen: Vec<u32>,
    weights: Vec<f32>,
    /// Entries of `chosen` in order of expert, then row; and where each expert's begin.
    order: Vec<u32>,
    starts: Vec<u32>,
    /// Experts that some row chose.
    active: Vec<u32>,
    /// The experts' inputs, prepared once per row.
    single: Activations,
    /// Entries in this order × 2 · width.
    gates: CpuBuffer,
    /// Entries of `chosen` × hidden.
    outputs: CpuBuffer,
    /// Rows × 2 · shared width, hidden.
    shared_gates: CpuBuffer,
    shared: CpuBuffer,
}

impl MoeScratch {
    pub(super) fn new(isa: Isa, room: MoeShape, limits: &StepLimits, threads: usize) -> Result<Self, KernelError> {
        let rows = limits.rows;
        let buffer = |width: usize| {
            let len = rows.checked_mul(width).ok_or(KernelError::OutOfMemory { what: "workspace", bytes: usize::MAX })?;
            CpuBuffer::new("workspace", len)
        };
        let shared = if room.shared_width > 0 { room.hidden } else { 0 };
        Ok(Self {
            room,
            rows,
            logits: buffer(room.experts)?,
            scores: buffer(2 * room.experts)?,
            chosen: vec![0; rows * room.chosen],
            weights: vec![0.0; rows * room.chosen],
            order: vec![0; rows * room.chosen],
            starts: vec![0; room.experts + 1],
            active: Vec::with_capacity(room.experts),
            single: Activations::new(isa, rows, room.hidden, threads)?,
            gates: buffer(2 * room.width * room.chosen)?,
            outputs: buffer(room.hidden * room.chosen)?,
            shared_gates: buffer(2 * room.shared_width)?,
            shared: buffer(shared)?,
        })
    }

    fn check(&self, rows: usize, args: &MoeArgs<'_, CpuBackend>, columns: usize, width: usize) -> Result<(), KernelError> {
        let MoeShape { experts, chosen, hidden, width: most, shared_width } = self.room;
        let shared = args.shared.as_ref().map_or(0, |shared| shared.down.weight.columns());
        let routing = &args.routing;
        let fits = routing.experts <= experts && routing.chosen <= chosen && columns <= hidden && width <= most && shared <= shared_width;
        shape("moe", fits && rows <= self.rows, || {
            format!(
                "{} of {} experts of {width}, shared {shared}, for {rows} rows: more than the workspace was made for",
                routing.chosen, routing.experts
            )
        })
    }

    /// Sorts the choices by expert.
    fn sort(&mut self, entries: usize, experts: usize) {
        let starts = &mut self.starts[..=experts];
        starts.fill(0);
        for &expert in &self.chosen[..entries] {
            starts[expert as usize + 1] += 1;
        }
        for expert in 0..experts {
            starts[expert + 1] += starts[expert];
        }
        for (entry, &expert) in self.chosen[..entries].iter().enumerate() {
            let place = &mut starts[expert as usize];
            self.order[*place as usize] = entry as u32;
            *place += 1;
        }
        // Each start has moved to the next one's place.
        starts.copy_within(..experts, 1);
        starts[0] = 0;
        self.active.clear();
        self.active.extend((0..experts as u32).filter(|&e| starts[e as usize] < starts[e as usize + 1]));
    }
}

impl CpuBackend {
    pub(super) fn run_moe(
        &self,
        inputs: &HostInputs,
        args: &MoeArgs<'_, Self>,
        hidden: &mut CpuBuffer,
        branch: Option<&mut CpuBuffer>,
        workspace: &mut CpuWorkspace,
    ) -> Result<(), KernelError> {
        let (columns, width) = check("moe").moe(inputs, args, hidden, branch.as_deref())?;
        let rows = inputs.plan().rows();
        let CpuWorkspace { linear, moe: Some(scratch), .. } = workspace else {
            return Err(KernelError::Shape { op: "moe", detail: "the workspace was made for none".into() });
        };
        scratch.check(rows, args, columns, width)?;
        if rows == 0 {
            return Ok(());
        }
        self.route_rows(rows, args, hidden, scratch, linear)?;
        self.run_experts(rows, args, hidden, scratch, linear)?;
        if let Some(shared) = &args.shared {
            self.run_shared(inputs, args, shared, hidden, scratch, linear)?;
        }
        self.combine(rows, args, columns, scratch, branch.unwrap_or(hidden));
        Ok(())
    }

    fn route_rows(
        &self,
        rows: usize,
        args: &MoeArgs<'_, Self>,
        hidden: &[f32],
        scratch: &mut MoeScratch,
        linear: &mut LinearScratch,
    ) -> Result<(), KernelError> {
        let (columns, experts, chosen) = (args.router.columns(), args.routing.experts, args.routing.chosen);
        let norm = args.router_norm.as_ref().or(args.norm.as_ref()).map(RowNorm::new);
        linear.activations.fill(&self.pool, rows, columns, args.router.forms(), |row, out| {
            norm_or_copy(norm.as_ref(), &hidden[row * columns..][..columns], out);
        })?;
        let logits = Shared::new(&mut scratch.logits);
        self.multiply(args.router, &linear.activations, |row, first, values| {
            // SAFETY: no output is computed twice.
            unsafe { logits.part(row * experts + first, values.len()) }.copy_from_slice(values);
        })?;
        let (logits, scores) = (&scratch.logits, Shared::new(&mut scratch.scores));
        let (entries, weights) = (Shared::new(&mut scratch.chosen), Shared::new(&mut scratch.weights));
        let (correction, scale) = (args.correction.map(|c| &c[..experts]), args.expert_scale.map(|s| &s[..experts]));
        self.each_row(rows, |row| {
            // SAFETY: each row has its own parts.
            let (scores, entries, weights) = unsafe {
                (scores.part(row * 2 * experts, 2 * experts), entries.part(row * chosen, chosen), weights.part(row * chosen, chosen))
            };
            let (scores, merit) = scores.split_at_mut(experts);
            route(&args.routing, &logits[row * experts..][..experts], correction, scale, scores, merit, entries, weights);
        });
        scratch.sort(rows * chosen, experts);
        Ok(())
    }

    /// `outputs` = each entry's expert over its row.
    fn run_experts(
        &self,
        rows: usize,
        args: &MoeArgs<'_, Self>,
        hidden: &[f32],
        scratch: &mut MoeScratch,
        linear: &mut LinearScratch,
    ) -> Result<(), KernelError> {
        let (columns, width, chosen) = (args.gate_up.columns(), args.down.columns(), args.routing.chosen);
        let norm = args.norm.as_ref().map(RowNorm::new);
        let MoeScratch { order, starts, active, single, weights, gates, outputs, .. } = scratch;
        let (entries, activations) = (&order[..rows * chosen], &mut linear.activations);
        let rows_of = |&expert: &u32| (starts[expert as usize + 1] - starts[expert as usize]) as usize;
        let expert = |span: usize| active[span] as usize;
        let input = |row: usize, out: &mut [f32]| norm_or_copy(norm.as_ref(), &hidden[row * columns..][..columns], out);
        let forms = args.gate_up.forms();
        if args.routing.weigh_input {
            activations.fill_spans(&self.pool, active.iter().map(rows_of), columns, forms, |i, out| {
                input(entries[i] as usize / chosen, out);
                let weight = weights[entries[i] as usize];
                out.iter_mut().for_each(|x| *x *= weight);
            })?;
        } else {
            single.fill_spans(&self.pool, std::iter::repeat_n(1, rows), columns, forms, input)?;
            activations.copy_spans(&self.pool, active.iter().map(rows_of), single, |i| entries[i] as usize / chosen)?;
        }
        let wide = Shared::new(gates);
        self.multiply_stack(args.gate_up, 2 * width, active.len(), expert, activations, |i, first, values| {
            // SAFETY: no output is computed twice.
            unsafe { wide.part(i * 2 * width + first, values.len()) }.copy_from_slice(values);
        })?;
        activations.fill_spans(&self.pool, active.iter().map(rows_of), width, args.down.forms(), |i, out| {
            let (gate, up) = gates[i * 2 * width..][..2 * width].split_at(width);
            out.copy_from_slice(gate);
            // SAFETY: the backend checked its instruction set.
            unsafe { (self.kernels.gate)(args.activation, out, up) };
        })?;
        let to = Shared::new(outputs);
        self.multiply_stack(args.down, columns, active.len(), expert, activations, |i, first, values| {
            // SAFETY: as above.
            unsafe { to.part(entries[i] as usize * columns + first, values.len()) }.copy_from_slice(values);
        })
    }

    fn run_shared(
        &self,
        inputs: &HostInputs,
        args: &MoeArgs<'_, Self>,
        shared: &SharedExpert<'_, Self>,
        hidden: &[f32],
        scratch: &mut MoeScratch,
        linear: &mut LinearScratch,
    ) -> Result<(), KernelError> {
        let (rows, columns, width) = (inputs.plan().rows(), args.gate_up.columns(), shared.down.weight.columns());
        let norm = args.norm.as_ref().map(RowNorm::new);
        let input = |row: usize, out: &mut [f32]| norm_or_copy(norm.as_ref(), &hidden[row * columns..][..columns], out);
        self.linear_into(inputs, &shared.gate_up, input, &mut scratch.shared_gates, linear)?;
        let gates = &scratch.shared_gates;
        let activated = |row: usize, out: &mut [f32]| {
            let (gate, up) = gates[row * 2 * width..][..2 * width].split_at(width);
            out.copy_from_slice(gate);
            // SAFETY: the backend checked its instruction set.
            unsafe { (self.kernels.gate)(args.activation, out, up) };
        };
        self.linear_into(inputs, &shared.down, activated, &mut scratch.shared, linear)?;
        if let Some(gate) = shared.gate {
            let logits = &mut scratch.logits;
            self.linear_into(inputs, &Linear::plain(gate), input, logits, linear)?;
            let (logits, to) = (&*logits, Shared::new(&mut scratch.shared));
            self.each_row(rows, |row| {
                let weight = sigmoid(logits[row]);
                // SAFETY: each row has its own part.
                unsafe { to.part(row * columns, columns) }.iter_mut().for_each(|v| *v *= weight);
            });
        }
        Ok(())
    }

    /// Sums up each row's experts in the order of its choice, and joins.
    fn combine(&self, rows: usize, args: &MoeArgs<'_, Self>, columns: usize, scratch: &mut MoeScratch, to: &mut [f32]) {
        let chosen = args.routing.chosen;
        let join = RowJoin::new(&args.join);
        let (outputs, to) = (Shared::new(&mut scratch.outputs), Shared::new(to));
        let (weights, shared) = (&scratch.weights, args.shared.as_ref().map(|_| &scratch.shared));
        self.each_row(rows, |row| {
            // SAFETY: each row has its own parts.
            let (outputs, to) = unsafe { (outputs.part(row * chosen * columns, chosen * columns), to.part(row * columns, columns)) };
            let weight = |slot: usize| if args.routing.weigh_input { 1.0 } else { weights[row * chosen + slot] };
            let (total, others) = outputs.split_at_mut(columns);
            let first = weight(0);
            total.iter_mut().for_each(|y| *y *= first);
            for (slot, y) in others.chunks_exact(columns).enumerate() {
                let weight = weight(slot + 1);
                total.iter_mut().zip(y).for_each(|(total, y)| *total += weight * y);
            }
            if let Some(shared) = shared {
                total.iter_mut().zip(&shared[row * columns..]).for_each(|(total, y)| *total += y);
            }
            join.row(total, to);
        });
    }
}
