//! Which experts a row goes to and with what weights. All backends use this one definition: a choice that differed by a
//! rounding would send a row elsewhere.

use crate::{
    KernelError,
    args::{GroupScore, Routing, Scoring},
    inputs::shape,
};

/// Keeps a sum of weights from being 0.
const LEAST_SUM: f32 = 1e-20;

impl Routing {
    pub(crate) fn check(&self, op: &'static str) -> Result<(), KernelError> {
        let &Self { experts, chosen, groups, scoring, .. } = self;
        shape(op, chosen >= 1 && chosen <= experts, || format!("{chosen} of {experts} experts"))?;
        let Some(groups) = groups else { return Ok(()) };
        let good = groups.count >= 1 && groups.kept >= 1 && groups.kept <= groups.count && experts.is_multiple_of(groups.count);
        shape(op, good && chosen <= groups.kept * (experts / groups.count), || {
            format!("{chosen} of {experts} experts from {} of {} groups", groups.kept, groups.count)
        })?;
        let pairs = groups.score == GroupScore::Best || experts / groups.count >= 2;
        shape(op, pairs && scoring != Scoring::SoftmaxOfChosen, || "groups of one expert, or by logits".into())
    }
}

/// Chooses experts by one row of the router's logits, the best first; equal ones by number.
///
/// 1. score = softmax or sigmoid of the logit (or the logit itself, for [`Scoring::SoftmaxOfChosen`]).
/// 2. The choice goes by score + correction. With groups: by the groups of the largest worth, of equal ones the first.
/// 3. weight = score of the chosen (or the softmax over the chosen logits); `normalise`: divided by their sum + 1e-20; times
///    `scale`, times `expert_scale`.
///
/// `scores` and `merit` are scratch of as many values as there are experts; `experts` and `weights` get one per choice. With NaN
/// among the logits some experts are chosen, never one twice.
pub(crate) fn route(
    routing: &Routing,
    logits: &[f32],
    correction: Option<&[f32]>,
    expert_scale: Option<&[f32]>,
    scores: &mut [f32],
    merit: &mut [f32],
    experts: &mut [u32],
    weights: &mut [f32],
) {
    match routing.scoring {
        Scoring::SoftmaxOfChosen => scores.copy_from_slice(logits),
        Scoring::Softmax => {
            scores.copy_from_slice(logits);
            softmax(scores);
        }
        Scoring::Sigmoid => scores.iter_mut().zip(logits).for_each(|(score, z)| *score = sigmoid(*z)),
    }
    match correction {
        Some(correction) => merit.iter_mut().zip(&*scores).zip(correction).for_each(|((m, s), c)| *m = s + c),
        None => merit.copy_from_slice(scores),
    }
    keep_groups(routing, merit);
    for slot in 0..experts.len() {
        let best = largest(merit).unwrap_or_else(|| (0..merit.len()).find(|e| !experts[..slot].contains(&(*e as u32))).unwrap_or(0));
        // Taken: never the largest again.
        merit[best] = f32::NAN;
        experts[slot] = best as u32;
        weights[slot] = scores[best];
    }
    if routing.scoring == Scoring::SoftmaxOfChosen {
        softmax(weights);
    }
    if routing.normalise {
        let sum = weights.iter().sum::<f32>() + LEAST_SUM;
        weights.iter_mut().for_each(|w| *w /= sum);
    }
    for (weight, &expert) in weights.iter_mut().zip(&*experts) {
        *weight *= routing.scale * expert_scale.map_or(1.0, |scale| scale[expert as usize]);
    }
}

/// 1 / (1 + e⁻ˣ).
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

fn softmax(x: &mut [f32]) {
    let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    x.iter_mut().for_each(|x| *x = (*x - max).exp());
    let sum: f32 = x.iter().sum();
    x.iter_mut().for_each(|x| *x /= sum);
}

/// Index of the first of the largest numbers; None where there is none.
fn largest(x: &[f32]) -> Option<usize> {
    let mut best: Option<(usize, f32)> = None;
    for (i, &x) in x.iter().enumerate() {
        if !x.is_nan() && best.is_none_or(|(_, most)| x > most) {
            best = Some((i, x));
        }
    }
    best.map(|(i, _)| i)
}

