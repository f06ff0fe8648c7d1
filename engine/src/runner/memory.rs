//! How many KV blocks there are, and what follows from it.
//!
//! Decided before anything is allocated, and printed. Settings that can't hold are refused with the figures that would.
//! Pure: the caller says how much memory is available.

use std::fmt;

use quire_kernels::{
    backend::{CHUNK, KvShape},
    plan::StepLimits,
};

use crate::{
    cache::{Footprint, GroupKind},
    config::EngineConfig,
    model::{CacheShape, Description, scratch_bytes},
};

/// Most top log-probabilities that a row may ask for.
const TOP_LOGPROBS: usize = 20;
/// Logit rows for scoring prompts, beyond one for each sequence, cost at most this much.
const SCORING_BYTES: usize = 256 << 20;
const SCORING_ROWS: usize = 64;
/// By default the cache holds this many of the longest sequences, or this many tokens, whichever is more.
const FULL_CONTEXTS: usize = 4;
const LEAST_TOKENS: usize = 65_536;
/// Share of the free memory that the cache takes at most by default.
const FREE_SHARE: u64 = 4;

/// Where a worker's memory goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Shape of the cache, of the first layers where they differ: blocks, tokens and layers per block, type.
    pub kv: KvShape,
    /// All shapes that layers' keys and values have; they share the blocks.
    pub kv_shapes: Vec<KvShape>,
    /// Per cache group, the number of its shape.
    pub kv_groups: Vec<usize>,
    /// How many of the blocks sequences take.
    pub footprint: Footprint,
    /// Longest sequence, in tokens.
    pub max_context: usize,
    /// Packed weights.
    pub weights_bytes: usize,
    /// Buffers of a step, roughly.
    pub scratch_bytes: usize,
    /// What one step may hold.
    pub limits: StepLimits,
}

impl MemoryPlan {
    /// How many of the longest sequences the cache holds at a time.
    #[must_use]
    pub fn full_contexts(&self) -> usize {
        self.kv.blocks / self.footprint.peak(self.max_context).max(1)
    }

    #[must_use]
    pub fn kv_bytes(&self) -> usize {
        self.kv.blocks.saturating_mul(self.block_bytes())
    }

    /// Bytes of one block.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        KvShape::shared_block_bytes(&self.kv_shapes)
    }
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let KvShape { blocks, block_size, kv_type, .. } = self.kv;
        let (kind, bytes) = (kv_type.name(), Bytes(self.kv_bytes()));
        if let [GroupKind::Full] = self.footprint.groups[..] {
            let (tokens, each) = (blocks.saturating_mul(block_size), Bytes(self.block_bytes() / block_size.max(1)));
            write!(f, "KV: {blocks} blocks × {block_size} tokens = {tokens} tokens ({kind}, {each} per token, {bytes})")?;
        } else {
            let each = Bytes(self.block_bytes());
            let mut layers: Vec<_> = self.kv_shapes.iter().map(|shape| shape.layers.to_string()).collect();
            layers.dedup();
            let layers = layers.join(" or ");
            write!(f, "KV: {blocks} blocks × {block_size} tokens × {layers} layers ({kind}, {each} per block, {bytes}), ")?;
            write!(f, "groups: {}", Groups(&self.footprint.groups))?;
        }
        write!(f, ": {} × {}", self.full_contexts(), self.max_context)
    }
}

/// Cache groups for people: equal ones together.
struct Groups<'a>(&'a [GroupKind]);

impl fmt::Display for Groups<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, same) in self.0.chunk_by(|a, b| a == b).enumerate() {
            let comma = if number > 0 { ", " } else { "" };
            write!(f, "{comma}{} ", same.len())?;
            match same[0] {
                GroupKind::Full => write!(f, "full")?,
                GroupKind::Window { tokens } => write!(f, "of window {tokens}")?,
                GroupKind::Chunk { tokens } => write!(f, "of chunk {tokens}")?,
            }
        }
        Ok(())
    }
}

/// Bytes for people.
struct Bytes(usize);

impl Bytes {
    fn of(bytes: u64) -> Self {
        Self(usize::try_from(bytes).unwrap_or(usize::MAX))
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
        let mut value = self.0 as f64 / 1024.0;
        let mut unit = 0;
        while value >= 1024.0 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        let digits = usize::from(value < 100.0 && value.fract() != 0.0);
        write!(f, "{value:.digits$} {}", UNITS[unit])
    }
}

