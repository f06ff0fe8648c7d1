//! Tokenizers out of GGUF metadata, against the ids that other implementations give.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // tests

mod gguf_writer;

use std::path::PathBuf;

use gguf_writer::{Value, Writer};
use quire_engine::model::{
    gguf::{Gguf, GgufFile},
    tokenizer::{Tokenizer, pre_tokenizers},
};
use serde_json::Value as Json;

fn testdata(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("testdata").join(name)
}

fn json(name: &str) -> Json {
    serde_json::from_slice(&std::fs::read(testdata(name)).unwrap()).unwrap()
}

fn ids(value: &Json) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn convert(writer: &Writer) -> Result<Tokenizer, String> {
    let bytes = writer.bytes();
    let gguf = Gguf::parse(&bytes).map_err(|error| error.to_string())?;
    Tokenizer::from_gguf(&gguf.metadata).map_err(|error| error.to_string())
}

fn open(tokenizer: &Tokenizer) -> tokenizers::Tokenizer {
    tokenizers::Tokenizer::from_bytes(&tokenizer.json).unwrap()
}

fn encode(tokenizer: &tokenizers::Tokenizer, text: &str, special: bool) -> Vec<u32> {
    tokenizer.encode(text, special).unwrap().get_ids().to_vec()
}

/// All strings of a golden file, with what is known of each.
fn check_strings(tokenizer: &tokenizers::Tokenizer, golden: &Json) {
    let mut plain = tokenizer.clone();
    plain.set_encode_special_tokens(true);
    let strings = golden["strings"].as_array().unwrap();
    assert!(strings.len() > 30);
    for case in strings {
        let text = case["text"].as_str().unwrap();
        assert_eq!(encode(tokenizer, text, false), ids(&case["ids"]), "{text:?}");
        assert_eq!(encode(tokenizer, text, true), ids(&case["ids_with_special_tokens_added"]), "{text:?} with special tokens");
        if case.get("ids_specials_as_text").is_some() {
            assert_eq!(encode(&plain, text, false), ids(&case["ids_specials_as_text"]), "{text:?} as text");
            assert_eq!(tokenizer.decode(&ids(&case["ids"]), false).unwrap(), case["decoded"].as_str().unwrap());
        }
        let with_special = ids(&case["ids_with_special_tokens_added"]);
        assert_eq!(tokenizer.decode(&with_special, true).unwrap(), case["decoded_skip_special"].as_str().unwrap());
    }
}

#[test]
fn byte_level_agrees_with_the_original() {
    let file = GgufFile::open(&testdata("models/llama-F32.gguf")).unwrap();
    let tokenizer = Tokenizer::from_gguf(&file.parse().unwrap().metadata).unwrap();
    assert_eq!((tokenizer.tokens, tokenizer.bos_id, tokenizer.add_bos), (512, Some(507), false));
    assert_eq!(tokenizer.eos_ids, [510]);
    assert!(tokenizer.chat_template.as_deref().unwrap().contains("<|im_start|>"));
    let golden = json("tokenizers/main/golden.json");
    let opened = open(&tokenizer);
    check_strings(&opened, &golden);
    for chat in golden["chat"].as_array().unwrap() {
        assert_eq!(encode(&opened, chat["text"].as_str().unwrap(), false), ids(&chat["ids"]));
    }
    for sequence in golden["id_sequences"].as_array().unwrap() {
        assert_eq!(opened.decode(&ids(&sequence["ids"]), false).unwrap(), sequence["decoded"].as_str().unwrap());
    }
}

/// A `tokenizer.json` as a converter would put it into GGUF.
fn to_gguf(tokenizer: &Json) -> (Vec<String>, Vec<i32>, Vec<String>) {
    let vocabulary = tokenizer["model"]["vocab"].as_object().unwrap();
    let added = tokenizer["added_tokens"].as_array().unwrap();
    let size = vocabulary.values().chain(added.iter().map(|token| &token["id"])).map(|id| id.as_u64().unwrap()).max().unwrap() + 1;
    let mut tokens = vec![String::new(); size as usize];
    let mut types = vec![1; size as usize];
    for (text, id) in vocabulary {
        let id = id.as_u64().unwrap() as usize;
        tokens[id] = text.clone();
        if text.len() == 6 && text.starts_with("<0x") {
            types[id] = 6;
        }
    }
    for token in added {
        let id = token["id"].as_u64().unwrap() as usize;
        tokens[id] = token["content"].as_str().unwrap().to_owned();
        types[id] = 3;
    }
    let pair = |merge: &Json| format!("{} {}", merge[0].as_str().unwrap(), merge[1].as_str().unwrap());
    let merges = tokenizer["model"]["merges"].as_array().unwrap().iter().map(pair).collect();
    (tokens, types, merges)
}

