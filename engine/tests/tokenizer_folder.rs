//! Tokenizers out of Hugging Face folders.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // tests

mod gguf_writer;
#[allow(dead_code)] // it serves another file too
mod tokenizer_support;

use std::path::{Path, PathBuf};

use quire_engine::model::tokenizer::Tokenizer;
use serde_json::{Value as Json, json as object};
use tokenizer_support::{check_strings, encode, fixtures, ids, json, open};

/// A folder of its own for each test, gone with it.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("quire-tokenizer-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    /// With the files of a fixture.
    fn of(name: &str, fixture: &str) -> Self {
        let folder = Self::new(name);
        for file in ["tokenizer.json", "tokenizer_config.json"] {
            let _ = std::fs::copy(fixtures().join(fixture).join(file), folder.0.join(file));
        }
        folder
    }

    fn with(self, file: &str, content: &Json) -> Self {
        self.with_text(file, &content.to_string())
    }

    fn with_text(self, file: &str, content: &str) -> Self {
        let path = self.0.join(file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
        self
    }

    fn read(&self) -> Result<Tokenizer, String> {
        Tokenizer::from_folder(&self.0).map_err(|error| error.to_string())
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn every_fixture_is_read_and_encodes_as_the_original() {
    for name in ["main", "llama3", "gpt2", "spm-bpe", "unigram", "wordpiece"] {
        let tokenizer = Tokenizer::from_folder(&fixtures().join(name)).unwrap();
        check_strings(&open(&tokenizer), &json(&format!("{name}/golden.json")));
        assert_eq!(tokenizer.tokens, open(&tokenizer).get_vocab_size(true), "{name}");
    }
}

#[test]
fn special_ids_come_from_all_the_files() {
    let folder = Folder::of("ids", "main").with("generation_config.json", &object!({"eos_token_id": [508, 510, 99_999]}));
    let tokenizer = folder.read().unwrap();
    assert_eq!((tokenizer.tokens, tokenizer.bos_id, tokenizer.add_bos), (512, Some(507), false));
    assert_eq!(tokenizer.eos_ids, [510, 508], "its own first; an id that is no token is left out");
    assert!(tokenizer.chat_template.unwrap().contains("<|im_start|>"));
    let folder = folder.with("generation_config.json", &object!({})).with("config.json", &object!({"eos_token_id": 509}));
    assert_eq!(folder.read().unwrap().eos_ids, [510, 509], "the tokenizer's own and the model's");
}

#[test]
fn the_configuration_says_what_stands_around_a_text() {
    let config = |bos: Json, eos: Json| {
        let mut config = json("main/tokenizer_config.json");
        (config["add_bos_token"], config["add_eos_token"]) = (bos, eos);
        Folder::of("around", "main").with("tokenizer_config.json", &config).read().unwrap()
    };
    let both = config(object!(true), object!(true));
    assert!(both.add_bos);
    assert_eq!(encode(&open(&both), "A", true), [507, 32, 510]);
    assert_eq!(encode(&open(&both), "A", false), [32]);
    let bos = config(object!(true), object!(false));
    assert_eq!((encode(&open(&bos), "A", true), bos.add_bos), (vec![507, 32], true));
    let none = config(object!(false), Json::Null);
    assert_eq!((encode(&open(&none), "A", true), none.add_bos), (vec![32], false));
    // What a tokenizer adds by itself goes if the configuration doesn't want it, and stays if it doesn't say.
    let mut llama = json("llama3/tokenizer_config.json");
    llama.as_object_mut().unwrap().remove("add_bos_token");
    let folder = Folder::of("around-llama", "llama3").with("tokenizer_config.json", &llama);
    assert!(folder.read().unwrap().add_bos);
    assert_eq!(encode(&open(&folder.read().unwrap()), " ", true).len(), 2);
    llama["add_bos_token"] = object!(false);
    let without = folder.with("tokenizer_config.json", &llama).read().unwrap();
    assert_eq!((encode(&open(&without), " ", true), without.add_bos), (vec![220], false));
}

#[test]
fn templates_are_found_wherever_they_are() {
    let named = object!({"eos_token": "<|im_end|>", "chat_template": [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]});
    let folder = Folder::of("templates", "main").with("tokenizer_config.json", &named);
    let template = |folder: &Folder| folder.read().unwrap().chat_template.unwrap();
    let both = object!({"default": "A", "tool_use": "B"});
    assert_eq!(serde_json::from_str::<Json>(&template(&folder)).unwrap(), both);
    let folder = folder.with("chat_template.json", &object!({"chat_template": "C"}));
    assert_eq!(template(&folder), "C");
    let folder = folder.with_text("chat_template.jinja", "D");
    assert_eq!(template(&folder), "D");
    let folder = folder.with_text("additional_chat_templates/tool_use.jinja", "E").with_text("additional_chat_templates/notes.txt", "x");
    assert_eq!(serde_json::from_str::<Json>(&template(&folder)).unwrap(), object!({"default": "D", "tool_use": "E"}));
    let error = folder.with_text("chat_template.jinja", &"x".repeat((1 << 20) + 1)).read().unwrap_err();
    assert!(error.contains("chat_template.jinja") && error.contains("at most"), "{error}");
}

#[test]
fn bad_files_are_named() {
    let error = Folder::new("none").read().unwrap_err();
    assert!(error.contains("holds no tokenizer.json"), "{error}");
    for (file, content, want) in [
        ("tokenizer.json", "{", "tokenizer.json: "),
        ("tokenizer.json", "{\"model\": {\"vocab\": 3}}", "tokens with ids"),
        ("tokenizer_config.json", "[1]", "tokenizer_config.json: is no JSON object"),
        ("generation_config.json", "nope", "generation_config.json: is not JSON"),
    ] {
        let error = Folder::of("bad", "main").with_text(file, content).read().unwrap_err();
        assert!(error.contains(want), "{error}");
    }
    let mut hostile = json("unigram/tokenizer.json");
    hostile["normalizer"] =
        object!({"type": "Sequence", "normalizers": [{"type": "Precompiled", "precompiled_charsmap": "CAAAAAD///8AAAAAQQA="}]});
    let error = Folder::new("charsmap").with("tokenizer.json", &hostile).read().unwrap_err();
    assert!(error.contains("`precompiled_charsmap` leads outside its table"), "{error}");
}

/// With QUIRE_FIXTURES: every folder of a tiny model, against the ids that its prompts have.
#[test]
fn all_model_fixtures_have_readable_tokenizers() {
    let Ok(root) = std::env::var("QUIRE_FIXTURES") else {
        println!("skipped: QUIRE_FIXTURES does not name the fixtures");
        return;
    };
    let mut seen = 0;
    for entry in std::fs::read_dir(Path::new(&root).join("models")).unwrap() {
        let folder = entry.unwrap().path();
        if !folder.join("tokenizer.json").exists() {
            continue;
        }
        let tokenizer = Tokenizer::from_folder(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        let opened = open(&tokenizer);
        let golden: Json = serde_json::from_slice(&std::fs::read(folder.join("golden.json")).unwrap()).unwrap();
        for case in golden["cases"].as_array().into_iter().flatten() {
            if let Some(text) = case["text"].as_str() {
                assert_eq!(encode(&opened, text, true), ids(&case["ids"]), "{}", folder.display());
            }
        }
        if folder.join("generation_config.json").exists() {
            assert_eq!(tokenizer.eos_ids, [510, 508], "{}", folder.display());
            assert!(tokenizer.chat_template.is_some(), "{}", folder.display());
        }
        seen += 1;
    }
    assert!(seen > 50, "{seen}");
}
