//! The `Inference` service: the same core for clients that speak gRPC.
//!
//! Owns the translation between its messages and the core's. Every rule about a request is the core's.

use std::{sync::Arc, time::Duration};

use axum::Router;
use futures::{StreamExt as _, stream::BoxStream};
use http::HeaderMap;
use quire_proto::{
    FILE_DESCRIPTOR_SET,
    inference::v1::{
        ChatRequest, ChatResponse, Choice, ChoiceEnd, CompleteRequest, CompleteResponse, Delta, DetokenizeRequest, DetokenizeResponse,
        Message, Model, ModelsRequest, ModelsResponse, Parameters as WireParameters, TextEvent as WireEvent, TokenLogprob as WireLogprob,
        TokenizeRequest, TokenizeResponse, Usage as WireUsage, complete_request,
        inference_server::{Inference, InferenceServer},
        text_event, tokenize_request,
    },
};
use serde_json::json;
use tonic::{Request, Response, Status, metadata::MetadataValue, service::Routes};
use tonic_health::server::HealthReporter;

use crate::{
    core::{Completed, CompletedChoice, ModelView, TokenizeInput},
    error::ApiError,
    http::{
        App,
        edge::Caller,
        generation::{self, Events},
        openai::wire,
        reply,
    },
    request::{ChatPrompt, FinishReason, Parameters, Prompt, TextEvent, TextRequest, TokenLogprob, Usage},
    telemetry::trace::Operation,
};

/// The service's name, as health checks ask for it.
pub const SERVICE: &str = "quire.inference.v1.Inference";

/// Paths of the services on the main port, for metric labels.
pub const METHODS: [&str; 11] = [
    "/quire.inference.v1.Inference/Chat",
    "/quire.inference.v1.Inference/ChatStream",
    "/quire.inference.v1.Inference/Complete",
    "/quire.inference.v1.Inference/CompleteStream",
    "/quire.inference.v1.Inference/Models",
    "/quire.inference.v1.Inference/Tokenize",
    "/quire.inference.v1.Inference/Detokenize",
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
];

/// All gRPC services of the main port, and the handle that says whether they serve.
///
/// # Errors
/// If the descriptors for reflection cannot be read.
pub fn router(app: &Arc<App>) -> Result<(Router, HealthReporter), tonic_reflection::server::Error> {
    let (reporter, health) = tonic_health::server::health_reporter();
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            .with_service_name(SERVICE)
            .with_service_name("grpc.health.v1.Health")
    };
    // Older clients (Python's among them) only know v1alpha.
    let (reflection, older_reflection) = (reflection().build_v1()?, reflection().build_v1alpha()?);
    let inference = InferenceServer::new(Service(Arc::clone(app))).max_decoding_message_size(app.config.max_body_bytes);
    let routes = Routes::new(inference).add_service(health).add_service(reflection).add_service(older_reflection).prepare();
    Ok((routes.into_axum_router(), reporter))
}

/// An error as a status; `quire-error-code` carries its code, `quire-error-param` the field.
pub fn status(error: &ApiError) -> Status {
    let mut status = Status::new(error.grpc_code(), error.to_string());
    let metadata = status.metadata_mut();
    metadata.insert("quire-error-code", MetadataValue::from_static(error.code()));
    let param = match error {
        ApiError::Invalid { param, .. } | ApiError::ContextLength { param, .. } => param.as_deref(),
        ApiError::ModelNotFound(_) => Some("model"),
        _ => None,
    };
    if let Some(Ok(param)) = param.map(MetadataValue::try_from) {
        metadata.insert("quire-error-param", param);
    }
    status
}

/// What is left of `grpc-timeout` (`10S`, `500m`), in milliseconds.
fn timeout_ms(headers: &HeaderMap) -> Option<u64> {
    let text = headers.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let count: u64 = digits.parse().ok().filter(|_| digits.len() <= 8)?;
    let timeout = match unit {
        "H" => Duration::from_secs(count * 3600),
        "M" => Duration::from_secs(count * 60),
        "S" => Duration::from_secs(count),
        "m" => Duration::from_millis(count),
        "u" => Duration::from_micros(count),
        "n" => Duration::from_nanos(count),
        _ => return None,
    };
    // 0 would mean that there is no deadline.
    Some(u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX).max(1))
}

struct Service(Arc<App>);

fn refused(error: ApiError) -> Status {
    reply::count(&error);
    status(&error)
}

/// A call on its way to the core.
struct Call {
    id: String,
    model: ModelView,
    request: TextRequest,
}

impl Service {
    fn model(&self, name: &str) -> Result<ModelView, ApiError> {
        wire::model(&self.0, Some(name))
    }

    fn call<T>(&self, request: &Request<T>, model: &str, prompt: Prompt, given: Option<WireParameters>) -> Result<Call, ApiError> {
        let caller = request.extensions().get::<Caller>().cloned().unwrap_or_default();
        let deadline_ms = timeout_ms(&request.metadata().clone().into_headers()).unwrap_or(caller.deadline_ms);
        let model = self.model(model)?;
        let mut parameters = parameters(given.unwrap_or_default());
        if !matches!(prompt, Prompt::Chat(_)) && parameters.max_tokens.is_none() {
            parameters.max_tokens = Some(self.0.config.completion_max_tokens);
        }
        let request = TextRequest {
            request_id: caller.request_id.clone(),
            model: model.name.clone(),
            prompt,
            parameters,
            cache_salt: caller.cache_salt,
            deadline_ms,
        };
        Ok(Call { id: caller.request_id, model, request })
    }

