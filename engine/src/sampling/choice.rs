use std::sync::Arc;

use quire_kernels::plan::{NO_TOKEN, SamplingPlan};
use quire_proto::worker::v1::FinishReason;

use super::{History, RequestSampling};

/// Why a choice ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stop {
    pub reason: FinishReason,
    /// The token that ended it, if one did.
    pub token: Option<u32>,
}

/// Sampling state of one choice: everything that the next draw depends on besides the logits.
#[derive(Clone, Debug)]
pub struct ChoiceSampler {
    shared: Arc<RequestSampling>,
    seed: u64,
    generated: usize,
    /// Only with penalties.
    history: Option<History>,
}

impl ChoiceSampler {
    /// `generated`: tokens of this choice from elsewhere; they count as if they had been drawn here.
    #[must_use]
    pub fn new(shared: Arc<RequestSampling>, choice: u32, prompt: &[u32], generated: &[u32]) -> Self {
        let history = shared.penalises().then(|| {
            let mut history = History::default();
            if shared.repetition != 1.0 {
                prompt.iter().for_each(|id| history.prompt(*id));
            }
            generated.iter().for_each(|id| history.generated(*id));
            history
        });
        Self { seed: mix(shared.seed, choice), generated: generated.len(), history, shared }
    }

    /// Tokens of this choice so far, those from elsewhere included.
    #[must_use]
    pub fn generated(&self) -> usize {
        self.generated
    }

    #[must_use]
    pub fn wants_logprobs(&self) -> bool {
        self.shared.wants_logprobs()
    }

    /// Appends the row of the next draw; `ahead` tokens of this choice before it have not been accepted yet. Penalties look
    /// at accepted tokens only.
    pub fn row(&self, plan: &mut SamplingPlan, ahead: usize) {
        let shared = &*self.shared;
        let generated = self.generated + ahead;
        plan.targets.push(NO_TOKEN);
        plan.temperature.push(shared.temperature);
        plan.top_k.push(shared.top_k);
        plan.top_p.push(shared.top_p);
        plan.min_p.push(shared.min_p);
        plan.presence.push(shared.presence);
        plan.frequency.push(shared.frequency);
        plan.repetition.push(shared.repetition);
        plan.seed.push(self.seed);
        plan.draw.push(generated as u32);
        plan.logprobs.push(shared.logprobs);
        for &(id, bias) in &shared.bias {
            plan.bias_ids.push(id);
            plan.bias_values.push(bias);
        }
        if generated < shared.min_tokens {
            plan.bias_ids.extend_from_slice(&shared.stops);
            plan.bias_values.resize(plan.bias_ids.len(), f32::NEG_INFINITY);
        }
        if let Some(history) = &self.history {
            plan.history_ids.extend_from_slice(history.ids());
            plan.history_counts.extend_from_slice(history.counts());
        }
        end_row(plan);
    }

    /// Counts a drawn token; says whether it ends the choice. Stop tokens first, then the length, so that a stop token at
    /// the last place is a stop.
    pub fn accept(&mut self, token: u32) -> Option<Stop> {
        let before = self.generated;
        self.generated += 1;
        if let Some(history) = &mut self.history {
            history.generated(token);
        }
        self.ended(token, before)
    }

    /// Whether the choice has ended already with `last`, its last token from elsewhere.
    #[must_use]
    pub fn ended_before(&self, last: Option<u32>) -> Option<Stop> {
        match last {
            Some(token) => self.ended(token, self.generated.saturating_sub(1)),
            None => self.full(),
        }
    }

    fn ended(&self, token: u32, before: usize) -> Option<Stop> {
        if before >= self.shared.min_tokens && self.shared.stops.binary_search(&token).is_ok() {
            return Some(Stop { reason: FinishReason::Stop, token: Some(token) });
        }
        self.full()
    }

    fn full(&self) -> Option<Stop> {
        (self.generated >= self.shared.max_tokens).then_some(Stop { reason: FinishReason::Length, token: None })
    }
}

/// Starts the arrays of offsets; call once after clearing.
pub fn begin(plan: &mut SamplingPlan) {
    plan.bias_starts.push(0);
    plan.history_starts.push(0);
}

/// Appends a row that draws nothing but gives the log-probability of `target`, and the `logprobs` likeliest tokens.
pub fn score_row(plan: &mut SamplingPlan, target: u32, logprobs: i32) {
    plan.targets.push(target);
    plan.temperature.push(0.0);
    plan.top_k.push(0);
    plan.top_p.push(1.0);
    plan.min_p.push(0.0);
    plan.presence.push(0.0);
    plan.frequency.push(0.0);
    plan.repetition.push(1.0);
    plan.seed.push(0);
    plan.draw.push(0);
    plan.logprobs.push(logprobs);
    end_row(plan);
}

fn end_row(plan: &mut SamplingPlan) {
    plan.bias_starts.push(plan.bias_ids.len() as u32);
    plan.history_starts.push(plan.history_ids.len() as u32);
    plan.mask_rows.push(-1);
}

