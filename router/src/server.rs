//! The sockets of a router: one listener for HTTP/1, HTTP/2 and gRPC, one for the admin port, and their end.
//!
//! Shutdown, in order: unready → settle (whoever balances learns of it) → stop accepting → finish what runs → at the
//! deadline, end streams in-band → close.

use std::{
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{Router, body::Body};
use hyper::body::Incoming;
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto,
    service::TowerToHyperService,
};
use metrics::gauge;
use metrics_exporter_prometheus::PrometheusHandle;
use thiserror::Error;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic_health::{ServingStatus, server::HealthReporter};
use tower::ServiceExt as _;

use crate::{
    config::FaceConfig,
    core::Core,
    grpc,
    http::{
        self, App,
        admin::{Readiness, UntilShutdown, admin_router},
        auth::Keys,
    },
    telemetry::{self, names},
};

/// A connection may say nothing for this long.
const IDLE: Duration = Duration::from_secs(75);
/// The last frames of ended streams get this long to leave.
const FLUSH: Duration = Duration::from_secs(2);
/// How often gRPC's health service learns of readiness.
const HEALTH_INTERVAL: Duration = Duration::from_millis(100);
/// HTTP/2 flow control: the defaults (64 KiB) stall streams on any distance.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = 4 << 20;

/// How the sockets behave.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Connections at a time; further ones wait in the listener's backlog.
    pub max_connections: usize,
    /// HTTP/2 streams of one connection.
    pub max_streams: u32,
    /// Unready, but still accepting.
    pub settle: Duration,
    /// What runs may finish within this, from the end of `settle` on.
    pub drain: Duration,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self { max_connections: 4096, max_streams: 1024, settle: Duration::from_secs(5), drain: Duration::from_secs(30) }
    }
}

/// Why a server did not come up.
#[derive(Debug, Error)]
pub enum ServerError {
    #[error("the gRPC descriptors cannot be read: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
    #[error("the listener has no address: {0}")]
    Listener(#[from] io::Error),
}

/// All faces of a router over one core.
pub struct Server {
    pub core: Arc<Core>,
    pub face: FaceConfig,
    pub config: ServerConfig,
    /// What must hold besides "not shutting down".
    pub readiness: Arc<dyn Readiness>,
    pub metrics: PrometheusHandle,
}

/// What was unfinished when a server stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stopped {
    /// Calls that the deadline ended.
    pub cut: usize,
}

impl Server {
    /// Serves until `shutdown` is cancelled and what runs is finished or cut.
    ///
    /// # Errors
    /// If it can't come up.
    pub async fn serve(
        self,
        listener: TcpListener,
        admin: Option<TcpListener>,
        shutdown: CancellationToken,
    ) -> Result<Stopped, ServerError> {
        let readiness: Arc<dyn Readiness> = Arc::new(UntilShutdown { inner: Arc::clone(&self.readiness), shutdown: shutdown.clone() });
        let app = Arc::new(App {
            core: self.core,
            keys: Keys::new(self.face.api_key.as_deref()),
            config: self.face,
            readiness: Arc::clone(&readiness),
            metrics: self.metrics.clone(),
            cut: CancellationToken::new(),
            work: TaskTracker::new(),
        });
        let (grpc_routes, reporter) = grpc::router(&app)?;
        let routes = http::router(&app, grpc_routes);
        tracing::info!(address = %listener.local_addr()?, "listening");

        let tracker = TaskTracker::new();
        let end = CancellationToken::new();
        let _end_with_this = end.clone().drop_guard();
        let admin_port =
            Port { config: self.config.clone(), accepting: CancellationToken::new(), closing: end.clone(), closed: end.clone() };
        tracker.spawn(telemetry::upkeep(self.metrics.clone(), end.clone()));
        tracker.spawn(report_health(reporter, Arc::clone(&readiness), shutdown.clone(), end.clone()));
        if let Some(admin) = admin {
            let routes = admin_router(readiness, self.metrics);
            tracker.spawn(admin_port.clone().run(admin, routes, tracker.clone(), false));
        }

        let port = Port {
            config: self.config.clone(),
            accepting: CancellationToken::new(),
            closing: CancellationToken::new(),
            closed: CancellationToken::new(),
        };
        let connections = TaskTracker::new();
        connections.spawn(port.clone().run(listener, routes, connections.clone(), true));

        shutdown.cancelled().await;
        tracing::info!(settle = ?self.config.settle, "shutting down");
        tokio::time::sleep(self.config.settle).await;
        port.accepting.cancel();
        // Connections end with the calls that they serve now; one kept open brings no new ones.
        port.closing.cancel();
        let cut = drain(&app, self.config.drain).await;
        close(&port, &connections).await;
        end.cancel();
        admin_port.accepting.cancel();
        tracker.close();
        tracker.wait().await;
        Ok(Stopped { cut })
    }
}

