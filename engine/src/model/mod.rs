//! Weights → description → decoder; tokenizer and chat template as artefacts.
//!
//! - [`map`], [`gguf`], [`safetensors`]: file formats; [`checkpoint`]: tensors by name from either
//! - [`description`]: configuration → what a decoder computes and what its tensors are called, as data
//! - [`weights`] and [`decoder`]: tensors → packed weights → the forward pass
//! - [`tokenizer`]: metadata → `tokenizer.json`
//! - [`about`]: what files are, for people
//! - [`quantize`]: weights in fewer bits, as a file or at load
//! - [`load`]: all of it, from a path to something that answers
//!
//! Knows no request and no schedule.

pub mod about;
pub mod checkpoint;
mod decoder;
pub mod description;
mod error;
mod fingerprint;
pub mod gguf;
mod load;
mod map;
mod opened;
pub mod quantize;
pub mod safetensors;
mod scratch;
pub mod tokenizer;
mod weights;

pub use decoder::Decoder;
pub use description::{CacheShape, Description};
pub use error::{ContentError, ModelError};
pub use load::{Prepared, executor_of, executor_on, load};
pub use opened::Opened;
pub use scratch::{Scratch, scratch_bytes};

use crate::runner::{Executor, MemoryPlan};

/// What a router and a person need to know of a model; becomes the proto `ModelCard`.
#[derive(Clone, Debug)]
pub struct ModelCard {
    /// The first is canonical.
    pub names: Vec<String>,
    pub architecture: String,
    pub parameters: u64,
    /// Types of the weights, most bytes first, e.g. `Q4_1, Q8_0`.
    pub weights: String,
    /// SHA-256 of what decides the arithmetic (tensor directory and content), hex.
    pub weights_hash: String,
    /// Seconds since 1970 of the file.
    pub created: u64,
    /// What the model was trained for.
    pub trained_context: usize,
    /// What this worker allows.
    pub max_context: usize,
    pub vocab_size: usize,
    pub bos_id: Option<u32>,
    pub add_bos: bool,
    /// The end-of-generation set.
    pub eos_ids: Vec<u32>,
    pub sampling: SamplingDefaults,
    /// For the numerics fingerprint.
    pub backend: String,
    pub instruction_set: String,
    pub kv_type: String,
    pub threads: usize,
}

/// What the model's author recommends.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SamplingDefaults {
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<u32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
}

/// A model ready to run.
pub struct LoadedModel {
    pub card: ModelCard,
    pub executor: Box<dyn Executor>,
    pub memory: MemoryPlan,
    /// In the `tokenizer.json` form.
    pub tokenizer_json: Vec<u8>,
    /// Jinja source.
    pub chat_template: Option<String>,
}
