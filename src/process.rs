//! What the long-running verbs have in common: metrics, readiness of the engines, and what is wrong when they die.

use std::{
    net::IpAddr,
    sync::{Arc, OnceLock},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use metrics_exporter_prometheus::PrometheusHandle;
use quire_engine::service::WorkerService;
use quire_router::{
    config::{CoreConfig, FaceConfig},
    http::admin::Check,
    server::ServerConfig,
    telemetry,
};
use tokio::net::TcpListener;

use crate::{
    options::{AdminOptions, DrainOptions, FrontOptions},
    ports::{Port, bind},
};

/// How often a process looks whether its engines live.
const HEARTBEAT: Duration = Duration::from_millis(500);

/// The one recorder, with the buckets of router and engine.
pub fn recorder() -> Result<PrometheusHandle> {
    let buckets: Vec<_> = quire_engine::telemetry::buckets().collect();
    let handle = telemetry::install_recorder(&buckets).context("can't record metrics")?;
    quire_engine::telemetry::describe_metrics();
    Ok(handle)
}

/// The admin port, unless there is to be none.
pub async fn admin_port(options: &AdminOptions, host: IpAddr) -> Result<Option<TcpListener>> {
    match options.admin_port {
        0 => Ok(None),
        port => bind(Port::Admin, options.admin_host.unwrap_or(host), port).await.map(Some),
    }
}

impl FrontOptions {
    /// The faces' configuration.
    pub fn face(&self) -> Result<FaceConfig> {
        let api_key = self.api_key.clone();
        ensure!(api_key.as_ref().is_none_or(|key| !key.trim().is_empty()), "--api-key (QUIRE_API_KEY) is set but empty");
        if api_key.is_none() && !self.host.is_loopback() {
            tracing::warn!("whoever can reach {}:{} may use this server; --api-key would ask for a key", self.host, self.port);
        }
        Ok(FaceConfig { api_key, max_body_bytes: usize::try_from(self.max_body)?, ..FaceConfig::default() })
    }

    /// The core's configuration.
    pub fn core(&self) -> CoreConfig {
        CoreConfig { max_in_flight: self.max_in_flight.max(1), ..CoreConfig::default() }
    }
}

impl DrainOptions {
    /// The sockets' configuration.
    pub fn server(&self, settle: Duration) -> ServerConfig {
        ServerConfig { settle: self.settle.unwrap_or(settle), drain: self.drain_timeout, ..ServerConfig::default() }
    }
}

/// The engines of this process, once they are loaded.
#[derive(Clone, Default)]
pub struct Engines(Arc<OnceLock<WorkerService>>);

impl Engines {
    pub fn loaded(&self, service: WorkerService) {
        // Loaded once; a second time would be the same service.
        let _ = self.0.set(service);
    }

    /// For `/readyz`.
    pub fn checks(&self) -> Vec<Check> {
        let Some(service) = self.0.get() else { return vec![Check::new("model", false, "the model is being loaded")] };
        let health: Vec<_> = service.handles().iter().map(|handle| handle.health()).collect();
        vec![
            Check::new("model", true, ""),
            Check::new("engine", health.iter().all(|health| health.alive), "the step loop has ended"),
            Check::new("progress", !health.iter().any(|health| health.stalled), "work is waiting, but no step has ended for too long"),
            Check::new("draining", !health.iter().any(|health| health.draining), "no new requests are taken"),
        ]
    }

    /// Returns when a step loop has ended although nobody asked it to, or a step does not: nothing in this process can mend
    /// that. Gives what happened.
    pub async fn died(&self) -> &'static str {
        loop {
            tokio::time::sleep(HEARTBEAT).await;
            let Some(service) = self.0.get() else { continue };
            let Some(health) = service.handles().iter().map(|handle| handle.health()).find(|health| health.hopeless) else { continue };
            return if health.alive { "a step does not end (--give-up-after)" } else { "the engine has ended unexpectedly" };
        }
    }
}
