//! Against answers of Hugging Face's tokenizers and transformers (`testdata/tokenizers`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use quire_proto::worker::v1::ModelCard;
use serde_json::{Value, json};

use super::*;
use crate::request::ChatPrompt;
use crate::text::{Detokenizer, ModelText};

struct Fixture {
    name: &'static str,
    tokenizer: Arc<Tokenizer>,
    golden: Value,
    template: Option<String>,
}

macro_rules! fixture {
    ($name:literal, $config:expr) => {{
        let config: Option<&str> = $config;
        Fixture {
            name: $name,
            tokenizer: Arc::new(
                Tokenizer::from_json(include_bytes!(concat!("../../testdata/tokenizers/", $name, "/tokenizer.json"))).unwrap(),
            ),
            golden: serde_json::from_str(include_str!(concat!("../../testdata/tokenizers/", $name, "/golden.json"))).unwrap(),
            template: config.map(|config| serde_json::from_str::<Value>(config).unwrap()["chat_template"].as_str().unwrap().to_owned()),
        }
    }};
}

fn byte_level() -> Vec<Fixture> {
    vec![
        fixture!("main", Some(include_str!("../../testdata/tokenizers/main/tokenizer_config.json"))),
        fixture!("llama3", Some(include_str!("../../testdata/tokenizers/llama3/tokenizer_config.json"))),
        fixture!("gpt2", Some(include_str!("../../testdata/tokenizers/gpt2/tokenizer_config.json"))),
    ]
}

