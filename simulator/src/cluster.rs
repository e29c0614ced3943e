//! Which workers and routers there are, what connects them, and what happens to them.

use std::time::Duration;

use baton_cluster_record::{Compute, Role};
use baton_cost::{LinkLine, StepLine};
use baton_kv_cache::KvFormat;
use baton_kv_events::MAX_TIERS;

use crate::time::SimTime;

/// A cluster.
#[derive(Clone, Debug)]
pub struct ClusterSpec {
    /// Its workers, ordered by role: decode before prefill, as their names are.
    pub workers: Vec<WorkerSpec>,
    /// Routers. Each request comes to one of them; each has a ledger and an index of its own.
    pub num_routers: usize,
    /// How routers plan.
    pub policy: PolicyName,
    /// What a request should meet.
    pub slo_ttft: SloTarget,
    /// As above, between tokens.
    pub slo_tpot: SloTarget,
    /// Shortest time between two load reports of a worker.
    pub report_interval: SimTime,
    /// From a call until it arrives.
    pub call: SimTime,
    /// KV from worker to worker.
    pub link: LinkLine,
    /// Attempts of a request.
    pub max_attempts: u32,
    /// Whether running requests migrate from much fuller decode workers to emptier ones.
    pub balances: bool,
    /// How long a request waits for a worker.
    pub recovery_timeout: Duration,
    /// How long every step takes differs by at most this part.
    pub noise: f64,
    /// What happens to workers.
    pub changes: Vec<Change>,
    /// Of all chance.
    pub seed: u64,
}

/// One worker.
#[derive(Clone, Debug)]
pub struct WorkerSpec {
    /// What it serves.
    pub role: Role,
    /// Devices that it computes with.
    pub num_devices: usize,
    /// What its steps take, if it is as fast as the others.
    pub step: StepLine,
    /// How many times as long its steps take.
    pub slowness: f64,
    /// What its KV means, with the size of its blocks.
    pub kv_format: KvFormat,
    /// Bytes of a token's KV.
    pub kv_bytes_per_token: f64,
    /// Blocks in its pool.
    pub num_blocks: usize,
    /// The tiers below it, the fastest first; two at most.
    pub tiers: Vec<TierSpec>,
    /// Sequences that run at a time.
    pub max_running: usize,
    /// Requests that may wait.
    pub max_waiting: usize,
    /// Tokens that a step computes.
    pub token_budget: usize,
    /// Target time between tokens beside which prompts are computed.
    pub itl_target: Option<Duration>,
    /// Longest sequence.
    pub context_length: usize,
    /// The processors that compute for it. Workers that have some in common advance at the same speed. `None`: its own.
    pub compute: Option<Compute>,
}

impl WorkerSpec {
    /// Blocks of each tier; 0: there is none.
    pub(crate) fn tier_blocks(&self) -> [usize; MAX_TIERS] {
        std::array::from_fn(|tier| self.tiers.get(tier).map_or(0, |tier| tier.num_blocks))
    }
}

/// A tier below the pool of a worker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TierSpec {
    /// Blocks that it holds.
    pub num_blocks: usize,
    /// How fast it is read, and at the same time written.
    pub link: LinkLine,
}

/// Something happens to a worker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Change {
    /// When.
    pub at: SimTime,
    /// To which one, by its place in the cluster.
    pub worker_idx: usize,
    /// What.
    pub kind: ChangeKind,
}

/// What happens to a worker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ChangeKind {
    /// It dies, with all that it has.
    Fail,
    /// It starts, empty. A worker whose first change is this one is absent until then.
    Join,
    /// From now on its steps take so many times as long.
    Slow(f64),
}

/// A latency that a request should meet.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SloTarget {
    /// Seconds.
    Seconds(f64),
    /// So many times what the request takes alone on a worker.
    TimesAlone(f64),
}

impl SloTarget {
    /// The target of a request that alone takes so many seconds.
    pub fn seconds(self, alone: f64) -> f64 {
        match self {
            SloTarget::Seconds(seconds) => seconds,
            SloTarget::TimesAlone(factor) => factor * alone,
        }
    }
}

/// How routers plan.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PolicyName {
    /// The router's own: predicted times.
    Baton,
    /// The router's own before it predicted: constants.
    Constants,
    /// One of other systems.
    Baseline(crate::policies::Baseline),
}
