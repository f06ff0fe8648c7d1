//! Every limit and switch of a router process, in one type. Values come from flags, environment and file in `src/`;
//! this module owns their names, defaults and meaning, and reads nothing itself.

use std::time::Duration;

/// Configuration of a router.
#[derive(Clone, Debug, Default)]
pub struct RouterConfig {
    pub core: CoreConfig,
    pub fleet: FleetConfig,
    pub face: FaceConfig,
}

/// Limits of the HTTP and gRPC faces.
#[derive(Clone, Debug)]
pub struct FaceConfig {
    /// Bytes of a request body above which it is refused (413).
    pub max_body_bytes: usize,
    /// Key that clients must send as `Authorization: Bearer KEY`. None: everyone may ask.
    pub api_key: Option<String>,
    /// Prompts in one completions call.
    pub max_prompts: usize,
    /// Interval of SSE comments while nothing else is sent.
    pub keep_alive: Duration,
    /// `max_tokens` of a completions call that has none.
    pub completion_max_tokens: u32,
}

impl Default for FaceConfig {
    fn default() -> Self {
        Self { max_body_bytes: 32 << 20, api_key: None, max_prompts: 1024, keep_alive: Duration::from_secs(15), completion_max_tokens: 16 }
    }
}

/// Limits of the request core.
#[derive(Clone, Debug)]
pub struct CoreConfig {
    /// Requests between admission and their last event; one more is refused (429).
    pub max_in_flight: usize,
    /// What a refused client is told to wait, in seconds.
    pub retry_after_s: u32,
    /// Largest `n`.
    pub max_choices: u32,
    /// Number of stop strings, and bytes of one.
    pub max_stops: usize,
    pub max_stop_bytes: usize,
    /// Stop token ids, and logit biases, of one request.
    pub max_stop_ids: usize,
    pub max_logit_biases: usize,
    /// Prompts tokenized at the same time off the I/O threads.
    pub tokenizer_threads: usize,
    /// Workers tried for one request, the first included, before it fails.
    pub max_attempts: u32,
}

impl Default for CoreConfig {
    fn default() -> Self {
        Self {
            max_in_flight: 1024,
            retry_after_s: 1,
            max_choices: 128,
            max_stops: 32,
            max_stop_bytes: 1024,
            max_stop_ids: 256,
            max_logit_biases: 1024,
            tokenizer_threads: std::thread::available_parallelism().map_or(1, usize::from),
            max_attempts: 3,
        }
    }
}

/// How workers are watched.
#[derive(Clone, Debug)]
pub struct FleetConfig {
    /// Interval of a worker's load reports. A worker that is silent for several of them counts as gone.
    pub watch_interval: Duration,
    /// A worker must describe itself, and send each artefact, within this.
    pub describe_timeout: Duration,
    /// First and longest pause between attempts to reach a worker that is gone.
    pub backoff_min: Duration,
    pub backoff_max: Duration,
}

impl Default for FleetConfig {
    fn default() -> Self {
        Self {
            watch_interval: Duration::from_secs(1),
            describe_timeout: Duration::from_secs(10),
            backoff_min: Duration::from_millis(100),
            backoff_max: Duration::from_secs(5),
        }
    }
}
