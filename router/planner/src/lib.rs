//! Who serves a request: plain data in ([`PlanRequest`], [`ClusterView`]), a [`Plan`] out ([`Policy`]). Beside it the
//! [`PrefixIndex`], the [`Balance`] between decode workers, and the rules of [`Retry`].
//!
//! Pure: it reads no clock, takes no lock and sends nothing. Time comes in as an argument, so that a simulator drives the
//! same decisions under its own time. It does not know HTTP, the protocol, or how a worker is reached.
// Invariant 12: `cargo xtask verify purity` checks that this crate reaches no runtime and no clock.
#![forbid(unsafe_code)]

mod balance;
mod policy;
mod prefix_index;
mod retry;
#[cfg(test)]
mod tests;

use std::{fmt, sync::Arc};

use baton_cluster_record::{Role, WorkerId, WorkerRecord};

pub use balance::{Balance, Migration};
pub use policy::{PrefixAware, PrefixAwareConfig};
pub use prefix_index::PrefixIndex;
pub use retry::{AttemptStage, Blame, GiveUp, Retry};

/// Decides who computes the prompt and who decodes.
pub trait Policy: Send + Sync + fmt::Debug {
    /// The best plan now.
    ///
    /// # Errors
    /// Says what is missing.
    fn plan(&self, request: &PlanRequest, view: &ClusterView) -> Result<Plan, NoPlan>;
}

/// One life of one worker process.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerKey {
    /// Its name.
    pub id: WorkerId,
    /// Which start of the process.
    pub incarnation: u64,
}

impl WorkerKey {
    /// The key of a record.
    pub fn of(record: &WorkerRecord) -> WorkerKey {
        WorkerKey { id: record.id.clone(), incarnation: record.incarnation }
    }
}

impl fmt::Display for WorkerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.id.fmt(f)
    }
}

/// What a plan must know of a request.
#[derive(Clone, Debug, Default)]
pub struct PlanRequest {
    /// Tokens whose KV is needed: the prompt and what earlier attempts delivered.
    pub num_tokens: usize,
    /// Tokens of the sequence at its longest.
    pub max_tokens: usize,
    /// Tokens at the front that workers are believed to hold. A worker that is absent holds none.
    pub cached: Vec<(WorkerKey, usize)>,
    /// Workers that must not be asked: they failed this request already.
    pub excluded: Vec<WorkerKey>,
    /// Where the prompt is computed.
    pub prefill: PrefillMode,
}

/// Where a prompt is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PrefillMode {
    /// The policy decides.
    #[default]
    Auto,
    /// On the decode worker itself.
    Local,
    /// On a prefill worker, or not at all.
    Remote,
}

/// The workers as the router sees them at one moment.
#[derive(Clone, Debug, Default)]
pub struct ClusterView {
    /// Every known worker, ordered by id.
    pub workers: Vec<WorkerView>,
}

/// One worker as the router sees it.
#[derive(Clone, Debug)]
pub struct WorkerView {
    /// What it says about itself.
    pub record: Arc<WorkerRecord>,
    /// Whether it can be sent to.
    pub usability: Usability,
    /// Its newest load report.
    pub load: Load,
    /// Requests that this router has with it now; its report may not count the newest yet.
    pub num_assigned: usize,
}

/// Whether a worker can be sent to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Usability {
    /// It answers.
    Ready,
    /// It does not answer, or has not yet.
    Unreachable,
    /// It failed a moment ago and is not asked for a while.
    BackingOff,
    /// It is about to leave.
    Draining,
}

/// How busy a worker is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Requests that wait there.
    pub num_waiting: usize,
    /// Requests in its batch.
    pub num_running: usize,
    /// Blocks that are free or can be evicted.
    pub num_free_blocks: usize,
    /// Blocks in its pool.
    pub num_total_blocks: usize,
    /// Prompt tokens that wait to be computed.
    pub num_queued_tokens: u64,
    /// Prompt tokens that it computes in a second; 0 when it has not computed any.
    pub prefill_tokens_per_second: u64,
}

/// Which workers serve a request.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Owns the request.
    pub decode: Arc<WorkerRecord>,
    /// Computes the prompt.
    pub prefill: Prefill,
    /// Has more of the sequence cached than the worker that computes the prompt, which fetches it from here first.
    pub prefix_source: Option<Arc<WorkerRecord>>,
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
}

/// Why there is no plan, in words for the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoPlan {
    /// No decode worker exists.
    #[error("no decode worker is registered")]
    NoDecodeWorker,
    /// None of the workers that could serve it answers.
    #[error("no decode worker answers ({num} registered)")]
    DecodeUnreachable {
        /// How many of them are registered.
        num: usize,
    },
    /// All workers that answer are about to leave.
    #[error("every decode worker is draining")]
    DecodeDraining,
    /// Each has failed this request, or failed a moment ago.
    #[error("every decode worker has failed a moment ago")]
    DecodeFailed,
    /// The sequence is longer than any worker's context.
    #[error("no decode worker has a context of {num_tokens} tokens")]
    DecodeTooSmall {
        /// What is needed.
        num_tokens: usize,
    },
    /// The request demands remote prefill, and no prefill worker is usable.
    #[error("no prefill worker is usable, and the request demands one")]
    NoPrefillWorker,
}

impl NoPlan {
    /// The role of which a worker has to come back; none when that cannot help.
    pub fn lacks(self) -> Option<Role> {
        match self {
            NoPlan::DecodeTooSmall { .. } => None,
            NoPlan::NoPrefillWorker => Some(Role::Prefill),
            NoPlan::NoDecodeWorker
            | NoPlan::DecodeUnreachable { .. }
            | NoPlan::DecodeDraining
            | NoPlan::DecodeFailed => Some(Role::Decode),
        }
    }
}