fn all() -> Vec<Fixture> {
    let mut all = byte_level();
    all.extend([fixture!("spm-bpe", None), fixture!("unigram", None), fixture!("wordpiece", None)]);
    all
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn deltas(tokenizer: &Arc<Tokenizer>, ids: &[u32], skip: bool) -> (Vec<String>, String) {
    let mut detokenizer = Detokenizer::new(tokenizer.clone(), &[], skip);
    let deltas = ids
        .iter()
        .map(|&id| {
            let mut out = String::new();
            detokenizer.push(id, &mut out);
            out
        })
        .collect();
    let mut flush = String::new();
    detokenizer.flush(&mut flush);
    (deltas, flush)
}

#[test]
fn encodes_as_hugging_face() {
    for fixture in all() {
        for case in fixture.golden["strings"].as_array().unwrap() {
            let text = case["text"].as_str().unwrap();
            let encode = |add, special| fixture.tokenizer.encode(text, add, special).unwrap();
            assert_eq!(encode(false, SpecialText::Control), ids(&case["ids"]), "{} {text:?}", fixture.name);
            assert_eq!(encode(true, SpecialText::Control), ids(&case["ids_with_special_tokens_added"]), "{} {text:?}", fixture.name);
            if case.get("ids_specials_as_text").is_some() {
                assert_eq!(encode(false, SpecialText::Plain), ids(&case["ids_specials_as_text"]), "{} {text:?}", fixture.name);
            }
        }
    }
}

#[test]
fn decodes_as_hugging_face() {
    for fixture in all() {
        for case in fixture.golden["strings"].as_array().unwrap() {
            // Sequences with BOS, where the fixture has it, are what its decoded text is of.
            let key = if fixture.template.is_some() { "ids" } else { "ids_with_special_tokens_added" };
            let ids = ids(&case[key]);
            for (skip, want) in [(false, "decoded"), (true, "decoded_skip_special")] {
                let want = case[want].as_str().unwrap();
                assert_eq!(fixture.tokenizer.decode(&ids, skip).unwrap(), want);
                let (pieces, flush) = deltas(&fixture.tokenizer, &ids, skip);
                assert_eq!(pieces.concat() + &flush, want, "{} {:?}", fixture.name, case["text"]);
            }
        }
    }
}

#[test]
fn streams_as_hugging_face() {
    for fixture in byte_level() {
        for case in fixture.golden["strings"].as_array().unwrap() {
            let (pieces, flush) = deltas(&fixture.tokenizer, &ids(&case["ids"]), false);
            assert_eq!(
                (json!(pieces), json!(flush)),
                (case["deltas"].clone(), case["flush"].clone()),
                "{} {:?}",
                fixture.name,
                case["text"]
            );
        }
        for case in fixture.golden["id_sequences"].as_array().unwrap() {
            for (skip, want) in [(false, "decoded"), (true, "decoded_skip_special")] {
                let (pieces, flush) = deltas(&fixture.tokenizer, &ids(&case["ids"]), skip);
                assert_eq!(pieces.concat() + &flush, case[want].as_str().unwrap(), "{} {}", fixture.name, case["name"]);
            }
        }
    }
}

#[test]
fn a_character_over_several_tokens_is_never_shown_broken() {
    for fixture in all() {
        for case in fixture.golden["strings"].as_array().unwrap() {
            if case["decoded"].as_str().unwrap().contains('\u{fffd}') {
                continue;
            }
            let (pieces, _) = deltas(&fixture.tokenizer, &ids(&case["ids"]), false);
            assert!(pieces.iter().all(|piece| !piece.contains('\u{fffd}')), "{} {:?}", fixture.name, case["text"]);
        }
    }
}

#[test]
fn bytes_of_tokens_join_to_the_text() {
    for fixture in byte_level() {
        for case in fixture.golden["strings"].as_array().unwrap() {
            let bytes: Vec<u8> = ids(&case["ids"]).iter().flat_map(|&id| fixture.tokenizer.token_bytes(id)).collect();
            assert_eq!(String::from_utf8(bytes).unwrap(), case["decoded"].as_str().unwrap());
        }
    }
}

#[test]
fn the_leading_space_stays_after_a_prompt() {
    let fixture = fixture!("spm-bpe", None);
    let prompt = fixture.tokenizer.encode("Hello,", true, SpecialText::Control).unwrap();
    let next = fixture.tokenizer.encode("world", false, SpecialText::Control).unwrap();
    let streamed = |prompt: &[u32]| {
        let mut detokenizer = Detokenizer::new(fixture.tokenizer.clone(), prompt, true);
        let mut out = String::new();
        next.iter().for_each(|&id| detokenizer.push(id, &mut out));
        out
    };
    assert_eq!(streamed(&prompt), " world");
    assert_eq!(streamed(&[]), "world");
    assert_eq!(streamed(&prompt[..1]), "world", "BOS alone is no text before");
}

#[test]
fn a_prompt_may_end_within_a_character() {
    let fixture = &byte_level()[0];
    // 😀 as four byte tokens; the prompt has two of them.
    let emoji = [172, 253, 246, 222];
    let mut detokenizer = Detokenizer::new(fixture.tokenizer.clone(), &emoji[..2], true);
    let mut out = String::new();
    emoji[2..].iter().for_each(|&id| detokenizer.push(id, &mut out));
    assert_eq!(out, "😀");
    // Broken in the prompt: not the answer's fault.
    let mut detokenizer = Detokenizer::new(fixture.tokenizer.clone(), &emoji[..2], true);
    let mut out = String::new();
    detokenizer.push(32, &mut out);
    detokenizer.flush(&mut out);
    assert_eq!(out, "A");
}

#[test]
fn chat_as_hugging_face_but_for_injected_control() {
    for fixture in byte_level() {
        let card = ModelCard { add_bos: true, bos_id: Some(507), eos_ids: vec![510], ..ModelCard::default() };
        let model = ModelText::new(&card, fixture.tokenizer.clone(), fixture.template.as_deref().map(str::as_bytes));
        for case in fixture.golden["chat"].as_array().unwrap() {
            let prompt = ChatPrompt {
                messages: case["messages"].as_array().unwrap().clone(),
                add_generation_prompt: case["add_generation_prompt"].as_bool(),
                ..ChatPrompt::default()
            };
            let got = model.encode_chat(&prompt).unwrap();
            let injected = case["messages"].to_string().contains("<|im");
            if injected {
                // The same text, but what the client typed is not control: exactly the template's own tokens are.
                assert_ne!(got, ids(&case["ids"]));
                let control = got.iter().filter(|&&id| id >= 507).count();
                let generation = usize::from(case["add_generation_prompt"].as_bool().unwrap());
                assert_eq!(control, 2 + generation, "{got:?}");
                let plain = fixture
                    .tokenizer
                    .encode(&format!("user\n{}", case["messages"][0]["content"].as_str().unwrap()), false, SpecialText::Plain)
                    .unwrap();
                assert_eq!(&got[1..=plain.len()], plain);
            } else {
                assert_eq!(got, ids(&case["ids"]));
            }
            assert_eq!(fixture.tokenizer.decode(&got, false).unwrap(), case["text"].as_str().unwrap());
        }
    }
}

#[test]
fn one_of_two_bos_is_dropped_in_chat_and_one_is_added_to_text() {
    let fixture = &byte_level()[0];
    let card = ModelCard { add_bos: true, bos_id: Some(507), ..ModelCard::default() };
    let template = b"{{ bos_token }}{{ bos_token }}{{ messages[0].content }}";
    let model = ModelText::new(&card, fixture.tokenizer.clone(), Some(template));
    let prompt = ChatPrompt { messages: vec![json!({"role": "user", "content": "A"})], ..ChatPrompt::default() };
    assert_eq!(model.encode_chat(&prompt).unwrap(), [507, 32]);
    assert_eq!(model.encode("A", true).unwrap(), [507, 32]);
    assert_eq!(model.encode("A", false).unwrap(), [32]);
}

#[test]
fn a_model_without_a_template_says_so() {
    let fixture = &byte_level()[0];
    let model = ModelText::new(&ModelCard::default(), fixture.tokenizer.clone(), None);
    assert_eq!(model.encode_chat(&ChatPrompt::default()).unwrap_err().status(), 400);
}

/// Patterns with look-ahead fail silently on long runs: the answer must be right or a refusal, and soon.
#[test]
fn a_megabyte_of_one_character_is_refused_within_a_second() {
    for fixture in byte_level() {
        for one in [" ", "a", "A", "1", "\n", "!", "é", "\u{301}", "語"] {
            let before = Instant::now();
            let text = one.repeat(1 << 20);
            let error = fixture.tokenizer.encode(&text, false, SpecialText::Plain).unwrap_err();
            assert_eq!(error.status(), 400);
            assert!(before.elapsed() < Duration::from_secs(1), "{one:?} {:?}", before.elapsed());
        }
    }
}

/// What is not refused must be right: a run of the longest length decodes to itself, and the words around it are
/// tokenized as they are alone.
#[test]
fn the_longest_runs_are_tokenized_right_and_soon() {
    for fixture in byte_level() {
        for one in [" ", "a", "A", "1", "\n", "!", "é", "語"] {
            let run = one.repeat(runs::LONGEST_RUN - 10);
            let before = Instant::now();
            let got = fixture.tokenizer.encode(&format!("x{run}.\nIt's 12 o'clock, café"), false, SpecialText::Plain).unwrap();
            let elapsed = before.elapsed();
            assert!(elapsed < Duration::from_secs(4), "{} {one:?} {elapsed:?}", fixture.name);
            eprintln!("{} {one:?}: {} ids in {elapsed:?}", fixture.name, got.len());
            let short =
                fixture.tokenizer.encode(&format!("x{}.\nIt's 12 o'clock, café", one.repeat(10)), false, SpecialText::Plain).unwrap();
            let tail = short.len().min(12);
            assert_eq!(got[got.len() - tail..], short[short.len() - tail..], "{} {one:?}", fixture.name);
            assert!(fixture.tokenizer.decode(&got, false).unwrap().contains(&run));
        }
    }
}

/// gpt-oss: what frames its messages is shown although it is control, or thoughts could not be told from answers.
#[test]
fn frames_of_messages_are_shown() {
    let mut json: Value = serde_json::from_slice(include_bytes!("../../testdata/tokenizers/main/tokenizer.json")).unwrap();
    for (id, text) in [(512, "<|start|>"), (513, "<|channel|>"), (514, "<|message|>")] {
        let token = json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true});
        json["added_tokens"].as_array_mut().unwrap().push(token);
    }
    let tokenizer = Arc::new(Tokenizer::from_json(json.to_string().as_bytes()).unwrap());
    let ids = tokenizer.encode("<|channel|>a<|message|>b<|im_end|>", false, SpecialText::Control).unwrap();
    let (pieces, flush) = deltas(&tokenizer, &ids, true);
    assert_eq!(pieces.concat() + &flush, "<|channel|>a<|message|>b");
    assert!(!tokenizer.encode("<|channel|>", false, SpecialText::Plain).unwrap().contains(&513));
}