/// The random stream of a choice. Choice 0 has the seed itself; the others are spread by the finaliser of SplitMix64.
fn mix(seed: u64, choice: u32) -> u64 {
    if choice == 0 {
        return seed;
    }
    let mut z = seed.wrapping_add(u64::from(choice).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use quire_proto::worker::v1::{GenerateRequest, LogitBias, Sampling, Stopping};

    use super::*;
    use crate::sampling::ModelFacts;

    fn shared(sampling: Sampling, stopping: Stopping) -> Arc<RequestSampling> {
        let model = ModelFacts { vocab_size: 100, eos_ids: vec![2], max_logprobs: 20 };
        let request =
            GenerateRequest { sampling: Some(sampling), stopping: Some(stopping), logprobs: Some(3), ..GenerateRequest::default() };
        Arc::new(RequestSampling::new(&request, &model, 1000).unwrap())
    }

    fn rows(sampler: &ChoiceSampler) -> SamplingPlan {
        let mut plan = SamplingPlan::default();
        begin(&mut plan);
        sampler.row(&mut plan, 0);
        plan
    }

    #[test]
    fn stops_in_order() {
        let stopping = Stopping { max_tokens: 5, min_tokens: 2, stop_token_ids: vec![9], ignore_eos: false };
        let new = || ChoiceSampler::new(shared(Sampling::default(), stopping.clone()), 0, &[1], &[]);
        let mut sampler = new();
        assert_eq!(sampler.accept(9), None, "before min_tokens nothing stops");
        assert_eq!(sampler.accept(2), None);
        assert_eq!(sampler.accept(2), Some(Stop { reason: FinishReason::Stop, token: Some(2) }));
        let mut sampler = new();
        let ends: Vec<_> = (0..5).map(|_| sampler.accept(50)).collect();
        assert_eq!(ends[..4], [None; 4]);
        assert_eq!(ends[4], Some(Stop { reason: FinishReason::Length, token: None }));
        let mut sampler = new();
        (0..4).for_each(|_| assert_eq!(sampler.accept(50), None));
        assert_eq!(sampler.accept(9), Some(Stop { reason: FinishReason::Stop, token: Some(9) }), "a stop at the last place is a stop");
    }

    #[test]
    fn ignored_eos_is_drawn_and_passes() {
        let stopping = Stopping { max_tokens: 3, min_tokens: 3, stop_token_ids: vec![], ignore_eos: true };
        let mut sampler = ChoiceSampler::new(shared(Sampling::default(), stopping), 0, &[1], &[]);
        assert!(rows(&sampler).bias_ids.is_empty(), "it may be drawn even before min_tokens");
        assert_eq!(sampler.accept(2), None);
    }

    #[test]
    fn bans_hold_until_min_tokens() {
        let sampling = Sampling { logit_bias: vec![LogitBias { token_id: 5, bias: 1.5 }], ..Sampling::default() };
        let stopping = Stopping { min_tokens: 1, stop_token_ids: vec![9], ..Stopping::default() };
        let mut sampler = ChoiceSampler::new(shared(sampling, stopping), 0, &[1], &[]);
        let plan = rows(&sampler);
        assert_eq!(plan.bias_ids, [5, 2, 9]);
        assert_eq!(plan.bias_values, [1.5, f32::NEG_INFINITY, f32::NEG_INFINITY]);
        assert_eq!(plan.bias_starts, [0, 3]);
        sampler.accept(50);
        assert_eq!(rows(&sampler).bias_ids, [5]);
    }

    #[test]
    fn a_continued_choice_has_the_rows_of_an_unbroken_one() {
        let sampling = Sampling { repetition_penalty: 1.2, presence_penalty: 0.5, seed: 77, ..Sampling::default() };
        let stopping = Stopping { min_tokens: 4, max_tokens: 6, ..Stopping::default() };
        let shared = shared(sampling, stopping);
        let mut unbroken = ChoiceSampler::new(Arc::clone(&shared), 3, &[8, 9, 8], &[]);
        for token in [8, 30, 30] {
            unbroken.accept(token);
        }
        let mut continued = ChoiceSampler::new(shared, 3, &[8, 9, 8], &[8, 30, 30]);
        for token in [31, 32, 33] {
            let (a, b) = (rows(&unbroken), rows(&continued));
            assert_eq!(format!("{a:?}"), format!("{b:?}"));
            assert_eq!(unbroken.accept(token), continued.accept(token));
        }
        let plan = rows(&unbroken);
        assert_eq!(plan.draw, [6]);
        assert_eq!(plan.history_ids, [8, 9, 30, 31, 32, 33]);
        assert_eq!(plan.history_counts, [1, 0, 2, 1, 1, 1]);
    }

    #[test]
    fn presence_alone_does_not_look_at_the_prompt() {
        let sampling = Sampling { presence_penalty: 0.5, ..Sampling::default() };
        let mut sampler = ChoiceSampler::new(shared(sampling, Stopping::default()), 0, &[8, 9], &[]);
        sampler.accept(9);
        assert_eq!(rows(&sampler).history_ids, [9]);
    }

    #[test]
    fn choices_draw_from_different_streams() {
        let mut seeds: Vec<u64> = (0..64).map(|choice| mix(1234, choice)).collect();
        assert_eq!(seeds[0], 1234);
        seeds.sort_unstable();
        seeds.dedup();
        assert_eq!(seeds.len(), 64);
    }
}
