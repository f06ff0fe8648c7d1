//! Names and handles of a worker's metrics.
//!
//! Every figure has our own name (`quire_*`) and, where dashboards and autoscalers expect one, vLLM's (`vllm:*`). Handles
//! are fetched once per engine, so install the recorder before an engine is spawned, with [`BUCKETS`] for the histograms.

use std::time::{Duration, Instant};

use metrics::{Counter, Gauge, Histogram, Label, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};

use crate::{
    config::EngineConfig,
    core::{EngineError, KvFigures},
    scheduler::Counters,
};

/// Latencies of whole requests, first tokens and queues, in seconds: from a tiny model's to an hour's.
pub const LATENCY_BUCKETS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
    2560.0,
];
/// Latencies between tokens and of steps, in seconds.
pub const TOKEN_LATENCY_BUCKETS: &[f64] = &[
    0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0,
    10.0, 40.0,
];
/// Numbers of tokens.
pub const TOKEN_BUCKETS: &[f64] =
    &[1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0, 20000.0, 50000.0, 100000.0, 200000.0];
/// Rows of a step.
pub const STEP_TOKEN_BUCKETS: &[f64] =
    &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0];
/// Choices of a request.
pub const CHOICE_BUCKETS: &[f64] = &[1.0, 2.0, 5.0, 10.0, 20.0];