#[test]
fn llama3_rule_adds_bos_and_takes_whole_tokens() {
    let (tokens, types, merges) = to_gguf(&json("tokenizers/llama3/tokenizer.json"));
    let writer = Writer::default()
        .key("tokenizer.ggml.model", Value::string("gpt2"))
        .key("tokenizer.ggml.pre", Value::string("llama-bpe"))
        .key("tokenizer.ggml.tokens", Value::strings(&tokens))
        .key("tokenizer.ggml.token_type", Value::ints(&types))
        .key("tokenizer.ggml.merges", Value::strings(&merges))
        .key("tokenizer.ggml.bos_token_id", Value::u32(507))
        .key("tokenizer.ggml.eos_token_id", Value::u32(508));
    let tokenizer = convert(&writer).unwrap();
    assert!(tokenizer.add_bos);
    // The named one, and <|im_end|> by its text.
    assert_eq!(tokenizer.eos_ids, [508, 510]);
    check_strings(&open(&tokenizer), &json("tokenizers/llama3/golden.json"));
    let not = convert(&writer.key("tokenizer.ggml.add_bos_token", Value::bool(false))).unwrap();
    assert!(!not.add_bos);
    assert_eq!(encode(&open(&not), " ", true), [220]);
}

#[test]
fn sentencepiece_scores_become_merges() {
    let source = json("tokenizers/spm-bpe/tokenizer.json");
    let (tokens, mut types, merges) = to_gguf(&source);
    types[0] = 2;
    // As training leaves them: a piece's score is the rank at which it was made, single characters come last.
    let mut scores = vec![0.0; tokens.len()];
    for (rank, merge) in merges.iter().enumerate() {
        let made = merge.replacen(' ', "", 1);
        let id = tokens.iter().position(|token| *token == made).unwrap();
        if scores[id] == 0.0 {
            scores[id] = -(rank as f32) - 1.0;
        }
    }
    for (id, token) in tokens.iter().enumerate().filter(|(_, token)| token.chars().count() == 1) {
        assert_eq!(scores[id], 0.0, "{token}");
        scores[id] = -(10_000.0 + id as f32);
    }
    let writer = Writer::default()
        .key("tokenizer.ggml.model", Value::string("llama"))
        .key("tokenizer.ggml.tokens", Value::strings(&tokens))
        .key("tokenizer.ggml.token_type", Value::ints(&types))
        .key("tokenizer.ggml.scores", Value::floats(&scores))
        .key("tokenizer.ggml.padding_token_id", Value::u32(u32::MAX));
    let tokenizer = convert(&writer).unwrap();
    assert_eq!((tokenizer.bos_id, tokenizer.add_bos, tokenizer.eos_ids.clone()), (Some(1), true, vec![2]));
    check_strings(&open(&tokenizer), &json("tokenizers/spm-bpe/golden.json"));
    let bare = convert(&writer.key("tokenizer.ggml.add_space_prefix", Value::bool(false))).unwrap();
    let bare = open(&bare);
    let hello = encode(&bare, "Hello, world!", false);
    assert_eq!(hello.first(), Some(&297), "no space is put before the text");
    assert_eq!(bare.decode(&hello, true).unwrap(), "Hello, world!");
}

fn minimal(model: &str) -> Writer {
    let tokens = ["<unk>", "<s>", "</s>", "a", "b", "ab", "<|end|>", "", "a", "<tool>"];
    Writer::default()
        .key("tokenizer.ggml.model", Value::string(model))
        .key("tokenizer.ggml.tokens", Value::strings(&tokens))
        .key("tokenizer.ggml.token_type", Value::ints(&[2, 3, 1, 1, 1, 1, 1, 1, 1, 4]))
        .key("tokenizer.ggml.merges", Value::strings(&["a b", "b nope"]))
        .key("tokenizer.ggml.scores", Value::floats(&[0.0; 10]))
}

#[test]
fn every_rule_compiles_and_unknown_ones_are_named() {
    let names = pre_tokenizers();
    for needed in
        ["smollm", "default", "gpt-2", "llama-bpe", "qwen2", "deepseek-llm", "deepseek-coder", "starcoder", "falcon", "tekken", "gpt-4o"]
    {
        assert!(names.contains(&needed), "{needed}");
    }
    for name in names {
        let tokenizer = open(&convert(&minimal("gpt2").key("tokenizer.ggml.pre", Value::string(name))).unwrap());
        assert_eq!(encode(&tokenizer, "ab<tool>", false), [5, 9], "{name}");
        // Every text passes through the patterns, whatever they make of it.
        for text in ["I'LL go 12345 日本語 don't  x\n\n  \r\n\ty", "ça VA naïve ŵ Ω K ⅓", "a\u{301} 🙂🙂 ..!?"] {
            encode(&tokenizer, text, false);
        }
    }
    let unknown = convert(&minimal("gpt2").key("tokenizer.ggml.pre", Value::string("martian"))).unwrap_err();
    assert!(unknown.contains("`tokenizer.ggml.pre`: is `martian`") && unknown.contains("smollm"), "{unknown}");
    let missing = convert(&minimal("gpt2")).unwrap_err();
    assert!(missing.contains("`tokenizer.ggml.pre`: is missing"), "{missing}");
    let other = convert(&minimal("t5")).unwrap_err();
    assert!(other.contains("is `t5`, which is not supported; supported: gpt2, llama"), "{other}");
    assert!(convert(&Writer::default()).unwrap_err().contains("holds no tokenizer"));
}

