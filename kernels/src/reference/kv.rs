//! The cache and attention over it, in plain loops.

use std::ops::Range;

use super::{Reference, ops::dot};
use crate::{
    KernelError,
    backend::{AttentionArgs, CHUNK, KvShape},
    inputs::{HostInputs, shape},
    kv::{check_shapes, codec::stored, shape_of},
    plan::StepPlan,
};

/// Keys and values of all cache groups. Each shape has a memory of its own: a block that changes groups is written before it is
/// read, so nobody can tell.
pub struct ReferenceKv {
    stores: Vec<Store>,
    groups: Vec<usize>,
}

impl ReferenceKv {
    pub(super) fn new(shapes: &[KvShape], groups: &[usize]) -> Result<Self, KernelError> {
        check_shapes(shapes, groups)?;
        Ok(Self { stores: shapes.iter().map(Store::new).collect(), groups: groups.to_vec() })
    }

    pub(super) fn of(&self, op: &'static str, group: usize) -> Result<&Store, KernelError> {
        Ok(&self.stores[shape_of(op, &self.groups, group, self.stores.len())?])
    }

    pub(super) fn of_mut(&mut self, op: &'static str, group: usize) -> Result<&mut Store, KernelError> {
        let number = shape_of(op, &self.groups, group, self.stores.len())?;
        Ok(&mut self.stores[number])
    }

    /// Copies the blocks that a plan says.
    pub(super) fn copy_blocks(&mut self, inputs: &HostInputs) -> Result<(), KernelError> {
        for store in &mut self.stores {
            inputs.check_copies(&store.shape)?;
            inputs.plan().block_copies.iter().for_each(|&(from, to)| store.copy(from as usize, to as usize));
        }
        Ok(())
    }
}

/// Keys and values in order of layer, slot, head, element; as f32, what the cache's type makes of them when written.
pub(super) struct Store {
    pub(super) shape: KvShape,
    keys: Vec<f32>,
    /// Empty where keys hold them.
    values: Vec<f32>,
}

impl Store {
    fn new(kv: &KvShape) -> Self {
        let heads = kv.layers * kv.blocks * kv.block_size * kv.kv_heads;
        let values = if kv.shared_values { 0 } else { heads * kv.value_dim };
        Self { shape: *kv, keys: vec![0.0; heads * kv.key_dim], values: vec![0.0; values] }
    }

    /// Number of a layer's slot and head.
    fn at(&self, layer: usize, slot: usize, head: usize) -> usize {
        let KvShape { blocks, block_size, kv_heads, .. } = self.shape;
        (layer * blocks * block_size + slot) * kv_heads + head
    }

    fn key(&self, layer: usize, slot: usize, head: usize) -> &[f32] {
        &self.keys[self.at(layer, slot, head) * self.shape.key_dim..][..self.shape.key_dim]
    }

    fn value(&self, layer: usize, slot: usize, head: usize) -> &[f32] {
        let KvShape { key_dim, value_dim, shared_values, .. } = self.shape;
        if shared_values {
            &self.keys[self.at(layer, slot, head) * key_dim..][..value_dim]
        } else {
            &self.values[self.at(layer, slot, head) * value_dim..][..value_dim]
        }
    }

    /// Stores the keys and values of all heads of one row; no values where keys hold them.
    pub(super) fn write(&mut self, layer: usize, slot: usize, keys: &[f32], values: &[f32]) {
        let KvShape { key_dim, value_dim, kv_type, .. } = self.shape;
        for (head, key) in keys.chunks(key_dim).enumerate() {
            let at = self.at(layer, slot, head) * key_dim;
            self.keys[at..at + key_dim].copy_from_slice(&stored(key, kv_type));
        }
        for (head, value) in values.chunks(value_dim).enumerate() {
            let at = self.at(layer, slot, head) * value_dim;
            self.values[at..at + value_dim].copy_from_slice(&stored(value, kv_type));
        }
    }

    /// [`write`](Self::write) for all rows of a step.
    pub(super) fn write_rows(
        &mut self,
        inputs: &HostInputs,
        group: usize,
        layer: usize,
        keys: &[f32],
        values: Option<&[f32]>,
    ) -> Result<(), KernelError> {
        let (op, rows, KvShape { kv_heads, key_dim, value_dim, shared_values, .. }) = ("write_kv", inputs.plan().rows(), self.shape);
        inputs.check_kv(op, group, layer, &self.shape)?;
        super::expect_len(op, "keys", keys, rows * kv_heads * key_dim)?;
        shape(op, values.is_none() == shared_values, || "values: given where keys hold them, or missing".into())?;
        let width = if shared_values { 0 } else { kv_heads * value_dim };
        let values = values.unwrap_or_default();
        super::expect_len(op, "values", values, rows * width)?;
        for (row, &slot) in inputs.plan().groups[group].slots.iter().enumerate() {
            let keys = &keys[row * kv_heads * key_dim..][..kv_heads * key_dim];
            self.write(layer, slot as usize, keys, &values[row * width..][..width]);
        }
        Ok(())
    }

