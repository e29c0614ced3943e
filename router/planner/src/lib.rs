//! Who serves a request: plain data in ([`PlanRequest`], [`ClusterView`]), a [`Plan`] out ([`Policy`]). Beside it the
//! [`Ledger`] of what was sent, the [`Balance`] between decode workers, and the rules of [`Retry`].
//!
//! Pure: it reads no clock, takes no lock and sends nothing. Time comes in as an argument, so that a simulator drives the
//! same decisions under its own time. It does not know HTTP, the protocol, or how a worker is reached.
// Invariant 12: `cargo xtask verify purity` checks that this crate reaches no runtime and no clock.
#![forbid(unsafe_code)]

mod back_off;
mod balance;
mod by_time;
mod expected_output;
mod held;
mod ledger;
mod outlook;
mod plan;
mod policy;
mod retry;
#[cfg(test)]
mod tests;

use std::{fmt, sync::Arc, time::Duration};

use baton_cluster_record::{KvClass, Role, WorkerId, WorkerRecord};
use baton_kv_events::MAX_TIERS;

pub use back_off::BackOff;
pub use balance::{Balance, Migration};
pub use baton_cost::{LinkLine, StepLine, StepYield};
pub use by_time::PlanByTime;
pub use expected_output::expected_output;
pub use ledger::{Ledger, SentWork};
pub use plan::{Estimate, Plan, PlanOption, Prefill};
pub use policy::{PrefixAware, PrefixAwareConfig, decode_candidates, prefill_candidates};
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
    /// Of these, tokens at the front whose KV comes with the request, from a worker that it leaves.
    pub num_arriving: usize,
    /// Tokens of the sequence at its longest.
    pub max_tokens: usize,
    /// What workers are believed to hold of its front. A worker that is absent holds nothing.
    pub cached: Vec<HeldPrefix>,
    /// How its passages are blended. `None`: it has none, or it is not decided.
    pub blend: Option<BlendedPassages>,
    /// Workers that must not be asked: they failed this request already.
    pub excluded: Vec<WorkerKey>,
    /// Where the prompt is computed.
    pub prefill: PrefillMode,
    /// What the request should meet.
    pub slo: Slo,
    /// Tokens that it is expected to generate; 0: not known.
    pub num_expected_tokens: usize,
    /// Chooses among plans that are as good. Routers with different seeds do not all take the same.
    pub seed: u64,
    /// Whether the plan lists what it was chosen from.
    pub explain: bool,
}

/// What a worker is believed to hold of the front of a request.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct HeldPrefix {
    /// Which worker.
    pub worker: Arc<WorkerKey>,
    /// Tokens in its pool or in the tiers below it.
    pub num_tokens: usize,
    /// Of these, tokens at the front above each tier: in the pool, then in the pool or the first tier, and so on. The others are recalled
    /// before they are used.
    pub above: [usize; MAX_TIERS],
    /// Tokens at the front, together with those that follow in the object store that the worker shares: `num_tokens` or more.
    pub with_store: usize,
}

impl HeldPrefix {
    /// All of it in the pool.
    pub fn pooled(worker: Arc<WorkerKey>, num_tokens: usize) -> HeldPrefix {
        HeldPrefix::above_tiers(worker, num_tokens, &[])
    }

    /// Of these so many at the front above each of the worker's tiers.
    pub fn above_tiers(worker: Arc<WorkerKey>, num_tokens: usize, above: &[usize]) -> HeldPrefix {
        let above = std::array::from_fn(|tier| above.get(tier).copied().unwrap_or(num_tokens));
        HeldPrefix { worker, num_tokens, above, with_store: num_tokens }
    }
}