/// Plans the memory of a worker.
///
/// `weights_bytes` are those of the weights as stored or as they are to be quantised, a fair guess of what they take packed; `available` is the memory
/// that everything may take together, if it is known.
///
/// # Errors
/// A sentence that names the setting and the figures.
pub fn plan_memory(
    config: &EngineConfig,
    description: &Description,
    weights_bytes: usize,
    available: Option<u64>,
) -> Result<MemoryPlan, String> {
    let block_size = config.block_size;
    if block_size == 0 || !block_size.is_multiple_of(16) || !CHUNK.is_multiple_of(block_size) {
        return Err(format!("--block-size is {block_size}; it must be 16, 32, 64, 128 or 256"));
    }
    if config.max_sequences == 0 || config.max_batched_tokens == 0 {
        return Err("--max-num-seqs and --max-num-batched-tokens must be 1 at least".to_owned());
    }
    let layout = description.cache_layout();
    let shapes = description.cache_shapes();
    let mut kv_shapes: Vec<KvShape> =
        shapes.iter().zip(layout.layers_per_block()).map(|(shape, layers)| kv_shape(config, *layers, shape)).collect();
    let block_bytes = KvShape::shared_block_bytes(&kv_shapes);
    let mut limits = limits(config, description);
    let scratch_bytes = scratch_bytes(description, &limits);
    let free = available.map(|bytes| bytes.saturating_sub(weights_bytes as u64).saturating_sub(scratch_bytes as u64));
    let step_rows = if config.max_prefill_chunk == 0 { limits.rows } else { config.max_prefill_chunk.min(limits.rows) };
    let footprint = Footprint { groups: layout.groups().to_vec(), block_size, step_rows };
    let kv_blocks = kv_blocks(config, description, &footprint, block_bytes, free)?;
    let max_context = max_context(config, description, &footprint, kv_blocks, block_bytes)?;
    limits.blocks_per_sequence = max_context.div_ceil(block_size);
    kv_shapes.iter_mut().for_each(|shape| shape.blocks = kv_blocks);
    let Some(&kv) = kv_shapes.first() else { return Err("the model has no layer with keys and values".to_owned()) };
    let kv_groups = description.shapes_of_groups();
    Ok(MemoryPlan { kv, kv_shapes, kv_groups, footprint, max_context, weights_bytes, scratch_bytes, limits })
}

/// One block of one shape.
fn kv_shape(config: &EngineConfig, layers: usize, shape: &CacheShape) -> KvShape {
    KvShape {
        layers,
        blocks: 1,
        block_size: config.block_size,
        kv_heads: shape.kv_heads,
        key_dim: shape.key_dim,
        value_dim: shape.value_dim,
        shared_values: shape.shared_values,
        kv_type: config.kv_type,
    }
}

fn limits(config: &EngineConfig, description: &Description) -> StepLimits {
    let rows = config.max_batched_tokens;
    let scoring = SCORING_ROWS.min(SCORING_BYTES / (description.vocabulary.max(1) * size_of::<f32>()));
    StepLimits {
        rows,
        sequences: config.max_sequences.min(rows),
        // One row for each sequence, or more for the scoring of prompts; no more than there are rows.
        logit_rows: config.max_sequences.max(scoring).min(rows),
        // Until the context is known.
        blocks_per_sequence: 0,
        top_logprobs: TOP_LOGPROBS.min(description.vocabulary),
    }
}

fn kv_blocks(
    config: &EngineConfig,
    description: &Description,
    footprint: &Footprint,
    block_bytes: usize,
    free: Option<u64>,
) -> Result<usize, String> {
    let wanted = if config.kv_blocks > 0 {
        config.kv_blocks
    } else if config.kv_bytes > 0 {
        match config.kv_bytes / block_bytes as u64 {
            0 => return Err(format!("--kv-bytes is {}, less than one block of {block_bytes} bytes", config.kv_bytes)),
            blocks => usize::try_from(blocks).unwrap_or(usize::MAX),
        }
    } else {
        return default_blocks(config, description, footprint, block_bytes, free);
    };
    let bytes = (wanted as u64).saturating_mul(block_bytes as u64);
    match free {
        Some(free) if bytes > free => Err(format!(
            "{wanted} KV blocks need {}, but beside the weights only {} are available, enough for {} blocks",
            Bytes::of(bytes),
            Bytes::of(free),
            free / block_bytes as u64
        )),
        _ => Ok(wanted),
    }
}

