//! A worker: token ids in, token ids and log-probabilities out.
//!
//! - [`store`]: model names → local files; pull, verify, list
//! - [`model`]: weights → description → decoder; tokenizer and chat template as artefacts
//! - [`runner`]: the executor of step plans, memory sizing
//! - [`cache`]: block pool, prefix index, cache events. Pure: integers and hashes
//! - [`scheduler`]: budget, queues, preemption. Pure: no clock, channel or tensor
//! - [`simulate`]: the scheduler over a cost model and synthetic traces. Pure
//! - [`sampling`]: parameters → flat arrays
//! - [`core`]: the step loop on its own thread, and the handle to it
//! - [`perplexity`]: how well a model foretells a text, through the same engine
//! - [`service`]: the gRPC face: model → handle → event stream
//!
//! `service → core → {scheduler, runner, sampling}`, `scheduler → cache`, `runner → model → kernels`.

pub mod cache;
pub mod config;
pub mod core;
pub mod model;
pub mod perplexity;
pub mod runner;
pub mod sampling;
pub mod scheduler;
pub mod service;
pub mod simulate;
pub mod store;
pub mod telemetry;