/// Own name, vLLM's name, what it is.
type Names = (&'static str, &'static str, &'static str);

pub const RUNNING: Names = ("quire_requests_running", "vllm:num_requests_running", "Sequences that hold KV blocks");
pub const WAITING: Names =
    ("quire_requests_waiting", "vllm:num_requests_waiting", "Sequences that wait for KV blocks or a place in the batch");
pub const KV_USAGE: Names = ("quire_kv_cache_usage_ratio", "vllm:kv_cache_usage_perc", "KV blocks in use, 0 to 1");
pub const PREFIX_QUERIES: Names =
    ("quire_prefix_cache_query_tokens_total", "vllm:prefix_cache_queries_total", "Tokens looked up in the prefix index");
pub const PREFIX_HITS: Names = ("quire_prefix_cache_hit_tokens_total", "vllm:prefix_cache_hits_total", "Tokens found in the prefix index");
pub const PREEMPTIONS: Names = ("quire_preemptions_total", "vllm:num_preemptions_total", "Sequences that lost their KV blocks to others");
pub const PROMPT_TOKENS: Names = ("quire_prompt_tokens_total", "vllm:prompt_tokens_total", "Prompt tokens of started requests");
pub const CACHED_TOKENS: Names =
    ("quire_prompt_tokens_cached_total", "vllm:prompt_tokens_cached_total", "Prompt tokens of started requests that were cached");
pub const GENERATION_TOKENS: Names = ("quire_generation_tokens_total", "vllm:generation_tokens_total", "Tokens generated");
pub const FINISHED: Names = ("quire_requests_finished_total", "vllm:request_success_total", "Choices that ended, by reason");
pub const TTFT: Names =
    ("quire_time_to_first_token_seconds", "vllm:time_to_first_token_seconds", "From arrival at the worker to the first token");
pub const ITL: Names = ("quire_inter_token_latency_seconds", "vllm:inter_token_latency_seconds", "Between two tokens of a choice");
pub const E2E: Names = ("quire_request_duration_seconds", "vllm:e2e_request_latency_seconds", "From arrival at the worker to the end");
pub const QUEUE: Names = ("quire_request_queue_seconds", "vllm:request_queue_time_seconds", "From arrival to the first step");
pub const PREFILL: Names = ("quire_request_prefill_seconds", "vllm:request_prefill_time_seconds", "From the first step to the first token");
pub const DECODE: Names = ("quire_request_decode_seconds", "vllm:request_decode_time_seconds", "From the first to the last token");
pub const INFERENCE: Names =
    ("quire_request_inference_seconds", "vllm:request_inference_time_seconds", "From the first step to the last token");
pub const STEP_TOKENS: Names = ("quire_step_tokens", "vllm:iteration_tokens_total", "Rows of a step");
pub const REQUEST_PROMPT: Names = ("quire_request_prompt_tokens", "vllm:request_prompt_tokens", "Prompt tokens of a choice that ended");
pub const REQUEST_GENERATION: Names =
    ("quire_request_generation_tokens", "vllm:request_generation_tokens", "Generated tokens of a choice that ended");
pub const REQUEST_N: Names = ("quire_request_choices", "vllm:request_params_n", "Choices that a request asks for");
pub const REQUEST_MAX_TOKENS: Names = ("quire_request_max_tokens", "vllm:request_params_max_tokens", "Tokens that a request allows");

pub const KV_BLOCKS: &str = "quire_kv_blocks";
pub const KV_BLOCKS_USED: &str = "quire_kv_blocks_used";
pub const PREEMPTED_TOKENS: &str = "quire_preempted_tokens_total";
pub const RECOVERED_TOKENS: &str = "quire_recovered_tokens_total";
pub const FORKED_TOKENS: &str = "quire_forked_tokens_total";
pub const BYPASSES: &str = "quire_admission_bypasses_total";
pub const STEPS: &str = "quire_steps_total";
pub const STEP_SECONDS: &str = "quire_step_seconds";
pub const STEP_FAILURES: &str = "quire_step_failures_total";
pub const RERUNS: &str = "quire_sequence_reruns_total";
pub const ROW_FAILURES: &str = "quire_row_failures_total";
pub const REJECTED: &str = "quire_requests_rejected_total";
pub const WAITING_BY_REASON: &str = "vllm:num_requests_waiting_by_reason";
pub const CACHE_CONFIG: &str = "vllm:cache_config_info";

const GAUGES: &[Names] = &[RUNNING, WAITING, KV_USAGE];
const COUNTERS: &[Names] = &[PREFIX_QUERIES, PREFIX_HITS, PREEMPTIONS, PROMPT_TOKENS, CACHED_TOKENS, GENERATION_TOKENS, FINISHED];
const HISTOGRAMS: &[(Names, &[f64])] = &[
    (TTFT, LATENCY_BUCKETS),
    (ITL, TOKEN_LATENCY_BUCKETS),
    (E2E, LATENCY_BUCKETS),
    (QUEUE, LATENCY_BUCKETS),
    (PREFILL, LATENCY_BUCKETS),
    (DECODE, LATENCY_BUCKETS),
    (INFERENCE, LATENCY_BUCKETS),
    (STEP_TOKENS, STEP_TOKEN_BUCKETS),
    (REQUEST_PROMPT, TOKEN_BUCKETS),
    (REQUEST_GENERATION, TOKEN_BUCKETS),
    (REQUEST_N, CHOICE_BUCKETS),
    (REQUEST_MAX_TOKENS, TOKEN_BUCKETS),
];

/// Every histogram with its buckets, for the recorder.
pub fn buckets() -> impl Iterator<Item = (&'static str, &'static [f64])> {
    let pairs = HISTOGRAMS.iter().flat_map(|(names, buckets)| [(names.0, *buckets), (names.1, *buckets)]);
    pairs.chain([(STEP_SECONDS, TOKEN_LATENCY_BUCKETS)])
}

/// Gives the recorder the help texts. Call once, after installing it.
pub fn describe_metrics() {
    for &(own, vllm, text) in GAUGES {
        describe_gauge!(own, text);
        describe_gauge!(vllm, text);
    }
    for &(own, vllm, text) in COUNTERS {
        describe_counter!(own, text);
        describe_counter!(vllm, text);
    }
    for &((own, vllm, text), _) in HISTOGRAMS {
        describe_histogram!(own, text);
        describe_histogram!(vllm, text);
    }
    describe_gauge!(KV_BLOCKS, "KV blocks there are");
    describe_gauge!(KV_BLOCKS_USED, "KV blocks in use");
    describe_counter!(PREEMPTED_TOKENS, "Computed tokens that were given up by preemption");
    describe_counter!(RECOVERED_TOKENS, "Tokens that preempted sequences found in the prefix index when they came back");
    describe_counter!(FORKED_TOKENS, "Prompt tokens that choices took over from the first of their request");
    describe_counter!(BYPASSES, "Admissions past a sequence that waits for room");
    describe_counter!(STEPS, "Steps run");
    describe_histogram!(STEP_SECONDS, "Duration of a step");
    describe_counter!(STEP_FAILURES, "Steps that failed as a whole");
    describe_counter!(RERUNS, "Sequences that ran again because a step failed");
    describe_counter!(ROW_FAILURES, "Sequences that failed alone");
    describe_counter!(REJECTED, "Requests that were not accepted, by reason");
    describe_gauge!(WAITING_BY_REASON, "Sequences that wait, by reason");
    describe_gauge!(CACHE_CONFIG, "Settings of the KV cache, as labels");
}

/// How a choice ended; a closed set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Stop,
    Length,
    Abort,
    Error,
    Deadline,
    Cancelled,
}