    fn chat(&self, request: &Request<ChatRequest>) -> Result<Call, ApiError> {
        let body = request.get_ref();
        if body.messages.is_empty() {
            return Err(ApiError::invalid("messages", "`messages` must hold at least one message."));
        }
        self.call(request, &body.model, Prompt::Chat(chat_prompt(&body.messages)), body.parameters.clone())
    }

    fn complete(&self, request: &Request<CompleteRequest>) -> Result<Call, ApiError> {
        let body = request.get_ref();
        let prompt = match &body.prompt {
            Some(complete_request::Prompt::Text(text)) if !text.is_empty() => Prompt::Text(text.clone()),
            Some(complete_request::Prompt::Ids(list)) if !list.ids.is_empty() => Prompt::Ids(list.ids.clone()),
            _ => return Err(ApiError::invalid("prompt", "`prompt` is missing or empty.")),
        };
        self.call(request, &body.model, prompt, body.parameters.clone())
    }

    async fn start(&self, operation: Operation, request: TextRequest) -> Result<Events, ApiError> {
        generation::start(&self.0, operation, vec![request]).await
    }

    async fn whole(&self, operation: Operation, call: Call) -> Result<(String, String, Completed), ApiError> {
        let events = self.start(operation, call.request).await?;
        let answer = generation::collect(events, 1).await?.into_iter().next().unwrap_or_default();
        Ok((call.id, call.model.name, answer))
    }
}

type EventStream = BoxStream<'static, Result<WireEvent, Status>>;

#[tonic::async_trait]
impl Inference for Service {
    type ChatStreamStream = EventStream;
    type CompleteStreamStream = EventStream;

    async fn chat(&self, request: Request<ChatRequest>) -> Result<Response<ChatResponse>, Status> {
        let call = Self::chat(self, &request).map_err(refused)?;
        let (id, model, answer) = self.whole(Operation::Chat, call).await.map_err(refused)?;
        Ok(Response::new(ChatResponse { id, model, usage: Some(usage(answer.usage)), choices: choices(answer) }))
    }

    async fn chat_stream(&self, request: Request<ChatRequest>) -> Result<Response<EventStream>, Status> {
        let call = Self::chat(self, &request).map_err(refused)?;
        Ok(Response::new(wire_events(self.start(Operation::Chat, call.request).await.map_err(refused)?)))
    }

    async fn complete(&self, request: Request<CompleteRequest>) -> Result<Response<CompleteResponse>, Status> {
        let call = Self::complete(self, &request).map_err(refused)?;
        let (id, model, answer) = self.whole(Operation::Completion, call).await.map_err(refused)?;
        Ok(Response::new(CompleteResponse { id, model, usage: Some(usage(answer.usage)), choices: choices(answer) }))
    }

    async fn complete_stream(&self, request: Request<CompleteRequest>) -> Result<Response<EventStream>, Status> {
        let call = Self::complete(self, &request).map_err(refused)?;
        Ok(Response::new(wire_events(self.start(Operation::Completion, call.request).await.map_err(refused)?)))
    }

    async fn models(&self, _request: Request<ModelsRequest>) -> Result<Response<ModelsResponse>, Status> {
        let model = |view: ModelView| Model {
            name: view.name,
            max_context: view.max_context,
            vocab_size: view.vocab_size,
            architecture: view.architecture,
            weights: view.weights,
        };
        Ok(Response::new(ModelsResponse { models: self.0.core.models().into_iter().map(model).collect() }))
    }

    async fn tokenize(&self, request: Request<TokenizeRequest>) -> Result<Response<TokenizeResponse>, Status> {
        let body = request.into_inner();
        let input = match body.input {
            Some(tokenize_request::Input::Text(text)) => {
                TokenizeInput::Text { text, add_special_tokens: body.add_special_tokens.unwrap_or(true) }
            }
            Some(tokenize_request::Input::Chat(chat)) => TokenizeInput::Chat(chat_prompt(&chat.messages)),
            None => return Err(refused(ApiError::invalid("input", "One of `text` and `chat` is needed."))),
        };
        let model = self.model(&body.model).map_err(refused)?;
        let tokenized = self.0.core.tokenize(&model.name, input).await.map_err(refused)?;
        let pieces = if body.return_pieces { tokenized.pieces } else { Vec::new() };
        Ok(Response::new(TokenizeResponse { ids: tokenized.ids, max_context: tokenized.max_context, pieces }))
    }

    async fn detokenize(&self, request: Request<DetokenizeRequest>) -> Result<Response<DetokenizeResponse>, Status> {
        let body = request.into_inner();
        let model = self.model(&body.model).map_err(refused)?;
        let text = self.0.core.detokenize(&model.name, &body.ids).await.map_err(refused)?;
        Ok(Response::new(DetokenizeResponse { text }))
    }
}

