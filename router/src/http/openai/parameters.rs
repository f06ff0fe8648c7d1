//! Sampling and stopping as the OpenAI API and its common extensions spell them. Types are checked here, ranges by the
//! core, so that every face has the same ones.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::{
    error::ApiError,
    http::fields::{Fields, float, wrong},
    request::{Parameters, Truncate},
};

/// Fields that other servers know and that would change the answer: to ignore them silently would be to lie. With each,
/// the value that means "off", if one does.
pub const REFUSED: [(&str, Off); 40] = [
    ("suffix", Off::Empty),
    ("prompt_embeds", Off::Empty),
    ("use_beam_search", Off::Nothing),
    ("length_penalty", Off::Number(1.0)),
    ("guided_json", Off::Nothing),
    ("guided_regex", Off::Nothing),
    ("guided_choice", Off::Nothing),
    ("guided_grammar", Off::Nothing),
    ("structured_outputs", Off::Nothing),
    ("grammar", Off::Empty),
    ("json_schema", Off::Nothing),
    ("allowed_token_ids", Off::Nothing),
    ("bad_words", Off::EmptyList),
    ("logprob_token_ids", Off::Nothing),
    ("functions", Off::Nothing),
    ("function_call", Off::Nothing),
    ("audio", Off::Nothing),
    ("repetition_detection", Off::Nothing),
    ("thinking_token_budget", Off::Nothing),
    ("reasoning_budget", Off::Number(-1.0)),
    ("detokenize", Off::True),
    ("spaces_between_special_tokens", Off::True),
    ("kv_transfer_params", Off::Nothing),
    ("typical_p", Off::Number(1.0)),
    ("top_n_sigma", Off::NotAbove(0.0)),
    ("xtc_probability", Off::Number(0.0)),
    ("dry_multiplier", Off::Number(0.0)),
    ("dynatemp_range", Off::Number(0.0)),
    ("mirostat", Off::Number(0.0)),
    ("adaptive_target", Off::NotAbove(0.0)),
    ("samplers", Off::Nothing),
    ("repeat_penalty", Off::Number(1.0)),
    ("n_predict", Off::Nothing),
    ("n_probs", Off::Number(0.0)),
    ("logits_processors", Off::EmptyList),
    ("mm_processor_kwargs", Off::Nothing),
    ("modalities", Off::Text),
    ("prediction", Off::Nothing),
    ("web_search_options", Off::Nothing),
    ("return_token_offsets", Off::Nothing),
];

/// Values of a field that ask for nothing; `null` and `false` always do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Off {
    Nothing,
    True,
    Number(f64),
    NotAbove(f64),
    Empty,
    EmptyList,
    /// The list of just "text".
    Text,
}

impl Off {
    fn is(self, value: &Value) -> bool {
        let asks_nothing = match self {
            Self::Nothing => false,
            Self::True => value.as_bool() == Some(true),
            Self::Number(off) => value.as_f64() == Some(off),
            Self::NotAbove(off) => value.as_f64().is_some_and(|value| value <= off),
            Self::Empty => value.as_str() == Some("") || value.as_array().is_some_and(Vec::is_empty),
            Self::EmptyList => value.as_array().is_some_and(Vec::is_empty),
            Self::Text => value.as_array().is_some_and(|list| list.iter().all(|kind| kind == "text")),
        };
        asks_nothing || (self != Self::True && value.as_bool() == Some(false))
    }
}

/// What both endpoints take alike; `max_tokens`, `n` and `logprobs` differ and are left to them.
pub fn sampling(body: &Fields<'_>) -> Result<Parameters, ApiError> {
    refuse_unsupported(body)?;
    Ok(Parameters {
        temperature: body.float("temperature")?,
        top_p: body.float("top_p")?,
        top_k: body.integer("top_k")?,
        min_p: body.float("min_p")?,
        presence_penalty: body.float("presence_penalty")?,
        frequency_penalty: body.float("frequency_penalty")?,
        repetition_penalty: body.float("repetition_penalty")?,
        logit_bias: logit_bias(body)?,
        // Elsewhere the default that means "any".
        seed: body.integer("seed")?.filter(|&seed| seed != -1),
        n: body.unsigned("n")?,
        min_tokens: body.unsigned("min_tokens")?,
        stop: stop(body)?,
        stop_token_ids: body.ids("stop_token_ids")?.unwrap_or_default(),
        ignore_eos: body.boolean("ignore_eos")?.unwrap_or(false),
        include_stop: body.boolean("include_stop_str_in_output")?.unwrap_or(false),
        skip_special_tokens: body.boolean("skip_special_tokens")?,
        prompt_logprobs: body.unsigned("prompt_logprobs")?,
        priority: priority(body)?,
        truncate: truncate(body)?,
        add_special_tokens: body.boolean("add_special_tokens")?,
        stream_interval: stream_interval(body)?,
        ..Parameters::default()
    })
}

