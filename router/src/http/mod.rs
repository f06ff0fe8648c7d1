//! HTTP faces: thin translations between public protocols and the core. They decide nothing about generation.
//!
//! - [`openai`]: `/v1/…`, `/tokenize`, `/detokenize`
//! - [`admin`]: `/livez`, `/readyz`, `/metrics`, for every process
//! - [`edge`]: what every call passes: request id, CORS, key, figures, in-flight guard
//! - [`auth`], [`body`], [`fields`], [`reply`], [`sse`], [`generation`]: the parts that faces share

pub mod admin;
pub mod auth;
pub mod body;
pub mod edge;
pub mod fields;
pub mod generation;
pub mod openai;
pub mod reply;
pub mod sse;

use std::sync::Arc;

use axum::{
    Router,
    extract::{Request, State},
    response::{IntoResponse as _, Response},
};
use metrics_exporter_prometheus::PrometheusHandle;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tower::ServiceExt as _;
use tower_http::catch_panic::CatchPanicLayer;

use crate::{config::FaceConfig, core::Core, error::ApiError};

/// What every face needs, shared by all calls.
pub struct App {
    pub core: Arc<Core>,
    pub config: FaceConfig,
    pub keys: auth::Keys,
    pub readiness: Arc<dyn admin::Readiness>,
    pub metrics: PrometheusHandle,
    /// Cancelled when streams must end now.
    pub cut: CancellationToken,
    /// One token for each call whose response is not finished; probes don't count.
    pub work: TaskTracker,
}

/// All routes of the main port; `grpc` takes what speaks gRPC.
pub fn router(app: &Arc<App>, grpc: Router) -> Router {
    let mut routes = openai::routes().merge(admin::probes(Arc::clone(&app.readiness)));
    if app.keys.open() {
        routes = routes.merge(admin::metrics(app.metrics.clone()));
    }
    let fallback = move |State(_): State<Arc<App>>, request: Request| elsewhere(grpc.clone(), request);
    routes
        .fallback(fallback)
        .layer(CatchPanicLayer::custom(|_| ApiError::Internal("The server failed to answer this request.".to_owned()).into_response()))
        .layer(axum::middleware::from_fn_with_state(Arc::clone(app), edge::edge))
        .with_state(Arc::clone(app))
}

async fn elsewhere(grpc: Router, request: Request) -> Response {
    if edge::is_grpc(request.headers()) {
        // A router never fails.
        return grpc.oneshot(request).await.unwrap_or_else(|never| match never {});
    }
    let message = format!("No such route: {} {}.", request.method(), request.uri().path());
    ApiError::NotFound(message).into_response()
}
