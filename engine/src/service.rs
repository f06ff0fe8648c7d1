//! The gRPC face: model name → engine handle → stream of events; dropping the stream cancels the request.
//!
//! Owns names, artefacts and the mapping of errors to statuses. Never schedules and never looks into a token. The inherent
//! methods are the service without a socket; the tonic methods delegate to them, so both ways behave alike.

use std::{collections::HashMap, sync::Arc, time::Duration};

use bytes::Bytes;
use futures::{StreamExt, stream, stream::BoxStream};
use quire_proto::worker::v1::{
    ArtefactChunk, ArtefactRequest, CacheEventBatch, CacheEventsRequest, DescribeRequest, DescribeResponse, DrainRequest, DrainResponse,
    GenerateEvent, GenerateRequest, LoadReport, ModelCard as WireCard, NumericsFingerprint, SamplingDefaults, WatchRequest, worker_server,
};
use sha2::{Digest, Sha256};
use tonic::{Code, Request, Response, Status, async_trait, metadata::MetadataValue};

use crate::core::{EngineError, EngineHandle};

/// Bytes of one chunk of an artefact.
const ARTEFACT_CHUNK: usize = 256 * 1024;
/// Metadata key of a status that names the field of the request at fault.
pub const FIELD_KEY: &str = "quire-field";

const DEFAULT_WATCH: Duration = Duration::from_millis(1000);
const MIN_WATCH: Duration = Duration::from_millis(50);

/// A stream of the service.
pub type ServiceStream<T> = BoxStream<'static, Result<T, Status>>;

/// A model that this worker serves.
pub struct ServedModel {
    /// Its card gives names, limits and fingerprint.
    pub handle: EngineHandle,
    /// In the `tokenizer.json` form.
    pub tokenizer_json: Vec<u8>,
    /// Jinja source.
    pub chat_template: Option<String>,
}

/// The worker service. Clones share it.
#[derive(Clone)]
pub struct WorkerService {
    shared: Arc<Shared>,
}

struct Shared {
    handles: Vec<EngineHandle>,
    /// Any name of a model → index into `handles`.
    names: HashMap<String, usize>,
    artefacts: HashMap<String, Bytes>,
    description: DescribeResponse,
}

impl WorkerService {
    /// A service for `models`. Where two models share a name, the first one has it.
    #[must_use]
    pub fn new(models: Vec<ServedModel>) -> Self {
        let mut names = HashMap::new();
        let mut artefacts = HashMap::new();
        let mut cards = Vec::new();
        let mut handles = Vec::new();
        for model in models {
            let mut keep = |bytes: Vec<u8>| {
                let hash = hex(&Sha256::digest(&bytes));
                artefacts.insert(hash.clone(), Bytes::from(bytes));
                hash
            };
            let tokenizer_hash = keep(model.tokenizer_json);
            let chat_template_hash = model.chat_template.map(|text| keep(text.into_bytes())).unwrap_or_default();
            cards.push(wire_card(&model.handle, tokenizer_hash, chat_template_hash));
            for name in &model.handle.card().names {
                names.entry(name.clone()).or_insert(handles.len());
            }
            handles.push(model.handle);
        }
        // One life of the process is one epoch, whatever number of engines it has.
        let epoch = handles.iter().fold(0, |epoch: u64, handle| epoch.rotate_left(1) ^ handle.epoch());
        let description = DescribeResponse { epoch, models: cards, version: env!("CARGO_PKG_VERSION").to_owned() };
        Self { shared: Arc::new(Shared { handles, names, artefacts, description }) }
    }

    /// Runs one request; dropping the stream cancels it.
    pub async fn generate(&self, request: GenerateRequest) -> Result<ServiceStream<GenerateEvent>, Status> {
        let receiver = self.handle(&request.model).and_then(|handle| handle.generate(request)).map_err(status)?;
        let events = stream::unfold(Some(receiver), |receiver| async move {
            let mut receiver = receiver?;
            match receiver.recv().await {
                Some(event) => Some((Ok(event), Some(receiver))),
                None if receiver.finished() => None,
                None => Some((Err(status(EngineError::Stopped)), None)),
            }
        });
        Ok(events.boxed())
    }

