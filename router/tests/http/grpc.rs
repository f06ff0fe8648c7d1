//! gRPC on the port that serves HTTP.

use std::{sync::atomic::Ordering, time::Duration};

use futures::TryStreamExt as _;
use quire_proto::inference::v1::{
    ChatMessages, ChatRequest, CompleteRequest, DetokenizeRequest, Message, ModelsRequest, Parameters, TokenIds, TokenizeRequest,
    complete_request, inference_client::InferenceClient, text_event::Event, tokenize_request,
};
use quire_router::config::FaceConfig;
use tonic::{Code, Request, transport::Channel};
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient};

use crate::site::{ANSWER, Behaviour, Site, ids};

async fn channel(site: &Site) -> Channel {
    Channel::from_shared(format!("http://{}", site.address)).unwrap().connect().await.unwrap()
}

fn chat() -> ChatRequest {
    let message = Message { role: "user".to_owned(), content: "hi".to_owned(), name: String::new() };
    ChatRequest { messages: vec![message], ..ChatRequest::default() }
}

fn complete(parameters: Parameters) -> CompleteRequest {
    let prompt = Some(complete_request::Prompt::Ids(TokenIds { ids: ids("Once") }));
    CompleteRequest { prompt, parameters: Some(parameters), ..CompleteRequest::default() }
}

#[tokio::test]
async fn both_protocols_answer_alike_on_one_port() {
    let site = Site::start().await;
    let mut client = InferenceClient::new(channel(&site).await);
    let answer = client.chat(chat()).await.unwrap().into_inner();
    let other = site.ask("/v1/chat/completions", serde_json::json!({"messages": [{"role": "user", "content": "hi"}]})).await;
    assert_eq!(other["choices"][0]["message"]["content"], answer.choices[0].text);
    assert_eq!((answer.choices[0].text.as_str(), answer.choices[0].finish_reason.as_str()), (ANSWER, "stop"));
    assert_eq!(other["usage"]["prompt_tokens"], answer.usage.unwrap().prompt_tokens);
    let prompts: Vec<_> = site.fake.requests.lock().iter().map(|request| request.prompt_ids.clone()).collect();
    assert_eq!(prompts[0], prompts[1]);
}

#[tokio::test]
async fn a_stream_says_what_the_whole_answer_says() {
    let site = Site::start().await;
    let mut client = InferenceClient::new(channel(&site).await);
    let parameters =
        Parameters { n: Some(2), logprobs: Some(2), stop: vec!["Bye".to_owned()], max_tokens: Some(50), ..Parameters::default() };
    let whole = client.complete(complete(parameters.clone())).await.unwrap().into_inner();
    let events: Vec<_> = client.complete_stream(complete(parameters)).await.unwrap().into_inner().try_collect().await.unwrap();
    let mut texts = vec![(String::new(), 0, String::new()); 2];
    let (last, rest) = events.split_last().unwrap();
    for event in rest {
        match event.event.clone().unwrap() {
            Event::Delta(delta) => {
                texts[delta.index as usize].0.push_str(&delta.text);
                texts[delta.index as usize].1 += delta.logprobs.len();
            }
            Event::End(end) => texts[end.index as usize].2 = end.stop_reason,
            Event::Usage(_) => panic!("usage is the last event"),
        }
    }
    let expected: Vec<_> =
        whole.choices.iter().map(|choice| (choice.text.clone(), choice.logprobs.len(), choice.stop_reason.clone())).collect();
    assert_eq!(texts, expected);
    assert_eq!(expected[0].2, "Bye");
    assert_eq!(last.event, whole.usage.map(Event::Usage));
}

