//! Who computes what in the next step: budget, queues, preemption.
//!
//! There are no phases. A sequence has `computed` tokens and tokens that it knows; a step hands out a budget of rows so
//! that computed catches up. Prefill, chunks, decode, prefix hits and recompute after preemption are all that one rule.
//! [`Scheduler::plan`] and [`Scheduler::commit`] are apart, and the only ways in which a step changes anything.
//!
//! Who comes first is the [`Policy`]: order and ageing, who may pass whom, room for growth (`forecast`), and the prompt
//! rows beside decodes (`pace`).
//!
//! A pure state machine: time is passed in, tokens are integers. No clock, channel or tensor.

mod admit;
mod forecast;
mod fork;
mod pace;
mod plan;
mod policy;
mod sequence;
mod state;
mod step;

pub use plan::{Outcome, Plan, Scheduled};
pub use policy::Policy;
pub use sequence::{NewSequence, Sequence, SequenceId};
pub use state::{Counters, NeverFits, Scheduler, SchedulerConfig};
