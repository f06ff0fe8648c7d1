//! Mixtures of experts.

use quire_kernels::{
    backend::{Activation, Backend, ExpertGroups, GroupScore, MoeArgs, Routing, Scoring, SharedExpert},
    plan::StepPlan,
};

use crate::harness::{Adapted, OwnJoin, OwnNorm, Setup, Step, activation};

struct Shared<B: Backend> {
    gate_up: Adapted<B>,
    down: Adapted<B>,
    gate: Option<B::Linear>,
}

struct Moe<B: Backend> {
    norm: Option<OwnNorm<B>>,
    router_norm: Option<OwnNorm<B>>,
    router: B::Linear,
    routing: Routing,
    correction: Option<B::Buffer>,
    expert_scale: Option<B::Buffer>,
    gate_up: B::Linear,
    down: B::Linear,
    activation: Activation,
    shared: Option<Shared<B>>,
    join: OwnJoin<B>,
    columns: usize,
    branch: bool,
}

fn routing<B: Backend>(s: &mut Setup<B>) -> Routing {
    let experts = s.random.pick(&[4, 8, 32]);
    let scoring = s.random.pick(&[Scoring::Softmax, Scoring::SoftmaxOfChosen, Scoring::Sigmoid]);
    let groups = (scoring != Scoring::SoftmaxOfChosen && s.chance(2)).then(|| {
        let score = s.random.pick(&[GroupScore::Best, GroupScore::BestTwo]);
        ExpertGroups { count: experts / 2, kept: experts / 4, score }
    });
    Routing {
        experts,
        chosen: s.random.pick(&[1, 2, 8]).min(experts / 2),
        scoring,
        groups,
        normalise: s.chance(2),
        scale: s.random.pick(&[1.0, 2.5]),
        weigh_input: s.chance(4),
    }
}

pub fn moe<B: Backend>(s: &mut Setup<B>) -> Box<dyn Step<B>> {
    let (columns, width, routing) = (s.width(), s.width(), routing(s));
    let experts = routing.experts;
    // Gate and up of an expert as one part or as two, of which types may differ.
    let (parts, rows) = s.random.pick(&[(1, 2 * width), (2, width)]);
    let shared_width = s.width();
    Box::new(Moe {
        norm: s.maybe_norm(columns),
        router_norm: s.chance(3).then(|| s.norm(columns)),
        router: s.stack(1, experts, columns),
        routing,
        correction: s.chance(2).then(|| s.buffer(experts, 0.2)),
        expert_scale: s.chance(3).then(|| s.weights(experts)),
        gate_up: s.stack(experts * parts, rows, columns),
        down: s.stack(experts, columns, width),
        activation: activation(&mut s.random, true),
        shared: s.chance(2).then(|| Shared {
            gate_up: s.adapted(2 * shared_width, columns),
            down: s.adapted(columns, shared_width),
            gate: s.chance(2).then(|| s.stack(1, 1, columns)),
        }),
        join: s.join(columns),
        columns,
        branch: s.chance(3),
    })
}

impl<B: Backend> Step<B> for Moe<B> {
    fn run(&mut self, s: &mut Setup<B>, inputs: &B::Inputs, _: &StepPlan) -> Vec<Vec<Vec<f32>>> {
        let args = MoeArgs {
            norm: self.norm.as_ref().map(OwnNorm::norm),
            router_norm: self.router_norm.as_ref().map(OwnNorm::norm),
            router: &self.router,
            routing: self.routing,
            correction: self.correction.as_ref(),
            expert_scale: self.expert_scale.as_ref(),
            gate_up: &self.gate_up,
            down: &self.down,
            activation: self.activation,
            shared: self.shared.as_ref().map(|shared| SharedExpert {
                gate_up: shared.gate_up.linear(),
                down: shared.down.linear(),
                gate: shared.gate.as_ref(),
            }),
            join: self.join.join(),
        };
        let (mut hidden, mut branch) = (s.rows_buffer(1, self.columns), s.rows_buffer(2, self.columns));
        s.backend.moe(inputs, &args, &mut hidden, self.branch.then_some(&mut branch), &mut s.workspace).unwrap();
        s.parts(&[(&hidden, self.columns), (&branch, self.columns)])
    }
}
