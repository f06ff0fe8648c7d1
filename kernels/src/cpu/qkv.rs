//! Queries, keys and values: projections, norms, rotation, and the write into the cache.

use super::{
    CpuBackend, CpuBuffer, CpuWorkspace, check,
    kv::CpuKv,
    linear::PackedLinear,
    memory::Shared,
    norm::{RowNorm, norm_heads, norm_or_copy},
    projections::{LinearScratch, expect_len},
    rope,
};
use crate::{
    KernelError,
    backend::{KeysValues, KvShape, LatentArgs, QkvArgs},
    inputs::{HostInputs, shape},
};

impl CpuBackend {
    pub(super) fn run_qkv(
        &self,
        inputs: &HostInputs,
        args: &QkvArgs<'_, Self>,
        hidden: &CpuBuffer,
        kv: &mut CpuKv,
        q: &mut CpuBuffer,
        workspace: &mut CpuWorkspace,
    ) -> Result<(), KernelError> {
        check("qkv_rope_write").qkv(inputs, args, kv.of("qkv_rope_write", args.group)?.shape, hidden, q)?;
        let &QkvArgs { heads, kv_heads, key_dim, .. } = args;
        let (plan, columns, width) = (inputs.plan(), args.linear.weight.columns(), args.linear.weight.rows());
        let norm = args.norm.as_ref().map(RowNorm::new);
        let input = |row: usize, out: &mut [f32]| norm_or_copy(norm.as_ref(), &hidden[row * columns..][..columns], out);
        let CpuWorkspace { linear: scratch, wide, second, .. } = workspace;
        self.linear_into(inputs, &args.linear, input, wide, scratch)?;
        // Values made from keys wait in the workspace.
        let copied = if args.keys_values == KeysValues::ValuesAreKeys { kv_heads * key_dim } else { 0 };
        expect_len("qkv_rope_write", "workspace", second, plan.rows() * copied)?;
        let slots = &plan.groups[args.group].slots;
        let (wide, second) = (Shared::new(wide), Shared::new(second));
        let (q, writer) = (Shared::new(q), kv.writer("qkv_rope_write", args.group, self.kernels, args.layer)?);
        self.each_row(plan.rows(), |row| {
            // SAFETY: each row has its own parts.
            let (y, q) = unsafe { (wide.part(row * width, width), q.part(row * heads * key_dim, heads * key_dim)) };
            // SAFETY: as above.
            let copy = unsafe { second.part(row * copied, copied) };
            if let Some(clamp) = args.clamp {
                y.iter_mut().for_each(|v| *v = v.clamp(-clamp, clamp));
            }
            let (queries, rest) = y.split_at_mut(heads * key_dim);
            turn_heads(args, args.query_norm.as_ref(), row, queries);
            match args.query_scale {
                Some(scale) => {
                    let factor = scale.at(plan.positions[row]);
                    q.iter_mut().zip(&*queries).for_each(|(q, x)| *q = x * factor);
                }
                None => q.copy_from_slice(queries),
            }
            if args.keys_values == KeysValues::Elsewhere {
                return;
            }
            let (keys, values) = rest.split_at_mut(kv_heads * key_dim);
            let values = if copied > 0 { copy } else { values };
            if copied > 0 {
                values.copy_from_slice(keys);
            }
            turn_heads(args, args.key_norm.as_ref(), row, keys);
            norm_heads(args.value_norm.as_ref(), false, args.value_dim, values);
            norm_heads(args.value_norm.as_ref(), true, args.value_dim, values);
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
        let (op, rows, KvShape { kv_heads, key_dim, value_dim, shared_values, .. }) =
            ("write_kv", inputs.plan().rows(), *kv.of("write_kv", group)?.shape);
        inputs.check_kv(op, group, layer, kv.of(op, group)?.shape)?;
        shape(op, values.is_none() == shared_values, || "values: given where keys hold them, or missing".into())?;
        let (key_width, value_width) = (kv_heads * key_dim, if shared_values { 0 } else { kv_heads * value_dim });
        let values = values.unwrap_or_default();
        expect_len(op, "keys", keys, rows * key_width)?;
        expect_len(op, "values", values, rows * value_width)?;
        let (slots, writer) = (&inputs.plan().groups[group].slots, kv.writer(op, group, self.kernels, layer)?);
        self.each_row(rows, |row| {
            let (keys, values) = (&keys[row * key_width..][..key_width], &values[row * value_width..][..value_width]);
            // SAFETY: slots were checked against this cache, and the backend checked its instruction set.
            unsafe { writer.write(slots[row] as usize, keys, values) };
        });
        Ok(())
    }

    pub(super) fn run_latent(
        &self,
        inputs: &HostInputs,
        args: &LatentArgs<'_, Self>,
        hidden: &CpuBuffer,
        kv: &mut CpuKv,
        q: &mut CpuBuffer,
        workspace: &mut CpuWorkspace,
    ) -> Result<(), KernelError> {
        let op = "latent_rope_write";
        check(op).latent(inputs, args, kv.of(op, args.group)?.shape, hidden, q)?;
        let &LatentArgs { heads, plain_dim, latent, .. } = args;
        let (rows, columns, width, turned) = (inputs.plan().rows(), args.down.weight.columns(), args.down.weight.rows(), args.rope.dim);
        let (key, queries) = (latent + turned, heads * (plain_dim + turned));
        let norm = args.norm.as_ref().map(RowNorm::new);
        let input = |row: usize, out: &mut [f32]| norm_or_copy(norm.as_ref(), &hidden[row * columns..][..columns], out);
        let CpuWorkspace { linear: scratch, wide, second, .. } = workspace;
        self.linear_into(inputs, &args.down, input, wide, scratch)?;
        self.write_latents(inputs, args, kv, wide)?;
        // Projected queries lie in `second`, or still in `wide`.
        if let Some((norm, up)) = &args.query_up {
            let (norm, source) = (RowNorm::new(norm), up.weight.columns());
            let input = |row: usize, out: &mut [f32]| norm.apply(&wide[row * width..][..source], out);
            self.linear_into(inputs, up, input, second, scratch)?;
        }
        let (from, stride) = if args.query_up.is_some() { (&*second, queries) } else { (&*wide, width) };
        let x = |row: usize, head: usize| &from[row * stride + head * (plain_dim + turned)..][..plain_dim + turned];
        self.multiply_heads(rows, heads, args.absorb, |row, head| &x(row, head)[..plain_dim], q, key, scratch)?;
        let q = Shared::new(q);
        self.each_row(rows, |row| {
            // SAFETY: each row has its own part.
            let q = unsafe { q.part(row * heads * key, heads * key) };
            let (cos, sin) = args.rope.rows[row * turned..][..turned].split_at(turned / 2);
            for (head, q) in q.chunks_exact_mut(key).enumerate() {
                q[latent..].copy_from_slice(&x(row, head)[plain_dim..]);
                rope::turn(&mut q[latent..], cos, sin, args.rope.style);
            }
            if let Some(scale) = args.query_scale {
                let factor = scale.at(inputs.plan().positions[row]);
                q.iter_mut().for_each(|q| *q *= factor);
            }
        });
        Ok(())
    }

    /// Normed latents and rotated keys, from `wide` into the cache.
    fn write_latents(&self, inputs: &HostInputs, args: &LatentArgs<'_, Self>, kv: &mut CpuKv, wide: &mut [f32]) -> Result<(), KernelError> {
        let (plan, width, turned) = (inputs.plan(), args.down.weight.rows(), args.rope.dim);
        let (slots, norm) = (&plan.groups[args.group].slots, RowNorm::new(&args.latent_norm));
        let writer = kv.writer("latent_rope_write", args.group, self.kernels, args.layer)?;
        let wide = Shared::new(wide);
        self.each_row(plan.rows(), |row| {
            // SAFETY: each row has its own part.
            let y = unsafe { wide.part(row * width, width) };
            let key = &mut y[width - args.latent - turned..];
            let (cos, sin) = args.rope.rows[row * turned..][..turned].split_at(turned / 2);
            norm.in_place(&mut key[..args.latent]);
            rope::turn(&mut key[args.latent..], cos, sin, args.rope.style);
            // SAFETY: slots were checked against this cache, and the backend checked its instruction set.
            unsafe { writer.write(slots[row] as usize, key, &[]) };
        });
        Ok(())
    }

    pub(super) fn run_head_linear(
        &self,
        inputs: &HostInputs,
        linear: &PackedLinear,
        heads: usize,
        x: &CpuBuffer,
        out: &mut CpuBuffer,
        workspace: &mut CpuWorkspace,
    ) -> Result<(), KernelError> {
        let (outputs, columns) = check("head_linear").head_linear(inputs, linear, heads, x, out)?;
        let input = |row: usize, head: usize| &x[(row * heads + head) * columns..][..columns];
        self.multiply_heads(inputs.plan().rows(), heads, linear, input, out, outputs, &mut workspace.linear)
    }

    /// Outputs of head h of a row from (row · heads + h) · stride on.
    fn multiply_heads<'a, F>(
        &self,
        rows: usize,
        heads: usize,
        linear: &PackedLinear,
        input: F,
        out: &mut [f32],
        stride: usize,
        scratch: &mut LinearScratch,
    ) -> Result<(), KernelError>
    where
        F: Fn(usize, usize) -> &'a [f32] + Sync,
    {
        if rows == 0 {
            return Ok(());
        }
        // Head by head, the rows of each together.
        let (spans, columns, outputs) = (std::iter::repeat_n(rows, heads), linear.columns(), linear.rows() / heads);
        let input = |r: usize, to: &mut [f32]| to.copy_from_slice(input(r % rows, r / rows));
        scratch.activations.fill_spans(&self.pool, spans, columns, linear.forms(), input)?;
        let out = Shared::new(out);
        self.multiply_stack(
            linear,
            outputs,
            heads,
            |span| span,
            &scratch.activations,
            |r, first, values| {
                // SAFETY: no output is computed twice.
                unsafe { out.part(((r % rows) * heads + r / rows) * stride + first, values.len()) }.copy_from_slice(values);
            },
        )
    }
}

/// Norm and rotation of a row's queries or keys.
fn turn_heads(args: &QkvArgs<'_, CpuBackend>, norm: Option<&crate::backend::HeadNorm<'_, CpuBackend>>, row: usize, x: &mut [f32]) {
    norm_heads(norm, false, args.key_dim, x);
    if let Some(rope) = &args.rope {
        let (cos, sin) = rope.rows[row * rope.dim..][..rope.dim].split_at(rope.dim / 2);
        x.chunks_exact_mut(args.key_dim).for_each(|head| rope::turn(head, cos, sin, rope.style));
    }
    norm_heads(norm, true, args.key_dim, x);
}
