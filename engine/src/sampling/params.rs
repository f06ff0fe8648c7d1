use quire_proto::worker::v1::{GenerateRequest, Sampling, Stopping};

/// Entries of a request's logit bias.
const MAX_BIAS: usize = 1024;
/// A request's own stop ids.
const MAX_STOP_IDS: usize = 256;

/// A parameter that cannot be served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadParameter {
    /// Its name in the proto.
    pub field: &'static str,
    pub message: String,
}

/// What validation must know of the model.
#[derive(Clone, Debug)]
pub struct ModelFacts {
    pub vocab_size: usize,
    /// The end-of-generation set.
    pub eos_ids: Vec<u32>,
    /// Likeliest tokens that may be asked for.
    pub max_logprobs: usize,
}

/// Validated parameters, shared by the choices of a request.
#[derive(Clone, Debug)]
pub struct RequestSampling {
    pub(super) temperature: f32,
    pub(super) top_k: u32,
    pub(super) top_p: f32,
    pub(super) min_p: f32,
    pub(super) presence: f32,
    pub(super) frequency: f32,
    pub(super) repetition: f32,
    pub(super) bias: Vec<(u32, f32)>,
    pub(super) seed: u64,
    /// -1: none.
    pub(super) logprobs: i32,
    /// Tokens that end generation; sorted.
    pub(super) stops: Vec<u32>,
    pub(super) min_tokens: usize,
    /// The context's end included.
    pub(super) max_tokens: usize,
}

impl RequestSampling {
    /// Checks a request's parameters. `room`: tokens that the context holds beyond the prompt.
    pub fn new(request: &GenerateRequest, model: &ModelFacts, room: usize) -> Result<Self, BadParameter> {
        let sampling = request.sampling.clone().unwrap_or_default();
        let stopping = request.stopping.clone().unwrap_or_default();
        check_numbers(&sampling)?;
        let bias = bias(&sampling, model)?;
        let (min_tokens, max_tokens) = lengths(&stopping, room)?;
        let logprobs = logprobs("logprobs", request.logprobs, model)?;
        Ok(Self {
            temperature: sampling.temperature,
            top_k: sampling.top_k,
            top_p: zero_is_one(sampling.top_p),
            min_p: sampling.min_p,
            presence: sampling.presence_penalty,
            frequency: sampling.frequency_penalty,
            repetition: zero_is_one(sampling.repetition_penalty),
            bias,
            seed: sampling.seed,
            logprobs,
            stops: stops(&stopping, model)?,
            min_tokens,
            max_tokens,
        })
    }

    /// Tokens to generate at most, those generated elsewhere included.
    #[must_use]
    pub fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    /// Log-probabilities are wanted with every token.
    #[must_use]
    pub fn wants_logprobs(&self) -> bool {
        self.logprobs >= 0
    }

    /// Penalties look at what was generated; repetition at the prompt as well.
    pub fn penalises(&self) -> bool {
        self.presence != 0.0 || self.frequency != 0.0 || self.repetition != 1.0
    }
}

/// The value of a `logprobs` field as [`SamplingPlan`](quire_kernels::plan::SamplingPlan) has it.
pub(crate) fn logprobs(field: &'static str, wanted: Option<u32>, model: &ModelFacts) -> Result<i32, BadParameter> {
    match wanted {
        None => Ok(-1),
        Some(k) if k as usize <= model.max_logprobs => Ok(k as i32),
        Some(k) => Err(bad(field, format!("{k} is more than the {} that this worker gives", model.max_logprobs))),
    }
}

fn check_numbers(sampling: &Sampling) -> Result<(), BadParameter> {
    let within = |field, value: f32, low: f32, high: f32| {
        if value.is_finite() && (low..=high).contains(&value) {
            Ok(())
        } else {
            Err(bad(field, format!("{value} is not between {low} and {high}")))
        }
    };
    within("sampling.temperature", sampling.temperature, 0.0, 100.0)?;
    within("sampling.top_p", sampling.top_p, 0.0, 1.0)?;
    within("sampling.min_p", sampling.min_p, 0.0, 1.0)?;
    within("sampling.presence_penalty", sampling.presence_penalty, -100.0, 100.0)?;
    within("sampling.frequency_penalty", sampling.frequency_penalty, -100.0, 100.0)?;
    within("sampling.repetition_penalty", sampling.repetition_penalty, 0.0, 100.0)
}

fn bias(sampling: &Sampling, model: &ModelFacts) -> Result<Vec<(u32, f32)>, BadParameter> {
    const FIELD: &str = "sampling.logit_bias";
    if sampling.logit_bias.len() > MAX_BIAS {
        return Err(bad(FIELD, format!("more than {MAX_BIAS} entries")));
    }
    sampling
        .logit_bias
        .iter()
        .map(|entry| match (entry.token_id, entry.bias) {
            (id, _) if id as usize >= model.vocab_size => Err(bad(FIELD, outside(id, model))),
            // Minus infinity is a ban; plus infinity would make every other token impossible by a NaN.
            (id, bias) if bias.is_nan() || bias == f32::INFINITY => Err(bad(FIELD, format!("{bias} for token {id} is not a number"))),
            (id, bias) => Ok((id, bias)),
        })
        .collect()
}