#[test]
fn bounds_by_bytes_hold_for_every_string() {
    // WordPiece drops white space, of which there can then be any amount; no generating model has it.
    for fixture in all().into_iter().filter(|fixture| fixture.name != "wordpiece") {
        for case in fixture.golden["strings"].as_array().unwrap() {
            let count = ids(&case["ids"]).len() as u32;
            let text = case["text"].as_str().unwrap();
            assert!(text.len() <= fixture.tokenizer.max_bytes(count) + 1, "{} {text:?}", fixture.name);
        }
    }
}

/// With the environment variable QUIRE_TOKENIZER (a real model's tokenizer.json) and QUIRE_GOLDEN (its golden record).
#[test]
fn a_real_models_golden_ids() {
    let (Ok(tokenizer), Ok(golden)) = (std::env::var("QUIRE_TOKENIZER"), std::env::var("QUIRE_GOLDEN")) else {
        eprintln!("skipped: QUIRE_TOKENIZER and QUIRE_GOLDEN are not set");
        return;
    };
    let tokenizer = Arc::new(Tokenizer::from_json(&std::fs::read(tokenizer).unwrap()).unwrap());
    let template = include_bytes!("../../testdata/smollm2.jinja");
    let model = ModelText::new(&ModelCard { bos_id: Some(1), eos_ids: vec![2], ..ModelCard::default() }, tokenizer.clone(), Some(template));
    let golden: Value = serde_json::from_slice(&std::fs::read(golden).unwrap()).unwrap();
    for case in golden["cases"].as_array().unwrap() {
        let got = match case["messages"].as_array() {
            Some(messages) => model.encode_chat(&ChatPrompt { messages: messages.clone(), ..ChatPrompt::default() }).unwrap(),
            None => model.encode(case["prompt"].as_str().unwrap(), true).unwrap(),
        };
        assert_eq!(got, ids(&case["ids"]), "{}", case["prompt"]);
        let greedy: Vec<u32> = case["greedy"].as_array().unwrap().iter().map(|step| step[0].as_u64().unwrap() as u32).collect();
        let (pieces, flush) = deltas(&tokenizer, &greedy, false);
        assert_eq!(pieces.concat() + &flush, case["text"].as_str().unwrap());
    }
    for one in [" ", "a", "1", "\n", "é"] {
        let before = Instant::now();
        let ids = tokenizer.encode(&one.repeat(runs::LONGEST_RUN), false, SpecialText::Plain).unwrap();
        assert_eq!(tokenizer.decode(&ids, false).unwrap(), one.repeat(runs::LONGEST_RUN));
        eprintln!("{one:?} x {}: {} ids in {:?}", runs::LONGEST_RUN, ids.len(), before.elapsed());
    }
}
