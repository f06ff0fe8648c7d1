//! Trace context and span names: one module, because the GenAI conventions are still moving (v1.44 names here).
//!
//! Contents of messages are never recorded.

use http::HeaderMap;
use opentelemetry::propagation::{Extractor, Injector};
use tonic::metadata::{Ascii, MetadataKey, MetadataMap, MetadataValue};
use tracing::{Span, field::Empty};
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

use crate::request::{Parameters, Usage};

/// What a generation is called in spans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    Chat,
    Completion,
}

impl Operation {
    /// `gen_ai.operation.name`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Completion => "text_completion",
        }
    }
}

/// The server span of one HTTP or gRPC call, child of the caller's span if the headers name one.
#[must_use]
pub fn call_span(method: &'static str, route: &str, request_id: &str, headers: &HeaderMap) -> Span {
    let span = tracing::info_span!(
        "call",
        otel.name = %format_args!("{method} {route}"),
        otel.kind = "server",
        http.request.method = method,
        http.route = route,
        http.response.status_code = Empty,
        quire.request.id = request_id,
    );
    let parent = opentelemetry::global::get_text_map_propagator(|propagator| propagator.extract(&HeaderExtractor(headers)));
    // Fails only if the span is filtered out, and then there is nothing to join.
    let _ = span.set_parent(parent);
    span
}

/// The span of one generation: `{operation} {model}`.
#[must_use]
pub fn generation_span(operation: Operation, model: &str, request_id: &str, parameters: &Parameters) -> Span {
    let span = tracing::info_span!(
        "generation",
        otel.name = %format_args!("{} {model}", operation.name()),
        otel.kind = "internal",
        gen_ai.operation.name = operation.name(),
        gen_ai.provider.name = "quire",
        gen_ai.request.model = model,
        gen_ai.request.max_tokens = Empty,
        gen_ai.request.temperature = Empty,
        gen_ai.request.top_p = Empty,
        gen_ai.request.top_k = Empty,
        gen_ai.request.seed = Empty,
        gen_ai.request.choice.count = parameters.n.unwrap_or(1),
        gen_ai.response.model = Empty,
        gen_ai.response.time_to_first_chunk = Empty,
        gen_ai.response.finish_reasons = Empty,
        gen_ai.usage.input_tokens = Empty,
        gen_ai.usage.output_tokens = Empty,
        gen_ai.usage.cache_read.input_tokens = Empty,
        error.type = Empty,
        quire.request.id = request_id,
    );
    if let Some(value) = parameters.max_tokens {
        span.record("gen_ai.request.max_tokens", value);
    }
    if let Some(value) = parameters.temperature {
        span.record("gen_ai.request.temperature", f64::from(value));
    }
    if let Some(value) = parameters.top_p {
        span.record("gen_ai.request.top_p", f64::from(value));
    }
    if let Some(value) = parameters.top_k {
        span.record("gen_ai.request.top_k", value);
    }
    if let Some(value) = parameters.seed {
        span.record("gen_ai.request.seed", value);
    }
    span
}

/// Token counts of a finished generation.
pub fn record_usage(span: &Span, usage: Usage) {
    span.record("gen_ai.usage.input_tokens", usage.prompt_tokens);
    span.record("gen_ai.usage.output_tokens", usage.completion_tokens);
    span.record("gen_ai.usage.cache_read.input_tokens", usage.cached_tokens);
}

/// Puts the current span's context into the metadata of a gRPC call to a worker.
pub fn inject(metadata: &mut MetadataMap) {
    let context = Span::current().context();
    opentelemetry::global::get_text_map_propagator(|propagator| propagator.inject_context(&context, &mut MetadataInjector(metadata)));
}

struct HeaderExtractor<'a>(&'a HeaderMap);

impl Extractor for HeaderExtractor<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).and_then(|value| value.to_str().ok())
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(http::HeaderName::as_str).collect()
    }
}

struct MetadataInjector<'a>(&'a mut MetadataMap);

impl Injector for MetadataInjector<'_> {
    fn set(&mut self, key: &str, value: String) {
        if let (Ok(key), Ok(value)) = (MetadataKey::<Ascii>::from_bytes(key.as_bytes()), MetadataValue::<Ascii>::try_from(value)) {
            self.0.insert(key, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_and_metadata_carry_trace_context() {
        let mut metadata = MetadataMap::new();
        MetadataInjector(&mut metadata).set("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".to_owned());
        let headers = metadata.into_headers();
        let extractor = HeaderExtractor(&headers);
        assert_eq!(extractor.get("traceparent"), Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"));
        assert_eq!(extractor.keys(), ["traceparent"]);
    }
}
