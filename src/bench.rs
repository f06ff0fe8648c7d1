//! `quire bench`: load for any OpenAI-compatible server.

use std::process::ExitCode;

use anyhow::Result;
use quire_loadtest::cli::BenchArgs;

/// Fails if requests failed or the figures don't hold; the report is written all the same.
pub async fn run(args: BenchArgs) -> Result<ExitCode> {
    let report = quire_loadtest::cli::run(args).await?;
    Ok(if report.is_clean() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
