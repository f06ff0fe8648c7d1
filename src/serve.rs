//! `quire serve`: router and worker in one process. Ports first, then the model; ready when both are.

use std::{
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::Args;
use quire_router::{config::FleetConfig, core::Core, fleet::Fleet, http::admin::Readiness, server::Server};
use tokio_util::task::TaskTracker;

use crate::{
    adapter::LocalWorker,
    banner,
    models::{self, on_thread},
    options::{AdminOptions, DrainOptions, EngineOptions, FrontOptions, ModelOptions},
    ports::{Port, bind},
    process::{Engines, admin_port, recorder},
    shutdown::Shutdown,
};

/// The router asks its worker at least within this.
const HANDSHAKE: Duration = Duration::from_secs(20);

#[derive(Args, Clone, Debug)]
pub struct ServeArgs {
    #[command(flatten)]
    models: ModelOptions,
    #[command(flatten)]
    engine: EngineOptions,
    #[command(flatten)]
    front: FrontOptions,
    #[command(flatten)]
    admin: AdminOptions,
    #[command(flatten)]
    drain: DrainOptions,
}

/// Serves until a signal, or until the engine can't go on.
pub async fn run(args: ServeArgs) -> Result<ExitCode> {
    let begun = Instant::now();
    let tasks = TaskTracker::new();
    let shutdown = Shutdown::install(&tasks)?;
    let (models, config) = (args.models.parse()?, args.engine.config()?);
    let (host, face) = (args.front.host, args.front.face()?);
    let listener = bind(Port::Main, host, args.front.port).await?;
    let port = listener.local_addr()?.port();
    let admin = admin_port(&args.admin, host).await?;
    let metrics = recorder()?;

    let fleet = Fleet::new(FleetConfig::default());
    let engines = Engines::default();
    let (watched, asked) = (engines.clone(), Arc::clone(&fleet));
    let readiness: Arc<dyn Readiness> = Arc::new(move || {
        let mut checks = watched.checks();
        checks.push(quire_router::http::admin::Check::new("worker", asked.ready(), "the worker has not described itself yet"));
        checks
    });
    let core = Arc::new(Core::new(Arc::clone(&fleet), args.front.core()));
    let server = Server { core, face, config: args.drain.server(Duration::ZERO), readiness, metrics };
    let mut served = tasks.spawn(server.serve(listener, admin, shutdown.begin.clone()));

    let loading = models::start(models, &config, &shutdown);
    tokio::pin!(loading);
    let loaded = tokio::select! {
        loaded = &mut loading => loaded?,
        ended = &mut served => {
            ended??;
            // A signal: the download stops too, and tidies up.
            loading.await?;
            return Ok(ExitCode::SUCCESS);
        }
    };
    let Some(loaded) = loaded else { return Ok(ExitCode::SUCCESS) };
    fleet.add("local", Arc::new(LocalWorker(loaded.service.clone())));
    engines.loaded(loaded.service.clone());
    ensure!(fleet.wait_ready(HANDSHAKE).await || shutdown.begin.is_cancelled(), "the router can't use this model; the lines above say why");

    let name = loaded.running.first().and_then(|model| model.names.first()).map(String::as_str);
    let admin_shown = (args.admin.admin_port != 0).then_some(args.admin.admin_port);
    eprintln!("quire {}\n{}", env!("CARGO_PKG_VERSION"), banner::models(&loaded.running));
    eprintln!("{}", banner::urls(host, port, admin_shown, name, args.front.api_key.is_some()));
    eprintln!("ready after {:.2} s; Ctrl-C ends it", begun.elapsed().as_secs_f64());

    let stopped = tokio::select! {
        stopped = &mut served => stopped.context("the server failed")??,
        () = shutdown.now.cancelled() => return Ok(ExitCode::from(130)),
        why = engines.died() => bail!("{why}"),
    };
    if stopped.cut > 0 {
        tracing::warn!(requests = stopped.cut, "ended at the drain deadline");
    }
    fleet.shutdown().await;
    on_thread(&shutdown.now, move || loaded.service.shutdown()).await.map_err(|_| anyhow!("stopped while the engine was ending"))?;
    Ok(ExitCode::SUCCESS)
}