/// Sets the merit of the experts of all other groups to −∞.
fn keep_groups(routing: &Routing, merit: &mut [f32]) {
    let Some(groups) = routing.groups.filter(|groups| groups.kept < groups.count) else { return };
    let size = merit.len() / groups.count;
    let worth = |merit: &[f32], group: usize| {
        let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
        for &m in &merit[group * size..][..size] {
            (first, second) = if m > first { (m, first) } else { (first, second.max(m)) };
        }
        if groups.score == GroupScore::Best { first } else { first + second }
    };
    // A group stays if fewer than `kept` groups are better, equal ones counting where they come before it. Worths are
    // computed again for every pair: groups are few, and nothing is stored.
    let mut drop = [0_u64; 16];
    for group in 0..groups.count.min(64 * drop.len()) {
        let mine = worth(merit, group);
        let better = (0..groups.count).filter(|&other| {
            let theirs = worth(merit, other);
            theirs > mine || (theirs == mine && other < group)
        });
        if better.count() >= groups.kept {
            drop[group / 64] |= 1 << (group % 64);
        }
    }
    for group in 0..groups.count.min(64 * drop.len()) {
        if drop[group / 64] >> (group % 64) & 1 == 1 {
            merit[group * size..][..size].fill(f32::NEG_INFINITY);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::ExpertGroups;

    fn run(routing: &Routing, logits: &[f32], correction: Option<&[f32]>, scale: Option<&[f32]>) -> (Vec<u32>, Vec<f32>) {
        routing.check("test").unwrap();
        let n = logits.len();
        let (mut experts, mut weights) = (vec![0; routing.chosen], vec![0.0; routing.chosen]);
        route(routing, logits, correction, scale, &mut vec![0.0; n], &mut vec![0.0; n], &mut experts, &mut weights);
        (experts, weights)
    }

    const PLAIN: Routing =
        Routing { experts: 4, chosen: 2, scoring: Scoring::Softmax, groups: None, normalise: false, scale: 1.0, weigh_input: false };

    fn near(got: &[f32], want: &[f32]) {
        assert_eq!(got.len(), want.len());
        assert!(got.iter().zip(want).all(|(g, w)| (g - w).abs() < 1e-6), "{got:?}, not {want:?}");
    }

    #[test]
    fn scores_and_normalisation() {
        let logits = [0.0, 2.0_f32.ln(), 4.0_f32.ln(), 0.0];
        let (experts, weights) = run(&PLAIN, &logits, None, None);
        assert_eq!(experts, [2, 1]);
        near(&weights, &[0.5, 0.25]);
        near(&run(&Routing { normalise: true, scale: 3.0, ..PLAIN }, &logits, None, None).1, &[2.0, 1.0]);
        near(&run(&Routing { scoring: Scoring::SoftmaxOfChosen, ..PLAIN }, &logits, None, None).1, &[2.0 / 3.0, 1.0 / 3.0]);
        near(&run(&Routing { scoring: Scoring::Sigmoid, ..PLAIN }, &logits, None, None).1, &[0.8, 2.0 / 3.0]);
        near(&run(&PLAIN, &logits, None, Some(&[1.0, 10.0, 2.0, 1.0])).1, &[1.0, 2.5]);
    }

    #[test]
    fn a_correction_changes_the_choice_and_not_the_weights() {
        let sigmoid = Routing { scoring: Scoring::Sigmoid, ..PLAIN };
        let (experts, weights) = run(&sigmoid, &[0.0, 1.0, 2.0, -1.0], Some(&[0.0, 0.0, -1.0, 0.9]), None);
        assert_eq!(experts, [3, 1]);
        near(&weights, &[super::sigmoid(-1.0), super::sigmoid(1.0)]);
    }

    #[test]
    fn groups_limit_the_choice() {
        let logits = [3.0, 0.0, 2.0, 1.9, -1.0, -1.0, 0.5, 0.4];
        let groups = |score| Routing { experts: 8, chosen: 3, groups: Some(ExpertGroups { count: 4, kept: 2, score }), ..PLAIN };
        assert_eq!(run(&groups(GroupScore::Best), &logits, None, None).0, [0, 2, 3]);
        let sums =
            Routing { groups: Some(ExpertGroups { count: 4, kept: 1, score: GroupScore::BestTwo }), chosen: 2, ..groups(GroupScore::Best) };
        assert_eq!(run(&Routing { scoring: Scoring::Sigmoid, ..sums }, &logits, None, None).0, [2, 3]);
    }

    #[test]
    fn equal_ones_go_by_number_and_nan_never_repeats() {
        assert_eq!(run(&PLAIN, &[1.0; 4], None, None).0, [0, 1]);
        let (mut experts, weights) = run(&Routing { chosen: 4, ..PLAIN }, &[f32::NAN, 1.0, f32::NAN, f32::INFINITY], None, None);
        experts.sort_unstable();
        assert_eq!(experts, [0, 1, 2, 3]);
        assert!(weights.iter().any(|w| w.is_nan()));
    }

    #[test]
    fn impossible_choices_are_refused() {
        let groups = |count, kept| Some(ExpertGroups { count, kept, score: GroupScore::BestTwo });
        for bad in [
            Routing { chosen: 5, ..PLAIN },
            Routing { chosen: 0, ..PLAIN },
            Routing { groups: groups(3, 1), ..PLAIN },
            Routing { groups: groups(4, 4), ..PLAIN },
            Routing { groups: groups(2, 3), ..PLAIN },
            Routing { groups: groups(2, 1), chosen: 3, ..PLAIN },
        ] {
            assert!(bad.check("test").is_err(), "{bad:?}");
        }
    }
}