impl Outcome {
    const ALL: [Self; 6] = [Self::Stop, Self::Length, Self::Abort, Self::Error, Self::Deadline, Self::Cancelled];

    /// Our label and vLLM's.
    fn labels(self) -> (&'static str, &'static str) {
        match self {
            Self::Stop => ("stop", "stop"),
            Self::Length => ("length", "length"),
            Self::Abort => ("abort", "abort"),
            Self::Error => ("error", "error"),
            Self::Deadline => ("deadline", "abort"),
            Self::Cancelled => ("cancelled", "abort"),
        }
    }
}

/// When things happened to a choice.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timing {
    pub arrived: Instant,
    pub admitted: Option<Instant>,
    pub first_token: Option<Instant>,
    pub last_token: Option<Instant>,
}

impl Timing {
    pub fn new(arrived: Instant) -> Self {
        Self { arrived, admitted: None, first_token: None, last_token: None }
    }
}

/// A figure under both names.
struct Pair<T>(T, T);

impl Pair<Counter> {
    fn add(&self, value: u64) {
        if value > 0 {
            self.0.increment(value);
            self.1.increment(value);
        }
    }
}

impl Pair<Gauge> {
    fn set(&self, value: f64) {
        self.0.set(value);
        self.1.set(value);
    }
}

impl Pair<Histogram> {
    fn record(&self, value: f64) {
        self.0.record(value);
        self.1.record(value);
    }

    fn between(&self, from: Option<Instant>, to: Option<Instant>) {
        if let (Some(from), Some(to)) = (from, to) {
            self.record(to.saturating_duration_since(from).as_secs_f64());
        }
    }
}

/// Labels of one engine under our own names and under vLLM's.
struct Labels {
    own: Vec<Label>,
    vllm: Vec<Label>,
}

impl Labels {
    fn counter(&self, names: Names) -> Pair<Counter> {
        Pair(counter!(names.0, self.own.iter()), counter!(names.1, self.vllm.iter()))
    }

    fn gauge(&self, names: Names) -> Pair<Gauge> {
        Pair(gauge!(names.0, self.own.iter()), gauge!(names.1, self.vllm.iter()))
    }

    fn histogram(&self, names: Names) -> Pair<Histogram> {
        Pair(histogram!(names.0, self.own.iter()), histogram!(names.1, self.vllm.iter()))
    }

    fn with(labels: &[Label], key: &'static str, value: &'static str) -> Vec<Label> {
        labels.iter().cloned().chain([Label::new(key, value)]).collect()
    }
}

