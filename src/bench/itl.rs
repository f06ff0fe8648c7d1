//! `quire bench itl`: eight streams and a long prompt, without and with a target for the time between tokens.

use std::{process::ExitCode, time::Duration};

use anyhow::Result;
use clap::Args;
use quire_loadtest::itl::{Itl, Pass, pass, table};

use super::child::Served;

#[derive(Args, Debug)]
pub struct ItlArgs {
    /// A .gguf file, a folder with one, hf:org/repo[/file], pypi:name==version, or an alias [default: smollm2:135m]
    #[arg(value_name = "MODEL", env = "QUIRE_MODEL")]
    model: Option<String>,
    /// Streams that run
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1_024))]
    streams: u32,
    /// Tokens of the prompt that comes beside them
    #[arg(long, value_name = "TOKENS", default_value_t = 4_000, value_parser = clap::value_parser!(u32).range(16..))]
    prompt_tokens: u32,
    /// Seconds that the streams run alone
    #[arg(long, value_name = "SECONDS", default_value_t = 6.0)]
    alone: f64,
    /// Targets in milliseconds [default: twice the unloaded median]
    #[arg(long, value_name = "MS,…", value_delimiter = ',')]
    target_ms: Vec<f64>,
    /// Seconds for one pass
    #[arg(long, default_value_t = 300.0)]
    timeout: f64,
    /// Flags of `quire serve`
    #[arg(last = true, value_name = "FLAGS")]
    server: Vec<String>,
}

/// Prints a line for each target, the first without one.
pub async fn run(args: ItlArgs) -> Result<ExitCode> {
    let free = once(&args, None).await?;
    let targets = if args.target_ms.is_empty() { vec![2.0 * free.alone.p50] } else { args.target_ms.clone() };
    let mut passes = vec![(None, free)];
    for target in targets {
        passes.push((Some(target), once(&args, Some(target)).await?));
    }
    print!("{}", table(&passes));
    for (target, pass) in &passes[1..] {
        println!(
            "target {:.1} ms: p99 with the prompt is {:.2} times the p99 without it; its first token came after {:.2} times as long",
            target.unwrap_or_default(),
            pass.loaded.p99 / pass.alone.p99.max(1e-9),
            pass.first_token / free.first_token.max(1e-9)
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// A server of its own, one pass.
async fn once(args: &ItlArgs, target: Option<f64>) -> Result<Pass> {
    let mut flags = args.server.clone();
    flags.extend(target.map(|ms| format!("--itl-target-ms={ms:.3}")));
    let served = Served::start(args.model.as_deref(), &flags).await?;
    let seconds = |value: f64| Duration::from_secs_f64(value.clamp(0.1, 86_400.0));
    let itl = Itl {
        url: served.url(),
        streams: args.streams as usize,
        prompt_tokens: args.prompt_tokens as usize,
        alone: seconds(args.alone),
        timeout: seconds(args.timeout),
    };
    let result = pass(&itl).await;
    served.stop().await?;
    Ok(result?)
}
