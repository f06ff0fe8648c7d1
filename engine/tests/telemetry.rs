//! What the metrics say, as a scraper reads it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::sync::atomic::Ordering;

use futures::future::join_all;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};
use quire_engine::telemetry;
use quire_proto::worker::v1::{FinishReason, GenerateRequest};
use support::{at_rest, engine, listen, prompt, request};

/// The value of the one series that starts with `series` and has all of `labels`.
fn value(text: &str, series: &str, labels: &[&str]) -> f64 {
    let matching: Vec<_> = text
        .lines()
        .filter(|line| line.split(['{', ' ']).next() == Some(series) && labels.iter().all(|label| line.contains(label)))
        .map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap())
        .collect();
    assert_eq!(matching.len(), 1, "{series} {labels:?} in:\n{text}");
    matching[0]
}

#[tokio::test]
async fn counters_are_sums_of_usage_and_gauges_rest_at_zero() {
    let mut builder = PrometheusBuilder::new();
    for (name, buckets) in telemetry::buckets() {
        builder = builder.set_buckets_for_metric(Matcher::Full(name.to_owned()), buckets).unwrap();
    }
    let recorder = builder.build_recorder();
    let scrape = recorder.handle();
    let (handle, switches) = metrics::with_local_recorder(&recorder, || {
        telemetry::describe_metrics();
        engine(24, |config| config.max_sequences = 6)
    });
    switches.hold.store(true, Ordering::Relaxed);
    let open: Vec<_> =
        (0..10).map(|i| handle.generate(GenerateRequest { n: 1 + i % 2, ..request(prompt(i, 30 + i as usize), 70) }).unwrap()).collect();
    let dropped = handle.generate(request(prompt(99, 30), 70)).unwrap();
    let text = scrape.render();
    let running = value(&text, "vllm:num_requests_running", &[r#"model_name="fake""#, r#"engine="0""#]);
    assert_eq!(running + value(&text, "vllm:num_requests_waiting", &[]), 16.0, "true while a step is stuck");
    drop(dropped);
    switches.hold.store(false, Ordering::Relaxed);
    let said = join_all(open.into_iter().map(listen)).await;
    at_rest(&handle).await;

    let text = scrape.render();
    for gauge in ["running", "waiting"] {
        assert_eq!(value(&text, &format!("quire_requests_{gauge}"), &[]), 0.0);
        assert_eq!(value(&text, &format!("vllm:num_requests_{gauge}"), &[]), 0.0);
    }
    assert_eq!(value(&text, "vllm:kv_cache_usage_perc", &[]), 0.0);
    let generated: u32 = said.iter().flat_map(|said| &said.finished).map(|finished| finished.generated_tokens).sum();
    let prompts: u32 = said.iter().map(|said| said.started.as_ref().unwrap().prompt_tokens).sum();
    let cached: u32 = said.iter().map(|said| said.started.as_ref().unwrap().cached_tokens).sum();
    for (own, vllm, want) in [
        ("quire_generation_tokens_total", "vllm:generation_tokens_total", generated),
        ("quire_prompt_tokens_total", "vllm:prompt_tokens_total", prompts),
        ("quire_prompt_tokens_cached_total", "vllm:prompt_tokens_cached_total", cached),
    ] {
        assert_eq!((value(&text, own, &[]), value(&text, vllm, &[])), (f64::from(want), f64::from(want)), "{own}");
    }
    for (reason, label) in [(FinishReason::Stop, "stop"), (FinishReason::Length, "length")] {
        let want = said.iter().flat_map(|said| &said.finished).filter(|finished| finished.reason() == reason).count();
        assert_eq!(value(&text, "vllm:request_success_total", &[&format!(r#"finished_reason="{label}""#)]), want as f64);
        assert_eq!(value(&text, "quire_requests_finished_total", &[&format!(r#"reason="{label}""#)]), want as f64);
    }
    assert_eq!(value(&text, "quire_requests_finished_total", &[r#"reason="cancelled""#]), 1.0);
    assert_eq!(value(&text, "vllm:num_preemptions_total", &[]), handle.load().preemptions as f64);
    assert!(handle.load().preemptions > 0);
    assert_eq!(value(&text, "vllm:time_to_first_token_seconds_count", &[]), 15.0);
    assert_eq!(value(&text, "vllm:e2e_request_latency_seconds_count", &[]), 15.0);
    assert_eq!(value(&text, "vllm:inter_token_latency_seconds_count", &[]), f64::from(generated) - 15.0);
    assert_eq!(value(&text, "vllm:iteration_tokens_total_count", &[]), handle.load().steps as f64);
    assert_eq!(value(&text, "vllm:cache_config_info", &[r#"block_size="16""#, r#"num_gpu_blocks="24""#]), 1.0);
    assert!(text.contains(r#"vllm:time_to_first_token_seconds_bucket{model_name="fake",engine="0",le="0.001"}"#), "{text}");
}
