//! A plan, what it is expected to take, and the order of plans.

use std::{cmp::Ordering, sync::Arc};

use baton_cluster_record::WorkerRecord;

use crate::ledger::SentWork;

/// Which workers serve a request.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Owns the request.
    pub decode: Arc<WorkerRecord>,
    /// Computes the prompt.
    pub prefill: Prefill,
    /// Has more of the sequence cached than the worker that computes the prompt, which fetches it from here first.
    pub prefix_source: Option<Arc<WorkerRecord>>,
    /// What it brings to the decode worker.
    pub decode_work: SentWork,
    /// What it brings to the prefill worker, if there is one.
    pub prefill_work: SentWork,
    /// What it was expected to take. `None`: workers did not say what their steps take.
    pub estimate: Option<Estimate>,
    /// What it was chosen from, best first, if that was asked for.
    pub options: Vec<PlanOption>,
}

impl Plan {
    /// The id of the prefix source, if there is one.
    pub fn prefix_source_id(&self) -> Option<&str> {
        self.prefix_source.as_ref().map(|source| source.id.as_str())
    }
}

/// Who computes the prompt.
#[derive(Clone, Debug)]
pub enum Prefill {
    /// The decode worker.
    Local,
    /// This prefill worker.
    Remote(Arc<WorkerRecord>),
}

impl Prefill {
    /// "local" or "remote".
    pub fn name(&self) -> &'static str {
        match self {
            Prefill::Local => "local",
            Prefill::Remote(_) => "remote",
        }
    }

    /// The id of the prefill worker, if one computes the prompt.
    pub fn worker_id(&self) -> Option<&str> {
        match self {
            Prefill::Local => None,
            Prefill::Remote(worker) => Some(worker.id.as_str()),
        }
    }
}

/// Seconds that a plan is expected to take. They are those of this request, but for `harm` and `missed`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Estimate {
    /// Until what is cached in tiers is in a pool: at the worker that computes the prompt, and at the one that gives a prefix.
    pub recall: f64,
    /// After that, until a cached prefix is fetched.
    pub fetch: f64,
    /// Until the worker that computes the prompt begins with it.
    pub queue: f64,
    /// Until the prompt is computed, from then on, beside what the worker decodes and what else computes on its processors.
    pub compute: f64,
    /// Tokens of passages whose KV is kept where the prompt is computed. `compute` counts a part of them.
    pub num_kept: usize,
    /// Until the first token: all of the above, and the calls of a handoff.
    pub ttft: f64,
    /// After the first token, until the KV that computation did not hide has arrived.
    pub exposed: f64,
    /// Mean time between tokens, `exposed` included.
    pub tpot: f64,
    /// From the first to the last expected token.
    pub decode: f64,
    /// Added to all other requests together.
    pub harm: f64,
    /// What missed SLOs count as: its own, and the slack that it takes from running ones.
    pub missed: f64,
    /// SLOs of this request that are missed.
    pub num_broken: u32,
    /// Whether the decode worker has blocks and a slot for it now.
    pub has_room: bool,
}

/// One way to serve a request.
#[derive(Clone, Debug)]
pub struct PlanOption {
    /// Owns the request.
    pub decode: Arc<WorkerRecord>,
    /// Computes the prompt.
    pub prefill: Prefill,
    /// Gives a cached prefix.
    pub prefix_source: Option<Arc<WorkerRecord>>,
    /// What it is expected to take.
    pub estimate: Estimate,
}

impl Estimate {
    /// Seconds that the plan adds to all requests together, missed SLOs included: what is made least.
    pub fn total(&self) -> f64 {
        self.ttft + self.decode + self.harm + self.missed
    }

    /// Better plans first: with room, with less time.
    pub(crate) fn order(&self, other: &Estimate) -> Ordering {
        other.has_room.cmp(&self.has_room).then(self.total().total_cmp(&other.total()))
    }
}
