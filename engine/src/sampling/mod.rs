//! A request's parameters → flat rows of a step; and when generation ends.
//!
//! Owns validation, penalty histories, bans and stops. Never sees a logit: the draw itself is the backend's.

mod choice;
mod history;
mod params;

pub use choice::{ChoiceSampler, Stop, begin, score_row};
pub use history::History;
pub use params::{BadParameter, ModelFacts, RequestSampling};
pub(crate) use params::{logprobs, outside};
