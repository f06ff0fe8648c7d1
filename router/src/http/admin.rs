//! `/livez`, `/readyz`, `/metrics`: the same in every process, whatever it serves.
//!
//! Owns no state. What "ready" means is the process's to say, through [`Readiness`].

use std::sync::Arc;

use axum::{
    Router,
    response::{IntoResponse as _, Response},
    routing::get,
};
use http::{StatusCode, header};
use metrics_exporter_prometheus::PrometheusHandle;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::reply;

/// One thing that must hold, and whether it does.
#[derive(Clone, Debug)]
pub struct Check {
    pub name: &'static str,
    /// Why not, if it doesn't.
    pub result: Result<(), String>,
}

impl Check {
    /// A check that holds if `fine`, and says `otherwise` if not.
    #[must_use]
    pub fn new(name: &'static str, fine: bool, otherwise: &str) -> Self {
        Self { name, result: if fine { Ok(()) } else { Err(otherwise.to_owned()) } }
    }
}

/// Whether a process can serve. Cheap: it is asked every second and never waits.
pub trait Readiness: Send + Sync + 'static {
    /// Ready if all hold. Never depends on load: a full queue is an answer to one request, not to all.
    fn ready(&self) -> Vec<Check>;

    /// Alive if all hold; what doesn't hold is cured by a restart alone.
    fn live(&self) -> Vec<Check> {
        Vec::new()
    }
}

impl<F: Fn() -> Vec<Check> + Send + Sync + 'static> Readiness for F {
    fn ready(&self) -> Vec<Check> {
        self()
    }
}

/// A readiness that ends when the process begins to shut down; liveness does not.
pub struct UntilShutdown {
    pub inner: Arc<dyn Readiness>,
    pub shutdown: CancellationToken,
}

impl Readiness for UntilShutdown {
    fn ready(&self) -> Vec<Check> {
        let mut checks = self.inner.ready();
        checks.push(Check::new("shutdown", !self.shutdown.is_cancelled(), "the process is shutting down"));
        checks
    }

    fn live(&self) -> Vec<Check> {
        self.inner.live()
    }
}

/// The admin port of a process.
pub fn admin_router(readiness: Arc<dyn Readiness>, prometheus: PrometheusHandle) -> Router {
    probes(readiness).merge(metrics(prometheus))
}

/// `/livez`, `/readyz`, and `/health` for those who only know that.
pub fn probes<S: Clone + Send + Sync + 'static>(readiness: Arc<dyn Readiness>) -> Router<S> {
    let (live, health) = (Arc::clone(&readiness), Arc::clone(&readiness));
    Router::new()
        .route("/livez", get(move || std::future::ready(answer(&live.live()))))
        .route("/readyz", get(move || std::future::ready(answer(&readiness.ready()))))
        .route("/health", get(move || std::future::ready(answer(&health.ready()))))
}

/// `/metrics` in the Prometheus text format.
pub fn metrics<S: Clone + Send + Sync + 'static>(prometheus: PrometheusHandle) -> Router<S> {
    let render = move || {
        let text = prometheus.render();
        std::future::ready(([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response())
    };
    Router::new().route("/metrics", get(render))
}

fn answer(checks: &[Check]) -> Response {
    let fine = checks.iter().all(|check| check.result.is_ok());
    let verdicts: serde_json::Map<String, Value> = checks
        .iter()
        .map(|check| (check.name.to_owned(), Value::String(check.result.clone().err().unwrap_or_else(|| "ok".to_owned()))))
        .collect();
    let (status, word) = if fine { (StatusCode::OK, "ok") } else { (StatusCode::SERVICE_UNAVAILABLE, "unavailable") };
    reply::json(status, &json!({"status": word, "checks": verdicts}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readiness_ends_with_shutdown_and_liveness_does_not() {
        let shutdown = CancellationToken::new();
        let inner: Arc<dyn Readiness> = Arc::new(|| vec![Check::new("workers", true, "none")]);
        let readiness = UntilShutdown { inner, shutdown: shutdown.clone() };
        assert_eq!(answer(&readiness.ready()).status(), StatusCode::OK);
        shutdown.cancel();
        assert_eq!(answer(&readiness.ready()).status(), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(answer(&readiness.live()).status(), StatusCode::OK);
    }
}
