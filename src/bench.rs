//! `quire bench`: load for any OpenAI-compatible server. `quire bench sim`: the scheduler alone, over a cost model.

use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::{Args, Subcommand};
use quire_engine::simulate::{Scenario, scenarios, table};
use quire_loadtest::cli::BenchArgs;

#[derive(Args, Debug)]
#[command(args_conflicts_with_subcommands = true)]
pub struct BenchVerb {
    #[command(subcommand)]
    bench: Option<Bench>,
    #[command(flatten)]
    load: BenchArgs,
}

#[derive(Subcommand, Debug)]
enum Bench {
    /// Simulate the scheduler on synthetic traces, without a model or a server, and compare its policies
    Sim(SimArgs),
}

#[derive(Args, Debug)]
struct SimArgs {
    /// One scenario only, by name
    #[arg(long, value_name = "NAME")]
    scenario: Option<String>,
    /// Requests of a trace
    #[arg(long, short = 'n', default_value_t = 5_000, value_parser = clap::value_parser!(u32).range(100..=1_000_000))]
    requests: u32,
    /// Fixes the traces
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Fails if requests failed or the figures don't hold; the report is written all the same.
pub async fn run(verb: BenchVerb) -> Result<ExitCode> {
    if let Some(Bench::Sim(args)) = verb.bench {
        simulate(&args)?;
        return Ok(ExitCode::SUCCESS);
    }
    let report = quire_loadtest::cli::run(verb.load).await?;
    Ok(if report.is_clean() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn simulate(args: &SimArgs) -> Result<()> {
    let all = scenarios(args.requests as usize);
    let names: Vec<_> = all.iter().map(|scenario| scenario.name).collect();
    let wanted = |scenario: &Scenario| args.scenario.as_ref().is_none_or(|name| scenario.name == name);
    let mut found = false;
    for mut scenario in all.into_iter().filter(wanted) {
        found = true;
        scenario.trace.seed = args.seed;
        println!("{}", table(&scenario));
    }
    if !found {
        bail!("no such scenario; there are: {}", names.join(", "));
    }
    Ok(())
}