/// Enough for a few of the longest sequences, within a share of what is free.
fn default_blocks(
    config: &EngineConfig,
    description: &Description,
    footprint: &Footprint,
    block_bytes: usize,
    free: Option<u64>,
) -> Result<usize, String> {
    let context = if config.max_context > 0 { config.max_context } else { description.trained_context };
    let most = context.saturating_mul(config.max_sequences);
    let tokens = context.saturating_mul(FULL_CONTEXTS).max(LEAST_TOKENS).min(most);
    let (growing, sequences) = (footprint.full_groups(), tokens.div_ceil(context.max(1)));
    let windows = footprint.peak(context).saturating_sub(growing * footprint.blocks_for(context));
    let wanted = growing.saturating_mul(footprint.blocks_for(tokens)).saturating_add(sequences.saturating_mul(windows));
    let Some(free) = free else { return Ok(wanted) };
    match usize::try_from(free / FREE_SHARE / block_bytes as u64).unwrap_or(usize::MAX) {
        0 => Err(format!(
            "beside the weights {} are available, and a quarter of that is less than one KV block of {}: use a smaller model, or set --kv-bytes",
            Bytes::of(free),
            Bytes(block_bytes)
        )),
        affordable => Ok(wanted.min(affordable)),
    }
}

fn max_context(
    config: &EngineConfig,
    description: &Description,
    footprint: &Footprint,
    kv_blocks: usize,
    block_bytes: usize,
) -> Result<usize, String> {
    let (asked, trained, kv_tokens) = (config.max_context, description.trained_context, footprint.longest(kv_blocks));
    if kv_tokens == 0 {
        let blocks = footprint.peak(1);
        return Err(format!(
            "{kv_blocks} KV blocks hold no sequence; set --kv-blocks to {blocks} ({}) or more",
            Bytes(blocks.saturating_mul(block_bytes))
        ));
    }
    if asked == 0 {
        return Ok(trained.min(kv_tokens));
    }
    if asked > trained {
        return Err(format!("--max-model-len is {asked}, more than the {trained} tokens that the model was trained for"));
    }
    if asked > kv_tokens {
        let blocks = footprint.peak(asked);
        return Err(format!(
            "--max-model-len is {asked}, but the KV memory holds {kv_tokens} tokens of one sequence; set --kv-blocks to {blocks} ({}) or more",
            Bytes(blocks.saturating_mul(block_bytes))
        ));
    }
    Ok(asked)
}

#[cfg(test)]
mod tests {
    use quire_kernels::backend::{Activation, RopeStyle};

    use super::*;
    use crate::model::description::{Attention, Branch, Dense, FeedForward, Layer, Norm, Reach, Rope};

    /// SmolLM2 135M.
    fn description() -> Description {
        let norm = Norm::rms(1e-5);
        let layer = Layer {
            attention: Attention::plain(9, 3, 64, norm),
            feed_forward: FeedForward {
                norm: Some(norm),
                dense: Some(Dense::gated(1536, Activation::Silu)),
                experts: None,
                output: Branch::PLAIN,
            },
            parallel: false,
            scaled: false,
        };
        Description {
            architecture: "llama".to_owned(),
            hidden: 576,
            vocabulary: 49152,
            trained_context: 8192,
            embedding_scale: 1.0,
            learned_positions: None,
            ropes: vec![Rope::new(RopeStyle::Adjacent, 64, 1e5)],
            layers: vec![layer; 30],
            output_norm: norm,
            tied_output: true,
            logit_scale: 1.0,
            logit_softcap: None,
            layer_input: None,
        }
    }

    fn plan(change: impl FnOnce(&mut EngineConfig), available: Option<u64>) -> Result<MemoryPlan, String> {
        let mut config = EngineConfig::default();
        change(&mut config);
        plan_memory(&config, &description(), 100 << 20, available)
    }

    #[test]
    fn says_what_it_holds() {
        let plan = plan(|config| config.kv_blocks = 2048, None).unwrap();
        assert_eq!(plan.to_string(), "KV: 2048 blocks × 16 tokens = 32768 tokens (f16, 22.5 KiB per token, 720 MiB): 4 × 8192");
        assert_eq!(plan.limits.blocks_per_sequence, 512);
        assert_eq!((plan.limits.rows, plan.limits.sequences, plan.limits.logit_rows), (512, 64, 64));
    }

    /// Gemma 3 4B, as far as the cache goes.
    fn with_windows() -> Description {
        let mut description = description();
        let mut layer = description.layers[0].clone();
        (layer.attention.kv_heads, layer.attention.head_dim, layer.attention.value_dim) = (4, 256, 256);
        description.trained_context = 131_072;
        description.layers = (1..=34)
            .map(|number| {
                layer.attention.reach = if number % 6 == 0 { Reach::All } else { Reach::Window(1024) };
                layer.clone()
            })
            .collect();
        description
    }