#[tokio::test]
async fn the_small_calls_work() {
    let site = Site::start().await;
    let mut client = InferenceClient::new(channel(&site).await);
    let models = client.models(ModelsRequest {}).await.unwrap().into_inner().models;
    assert_eq!((models.len(), models[0].name.as_str(), models[0].max_context), (1, "tiny", 256));
    let input = Some(tokenize_request::Input::Text("Hello".to_owned()));
    let request = TokenizeRequest { input, add_special_tokens: Some(false), return_pieces: true, ..TokenizeRequest::default() };
    let tokens = client.tokenize(request).await.unwrap().into_inner();
    assert_eq!((tokens.ids.clone(), tokens.pieces.len()), (ids("Hello"), ids("Hello").len()));
    let text = client.detokenize(DetokenizeRequest { ids: tokens.ids, ..DetokenizeRequest::default() }).await.unwrap().into_inner().text;
    assert_eq!(text, "Hello");
    let input = Some(tokenize_request::Input::Chat(ChatMessages { messages: chat().messages }));
    let chat = client.tokenize(TokenizeRequest { input, ..TokenizeRequest::default() }).await.unwrap().into_inner();
    assert!(chat.ids.len() > 3);
}

#[tokio::test]
async fn errors_are_statuses_that_name_the_field() {
    let site = Site::start().await;
    let mut client = InferenceClient::new(channel(&site).await);
    for (request, code, param) in [
        (complete(Parameters { temperature: Some(3.0), ..Parameters::default() }), Code::InvalidArgument, "temperature"),
        (CompleteRequest { prompt: None, ..complete(Parameters::default()) }, Code::InvalidArgument, "prompt"),
        (CompleteRequest { model: "other".to_owned(), ..complete(Parameters::default()) }, Code::NotFound, "model"),
    ] {
        let status = client.complete(request.clone()).await.unwrap_err();
        assert_eq!((status.code(), status.metadata().get("quire-error-param").unwrap().to_str().unwrap()), (code, param));
        assert_eq!(client.complete_stream(request).await.unwrap_err().code(), code, "before the stream begins");
    }
    site.behave(Behaviour::Fail(3, tonic::Status::internal("broken")));
    let mut events = client.complete_stream(complete(Parameters::default())).await.unwrap().into_inner();
    let failed = loop {
        match events.message().await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("a failed stream ended well"),
            Err(status) => break status,
        }
    };
    assert_eq!(failed.code(), Code::Internal);
}

#[tokio::test]
async fn a_key_is_asked_for_and_health_is_not() {
    let site = Site::with("tiny", FaceConfig { api_key: Some("secret".to_owned()), ..FaceConfig::default() }, 256).await;
    let mut client = InferenceClient::new(channel(&site).await);
    assert_eq!(client.models(ModelsRequest {}).await.unwrap_err().code(), Code::Unauthenticated);
    let mut request = Request::new(ModelsRequest {});
    request.metadata_mut().insert("authorization", "Bearer secret".parse().unwrap());
    assert!(client.models(request).await.is_ok());
    let mut health = HealthClient::new(channel(&site).await);
    let asked = HealthCheckRequest { service: "quire.inference.v1.Inference".to_owned() };
    let mut status = ServingStatus::Unknown;
    for _ in 0..200 {
        if let Ok(answer) = health.check(asked.clone()).await {
            status = answer.into_inner().status();
        }
        if status == ServingStatus::Serving {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(status, ServingStatus::Serving);
}

#[tokio::test]
async fn dropping_a_call_or_its_deadline_cancels_the_worker() {
    let site = Site::start().await;
    site.behave(Behaviour::Hang(2));
    let mut client = InferenceClient::new(channel(&site).await);
    let stream = client.complete_stream(complete(Parameters::default())).await.unwrap();
    assert_eq!(site.fake.open.load(Ordering::SeqCst), 1);
    drop(stream);
    site.until_idle().await;
    let mut request = Request::new(complete(Parameters::default()));
    request.set_timeout(Duration::from_millis(100));
    let status = client.complete(request).await.unwrap_err();
    assert!(matches!(status.code(), Code::DeadlineExceeded | Code::Cancelled), "{status}");
    site.until_idle().await;
    let told = site.fake.requests.lock().last().unwrap().deadline_ms;
    assert!((1..=100).contains(&told), "the worker knows the deadline: {told}");
}
