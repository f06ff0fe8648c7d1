//! The fields of the three generating routes, as a table: name, schema, what it does. A test holds it against what the
//! code reads.

/// Routes that take a field.
pub const COMPLETIONS: u8 = 1;
pub const CHAT: u8 = 2;
pub const RESPONSES: u8 = 4;
const ALL: u8 = COMPLETIONS | CHAT | RESPONSES;
const BOTH: u8 = COMPLETIONS | CHAT;

/// A field of a body. `null` counts as absent, for each of them.
pub struct Field {
    pub name: &'static str,
    pub routes: u8,
    /// Its JSON schema, without null.
    pub schema: &'static str,
    pub about: &'static str,
}

const fn field(name: &'static str, routes: u8, schema: &'static str, about: &'static str) -> Field {
    Field { name, routes, schema, about }
}

const BOOLEAN: &str = r#"{"type": "boolean"}"#;
const STRING: &str = r#"{"type": "string"}"#;
const OBJECT: &str = r#"{"type": "object"}"#;
const LENGTH: &str = r#"{"type": "integer", "minimum": 1, "maximum": 4294967295}"#;
const UP_TO_TWO: &str = r#"{"type": "number", "minimum": -2, "maximum": 2}"#;
const IDS: &str = r#"{"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 4294967295}, "maxItems": 256}"#;
const TOOLS: &str = r#"{"type": "array", "items": {"type": "object"}}"#;
const EFFORT: &str = r#"{"type": "string", "enum": ["none", "minimal", "low", "medium", "high", "xhigh"]}"#;
const CHOICE: &str = r#"{"anyOf": [{"type": "string", "enum": ["none", "auto"]}, {"type": "object"}]}"#;
const PROMPT: &str = r#"{"anyOf": [
    {"type": "string", "minLength": 1},
    {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
    {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
    {"type": "array", "minItems": 1, "items": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}}]}"#;
const MESSAGES: &str = r#"{"type": "array", "minItems": 1, "items": {"type": "object", "required": ["role"], "properties": {
    "role": {"type": "string", "minLength": 1}}}}"#;
const INPUT: &str = r#"{"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "minItems": 1, "items": {"type": "object"}}]}"#;
const STOP: &str =
    r#"{"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": 32}]}"#;
const SEED: &str = r#"{"type": "integer", "minimum": -9223372036854775808, "maximum": 9223372036854775807}"#;
const TEXT_ONLY: &str = r#"{"type": "object", "properties": {"type": {"type": "string", "enum": ["text"]}}, "required": ["type"]}"#;

