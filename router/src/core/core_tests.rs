use std::sync::atomic::Ordering;

use serde_json::json;

use super::fake::{self, EOS, Fake, Say, answer, cut, finished, started, token};
use super::*;
use crate::config::FleetConfig;
use quire_proto::worker::v1::FinishReason as Wire;
use tonic::Status;

const WAIT: Duration = Duration::from_secs(10);

fn fleet_config() -> FleetConfig {
    FleetConfig {
        watch_interval: Duration::from_millis(50),
        describe_timeout: Duration::from_secs(5),
        backoff_min: Duration::from_millis(10),
        backoff_max: Duration::from_millis(50),
    }
}

async fn core_of(workers: &[&Arc<Fake>]) -> Core {
    core_with(workers, CoreConfig::default()).await
}

async fn core_with(workers: &[&Arc<Fake>], config: CoreConfig) -> Core {
    let fleet = Fleet::new(fleet_config());
    for (index, worker) in workers.iter().enumerate() {
        fleet.add(&format!("fake{index}"), (*worker).clone());
    }
    let all_there = async {
        while fleet.snapshot().members().iter().filter(|member| member.reachable()).count() < workers.len() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(WAIT, all_there).await.unwrap();
    Core::new(fleet, config)
}

fn request(parameters: Parameters) -> TextRequest {
    TextRequest {
        request_id: "r".into(),
        model: "tiny".into(),
        prompt: Prompt::Ids(vec![32]),
        parameters,
        cache_salt: b"salt".to_vec(),
        deadline_ms: 0,
    }
}

fn ids(text: &str) -> Vec<u32> {
    crate::text::Tokenizer::from_json(fake::TOKENIZER).unwrap().encode(text, false, crate::text::SpecialText::Plain).unwrap()
}

async fn complete(core: &Core, parameters: Parameters) -> Completed {
    collect(core.generate(request(parameters)).await.unwrap()).await.unwrap()
}

#[test]
fn kept_special_tokens_are_shown_and_others_are_not() {
    let tokenizer = Arc::new(crate::text::Tokenizer::from_json(fake::TOKENIZER).unwrap());
    let (kept, other) = (tokenizer.id("<|im_start|>").unwrap(), tokenizer.id("<|im_end|>").unwrap());
    let mut detokenizer = crate::text::Detokenizer::new(tokenizer, &[], true).keeping(&[kept]);
    let mut text = String::new();
    [kept, other, kept].iter().for_each(|&id| detokenizer.push(id, &mut text));
    assert_eq!(text, "<|im_start|><|im_start|>");
}

fn with_eos(text: &str) -> Vec<u32> {
    let mut ids = ids(text);
    ids.push(EOS);
    ids
}

#[tokio::test]
async fn an_answer_is_text_ids_reason_and_counts() {
    let worker = Fake::new(vec![answer(&with_eos("Hello, wörld 😀!"))]);
    let core = core_of(&[&worker]).await;
    let completed = complete(&core, Parameters { logprobs: Some(0), ..Parameters::default() }).await;
    let choice = &completed.choices[0];
    assert_eq!(choice.text, "Hello, wörld 😀!");
    assert_eq!(choice.token_ids, ids("Hello, wörld 😀!"), "the end token is no part of the answer");
    let bytes: Vec<u8> = choice.logprobs.iter().flat_map(|token| token.bytes.clone()).collect();
    assert_eq!(String::from_utf8(bytes).unwrap(), choice.text);
    assert_eq!(choice.reason, Some(FinishReason::EndOfSequence));
    let generated = choice.token_ids.len() as u32 + 1;
    assert_eq!(completed.usage, Usage { prompt_tokens: 1, cached_tokens: 0, completion_tokens: generated }, "but it counts");
    let sent = worker.requests.lock()[0].clone();
    assert_eq!((sent.prompt_ids.as_slice(), sent.cache_salt.as_slice(), sent.n), (&[32][..], &b"salt"[..], 1));
    assert_eq!(core.in_flight(), 0);
}

#[tokio::test]
async fn a_slow_reader_gets_every_token_alone_and_a_late_one_merged_ones() {
    let text = "Hello, world! This is some text.";
    let worker = Fake::new(vec![answer(&with_eos(text))]);
    let core = core_of(&[&worker]).await;
    let mut stream = core.generate(request(Parameters::default())).await.unwrap();
    assert!(matches!(stream.next().await.unwrap().unwrap(), TextEvent::Started { .. }));
    // Everything is ready: one delta.
    let TextEvent::Delta { text: delta, .. } = stream.next().await.unwrap().unwrap() else { panic!() };
    assert_eq!(delta, text);
    assert!(matches!(stream.next().await.unwrap().unwrap(), TextEvent::Finished { .. }));
    assert!(matches!(stream.next().await.unwrap().unwrap(), TextEvent::Usage(_)));
    assert!(stream.next().await.is_none());
}

#[tokio::test]
async fn a_client_that_does_not_read_holds_the_worker_back() {
    let worker = Fake::new(vec![cut(&vec![32; 5000])]);
    let core = core_of(&[&worker]).await;
    let mut stream = core.generate(request(Parameters::default())).await.unwrap();
    stream.next().await;
    stream.next().await;
    assert!(worker.taken.load(Ordering::SeqCst) <= 2 + 64, "{:?}", worker.taken);
}

#[tokio::test]
async fn a_stop_string_across_tokens_ends_the_answer_and_the_workers_work() {
    let mut script = answer(&ids("one two STOP three")).unwrap();
    script.pop();
    script.push(Say::Hang);
    let worker = Fake::new(vec![Ok(script)]);
    let core = core_of(&[&worker]).await;
    let stop = vec!["nothing".to_owned(), "wo STO".to_owned()];
    let mut stream = core.generate(request(Parameters { stop, logprobs: Some(0), ..Parameters::default() })).await.unwrap();
    let (mut text, mut tokens) = (String::new(), Vec::new());
    loop {
        match stream.next().await.unwrap().unwrap() {
            TextEvent::Delta { text: delta, token_ids, .. } => {
                text.push_str(&delta);
                tokens.extend(token_ids);
            }
            TextEvent::Finished { reason, .. } => {
                assert_eq!(reason, FinishReason::StopString("wo STO".into()));
                break;
            }
            _ => {}
        }
    }
    assert_eq!(text, "one t");
    assert_eq!(worker.open.load(Ordering::SeqCst), 0, "the worker's stream is dropped at once");
    let Some(Ok(TextEvent::Usage(usage))) = stream.next().await else { panic!() };
    assert!(usage.completion_tokens as usize > tokens.len(), "tokens of the stop string count");
    assert!(stream.next().await.is_none());
}

#[tokio::test]
async fn a_held_back_beginning_of_a_stop_comes_out_at_the_end() {
    let worker = Fake::new(vec![cut(&ids("abc ST")), answer(&ids("one\u{1f600}"))]);
    let core = core_of(&[&worker]).await;
    let completed = complete(&core, Parameters { stop: vec!["STOP".into()], ..Parameters::default() }).await;
    assert_eq!((completed.choices[0].text.as_str(), &completed.choices[0].reason), ("abc ST", &Some(FinishReason::Length)));
    assert_eq!(completed.choices[0].token_ids, ids("abc ST"));
}

#[tokio::test]
async fn include_stop_and_min_tokens_are_respected() {
    let worker = Fake::new(vec![cut(&ids("a b a b a b")), cut(&ids("abababab"))]);
    let core = core_of(&[&worker]).await;
    let included = complete(&core, Parameters { stop: vec!["b".into()], include_stop: true, ..Parameters::default() }).await;
    assert_eq!(included.choices[0].text, "a b");
    let later = complete(&core, Parameters { stop: vec!["b".into()], min_tokens: Some(6), ..Parameters::default() }).await;
    assert!(later.usage.completion_tokens >= 6, "{later:?}");
    assert!(later.choices[0].text.len() >= 5 && later.choices[0].text.starts_with("abab"), "{later:?}");
}

#[tokio::test]
async fn end_tokens_are_text_only_where_they_do_not_end() {
    let a = ids("a")[0];
    // With ignore_eos they go by; a stop id of the client's names itself; at the length limit an end token is the end token.
    let worker = Fake::new(vec![cut(&[a, EOS, a]), answer(&[a, 65]), cut(&[a, EOS])]);
    let core = core_of(&[&worker]).await;
    let ignored = complete(&core, Parameters { ignore_eos: true, skip_special_tokens: Some(false), ..Parameters::default() }).await;
    assert_eq!((ignored.choices[0].text.as_str(), ignored.choices[0].token_ids.len()), ("a<|im_end|>a", 3));
    let stopped = complete(&core, Parameters { stop_token_ids: vec![65], ..Parameters::default() }).await;
    assert_eq!((stopped.choices[0].text.as_str(), &stopped.choices[0].reason), ("a", &Some(FinishReason::StopToken(65))));
    let cut = complete(&core, Parameters::default()).await;
    assert_eq!((cut.choices[0].token_ids.as_slice(), &cut.choices[0].reason), (&[a, EOS][..], &Some(FinishReason::Length)));
}

#[tokio::test]
async fn choices_are_kept_apart() {
    let (a, b) = (ids("a")[0], ids("b")[0]);
    let script = vec![
        started(),
        token(1, b),
        token(0, a),
        token(1, b),
        finished(1, Wire::Length, None),
        token(0, EOS),
        finished(0, Wire::Stop, Some(EOS)),
    ];
    let worker = Fake::new(vec![Ok(script)]);
    let core = core_of(&[&worker]).await;
    let completed = complete(&core, Parameters { n: Some(2), ..Parameters::default() }).await;
    assert_eq!((completed.choices[0].text.as_str(), completed.choices[1].text.as_str()), ("a", "bb"));
    assert_eq!(
        (&completed.choices[0].reason, &completed.choices[1].reason),
        (&Some(FinishReason::EndOfSequence), &Some(FinishReason::Length))
    );
    assert_eq!(completed.usage.completion_tokens, 4);
}

#[tokio::test]
async fn a_lost_worker_costs_the_client_nothing() {
    let whole = with_eos("The quick brown fox jumps");
    let mut script = answer(&whole[..6]).unwrap();
    script.pop();
    script.push(Say::Fail(Status::unavailable("gone")));
    let first = Fake::new(vec![Ok(script)]);
    let core = core_of(&[&first]).await;
    let second = Fake::new(vec![answer(&whole[6..])]);
    core.fleet().add("second", second.clone());
    while core.fleet().snapshot().members().iter().filter(|member| member.reachable()).count() < 2 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // Make sure that the first gets it.
    let busy: Vec<_> = core.fleet().snapshot().members().iter().filter(|m| m.name == "second").map(|m| m.enter_for_test()).collect();
    let stream = core.generate(request(Parameters { seed: Some(-5), ..Parameters::default() })).await.unwrap();
    drop(busy);
    let completed = collect(stream).await.unwrap();
    assert_eq!(completed.choices[0].text, "The quick brown fox jumps");
    assert_eq!(completed.usage.completion_tokens as usize, whole.len());
    let (one, two) = (first.requests.lock()[0].clone(), second.requests.lock()[0].clone());
    assert_eq!(two.generated_ids, whole[..6]);
    assert_eq!((two.n, two.first_choice, two.sampling.clone()), (1, 0, one.sampling));
    assert_eq!(two.sampling.unwrap().seed, (-5_i64) as u64);
}

#[tokio::test]
async fn tokens_are_never_continued_by_other_numerics() {
    let mut script = answer(&[32, 33]).unwrap();
    script.pop();
    script.push(Say::Fail(Status::unavailable("gone")));
    let first = Fake::new(vec![Ok(script)]);
    let other = Fake::new(vec![answer(&[32])]).with_card(|card| card.numerics = None);
    let core = core_of(&[&first, &other]).await;
    let busy: Vec<_> = core.fleet().snapshot().members().iter().filter(|m| m.name == "fake1").map(|m| m.enter_for_test()).collect();
    let error = collect(core.generate(request(Parameters::default())).await.unwrap()).await.unwrap_err();
    drop(busy);
    assert_eq!(error.status(), 503);
    assert!(other.requests.lock().is_empty());
}

#[tokio::test]
async fn a_worker_that_refuses_to_start_is_passed_over() {
    for status in [Status::unavailable("draining"), Status::resource_exhausted("full")] {
        let bad = Fake::new(vec![Err(status.clone())]);
        let good = Fake::new(vec![answer(&with_eos("ok"))]);
        let core = core_of(&[&bad, &good]).await;
        let busy: Vec<_> = core.fleet().snapshot().members().iter().filter(|m| m.name == "fake1").map(|m| m.enter_for_test()).collect();
        assert_eq!(complete(&core, Parameters::default()).await.choices[0].text, "ok");
        drop(busy);
        assert_eq!(bad.requests.lock().len(), 1);
    }
}

#[tokio::test]
async fn a_bad_request_is_not_sent_elsewhere() {
    let bad = Fake::new(vec![Err(Status::invalid_argument("no")); 2]);
    let other = Fake::new(vec![Err(Status::invalid_argument("no")); 2]);
    let core = core_of(&[&bad, &other]).await;
    let error = core.generate(request(Parameters::default())).await.err().unwrap();
    assert_eq!(error.status(), 400);
    assert_eq!(bad.requests.lock().len() + other.requests.lock().len(), 1);
    assert!(core.fleet().ready());
}

#[tokio::test]
async fn endings_of_the_worker_become_errors() {
    for (reason, status) in [(Wire::Error, 500), (Wire::Deadline, 408)] {
        let worker = Fake::new(vec![Ok(vec![started(), token(0, 32), finished(0, reason, None)])]);
        let core = core_of(&[&worker]).await;
        let error = collect(core.generate(request(Parameters::default())).await.unwrap()).await.unwrap_err();
        assert_eq!(error.status(), status);
        assert_eq!(core.in_flight(), 0);
    }
}

#[tokio::test]
async fn dropping_the_stream_cancels_and_frees_the_permit() {
    let worker = Fake::new(vec![Ok(vec![started(), token(0, 32), Say::Hang]); 3]);
    let core = core_with(&[&worker], CoreConfig { max_in_flight: 1, ..CoreConfig::default() }).await;
    let stream = core.generate(request(Parameters::default())).await.unwrap();
    let refused = core.generate(request(Parameters::default())).await.err().unwrap();
    assert_eq!((refused.status(), worker.open.load(Ordering::SeqCst)), (429, 1));
    assert_eq!(core.fleet().snapshot().members()[0].in_flight(), 1);
    drop(stream);
    assert_eq!((worker.open.load(Ordering::SeqCst), core.in_flight()), (0, 0));
    assert_eq!(core.fleet().snapshot().members()[0].in_flight(), 0);
    assert!(core.generate(request(Parameters::default())).await.is_ok());
}

#[tokio::test]
async fn prompts_are_checked_before_a_worker_sees_them() {
    let worker = Fake::new(vec![]);
    let core = core_of(&[&worker]).await;
    let refuse = async |prompt: Prompt, parameters: Parameters| {
        let error = core.generate(TextRequest { prompt, ..request(parameters) }).await.err().unwrap();
        (error.status(), error.body()["error"]["param"].as_str().unwrap_or_default().to_owned())
    };
    let chat = |text: &str| Prompt::Chat(ChatPrompt { messages: vec![json!({"role": "user", "content": text})], ..ChatPrompt::default() });
    let bad = |field: &str| (400, field.to_owned());
    let none = Parameters::default;
    assert_eq!(refuse(Prompt::Text(String::new()), none()).await, bad("prompt"));
    assert_eq!(refuse(Prompt::Ids(vec![]), none()).await, bad("prompt"));
    assert_eq!(refuse(Prompt::Ids(vec![512]), none()).await, bad("prompt"));
    assert_eq!(refuse(Prompt::Ids(vec![1; 64]), none()).await, bad("prompt"));
    assert_eq!(refuse(Prompt::Ids(vec![1; 60]), Parameters { max_tokens: Some(5), ..none() }).await, bad("max_tokens"));
    assert_eq!(refuse(Prompt::Chat(ChatPrompt::default()), none()).await, bad("messages"));
    assert_eq!(refuse(chat(&"word ".repeat(60)), none()).await, bad("messages"));
    assert_eq!(refuse(Prompt::Text("a".into()), Parameters { stop: vec![String::new()], ..none() }).await, bad("stop"));
    let before = Instant::now();
    for one in [" ", "a"] {
        assert_eq!(refuse(Prompt::Text(one.repeat(1 << 20)), none()).await, bad("prompt"));
        assert_eq!(refuse(chat(&one.repeat(1 << 20)), none()).await, bad("messages"));
    }
    assert!(before.elapsed() < Duration::from_secs(1));
    assert!(worker.requests.lock().is_empty());
}

#[tokio::test]
async fn names_aliases_and_unknown_models() {
    let worker = Fake::new(vec![answer(&with_eos("x"))]);
    let core = core_of(&[&worker]).await;
    assert_eq!(core.models().len(), 1);
    let view = core.model("tiny:alias").unwrap();
    assert_eq!((view.name.as_str(), view.available, view.has_chat_template), ("tiny", true, true));
    let stream = core.generate(TextRequest { model: "tiny:alias".into(), ..request(Parameters::default()) }).await.unwrap();
    assert_eq!(stream.model, "tiny");
    let error = core.generate(TextRequest { model: "other".into(), ..request(Parameters::default()) }).await.err().unwrap();
    assert_eq!(error.status(), 404);
}

#[tokio::test]
async fn tokenize_and_detokenize_are_inverse() {
    let worker = Fake::new(vec![]);
    let core = core_of(&[&worker]).await;
    let text = "Hello <|im_end|> wörld 😀";
    let input = TokenizeInput::Text { text: text.into(), add_special_tokens: false };
    let tokenized = core.tokenize("tiny", input).await.unwrap();
    assert!(tokenized.ids.contains(&EOS));
    assert_eq!((tokenized.ids.len(), tokenized.max_context), (tokenized.pieces.len(), 64));
    assert_eq!(core.detokenize("tiny", &tokenized.ids).await.unwrap(), text);
    assert_eq!(core.detokenize("tiny", &[]).await.unwrap(), "");
    assert_eq!(core.detokenize("tiny", &[9999]).await.unwrap_err().status(), 400);
    let chat = ChatPrompt { messages: vec![json!({"role": "user", "content": "Hi"})], ..ChatPrompt::default() };
    let ids = core.tokenize("tiny", TokenizeInput::Chat(chat)).await.unwrap().ids;
    assert_eq!(ids, [509, 361, 81, 198, 39, 72, 510, 198, 509, 64, 292, 338, 285, 298, 198]);
}

#[tokio::test]
async fn a_seed_is_drawn_where_none_is_given() {
    let worker = Fake::new(vec![answer(&with_eos("x")), answer(&with_eos("x"))]);
    let core = core_of(&[&worker]).await;
    complete(&core, Parameters::default()).await;
    complete(&core, Parameters::default()).await;
    let seeds: Vec<u64> = worker.requests.lock().iter().map(|request| request.sampling.clone().unwrap().seed).collect();
    assert_ne!(seeds[0], seeds[1]);
}
