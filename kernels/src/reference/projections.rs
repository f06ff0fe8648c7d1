//! The ops around a linear.

use super::{Reference, ReferenceKv, check, ops};
use crate::{
    KernelError,
    backend::{
        Columns, EmbedArgs, GateUpArgs, HeadNorm, Join, KeysValues, LatentArgs, LayerInputsArgs, Linear, LogitsArgs, Norm, QkvArgs, Span,
    },
    inputs::{HostInputs, HostSampled},
};

type Done = Result<(), KernelError>;

/// The norm, or what is there.
pub(super) fn normed(x: &[f32], norm: Option<&Norm<'_, Reference>>) -> Vec<f32> {
    norm.map_or_else(|| x.to_vec(), |norm| ops::norm(x, norm))
}

/// One row of a branch joins one row.
pub(super) fn join_row(join: &Join<'_, Reference>, y: &[f32], to: &mut [f32]) {
    let y = normed(y, join.norm.as_ref());
    for (to, y) in to.iter_mut().zip(y) {
        let old = if join.add { *to } else { 0.0 };
        *to = (old + join.scale * y) * join.total;
    }
}

fn norm_heads(x: &mut [f32], norm: Option<&HeadNorm<'_, Reference>>, after_rope: bool, dim: usize) {
    let Some(HeadNorm { norm, span, .. }) = norm.filter(|norm| norm.after_rope == after_rope) else { return };
    if *span == Span::Width {
        let y = ops::norm(x, norm);
        return x.copy_from_slice(&y);
    }
    for (i, head) in x.chunks_mut(dim).enumerate() {
        let own =
            |buffer: Option<&Vec<f32>>| buffer.map(|values| if *span == Span::Head { values.clone() } else { values[i * dim..].to_vec() });
        let (weight, bias) = (own(norm.weight), own(norm.bias));
        let y = ops::norm(head, &Norm { weight: weight.as_ref(), bias: bias.as_ref(), ..*norm });
        head.copy_from_slice(&y);
    }
}

impl Reference {
    /// Row `id` of a table; zeros where there is none.
    fn table_row(table: &super::ReferenceLinear, id: usize) -> Vec<f32> {
        let row = table.weights.get(id.saturating_mul(table.columns)..).and_then(|rows| rows.get(..table.columns));
        row.map_or_else(|| vec![0.0; table.columns], <[f32]>::to_vec)
    }

    pub(super) fn run_embed(&self, inputs: &HostInputs, args: &EmbedArgs<'_, Self>, sampled: &HostSampled, out: &mut Vec<f32>) -> Done {
        let width = check("embed").embed(inputs, args, out)?;
        let plan = inputs.plan();
        for (row, out) in out.chunks_mut(width).take(plan.rows()).enumerate() {
            let mut x: Vec<f32> =
                Self::table_row(args.table, sampled.resolve(plan.inputs[row]) as usize).iter().map(|w| args.scale * w).collect();
            if let Some((table, offset)) = args.positions {
                let position = Self::table_row(table, plan.positions[row] as usize + offset as usize);
                x.iter_mut().zip(position).for_each(|(x, p)| *x += p);
            }
            out.copy_from_slice(&normed(&x, args.norm.as_ref()));
        }
        Ok(())
    }

    pub(super) fn run_layer_inputs(
        &self,
        inputs: &HostInputs,
        args: &LayerInputsArgs<'_, Self>,
        sampled: &HostSampled,
        hidden: &Vec<f32>,
        out: &mut Vec<f32>,
    ) -> Done {
        let width = check("layer_inputs").layer_inputs(inputs, args, hidden, out)?;
        let (plan, columns) = (inputs.plan(), args.projection.weight.columns);
        for (row, out) in out.chunks_mut(width).take(plan.rows()).enumerate() {
            let y = self.adapted(&args.projection, plan.adapters[row], &hidden[row * columns..][..columns]);
            let own = Self::table_row(args.table, sampled.resolve(plan.inputs[row]) as usize);
            for ((y, own), out) in y.chunks(args.width).zip(own.chunks(args.width)).zip(out.chunks_mut(args.width)) {
                let y: Vec<f32> = y.iter().map(|y| args.projection_scale * y).collect();
                let y = ops::norm(&y, &args.norm);
                for i in 0..y.len() {
                    out[i] = (y[i] + args.table_scale * own[i]) * args.scale;
                }
            }
        }
        Ok(())
    }

