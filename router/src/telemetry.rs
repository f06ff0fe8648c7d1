//! What a router tells of itself: metric names and their one recorder, spans and their names.
//!
//! - [`names`]: every metric of the router; labels come from closed sets only, never from a client's input
//! - [`observed`]: one generation, measured from its start to its last event, whichever face it goes out of
//! - [`trace`]: W3C context over HTTP headers and gRPC metadata, OpenTelemetry GenAI attribute names
//!
//! Owns names. Exporting traces is set up by the process (`src/`), not here.

pub mod names;
pub mod observed;
pub mod trace;

use std::time::Duration;

use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use tokio_util::sync::CancellationToken;

/// How often the recorder folds raw samples into its buckets; samples pile up in memory in between.
const UPKEEP: Duration = Duration::from_secs(5);

/// Installs the one recorder of this process, with the router's buckets and `others` (histogram name, bucket bounds).
///
/// # Errors
/// If a recorder is installed already, or a list of buckets is empty.
pub fn install_recorder(others: &[(&str, &[f64])]) -> Result<PrometheusHandle, BuildError> {
    let builder = builder(others)?;
    let handle = builder.install_recorder()?;
    names::describe();
    Ok(handle)
}

fn builder(others: &[(&str, &[f64])]) -> Result<PrometheusBuilder, BuildError> {
    let mut builder = PrometheusBuilder::new();
    for (name, buckets) in names::BUCKETS.iter().chain(others) {
        builder = builder.set_buckets_for_metric(Matcher::Full((*name).to_owned()), buckets)?;
    }
    Ok(builder)
}

/// Keeps the recorder's memory bounded; runs until `stop`.
pub async fn upkeep(handle: PrometheusHandle, stop: CancellationToken) {
    while stop.run_until_cancelled(tokio::time::sleep(UPKEEP)).await.is_some() {
        handle.run_upkeep();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn histograms_are_rendered_with_the_buckets_of_both_lists() {
        let recorder = builder(&[("other_seconds", &[1.0, 2.0])]).unwrap().build_recorder();
        let handle = recorder.handle();
        metrics::with_local_recorder(&recorder, || {
            names::describe();
            metrics::histogram!("other_seconds").record(1.5);
            metrics::histogram!(names::HTTP_DURATION, "route" => "/v1/models").record(0.003);
        });
        let text = handle.render();
        assert!(text.contains("other_seconds_bucket{le=\"2\"} 1"), "{text}");
        assert!(text.contains("quire_http_request_duration_seconds_bucket{route=\"/v1/models\",le=\"0.005\"} 1"), "{text}");
        assert!(text.contains("# HELP quire_http_request_duration_seconds "), "{text}");
    }
}
