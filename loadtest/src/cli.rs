//! The flags of `quire bench`, and the order of a run: reach the server, calibrate, warm up, drive, report.

use std::io::Write;
use std::time::Duration;

use rand::SeedableRng;
use rand::rngs::StdRng;
use serde_json::{Map, Value};
use tokio_util::sync::CancellationToken;

use crate::Error;
use crate::calibrate::{PROBES, calibrate};
use crate::client::{Ask, Endpoint, Target};
use crate::drive::{Arrivals, Driven, drive};
use crate::mock::{Mock, Script};
use crate::prompt::{MAX_REQUESTS, Prompts, Source};
use crate::report::{Report, Setup};
use crate::schedule::{Bounds, Process, offsets};
use crate::selftest::client_error;
use crate::tally::Tally;

const SELF_TEST_TTFT: Duration = Duration::from_millis(50);
const SELF_TEST_ITL: Duration = Duration::from_millis(10);

/// Load for any OpenAI-compatible server: closed loop by default, open loop with --rate.
#[derive(Debug, Clone, clap::Args)]
pub struct BenchArgs {
    /// Address of the server, with or without /v1
    #[arg(long, default_value = "http://127.0.0.1:8000")]
    pub url: String,
    /// Model name; the first that the server lists if not given
    #[arg(long)]
    pub model: Option<String>,
    #[arg(long, value_enum, default_value_t = Endpoint::Completions)]
    pub endpoint: Endpoint,
    /// Sent as a bearer token
    #[arg(long, env = "QUIRE_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// Requests at a time [closed loop: 8; open loop: no cap]
    #[arg(long, short = 'c')]
    pub concurrency: Option<usize>,
    /// Stop after so many requests [32 if --duration isn't given either]
    #[arg(long, short = 'n')]
    pub requests: Option<usize>,
    /// Open loop: start so many requests a second, however slow the answers are
    #[arg(long)]
    pub rate: Option<f64>,
    /// Gaps between the arrivals of an open loop
    #[arg(long, value_enum, default_value_t = Process::Poisson)]
    pub arrivals: Process,
    /// Start requests for so many seconds
    #[arg(long)]
    pub duration: Option<f64>,
    /// Tokens of each prompt beside the shared prefix, by the server's own count (within a few per cent)
    #[arg(long, default_value_t = 128)]
    pub input_tokens: u32,
    /// Most tokens of each answer; exactly so many with --ignore-eos
    #[arg(long, default_value_t = 128)]
    pub output_tokens: u32,
    /// Tokens of a prefix that all prompts share
    #[arg(long, default_value_t = 0)]
    pub shared_prefix_tokens: u32,
    /// Send the shared prefix during warm-up too, so that it may be cached when the clock starts
    #[arg(long)]
    pub warm_prefix: bool,
    /// Take prompts from this text file, not from the built-in word list
    #[arg(long, value_name = "FILE")]
    pub text: Option<String>,
    /// Go on after the end-of-sequence token, where the server can
    #[arg(long)]
    pub ignore_eos: bool,
    #[arg(long, default_value_t = 0.0)]
    pub temperature: f64,
    /// JSON object laid over every request body
    #[arg(long, value_name = "JSON")]
    pub extra: Option<String>,
    /// Requests before the clock starts, not counted
    #[arg(long, default_value_t = 1)]
    pub warmup: usize,
    /// Fixes prompts and arrivals [drawn, and reported]; a server that caches prefixes has then seen the prompts of an earlier run
    #[arg(long)]
    pub seed: Option<u64>,
    /// Seconds for one request
    #[arg(long, default_value_t = 300.0)]
    pub timeout: f64,
    /// Seconds for the whole run; what isn't back by then is cut off
    #[arg(long, default_value_t = 600.0)]
    pub max_duration: f64,
    /// Open loop: the run is invalid if the client's own p99 lateness exceeds this
    #[arg(long, default_value_t = 10.0)]
    pub max_lag_ms: f64,
    /// Write the report as JSON to a file, or to standard output (-) in place of the table
    #[arg(long, value_name = "FILE|-")]
    pub json: Option<String>,
    /// Drive a built-in mock server (first token after 50 ms, then one every 10 ms) and report the client's own error on this machine
    #[arg(long)]
    pub self_test: bool,
}

