//! `quire list`: the models on this machine, or the names that can be pulled.

use std::{
    io::Write,
    process::ExitCode,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::Result;
use clap::Args;
use indicatif::HumanBytes;
use quire_engine::store::{ALIASES, DEFAULT_MODEL, Store, StoreSettings};

#[derive(Args, Clone, Debug)]
pub struct ListArgs {
    /// The short names that are known, here or not
    #[arg(long)]
    available: bool,
}

pub fn run(args: &ListArgs) -> Result<ExitCode> {
    let rows = if args.available { available() } else { here()? };
    // Whoever reads may have seen enough (`| head`).
    let _ = std::io::stdout().write_all(table(&rows).as_bytes());
    Ok(ExitCode::SUCCESS)
}

/// Tokens for whose KV memory there is room in what the list says that a model needs.
const TOKENS: u64 = 8192;

fn available() -> Vec<Vec<String>> {
    let memory = format!("MEMORY ({TOKENS} TOKENS)");
    let mut rows = vec![["NAME", "SIZE", &memory, "LICENCE", "SHA-256", "MODEL", "FROM"].map(str::to_owned).to_vec()];
    for alias in ALIASES {
        let about = if alias.name == DEFAULT_MODEL { format!("{} (the default)", alias.about) } else { alias.about.to_owned() };
        let from: Vec<&str> = alias.sources.iter().map(|source| source.split_once(':').map_or(*source, |(kind, _)| kind)).collect();
        rows.push(vec![
            alias.name.to_owned(),
            HumanBytes(alias.bytes).to_string(),
            HumanBytes(alias.memory(TOKENS)).to_string(),
            alias.licence.to_owned(),
            alias.sha256.chars().take(12).collect(),
            about,
            from.join(", "),
        ]);
    }
    rows
}

fn here() -> Result<Vec<Vec<String>>> {
    let store = Store::new(StoreSettings::from_env());
    let models = store.list()?;
    if models.is_empty() {
        eprintln!("no models in {}; `quire list --available` shows what `quire pull` knows", store.root().display());
    }
    let mut rows = vec![["NAME", "SIZE", "FETCHED", "PATH"].map(str::to_owned).to_vec()];
    for (manifest, local) in models {
        rows.push(vec![manifest.name, HumanBytes(local.bytes).to_string(), ago(manifest.fetched), local.path.display().to_string()]);
    }
    Ok(rows)
}

/// `3 days ago`.
fn ago(seconds_since_1970: u64) -> String {
    let then = UNIX_EPOCH + Duration::from_secs(seconds_since_1970);
    let seconds = SystemTime::now().duration_since(then).map_or(0, |age| age.as_secs());
    let (number, unit) = match seconds {
        0..60 => return "just now".to_owned(),
        60..3_600 => (seconds / 60, "minute"),
        3_600..86_400 => (seconds / 3_600, "hour"),
        _ => (seconds / 86_400, "day"),
    };
    format!("{number} {unit}{} ago", if number == 1 { "" } else { "s" })
}

/// Columns as wide as they need to be.
fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.first().map_or(0, Vec::len);
    let width = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).enumerate();
        let cells = cells.map(|(at, (cell, width))| if at + 1 < columns { format!("{cell:<width$}") } else { cell.clone() });
        cells.collect::<Vec<_>>().join("  ") + "\n"
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_and_columns() {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        for (age, text) in [(0, "just now"), (61, "1 minute ago"), (7_300, "2 hours ago"), (90_000, "1 day ago")] {
            assert_eq!(ago(now - age), text);
        }
        assert_eq!(ago(now + 500), "just now");
        let rows = [["A", "BB", "C", "D"], ["aaa", "b", "cc", "d"]].map(|row| row.map(str::to_owned).to_vec());
        assert_eq!(table(&rows), "A    BB  C   D\naaa  b   cc  d\n");
    }
}