    #[test]
    fn groups_are_planned_and_printed() {
        let config = EngineConfig { kv_blocks: 6963, max_context: 32_768, ..EngineConfig::default() };
        let plan = plan_memory(&config, &with_windows(), 0, None).unwrap();
        assert_eq!(
            plan.to_string(),
            "KV: 6963 blocks × 16 tokens × 5 layers (f16, 320 KiB per block, 2.1 GiB), groups: 1 full, 6 of window 1024: 2 × 32768"
        );
        // A sequence: all of the past once, and six windows of 1,024 tokens and the 512 rows of a step.
        assert_eq!(plan.footprint.peak(32_768), 2048 + 6 * 97);
        assert_eq!(plan.kv_bytes(), 6963 * 320 * 1024);
        let bytes = EngineConfig { kv_bytes: 4 << 30, ..EngineConfig::default() };
        assert_eq!(plan_memory(&bytes, &with_windows(), 0, None).unwrap().kv.blocks, (4 << 30) / (320 << 10));
        // What is asked for is refused with what it would take.
        let error = plan_memory(&EngineConfig { kv_blocks: 2629, ..config }, &with_windows(), 0, None).unwrap_err();
        assert!(error.contains("--kv-blocks to 2630 (822 MiB)"), "{error}");
        // By default: four of the longest, each with its windows.
        let plan = plan_memory(&EngineConfig::default(), &with_windows(), 0, None).unwrap();
        assert_eq!((plan.full_contexts(), plan.kv.blocks), (4, 4 * (8192 + 6 * 97)));
        // Not even one token of a sequence fits.
        let few = EngineConfig { kv_blocks: 6, ..EngineConfig::default() };
        assert!(plan_memory(&few, &with_windows(), 0, None).unwrap_err().contains("--kv-blocks to 7 "));
    }

    #[test]
    fn layers_of_two_sizes_share_blocks() {
        let mut description = with_windows();
        for layer in description.layers.iter_mut().filter(|layer| layer.attention.reach == Reach::All) {
            (layer.attention.kv_heads, layer.attention.head_dim, layer.attention.value_dim) = (2, 512, 512);
        }
        let config = EngineConfig { kv_blocks: 1000, max_context: 4096, ..EngineConfig::default() };
        let plan = plan_memory(&config, &description, 0, None).unwrap();
        let layers: Vec<_> = plan.kv_shapes.iter().map(|shape| (shape.kv_heads, shape.layers)).collect();
        assert_eq!((layers, &plan.kv_groups[..]), (vec![(4, 5), (2, 5)], &[1, 0, 0, 0, 0, 0, 0][..]));
        assert!(plan.to_string().contains("× 5 layers (f16, 320 KiB per block"), "{plan}");
    }

    #[test]
    fn blocks_go_before_bytes_go_before_the_default() {
        let block = 16 * 23040;
        assert_eq!(plan(|c| (c.kv_blocks, c.kv_bytes) = (700, 10), None).unwrap().kv.blocks, 700);
        assert_eq!(plan(|c| c.kv_bytes = 600 * block + 1, None).unwrap().kv.blocks, 600);
        // 4 × 8192 is less than 65536 tokens.
        assert_eq!(plan(|_| (), None).unwrap().kv.blocks, 4096);
        assert_eq!(plan(|c| c.max_sequences = 2, None).unwrap().kv.blocks, 1024);
        // A quarter of what is left beside weights and scratch.
        let tight = plan(|_| (), Some(1 << 30)).unwrap();
        let left = (1u64 << 30) - (100 << 20) - tight.scratch_bytes as u64;
        assert_eq!(tight.kv.blocks as u64, left / 4 / block);
        assert_eq!(tight.max_context, (16 * tight.kv.blocks).min(8192));
    }

    #[test]
    fn refuses_what_does_not_fit_and_says_what_would() {
        let error = plan(|c| (c.kv_blocks, c.max_context) = (10, 161), None).unwrap_err();
        assert!(error.contains("161") && error.contains("160 tokens") && error.contains("--kv-blocks to 11 "), "{error}");
        assert_eq!(plan(|c| c.kv_blocks = 10, None).unwrap().max_context, 160);
        let error = plan(|c| c.kv_blocks = 100_000, Some(4 << 30)).unwrap_err();
        assert!(error.contains("100000 KV blocks need 34.3 GiB"), "{error}");
        let error = plan(|c| c.max_context = 8193, None).unwrap_err();
        assert!(error.contains("8192"), "{error}");
        for block_size in [0, 8, 48, 512] {
            assert!(plan(|c| c.block_size = block_size, None).unwrap_err().contains("--block-size"));
        }
        assert!(plan(|_| (), Some(110 << 20)).unwrap_err().contains("available"));
    }
}