fn chat_prompt(messages: &[Message]) -> ChatPrompt {
    let message = |message: &Message| {
        let mut value = json!({"role": message.role, "content": message.content});
        if !message.name.is_empty() {
            value["name"] = json!(message.name);
        }
        value
    };
    ChatPrompt { messages: messages.iter().map(message).collect(), ..ChatPrompt::default() }
}

fn parameters(wire: WireParameters) -> Parameters {
    Parameters {
        temperature: wire.temperature,
        top_p: wire.top_p,
        top_k: wire.top_k.map(i64::from),
        min_p: wire.min_p,
        presence_penalty: wire.presence_penalty,
        frequency_penalty: wire.frequency_penalty,
        repetition_penalty: wire.repetition_penalty,
        logit_bias: wire.logit_bias.into_iter().collect(),
        seed: wire.seed,
        n: wire.n,
        max_tokens: wire.max_tokens,
        min_tokens: wire.min_tokens,
        stop: wire.stop,
        stop_token_ids: wire.stop_token_ids,
        ignore_eos: wire.ignore_eos.unwrap_or(false),
        include_stop: wire.include_stop.unwrap_or(false),
        logprobs: wire.logprobs,
        priority: wire.priority.unwrap_or(0),
        ..Parameters::default()
    }
}

/// The stream as messages; what is not said in this protocol is left out.
fn wire_events(events: Events) -> EventStream {
    let wire = |item: Result<(usize, TextEvent), ApiError>| {
        let event = match item {
            Ok((_, TextEvent::Started { .. })) => None,
            Ok((_, TextEvent::Delta { choice, text, token_ids, logprobs, .. })) => Some(Ok(text_event::Event::Delta(Delta {
                index: choice,
                text,
                logprobs: logprobs.iter().map(logprob).collect(),
                token_ids,
            }))),
            Ok((_, TextEvent::Finished { choice, reason })) => Some(Ok(text_event::Event::End(ChoiceEnd {
                index: choice,
                finish_reason: finish_reason(&reason).to_owned(),
                stop_reason: stop_reason(&reason),
            }))),
            Ok((_, TextEvent::Usage(total))) => Some(Ok(text_event::Event::Usage(usage(total)))),
            Err(error) => Some(Err(refused(error))),
        };
        std::future::ready(event.map(|event| event.map(|event| WireEvent { event: Some(event) })))
    };
    events.filter_map(wire).boxed()
}

fn choices(answer: Completed) -> Vec<Choice> {
    let choice = |(index, choice): (usize, CompletedChoice)| Choice {
        index: index as u32,
        text: choice.text,
        finish_reason: choice.reason.as_ref().map_or("", finish_reason).to_owned(),
        stop_reason: choice.reason.as_ref().map_or_else(String::new, stop_reason),
        logprobs: choice.logprobs.iter().map(logprob).collect(),
        token_ids: choice.token_ids,
    };
    answer.choices.into_iter().enumerate().map(choice).collect()
}

fn usage(usage: Usage) -> WireUsage {
    WireUsage { prompt_tokens: usage.prompt_tokens, cached_tokens: usage.cached_tokens, completion_tokens: usage.completion_tokens }
}

fn logprob(token: &TokenLogprob) -> WireLogprob {
    WireLogprob {
        id: token.id,
        text: String::from_utf8_lossy(&token.bytes).into_owned(),
        raw: token.bytes.clone(),
        logprob: token.logprob.unwrap_or(f32::NEG_INFINITY),
        top: token.top.iter().map(logprob).collect(),
    }
}

fn finish_reason(reason: &FinishReason) -> &'static str {
    if *reason == FinishReason::Length { "length" } else { "stop" }
}

fn stop_reason(reason: &FinishReason) -> String {
    match reason {
        FinishReason::StopToken(id) => id.to_string(),
        FinishReason::StopString(text) => text.clone(),
        FinishReason::EndOfSequence | FinishReason::Length => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    #[test]
    fn timeouts_are_read_in_every_unit() {
        let read = |text: &str| timeout_ms(&HeaderMap::from_iter([("grpc-timeout".parse().unwrap(), text.parse().unwrap())]));
        assert_eq!(read("2H"), Some(7_200_000));
        assert_eq!(read("3M"), Some(180_000));
        assert_eq!(read("10S"), Some(10_000));
        assert_eq!(read("500m"), Some(500));
        assert_eq!(read("1500u"), Some(1));
        assert_eq!(read("5n"), Some(1));
        for wrong in ["10", "S", "", "-1S", "123456789S", "1x"] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
        assert_eq!(timeout_ms(&HeaderMap::new()), None);
    }

    #[test]
    fn a_status_names_code_and_field() {
        let status = status(&ApiError::invalid("top_p", "too high"));
        assert_eq!(status.code(), Code::InvalidArgument);
        assert_eq!(status.metadata().get("quire-error-param").unwrap(), "top_p");
        assert_eq!(status.metadata().get("quire-error-code").unwrap(), "invalid_value");
    }
}
