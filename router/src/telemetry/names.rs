//! The router's metrics. The engine's own (`quire_engine_*`, `vllm:*`) are registered by the engine in the same recorder.

use metrics::{Unit, describe_counter, describe_gauge, describe_histogram};

/// Finished HTTP and gRPC calls; labels route, method, status.
pub const HTTP_REQUESTS: &str = "quire_http_requests_total";
/// Calls whose response is not finished; no label.
pub const HTTP_IN_FLIGHT: &str = "quire_http_requests_in_flight";
/// From the head of a call to the end of its response; label route.
pub const HTTP_DURATION: &str = "quire_http_request_duration_seconds";
/// Open connections of the main port.
pub const CONNECTIONS: &str = "quire_http_connections";
/// Refused or failed calls and streams; label code (`ApiError::code`).
pub const ERRORS: &str = "quire_router_errors_total";
/// Generations that are not finished; label model.
pub const GENERATIONS: &str = "quire_router_generations_in_flight";
/// Finished generations; labels model, outcome (stop, length, error, cancelled).
pub const FINISHED: &str = "quire_router_generations_total";
/// From a generation's start to its first token; label model.
pub const FIRST_TOKEN: &str = "quire_router_time_to_first_token_seconds";
/// Between deltas of one choice; label model.
pub const INTER_TOKEN: &str = "quire_router_inter_token_latency_seconds";
/// From a generation's start to its last event; label model.
pub const DURATION: &str = "quire_router_generation_duration_seconds";
/// Label model.
pub const PROMPT_TOKENS: &str = "quire_router_prompt_tokens_total";
/// Label model.
pub const CACHED_TOKENS: &str = "quire_router_cached_prompt_tokens_total";
/// Label model.
pub const COMPLETION_TOKENS: &str = "quire_router_completion_tokens_total";

const CALL: &[f64] = &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0];
const FIRST: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0];
const BETWEEN: &[f64] = &[
    0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0,
];

/// Histograms and their bucket bounds.
pub const BUCKETS: &[(&str, &[f64])] = &[(HTTP_DURATION, CALL), (DURATION, CALL), (FIRST_TOKEN, FIRST), (INTER_TOKEN, BETWEEN)];

/// Registers help texts.
pub fn describe() {
    describe_counter!(HTTP_REQUESTS, "Finished HTTP and gRPC calls by route, method and status.");
    describe_gauge!(HTTP_IN_FLIGHT, "Calls whose response is not finished yet.");
    describe_histogram!(HTTP_DURATION, Unit::Seconds, "Seconds from the head of a call to the end of its response.");
    describe_gauge!(CONNECTIONS, "Open connections.");
    describe_counter!(ERRORS, "Calls and streams that ended with an error, by its code.");
    describe_gauge!(GENERATIONS, "Generations that are not finished yet.");
    describe_counter!(FINISHED, "Finished generations by outcome: stop, length, error or cancelled.");
    describe_histogram!(FIRST_TOKEN, Unit::Seconds, "Seconds from the start of a generation to its first token, seen by the router.");
    describe_histogram!(INTER_TOKEN, Unit::Seconds, "Seconds between tokens of one choice, seen by the router.");
    describe_histogram!(DURATION, Unit::Seconds, "Seconds from the start of a generation to its last event.");
    describe_counter!(PROMPT_TOKENS, "Prompt tokens of answered generations.");
    describe_counter!(CACHED_TOKENS, "Prompt tokens that came from a prefix cache.");
    describe_counter!(COMPLETION_TOKENS, "Generated tokens.");
}

/// A method as a label: clients may send any word.
#[must_use]
pub fn method_label(method: &http::Method) -> &'static str {
    match method.as_str() {
        "GET" => "GET",
        "HEAD" => "HEAD",
        "POST" => "POST",
        "OPTIONS" => "OPTIONS",
        "PUT" => "PUT",
        "DELETE" => "DELETE",
        "PATCH" => "PATCH",
        _ => "other",
    }
}
