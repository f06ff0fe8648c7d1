//! `quire worker`: tokens over gRPC, for routers.

use std::{
    net::IpAddr,
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use clap::Args;
use quire_engine::service::WorkerService;
use quire_proto::worker::v1::worker_server::WorkerServer;
use quire_router::{
    http::admin::{Readiness, UntilShutdown, admin_router},
    server::serve_admin,
    telemetry::upkeep,
};
use tokio::net::TcpListener;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::transport::server::{Server, TcpIncoming};

use crate::{
    banner,
    models::{self, on_thread},
    options::{AdminOptions, DrainOptions, EngineOptions, ModelOptions},
    ports::{Port, bind},
    process::{Engines, admin_port, recorder},
    shutdown::Shutdown,
};

/// A prompt of a million tokens takes some five bytes each.
const MAX_MESSAGE: usize = 64 << 20;
/// The last frames of ended streams get this long to leave.
const FLUSH: Duration = Duration::from_secs(2);
const SETTLE: Duration = Duration::from_secs(2);

#[derive(Args, Clone, Debug)]
pub struct WorkerArgs {
    #[command(flatten)]
    models: ModelOptions,
    #[command(flatten)]
    engine: EngineOptions,
    /// Address to listen on; 0.0.0.0 for all networks. Routers are trusted: keep others out
    #[arg(long, default_value = "127.0.0.1", env = "QUIRE_HOST", help_heading = "Network")]
    host: IpAddr,
    /// gRPC
    #[arg(long, short = 'p', default_value_t = 50051, env = "QUIRE_PORT", help_heading = "Network")]
    port: u16,
    #[command(flatten)]
    admin: AdminOptions,
    #[command(flatten)]
    drain: DrainOptions,
}

/// Serves until a signal, or until the engine can't go on.
pub async fn run(args: WorkerArgs) -> Result<ExitCode> {
    let begun = Instant::now();
    let tasks = TaskTracker::new();
    let shutdown = Shutdown::install(&tasks)?;
    let (models, config) = (args.models.parse()?, args.engine.config()?);
    let listener = bind(Port::Main, args.host, args.port).await?;
    let address = listener.local_addr()?;
    let admin = admin_port(&args.admin, args.host).await?;
    let metrics = recorder()?;

    let (engines, end) = (Engines::default(), CancellationToken::new());
    let _end_with_this = end.clone().drop_guard();
    tasks.spawn(upkeep(metrics.clone(), end.clone()));
    let watched = engines.clone();
    let readiness: Arc<dyn Readiness> =
        Arc::new(UntilShutdown { inner: Arc::new(move || watched.checks()), shutdown: shutdown.begin.clone() });
    if let Some(admin) = admin {
        tasks.spawn(serve_admin(admin, admin_router(readiness, metrics), end.clone()));
    }

    let Some(loaded) = models::start(models, &config, &shutdown).await? else { return Ok(ExitCode::SUCCESS) };
    engines.loaded(loaded.service.clone());
    let admin_shown = if args.admin.admin_port == 0 { String::new() } else { format!(", admin on port {}", args.admin.admin_port) };
    eprintln!("quire worker {}\n{}", env!("CARGO_PKG_VERSION"), banner::models(&loaded.running));
    eprintln!("ready after {:.2} s: gRPC on {address}{admin_shown}", begun.elapsed().as_secs_f64());

    tokio::select! {
        served = serve(listener, &loaded.service, &args.drain, &shutdown) => served?,
        () = shutdown.now.cancelled() => return Ok(ExitCode::from(130)),
        why = engines.died(), if !shutdown.begin.is_cancelled() => bail!("{why}"),
    }
    Ok(ExitCode::SUCCESS)
}

/// Until the signal; then unready → settle → finish what runs → in-band end at the deadline.
async fn serve(listener: TcpListener, service: &WorkerService, drain: &DrainOptions, shutdown: &Shutdown) -> Result<()> {
    let (health, health_service) = tonic_health::server::health_reporter();
    health.set_serving::<WorkerServer<WorkerService>>().await;
    let close = CancellationToken::new();
    let routes = Server::builder()
        .initial_stream_window_size(1 << 20)
        .initial_connection_window_size(4 << 20)
        .http2_keepalive_interval(Some(Duration::from_secs(15)))
        .http2_keepalive_timeout(Some(Duration::from_secs(20)))
        .add_service(health_service)
        .add_service(WorkerServer::new(service.clone()).max_decoding_message_size(MAX_MESSAGE).max_encoding_message_size(MAX_MESSAGE));
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    let serving = routes.serve_with_incoming_shutdown(incoming, close.clone().cancelled_owned());
    let ending = async {
        shutdown.begin.cancelled().await;
        let settle = drain.settle.unwrap_or(SETTLE);
        tracing::info!(?settle, "shutting down");
        health.set_not_serving::<WorkerServer<WorkerService>>().await;
        tokio::time::sleep(settle).await;
        let aborted = service.drain(Some(drain.drain_timeout)).await;
        if aborted > 0 {
            tracing::warn!(requests = aborted, "ended at the drain deadline");
        }
        let engines = service.clone();
        // Ends the streams that would go on for ever, too.
        let stopped = on_thread(&shutdown.now, move || engines.shutdown()).await;
        close.cancel();
        tokio::time::sleep(FLUSH).await;
        stopped
    };
    tokio::pin!(serving, ending);
    tokio::select! {
        served = &mut serving => served.context("the gRPC server failed"),
        stopped = ending => stopped,
    }
}
