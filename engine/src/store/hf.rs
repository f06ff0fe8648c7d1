//! Files from a Hugging Face repository, or anything that answers as it does (`HF_ENDPOINT`).

use serde::Deserialize;

use super::{
    Alias, Progress, StoreError, StoreSettings,
    cache::{FileEntry, ModelFolder},
    http::{Client, Failure, Refusal, Request},
    landing::Expected,
    local,
    name::{HubFile, stays_inside},
};

/// The part of the API's answer that is read.
#[derive(Deserialize)]
struct RepositoryInfo {
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
}

/// Fetches the file, all parts of it if it is a split one.
pub(super) fn fetch(
    settings: &StoreSettings,
    client: &Client,
    hub: &HubFile,
    folder: &ModelFolder,
    pin: Option<&Alias>,
    progress: &dyn Progress,
) -> Result<Vec<FileEntry>, StoreError> {
    let explain = |failure: Failure| match failure {
        Failure::Other(error) => error,
        Failure::Refused(refusal) => StoreError::Refused(explain(settings, hub, &refusal)),
    };
    let first = match &hub.file {
        Some(file) => file.clone(),
        None => choose(settings, client, hub).map_err(explain)?,
    };
    let files = local::parts(&first)
        .ok_or_else(|| StoreError::Refused(format!("{first} is a later part of a split model; name the one with -00001-of-")))?;
    let mut entries = Vec::with_capacity(files.len());
    for file in files {
        let url = format!(
            "{}/{}/{}/resolve/{}/{}",
            settings.hf_endpoint,
            hub.organisation,
            hub.repository,
            hub.revision.replace('/', "%2F"),
            escaped(&file)
        );
        let expected = pin.map_or_else(Expected::default, |pin| Expected { bytes: Some(pin.bytes), sha256: Some(pin.sha256.to_owned()) });
        let request = Request { url: &url, token: settings.hf_token.as_deref(), expected, label: &file };
        let target = folder.file(pin.map_or(&file, |pin| pin.file));
        entries.push(client.download(&request, &target, progress).map_err(explain)?);
    }
    Ok(entries)
}

/// The repository's only model, or the one that most people would take.
fn choose(settings: &StoreSettings, client: &Client, hub: &HubFile) -> Result<String, Failure> {
    let url = format!(
        "{}/api/models/{}/{}/revision/{}",
        settings.hf_endpoint,
        hub.organisation,
        hub.repository,
        hub.revision.replace('/', "%2F")
    );
    let text = client.text(&url, settings.hf_token.as_deref())?;
    let info: RepositoryInfo =
        serde_json::from_str(&text).map_err(|error| StoreError::Refused(format!("{url} didn't answer with a list of files: {error}")))?;
    let names = info.siblings.iter().map(|sibling| sibling.rfilename.as_str()).filter(|name| stays_inside(name));
    let models = local::models(names);
    let usual: Vec<&&str> = models.iter().filter(|name| name.to_ascii_uppercase().contains("Q4_K_M")).collect();
    match (models.as_slice(), usual.as_slice()) {
        ([only], _) => Ok((*only).to_owned()),
        (_, [usual]) => Ok((**usual).to_owned()),
        ([], _) => Err(StoreError::Refused(format!("there is no .gguf file in {}/{}", hub.organisation, hub.repository)).into()),
        (several, _) => {
            let list: String = several.iter().map(|file| format!("\n  hf:{}/{}/{file}", hub.organisation, hub.repository)).collect();
            Err(StoreError::Refused(format!("the repository holds several models; name one of them:{list}")).into())
        }
    }
}

/// What the status means there, and what helps.
fn explain(settings: &StoreSettings, hub: &HubFile, refusal: &Refusal) -> String {
    let repository = format!("{}/{}", hub.organisation, hub.repository);
    let page = format!("{}/{repository}", settings.hf_endpoint);
    match (refusal.status, refusal.code.as_deref()) {
        (404, Some("EntryNotFound")) => {
            format!("there is no file `{}` in {repository} (404)", hub.file.as_deref().unwrap_or_default())
        }
        (404, Some("RevisionNotFound")) => format!("there is no revision `{}` of {repository} (404)", hub.revision),
        (404, _) => format!("there is no such repository or file: {page} (404)"),
        (401, _) if settings.hf_token.is_none() => {
            format!("{repository} doesn't exist, or is private or gated and needs a token: set HF_TOKEN (401)")
        }
        (401, _) => format!("the token in HF_TOKEN was not accepted, or {repository} doesn't exist (401)"),
        (403, _) if settings.hf_token.is_none() => format!("{repository} is gated: accept its terms at {page} and set HF_TOKEN (403)"),
        (403, _) => format!("the token in HF_TOKEN may not read {repository}: accept its terms at {page}, or give the token access (403)"),
        (429, _) => format!("{} says that there were too many requests; try again later, or set HF_TOKEN (429)", settings.hf_endpoint),
        (status, _) => format!("{page} answered with HTTP status {status}"),
    }
}

/// File names may hold spaces and more.
fn escaped(path: &str) -> String {
    path.bytes()
        .map(|byte| match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => char::from(byte).to_string(),
            other => format!("%{other:02X}"),
        })
        .collect()
}