    pub(super) fn run_qkv(
        &self,
        inputs: &HostInputs,
        args: &QkvArgs<'_, Self>,
        hidden: &Vec<f32>,
        kv: &mut ReferenceKv,
        q: &mut Vec<f32>,
    ) -> Done {
        let &QkvArgs { heads, kv_heads, key_dim, value_dim, .. } = args;
        let kv = kv.of_mut("qkv_rope_write", args.group)?;
        check("qkv_rope_write").qkv(inputs, args, &kv.shape, hidden, q)?;
        let (plan, columns) = (inputs.plan(), args.linear.weight.columns);
        for (row, &slot) in plan.groups[args.group].slots.iter().enumerate() {
            let x = normed(&hidden[row * columns..][..columns], args.norm.as_ref());
            let mut y = self.adapted(&args.linear, plan.adapters[row], &x);
            if let Some(clamp) = args.clamp {
                y.iter_mut().for_each(|y| *y = y.clamp(-clamp, clamp));
            }
            let (queries, rest) = y.split_at_mut(heads * key_dim);
            let (keys, values) = rest.split_at_mut(rest.len().min(kv_heads * key_dim));
            let mut values = if args.keys_values == KeysValues::ValuesAreKeys { keys.to_vec() } else { values.to_vec() };
            norm_heads(&mut values, args.value_norm.as_ref(), false, value_dim);
            norm_heads(&mut values, args.value_norm.as_ref(), true, value_dim);
            for (x, norm) in [(&mut *queries, &args.query_norm), (&mut *keys, &args.key_norm)] {
                norm_heads(x, norm.as_ref(), false, key_dim);
                if let Some(rope) = &args.rope {
                    let (cos, sin) = rope.rows[row * rope.dim..][..rope.dim].split_at(rope.dim / 2);
                    x.chunks_mut(key_dim).for_each(|head| ops::rope(head, cos, sin, rope.style));
                }
                norm_heads(x, norm.as_ref(), true, key_dim);
            }
            let factor = args.query_scale.map_or(1.0, |scale| scale.at(plan.positions[row]));
            for (q, x) in q[row * heads * key_dim..].iter_mut().zip(queries) {
                *q = *x * factor;
            }
            if args.keys_values != KeysValues::Elsewhere {
                kv.write(args.layer, slot as usize, keys, &values);
            }
        }
        Ok(())
    }

    pub(super) fn run_latent(
        &self,
        inputs: &HostInputs,
        args: &LatentArgs<'_, Self>,
        hidden: &Vec<f32>,
        kv: &mut ReferenceKv,
        q: &mut Vec<f32>,
    ) -> Done {
        let &LatentArgs { heads, plain_dim, latent, .. } = args;
        let kv = kv.of_mut("latent_rope_write", args.group)?;
        check("latent_rope_write").latent(inputs, args, &kv.shape, hidden, q)?;
        let (plan, columns, turned) = (inputs.plan(), args.down.weight.columns, args.rope.dim);
        let width = heads * (latent + turned);
        for (row, &slot) in plan.groups[args.group].slots.iter().enumerate() {
            let x = normed(&hidden[row * columns..][..columns], args.norm.as_ref());
            let y = self.adapted(&args.down, plan.adapters[row], &x);
            let (source, rest) = y.split_at(y.len() - latent - turned);
            let (cos, sin) = args.rope.rows[row * turned..][..turned].split_at(turned / 2);
            let mut key = ops::norm(&rest[..latent], &args.latent_norm);
            key.extend_from_slice(&rest[latent..]);
            ops::rope(&mut key[latent..], cos, sin, args.rope.style);
            kv.write(args.layer, slot as usize, &key, &[]);
            let queries = match &args.query_up {
                None => source.to_vec(),
                Some((norm, linear)) => self.adapted(linear, plan.adapters[row], &ops::norm(source, norm)),
            };
            let factor = args.query_scale.map_or(1.0, |scale| scale.at(plan.positions[row]));
            for (head, query) in queries.chunks(plain_dim + turned).enumerate() {
                let mut absorbed = self.multiply_rows(args.absorb, head * latent..(head + 1) * latent, &query[..plain_dim]);
                absorbed.extend_from_slice(&query[plain_dim..]);
                ops::rope(&mut absorbed[latent..], cos, sin, args.rope.style);
                for (q, x) in q[row * width + head * (latent + turned)..].iter_mut().zip(absorbed) {
                    *q = x * factor;
                }
            }
        }
        Ok(())
    }

