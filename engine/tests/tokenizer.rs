//! Tokenizers out of GGUF metadata, against the ids that other implementations give.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // tests

mod gguf_writer;
mod tokenizer_support;

use std::path::PathBuf;

use gguf_writer::{Value, Writer};
use quire_engine::model::{
    gguf::GgufFile,
    tokenizer::{Tokenizer, pre_tokenizers},
};
use serde_json::Value as Json;
use tokenizer_support::{check_strings, check_strings_that, convert, encode, ids, json, open, to_gguf};

fn testdata(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("testdata").join(name)
}

#[test]
fn byte_level_agrees_with_the_original() {
    let file = GgufFile::open(&testdata("models/llama-F32.gguf")).unwrap();
    let tokenizer = Tokenizer::from_gguf(&file.parse().unwrap().metadata).unwrap();
    assert_eq!((tokenizer.tokens, tokenizer.bos_id, tokenizer.add_bos), (512, Some(507), false));
    assert_eq!(tokenizer.eos_ids, [510]);
    assert!(tokenizer.chat_template.as_deref().unwrap().contains("<|im_start|>"));
    let golden = json("main/golden.json");
    let opened = open(&tokenizer);
    check_strings(&opened, &golden);
    for chat in golden["chat"].as_array().unwrap() {
        assert_eq!(encode(&opened, chat["text"].as_str().unwrap(), false), ids(&chat["ids"]));
    }
    for sequence in golden["id_sequences"].as_array().unwrap() {
        assert_eq!(opened.decode(&ids(&sequence["ids"]), false).unwrap(), sequence["decoded"].as_str().unwrap());
    }
}

#[test]
fn llama3_rule_adds_bos_and_takes_whole_tokens() {
    let (tokens, types, merges) = to_gguf(&json("llama3/tokenizer.json"));
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
    check_strings(&open(&tokenizer), &json("llama3/golden.json"));
    let not = convert(&writer.key("tokenizer.ggml.add_bos_token", Value::bool(false))).unwrap();
    assert!(!not.add_bos);
    assert_eq!(encode(&open(&not), " ", true), [220]);
}

#[test]
fn sentencepiece_scores_become_merges() {
    let source = json("spm-bpe/tokenizer.json");
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
    check_strings(&open(&tokenizer), &json("spm-bpe/golden.json"));
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
        // Nor does any length of one make them slow.
        let began = std::time::Instant::now();
        for one in ["a", "1", " ", "a ", "語", "!", "\n", "'s"] {
            encode(&tokenizer, &one.repeat(10_000), false);
        }
        assert!(began.elapsed().as_secs() < 10, "{name}: {:?}", began.elapsed());
    }
    let unknown = convert(&minimal("gpt2").key("tokenizer.ggml.pre", Value::string("martian"))).unwrap_err();
    assert!(unknown.contains("`tokenizer.ggml.pre`: is `martian`") && unknown.contains("smollm"), "{unknown}");
    let missing = convert(&minimal("gpt2")).unwrap_err();
    assert!(missing.contains("`tokenizer.ggml.pre`: is missing"), "{missing}");
    let other = convert(&minimal("rwkv")).unwrap_err();
    assert!(other.contains("is `rwkv`, which is not supported; supported: gpt2, llama, bert, t5, gemma4"), "{other}");
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
    assert_eq!(pieces("spark2_5", "a\n\nb 1"), ["a", "\n", "\n", "b", " ", "1"]);
    assert_eq!(pieces("kimi-k2", "漢字kana DON'T 1234"), ["漢字", "kana", " DON'T", " ", "123", "4"]);
    assert_eq!(pieces("youtu", "한글 ok12"), ["한글", " ok", "1", "2"]);
    assert_eq!(pieces("minicpm5", "x 1234567"), ["x", " ", "123", "456", "7"]);
    assert_eq!(pieces("laguna", "a\n\n b1"), ["a", "\n\n", " b", "1"]);
    assert_eq!(pieces("bailingmoe", "I'LL\n\n12"), ["I", "'LL", "\n\n", "1", "2"]);
    assert_eq!(pieces("exaone-moe", "two words 12"), ["two words", " ", "1", "2"]);
    assert_eq!(pieces("ufakzeka", "Ankara'nın 12"), ["Ankara", "'nın", " ", "1", "2"]);
    assert_eq!(pieces("jais-2", "a     b"), ["a", "    ", " b"]);
    assert_eq!(pieces("seed-coder", "a!\n\nb"), ["a", "!", "\n\n", "b"]);
    assert_eq!(pieces("chameleon", "IMGIMGABZ x  1,"), ["IMGIMGABZ", " x", "  ", "1", ","]);
    // Groups of three count from the right, but in words.
    assert_eq!(pieces("tiny_aya", "1234567 12 1234ab x1234"), ["1", "234", "567", " ", "12", " ", "123", "4", "ab", " x", "1", "234"]);
    assert_eq!(pieces("superbpe", "by 1234567 or 123"), ["by ", "1", "234", "567", " or ", "123"]);
    assert_eq!(pieces("afmoe", "x1234 漢字"), ["x", "1", "234", " ", "漢字"]);
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
    // Text that frames a message steers the model, even where a file says that it is plain.
    let writer = writer.set("tokenizer.ggml.token_type", Value::ints(&[3, 3, 3, 4, 1]));
    let mut plain = open(&convert(&writer).unwrap());
    plain.set_encode_special_tokens(true);
    assert!(!encode(&plain, "<|channel|>", false).contains(&3));
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