    /// What this worker serves.
    #[must_use]
    pub fn describe(&self) -> DescribeResponse {
        self.shared.description.clone()
    }

    /// The bytes behind a content hash of the description.
    pub fn artefact(&self, hash: &str) -> Result<Bytes, Status> {
        self.shared.artefacts.get(hash).cloned().ok_or_else(|| status(EngineError::UnknownArtefact(hash.to_owned())))
    }

    /// Load figures of every model, at once and then once per interval (0: a second); ends when the engines have stopped.
    #[must_use]
    pub fn watch(&self, interval_ms: u32) -> ServiceStream<LoadReport> {
        let period = if interval_ms == 0 { DEFAULT_WATCH } else { Duration::from_millis(interval_ms.into()).max(MIN_WATCH) };
        let mut ticks = tokio::time::interval(period);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let shared = Arc::clone(&self.shared);
        stream::unfold((shared, ticks), |(shared, mut ticks)| async move {
            ticks.tick().await;
            let reports: Vec<_> =
                shared.handles.iter().filter(|handle| handle.load().alive).map(|handle| Ok(load_report(handle))).collect();
            if reports.is_empty() { None } else { Some((stream::iter(reports), (shared, ticks))) }
        })
        .flatten()
        .boxed()
    }

    /// The prefix index of a model: a snapshot, then its changes. A subscriber that falls behind gets a new snapshot.
    pub fn cache_events(&self, model: &str) -> Result<ServiceStream<CacheEventBatch>, Status> {
        let handle = self.handle(model).map_err(status)?.clone();
        let events = handle.cache_events().map_err(status)?;
        let batches = stream::unfold((handle, events), |(handle, mut events)| async move {
            loop {
                if let Some(batch) = events.recv().await {
                    return Some((Ok(batch), (handle, events)));
                }
                events = handle.cache_events().ok()?;
            }
        });
        Ok(batches.boxed())
    }

    /// Refuses new requests, waits for the others; see [`EngineHandle::drain`]. Returns the requests that were cut off.
    pub async fn drain(&self, deadline: Option<Duration>) -> usize {
        let drains = self.shared.handles.iter().map(|handle| handle.drain(deadline));
        futures::future::join_all(drains).await.into_iter().sum()
    }

    /// The engines, in the order of the description's models.
    #[must_use]
    pub fn handles(&self) -> &[EngineHandle] {
        &self.shared.handles
    }

    /// Every engine is alive, makes progress and takes requests.
    #[must_use]
    pub fn ready(&self) -> bool {
        self.shared.handles.iter().all(|handle| handle.health().ready())
    }

    /// Joins the step threads; blocks for the rest of their current steps.
    pub fn shutdown(&self) {
        self.shared.handles.iter().for_each(EngineHandle::shutdown);
    }

    fn handle(&self, model: &str) -> Result<&EngineHandle, EngineError> {
        let index = self.shared.names.get(model).ok_or_else(|| EngineError::UnknownModel(model.to_owned()))?;
        self.shared.handles.get(*index).ok_or_else(|| EngineError::UnknownModel(model.to_owned()))
    }
}

#[async_trait]
impl worker_server::Worker for WorkerService {
    type GenerateStream = ServiceStream<GenerateEvent>;
    type ArtefactsStream = ServiceStream<ArtefactChunk>;
    type WatchStream = ServiceStream<LoadReport>;
    type CacheEventsStream = ServiceStream<CacheEventBatch>;

    async fn generate(&self, request: Request<GenerateRequest>) -> Result<Response<Self::GenerateStream>, Status> {
        WorkerService::generate(self, request.into_inner()).await.map(Response::new)
    }

    async fn describe(&self, _: Request<DescribeRequest>) -> Result<Response<DescribeResponse>, Status> {
        Ok(Response::new(WorkerService::describe(self)))
    }

