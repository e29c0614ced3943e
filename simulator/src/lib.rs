//! A simulator of a whole cluster: the real scheduler, block pool and prefix cache of the engine, the real planner, ledger and
//! retry rules of the router, under a virtual clock. A step takes what `baton-cost` says; nothing else is computed.
//!
//! In reading order:
//! - [`time`](SimTime) and `event_queue`: the virtual clock, and what happens next;
//! - [`trace`]: which requests come, and when;
//! - [`model`]: the shape of a model on devices;
//! - [`cluster`](ClusterSpec): which workers there are, and what happens to them;
//! - `worker`, its `tiers`, and `router`: one of each, around the real parts;
//! - `run`: the events that connect them;
//! - [`policies`]: what other systems would do, to compare with;
//! - [`report`]: what came of it, as text and as a picture;
//! - [`command`]: `baton simulate` and `baton plan`.
//!
//! The same seed gives the same bytes. It does not know the network, threads of servers, text or weights.
#![forbid(unsafe_code)]

mod cluster;
mod event_queue;
mod router;
mod run;
mod tiers;
mod time;
mod worker;

pub mod command;
pub mod hit_rate;
pub mod model;
pub mod policies;
pub mod report;
pub mod trace;

// The small clusters of the tests in `tests/it`, which name this crate.
#[cfg(test)]
extern crate self as baton_simulator;
#[cfg(test)]
#[path = "../tests/it/support.rs"]
mod test_clusters;

pub use cluster::{Change, ChangeKind, ClusterSpec, PolicyName, SloTarget, TierSpec, WorkerSpec};
pub use command::{PlanArgs, SimulateArgs, run, run_plan};
pub use report::{BalanceMigration, Outcome, RequestEnd, SimReport};
pub use run::{Simulation, simulate};
pub use time::SimTime;