/// Runs until all is done, the time is up or Ctrl-C; writes the report where `args` say. A run with failures, or an invalid one, is a
/// report all the same: see [`Report::is_clean`].
pub async fn run(mut args: BenchArgs) -> Result<Report, Error> {
    let cancel = CancellationToken::new();
    let mock = match args.self_test {
        true => Some(Mock::start(Script { ttft: SELF_TEST_TTFT, itl: SELF_TEST_ITL, ..Script::default() }).await?),
        false => None,
    };
    if let Some(mock) = &mock {
        args.url = mock.url();
    }
    let mut report = tokio::select! {
        report = measure(&args, &cancel) => report?,
        // Never ends by itself; a signal only raises the token, and the report still comes.
        never = raise_on_interrupt(&cancel) => match never {},
    };
    if let Some(mock) = &mock {
        let before = PROBES + args.warmup;
        report.client_error = client_error(mock.served().get(before..).unwrap_or_default(), &report);
    }
    write(&args, &report, &mut std::io::stdout())?;
    Ok(report)
}

async fn raise_on_interrupt(cancel: &CancellationToken) -> std::convert::Infallible {
    if tokio::signal::ctrl_c().await.is_ok() {
        cancel.cancel();
    }
    std::future::pending().await
}

/// The measurement alone: prints nothing, ends early when `cancel` is raised.
pub async fn measure(args: &BenchArgs, cancel: &CancellationToken) -> Result<Report, Error> {
    check(args)?;
    let extra: Map<String, Value> = match &args.extra {
        Some(json) => serde_json::from_str(json).map_err(|error| Error::Args(format!("--extra must be a JSON object: {error}")))?,
        None => Map::new(),
    };
    let source = match &args.text {
        Some(path) => Source::from_file(path)?,
        None => Source::builtin(),
    };
    let seed = args.seed.unwrap_or_else(|| u64::from(rand::random::<u32>()));
    let mut target = Target::new(&args.url, args.endpoint, args.api_key.as_deref(), Duration::from_secs_f64(args.timeout))?;
    let model = match &args.model {
        Some(model) => model.clone(),
        None => target.first_model().await?,
    };
    let ask = Ask { model, max_tokens: args.output_tokens, temperature: args.temperature, ignore_eos: args.ignore_eos, extra };
    target.ask(&ask);

    let mut prompts = Prompts::new(source, seed, 0);
    let calibration = calibrate(&target, &prompts, args.input_tokens).await?;
    prompts.set_body(calibration.body_chars(args.input_tokens));
    prompts.share(calibration.chars(args.shared_prefix_tokens));
    warm_up(args, &target, &prompts, calibration.body_chars(args.input_tokens), cancel).await;

    let (arrivals, offered) = arrivals(args, seed);
    let setup = Setup {
        url: target.url(),
        endpoint: args.endpoint,
        ask,
        concurrency: match &arrivals {
            Arrivals::Closed { concurrency, .. } => Some(*concurrency),
            Arrivals::Open { cap, .. } => *cap,
        },
        requests: requests(args),
        duration_s: args.duration,
        rate: args.rate,
        arrivals: args.rate.map(|_| args.arrivals),
        input_tokens: args.input_tokens,
        shared_prefix_tokens: args.shared_prefix_tokens,
        warmup: args.warmup,
        seed,
        timeout_s: args.timeout,
        max_duration_s: args.max_duration,
        max_lag_ms: args.max_lag_ms,
        calibration,
    };
    let mut tally = Tally::default();
    let limit = Duration::from_secs_f64(args.max_duration);
    let driven: Driven = drive(&target, prompts, &arrivals, limit, cancel, |finished| tally.take(&finished)).await;
    Ok(Report::new(setup, offered.unwrap_or(driven.sent), &driven, &tally))
}

