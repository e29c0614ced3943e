//! All outcomes of a simulation.

use super::outcome::{Outcome, WorkerUse};
use crate::{
    cluster::{ClusterSpec, WorkerSpec},
    time::SimTime,
    worker::Worker,
};

/// A running request has migrated for balance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BalanceMigration {
    /// When the workers granted it.
    pub at: SimTime,
    /// The worker that it left, by its place in the cluster.
    pub from: usize,
    /// The worker at which it arrived.
    pub to: usize,
}

/// What came of a simulation.
#[derive(Clone, Debug, PartialEq)]
pub struct SimReport {
    /// By request, in the order of their arrival.
    pub outcomes: Vec<Outcome>,
    /// By worker.
    pub workers: Vec<WorkerUse>,
    /// Migrations for balance, in their order.
    pub migrations: Vec<BalanceMigration>,
    /// What routers proposed and workers did not grant.
    pub num_refused_migrations: u64,
    /// When the last request ended.
    pub ended: SimTime,
    /// Events that were played.
    pub num_events: u64,
}

impl SimReport {
    pub(crate) fn new(
        spec: &ClusterSpec,
        outcomes: Vec<Outcome>,
        workers: Vec<Worker>,
        ended: SimTime,
        num_events: u64,
    ) -> SimReport {
        let used = |(worker, spec): (Worker, &WorkerSpec)| WorkerUse {
            name: worker.record.id.to_string(),
            role: spec.role,
            num_devices: spec.num_devices,
            busy: worker.usage.busy,
            num_steps: worker.usage.num_steps,
            num_tokens: worker.usage.num_tokens,
            own_seconds: worker.usage.own_seconds,
            num_preempted: worker.usage.num_preempted,
        };
        let workers = workers.into_iter().zip(&spec.workers).map(used).collect();
        SimReport { outcomes, workers, migrations: Vec::new(), num_refused_migrations: 0, ended, num_events }
    }
}