    /// Copies a block of every layer.
    fn copy(&mut self, from: usize, to: usize) {
        let block = self.shape.block_size * self.shape.kv_heads;
        for layer in 0..self.shape.layers {
            let (from, to) = ((layer * self.shape.blocks + from) * block, (layer * self.shape.blocks + to) * block);
            let (key, value) = (self.shape.key_dim, if self.shape.shared_values { 0 } else { self.shape.value_dim });
            self.keys.copy_within(from * key..(from + block) * key, to * key);
            self.values.copy_within(from * value..(from + block) * value, to * value);
        }
    }

    pub(super) fn attention(&self, plan: &StepPlan, args: &AttentionArgs<'_, Reference>, q: &[f32], out: &mut [f32]) {
        let &AttentionArgs { heads, kv_heads, key_dim, value_dim, layer, .. } = args;
        let (group, block_size) = (&plan.groups[args.group], self.shape.block_size);
        for sequence in 0..plan.sequences() {
            let table = &group.block_tables[sequence * group.stride..][..group.stride];
            let slot = |key: usize| table[key / block_size] as usize * block_size + key % block_size;
            for row in plan.row_starts[sequence] as usize..plan.row_starts[sequence + 1] as usize {
                let position = plan.positions[row] as usize;
                let keys = args.mask.first_key(position)..position + 1;
                for head in 0..heads {
                    let kv_head = head / (heads / kv_heads);
                    let sink = args.sinks.map(|sinks| sinks[head]);
                    let q = &q[(row * heads + head) * key_dim..][..key_dim];
                    let score = |i| score(q, self.key(layer, slot(i), kv_head), args.scale, args.softcap);
                    let value = |i| self.value(layer, slot(i), kv_head);
                    let got = attend(value_dim, keys.clone(), sink, score, value);
                    out[(row * heads + head) * value_dim..][..value_dim].copy_from_slice(&got);
                }
            }
        }
    }
}

/// scale · q·k, capped. An infinity becomes NaN: as a low score it would be no key at all, and a cap would make a number of it.
fn score(q: &[f32], key: &[f32], scale: f32, softcap: Option<f32>) -> f32 {
    let s = scale * dot(q, key);
    let s = if s.is_finite() { s } else { f32::NAN };
    softcap.map_or(s, |cap| cap * (s / cap).tanh())
}

/// Softmax-weighted sum of values as it is known after some keys: Σ e^(s − max) and Σ e^(s − max) · v.
struct Partial {
    max: f32,
    sum: f32,
    values: Vec<f32>,
}

impl Partial {
    /// Adds the keys of a later piece.
    fn merge(&mut self, later: &Self) {
        let max = self.max.max(later.max);
        let (a, b) = ((self.max - max).exp(), (later.max - max).exp());
        self.sum = self.sum * a + later.sum * b;
        for (v, w) in self.values.iter_mut().zip(&later.values) {
            *v = *v * a + w * b;
        }
        self.max = max;
    }
}

/// Attention of one query head over `keys`, in pieces cut at multiples of [`CHUNK`] that are merged in ascending order; a sink
/// stands before them, like a piece of one key whose value is zero.
fn attend<'a>(
    value_dim: usize,
    keys: Range<usize>,
    sink: Option<f32>,
    score: impl Fn(usize) -> f32,
    value: impl Fn(usize) -> &'a [f32],
) -> Vec<f32> {
    let mut total = sink.map(|max| Partial { max, sum: 1.0, values: vec![0.0; value_dim] });
    let mut start = keys.start;
    while start < keys.end {
        let end = keys.end.min((start / CHUNK + 1) * CHUNK);
        let scores: Vec<f32> = (start..end).map(&score).collect();
        let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut piece = Partial { max, sum: 0.0, values: vec![0.0; value_dim] };
        for (i, score) in (start..end).zip(&scores) {
            let p = (score - max).exp();
            piece.sum += p;
            for (v, w) in piece.values.iter_mut().zip(value(i)) {
                *v += p * w;
            }
        }
        match &mut total {
            Some(total) => total.merge(&piece),
            None => total = Some(piece),
        }
        start = end;
    }
    total.map_or_else(|| vec![0.0; value_dim], |t| t.values.iter().map(|v| v / t.sum).collect())
}
