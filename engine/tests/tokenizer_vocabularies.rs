//! Vocabularies of real models (files as llama.cpp keeps for its own tests: NAME.gguf, NAME.gguf.inp, NAME.gguf.out),
//! if QUIRE_VOCABULARIES names a folder of them.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // tests

use std::path::PathBuf;

use quire_engine::model::{gguf::GgufFile, tokenizer::Tokenizer};

/// Whether Hugging Face's tokenizer and llama.cpp's, of which the goldens are, are known to differ (`docs/tokenizers.md`).
fn differ(name: &str, text: &str) -> bool {
    // The original composes letters and marks first.
    name == "ggml-vocab-qwen35" && text.contains(['\u{300}', '\u{301}'])
}

#[test]
fn real_vocabularies_encode_as_their_goldens_say() {
    let Ok(folder) = std::env::var("QUIRE_VOCABULARIES") else {
        println!("skipped: QUIRE_VOCABULARIES names no folder");
        return;
    };
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "gguf"));
    files.sort();
    let mut wrong = Vec::new();
    let mut checked = 0;
    for path in files {
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        let beside = |extension: &str| std::fs::read_to_string(path.with_extension(format!("gguf.{extension}")));
        let file = GgufFile::open(&path).unwrap();
        let tokenizer = match Tokenizer::from_gguf(&file.parse().unwrap().metadata) {
            Ok(tokenizer) => tokenizer,
            Err(error) => {
                // Three of them are from before files named their rule.
                assert!(error.to_string().contains("`tokenizer.ggml.pre`: is missing"), "{name}: {error}");
                println!("{name}: {error}");
                continue;
            }
        };
        let opened = tokenizers::Tokenizer::from_bytes(&tokenizer.json).unwrap();
        let (Ok(inputs), Ok(outputs)) = (beside("inp"), beside("out")) else {
            println!("{name}: loads; has no goldens");
            continue;
        };
        let before = wrong.len();
        for (text, want) in inputs.split("\n__ggml_vocab_test__\n").zip(outputs.lines()) {
            let want: Vec<u32> = want.split_whitespace().map(|id| id.parse().unwrap()).collect();
            let got = opened.encode(text, false).unwrap().get_ids().to_vec();
            checked += 1;
            if got != want && !differ(&name, text) {
                wrong.push(format!("{name} {text:?}\n   want {want:?}\n   got  {got:?}"));
            }
        }
        println!("{name}: {} strings differ", wrong.len() - before);
    }
    assert!(checked > 300, "{checked} strings");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
