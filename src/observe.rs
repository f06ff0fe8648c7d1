//! Logs to standard error, and traces to an OpenTelemetry collector where the environment names one.

use std::{env, io::IsTerminal};

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_sdk::{Resource, propagation::TraceContextPropagator, trace::SdkTracerProvider};
use tracing_subscriber::{EnvFilter, Layer, layer::SubscriberExt, util::SubscriberInitExt};

// What is logged, and how. (No doc comment: clap would make it the program's description.)
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Logging")]
pub struct LogOptions {
    /// error, warn, info, debug, trace, or per module like quire_engine=debug,info [default: info; for run: warn]
    #[arg(long, value_name = "FILTER", env = "QUIRE_LOG_LEVEL", global = true)]
    log_level: Option<String>,
    #[arg(long, value_enum, default_value_t = LogFormat::Text, env = "QUIRE_LOG_FORMAT", global = true)]
    log_format: LogFormat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LogFormat {
    Text,
    /// One object a line
    Json,
}

/// Sends what is left when it is closed.
pub struct Observing {
    provider: Option<SdkTracerProvider>,
}

impl Observing {
    /// Installs the subscriber of this process. Needs a tokio runtime if traces are exported.
    pub fn start(options: &LogOptions, default_level: &str) -> Result<Self> {
        let filter = options.log_level.as_deref().unwrap_or(default_level);
        let filter = EnvFilter::try_new(filter).with_context(|| format!("--log-level: `{filter}` is not a filter"))?;
        let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_target(false);
        let lines = match options.log_format {
            LogFormat::Text => lines.with_ansi(std::io::stderr().is_terminal()).with_filter(filter).boxed(),
            LogFormat::Json => lines.json().flatten_event(true).with_filter(filter).boxed(),
        };
        opentelemetry::global::set_text_map_propagator(TraceContextPropagator::new());
        let provider = collector_is_named().then(exporter).transpose()?;
        let spans = provider.as_ref().map(|provider| {
            tracing_opentelemetry::layer()
                .with_tracer(provider.tracer("quire"))
                .with_filter(EnvFilter::new("info,h2=off,hyper=off,tonic=off"))
        });
        tracing_subscriber::registry().with(lines).with(spans).try_init().context("can't start logging")?;
        Ok(Self { provider })
    }

    /// Sends the spans that are still here. Blocks for the collector's answer.
    pub fn finish(self) {
        if let Some(provider) = self.provider {
            // The collector being gone is no failure of ours.
            let _ = provider.shutdown();
        }
    }
}

fn collector_is_named() -> bool {
    let named = |name: &str| env::var_os(name).is_some_and(|value| !value.is_empty());
    let disabled = env::var("OTEL_SDK_DISABLED").is_ok_and(|value| value.eq_ignore_ascii_case("true"));
    !disabled && (named("OTEL_EXPORTER_OTLP_ENDPOINT") || named("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"))
}

/// Where and how the `OTEL_*` variables say. The service is called `quire` unless `OTEL_SERVICE_NAME` says otherwise.
fn exporter() -> Result<SdkTracerProvider> {
    let exporter = opentelemetry_otlp::SpanExporter::builder().with_tonic().build().context("can't export traces")?;
    let mut resource = Resource::builder();
    if env::var_os("OTEL_SERVICE_NAME").is_none() {
        resource = resource.with_service_name("quire");
    }
    Ok(SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource.build()).build())
}
