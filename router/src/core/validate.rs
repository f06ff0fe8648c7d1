//! The rules for parameters, and their translation to what a worker takes. Every refusal names the field.
//!
//! The rules are the OpenAI API's and, where that is silent, vLLM's. One is different on purpose: `n` above 1 with
//! temperature 0 is allowed (n equal choices), since OpenAI's own API allows it and clients do it.

use quire_proto::worker::v1::{LogitBias, ModelCard, Sampling, SamplingDefaults, Stopping};

use crate::config::CoreConfig;
use crate::error::ApiError;
use crate::request::Parameters;

/// Largest `logprobs`, whatever a worker could do; OpenAI's limit.
const MAX_LOGPROBS: u32 = 20;
/// Temperatures between 0 and this are raised to it: below, logits overflow for nothing.
const LOWEST_TEMPERATURE: f32 = 0.01;

impl Parameters {
    /// Checks everything that doesn't depend on the prompt.
    ///
    /// # Errors
    /// [`ApiError::Invalid`], naming the field.
    pub fn validate(&self, card: &ModelCard, config: &CoreConfig) -> Result<(), ApiError> {
        self.validate_sampling(card, config)?;
        self.validate_stopping(card, config)?;
        let most = MAX_LOGPROBS.min(card.max_logprobs);
        for (field, value) in [("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)] {
            if value.is_some_and(|value| value > most) {
                return Err(ApiError::invalid(field, format!("`{field}` can be at most {most}.")));
            }
        }
        Ok(())
    }

    fn validate_sampling(&self, card: &ModelCard, config: &CoreConfig) -> Result<(), ApiError> {
        between("temperature", self.temperature, 0.0, 2.0)?;
        between("top_p", self.top_p, 0.0, 1.0)?;
        if self.top_p == Some(0.0) {
            return Err(ApiError::invalid("top_p", "`top_p` must be above 0."));
        }
        between("min_p", self.min_p, 0.0, 1.0)?;
        between("presence_penalty", self.presence_penalty, -2.0, 2.0)?;
        between("frequency_penalty", self.frequency_penalty, -2.0, 2.0)?;
        if self.repetition_penalty.is_some_and(|value| !(value.is_finite() && value > 0.0)) {
            return Err(ApiError::invalid("repetition_penalty", "`repetition_penalty` must be a number above 0."));
        }
        if self.top_k.is_some_and(|value| value < -1 || value > i64::from(u32::MAX)) {
            return Err(ApiError::invalid("top_k", "`top_k` must be at least 1, or 0 or -1 for off."));
        }
        if let Some(n) = self.n.filter(|n| *n < 1 || *n > config.max_choices) {
            return Err(ApiError::invalid("n", format!("`n` must be between 1 and {}, not {n}.", config.max_choices)));
        }
        if self.logit_bias.len() > config.max_logit_biases {
            return Err(ApiError::invalid("logit_bias", format!("`logit_bias` can have at most {} entries.", config.max_logit_biases)));
        }
        let outside: Vec<String> = self.logit_bias.keys().filter(|id| **id >= card.vocab_size).map(u32::to_string).collect();
        if !outside.is_empty() {
            let message = format!("`logit_bias` has ids outside the vocabulary of {} tokens: {}.", card.vocab_size, outside.join(", "));
            return Err(ApiError::invalid("logit_bias", message));
        }
        if self.logit_bias.values().any(|bias| !bias.is_finite()) {
            return Err(ApiError::invalid("logit_bias", "`logit_bias` values must be finite numbers."));
        }
        Ok(())
    }

    fn validate_stopping(&self, card: &ModelCard, config: &CoreConfig) -> Result<(), ApiError> {
        if self.max_tokens == Some(0) {
            return Err(ApiError::invalid("max_tokens", "`max_tokens` must be at least 1."));
        }
        if let (Some(min), Some(max)) = (self.min_tokens, self.max_tokens)
            && min > max
        {
            return Err(ApiError::invalid("min_tokens", format!("`min_tokens` ({min}) can't be above `max_tokens` ({max}).")));
        }
        if let Some(keep) = self.truncate.and_then(|truncate| truncate.keep).filter(|keep| *keep < 1 || *keep > card.max_context) {
            let message = format!("`truncate_prompt_tokens` must be -1 or between 1 and {}, not {keep}.", card.max_context);
            return Err(ApiError::invalid("truncate_prompt_tokens", message));
        }
        if self.stop.len() > config.max_stops {
            return Err(ApiError::invalid("stop", format!("`stop` can have at most {} entries.", config.max_stops)));
        }
        if self.stop.iter().any(String::is_empty) {
            return Err(ApiError::invalid("stop", "`stop` can't have an empty string."));
        }
        if self.stop.iter().any(|stop| stop.len() > config.max_stop_bytes) {
            return Err(ApiError::invalid("stop", format!("A `stop` string can have at most {} bytes.", config.max_stop_bytes)));
        }
        if self.stop_token_ids.len() > config.max_stop_ids {
            return Err(ApiError::invalid("stop_token_ids", format!("`stop_token_ids` can have at most {} entries.", config.max_stop_ids)));
        }
        if let Some(id) = self.stop_token_ids.iter().find(|id| **id >= card.vocab_size) {
            let message = format!("`stop_token_ids` has {id}, outside the vocabulary of {} tokens.", card.vocab_size);
            return Err(ApiError::invalid("stop_token_ids", message));
        }
        Ok(())
    }

    /// Cuts a prompt as the request asks.
    pub fn shorten(&self, prompt_ids: &mut Vec<u32>, max_context: u32) {
        let Some(truncate) = self.truncate else { return };
        let answer = self.max_tokens.or(self.min_tokens).unwrap_or(1).max(1);
        let keep = truncate.keep.unwrap_or_else(|| max_context.saturating_sub(answer)) as usize;
        if truncate.keep_end {
            prompt_ids.drain(..prompt_ids.len().saturating_sub(keep));
        } else {
            prompt_ids.truncate(keep);
        }
    }

    /// Checks that prompt and answer fit.
    ///
    /// # Errors
    /// [`ApiError::ContextLength`], naming what is too long.
    pub fn validate_length(&self, card: &ModelCard, prompt_tokens: usize, prompt_field: &str) -> Result<(), ApiError> {
        let context = card.max_context as usize;
        let error = |message: String, field: &str| Err(ApiError::ContextLength { message, param: Some(field.to_owned()) });
        if prompt_tokens >= context {
            let message = format!(
                "This model's maximum context length is {context} tokens, and one must be left to generate. Your prompt has {prompt_tokens} tokens."
            );
            return error(message, prompt_field);
        }
        let room = context - prompt_tokens;
        if let Some(max) = self.max_tokens.filter(|max| *max as usize > room) {
            let message = format!(
                "This model's maximum context length is {context} tokens. Your request needs {}: {prompt_tokens} in the prompt and {max} of `max_tokens`.",
                prompt_tokens + max as usize
            );
            return error(message, "max_tokens");
        }
        if let Some(min) = self.min_tokens.filter(|min| *min as usize > room) {
            return error(format!("`min_tokens` is {min}, but the context has room for {room} tokens only."), "min_tokens");
        }
        Ok(())
    }

    /// Sampling as a worker takes it: the request, then the model's own defaults, then the API's.
    #[must_use]
    pub fn sampling(&self, defaults: &SamplingDefaults, seed: u64) -> Sampling {
        let temperature = self.temperature.or(defaults.temperature).unwrap_or(1.0);
        let top_k = match self.top_k {
            Some(k) => u32::try_from(k).unwrap_or(0),
            None => defaults.top_k.unwrap_or(0),
        };
        Sampling {
            temperature: if temperature > 0.0 { temperature.max(LOWEST_TEMPERATURE) } else { 0.0 },
            top_k,
            top_p: self.top_p.or(defaults.top_p).unwrap_or(1.0),
            min_p: self.min_p.or(defaults.min_p).unwrap_or(0.0),
            presence_penalty: self.presence_penalty.unwrap_or(0.0),
            frequency_penalty: self.frequency_penalty.unwrap_or(0.0),
            repetition_penalty: self.repetition_penalty.or(defaults.repetition_penalty).unwrap_or(1.0),
            // OpenAI's range; beyond, a bias says nothing more.
            logit_bias: self.logit_bias.iter().map(|(&token_id, bias)| LogitBias { token_id, bias: bias.clamp(-100.0, 100.0) }).collect(),
            seed,
        }
    }

    /// Stopping as a worker takes it.
    #[must_use]
    pub fn stopping(&self) -> Stopping {
        Stopping {
            max_tokens: self.max_tokens.unwrap_or(0),
            min_tokens: self.min_tokens.unwrap_or(0),
            stop_token_ids: self.stop_token_ids.clone(),
            ignore_eos: self.ignore_eos,
        }
    }
}

fn between(field: &str, value: Option<f32>, low: f32, high: f32) -> Result<(), ApiError> {
    match value {
        // Not a number is in no range.
        Some(value) if !(low..=high).contains(&value) => {
            Err(ApiError::invalid(field, format!("`{field}` must be between {low} and {high}, not {value}.")))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card() -> ModelCard {
        ModelCard { vocab_size: 100, max_context: 10, max_logprobs: 50, ..ModelCard::default() }
    }

    fn refused(change: impl FnOnce(&mut Parameters)) -> Option<String> {
        let mut parameters = Parameters::default();
        change(&mut parameters);
        match parameters.validate(&card(), &CoreConfig::default()) {
            Ok(()) => None,
            Err(ApiError::Invalid { param, message }) => {
                let field = param.unwrap();
                assert!(message.contains(&field), "{message}");
                Some(field)
            }
            Err(other) => panic!("{other:?}"),
        }
    }

    #[test]
    fn every_rule_names_its_field() {
        let f = |field: &str| Some(field.to_owned());
        for bad in [-0.1, 2.1, f32::NAN, f32::INFINITY] {
            assert_eq!(refused(|p| p.temperature = Some(bad)), f("temperature"));
        }
        assert_eq!(refused(|p| p.temperature = Some(0.001)), None);
        assert_eq!(refused(|p| p.top_p = Some(0.0)), f("top_p"));
        assert_eq!(refused(|p| p.top_p = Some(1.1)), f("top_p"));
        assert_eq!(refused(|p| p.top_k = Some(-2)), f("top_k"));
        assert_eq!(refused(|p| p.top_k = Some(-1)), None);
        assert_eq!(refused(|p| p.min_p = Some(1.1)), f("min_p"));
        assert_eq!(refused(|p| p.presence_penalty = Some(2.1)), f("presence_penalty"));
        assert_eq!(refused(|p| p.frequency_penalty = Some(-2.1)), f("frequency_penalty"));
        assert_eq!(refused(|p| p.repetition_penalty = Some(0.0)), f("repetition_penalty"));
        assert_eq!(refused(|p| p.repetition_penalty = Some(f32::NAN)), f("repetition_penalty"));
        assert_eq!(refused(|p| p.n = Some(0)), f("n"));
        assert_eq!(refused(|p| p.n = Some(129)), f("n"));
        assert_eq!(refused(|p| (p.n, p.temperature) = (Some(2), Some(0.0))), None);
        assert_eq!(refused(|p| p.logprobs = Some(21)), f("logprobs"));
        assert_eq!(refused(|p| p.prompt_logprobs = Some(21)), f("prompt_logprobs"));
        assert_eq!(refused(|p| p.max_tokens = Some(0)), f("max_tokens"));
        assert_eq!(refused(|p| (p.min_tokens, p.max_tokens) = (Some(3), Some(2))), f("min_tokens"));
        assert_eq!(refused(|p| p.stop = vec!["a".into(), String::new()]), f("stop"));
        assert_eq!(refused(|p| p.stop = vec!["a".repeat(1025)]), f("stop"));
        assert_eq!(refused(|p| p.stop = vec!["a".into(); 33]), f("stop"));
        assert_eq!(refused(|p| p.stop_token_ids = vec![100]), f("stop_token_ids"));
        assert_eq!(refused(|p| p.logit_bias = [(99, 1.0)].into()), None);
        assert_eq!(refused(|p| p.logit_bias = [(99, f32::NAN)].into()), f("logit_bias"));
    }

    #[test]
    fn all_bad_bias_ids_are_named() {
        let parameters = Parameters { logit_bias: [(1, 0.0), (100, 0.0), (777, 0.0)].into(), ..Parameters::default() };
        let message = parameters.validate(&card(), &CoreConfig::default()).unwrap_err().to_string();
        assert!(message.contains("100, 777"), "{message}");
    }

    #[test]
    fn lengths_are_checked_against_the_context() {
        let check = |max_tokens, prompt| Parameters { max_tokens, ..Parameters::default() }.validate_length(&card(), prompt, "prompt");
        assert!(check(None, 9).is_ok());
        assert!(check(None, 10).is_err());
        assert!(check(Some(1), 9).is_ok());
        let error = check(Some(2), 9).unwrap_err();
        assert_eq!((error.code(), error.body()["error"]["param"].as_str()), ("context_length_exceeded", Some("max_tokens")));
    }

    #[test]
    fn the_request_goes_before_the_models_defaults() {
        let defaults =
            SamplingDefaults { temperature: Some(0.6), top_k: Some(20), top_p: None, min_p: Some(0.1), repetition_penalty: Some(1.1) };
        let silent = Parameters::default().sampling(&defaults, 7);
        assert_eq!((silent.temperature, silent.top_k, silent.top_p, silent.min_p, silent.repetition_penalty), (0.6, 20, 1.0, 0.1, 1.1));
        let spoken =
            Parameters { temperature: Some(0.0), top_k: Some(-1), min_p: Some(0.0), ..Parameters::default() }.sampling(&defaults, 7);
        assert_eq!((spoken.temperature, spoken.top_k, spoken.min_p, spoken.seed), (0.0, 0, 0.0, 7));
        assert_eq!(Parameters { temperature: Some(1e-30), ..Parameters::default() }.sampling(&defaults, 7).temperature, 0.01);
    }
}