/// The table or JSON to `out`, JSON to a file.
pub fn write(args: &BenchArgs, report: &Report, out: &mut impl Write) -> Result<(), Error> {
    let failed = |path: &str| {
        let path = path.to_owned();
        move |source| Error::Write { path, source }
    };
    match args.json.as_deref() {
        Some("-") => out.write_all(report.json().as_bytes()).map_err(failed("-")),
        Some(path) => {
            std::fs::write(path, report.json()).map_err(failed(path))?;
            out.write_all(report.table().as_bytes()).map_err(failed("-"))
        }
        None => out.write_all(report.table().as_bytes()).map_err(failed("-")),
    }
}

/// Failures here are seen again in the run; the probes of the calibration have already shown that the server answers.
async fn warm_up(args: &BenchArgs, target: &Target, prompts: &Prompts, body_chars: usize, cancel: &CancellationToken) {
    let prefix = if args.warm_prefix { prompts.shared() } else { "" };
    for index in 0..args.warmup {
        let prompt = format!("{prefix}{}", prompts.alone(MAX_REQUESTS + PROBES + index, body_chars));
        tokio::select! {
            () = cancel.cancelled() => return,
            _ = target.send(target.body(prompt, None)) => {}
        }
    }
}

/// The bound on requests: 32 if no bound is given.
fn requests(args: &BenchArgs) -> Option<usize> {
    args.requests.or(if args.duration.is_some() { None } else { Some(32) })
}

/// What to send when, and how many that is, where it is known before.
fn arrivals(args: &BenchArgs, seed: u64) -> (Arrivals, Option<usize>) {
    let span = args.duration.map(Duration::from_secs_f64);
    match args.rate {
        Some(rate) => {
            let bounds = Bounds { arrivals: Some(requests(args).unwrap_or(MAX_REQUESTS)), span };
            let offsets = offsets(args.arrivals, rate, bounds, &mut StdRng::seed_from_u64(seed));
            let count = offsets.len();
            (Arrivals::Open { offsets, cap: args.concurrency }, Some(count))
        }
        None => {
            let bound = requests(args);
            let closed = Arrivals::Closed { concurrency: args.concurrency.unwrap_or(8), requests: bound.unwrap_or(MAX_REQUESTS), span };
            (closed, bound.filter(|_| span.is_none()))
        }
    }
}

fn check(args: &BenchArgs) -> Result<(), Error> {
    let fail = |text: String| Err(Error::Args(text));
    let positive = |name: &str, value: Option<f64>, most: f64| match value {
        Some(value) if !(value > 0.0 && value <= most) => fail(format!("--{name} must be above 0 and at most {most}, got {value}")),
        _ => Ok(()),
    };
    positive("rate", args.rate, 100_000.0)?;
    positive("duration", args.duration, 86_400.0)?;
    positive("timeout", Some(args.timeout), 86_400.0)?;
    positive("max-duration", Some(args.max_duration), 86_400.0)?;
    if args.concurrency.is_some_and(|count| count == 0 || count > 65_536) {
        return fail("--concurrency must be 1 to 65536".into());
    }
    if args.requests.is_some_and(|count| count == 0 || count > MAX_REQUESTS) {
        return fail(format!("--requests must be 1 to {MAX_REQUESTS}"));
    }
    if args.warmup > 10_000 {
        return fail("--warmup must be at most 10000".into());
    }
    if let (Some(rate), Some(duration)) = (args.rate, args.duration)
        && args.requests.is_none()
        && rate * duration > MAX_REQUESTS as f64 * 0.99
    {
        return fail(format!("--rate x --duration is beyond the {MAX_REQUESTS} requests of one run"));
    }
    if args.output_tokens == 0 || args.input_tokens == 0 {
        return fail("--input-tokens and --output-tokens must be at least 1".into());
    }
    Ok(())
}
