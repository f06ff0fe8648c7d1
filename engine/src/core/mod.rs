//! The step loop on its own OS thread, and the handle to it.
//!
//! inbox → schedule → fill → submit, wait → commit → emit. Owns requests and their streams of events; decides nothing
//! about who runs (the scheduler does) and computes nothing (the executor does). Idle, it sleeps. A step never waits for
//! a reader: each stream has room for all that its request can say.

mod admission;
mod emit;
mod error;
mod events;
mod fill;
mod handle;
mod inbox;
mod publisher;
mod step_loop;
mod steps;

pub use admission::AdmissionLimits;
pub use error::EngineError;
pub use events::EventReceiver;
pub use handle::{EngineHandle, Health, KvFigures, Load};
/// A request, as the proto has it; `model` is the service's business.
pub use quire_proto::worker::v1::GenerateRequest as EngineRequest;