    pub(super) fn run_head_linear(
        &self,
        inputs: &HostInputs,
        linear: &super::ReferenceLinear,
        heads: usize,
        x: &Vec<f32>,
        out: &mut Vec<f32>,
    ) -> Done {
        let (outputs, columns) = check("head_linear").head_linear(inputs, linear, heads, x, out)?;
        for i in 0..inputs.plan().rows() * heads {
            let head = i % heads;
            let y = self.multiply_rows(linear, head * outputs..(head + 1) * outputs, &x[i * columns..][..columns]);
            out[i * outputs..][..outputs].copy_from_slice(&y);
        }
        Ok(())
    }

    pub(super) fn run_linear_join(
        &self,
        inputs: &HostInputs,
        linear: &Linear<'_, Self>,
        join: &Join<'_, Self>,
        x: &Vec<f32>,
        to: &mut Vec<f32>,
    ) -> Done {
        check("linear_join").linear_join(inputs, linear, join, x, to)?;
        let (outputs, columns) = (linear.weight.rows, linear.weight.columns);
        for (row, &adapter) in inputs.plan().adapters.iter().enumerate() {
            let y = self.adapted(linear, adapter, &x[row * columns..][..columns]);
            join_row(join, &y, &mut to[row * outputs..][..outputs]);
        }
        Ok(())
    }

    pub(super) fn run_gate_up(&self, inputs: &HostInputs, args: &GateUpArgs<'_, Self>, hidden: &Vec<f32>, out: &mut Vec<f32>) -> Done {
        let width = check("gate_up").gate_up(inputs, args, hidden, out)?;
        let columns = args.linear.weight.columns;
        for (row, &adapter) in inputs.plan().adapters.iter().enumerate() {
            let x = normed(&hidden[row * columns..][..columns], args.norm.as_ref());
            let y = self.adapted(&args.linear, adapter, &x);
            for i in 0..width {
                out[row * width + i] = match &args.factor {
                    _ if args.gated => ops::gate(y[i], y[width + i], args.activation),
                    Some(Columns { buffer, stride, start }) => ops::activate(y[i], args.activation) * buffer[row * stride + start + i],
                    None => ops::activate(y[i], args.activation),
                };
            }
        }
        Ok(())
    }

    pub(super) fn run_logits(&self, inputs: &HostInputs, args: &LogitsArgs<'_, Self>, hidden: &Vec<f32>, logits: &mut Vec<f32>) -> Done {
        check("logits").logits(inputs, args, hidden, logits)?;
        let (outputs, columns) = (args.linear.rows, args.linear.columns);
        for (&row, out) in inputs.plan().logit_rows.iter().zip(logits.chunks_mut(outputs)) {
            let x = normed(&hidden[row as usize * columns..][..columns], args.norm.as_ref());
            for (out, y) in out.iter_mut().zip(self.multiply(args.linear, &x)) {
                let z = args.scale * y;
                *out = args.softcap.map_or(z, |cap| ops::softcap(z, cap));
            }
        }
        Ok(())
    }
}