fn stops(stopping: &Stopping, model: &ModelFacts) -> Result<Vec<u32>, BadParameter> {
    const FIELD: &str = "stopping.stop_token_ids";
    if stopping.stop_token_ids.len() > MAX_STOP_IDS {
        return Err(bad(FIELD, format!("more than {MAX_STOP_IDS} ids")));
    }
    if let Some(&id) = stopping.stop_token_ids.iter().find(|id| **id as usize >= model.vocab_size) {
        return Err(bad(FIELD, outside(id, model)));
    }
    let eos = if stopping.ignore_eos { &[][..] } else { &model.eos_ids };
    let mut stops: Vec<u32> = stopping.stop_token_ids.iter().chain(eos).copied().collect();
    stops.sort_unstable();
    stops.dedup();
    Ok(stops)
}

fn lengths(stopping: &Stopping, room: usize) -> Result<(usize, usize), BadParameter> {
    let (min, max) = (stopping.min_tokens as usize, stopping.max_tokens as usize);
    if max > 0 && min > max {
        return Err(bad("stopping.min_tokens", format!("{min} is more than max_tokens, {max}")));
    }
    Ok((min, if max == 0 { room } else { max.min(room) }))
}

pub(crate) fn outside(id: u32, model: &ModelFacts) -> String {
    format!("token id {id} is out of vocabulary (0 to {})", model.vocab_size.saturating_sub(1))
}

fn zero_is_one(value: f32) -> f32 {
    if value == 0.0 { 1.0 } else { value }
}

fn bad(field: &'static str, message: String) -> BadParameter {
    BadParameter { field, message }
}

#[cfg(test)]
mod tests {
    use quire_proto::worker::v1::LogitBias;

    use super::*;

    fn model() -> ModelFacts {
        ModelFacts { vocab_size: 100, eos_ids: vec![2, 7], max_logprobs: 20 }
    }

    fn field(change: impl FnOnce(&mut GenerateRequest, &mut Sampling, &mut Stopping)) -> Option<&'static str> {
        let (mut request, mut sampling, mut stopping) = (GenerateRequest::default(), Sampling::default(), Stopping::default());
        change(&mut request, &mut sampling, &mut stopping);
        request.sampling = Some(sampling);
        request.stopping = Some(stopping);
        RequestSampling::new(&request, &model(), 50).err().map(|bad| bad.field)
    }

    #[test]
    fn errors_name_the_field() {
        assert_eq!(field(|_, _, _| {}), None);
        assert_eq!(field(|_, s, _| s.temperature = f32::NAN), Some("sampling.temperature"));
        assert_eq!(field(|_, s, _| s.temperature = -0.5), Some("sampling.temperature"));
        assert_eq!(field(|_, s, _| s.top_p = 1.5), Some("sampling.top_p"));
        assert_eq!(field(|_, s, _| s.min_p = -1.0), Some("sampling.min_p"));
        assert_eq!(field(|_, s, _| s.presence_penalty = f32::INFINITY), Some("sampling.presence_penalty"));
        assert_eq!(field(|_, s, _| s.repetition_penalty = -1.0), Some("sampling.repetition_penalty"));
        assert_eq!(field(|_, s, _| s.logit_bias.push(LogitBias { token_id: 100, bias: 1.0 })), Some("sampling.logit_bias"));
        assert_eq!(field(|_, s, _| s.logit_bias.push(LogitBias { token_id: 9, bias: f32::NAN })), Some("sampling.logit_bias"));
        assert_eq!(field(|_, s, _| s.logit_bias.push(LogitBias { token_id: 9, bias: f32::NEG_INFINITY })), None);
        assert_eq!(field(|_, _, s| s.stop_token_ids.push(100)), Some("stopping.stop_token_ids"));
        assert_eq!(field(|_, _, s| (s.min_tokens, s.max_tokens) = (5, 4)), Some("stopping.min_tokens"));
        assert_eq!(field(|r, _, _| r.logprobs = Some(21)), Some("logprobs"));
        assert_eq!(field(|r, _, _| r.logprobs = Some(20)), None);
    }

    #[test]
    fn the_context_bounds_the_length() {
        let mut request = GenerateRequest::default();
        for (asked, want) in [(0, 50), (10, 10), (80, 50)] {
            request.stopping = Some(Stopping { max_tokens: asked, ..Stopping::default() });
            assert_eq!(RequestSampling::new(&request, &model(), 50).unwrap().max_tokens(), want);
        }
    }
}