/// Handles of one engine's metrics.
pub(crate) struct EngineMetrics {
    own_labels: Vec<Label>,
    running: Pair<Gauge>,
    waiting: Pair<Gauge>,
    waiting_capacity: Gauge,
    kv_usage: Pair<Gauge>,
    kv_used: Gauge,
    prefix_queries: Pair<Counter>,
    prefix_hits: Pair<Counter>,
    preemptions: Pair<Counter>,
    preempted_tokens: Counter,
    recovered_tokens: Counter,
    forked_tokens: Counter,
    bypasses: Counter,
    prompt_tokens: Pair<Counter>,
    cached_tokens: Pair<Counter>,
    generation_tokens: Pair<Counter>,
    finished: [Pair<Counter>; Outcome::ALL.len()],
    ttft: Pair<Histogram>,
    itl: Pair<Histogram>,
    e2e: Pair<Histogram>,
    queue: Pair<Histogram>,
    prefill: Pair<Histogram>,
    decode: Pair<Histogram>,
    inference: Pair<Histogram>,
    step_tokens: Pair<Histogram>,
    request_prompt: Pair<Histogram>,
    request_generation: Pair<Histogram>,
    request_n: Pair<Histogram>,
    request_max_tokens: Pair<Histogram>,
    steps: Counter,
    step_seconds: Histogram,
    step_failures: Counter,
    reruns: Counter,
    row_failures: Counter,
}

impl EngineMetrics {
    pub fn new(model: &str, kv: &KvFigures, config: &EngineConfig) -> Self {
        let own = vec![Label::new("model_name", model.to_owned())];
        let vllm = vec![Label::new("model_name", model.to_owned()), Label::new("engine", "0")];
        let labels = Labels { own, vllm };
        gauge!(KV_BLOCKS, labels.own.iter()).set(kv.blocks as f64);
        cache_config(&labels.vllm, kv, config);
        gauge!(WAITING_BY_REASON, Labels::with(&labels.vllm, "reason", "deferred")).set(0.0);
        let finished = Outcome::ALL.map(|outcome| {
            let (reason, finished_reason) = outcome.labels();
            let own = counter!(FINISHED.0, Labels::with(&labels.own, "reason", reason));
            Pair(own, counter!(FINISHED.1, Labels::with(&labels.vllm, "finished_reason", finished_reason)))
        });
        let metrics = Self {
            running: labels.gauge(RUNNING),
            waiting: labels.gauge(WAITING),
            waiting_capacity: gauge!(WAITING_BY_REASON, Labels::with(&labels.vllm, "reason", "capacity")),
            kv_usage: labels.gauge(KV_USAGE),
            kv_used: gauge!(KV_BLOCKS_USED, labels.own.iter()),
            prefix_queries: labels.counter(PREFIX_QUERIES),
            prefix_hits: labels.counter(PREFIX_HITS),
            preemptions: labels.counter(PREEMPTIONS),
            preempted_tokens: counter!(PREEMPTED_TOKENS, labels.own.iter()),
            recovered_tokens: counter!(RECOVERED_TOKENS, labels.own.iter()),
            forked_tokens: counter!(FORKED_TOKENS, labels.own.iter()),
            bypasses: counter!(BYPASSES, labels.own.iter()),
            prompt_tokens: labels.counter(PROMPT_TOKENS),
            cached_tokens: labels.counter(CACHED_TOKENS),
            generation_tokens: labels.counter(GENERATION_TOKENS),
            finished,
            ttft: labels.histogram(TTFT),
            itl: labels.histogram(ITL),
            e2e: labels.histogram(E2E),
            queue: labels.histogram(QUEUE),
            prefill: labels.histogram(PREFILL),
            decode: labels.histogram(DECODE),
            inference: labels.histogram(INFERENCE),
            step_tokens: labels.histogram(STEP_TOKENS),
            request_prompt: labels.histogram(REQUEST_PROMPT),
            request_generation: labels.histogram(REQUEST_GENERATION),
            request_n: labels.histogram(REQUEST_N),
            request_max_tokens: labels.histogram(REQUEST_MAX_TOKENS),
            steps: counter!(STEPS, labels.own.iter()),
            step_seconds: histogram!(STEP_SECONDS, labels.own.iter()),
            step_failures: counter!(STEP_FAILURES, labels.own.iter()),
            reruns: counter!(RERUNS, labels.own.iter()),
            row_failures: counter!(ROW_FAILURES, labels.own.iter()),
            own_labels: labels.own,
        };
        metrics.set_load(0, 0, 0, kv.blocks);
        metrics
    }

