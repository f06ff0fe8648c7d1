//! A mixture of experts, one row at a time.

use super::{
    Reference, check, ops,
    projections::{join_row, normed},
};
use crate::{
    KernelError,
    backend::{MoeArgs, SharedExpert},
    inputs::HostInputs,
    routing::{route, sigmoid},
};

impl Reference {
    pub(super) fn run_moe(
        &self,
        inputs: &HostInputs,
        args: &MoeArgs<'_, Self>,
        hidden: &mut Vec<f32>,
        mut branch: Option<&mut Vec<f32>>,
    ) -> Result<(), KernelError> {
        let (columns, width) = check("moe").moe(inputs, args, hidden, branch.as_deref())?;
        for (row, &adapter) in inputs.plan().adapters.iter().enumerate() {
            let own = &hidden[row * columns..][..columns];
            let x = normed(own, args.norm.as_ref());
            let seen = args.router_norm.as_ref().map_or_else(|| x.clone(), |norm| ops::norm(own, norm));
            let mut y = self.experts(args, &seen, &x, columns, width);
            if let Some(shared) = &args.shared {
                y.iter_mut().zip(self.shared(args, shared, adapter, &x)).for_each(|(y, add)| *y += add);
            }
            let to = branch.as_deref_mut().unwrap_or(hidden);
            join_row(&args.join, &y, &mut to[row * columns..][..columns]);
        }
        Ok(())
    }

    /// Σ weight · expert(x), in the order of the choice.
    fn experts(&self, args: &MoeArgs<'_, Self>, seen: &[f32], x: &[f32], columns: usize, width: usize) -> Vec<f32> {
        let routing = &args.routing;
        let logits = self.multiply(args.router, seen);
        let (mut experts, mut weights) = (vec![0; routing.chosen], vec![0.0; routing.chosen]);
        let (mut scores, mut merit) = (vec![0.0; routing.experts], vec![0.0; routing.experts]);
        let (correction, scale) = (args.correction.map(Vec::as_slice), args.expert_scale.map(Vec::as_slice));
        route(routing, &logits, correction, scale, &mut scores, &mut merit, &mut experts, &mut weights);
        let mut total = vec![0.0; columns];
        for (&expert, &weight) in experts.iter().zip(&weights) {
            let expert = expert as usize;
            let (before, after) = if routing.weigh_input { (weight, 1.0) } else { (1.0, weight) };
            let x: Vec<f32> = x.iter().map(|x| x * before).collect();
            let y = self.multiply_rows(args.gate_up, expert * 2 * width..(expert + 1) * 2 * width, &x);
            let activated: Vec<f32> = (0..width).map(|i| ops::gate(y[i], y[width + i], args.activation)).collect();
            let y = self.multiply_rows(args.down, expert * columns..(expert + 1) * columns, &activated);
            total.iter_mut().zip(y).for_each(|(total, y)| *total += after * y);
        }
        total
    }

    fn shared(&self, args: &MoeArgs<'_, Self>, shared: &SharedExpert<'_, Self>, adapter: i32, x: &[f32]) -> Vec<f32> {
        let y = self.adapted(&shared.gate_up, adapter, x);
        let (gate, up) = y.split_at(y.len() / 2);
        let activated: Vec<f32> = gate.iter().zip(up).map(|(&gate, &up)| ops::gate(gate, up, args.activation)).collect();
        let weight = shared.gate.map_or(1.0, |gate| sigmoid(self.multiply(gate, x)[0]));
        self.adapted(&shared.down, adapter, &activated).into_iter().map(|y| weight * y).collect()
    }
}
