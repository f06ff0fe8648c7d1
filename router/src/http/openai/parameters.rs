//! Sampling and stopping as the OpenAI API and its common extensions spell them. Types are checked here, ranges by the
//! core, so that every face has the same ones.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::{
    error::ApiError,
    http::fields::{Fields, float, wrong},
    request::Parameters,
};

/// Fields that other servers know and that would change the answer: to ignore them silently would be to lie.
const REFUSED: [&str; 17] = [
    "suffix",
    "prompt_embeds",
    "use_beam_search",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "grammar",
    "json_schema",
    "allowed_token_ids",
    "bad_words",
    "truncate_prompt_tokens",
    "logprob_token_ids",
    "functions",
    "function_call",
    "audio",
];

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
        seed: body.integer("seed")?,
        n: body.unsigned("n")?,
        min_tokens: body.unsigned("min_tokens")?,
        stop: stop(body)?,
        stop_token_ids: body.ids("stop_token_ids")?.unwrap_or_default(),
        ignore_eos: body.boolean("ignore_eos")?.unwrap_or(false),
        include_stop: body.boolean("include_stop_str_in_output")?.unwrap_or(false),
        skip_special_tokens: body.boolean("skip_special_tokens")?,
        prompt_logprobs: body.unsigned("prompt_logprobs")?,
        priority: priority(body)?,
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
    for name in REFUSED {
        let Some(value) = body.get(name) else { continue };
        // Clients that send every field send these as "off".
        let off = matches!(value, Value::Bool(false)) || (name == "suffix" && value.as_str() == Some(""));
        if !off {
            return Err(ApiError::invalid(name, format!("`{name}` is not supported.")));
        }
    }
    Ok(())
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
    fn nulls_take_the_defaults() {
        let body = json!({"temperature": null, "stop": null, "logit_bias": null, "stream": null, "stream_options": null, "suffix": null,
            "use_beam_search": false, "made_up": {"x": 1}});
        let root = Fields::root(&body).unwrap();
        assert_eq!(sampling(&root).unwrap(), Parameters::default());
        assert!(!delivery(&root).unwrap().stream);
    }

    #[test]
    fn continuous_usage_needs_include_usage() {
        let body = json!({"stream": true, "stream_options": {"continuous_usage_stats": true}});
        assert!(!delivery(&Fields::root(&body).unwrap()).unwrap().continuous_usage);
    }
}
