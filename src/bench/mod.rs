//! `quire bench`: load for any OpenAI-compatible server, and measures of this one.

mod child;
mod itl;
mod perplexity;
mod sim;
mod soak;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Subcommand};
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
    Sim(sim::SimArgs),
    /// Perplexity of a model on a text, and what KV types and backends change in it
    Perplexity(Box<perplexity::PerplexityArgs>),
    /// Let streams run beside a long prompt, without and with a target for the time between tokens
    Itl(itl::ItlArgs),
    /// Ask a server of its own very many short things of every kind, and see what it holds at the end
    Soak(soak::SoakArgs),
}

/// Fails if requests failed or the figures don't hold; the report is written all the same.
pub async fn run(verb: BenchVerb) -> Result<ExitCode> {
    match verb.bench {
        Some(Bench::Sim(args)) => sim::run(&args).map(|()| ExitCode::SUCCESS),
        Some(Bench::Perplexity(args)) => perplexity::run(*args).await,
        Some(Bench::Itl(args)) => itl::run(args).await,
        Some(Bench::Soak(args)) => soak::run(args).await,
        None => {
            let report = quire_loadtest::cli::run(verb.load).await?;
            Ok(if report.is_clean() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
    }
}
