//! Sends a request to a worker, and elsewhere if that fails: pick → send → retry or continue → stream.
//!
//! Owns which workers a request has been tried on, and what was generated so far, so that a stream that loses its worker
//! goes on at another as "prompt and tokens so far", exactly, where one of equal numerics is there. Knows no text.
//! Refusals of the request itself are never retried, and never count against a worker.

use std::collections::BTreeMap;
use std::error::Error;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use futures::future::BoxFuture;
use futures::stream::SelectAll;
use futures::{FutureExt, Stream, StreamExt};
use quire_proto::worker::v1::generate_event::Event;
use quire_proto::worker::v1::{FinishReason, GenerateEvent, GenerateRequest, NumericsFingerprint};
use tonic::{Code, Status};

use crate::error::ApiError;
use crate::fleet::{Fleet, InFlight, Member, Model};
use crate::worker::EventStream;

/// Metadata key by which a worker names the field at fault.
const FIELD_KEY: &str = "quire-field";

/// Events of one request, whichever workers they come from.
pub struct Dispatch {
    plan: Plan,
    /// One stream, or after a loss one a choice.
    legs: SelectAll<Leg>,
    /// A continuation on its way.
    moving: Option<BoxFuture<'static, Moved>>,
    /// Tokens of each unfinished choice.
    generated: BTreeMap<u32, Vec<u32>>,
}

/// The plan comes back with what it learned.
type Moved = (Plan, Result<Vec<Leg>, ApiError>);

/// What is needed to send the request again.
#[derive(Clone)]
struct Plan {
    fleet: Arc<Fleet>,
    model: Model,
    request: GenerateRequest,
    tried: Vec<Arc<Member>>,
    attempts_left: u32,
    /// When a request that still waits is to be dropped.
    deadline: Option<Instant>,
    /// Of the worker that made the tokens so far.
    numerics: Option<NumericsFingerprint>,
}

/// The stream of one call to one worker. Dropping it cancels the call.
struct Leg {
    choices: Vec<u32>,
    stream: EventStream,
    place: InFlight,
    over: bool,
}

enum LegItem {
    Event(GenerateEvent),
    /// These choices will not end there: the stream broke off (`status`), or the worker is leaving (none).
    Lost {
        choices: Vec<u32>,
        member: Arc<Member>,
        status: Option<Status>,
    },
}

impl Dispatch {
    /// Sends the request to a worker that takes it.
    pub async fn start(
        fleet: Arc<Fleet>,
        model: Model,
        request: GenerateRequest,
        deadline: Option<Instant>,
        max_attempts: u32,
    ) -> Result<Self, ApiError> {
        let n = request.n.max(1);
        let (tried, attempts_left) = (Vec::new(), max_attempts);
        let mut plan = Plan { fleet, model, request: request.clone(), tried, attempts_left, deadline, numerics: None };
        let leg = plan.send(request, (0..n).collect()).await?;
        let mut legs = SelectAll::new();
        legs.push(leg);
        Ok(Self { plan, legs, moving: None, generated: (0..n).map(|choice| (choice, Vec::new())).collect() })
    }

    /// The next event. Safe to drop before it is ready.
    pub async fn next(&mut self) -> Result<GenerateEvent, ApiError> {
        std::future::poll_fn(|context| self.poll(context)).await
    }

    /// A choice that the router ended by itself needs no continuation.
    pub fn forget(&mut self, choice: u32) {
        self.generated.remove(&choice);
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<GenerateEvent, ApiError>> {
        loop {
            if let Some(moving) = &mut self.moving {
                let (plan, legs) = ready!(moving.poll_unpin(context));
                self.moving = None;
                self.plan = plan;
                self.legs.extend(legs?);
            }
            match ready!(self.legs.poll_next_unpin(context)) {
                Some(LegItem::Event(event)) => {
                    if let Some(event) = self.note(event)? {
                        return Poll::Ready(Ok(event));
                    }
                }
                Some(LegItem::Lost { choices, member, status }) => self.move_elsewhere(&choices, member, status)?,
                None => return Poll::Ready(Err(ApiError::Internal("The worker ended its answer early.".to_owned()))),
            }
        }
    }

    /// Keeps track of an event; None if it isn't for the caller.
    fn note(&mut self, event: GenerateEvent) -> Result<Option<GenerateEvent>, ApiError> {
        match &event.event {
            Some(Event::Token(token)) => {
                if let Some(generated) = self.generated.get_mut(&token.choice) {
                    generated.push(token.id);
                }
                self.plan.attempts_left = self.plan.attempts_left.max(1);
            }
            Some(Event::Finished(finished)) => {
                let choice = finished.choice;
                match finished.reason() {
                    FinishReason::Stop | FinishReason::Length => {
                        self.generated.remove(&choice);
                    }
                    FinishReason::Deadline => return Err(ApiError::Deadline),
                    // Its leg has turned it into a loss.
                    FinishReason::Abort => return Ok(None),
                    FinishReason::Error | FinishReason::Unspecified => {
                        tracing::error!(request = %self.plan.request.request_id, message = %finished.message, "a worker failed a request");
                        return Err(ApiError::Internal(format!("The model failed on this request: {}.", finished.message)));
                    }
                }
            }
            _ => {}
        }
        Ok(Some(event))
    }

    /// Sends what is unfinished of a lost stream to another worker.
    fn move_elsewhere(&mut self, choices: &[u32], member: Arc<Member>, status: Option<Status>) -> Result<(), ApiError> {
        if let Some(status) = &status
            && !is_loss(status)
        {
            return Err(refusal(status));
        }
        let rest: Vec<(u32, Vec<u32>)> =
            choices.iter().filter_map(|choice| self.generated.get(choice).map(|tokens| (*choice, tokens.clone()))).collect();
        if rest.is_empty() {
            return Ok(());
        }
        tracing::warn!(request = %self.plan.request.request_id, worker = %member.name, choices = rest.len(), "worker lost within an answer; continuing elsewhere");
        if status.is_some() {
            member.suspect();
        }
        let mut plan = self.plan.clone();
        if !plan.tried.iter().any(|tried| Arc::ptr_eq(tried, &member)) {
            plan.tried.push(member);
        }
        // While it is on its way nothing else is polled, so there is only ever one.
        self.moving = Some(
            async move {
                let mut legs = Vec::new();
                for (choice, generated_ids) in rest {
                    let base = plan.request.clone();
                    let first_choice = base.first_choice + choice;
                    let request = GenerateRequest { generated_ids, n: 1, first_choice, prompt_logprobs: None, ..base };
                    match plan.send(request, vec![choice]).await {
                        Ok(leg) => legs.push(leg),
                        Err(error) => return (plan, Err(error)),
                    }
                }
                (plan, Ok(legs))
            }
            .boxed(),
        );
        Ok(())
    }
}

impl Plan {
    /// Workers may have come since the request did. Only those that read its tokens the same way count.
    fn look_again(&mut self) {
        if let Ok(model) = self.fleet.snapshot().resolve(&self.model.name)
            && model.card.tokenizer_hash == self.model.card.tokenizer_hash
        {
            self.model = model;
        }
    }

