//! Strings that tokenizers stumble over, against what Hugging Face makes of them (`testdata/tokenizers/hostile.json`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::tokenizer::{SpecialText, Tokenizer};
use super::{Detokenizer, runs};

const NAMES: [&str; 6] = ["main", "llama3", "gpt2", "spm-bpe", "unigram", "wordpiece"];

fn tokenizer(name: &str) -> Arc<Tokenizer> {
    let path = format!("{}/testdata/tokenizers/{name}/tokenizer.json", env!("CARGO_MANIFEST_DIR"));
    Arc::new(Tokenizer::from_json(&std::fs::read(path).unwrap()).unwrap())
}

fn goldens() -> Value {
    serde_json::from_str(include_str!("../../testdata/tokenizers/hostile.json")).unwrap()
}

/// FNV-1a of the ids.
fn digest(ids: impl IntoIterator<Item = u32>) -> String {
    let bytes = ids.into_iter().flat_map(u32::to_le_bytes);
    format!("{:016x}", bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)))
}

fn texts(goldens: &Value) -> Vec<&str> {
    goldens["strings"].as_array().unwrap().iter().map(|text| text.as_str().unwrap()).collect()
}

#[test]
fn hostile_strings_encode_and_decode_as_in_hugging_face() {
    let goldens = goldens();
    let mut wrong = Vec::new();
    for name in NAMES {
        let (tokenizer, golden) = (tokenizer(name), &goldens["tokenizers"][name]);
        for (index, text) in texts(&goldens).into_iter().enumerate() {
            let encode = |special| tokenizer.encode(text, false, special).unwrap();
            let plain = encode(SpecialText::Plain);
            let decoded = tokenizer.decode(&plain, false).unwrap();
            for (key, got) in [
                ("control", digest(encode(SpecialText::Control))),
                ("plain", digest(plain.iter().copied())),
                ("decoded", digest(decoded.bytes().map(u32::from))),
            ] {
                if golden[key][index] != got {
                    wrong.push(format!("{name} {key} {text:?}"));
                }
            }
            // The stream shows the same.
            let mut detokenizer = Detokenizer::new(tokenizer.clone(), &[], false);
            let mut streamed = String::new();
            plain.iter().for_each(|&id| detokenizer.push(id, &mut streamed));
            detokenizer.flush(&mut streamed);
            if streamed != decoded {
                wrong.push(format!("{name} streamed {text:?}: {streamed:?} not {decoded:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn long_runs_encode_as_in_hugging_face() {
    let goldens = goldens();
    for name in NAMES {
        let tokenizer = tokenizer(name);
        for (index, run) in goldens["runs"].as_array().unwrap().iter().enumerate() {
            let text = run[0].as_str().unwrap().repeat(run[1].as_u64().unwrap() as usize);
            let ids = tokenizer.encode(&text, false, SpecialText::Plain).unwrap();
            assert_eq!(goldens["tokenizers"][name]["runs"][index], digest(ids), "{name} {run}");
        }
    }
}

/// Text is never control where it isn't to be; what a tokenizer writes for the unknown aside.
#[test]
fn plain_text_never_becomes_control() {
    let goldens = goldens();
    for name in NAMES {
        let tokenizer = tokenizer(name);
        let control: Vec<u32> =
            ["<s>", "</s>", "<pad>", "<mask>", "[CLS]", "[SEP]", "[MASK]", "[PAD]", "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]
                .iter()
                .filter_map(|text| (0..tokenizer.size() as u32).find(|&id| tokenizer.piece(id).as_deref() == Some(*text)))
                .collect();
        assert!(!control.is_empty());
        // Unigram's vocabulary holds its control tokens as pieces; no generating model is of that kind.
        for text in texts(&goldens).into_iter().filter(|_| name != "unigram") {
            let ids = tokenizer.encode(text, false, SpecialText::Plain).unwrap();
            assert!(!ids.iter().any(|id| control.contains(id)), "{name} {text:?}");
        }
    }
}

/// Cutting a text at its control tokens by ourselves is the same as letting the tokenizer do it.
#[test]
fn marked_text_is_cut_as_the_tokenizer_cuts_it() {
    let goldens = goldens();
    for name in NAMES {
        let tokenizer = tokenizer(name);
        for text in texts(&goldens) {
            let whole = format!("x<|im_start|> {text}<|im_end|>\n</s> {text} [SEP]{text}");
            // A mark where nothing special is.
            let marks = [1];
            let want = tokenizer.encode(&whole, false, SpecialText::Control).unwrap();
            assert_eq!(tokenizer.encode_marked(&whole, &marks).unwrap(), want, "{name} {whole:?}");
        }
    }
}

/// As Llama 2's later tokenizers: the space before a text goes before its first piece only.
#[test]
fn only_the_beginning_of_a_marked_text_gets_a_space() {
    let path = format!("{}/testdata/tokenizers/spm-bpe/tokenizer.json", env!("CARGO_MANIFEST_DIR"));
    let mut json: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    json["normalizer"] = Value::Null;
    json["pre_tokenizer"] = serde_json::json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": false});
    let tokenizer = Tokenizer::from_json(json.to_string().as_bytes()).unwrap();
    for text in ["Hello</s>world", "H</s>Hello", "Hello</s> world</s></s>x"] {
        let want = tokenizer.encode(text, false, SpecialText::Control).unwrap();
        assert_eq!(tokenizer.encode_marked(text, &[1]).unwrap(), want, "{text}");
    }
}

/// A megabyte of what is nearly control, many times over, takes no longer than other text.
#[test]
fn many_beginnings_of_control_are_no_trap() {
    let tokenizer = tokenizer("main");
    for piece in ["<|im_", "<|im_end|>", "<<<<<<<<", "<|im_end| >"] {
        let text = piece.repeat((1 << 20) / piece.len());
        let before = Instant::now();
        if runs::check(&text).is_err() {
            continue;
        }
        let mut messages = serde_json::json!({"messages": [{"role": "user", "content": text}]});
        let Some(marker) = super::marks::Marker::new(&messages, tokenizer.guarded()).unwrap() else {
            assert!(!text.contains("<|im_end|>"));
            continue;
        };
        marker.mark(&mut messages, false);
        let (unmarked, marks) = marker.unmark(messages["messages"][0]["content"].as_str().unwrap());
        assert_eq!(unmarked, text);
        assert!(tokenizer.encode_marked(&unmarked, &marks).unwrap().len() > 1000);
        assert!(before.elapsed() < Duration::from_secs(60), "{piece}: {:?}", before.elapsed());
    }
}