/// As a converter writes WordPiece: `▁` before what begins a word, no marks before what goes on.
#[test]
fn word_pieces_are_found_as_in_the_original() {
    let (tokens, types, _) = to_gguf(&json("wordpiece/tokenizer.json"));
    let phantom = |(text, token_type): (&String, &i32)| match text.strip_prefix("##") {
        _ if *token_type != 1 => text.clone(),
        Some(rest) => rest.to_owned(),
        None => format!("▁{text}"),
    };
    let tokens: Vec<String> = tokens.iter().zip(&types).map(phantom).collect();
    let writer = Writer::default()
        .key("tokenizer.ggml.model", Value::string("bert"))
        .key("tokenizer.ggml.tokens", Value::strings(&tokens))
        .key("tokenizer.ggml.token_type", Value::ints(&types))
        .key("tokenizer.ggml.bos_token_id", Value::u32(2))
        .key("tokenizer.ggml.unknown_token_id", Value::u32(1))
        .key("tokenizer.ggml.seperator_token_id", Value::u32(3));
    let golden = json("wordpiece/golden.json");
    check_strings(&open(&convert(&writer).unwrap()), &golden);
    let cased = open(&convert(&writer.key("tokenizer.ggml.normalizer.lowercase", Value::bool(false))).unwrap());
    assert_ne!(encode(&cased, "HELLO", false), encode(&cased, "hello", false));
}

#[test]
fn the_likeliest_pieces_are_found_as_in_the_original() {
    let source = json("unigram/tokenizer.json");
    let rows = source["model"]["vocab"].as_array().unwrap();
    let mut tokens: Vec<&str> = rows.iter().map(|row| row[0].as_str().unwrap()).collect();
    let mut scores: Vec<f32> = rows.iter().map(|row| row[1].as_f64().unwrap() as f32).collect();
    tokens.push("<mask>");
    scores.push(0.0);
    let mut types = vec![1; tokens.len()];
    for token in source["added_tokens"].as_array().unwrap() {
        types[token["id"].as_u64().unwrap() as usize] = if token["content"] == "<unk>" { 2 } else { 3 };
    }
    let writer = Writer::default()
        .key("tokenizer.ggml.model", Value::string("t5"))
        .key("tokenizer.ggml.tokens", Value::strings(&tokens))
        .key("tokenizer.ggml.scores", Value::floats(&scores))
        .key("tokenizer.ggml.token_type", Value::ints(&types))
        .key("tokenizer.ggml.bos_token_id", Value::u32(0))
        .key("tokenizer.ggml.eos_token_id", Value::u32(2))
        .key("tokenizer.ggml.unknown_token_id", Value::u32(3))
        .key("tokenizer.ggml.add_bos_token", Value::bool(true))
        .key("tokenizer.ggml.add_space_prefix", Value::bool(true));
    // Its normaliser is not a table; where it changes nothing, all is the same.
    let unchanged = |text: &str| text.is_ascii() && !text.contains("  ");
    let tokenizer = open(&convert(&writer).unwrap());
    check_strings_that(&tokenizer, &json("unigram/golden.json"), unchanged);
    let mut plain = tokenizer.clone();
    plain.set_encode_special_tokens(true);
    assert!(!encode(&plain, "a</s>b", false).contains(&2), "text is never control");
    // Spaces in excess go where the file says so.
    let removing = open(&convert(&writer.key("tokenizer.ggml.remove_extra_whitespaces", Value::bool(true))).unwrap());
    assert_eq!(encode(&removing, "a   b ", false), encode(&removing, "a b", false));
    assert_ne!(encode(&tokenizer, "a   b", false), encode(&tokenizer, "a b", false));
}