/// The passages of a request.
#[derive(Clone, Debug, Default)]
pub struct BlendedPassages {
    /// Their tokens.
    pub num_tokens: usize,
    /// Where the last one ends: a prefix that ends before is not used.
    pub end_idx: usize,
    /// The layer whose keys select tokens. Those before it are computed for all.
    pub layer: u32,
    /// The part that is computed again.
    pub ratio: f32,
    /// Tokens of those whose KV workers are believed to have kept. A worker that is absent has kept none.
    pub kept: Vec<(Arc<WorkerKey>, usize)>,
}

/// Latencies that a request should meet, in seconds. `None`: any.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Slo {
    /// Time to the first token.
    pub ttft: Option<f64>,
    /// Mean time between tokens.
    pub tpot: Option<f64>,
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
    /// That of its KV's format. A plan compares it many times for each worker.
    pub kv_class: KvClass,
    /// Whether it can be sent to.
    pub usability: Usability,
    /// Its newest load report.
    pub load: Load,
    /// Requests that this router has with it now; its report may not count the newest yet.
    pub num_assigned: usize,
    /// What this router sent to it and its report does not count.
    pub sent: SentWork,
}

impl WorkerView {
    /// Whether it understands the other one's blocks.
    pub(crate) fn is_like(&self, other: &WorkerView) -> bool {
        self.kv_class == other.kv_class
    }
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

impl Usability {
    /// The word in metrics and listings.
    pub fn name(self) -> &'static str {
        match self {
            Usability::Ready => "ready",
            Usability::Unreachable => "unreachable",
            Usability::BackingOff => "backing_off",
            Usability::Draining => "draining",
        }
    }
}

/// How busy a worker is.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// Requests that wait there.
    pub num_waiting: usize,
    /// Requests in its batch.
    pub num_running: usize,
    /// Blocks that are free or can be evicted.
    pub num_free_blocks: usize,
    /// Blocks in its pool.
    pub num_total_blocks: usize,
    /// How old the report is: its queue has shrunk since.
    pub age: Duration,
    /// Prompt tokens that wait to be computed.
    pub num_queued_tokens: u64,
    /// Blocks that must be free to admit all that waits, cached ones included.
    pub num_queued_blocks: usize,
    /// Prompt tokens that it computes in a second; 0 when it has not computed any.
    pub prefill_tokens_per_second: u64,
    /// What its steps take. `None`: an older worker.
    pub pace: Option<WorkerPace>,
    /// Whether it blends passages.
    pub blends: bool,
    /// To workers of the same machine.
    pub link_within: Option<LinkLine>,
    /// To workers of others.
    pub link_beyond: Option<LinkLine>,
    /// Whether the worker belongs to another router: others that are about as good are preferred.
    pub is_home_of_another: bool,
    /// Seconds for the KV of a token from each of its tiers, the fastest first, as measured recently; 0: not known.
    pub recall_token_seconds: [f64; MAX_TIERS],
    /// What KV from its object store takes. `None`: it has none, or reads nothing from it, as its speed is not known.
    pub store_pace: Option<StorePace>,
}

/// What it takes to recall KV from an object store.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StorePace {
    /// Seconds until it begins to come.
    pub latency_seconds: f64,
    /// Seconds for the KV of a token.
    pub token_seconds: f64,
}

/// What the steps of a worker take, and what they compute now.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WorkerPace {
    /// Seconds of a step.
    pub step: StepLine,
    /// Whether steps were measured. Otherwise the line is a prior.
    pub is_measured: bool,
    /// Sequences that decode.
    pub num_decoding: usize,
    /// Their tokens, all together.
    pub num_context_tokens: u64,
    /// Pairs of a queued prompt token and a token that it will see.
    pub num_queued_pairs: u64,
    /// Between two tokens of a sequence that decodes, recently, in seconds; 0 when none did.
    pub recent_itl: f64,
    /// Tokens that a step yields for such a sequence.
    pub step_yield: StepYield,
    /// Tokens that a step computes at most; 0: not known.
    pub max_step_tokens: usize,
    /// Target time between tokens beside which prompts are computed in chunks, in seconds; 0: none.
    pub itl_target: f64,
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
