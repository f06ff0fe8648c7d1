//! `quire bench sim`: the scheduler alone, over a cost model.

use anyhow::{Result, bail};
use clap::Args;
use quire_engine::simulate::{Scenario, scenarios, table};

#[derive(Args, Debug)]
pub struct SimArgs {
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

/// Prints one table a scenario.
pub fn run(args: &SimArgs) -> Result<()> {
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
