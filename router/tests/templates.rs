//! Chat templates render as in Python's jinja2 with Hugging Face's environment (`testdata/templates/make_goldens.py`).

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // tests

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use quire_router::request::ChatPrompt;
use quire_router::text::{ChatTemplate, marks::Guarded};
use serde_json::Value;

/// Templates that rely on what isn't followed (`docs/tokenizers.md`): text marked safe escapes what is added to it.
const DIFFERENT: &[&str] = &["meetkai-functionary-medium-v3.1.jinja"];

/// What a request would be that gives a template these variables.
fn prompt(case: &Value) -> ChatPrompt {
    let own = ["messages", "tools", "documents", "add_generation_prompt"];
    let case = case.as_object().unwrap();
    ChatPrompt {
        messages: case["messages"].as_array().unwrap().clone(),
        tools: case.get("tools").cloned(),
        documents: case.get("documents").cloned(),
        add_generation_prompt: case.get("add_generation_prompt").and_then(Value::as_bool),
        template_arguments: case.iter().filter(|(name, _)| !own.contains(&name.as_str())).map(|(k, v)| (k.clone(), v.clone())).collect(),
        ..ChatPrompt::default()
    }
}

/// Where two texts part, with what stands around it.
fn first_difference(want: &str, got: &str) -> String {
    let at = want.char_indices().zip(got.chars()).find(|((_, w), g)| w != g).map_or(want.len().min(got.len()), |((at, _), _)| at);
    let from = want[..at].char_indices().rev().nth(60).map_or(0, |(from, _)| from);
    let some = |text: &str| text[from..].chars().take(160).collect::<String>();
    format!("want …{:?}\n      got  …{:?}", some(want), some(got))
}

/// Renders everything in a folder. Gives what differs, and how many renderings there were.
fn check(folder: &Path) -> (Vec<String>, usize) {
    let goldens: Value = serde_json::from_slice(&std::fs::read(folder.join("goldens.json")).unwrap()).unwrap();
    let text = |key: &str| goldens[key].as_str().unwrap().to_owned();
    let now = chrono::NaiveDateTime::parse_from_str(&text("now"), "%Y-%m-%dT%H:%M:%S").unwrap();
    let templates: BTreeMap<String, BTreeMap<String, Value>> = serde_json::from_value(goldens["templates"].clone()).unwrap();
    let (mut wrong, mut count) = (Vec::new(), 0);
    for (name, cases) in templates.into_iter().filter(|(name, _)| !DIFFERENT.contains(&name.as_str())) {
        let source = std::fs::read_to_string(folder.join(&name)).unwrap();
        let template = match ChatTemplate::with_clock(&source, text("bos"), text("eos"), Arc::new(move || now)) {
            Ok(template) => template,
            Err(error) => {
                wrong.push(format!("{name}: {error}"));
                continue;
            }
        };
        for (case, golden) in cases {
            count += 1;
            let got = template.render(&prompt(&goldens["cases"][&case]), &Guarded::default());
            match (golden["text"].as_str(), got) {
                (Some(want), Ok(got)) if got.text == want => {}
                (Some(want), Ok(got)) => wrong.push(format!("{name}, {case}:\n      {}", first_difference(want, &got.text))),
                (Some(_), Err(error)) => wrong.push(format!("{name}, {case}: {error}")),
                // What a template says itself reaches the client; Python's own words for wrong types are not ours.
                (None, Err(error)) => {
                    let words = golden["error"].as_str().unwrap();
                    let own = source.contains("raise_exception")
                        && !words.contains("Error: ")
                        && !words.contains("unsafe")
                        && !words.contains("undefined");
                    if own && !error.to_string().contains(words) {
                        wrong.push(format!("{name}, {case}: refused with {error}\n      not {words}"));
                    }
                }
                (None, Ok(_)) if golden["error"].as_str().unwrap().starts_with("TypeError") => {}
                (None, Ok(got)) => wrong.push(format!("{name}, {case}: not refused ({})\n      {:?}", golden["error"], got.text)),
            }
        }
    }
    (wrong, count)
}

#[test]
fn templates_render_as_in_python() {
    let (wrong, count) = check(&PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("testdata/templates"));
    assert!(wrong.is_empty(), "{} of {count}:\n{}", wrong.len(), wrong.join("\n"));
    assert!(count > 100, "{count}");
}

/// With QUIRE_TEMPLATES: a folder of published templates, with goldens made by the same script.
#[test]
fn published_templates_render_as_in_python() {
    let Ok(folder) = std::env::var("QUIRE_TEMPLATES") else {
        println!("skipped: QUIRE_TEMPLATES names no folder");
        return;
    };
    let (wrong, count) = check(Path::new(&folder));
    println!("{count} renderings, {} differ", wrong.len());
    assert!(wrong.is_empty(), "{} of {count}:\n{}", wrong.len(), wrong.join("\n"));
}
