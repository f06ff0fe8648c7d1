//! How wrong the client itself is: a report about the mock beside what the mock really did. Pure.

use serde::Serialize;

use crate::mock::Served;
use crate::report::Report;
use crate::tally::Samples;

/// Client minus server, in milliseconds. The server's times run from a request's arrival in its handler to the handing over of deltas,
/// so the error holds everything between the two: sockets, HTTP, parsing, both sides' scheduling.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct ClientError {
    pub ttft_p50: f64,
    pub ttft_p99: f64,
    pub itl_p50: f64,
    pub itl_mean: f64,
}

/// None if nothing was measured. `served`: the requests of the run, without probes and warm-up.
pub fn client_error(served: &[Served], report: &Report) -> Option<ClientError> {
    let (mut ttft, mut itl) = (Samples::default(), Samples::default());
    for served in served {
        if let Some(first) = served.deltas.first() {
            ttft.push(*first - served.arrived);
        }
        served.deltas.windows(2).for_each(|pair| itl.push(pair[1] - pair[0]));
    }
    let (true_ttft, true_itl) = (ttft.distribution()?, itl.distribution()?);
    let (ttft, itl) = (report.latency_ms.ttft_from_send?, report.latency_ms.itl?);
    Some(ClientError {
        ttft_p50: ttft.p50 - true_ttft.p50,
        ttft_p99: ttft.p99 - true_ttft.p99,
        itl_p50: itl.p50 - true_itl.p50,
        itl_mean: itl.mean - true_itl.mean,
    })
}
