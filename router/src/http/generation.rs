//! One call's requests to the core as one stream of events, observed. Shared by all faces, HTTP and gRPC.

use std::{sync::Arc, time::Instant};

use futures::{
    StreamExt as _, TryFutureExt as _, TryStreamExt as _,
    stream::{self, BoxStream},
};
use tracing::Instrument as _;

use super::App;
use crate::{
    core::{Completed, CompletedChoice, TextStream},
    error::ApiError,
    request::{TextEvent, TextRequest, Usage},
    telemetry::{
        observed::Observed,
        trace::{Operation, generation_span},
    },
};

/// Events, each with the index of its prompt. An error is the last item.
pub type Events = BoxStream<'static, Result<(usize, TextEvent), ApiError>>;

/// Prompts of one call that run at the same time; the rest of a long list waits its turn here, not in the queues of others.
const CONCURRENT_PROMPTS: usize = 32;

/// Starts `requests`, one a prompt, and waits for the first event: what goes wrong before is a status of the call.
///
/// # Errors
/// The first request's error.
pub async fn start(app: &Arc<App>, operation: Operation, requests: Vec<TextRequest>) -> Result<Events, ApiError> {
    let app = Arc::clone(app);
    let mut events = stream::iter(requests.into_iter().enumerate())
        .map(move |(prompt, request)| {
            let app = Arc::clone(&app);
            let events = async move { one(&app, operation, request).await }.try_flatten_stream();
            events.map_ok(move |event| (prompt, event)).boxed()
        })
        .flatten_unordered(CONCURRENT_PROMPTS)
        .boxed();
    match events.next().await {
        Some(Ok(first)) => Ok(stream::once(std::future::ready(Ok(first))).chain(events).boxed()),
        Some(Err(error)) => Err(error),
        None => Err(ApiError::Internal("The answer ended before it began.".to_owned())),
    }
}

async fn one(app: &App, operation: Operation, request: TextRequest) -> Result<Observed<TextStream>, ApiError> {
    let asked = Instant::now();
    let span = generation_span(operation, &request.model, &request.request_id, &request.parameters);
    let generate = app.core.generate(request).instrument(span.clone());
    let stream = match app.cut.run_until_cancelled(generate).await {
        Some(started) => started.inspect_err(|error| {
            span.record("error.type", error.code());
        })?,
        None => return Err(ApiError::Unavailable("The server is shutting down.".to_owned())),
    };
    let model = stream.model.clone();
    Ok(Observed::new(stream, &model, asked, span, app.cut.clone()))
}

/// The answers without streaming, one a prompt: the stream, collected.
///
/// # Errors
/// The stream's error, if it ends with one.
pub async fn collect(mut events: Events, prompts: usize) -> Result<Vec<Completed>, ApiError> {
    let mut answers = vec![Completed::default(); prompts];
    while let Some((prompt, event)) = events.try_next().await? {
        if let Some(answer) = answers.get_mut(prompt) {
            add(answer, event);
        }
    }
    Ok(answers)
}

/// Choice `index` of an answer, made if it is the first of it.
fn choice_at(answer: &mut Completed, index: u32) -> &mut CompletedChoice {
    let index = index as usize;
    if answer.choices.len() <= index {
        answer.choices.resize_with(index + 1, Default::default);
    }
    &mut answer.choices[index]
}

fn add(answer: &mut Completed, event: TextEvent) {
    match event {
        TextEvent::Started { prompt_ids, cached_tokens, prompt_logprobs } => {
            answer.usage.prompt_tokens = prompt_ids.len() as u32;
            answer.usage.cached_tokens = cached_tokens;
            answer.prompt_ids = prompt_ids;
            answer.prompt_logprobs = prompt_logprobs;
        }
        TextEvent::Delta { choice, text, parts, token_ids, logprobs } => {
            choice_at(answer, choice).add(&text, parts, token_ids, logprobs);
        }
        TextEvent::Finished { choice, reason } => choice_at(answer, choice).reason = Some(reason),
        TextEvent::Usage(usage) => answer.usage = usage,
    }
}

/// Usage so far of a call with several prompts, and in the end its total.
#[derive(Debug, Default)]
pub struct Tally(Vec<Usage>);

impl Tally {
    pub fn event(&mut self, prompt: usize, event: &TextEvent) {
        if self.0.len() <= prompt {
            self.0.resize(prompt + 1, Usage::default());
        }
        let usage = &mut self.0[prompt];
        match event {
            TextEvent::Started { prompt_ids, cached_tokens, .. } => {
                usage.prompt_tokens = prompt_ids.len() as u32;
                usage.cached_tokens = *cached_tokens;
            }
            TextEvent::Delta { token_ids, .. } => usage.completion_tokens += token_ids.len() as u32,
            TextEvent::Finished { .. } => {}
            TextEvent::Usage(total) => *usage = *total,
        }
    }

    pub fn total(&self) -> Usage {
        total(&self.0)
    }
}

/// The sum of several usages.
pub fn total(usages: &[Usage]) -> Usage {
    usages.iter().fold(Usage::default(), |sum, usage| Usage {
        prompt_tokens: sum.prompt_tokens + usage.prompt_tokens,
        cached_tokens: sum.cached_tokens + usage.cached_tokens,
        completion_tokens: sum.completion_tokens + usage.completion_tokens,
    })
}