    pub fn set_load(&self, running: usize, waiting: usize, kv_used: usize, kv_total: usize) {
        self.running.set(running as f64);
        self.waiting.set(waiting as f64);
        self.waiting_capacity.set(waiting as f64);
        self.kv_used.set(kv_used as f64);
        self.kv_usage.set(kv_used as f64 / kv_total.max(1) as f64);
    }

    /// Off the step path: the handle is fetched here.
    pub fn rejected(&self, error: &EngineError) {
        counter!(REJECTED, Labels::with(&self.own_labels, "reason", error.label())).increment(1);
    }

    pub fn request_arrived(&self, choices: usize, max_tokens: usize) {
        self.request_n.record(choices as f64);
        self.request_max_tokens.record(max_tokens as f64);
    }

    pub fn request_started(&self, prompt_tokens: usize, cached: usize) {
        self.prompt_tokens.add(prompt_tokens as u64);
        self.cached_tokens.add(cached as u64);
    }

    /// A token of the choice with this timing.
    pub fn token(&self, timing: &mut Timing, now: Instant) {
        self.generation_tokens.add(1);
        if timing.first_token.is_none() {
            timing.first_token = Some(now);
            self.ttft.between(Some(timing.arrived), Some(now));
        }
        self.itl.between(timing.last_token, Some(now));
        timing.last_token = Some(now);
    }

    pub fn choice_finished(&self, outcome: Outcome, timing: &Timing, prompt_tokens: usize, generated: usize) {
        self.count(outcome);
        self.e2e.between(Some(timing.arrived), Some(Instant::now()));
        self.queue.between(Some(timing.arrived), timing.admitted);
        self.prefill.between(timing.admitted, timing.first_token);
        self.decode.between(timing.first_token, timing.last_token);
        self.inference.between(timing.admitted, timing.last_token);
        self.request_prompt.record(prompt_tokens as f64);
        self.request_generation.record(generated as f64);
    }

    /// Nobody listens any more; its latencies would say nothing.
    pub fn choice_cancelled(&self) {
        self.count(Outcome::Cancelled);
    }

    fn count(&self, outcome: Outcome) {
        if let Some(place) = Outcome::ALL.iter().position(|other| *other == outcome) {
            self.finished[place].add(1);
        }
    }

    /// What the scheduler counted from `before` to `now`.
    pub fn scheduled(&self, before: &Counters, now: &Counters) {
        self.prefix_queries.add(now.queried_tokens - before.queried_tokens);
        self.prefix_hits.add(now.hit_tokens - before.hit_tokens);
        self.preemptions.add(now.preemptions - before.preemptions);
        self.preempted_tokens.increment(now.preempted_tokens - before.preempted_tokens);
        self.recovered_tokens.increment(now.recovered_tokens - before.recovered_tokens);
        self.forked_tokens.increment(now.forked_tokens - before.forked_tokens);
        self.bypasses.increment(now.bypasses - before.bypasses);
    }

    pub fn step(&self, rows: usize, took: Duration) {
        self.steps.increment(1);
        self.step_seconds.record(took.as_secs_f64());
        self.step_tokens.record(rows as f64);
    }

    /// A step failed; `reruns` of its sequences run again.
    pub fn step_failed(&self, reruns: u64) {
        self.step_failures.increment(1);
        self.reruns.increment(reruns);
    }

    pub fn row_failed(&self) {
        self.row_failures.increment(1);
    }
}

fn cache_config(labels: &[Label], kv: &KvFigures, config: &EngineConfig) {
    let mut labels = labels.to_vec();
    for (key, value) in [
        ("block_size", kv.block_size.to_string()),
        ("num_gpu_blocks", kv.blocks.to_string()),
        ("cache_dtype", config.kv_type.name().to_owned()),
        ("enable_prefix_caching", if config.prefix_cache { "True" } else { "False" }.to_owned()),
    ] {
        labels.push(Label::new(key, value));
    }
    gauge!(CACHE_CONFIG, labels).set(1.0);
}
