//! The `quire` command: one file per verb. It composes the crates and decides nothing.
//!
//! - [`serve`], [`worker`], [`router`]: long-running processes
//! - [`run`], [`pull`], [`list`], [`show`], [`quantize`], [`bench`]: for a person at a terminal
//! - [`options`], [`ports`], [`models`], [`adapter`], [`process`], [`shutdown`], [`observe`], [`progress`], [`banner`]: what verbs share

#![forbid(unsafe_code)]

mod adapter;
mod banner;
mod bench;
mod list;
mod models;
mod observe;
mod options;
mod ports;
mod process;
mod progress;
mod pull;
mod quantize;
mod router;
mod run;
mod serve;
mod show;
mod shutdown;
mod worker;

use std::{process::ExitCode, time::Duration};

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};

/// An inference server for large language models.
#[derive(Parser, Debug)]
#[command(name = "quire", version, propagate_version = true, max_term_width = 120)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
    #[command(flatten)]
    log: observe::LogOptions,
}

#[derive(Subcommand, Debug)]
enum Verb {
    /// Serve a model: router and worker in one process, OpenAI-compatible HTTP and gRPC on one port
    Serve(serve::ServeArgs),
    /// Serve a model to routers: tokens over gRPC
    Worker(worker::WorkerArgs),
    /// Serve text in front of workers
    Router(router::RouterArgs),
    /// Chat in the terminal, or answer one prompt
    Run(run::RunArgs),
    /// Fetch a model, or verify the one that is here; prints its path
    Pull(pull::PullArgs),
    /// List the models on this machine
    #[command(visible_alias = "ls")]
    List(list::ListArgs),
    /// Tell what a model is: architecture, types, sizes, tokenizer
    Show(show::ShowArgs),
    /// Write a model in fewer bits: a GGUF file that llama.cpp loads too
    Quantize(quantize::QuantizeArgs),
    /// Load an OpenAI-compatible server and report latencies and throughput
    Bench(bench::BenchVerb),
}

fn main() -> ExitCode {
    // Before any TLS connection: there is one provider in this binary, and this is it. A second installation can't happen.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    match start(cli) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("quire: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn start(cli: Cli) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("can't start the runtime")?;
    let level = if matches!(cli.verb, Verb::Run(_)) { "warn" } else { "info" };
    let observing = {
        // The exporter of traces spawns onto it.
        let _inside = runtime.enter();
        observe::Observing::start(&cli.log, level)?
    };
    let result = runtime.block_on(async {
        match cli.verb {
            Verb::Serve(args) => serve::run(args).await,
            Verb::Worker(args) => worker::run(args).await,
            Verb::Router(args) => router::run(args).await,
            Verb::Run(args) => run::run(args).await,
            Verb::Pull(args) => pull::run(args).await,
            Verb::List(args) => list::run(&args),
            Verb::Show(args) => show::run(&args),
            Verb::Quantize(args) => quantize::run(args),
            Verb::Bench(args) => bench::run(args).await,
        }
    });
    observing.finish();
    // Whoever still blocks (a terminal that is being read, a download) is not waited for.
    runtime.shutdown_timeout(Duration::from_millis(200));
    result
}