    /// Sends a request to a worker not tried yet, until one takes it.
    async fn send(&mut self, mut request: GenerateRequest, choices: Vec<u32>) -> Result<Leg, ApiError> {
        let tokens = (request.prompt_ids.len() + request.generated_ids.len()) as u32 + 1;
        let mut last = None;
        while self.attempts_left > 0 {
            if let Some(deadline) = self.deadline {
                // 0 would mean none.
                request.deadline_ms = (deadline.saturating_duration_since(Instant::now()).as_millis() as u64).max(1);
            }
            self.look_again();
            // Tokens may only be continued where they would have come out the same.
            let numerics = self.numerics.as_ref().filter(|_| !request.generated_ids.is_empty());
            let Some((serving, place)) = self.model.pick(tokens, &self.tried, numerics) else { break };
            match serving.member.worker.generate(request.clone()).await {
                Ok(stream) => {
                    self.numerics = serving.card.numerics.clone();
                    return Ok(Leg { choices, stream, place, over: false });
                }
                Err(status) if is_loss(&status) => {
                    tracing::warn!(worker = %serving.member.name, %status, "worker did not take a request");
                    serving.member.suspect();
                    last = Some(ApiError::Unavailable("No worker for this model can be reached now.".to_owned()));
                }
                // Full: another may have room, and this one is well.
                Err(status) if status.code() == Code::ResourceExhausted => last = Some(refusal(&status)),
                Err(status) => return Err(refusal(&status)),
            }
            self.attempts_left -= 1;
            self.tried.push(serving.member);
        }
        Err(last.unwrap_or_else(|| ApiError::Unavailable(format!("No worker for the model `{}` can be reached now.", self.model.name))))
    }
}

/// The worker, or the way to it, failed; not the request. A status with a source was made here, of a transport's error.
fn is_loss(status: &Status) -> bool {
    status.source().is_some()
        || matches!(status.code(), Code::Unavailable | Code::Unknown | Code::Cancelled | Code::Aborted | Code::DataLoss)
}

/// A worker's refusal as a client sees it.
fn refusal(status: &Status) -> ApiError {
    let message = status.message().to_owned();
    match status.code() {
        Code::InvalidArgument | Code::OutOfRange | Code::FailedPrecondition => {
            let param = status.metadata().get(FIELD_KEY).and_then(|field| field.to_str().ok()).map(str::to_owned);
            ApiError::Invalid { message, param }
        }
        Code::ResourceExhausted => ApiError::Overloaded { message, retry_after_s: 1 },
        Code::DeadlineExceeded => ApiError::Deadline,
        Code::NotFound => ApiError::Unavailable("The worker no longer serves this model.".to_owned()),
        code => {
            tracing::error!(?code, %message, "a worker failed a request");
            ApiError::Internal("The worker failed on this request.".to_owned())
        }
    }
}

impl Stream for Leg {
    type Item = LegItem;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<LegItem>> {
        if self.over {
            return Poll::Ready(None);
        }
        let lost = |leg: &Self, status| LegItem::Lost { choices: leg.choices.clone(), member: leg.place.member().clone(), status };
        Poll::Ready(match ready!(self.stream.poll_next_unpin(context)) {
            Some(Ok(mut event)) => {
                if let Some(Event::Finished(finished)) = &event.event
                    && finished.reason() == FinishReason::Abort
                {
                    let choices = if let [only] = self.choices[..] { vec![only] } else { vec![finished.choice] };
                    return Poll::Ready(Some(LegItem::Lost { choices, member: self.place.member().clone(), status: None }));
                }
                // A worker counts choices from `first_choice`; events of a lone continued choice are that choice's.
                if let [only] = self.choices[..] {
                    match &mut event.event {
                        Some(Event::Token(token)) => token.choice = only,
                        Some(Event::Finished(finished)) => finished.choice = only,
                        _ => {}
                    }
                }
                Some(LegItem::Event(event))
            }
            Some(Err(status)) => {
                self.over = true;
                Some(lost(&self, Some(status)))
            }
            None => {
                self.over = true;
                Some(lost(&self, Some(Status::unavailable("the stream ended"))))
            }
        })
    }
}
