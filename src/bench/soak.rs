//! `quire bench soak`: a server of its own, very many short requests, and what it holds at the end.

use std::{path::PathBuf, process::ExitCode, time::Duration};

use anyhow::{Context, Result};
use clap::Args;
use quire_loadtest::soak::{self, Soak};
use tokio_util::sync::CancellationToken;

use super::child::Served;

#[derive(Args, Debug)]
pub struct SoakArgs {
    /// The model to serve; small ones are best [default: smollm2:135m]
    #[arg(value_name = "MODEL", env = "QUIRE_MODEL")]
    model: Option<String>,
    #[arg(long, short = 'n', default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(100..))]
    requests: u32,
    /// Requests before them: until caches are full, memory grows as it should
    #[arg(long, default_value_t = 25_000)]
    warmup: u32,
    /// Requests at a time
    #[arg(long, short = 'c', default_value_t = 48, value_parser = clap::value_parser!(u32).range(1..=4_096))]
    concurrency: u32,
    /// Fixes the requests
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Seconds for one request
    #[arg(long, default_value_t = 60.0)]
    timeout: f64,
    /// Growth of resident memory after the first fifth of the requests that is still flat, in per cent
    #[arg(long, default_value_t = 2.0)]
    max_growth: f64,
    /// Ask this server, which runs already, and don't start one
    #[arg(long, value_name = "URL", requires = "pid")]
    url: Option<String>,
    /// Its process
    #[arg(long, requires = "url")]
    pid: Option<u32>,
    /// Write the report as JSON, too
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Flags of `quire serve`
    #[arg(last = true, value_name = "FLAGS", conflicts_with = "url")]
    server: Vec<String>,
}

/// Fails if something does not hold.
pub async fn run(args: SoakArgs) -> Result<ExitCode> {
    let served = match &args.url {
        None => Some(Served::start(args.model.as_deref(), &args.server).await?),
        Some(_) => None,
    };
    let soak = Soak {
        url: served.as_ref().map_or_else(|| args.url.clone().unwrap_or_default(), Served::url),
        pid: served.as_ref().map_or(args.pid, Served::pid),
        requests: args.requests as usize,
        warmup: args.warmup as usize,
        concurrency: args.concurrency as usize,
        seed: args.seed,
        timeout: Duration::from_secs_f64(args.timeout.clamp(0.1, 86_400.0)),
        max_growth: args.max_growth,
    };
    let cancel = CancellationToken::new();
    let all = soak.warmup + soak.requests;
    let running = soak::run(&soak, &cancel, move |done| eprint!("\r{done} of {all} "));
    tokio::pin!(running);
    let report = tokio::select! {
        report = &mut running => report?,
        _ = tokio::signal::ctrl_c() => {
            cancel.cancel();
            running.await?
        }
    };
    eprint!("\r                        \r");
    print!("{}", report.table());
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&report)? + "\n";
        std::fs::write(path, text).with_context(|| format!("--json {}", path.display()))?;
    }
    if let Some(served) = served {
        served.stop().await?;
    }
    Ok(if report.holds() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