/// Splits as the tokenizers' own documentation shows them: digits, contractions, spaces, line ends.
#[test]
fn rules_split_text_where_they_should() {
    let pieces = |name: &str, text: &str| {
        use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};
        let tokenizer = open(&convert(&minimal("gpt2").key("tokenizer.ggml.pre", Value::string(name))).unwrap());
        let mut split = PreTokenizedString::from(text);
        tokenizer.get_pre_tokenizer().unwrap().pre_tokenize(&mut split).unwrap();
        let parts = split.get_splits(OffsetReferential::Original, OffsetType::Byte);
        parts.iter().map(|(_, (from, to), _)| text[*from..*to].to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(pieces("smollm", "I'm 123  x\n"), ["I", "'m", " ", "1", "2", "3", " ", " x", "\n"]);
    assert_eq!(pieces("gpt-2", "I'M 123!"), ["I", "'", "M", " 123", "!"]);
    assert_eq!(pieces("qwen2", "I'M 123\n\nx"), ["I", "'M", " ", "1", "2", "3", "\n\n", "x"]);
    assert_eq!(pieces("llama-bpe", "1234567 (ab)"), ["123", "456", "7", " (", "ab", ")"]);
    assert_eq!(pieces("tekken", "camelCase 12/"), ["camel", "Case", " ", "1", "2", "/"]);
    assert_eq!(pieces("gpt-4o", "DON'Ts 1234"), ["DON'T", "s", " ", "123", "4"]);
    assert_eq!(pieces("falcon", "12345, a"), ["123", "45", ",", " a"]);
    assert_eq!(pieces("deepseek-llm", "ab 漢字 12\nx."), ["ab", " ", "漢字", " ", "12", "\n", "x", "."]);
    assert_eq!(pieces("deepseek-coder", "ab 漢 12\n"), ["ab", " ", "漢", " ", "1", "2", "\n"]);
    assert_eq!(pieces("deepseek-v3", "1234 ab 漢字x"), ["123", "4", " ab", " ", "漢字", "x"]);
}

#[test]
fn odd_vocabularies_keep_their_ids() {
    let tokenizer = convert(&minimal("gpt2").key("tokenizer.ggml.pre", Value::string("gpt-2"))).unwrap();
    let opened = open(&tokenizer);
    // The empty token and the second `a` have ids of their own, which no text encodes to.
    assert_eq!(opened.get_vocab_size(true), 10);
    assert_eq!(encode(&opened, "aab", false), [3, 5]);
    assert_eq!(opened.id_to_token(8).unwrap(), "[DUPLICATE_8]a");
    // </s> and <|end|> end generation although the file has them as plain text; then they are control tokens too.
    assert_eq!(tokenizer.eos_ids, [2, 6]);
    let mut plain = opened.clone();
    plain.set_encode_special_tokens(true);
    assert_eq!(encode(&opened, "a</s>", false), [3, 2]);
    assert!(!encode(&plain, "a</s>", false).contains(&2));
    // A user-defined token is matched in any text.
    assert_eq!(encode(&plain, "<tool>", false), [9]);
}

#[test]
fn end_of_a_message_part_is_not_the_end() {
    let tokens = ["<|return|>", "<|call|>", "<|end|>", "<|channel|>", "x"];
    let writer = Writer::default()
        .key("tokenizer.ggml.model", Value::string("gpt2"))
        .key("tokenizer.ggml.pre", Value::string("gpt-4o"))
        .key("tokenizer.ggml.tokens", Value::strings(&tokens))
        .key("tokenizer.ggml.token_type", Value::ints(&[3, 3, 3, 3, 1]))
        .key("tokenizer.ggml.merges", Value::strings::<&str>(&[]))
        .key("tokenizer.ggml.eos_token_id", Value::u32(0));
    let tokenizer = convert(&writer).unwrap();
    assert_eq!(tokenizer.eos_ids, [0, 1]);
    assert_eq!(open(&tokenizer).decode(&[3, 4], true).unwrap(), "<|channel|>x");
}

/// The story model of the llama.cpp tests: garbage special ids, no add_bos key.
#[test]
fn stories_model_gets_bos_by_default() {
    let Ok(path) = std::env::var("QUIRE_STORIES") else {
        println!("skipped: QUIRE_STORIES does not name stories260K.gguf");
        return;
    };
    let file = GgufFile::open(path.as_ref()).unwrap();
    let tokenizer = Tokenizer::from_gguf(&file.parse().unwrap().metadata).unwrap();
    assert_eq!((tokenizer.bos_id, tokenizer.add_bos, tokenizer.eos_ids.clone()), (Some(1), true, vec![2]));
    let opened = open(&tokenizer);
    // As llama.cpp's own test has it.
    assert_eq!(encode(&opened, "Once upon a time", true), [1, 403, 407, 261, 378]);
    assert_eq!(opened.decode(&encode(&opened, "Zoë naps.", true), true).unwrap(), "Zoë naps.");
}
