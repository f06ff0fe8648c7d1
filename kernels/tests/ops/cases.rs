//! Embedding, joins, feed-forward, logits.

use quire_kernels::{
    backend::{Activation, Backend, Columns, EmbedArgs, GateUpArgs, LayerInputsArgs, LogitsArgs},
    plan::StepPlan,
};

use crate::harness::{Adapted, OwnJoin, OwnNorm, Setup, Step, VOCABULARY, activation};

type Rows = Vec<Vec<Vec<f32>>>;

struct Embed<B: Backend> {
    table: B::Linear,
    positions: Option<(B::Linear, u32)>,
    norm: Option<OwnNorm<B>>,
    width: usize,
    scale: f32,
    /// Inputs of layers: how many, table, projection, norm, width.
    layers: usize,
    layer_table: B::Linear,
    projection: Adapted<B>,
    layer_norm: OwnNorm<B>,
    layer_width: usize,
}

pub fn embed<B: Backend>(s: &mut Setup<B>) -> Box<dyn Step<B>> {
    let (width, layer_width, layers) = (s.width(), s.random.pick(&[8, 16]), 4);
    Box::new(Embed {
        table: s.stack(1, VOCABULARY, width),
        positions: s.chance(2).then(|| (s.stack(1, 80, width), s.random.below(3) as u32)),
        norm: s.maybe_norm(width),
        width,
        scale: s.random.pick(&[1.0, 6.5]),
        layers,
        layer_table: s.stack(1, VOCABULARY, layers * layer_width),
        projection: s.adapted(layers * layer_width, width),
        layer_norm: s.norm(layer_width),
        layer_width,
    })
}

impl<B: Backend> Step<B> for Embed<B> {
    fn run(&mut self, s: &mut Setup<B>, inputs: &B::Inputs, _: &StepPlan) -> Rows {
        let (mut hidden, all) = (s.rows_buffer(0, self.width), self.layers * self.layer_width);
        let args = EmbedArgs {
            table: &self.table,
            scale: self.scale,
            positions: self.positions.as_ref().map(|(table, offset)| (table, *offset)),
            norm: self.norm.as_ref().map(OwnNorm::norm),
        };
        s.backend.embed(inputs, &args, &s.sampled, &mut hidden).unwrap();
        let args = LayerInputsArgs {
            table: &self.layer_table,
            table_scale: 2.5,
            projection: self.projection.linear(),
            projection_scale: 0.3,
            norm: self.layer_norm.norm(),
            width: self.layer_width,
            scale: 0.7,
        };
        // From the same values on every backend, so that nothing falls to the other side of a quantiser.
        let (seen, mut out) = (s.rows_buffer(1, self.width), s.rows_buffer(0, all));
        s.backend.layer_inputs(inputs, &args, &s.sampled, &seen, &mut out, &mut s.workspace).unwrap();
        s.parts(&[(&hidden, self.width), (&out, all)])
    }
}

struct LinearJoin<B: Backend> {
    linear: Adapted<B>,
    join: OwnJoin<B>,
    second: OwnJoin<B>,
    columns: usize,
    outputs: usize,
}

pub fn linear_join<B: Backend>(s: &mut Setup<B>) -> Box<dyn Step<B>> {
    let (columns, outputs) = (s.width(), s.width());
    Box::new(LinearJoin { linear: s.adapted(outputs, columns), join: s.join(outputs), second: s.join(outputs), columns, outputs })
}

impl<B: Backend> Step<B> for LinearJoin<B> {
    fn run(&mut self, s: &mut Setup<B>, inputs: &B::Inputs, _: &StepPlan) -> Rows {
        let (x, mut to, mut other) = (s.rows_buffer(1, self.columns), s.rows_buffer(2, self.outputs), s.rows_buffer(3, self.outputs));
        s.backend.linear_join(inputs, &self.linear.linear(), &self.join.join(), &x, &mut to, &mut s.workspace).unwrap();
        let branch = s.rows_buffer(4, self.outputs);
        s.backend.join(inputs, self.outputs, &self.second.join(), &branch, &mut other).unwrap();
        s.parts(&[(&to, self.outputs), (&other, self.outputs)])
    }
}

struct GateUp<B: Backend> {
    norm: Option<OwnNorm<B>>,
    linear: Adapted<B>,
    activation: Activation,
    gated: bool,
    factor: bool,
    columns: usize,
    width: usize,
}

pub fn gate_up<B: Backend>(s: &mut Setup<B>) -> Box<dyn Step<B>> {
    let (columns, width, gated) = (s.width(), s.width(), s.chance(2));
    Box::new(GateUp {
        norm: s.maybe_norm(columns),
        linear: s.adapted(if gated { 2 * width } else { width }, columns),
        activation: activation(&mut s.random, gated),
        gated,
        factor: !gated && s.chance(2),
        columns,
        width,
    })
}

impl<B: Backend> Step<B> for GateUp<B> {
    fn run(&mut self, s: &mut Setup<B>, inputs: &B::Inputs, _: &StepPlan) -> Rows {
        let (hidden, mut out, stride) = (s.rows_buffer(1, self.columns), s.rows_buffer(0, self.width), self.width + 7);
        let factors = s.rows_buffer(2, stride);
        let args = GateUpArgs {
            norm: self.norm.as_ref().map(OwnNorm::norm),
            linear: self.linear.linear(),
            activation: self.activation,
            gated: self.gated,
            factor: self.factor.then_some(Columns { buffer: &factors, stride, start: 5 }),
        };
        s.backend.gate_up(inputs, &args, &hidden, &mut out, &mut s.workspace).unwrap();
        s.parts(&[(&out, self.width)])
    }
}

struct Logits<B: Backend> {
    norm: Option<OwnNorm<B>>,
    linear: B::Linear,
    columns: usize,
    scale: f32,
    softcap: Option<f32>,
}

pub fn logits<B: Backend>(s: &mut Setup<B>) -> Box<dyn Step<B>> {
    let columns = s.width();
    Box::new(Logits {
        norm: s.maybe_norm(columns),
        linear: s.stack(1, VOCABULARY, columns),
        columns,
        scale: s.random.pick(&[1.0, 0.5, 4.0]),
        softcap: s.random.pick(&[None, Some(2.0)]),
    })
}

impl<B: Backend> Step<B> for Logits<B> {
    fn run(&mut self, s: &mut Setup<B>, inputs: &B::Inputs, _: &StepPlan) -> Rows {
        let (hidden, mut out) = (s.rows_buffer(1, self.columns), s.rows_buffer(0, VOCABULARY));
        let norm = self.norm.as_ref().map(OwnNorm::norm);
        let args = LogitsArgs { norm, linear: &self.linear, scale: self.scale, softcap: self.softcap };
        s.backend.logits(inputs, &args, &hidden, &mut out, &mut s.workspace).unwrap();
        s.parts(&[(&out, VOCABULARY)])
    }
}