    async fn artefacts(&self, request: Request<ArtefactRequest>) -> Result<Response<Self::ArtefactsStream>, Status> {
        let bytes = self.artefact(&request.into_inner().hash)?;
        let chunks = (0..bytes.len()).step_by(ARTEFACT_CHUNK).map(move |start| {
            let end = (start + ARTEFACT_CHUNK).min(bytes.len());
            Ok(ArtefactChunk { data: bytes.slice(start..end) })
        });
        Ok(Response::new(stream::iter(chunks).boxed()))
    }

    async fn watch(&self, request: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        Ok(Response::new(WorkerService::watch(self, request.into_inner().interval_ms)))
    }

    async fn cache_events(&self, request: Request<CacheEventsRequest>) -> Result<Response<Self::CacheEventsStream>, Status> {
        WorkerService::cache_events(self, &request.into_inner().model).map(Response::new)
    }

    async fn drain(&self, request: Request<DrainRequest>) -> Result<Response<DrainResponse>, Status> {
        let deadline = match request.into_inner().deadline_ms {
            0 => None,
            ms => Some(Duration::from_millis(ms)),
        };
        let aborted = WorkerService::drain(self, deadline).await;
        Ok(Response::new(DrainResponse { aborted: aborted as u32 }))
    }
}

/// The one mapping of engine errors to gRPC statuses.
#[must_use]
pub fn status(error: EngineError) -> Status {
    let code = match &error {
        EngineError::Invalid { .. } => Code::InvalidArgument,
        EngineError::UnknownModel(_) | EngineError::UnknownArtefact(_) => Code::NotFound,
        EngineError::Overloaded(_) => Code::ResourceExhausted,
        EngineError::Draining | EngineError::Stopped => Code::Unavailable,
        EngineError::Start(_) => Code::Internal,
    };
    let mut status = Status::new(code, error.to_string());
    if let EngineError::Invalid { field, .. } = error {
        status.metadata_mut().insert(FIELD_KEY, MetadataValue::from_static(field));
    }
    status
}

fn load_report(handle: &EngineHandle) -> LoadReport {
    let load = handle.load();
    LoadReport {
        model: handle.card().names.first().cloned().unwrap_or_default(),
        running: load.running as u32,
        waiting: load.waiting as u32,
        waiting_prompt_tokens: load.waiting_prompt_tokens as u64,
        kv_blocks_used: load.kv_blocks_used as u32,
        kv_blocks_total: load.kv_blocks_total as u32,
        steps: load.steps,
        step_age_ms: load.step_age.as_millis() as u64,
        draining: load.draining,
    }
}

fn wire_card(handle: &EngineHandle, tokenizer_hash: String, chat_template_hash: String) -> WireCard {
    let (card, kv, limits) = (handle.card(), handle.kv(), handle.limits());
    let sampling = card.sampling;
    WireCard {
        names: card.names.clone(),
        max_context: limits.max_context as u32,
        vocab_size: card.vocab_size as u32,
        bos_id: card.bos_id,
        eos_ids: card.eos_ids.clone(),
        block_size: kv.block_size as u32,
        kv_blocks: kv.blocks as u32,
        max_sequences: limits.max_sequences as u32,
        max_batched_tokens: limits.max_rows as u32,
        max_logprobs: limits.max_logprobs as u32,
        tokenizer_hash,
        chat_template_hash,
        numerics: Some(NumericsFingerprint {
            backend: card.backend.clone(),
            instruction_set: card.instruction_set.clone(),
            weights: card.weights_hash.clone(),
            kv_type: card.kv_type.clone(),
        }),
        adapters: Vec::new(),
        defaults: Some(SamplingDefaults {
            temperature: sampling.temperature,
            top_p: sampling.top_p,
            top_k: sampling.top_k,
            min_p: sampling.min_p,
            repetition_penalty: sampling.repetition_penalty,
        }),
        architecture: card.architecture.clone(),
        parameters: card.parameters,
        weights: card.weights.clone(),
        created: card.created,
        add_bos: card.add_bos,
    }
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}