/// How the answer is to be sent, and what of it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Delivery {
    pub stream: bool,
    /// A last chunk with the usage of all choices.
    pub include_usage: bool,
    /// Usage so far in every chunk.
    pub continuous_usage: bool,
    pub return_token_ids: bool,
    /// Log-probabilities name tokens `token_id:N`.
    pub tokens_as_ids: bool,
}

/// Reads [`Delivery`], and checks what `stream` excludes.
pub fn delivery(body: &Fields<'_>) -> Result<Delivery, ApiError> {
    let stream = body.boolean("stream")?.unwrap_or(false);
    let options = body.object("stream_options")?;
    if options.is_some() && !stream {
        return Err(ApiError::invalid("stream_options", "`stream_options` needs `stream`: true."));
    }
    if stream && body.get("prompt_logprobs").is_some() {
        return Err(ApiError::invalid("prompt_logprobs", "`prompt_logprobs` is not available with `stream`: true."));
    }
    let flag = |name: &str| options.as_ref().map_or(Ok(None), |options| options.boolean(name)).map(Option::unwrap_or_default);
    let include_usage = flag("include_usage")?;
    Ok(Delivery {
        stream,
        include_usage,
        continuous_usage: flag("continuous_usage_stats")? && include_usage,
        return_token_ids: body.boolean("return_token_ids")?.unwrap_or(false),
        tokens_as_ids: body.boolean("return_tokens_as_token_ids")?.unwrap_or(false),
    })
}

/// `response_format`: only text so far.
pub fn response_format(body: &Fields<'_>) -> Result<(), ApiError> {
    let Some(format) = body.object("response_format")? else { return Ok(()) };
    match format.string("type")? {
        Some("text") => Ok(()),
        Some(kind @ ("json_object" | "json_schema")) => {
            Err(ApiError::invalid("response_format", format!("`response_format` of type `{kind}` is not supported yet; only `text` is.")))
        }
        _ => Err(ApiError::invalid("response_format.type", "`response_format.type` must be `text`, `json_object` or `json_schema`.")),
    }
}

fn refuse_unsupported(body: &Fields<'_>) -> Result<(), ApiError> {
    for (name, off) in REFUSED {
        let Some(value) = body.get(name) else { continue };
        // Clients that send every field send these as "off".
        if !off.is(value) {
            return Err(ApiError::invalid(name, format!("`{name}` is not supported.")));
        }
    }
    Ok(())
}

fn truncate(body: &Fields<'_>) -> Result<Option<Truncate>, ApiError> {
    let keep_end = match body.string("truncation_side")? {
        None | Some("left") => true,
        Some("right") => false,
        Some(other) => {
            return Err(ApiError::invalid("truncation_side", format!("`truncation_side` must be `left` or `right`, not `{other}`.")));
        }
    };
    let Some(keep) = body.integer("truncate_prompt_tokens")? else { return Ok(None) };
    let keep = match keep {
        -1 => None,
        keep => Some(u32::try_from(keep).map_err(|_| {
            ApiError::invalid("truncate_prompt_tokens", format!("`truncate_prompt_tokens` must be -1 or at least 1, not {keep}."))
        })?),
    };
    Ok(Some(Truncate { keep, keep_end }))
}

fn stream_interval(body: &Fields<'_>) -> Result<u32, ApiError> {
    match body.unsigned("stream_interval")? {
        Some(0) => Err(ApiError::invalid("stream_interval", "`stream_interval` must be at least 1.")),
        interval => Ok(interval.unwrap_or(1)),
    }
}

/// `cache_salt`: prompts share cached prefixes only with others of the same salt (and key).
pub fn cache_salt<'a>(body: &Fields<'a>) -> Result<Option<&'a str>, ApiError> {
    match body.string("cache_salt")? {
        Some("") => Err(ApiError::invalid("cache_salt", "`cache_salt` can't be empty; leave it out to share the cache.")),
        salt => Ok(salt),
    }
}

fn priority(body: &Fields<'_>) -> Result<i32, ApiError> {
    let value = body.integer("priority")?.unwrap_or(0);
    i32::try_from(value).map_err(|_| ApiError::invalid("priority", format!("`priority` must fit 32 bits, not {value}.")))
}

fn stop(body: &Fields<'_>) -> Result<Vec<String>, ApiError> {
    match body.get("stop") {
        None => Ok(Vec::new()),
        Some(Value::String(one)) => Ok(vec![one.clone()]),
        Some(Value::Array(list)) => {
            let text = |(index, value): (usize, &Value)| {
                value.as_str().map(str::to_owned).ok_or_else(|| wrong(&format!("stop[{index}]"), "a string", value))
            };
            list.iter().enumerate().map(text).collect()
        }
        Some(other) => Err(wrong("stop", "a string or an array of strings", other)),
    }
}

