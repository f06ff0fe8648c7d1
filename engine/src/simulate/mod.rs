//! A discrete-event simulation of a worker: the real scheduler, synthetic traces, a cost model instead of a model.
//!
//! Nothing here has a clock or a thread; a run is a function of its settings. [`scenarios`] are the situations in which the
//! default [`Policy`](crate::scheduler::Policy) was chosen.

mod random;
mod report;
mod run;
mod scenario;
mod trace;

pub use random::Random;
pub use report::{Percentiles, Report};
pub use run::{Cost, simulate};
pub use scenario::{Scenario, scenarios, table};
pub use trace::{Arrival, Lengths, Prefixes, TraceSpec};