pub const FIELDS: [Field; 62] = [
    field("model", ALL, STRING, "Name or alias; absent: the first model that can answer."),
    field("prompt", COMPLETIONS, PROMPT, "Text or token ids, or a list of up to 1024 of either."),
    field("messages", CHAT, MESSAGES, "Turns; contents are strings or lists of text parts."),
    field("input", RESPONSES, INPUT, "Text, or items: messages, function calls and their outputs."),
    field("instructions", RESPONSES, STRING, "A system message before the input."),
    field("temperature", ALL, r#"{"type": "number", "minimum": 0, "maximum": 2}"#, "0 is greedy."),
    field("top_p", ALL, r#"{"type": "number", "exclusiveMinimum": 0, "maximum": 1}"#, "Nucleus."),
    field("top_k", ALL, r#"{"type": "integer", "minimum": -1, "maximum": 4294967295}"#, "0 or -1: off."),
    field("min_p", ALL, r#"{"type": "number", "minimum": 0, "maximum": 1}"#, "Least share of the likeliest."),
    field("presence_penalty", ALL, UP_TO_TWO, "On tokens that were generated."),
    field("frequency_penalty", ALL, UP_TO_TWO, "On tokens, as often as they were generated."),
    field("repetition_penalty", ALL, r#"{"type": "number", "exclusiveMinimum": 0}"#, "On tokens of prompt and answer."),
    field("logit_bias", ALL, r#"{"type": "object", "additionalProperties": {"type": "number"}}"#, "Token id to bias, cut to ±100."),
    field("seed", ALL, SEED, "Equal seeds give equal answers; -1: any."),
    field("n", ALL, r#"{"type": "integer", "minimum": 1, "maximum": 128}"#, "Choices of each prompt; 1 for responses."),
    field("best_of", COMPLETIONS, r#"{"type": "integer", "minimum": 1, "maximum": 128}"#, "Generates so many, answers the `n` likeliest."),
    field("max_tokens", COMPLETIONS, r#"{"type": "integer", "minimum": 0, "maximum": 4294967295}"#, "0 only with `echo`; default 16."),
    field("max_tokens", CHAT, LENGTH, "Older name of `max_completion_tokens`."),
    field("max_completion_tokens", BOTH, LENGTH, "Goes before `max_tokens`."),
    field("max_output_tokens", RESPONSES, LENGTH, "Tokens of the answer at most."),
    field("min_tokens", ALL, r#"{"type": "integer", "minimum": 0, "maximum": 4294967295}"#, "Nothing ends the answer before."),
    field("stop", ALL, STOP, "Strings that end the answer."),
    field("stop_token_ids", ALL, IDS, "Tokens that end the answer."),
    field("ignore_eos", ALL, BOOLEAN, "The model's own end tokens don't end it."),
    field("include_stop_str_in_output", ALL, BOOLEAN, "The stop string stays."),
    field("skip_special_tokens", ALL, BOOLEAN, "Default true."),
    field("logprobs", COMPLETIONS, r#"{"type": "integer", "minimum": 0, "maximum": 20}"#, "Likeliest tokens at each position."),
    field("logprobs", CHAT, BOOLEAN, "Log-probabilities of the answer's tokens."),
    field("top_logprobs", CHAT, r#"{"type": "integer", "minimum": 0, "maximum": 20}"#, "Needs `logprobs`."),
    field("top_logprobs", RESPONSES, r#"{"type": "integer", "enum": [0]}"#, "Not supported here."),
    field("prompt_logprobs", ALL, r#"{"type": "integer", "minimum": 0, "maximum": 20}"#, "Not with `stream`; without effect on responses."),
    field("priority", ALL, r#"{"type": "integer", "minimum": -2147483648, "maximum": 2147483647}"#, "Lower runs first."),
    field(
        "truncate_prompt_tokens",
        ALL,
        r#"{"type": "integer", "minimum": -1}"#,
        "Keeps so many tokens of the prompt; -1: as many as fit.",
    ),
    field("truncation_side", ALL, r#"{"type": "string", "enum": ["left", "right"]}"#, "Which end is cut; default left."),
    field("truncation", RESPONSES, r#"{"type": "string", "enum": ["auto", "disabled"]}"#, "`auto`: as `truncate_prompt_tokens` -1."),
    field("add_special_tokens", ALL, BOOLEAN, "Completions: BOS before the text, default true; elsewhere only false."),
    field("cache_salt", ALL, r#"{"type": "string", "minLength": 1}"#, "Shares cached prefixes only with the same salt."),
    field("stream", ALL, BOOLEAN, "Server-sent events."),
    field("stream_options", ALL, OBJECT, "`include_usage`, `continuous_usage_stats`; needs `stream`."),
    field("stream_interval", ALL, LENGTH, "Tokens that a chunk waits for, after its first."),
    field("return_token_ids", ALL, BOOLEAN, "Ids beside the text; not for responses."),
    field("return_tokens_as_token_ids", ALL, BOOLEAN, "Log-probabilities name tokens `token_id:N`."),
    field("echo", BOTH, BOOLEAN, "The prompt (chat: the assistant's last message) before the answer."),
    field("response_format", BOTH, TEXT_ONLY, "Only text, so far."),
    field("text", RESPONSES, OBJECT, "`format`: only of type text, so far."),
    field("tools", CHAT | RESPONSES, TOOLS, "Functions that the model may call."),
    field("tool_choice", CHAT | RESPONSES, CHOICE, "`auto` or `none`; a call can't be forced yet."),
    field("parallel_tool_calls", CHAT | RESPONSES, BOOLEAN, "False: only the first call is shown."),
    field("reasoning_effort", CHAT, EFFORT, "Told to the template; none: the model is told not to think."),
    field("include_reasoning", CHAT, BOOLEAN, "Default true: thoughts come as `reasoning_content`."),
    field("reasoning", RESPONSES, OBJECT, "`effort`, as `reasoning_effort`."),
    field("add_generation_prompt", CHAT, BOOLEAN, "Default true."),
    field("continue_final_message", CHAT, BOOLEAN, "The answer goes on from the last message."),
    field("documents", CHAT, r#"{"type": "array", "items": {"type": "object"}}"#, "For templates that read them."),
    field("chat_template_kwargs", CHAT, OBJECT, "Further variables of the template."),
    field("chat_template", CHAT, r#"{"type": "null"}"#, "Can't be given with a request."),
    field("metadata", RESPONSES, OBJECT, "Repeated in the answer."),
    field("user", RESPONSES, STRING, "Repeated in the answer."),
    field("previous_response_id", RESPONSES, r#"{"type": "null"}"#, "Nothing is stored."),
    field("conversation", RESPONSES, r#"{"type": "null"}"#, "Nothing is stored."),
    field("background", RESPONSES, r#"{"type": "boolean", "enum": [false]}"#, "Nothing is stored."),
    field("prompt", RESPONSES, r#"{"type": "null"}"#, "Nothing is stored."),
];