/// Keys are token ids as strings; all wrong ones are named together.
fn logit_bias(body: &Fields<'_>) -> Result<BTreeMap<u32, f32>, ApiError> {
    let Some(entries) = body.object("logit_bias")? else { return Ok(BTreeMap::new()) };
    let mut biases = BTreeMap::new();
    let mut wrong_keys = Vec::new();
    for (key, value) in entries.map() {
        match key.parse::<u32>() {
            Ok(id) => {
                biases.insert(id, float(value, &format!("logit_bias.{key}"))?);
            }
            Err(_) => wrong_keys.push(format!("`{key}`")),
        }
    }
    if wrong_keys.is_empty() {
        return Ok(biases);
    }
    let message = format!("The keys of `logit_bias` must be token ids; these are not: {}.", wrong_keys.join(", "));
    Err(ApiError::invalid("logit_bias", message))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn refused(body: Value) -> (String, String) {
        let root = Fields::root(&body).unwrap();
        let result = sampling(&root).map(|_| ()).and_then(|()| delivery(&root).map(|_| ())).and_then(|()| response_format(&root));
        match result {
            Err(ApiError::Invalid { message, param }) => (param.unwrap_or_default(), message),
            other => panic!("{body}: {other:?}"),
        }
    }

    #[test]
    fn every_wrong_type_is_refused_by_name() {
        for (body, param) in [
            (json!({"temperature": "hot"}), "temperature"),
            (json!({"top_p": []}), "top_p"),
            (json!({"top_k": 1.5}), "top_k"),
            (json!({"seed": u64::MAX}), "seed"),
            (json!({"n": -1}), "n"),
            (json!({"stop": 3}), "stop"),
            (json!({"stop": ["a", 3]}), "stop[1]"),
            (json!({"stop_token_ids": ["a"]}), "stop_token_ids[0]"),
            (json!({"ignore_eos": "yes"}), "ignore_eos"),
            (json!({"logit_bias": [1]}), "logit_bias"),
            (json!({"logit_bias": {"5": "1"}}), "logit_bias.5"),
            (json!({"suffix": "x"}), "suffix"),
            (json!({"stream": 1}), "stream"),
            (json!({"stream_options": {}}), "stream_options"),
            (json!({"stream": false, "stream_options": {"include_usage": false}}), "stream_options"),
            (json!({"stream": true, "stream_options": {"include_usage": 1}}), "stream_options.include_usage"),
            (json!({"stream": true, "prompt_logprobs": 1}), "prompt_logprobs"),
            (json!({"prompt_logprobs": "abc"}), "prompt_logprobs"),
            (json!({"response_format": {"type": "json_object"}}), "response_format"),
            (json!({"response_format": {"type": "xml"}}), "response_format.type"),
            (json!({"priority": 1_i64 << 40}), "priority"),
            (json!({"truncate_prompt_tokens": -2}), "truncate_prompt_tokens"),
            (json!({"truncate_prompt_tokens": 2, "truncation_side": "middle"}), "truncation_side"),
            (json!({"stream_interval": 0}), "stream_interval"),
        ] {
            assert_eq!(refused(body.clone()).0, param, "{body}");
        }
    }

    #[test]
    fn all_wrong_keys_of_logit_bias_are_named() {
        let (_, message) = refused(json!({"logit_bias": {"a": 1, "7": 2, "-3": 1}}));
        assert!(message.contains("`a`") && message.contains("`-3`") && !message.contains("`7`"), "{message}");
    }

    #[test]
    fn off_is_no_refusal() {
        let body = json!({"suffix": "", "bad_words": [], "mirostat": 0, "xtc_probability": 0.0, "typical_p": 1, "top_n_sigma": -1,
            "use_beam_search": false, "detokenize": true, "modalities": ["text"], "samplers": null, "spaces_between_special_tokens": true});
        sampling(&Fields::root(&body).unwrap()).unwrap();
        for (name, value) in [
            ("mirostat", json!(2)),
            ("bad_words", json!(["x"])),
            ("detokenize", json!(false)),
            ("modalities", json!(["text", "audio"])),
            ("use_beam_search", json!(true)),
            ("top_n_sigma", json!(1.5)),
        ] {
            assert_eq!(refused(json!({name: value})).0, name);
        }
    }

    #[test]
    fn nulls_take_the_defaults() {
        let body = json!({"temperature": null, "stop": null, "logit_bias": null, "stream": null, "stream_options": null, "suffix": null,
            "use_beam_search": false, "made_up": {"x": 1}});
        let root = Fields::root(&body).unwrap();
        assert_eq!(sampling(&root).unwrap(), Parameters { stream_interval: 1, ..Parameters::default() });
        assert!(!delivery(&root).unwrap().stream);
    }

    #[test]
    fn continuous_usage_needs_include_usage() {
        let body = json!({"stream": true, "stream_options": {"continuous_usage_stats": true}});
        assert!(!delivery(&Fields::root(&body).unwrap()).unwrap().continuous_usage);
    }
}
