//! One generation under observation: measures what its stream says and leaves the events as they are.
//!
//! A stream that is dropped before its end counts as cancelled. Where the server must stop, it ends the stream with an
//! error, so that the client reads why.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Instant,
};

use futures::Stream;
use metrics::{counter, gauge, histogram};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tracing::Span;

use super::{names, trace};
use crate::{
    error::ApiError,
    request::{FinishReason, TextEvent, Usage},
};

/// A stream of events, measured.
pub struct Observed<S> {
    inner: S,
    /// Resolves when the server stops its streams.
    cut: Pin<Box<WaitForCancellationFutureOwned>>,
    meter: Meter,
    ended: bool,
}

impl<S> Observed<S> {
    /// Observes `inner`, the events of `model` (a canonical name), asked for at `asked`; ends it in-band once `cut` is
    /// cancelled.
    pub fn new(inner: S, model: &str, asked: Instant, span: Span, cut: CancellationToken) -> Self {
        span.record("gen_ai.response.model", model);
        gauge!(names::GENERATIONS, "model" => model.to_owned()).increment(1.0);
        let meter = Meter { model: model.to_owned(), asked, last: Vec::new(), first: true, outcome: "cancelled", usage: None, span };
        Self { inner, cut: Box::pin(cut.cancelled_owned()), meter, ended: false }
    }
}

impl<S: Stream<Item = Result<TextEvent, ApiError>> + Unpin> Stream for Observed<S> {
    type Item = Result<TextEvent, ApiError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let this = &mut *self;
        let entered = this.meter.span.clone().entered();
        let polled = Pin::new(&mut this.inner).poll_next(context);
        drop(entered);
        let item = match polled {
            Poll::Pending if this.cut.as_mut().poll(context).is_ready() => {
                let message = "The server is shutting down; the answer is incomplete.";
                Some(Err(ApiError::Unavailable(message.to_owned())))
            }
            Poll::Pending => return Poll::Pending,
            Poll::Ready(item) => item,
        };
        match &item {
            Some(Ok(event)) => this.meter.event(event),
            Some(Err(error)) => {
                this.meter.failed(error);
                this.ended = true;
            }
            None => this.ended = true,
        }
        Poll::Ready(item)
    }
}

/// The figures of one generation; written when it is dropped.
struct Meter {
    model: String,
    asked: Instant,
    /// Time of the last token, by choice.
    last: Vec<Option<Instant>>,
    first: bool,
    outcome: &'static str,
    usage: Option<Usage>,
    span: Span,
}

impl Meter {
    fn event(&mut self, event: &TextEvent) {
        match event {
            TextEvent::Delta { choice, token_ids, .. } if !token_ids.is_empty() => self.tokens(*choice as usize, token_ids.len()),
            TextEvent::Finished { reason, .. } => {
                let name = if *reason == FinishReason::Length { "length" } else { "stop" };
                self.span.record("gen_ai.response.finish_reasons", name);
                // Several choices: one outcome, the one that says most.
                if self.outcome != "length" {
                    self.outcome = name;
                }
            }
            TextEvent::Usage(usage) => self.usage = Some(*usage),
            TextEvent::Started { .. } | TextEvent::Delta { .. } => {}
        }
    }

    fn tokens(&mut self, choice: usize, count: usize) {
        let now = Instant::now();
        if self.first {
            self.first = false;
            let waited = now.duration_since(self.asked).as_secs_f64();
            histogram!(names::FIRST_TOKEN, "model" => self.model.clone()).record(waited);
            self.span.record("gen_ai.response.time_to_first_chunk", waited);
        }
        if self.last.len() <= choice {
            self.last.resize(choice + 1, None);
        }
        if let Some(before) = self.last[choice].replace(now) {
            let each = now.duration_since(before).as_secs_f64() / count as f64;
            histogram!(names::INTER_TOKEN, "model" => self.model.clone()).record_many(each, count);
        }
    }

    fn failed(&mut self, error: &ApiError) {
        self.outcome = "error";
        self.span.record("error.type", error.code());
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        let model = self.model.clone();
        gauge!(names::GENERATIONS, "model" => model.clone()).decrement(1.0);
        histogram!(names::DURATION, "model" => model.clone()).record(self.asked.elapsed().as_secs_f64());
        // Finished choices without the usage that follows them: the client went away in between.
        let outcome = if self.usage.is_none() && self.outcome != "error" { "cancelled" } else { self.outcome };
        counter!(names::FINISHED, "model" => model.clone(), "outcome" => outcome).increment(1);
        if let Some(usage) = self.usage {
            counter!(names::PROMPT_TOKENS, "model" => model.clone()).increment(u64::from(usage.prompt_tokens));
            counter!(names::CACHED_TOKENS, "model" => model.clone()).increment(u64::from(usage.cached_tokens));
            counter!(names::COMPLETION_TOKENS, "model" => model).increment(u64::from(usage.completion_tokens));
            trace::record_usage(&self.span, usage);
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::{StreamExt as _, executor::block_on, stream};
    use metrics_exporter_prometheus::PrometheusBuilder;

    use super::*;

    fn observed<S: Stream<Item = Result<TextEvent, ApiError>> + Unpin>(inner: S, cut: CancellationToken) -> Observed<S> {
        Observed::new(inner, "tiny", Instant::now(), Span::none(), cut)
    }

    fn delta(ids: &[u32]) -> Result<TextEvent, ApiError> {
        Ok(TextEvent::Delta { choice: 0, text: "x".to_owned(), parts: Vec::new(), token_ids: ids.to_vec(), logprobs: Vec::new() })
    }

    #[test]
    fn a_generation_is_counted_once_by_its_outcome() {
        let recorder = PrometheusBuilder::new().build_recorder();
        let handle = recorder.handle();
        metrics::with_local_recorder(&recorder, || {
            let usage = Usage { prompt_tokens: 3, cached_tokens: 1, completion_tokens: 2 };
            let whole = vec![
                delta(&[1]),
                delta(&[2]),
                Ok(TextEvent::Finished { choice: 0, reason: FinishReason::Length }),
                Ok(TextEvent::Usage(usage)),
            ];
            let events = block_on(observed(stream::iter(whole), CancellationToken::new()).collect::<Vec<_>>());
            assert_eq!(events.len(), 4);
            let mut dropped = observed(stream::iter(vec![delta(&[1])]).chain(stream::pending()), CancellationToken::new());
            assert!(block_on(dropped.next()).is_some());
        });
        let text = handle.render();
        assert!(text.contains("quire_router_generations_total{model=\"tiny\",outcome=\"length\"} 1"), "{text}");
        assert!(text.contains("quire_router_generations_total{model=\"tiny\",outcome=\"cancelled\"} 1"), "{text}");
        assert!(text.contains("quire_router_generations_in_flight{model=\"tiny\"} 0"), "{text}");
        assert!(text.contains("quire_router_prompt_tokens_total{model=\"tiny\"} 3"), "{text}");
        assert!(text.contains("quire_router_completion_tokens_total{model=\"tiny\"} 2"), "{text}");
    }

    #[test]
    fn a_cut_ends_the_stream_with_an_error() {
        let cut = CancellationToken::new();
        let mut events = observed(stream::iter(vec![delta(&[1])]).chain(stream::pending()), cut.clone());
        assert!(matches!(block_on(events.next()), Some(Ok(_))));
        cut.cancel();
        assert!(matches!(block_on(events.next()), Some(Err(ApiError::Unavailable(_)))));
        assert!(block_on(events.next()).is_none());
    }
}
