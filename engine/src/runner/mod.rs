//! Runs step plans: the border between the step loop and the device.
//!
//! The step loop fills a [`StepPlan`] (flat arrays, nothing else) and hands it over; it learns tokens and
//! log-probabilities. `submit` and `wait` are apart so that the next step can be planned while one runs.

mod available;
mod executor;
mod memory;

pub use available::available_memory;
pub use executor::ModelExecutor;
pub use memory::{MemoryPlan, plan_memory};
use quire_kernels::{
    KernelError,
    plan::{StepLimits, StepOutput, StepPlan},
};

/// Names a submitted step. Tickets ascend; each is waited for once, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// What the step loop knows of a model on a device.
pub trait Executor: Send {
    /// What a plan may hold at most.
    fn limits(&self) -> StepLimits;
    /// Starts a step. A depth-0 device may compute it here.
    fn submit(&mut self, plan: &StepPlan) -> Result<Ticket, KernelError>;
    /// Blocks until the step is done; fills `out` (cleared first).
    fn wait(&mut self, ticket: Ticket, out: &mut StepOutput) -> Result<(), KernelError>;
}
