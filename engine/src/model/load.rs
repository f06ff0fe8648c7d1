//! From a path to a model that answers.

use std::{
    collections::HashMap,
    path::Path,
    time::{Instant, UNIX_EPOCH},
};

use quire_kernels::{
    KernelError,
    backend::Backend,
    cpu::{CpuBackend, CpuOptions},
    plan::{GroupPlan, NO_ADAPTER, NO_TOKEN, SamplingPlan, StepOutput, StepPlan},
    reference::{Numerics, Reference},
};

use super::{
    Decoder, LoadedModel, ModelCard, ModelError,
    checkpoint::{Checkpoint, Tensors},
    fingerprint::weights_hash,
    opened::Opened,
    tokenizer::Tokenizer,
};
use crate::{
    config::{BackendChoice, EngineConfig},
    runner::{Executor, MemoryPlan, ModelExecutor, available_memory, plan_memory},
};

/// A model on a known backend.
pub struct Prepared<B: Backend> {
    pub card: ModelCard,
    pub executor: ModelExecutor<B>,
    pub memory: MemoryPlan,
    pub tokenizer: Tokenizer,
}

/// Opens a checkpoint (a GGUF file, or a Hugging Face folder), packs its weights, allocates everything and runs one step.
///
/// `names` are what the model answers to, the first one canonical; none: the file's own name.
///
/// # Errors
/// [`ModelError`]: what is wrong with the file or the settings, and what to do.
pub fn load(path: &Path, names: Vec<String>, config: &EngineConfig) -> Result<LoadedModel, ModelError> {
    match config.backend {
        BackendChoice::Cpu => {
            let options = CpuOptions { threads: config.threads, isa: None };
            let backend = CpuBackend::new(options).map_err(device("cannot start the CPU backend"))?;
            executor_on(backend, path, names, config).map(Prepared::erase)
        }
        BackendChoice::Reference => executor_on(Reference::new(Numerics::Exact), path, names, config).map(Prepared::erase),
    }
}

impl<B: Backend> Prepared<B> {
    fn erase(self) -> LoadedModel {
        LoadedModel {
            card: self.card,
            executor: Box::new(self.executor),
            memory: self.memory,
            tokenizer_json: self.tokenizer.json,
            chat_template: self.tokenizer.chat_template,
        }
    }
}

/// [`load`] on a backend of one's own.
///
/// # Errors
/// As [`load`].
pub fn executor_on<B: Backend>(backend: B, path: &Path, names: Vec<String>, config: &EngineConfig) -> Result<Prepared<B>, ModelError> {
    let checkpoint = Checkpoint::open(path)?;
    let mut opened = Opened::new(&checkpoint).map_err(|error| error.at(path))?;
    if let Some(tensor_type) = config.quantize {
        // Other arithmetic: another model, for those who compare fingerprints.
        opened.settings.push(("quantize".to_owned(), tensor_type.name().into()));
    }
    let began = Instant::now();
    // A tokenizer that can't be used is told before the weights are packed.
    let (weights_hash, tokenizer) = rayon::join(|| weights_hash(&opened.settings, &opened.tensors), || opened.tokenizer());
    let tokenizer = tokenizer.map_err(|error| error.at(path))?;
    let (read, info) = (began.elapsed(), backend.info());
    let (executor, memory) = executor_of(backend, &opened, path, config)?;
    let card = card(&opened, path, names, config, &memory, &tokenizer, info, weights_hash);
    tracing::debug!(?read, ready = ?(began.elapsed() - read), "model loaded");
    Ok(Prepared { card, executor, memory, tokenizer })
}

/// The arithmetic of an opened checkpoint alone, warmed up by one step; `path` is for errors.
///
/// # Errors
/// As [`load`].
pub fn executor_of<B: Backend>(
    backend: B,
    opened: &Opened<'_>,
    path: &Path,
    config: &EngineConfig,
) -> Result<(ModelExecutor<B>, MemoryPlan), ModelError> {
    let tensors = &opened.tensors;
    let weights = config.quantize.map_or_else(|| tensors.bytes(), |tensor_type| tensors.bytes_in(tensor_type));
    let weights = usize::try_from(weights).unwrap_or(usize::MAX);
    let mut memory = plan_memory(config, &opened.description, weights, available_memory()).map_err(ModelError::Memory)?;
    let (description, context) = (opened.description.clone(), memory.max_context);
    let decoder = Decoder::load(&backend, description, &opened.map, tensors, config.quantize, context).map_err(|error| error.at(path))?;
    memory.weights_bytes = decoder.weights_bytes();
    let mut executor = ModelExecutor::new(backend, decoder, &memory).map_err(device("cannot allocate the model's buffers"))?;
    warm_up(&mut executor, memory.footprint.groups.len())?;
    Ok((executor, memory))
}

