//! The one configuration of a worker.

use std::time::Duration;

use quire_kernels::{backend::KvType, quant::TensorType};

use crate::scheduler::Policy;

/// Which arithmetic runs the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BackendChoice {
    /// Fused, packed, dispatched over the CPU's instruction sets.
    #[default]
    Cpu,
    /// Scalar f32: the definition; slow.
    Reference,
}

/// Settings of a worker; sizes of 0 mean "choose".
#[derive(Clone, Debug)]
pub struct EngineConfig {
    pub backend: BackendChoice,
    /// Compute threads. 0: one per physical core that this process may use.
    pub threads: usize,
    /// Type that matrices are packed in, where that takes fewer bytes than their own. `None`: as they are stored.
    pub quantize: Option<TensorType>,
    pub kv_type: KvType,
    /// Tokens per KV block.
    pub block_size: usize,
    /// Memory for keys and values, in bytes. 0: enough for a few full contexts, within a share of free memory.
    pub kv_bytes: u64,
    /// Number of KV blocks, instead of `kv_bytes`. 0: by bytes.
    pub kv_blocks: usize,
    /// Longest sequence. 0: what the model was trained for, if the KV memory holds it.
    pub max_context: usize,
    /// Sequences that run at a time.
    pub max_sequences: usize,
    /// Rows that one step may compute.
    pub max_batched_tokens: usize,
    /// Prompt rows of one sequence in one step. 0: as many as the step may compute.
    pub max_prefill_chunk: usize,
    /// Sequences that may wait beyond the ones that can run.
    pub max_waiting: usize,
    /// Prompt tokens that may wait. 0: sixteen times what the KV memory holds.
    pub max_waiting_tokens: usize,
    /// Share of the blocks that admission keeps free for the growth of running sequences.
    pub watermark: f64,
    pub prefix_cache: bool,
    /// What the model's author recommends goes into its card, for requests that don't say.
    pub author_sampling: bool,
    /// Order, bypass, growth: who waits for whom.
    pub policy: Policy,
    /// Time between tokens that running streams keep while prompts are computed. `None`: prompts take what a step has left.
    pub itl_target: Option<Duration>,
    /// Steps that are planned and submitted while one is under way: 0 or 1. Pays where the device computes by itself.
    pub step_ahead: usize,
    /// Work is waiting but no step has finished for this long: not ready.
    pub stall_after: Duration,
    /// After so long it is given up: the process should end, and another begin. `None`: it never is.
    pub give_up_after: Option<Duration>,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            backend: BackendChoice::Cpu,
            threads: 0,
            quantize: None,
            kv_type: KvType::F16,
            block_size: 16,
            kv_bytes: 0,
            kv_blocks: 0,
            max_context: 0,
            max_sequences: 64,
            max_batched_tokens: 512,
            max_prefill_chunk: 0,
            max_waiting: 1024,
            max_waiting_tokens: 0,
            watermark: 0.01,
            prefix_cache: true,
            author_sampling: true,
            policy: Policy::default(),
            itl_target: None,
            step_ahead: 0,
            stall_after: Duration::from_secs(60),
            give_up_after: Some(Duration::from_secs(300)),
        }
    }
}