#[test]
fn damaged_tables_of_unigrams_are_refused() {
    let writer = |value| minimal("t5").key("tokenizer.ggml.precompiled_charsmap", value);
    let bytes = |bytes: &[u8]| Value::array(0, &bytes.iter().map(|byte| vec![*byte]).collect::<Vec<_>>());
    for value in [bytes(&[9, 0, 0, 0, 1, 2]), bytes(&[8, 0, 0, 0, 0, 255, 255, 255, 0, 0, 0, 0, 65, 0]), Value::string("x")] {
        let error = convert(&writer(value)).unwrap_err();
        assert!(error.contains("`tokenizer.ggml.precompiled_charsmap`"), "{error}");
    }
    let error = convert(&minimal("t5").set("tokenizer.ggml.scores", Value::floats(&[f32::NAN; 10]))).unwrap_err();
    assert!(error.contains("`tokenizer.ggml.scores`: has a value that is no number"), "{error}");
}

#[test]
fn raw_text_merges_fall_back_to_bytes() {
    let mut tokens =
        vec!["<bos>".to_owned(), "<unk>".to_owned(), "▁".to_owned(), "a".to_owned(), "▁a".to_owned(), "\n".to_owned(), "\n\n".to_owned()];
    tokens.extend((0..256).map(|byte| format!("<0x{byte:02X}>")));
    let mut types = vec![3, 2, 1, 1, 1, 1, 1];
    types.extend([6; 256]);
    let writer = Writer::default()
        .key("tokenizer.ggml.model", Value::string("gemma4"))
        .key("tokenizer.ggml.tokens", Value::strings(&tokens))
        .key("tokenizer.ggml.token_type", Value::ints(&types))
        .key("tokenizer.ggml.merges", Value::strings(&["▁ a", "\n \n"]))
        .key("tokenizer.ggml.bos_token_id", Value::u32(0))
        .key("tokenizer.ggml.unknown_token_id", Value::u32(1))
        // As in files of that model, which are wrong.
        .key("tokenizer.ggml.add_bos_token", Value::bool(false));
    let tokenizer = convert(&writer).unwrap();
    assert!(tokenizer.add_bos);
    let opened = open(&tokenizer);
    assert_eq!(encode(&opened, "a a\n\né", true), [0, 3, 4, 6, 7 + 0xC3, 7 + 0xA9]);
    assert_eq!(opened.decode(&[3, 4, 6, 7 + 0xC3, 7 + 0xA9], true).unwrap(), "a a\n\né");
}

/// Merges in the order of ids, as tiktoken has them.
#[test]
fn merges_may_be_left_out_where_ids_are_ranks() {
    let tokens = ["a", "b", "c", "bc", "ab", "abc"];
    let writer = Writer::default()
        .key("tokenizer.ggml.model", Value::string("gpt2"))
        .key("tokenizer.ggml.pre", Value::string("kimi-k2"))
        .key("tokenizer.ggml.tokens", Value::strings(&tokens));
    let opened = open(&convert(&writer).unwrap());
    assert_eq!(encode(&opened, "abc ab", false)[..1], [5]);
    assert_eq!(encode(&opened, "aab", false), [0, 4]);
}

#[test]
fn phi3s_control_tokens_take_the_space_behind_them() {
    let tokens = ["<unk>", "<s>", "</s>", "▁", "a", "<|user|>"];
    let writer = Writer::default()
        .key("tokenizer.ggml.model", Value::string("llama"))
        .key("tokenizer.ggml.tokens", Value::strings(&tokens))
        .key("tokenizer.ggml.token_type", Value::ints(&[2, 3, 3, 1, 1, 3]))
        .key("tokenizer.ggml.scores", Value::floats(&[0.0; 6]))
        .key("general.name", Value::string("Phi 3"));
    assert_eq!(encode(&open(&convert(&writer).unwrap()), "<|user|>\na", false), [5, 3, 0, 4]);
    let named = writer.set("general.name", Value::string("Phi-3-mini"));
    assert_eq!(encode(&open(&convert(&named).unwrap()), "<|user|>\na", false), [5, 3, 4]);
}

#[test]
fn several_templates_are_one_artefact() {
    let with = |extra: &[(&str, &str)]| {
        let writer = minimal("gpt2").key("tokenizer.ggml.pre", Value::string("gpt-2"));
        let writer = extra.iter().fold(writer, |writer, (key, source)| writer.key(key, Value::string(source)));
        convert(&writer).unwrap().chat_template
    };
    assert_eq!(with(&[]), None);
    assert_eq!(with(&[("tokenizer.chat_template", "A")]).as_deref(), Some("A"));
    let both = with(&[("tokenizer.chat_template", "A"), ("tokenizer.chat_template.tool_use", "B")]).unwrap();
    assert_eq!(serde_json::from_str::<Json>(&both).unwrap(), serde_json::json!({"default": "A", "tool_use": "B"}));
}