fn device(what: &'static str) -> impl Fn(KernelError) -> ModelError {
    move |source| ModelError::Kernel { what, source }
}

/// One step of one token, so that the first request finds pages mapped and threads awake; and whether the model computes
/// at all. It writes to the first slot, which nobody has been given yet.
fn warm_up<B: Backend>(executor: &mut ModelExecutor<B>, groups: usize) -> Result<(), ModelError> {
    let plan = StepPlan {
        inputs: vec![0],
        positions: vec![0],
        adapters: vec![NO_ADAPTER],
        row_starts: vec![0, 1],
        context_lens: vec![1],
        groups: vec![GroupPlan { slots: vec![0], block_tables: vec![0], stride: 1 }; groups],
        logit_rows: vec![0],
        sampling: SamplingPlan {
            targets: vec![NO_TOKEN],
            temperature: vec![0.0],
            top_k: vec![0],
            top_p: vec![1.0],
            min_p: vec![0.0],
            presence: vec![0.0],
            frequency: vec![0.0],
            repetition: vec![1.0],
            seed: vec![0],
            draw: vec![0],
            logprobs: vec![-1],
            bias_starts: vec![0, 0],
            history_starts: vec![0, 0],
            mask_rows: vec![-1],
            ..SamplingPlan::default()
        },
        block_copies: Vec::new(),
    };
    let mut out = StepOutput::default();
    let ticket = executor.submit(&plan).map_err(device("the first step failed"))?;
    executor.wait(ticket, &mut out).map_err(device("the first step failed"))?;
    if out.ids.first().is_none_or(|id| *id == NO_TOKEN) {
        let source = KernelError::Device("the logits are not finite: the weights are damaged".to_owned());
        return Err(ModelError::Kernel { what: "the first step failed", source });
    }
    Ok(())
}

#[allow(clippy::too_many_arguments)]
fn card(
    opened: &Opened<'_>,
    path: &Path,
    mut names: Vec<String>,
    config: &EngineConfig,
    memory: &MemoryPlan,
    tokenizer: &Tokenizer,
    info: quire_kernels::backend::BackendInfo,
    weights_hash: String,
) -> ModelCard {
    let description = &opened.description;
    if names.is_empty() {
        let name = if path.is_dir() { path.file_name() } else { path.file_stem() };
        names.push(name.map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned()));
    }
    let modified = path.metadata().and_then(|metadata| metadata.modified()).ok();
    let weights = opened.tensors.iter().filter(|facts| !facts.name.contains("rope_freqs") && !facts.name.contains("rope_factors"));
    let in_vocabulary = |id: &u32| (*id as usize) < description.vocabulary;
    ModelCard {
        names,
        architecture: description.architecture.clone(),
        parameters: weights.map(|facts| facts.shape.iter().map(|size| *size as u64).product::<u64>()).sum(),
        weights: weight_types(&opened.tensors),
        weights_hash,
        created: modified.and_then(|time| time.duration_since(UNIX_EPOCH).ok()).map_or(0, |since| since.as_secs()),
        trained_context: description.trained_context,
        max_context: memory.max_context,
        vocab_size: description.vocabulary,
        bos_id: tokenizer.bos_id.filter(in_vocabulary),
        add_bos: tokenizer.add_bos,
        eos_ids: tokenizer.eos_ids.iter().copied().filter(in_vocabulary).collect(),
        sampling: opened.sampling,
        backend: info.name.to_owned(),
        instruction_set: info.instruction_set,
        kv_type: config.kv_type.name().to_owned(),
        threads: info.threads,
    }
}

/// Types of the matrices, most bytes first.
fn weight_types(tensors: &Tensors<'_>) -> String {
    let mut bytes: HashMap<&str, u64> = HashMap::new();
    for facts in tensors.iter().filter(|facts| facts.shape.len() > 1) {
        *bytes.entry(&facts.type_name).or_default() += facts.bytes;
    }
    let mut types: Vec<_> = bytes.into_iter().collect();
    types.sort_unstable_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(b.0)));
    types.into_iter().map(|(name, _)| name).collect::<Vec<_>>().join(", ")
}
