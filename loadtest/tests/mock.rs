//! The client against a server whose times and faults are known, over real sockets.
#![allow(clippy::unwrap_used, reason = "a test's helper may fail the test")]

use std::time::Duration;

use clap::Parser;
use quire_loadtest::cli::{BenchArgs, measure, write};
use quire_loadtest::mock::{Fault, Mock, Script};
use quire_loadtest::selftest::client_error;
use quire_loadtest::tally::{Distribution, TokenSource};
use quire_loadtest::{Error, Report};
use tokio_util::sync::CancellationToken;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    bench: BenchArgs,
}

fn args(url: &str, flags: &str) -> BenchArgs {
    Cli::parse_from(["bench", "--url", url, "--seed", "7"].into_iter().chain(flags.split_whitespace())).bench
}

async fn bench(mock: &Mock, flags: &str) -> Report {
    let report = measure(&args(&mock.url(), flags), &CancellationToken::new()).await.unwrap();
    eprintln!("{}", report.table());
    report
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn near(what: &str, got: f64, want: f64, tolerance: f64) {
    assert!((got - want).abs() <= tolerance, "{what}: {got}, not {want} within {tolerance}");
}

/// Stated error of the medians: 5 ms, which allows for a machine that builds something else meanwhile; the p99 is not bounded there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_client_measures_what_the_server_did() {
    for endpoint in ["completions", "chat"] {
        let mock = Mock::start(Script { ttft: ms(60), itl: ms(15), ..Script::default() }).await.unwrap();
        let report = bench(&mock, &format!("--endpoint {endpoint} -c 4 -n 24 --output-tokens 20 --ignore-eos --warmup 2")).await;
        assert_eq!((report.requests.ok, report.requests.failed, report.requests.unfinished), (24, 0, 0));
        assert!(report.is_clean());
        let served = mock.served();
        assert_eq!(served.len(), 2 + 2 + 24);
        let error = client_error(&served[4..], &report).unwrap();
        near("error of the TTFT median", error.ttft_p50, 0.0, 5.0);
        near("error of the ITL median", error.itl_p50, 0.0, 5.0);
        near("error of the ITL mean", error.itl_mean, 0.0, 2.0);
        // And the script itself, which a busy machine can only make later.
        let latency = report.latency_ms;
        let ttft = latency.ttft.unwrap();
        assert!(ttft.p50 >= 60.0 && ttft.p50 < 85.0 && ttft.n == 24, "{ttft:?}");
        let itl = latency.itl.unwrap();
        assert!(itl.mean > 14.0 && itl.mean < 18.0 && itl.n == 24 * 19, "{itl:?}");
        near("TPOT", latency.tpot.unwrap().p50, 15.0, 2.0);
        near("E2E - TTFT", latency.e2e.unwrap().mean - ttft.mean, 19.0 * 15.0, 25.0);
        assert_eq!((report.tokens.output, report.tokens.counted_by), (24 * 20, TokenSource::Usage));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_server_is_not_measured_as_a_fast_one() {
    // 10 requests a second meet 500 ms of service, one at a time: request i waits for i x 400 ms. Once the server has the one slot,
    // once the client has: the second is where a clock inside the semaphore reports half a second.
    let slow = Script { ttft: ms(500), itl: ms(0), ..Script::default() };
    let (one_slot, many) = (Mock::start(Script { slots: Some(1), ..slow.clone() }).await.unwrap(), Mock::start(slow).await.unwrap());
    let flags = "--rate 10 --arrivals constant -n 12 --output-tokens 1 --warmup 0";
    let capped = format!("{flags} -c 1");
    let (server, client) = tokio::join!(bench(&one_slot, flags), bench(&many, &capped));
    for report in [&server, &client] {
        assert_eq!((report.requests.offered, report.requests.ok), (12, 12));
        let latency = report.latency_ms;
        assert!(latency.ttft.unwrap().p99 > 4_000.0 && latency.e2e.unwrap().p99 > 4_000.0, "{latency:?}");
        near("median of the waits", latency.e2e.unwrap().p50, 500.0 + 5.0 * 400.0, 300.0);
        assert!(report.wall_s > 5.5);
    }
    assert!(client.latency_ms.e2e_from_send.unwrap().p99 < 800.0);
    assert!(client.schedule.unwrap().waited.unwrap().p99 > 3_500.0);
    assert!(server.latency_ms.e2e_from_send.unwrap().p99 > 4_000.0);
    // Waiting for the cap is the load's doing, not lateness of the client.
    assert!(client.schedule.unwrap().lag.unwrap().p50 < 10.0, "{:?}", client.schedule);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn arrivals_reach_the_server_when_the_schedule_says() {
    let mock = Mock::start(Script { ttft: ms(1), itl: ms(0), ..Script::default() }).await.unwrap();
    let report = bench(&mock, "--rate 100 -n 300 --output-tokens 1 --warmup 0 --max-lag-ms 100").await;
    let schedule = report.schedule.unwrap();
    assert_eq!((report.requests.ok, report.requests.offered), (300, 300));
    near("rate", schedule.achieved_rate.unwrap(), 100.0, 20.0);
    assert!(schedule.lag.unwrap().p50 < 5.0, "{:?}", schedule.lag);
    // At the server, the gaps are exponential still: their deviation is their mean, and that is the client's.
    let arrived: Vec<_> = mock.served()[2..].iter().map(|served| served.arrived).collect();
    let gaps: Vec<f64> = arrived.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect();
    let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
    let deviation = (gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64).sqrt();
    near("deviation / mean of the gaps", deviation / mean, 1.0, 0.25);
    near("mean gap x achieved rate", mean * schedule.achieved_rate.unwrap(), 1.0, 0.05);
}

#[tokio::test]
async fn a_late_client_makes_the_run_invalid() {
    let mock = Mock::start(Script { ttft: ms(1), itl: ms(0), ..Script::default() }).await.unwrap();
    // No client is within a nanosecond.
    let report = bench(&mock, "--rate 50 -n 20 --output-tokens 1 --max-lag-ms 0.000001").await;
    assert!(!report.verdict.valid && report.verdict.reasons[0].contains("late"), "{:?}", report.verdict);
    assert!(!report.is_clean() && report.table().contains("INVALID"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_fault_is_counted_as_what_it_is() {
    let cases = [
        (Fault::Status(503), "http_503"),
        (Fault::Status(400), "http_400"),
        (Fault::InBand, "in_band_error"),
        (Fault::Truncate, "truncated"),
        (Fault::Break, "broken_connection"),
        (Fault::Empty, "empty"),
        (Fault::Garbage, "protocol"),
        (Fault::NotAStream, "protocol"),
        (Fault::Hang, "timeout"),
    ];
    for (fault, kind) in cases {
        // Two probes, then good and bad in turn.
        let script = Script { ttft: ms(2), itl: ms(1), faults: vec![None, Some(fault)], ..Script::default() };
        let mock = Mock::start(Script { faults: [vec![None, None], script.faults.repeat(6)].concat(), ..script.clone() }).await.unwrap();
        let report = bench(&mock, "-c 1 -n 12 --output-tokens 4 --warmup 0 --timeout 1").await;
        assert_eq!((report.requests.ok, report.requests.failed), (6, 6), "{fault:?}");
        assert_eq!((report.failures.len(), report.failures[0].kind.as_str(), report.failures[0].count), (1, kind, 6), "{fault:?}");
        assert_eq!(report.tokens.output, 6 * 4, "tokens of failures count for nothing");
        assert_eq!(report.latency_ms.e2e.unwrap().n, 6);
        assert!(!report.is_clean());
    }
}

#[tokio::test]
async fn tokens_are_counted_by_usage_and_the_report_says_if_not() {
    let eight = Script { ttft: ms(2), itl: ms(8), tokens_per_delta: 8, ..Script::default() };
    let mock = Mock::start(eight.clone()).await.unwrap();
    let report = bench(&mock, "-c 2 -n 4 --output-tokens 64 --warmup 0").await;
    assert_eq!((report.tokens.output, report.tokens.counted_by), (4 * 64, TokenSource::Usage));
    // 8 deltas: 7 gaps of 8 ms over 63 tokens.
    near("TPOT", report.latency_ms.tpot.unwrap().p50, 56.0 / 63.0, 0.5);
    assert_eq!(report.latency_ms.itl.unwrap().n, 4 * 7);

    let mock = Mock::start(Script { usage: false, ..eight }).await.unwrap();
    let report = bench(&mock, "-c 2 -n 4 --output-tokens 64 --warmup 0").await;
    assert_eq!((report.tokens.output, report.tokens.counted_by), (4 * 8, TokenSource::Deltas));
    assert!(report.notes.iter().any(|note| note.contains("no usage")), "{:?}", report.notes);
}

#[tokio::test]
async fn prompts_have_the_length_asked_for_by_the_servers_count_and_share_only_the_prefix() {
    let mock = Mock::start(Script { ttft: ms(1), itl: ms(0), ..Script::default() }).await.unwrap();
    let report = bench(&mock, "-c 4 -n 20 --input-tokens 300 --shared-prefix-tokens 200 --warm-prefix --output-tokens 1 --warmup 1").await;
    near("prompt tokens", report.tokens.prompt_mean, 500.0, 20.0);
    let served = mock.served();
    // Two probes without the prefix, a warm-up with it.
    let prompts: Vec<&str> = served[2..].iter().map(|served| served.prompt.as_str()).collect();
    assert_eq!(prompts.len(), 21);
    let shared = prompts
        .iter()
        .skip(1)
        .fold(prompts[0].len(), |len, prompt| len.min(prompt.bytes().zip(prompts[0].bytes()).take_while(|(a, b)| a == b).count()));
    let words = prompts[0][..shared].split_whitespace().count();
    assert!((190..=212).contains(&words), "{words} words are shared");
    let mut heads: Vec<&str> = prompts.iter().map(|prompt| prompt[shared..].split(' ').next().unwrap()).collect();
    heads.sort_unstable();
    heads.dedup();
    assert_eq!(heads.len(), 21, "no two prompts are alike after the prefix, from its next word on");
    assert!(served.iter().skip(3).all(|served| served.max_tokens == 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_interrupted_run_reports_what_it_has() {
    let mock = Mock::start(Script { ttft: ms(100), itl: ms(0), ..Script::default() }).await.unwrap();
    let cancel = CancellationToken::new();
    let args = args(&mock.url(), "-c 2 -n 1000 --output-tokens 1 --warmup 0");
    let stop = async {
        tokio::time::sleep(ms(1_000)).await;
        cancel.cancel();
    };
    let (report, ()) = tokio::join!(measure(&args, &cancel), stop);
    let report = report.unwrap();
    assert!(report.interrupted && !report.verdict.valid);
    assert!((2..30).contains(&report.requests.ok), "{:?}", report.requests);
    assert_eq!(report.requests.failed, 0);
    assert_eq!(report.requests.sent as u64, report.requests.ok + report.requests.unfinished);
    assert!(report.requests.unfinished <= 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_time_limit_cuts_off_and_an_open_loop_is_then_invalid() {
    let mock = Mock::start(Script { ttft: ms(1_000), ..Script::default() }).await.unwrap();
    let open = args(&mock.url(), "--rate 20 -n 10 --output-tokens 1 --warmup 0 --max-duration 4");
    let began = std::time::Instant::now();
    // The probes take 1 s each, before the clock of the run starts; then every arrival ends 1 s after its start, before the limit.
    let report = measure(&open, &CancellationToken::new()).await.unwrap();
    assert!(report.verdict.reasons.iter().all(|reason| !reason.contains("time limit")), "{:?}", report.verdict);
    let cut = args(&mock.url(), "--rate 20 -n 10 --output-tokens 1 --warmup 0 --max-duration 0.8");
    let report = measure(&cut, &CancellationToken::new()).await.unwrap();
    assert_eq!((report.requests.ok, report.requests.offered), (0, 10));
    assert!(report.requests.unfinished > 0 && !report.verdict.valid, "{:?}", report.verdict);
    assert!(began.elapsed() < Duration::from_secs(20));
}

#[tokio::test]
async fn what_stops_a_run_before_it_begins_is_a_clear_error() {
    let cancel = CancellationToken::new();
    let run = async |url: &str, flags: &str| measure(&args(url, flags), &cancel).await.map(|_| ()).unwrap_err();
    // A port that was free a moment ago.
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    assert!(matches!(run(&format!("http://{free}"), "").await, Error::Unreachable { .. }));
    assert!(matches!(run(&format!("http://{free}"), "--model m").await, Error::FirstRequest(_)));
    assert!(matches!(run("https://localhost", "").await, Error::Https(_)));
    assert!(matches!(run("http://localhost", "--rate 0").await, Error::Args(_)));
    assert!(matches!(run("http://localhost", "-c 0").await, Error::Args(_)));
    assert!(matches!(run("http://localhost", "--rate 100000 --duration 100").await, Error::Args(_)));
    assert!(matches!(run("http://localhost", "--extra [1]").await, Error::Args(_)));
    assert!(matches!(run("http://localhost", "--text /nonexistent").await, Error::Text { .. }));
}

#[tokio::test]
async fn the_report_is_written_as_json_and_as_a_table() {
    let mock = Mock::start(Script { ttft: ms(1), itl: ms(1), ..Script::default() }).await.unwrap();
    let path = std::env::temp_dir().join(format!("quire-loadtest-report-{}.json", std::process::id()));
    let mut args = args(&mock.url(), "-c 2 -n 6 --output-tokens 3 --api-key secret-key");
    args.json = Some(path.to_str().unwrap().to_owned());
    let report = measure(&args, &CancellationToken::new()).await.unwrap();
    let mut out = Vec::new();
    write(&args, &report, &mut out).unwrap();
    let (table, json) = (String::from_utf8(out).unwrap(), std::fs::read_to_string(&path).unwrap());
    std::fs::remove_file(&path).unwrap();
    assert!(table.contains("6 ok, 0 failed") && table.contains("TTFT") && table.contains("seed 7"), "{table}");
    assert!(!json.contains("secret-key") && !table.contains("secret-key"));
    let value: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(value["requests"]["ok"], 6);
    assert_eq!(value["setup"]["seed"], 7);
    assert_eq!(value["tokens"]["counted_by"], "usage");
    let ttft: Option<Distribution> = report.latency_ms.ttft;
    assert_eq!(value["latency_ms"]["ttft"]["p50"].as_f64(), ttft.map(|ttft| ttft.p50));

    args.json = Some("-".into());
    let mut out = Vec::new();
    write(&args, &report, &mut out).unwrap();
    assert!(serde_json::from_slice::<serde_json::Value>(&out).is_ok(), "nothing but JSON goes out");
}
