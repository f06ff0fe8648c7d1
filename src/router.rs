//! `quire router`: text in front of workers. Holds nothing that can't be rebuilt.

use std::{process::ExitCode, sync::Arc, time::Duration};

use anyhow::{Context, Result, anyhow};
use clap::Args;
use quire_router::{
    config::FleetConfig,
    core::Core,
    fleet::Fleet,
    http::admin::{Check, Readiness},
    server::Server,
};
use tokio_util::task::TaskTracker;

use crate::{
    banner,
    options::{AdminOptions, DrainOptions, FrontOptions},
    ports::{Port, bind},
    process::{admin_port, recorder},
    shutdown::Shutdown,
};

const SETTLE: Duration = Duration::from_secs(2);

#[derive(Args, Clone, Debug)]
pub struct RouterArgs {
    /// Addresses of workers, host:port, separated by commas
    #[arg(long, value_name = "HOST:PORT,…", env = "QUIRE_WORKERS", value_delimiter = ',', required = true)]
    workers: Vec<String>,
    #[command(flatten)]
    front: FrontOptions,
    #[command(flatten)]
    admin: AdminOptions,
    #[command(flatten)]
    drain: DrainOptions,
}

/// Serves until a signal.
pub async fn run(args: RouterArgs) -> Result<ExitCode> {
    let tasks = TaskTracker::new();
    let shutdown = Shutdown::install(&tasks)?;
    let (host, face) = (args.front.host, args.front.face()?);
    let listener = bind(Port::Main, host, args.front.port).await?;
    let port = listener.local_addr()?.port();
    let admin = admin_port(&args.admin, host).await?;
    let metrics = recorder()?;

    let fleet = Fleet::new(FleetConfig::default());
    let workers: Vec<String> = args.workers.iter().map(|worker| worker.trim().to_owned()).filter(|worker| !worker.is_empty()).collect();
    fleet.add_remote(&workers).map_err(|error| anyhow!("--workers: {error}"))?;
    let asked = Arc::clone(&fleet);
    let readiness: Arc<dyn Readiness> = Arc::new(move || vec![Check::new("workers", asked.ready(), "no worker can be reached")]);
    let core = Arc::new(Core::new(Arc::clone(&fleet), args.front.core()));
    let server = Server { core: Arc::clone(&core), face, config: args.drain.server(SETTLE), readiness, metrics };
    let mut served = tasks.spawn(server.serve(listener, admin, shutdown.begin.clone()));

    let admin_shown = (args.admin.admin_port != 0).then_some(args.admin.admin_port);
    eprintln!("quire router {}\n  workers  {}", env!("CARGO_PKG_VERSION"), workers.join(", "));
    eprintln!("{}", banner::urls(host, port, admin_shown, None, args.front.api_key.is_some()));
    let announce = async {
        while !fleet.wait_ready(Duration::from_secs(10)).await {
            tracing::warn!(workers = workers.join(","), "no worker can be reached yet");
        }
        let names: Vec<String> = core.models().into_iter().map(|model| model.name).collect();
        eprintln!("ready: {}", names.join(", "));
        std::future::pending::<()>().await;
    };
    let stopped = tokio::select! {
        stopped = &mut served => stopped.context("the server failed")??,
        () = shutdown.now.cancelled() => return Ok(ExitCode::from(130)),
        () = announce => return Ok(ExitCode::SUCCESS),
    };
    if stopped.cut > 0 {
        tracing::warn!(requests = stopped.cut, "ended at the drain deadline");
    }
    fleet.shutdown().await;
    Ok(ExitCode::SUCCESS)
}