/// Serves only the admin routes, for processes without faces; until `shutdown` is cancelled.
pub async fn serve_admin(listener: TcpListener, routes: Router, shutdown: CancellationToken) {
    let tracker = TaskTracker::new();
    let port =
        Port { config: ServerConfig::default(), accepting: shutdown.clone(), closing: shutdown.clone(), closed: CancellationToken::new() };
    port.clone().run(listener, routes, tracker.clone(), false).await;
    close(&port, &tracker).await;
}

/// Waits for what runs; cuts it at the deadline. Says how many calls it cut.
async fn drain(app: &App, limit: Duration) -> usize {
    app.work.close();
    if tokio::time::timeout(limit, app.work.wait()).await.is_ok() {
        return 0;
    }
    let cut = app.work.len();
    tracing::warn!(calls = cut, "the drain deadline has passed: ending what still runs");
    app.cut.cancel();
    // In-band ends take the time of one frame.
    let _ = tokio::time::timeout(FLUSH, app.work.wait()).await;
    cut
}

/// Lets idle connections close by themselves, then closes the rest.
async fn close(port: &Port, connections: &TaskTracker) {
    port.closing.cancel();
    connections.close();
    if tokio::time::timeout(FLUSH, connections.wait()).await.is_err() {
        port.closed.cancel();
        connections.wait().await;
    }
}

/// Tells gRPC's health service what `/readyz` tells others.
async fn report_health(reporter: HealthReporter, readiness: Arc<dyn Readiness>, shutdown: CancellationToken, end: CancellationToken) {
    loop {
        let ready = readiness.ready().iter().all(|check| check.result.is_ok());
        let status = if ready { ServingStatus::Serving } else { ServingStatus::NotServing };
        reporter.set_service_status("", status).await;
        reporter.set_service_status(grpc::SERVICE, status).await;
        if shutdown.is_cancelled() {
            end.cancelled().await;
            return;
        }
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = end.cancelled() => return,
            () = tokio::time::sleep(HEALTH_INTERVAL) => {}
        }
    }
}

/// One listening socket and the stages of its end.
#[derive(Clone)]
struct Port {
    config: ServerConfig,
    /// Cancelled: no new connections.
    accepting: CancellationToken,
    /// Cancelled: connections end after the call that they serve.
    closing: CancellationToken,
    /// Cancelled: connections end now.
    closed: CancellationToken,
}

impl Port {
    async fn run(self, listener: TcpListener, routes: Router, connections: TaskTracker, counted: bool) {
        let permits = Arc::new(Semaphore::new(self.config.max_connections));
        loop {
            let accepted = self.accepting.run_until_cancelled(async {
                let permit = Arc::clone(&permits).acquire_owned().await;
                (permit, listener.accept().await)
            });
            let (permit, stream) = match accepted.await {
                None => return,
                Some((permit, Ok((stream, _)))) => (permit, stream),
                Some((_, Err(error))) => {
                    // Out of file descriptors, or a client that left already: neither is cured by haste.
                    tracing::debug!(%error, "accept failed");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            };
            let (port, routes) = (self.clone(), routes.clone());
            connections.spawn(async move {
                let _permit = permit;
                let _count = counted.then(Counted::new);
                tokio::select! {
                    () = port.closed.cancelled() => {}
                    () = port.connection(stream, routes) => {}
                }
            });
        }
    }

    async fn connection(&self, stream: TcpStream, routes: Router) {
        // Tokens are small and each is wanted at once.
        let _ = stream.set_nodelay(true);
        // hyper's own clock starts with the first byte.
        tokio::select! {
            readable = tokio::time::timeout(IDLE, stream.readable()) => if !matches!(readable, Ok(Ok(()))) { return },
            () = self.closing.cancelled() => return,
        }
        let service = TowerToHyperService::new(routes.map_request(|request: ::http::Request<Incoming>| request.map(Body::new)));
        let builder = self.builder();
        let connection = builder.serve_connection(TokioIo::new(stream), service);
        tokio::pin!(connection);
        let begun = Instant::now();
        let result = tokio::select! {
            result = connection.as_mut() => result,
            () = self.closing.cancelled() => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        };
        if let Err(error) = result {
            tracing::debug!(%error, after = ?begun.elapsed(), "a connection ended early");
        }
    }

    fn builder(&self) -> auto::Builder<TokioExecutor> {
        let mut builder = auto::Builder::new(TokioExecutor::new());
        builder.http1().timer(TokioTimer::new()).header_read_timeout(IDLE);
        builder
            .http2()
            .timer(TokioTimer::new())
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_concurrent_streams(self.config.max_streams)
            .keep_alive_interval(Duration::from_secs(30))
            .keep_alive_timeout(Duration::from_secs(20))
            // What one slow reader may hold back in memory.
            .max_send_buf_size(64 << 10);
        builder
    }
}

struct Counted;

impl Counted {
    fn new() -> Self {
        gauge!(names::CONNECTIONS).increment(1.0);
        Self
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        gauge!(names::CONNECTIONS).decrement(1.0);
    }
}
