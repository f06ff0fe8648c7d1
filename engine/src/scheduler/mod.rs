//! Who computes what in the next step: budget, queues, preemption.
//!
//! There are no phases. A sequence has `computed` tokens and tokens that it knows; a step hands out a budget of rows so
//! that computed catches up. Prefill, chunks, decode, prefix hits and recompute after preemption are all that one rule.
//! [`Scheduler::plan`] and [`Scheduler::commit`] are apart, and the only ways in which a step changes anything.
//!
//! A pure state machine: time is passed in, tokens are integers. No clock, channel or tensor.

mod plan;
mod sequence;
mod state;
mod step;

pub use plan::{Outcome, Plan, Scheduled};
pub use sequence::{NewSequence, Sequence, SequenceId};
pub use state::{Counters, NeverFits, Scheduler, SchedulerConfig};
