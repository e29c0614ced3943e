//! The policy for workers that do not say what their steps take: a request goes where its prefix is cached, else to the
//! least loaded worker.
//!
//! Costs are counted in tokens that a worker computes before the request's first token, so that a
//! cached prefix and a queue weigh against each other in one unit.

use std::sync::Arc;

use baton_cluster_record::{Role, WorkerRecord};
use baton_cost::PromptWork;

use crate::{
    ClusterView, NoPlan, Plan, PlanRequest, Policy, Prefill, PrefillMode, SentWork, Usability, WorkerView,
    held::held,
};

/// The policy's parameters.
#[derive(Clone, Debug)]
pub struct PrefixAwareConfig {
    /// A prompt with fewer uncached tokens than this is computed by the decode worker: handing over
    /// would take longer than the work itself.
    pub local_prefill_below: usize,
    /// What one running or waiting sequence weighs, in tokens.
    pub tokens_per_sequence: u64,
    /// A prefix is fetched from another worker when that has at least so many tokens more of it.
    pub fetch_prefix_from: usize,
    /// The speed at which KV is transferred between workers. Only the choice between fetching and computing a prefix
    /// depends on it, so the order of magnitude is enough.
    pub transfer_bytes_per_second: f64,
}

/// The part of a fetch that does not depend on its bytes: a call, a grant, a first write, a commit.
const FETCH_SECONDS: f64 = 0.005;

impl Default for PrefixAwareConfig {
    fn default() -> PrefixAwareConfig {
        PrefixAwareConfig {
            local_prefill_below: 32,
            tokens_per_sequence: 64,
            fetch_prefix_from: 64,
            // 10 Gbit/s.
            transfer_bytes_per_second: 1e9,
        }
    }
}

/// Prefers, per phase, the worker with the least left to compute before the first token.
#[derive(Clone, Debug, Default)]
pub struct PrefixAware {
    config: PrefixAwareConfig,
}

impl PrefixAware {
    /// With these parameters.
    pub fn new(config: PrefixAwareConfig) -> PrefixAware {
        PrefixAware { config }
    }

    /// Tokens from which a prefix is fetched while nothing is measured.
    pub(crate) fn fetch_prefix_from(&self) -> usize {
        self.config.fetch_prefix_from.max(1)
    }

    /// Of a worker that must compute or fetch so many tokens of the request.
    fn cost(&self, worker: &WorkerView, uncached: usize) -> u64 {
        let sequences = (worker.load.num_running + worker.load.num_waiting).max(worker.num_assigned);
        // A worker may report any number.
        let mut cost = (uncached as u64)
            .saturating_add(worker.load.num_queued_tokens)
            .saturating_add(worker.sent.num_tokens)
            .saturating_add((sequences as u64).saturating_mul(self.config.tokens_per_sequence));
        if lacks_blocks(worker, uncached) {
            // The request would wait until others end: any worker with room is better.
            cost = cost.saturating_add(1 << 32);
        }
        cost
    }
}

impl PrefixAware {
    /// The worker that has so much more of the sequence cached than the one at `idx` that fetching is quicker than computing,
    /// and how many tokens more. `uncached` are the tokens that each worker of the view lacks.
    fn source(
        &self,
        idx: usize,
        request: &PlanRequest,
        view: &ClusterView,
        uncached: &[usize],
    ) -> (Option<Arc<WorkerRecord>>, usize) {
        let (worker, lacking) = (&view.workers[idx], uncached[idx]);
        // The last token is computed in any case.
        let most = lacking.saturating_sub(1);
        let sources = view.workers.iter().zip(uncached).filter(|(other, _)| {
            other.record.id != worker.record.id
                && matches!(other.usability, Usability::Ready | Usability::Draining)
                && other.is_like(worker)
                && !excluded(&other.record, request)
        });
        let best = sources
            .map(|(other, &uncached)| (lacking.saturating_sub(uncached).min(most), other))
            .filter(|&(gain, _)| {
                gain >= self.config.fetch_prefix_from.max(1) && self.is_quicker(worker, gain)
            })
            .max_by_key(|&(gain, other)| (gain, std::cmp::Reverse(other.num_assigned)));
        best.map_or((None, 0), |(gain, other)| (Some(other.record.clone()), gain))
    }

    /// Whether `worker` gets so many tokens sooner by fetching than by computing them. A worker that has computed nothing
    /// yet is assumed to be slow.
    fn is_quicker(&self, worker: &WorkerView, num_tokens: usize) -> bool {
        if worker.load.prefill_tokens_per_second == 0 {
            return true;
        }
        let format = &worker.record.kv_format;
        // A worker may report any number.
        let sizes = [2, format.num_layers, format.num_kv_heads, format.dtype.vector_bytes(format.head_dim)];
        let token_bytes: f64 = sizes.iter().map(|&size| size as f64).product();
        let fetching =
            FETCH_SECONDS + num_tokens as f64 * token_bytes / self.config.transfer_bytes_per_second;
        fetching < num_tokens as f64 / worker.load.prefill_tokens_per_second as f64
    }
}

impl Plan {
    /// A plan without an estimate. `prompt` is what must be computed.
    pub fn new(
        request: &PlanRequest,
        decode: &WorkerView,
        prefill: Prefill,
        prefix_source: Option<Arc<WorkerRecord>>,
        prompt: &PromptWork,
    ) -> Plan {
        let computed = |block_size: usize| SentWork {
            num_requests: 1,
            num_tokens: prompt.num_tokens as u64,
            num_pairs: prompt.num_pairs as u64,
            num_context_tokens: 0,
            num_blocks: request.num_tokens.div_ceil(block_size.max(1)) as u64,
        };
        let decoded = |work: SentWork| SentWork { num_context_tokens: request.num_tokens as u64, ..work };
        let own = computed(decode.record.kv_format.block_size);
        let (decode_work, prefill_work) = match &prefill {
            Prefill::Local => (decoded(own), SentWork::default()),
            Prefill::Remote(worker) => {
                let only_decoded = SentWork { num_tokens: 0, num_pairs: 0, ..own };
                (decoded(only_decoded), computed(worker.kv_format.block_size))
            }
        };
        Plan {
            decode: decode.record.clone(),
            prefill,
            prefix_source,
            decode_work,
            prefill_work,
            estimate: None,
            options: Vec::new(),
        }
    }
}

impl Policy for PrefixAware {
    fn plan(&self, request: &PlanRequest, view: &ClusterView) -> Result<Plan, NoPlan> {
        let candidates = decode_candidates(request, view)?;
        // Once: many workers may hold the beginning of a prompt.
        let uncached: Vec<usize> =
            held(request, view).map(|held| request.num_tokens - held.num_tokens).collect();
        // The cheapest; of equals the one with the fewest of our requests, then the first by name.
        let cost = |worker: &WorkerView, uncached| (self.cost(worker, uncached), worker.num_assigned);
        let least =
            |idxs: Vec<usize>| idxs.into_iter().min_by_key(|&idx| cost(&view.workers[idx], uncached[idx]));
        let decode_idx = least(places(candidates, view)).ok_or(NoPlan::NoDecodeWorker)?;
        let decode = &view.workers[decode_idx];
        let (source, num_fetched) = self.source(decode_idx, request, view, &uncached);
        let worth_it = match request.prefill {
            PrefillMode::Local => false,
            PrefillMode::Remote => true,
            PrefillMode::Auto => uncached[decode_idx] - num_fetched >= self.config.local_prefill_below,
        };
        let prefill_idx =
            if worth_it { least(places(prefill_candidates(request, decode, view), view)) } else { None };
        let (prefill, prefix_source) = match (prefill_idx, request.prefill) {
            (Some(idx), _) => {
                let worker = view.workers[idx].record.clone();
                (Prefill::Remote(worker), self.source(idx, request, view, &uncached).0)
            }
            (None, PrefillMode::Remote) => return Err(NoPlan::NoPrefillWorker),
            (None, _) => (Prefill::Local, source),
        };
        let num_held = request.num_tokens - uncached[prefill_idx.unwrap_or(decode_idx)];
        let num_cached = num_held.max(request.num_arriving.min(request.num_tokens.saturating_sub(1)));
        let prompt = PromptWork::new(request.num_tokens, num_cached);
        Ok(Plan::new(request, decode, prefill, prefix_source, &prompt))
    }
}

/// The prefill workers that may be asked to compute the prompt for `decode`.
pub fn prefill_candidates<'a>(
    request: &'a PlanRequest,
    decode: &'a WorkerView,
    view: &'a ClusterView,
) -> impl Iterator<Item = &'a WorkerView> {
    view.workers.iter().filter(|worker| {
        worker.record.role == Role::Prefill
            && worker.usability == Usability::Ready
            && worker.is_like(decode)
            && fits(&worker.record, request.num_tokens + 1)
            && !excluded(&worker.record, request)
    })
}

/// The decode workers that may be asked.
///
/// # Errors
/// The check that the last of them failed.
pub fn decode_candidates<'a>(
    request: &PlanRequest,
    view: &'a ClusterView,
) -> Result<Vec<&'a WorkerView>, NoPlan> {
    let num_tokens = request.max_tokens.max(request.num_tokens + 1);
    let is_asked = |worker: &&WorkerView| {
        worker.record.role == Role::Decode
            && worker.usability == Usability::Ready
            && fits(&worker.record, num_tokens)
            && !excluded(&worker.record, request)
    };
    let asked: Vec<_> = view.workers.iter().filter(is_asked).collect();
    if !asked.is_empty() {
        return Ok(asked);
    }
    // None: why, is the first check that the last of them fails.
    let all: Vec<_> = view.workers.iter().filter(|worker| worker.record.role == Role::Decode).collect();
    let pass = |workers: Vec<&'a WorkerView>, keep: &dyn Fn(&WorkerView) -> bool, otherwise: NoPlan| {
        let kept: Vec<_> = workers.into_iter().filter(|worker| keep(worker)).collect();
        if kept.is_empty() { Err(otherwise) } else { Ok(kept) }
    };
    let workers = pass(all, &|_| true, NoPlan::NoDecodeWorker)?;
    // First, because a worker that comes back has the same context.
    let workers = pass(workers, &|w| fits(&w.record, num_tokens), NoPlan::DecodeTooSmall { num_tokens })?;
    let num = workers.len();
    let workers =
        pass(workers, &|w| w.usability != Usability::Unreachable, NoPlan::DecodeUnreachable { num })?;
    let workers = pass(workers, &|w| w.usability != Usability::Draining, NoPlan::DecodeDraining)?;
    pass(
        workers,
        &|w| w.usability != Usability::BackingOff && !excluded(&w.record, request),
        NoPlan::DecodeFailed,
    )
}

/// The places in the view of workers that are in its order.
pub(crate) fn places<'a>(
    workers: impl IntoIterator<Item = &'a WorkerView>,
    view: &ClusterView,
) -> Vec<usize> {
    let mut left = workers.into_iter().peekable();
    let is_next = |&idx: &usize| left.next_if(|next| std::ptr::eq(*next, &view.workers[idx])).is_some();
    (0..view.workers.len()).filter(is_next).collect()
}

/// A worker that does not say its context takes anything.
pub(crate) fn fits(record: &WorkerRecord, num_tokens: usize) -> bool {
    record.capacity.context_length == 0 || num_tokens <= record.capacity.context_length
}

pub(crate) fn excluded(record: &WorkerRecord, request: &PlanRequest) -> bool {
    request.excluded.iter().any(|key| key.id == record.id && key.incarnation == record.incarnation)
}

fn lacks_blocks(worker: &WorkerView, num_tokens: usize) -> bool {
    let num_blocks = num_tokens.div_ceil(worker.record.kv_format.block_size.max(1)) as u64;
    let num_awaited = worker.sent.num_blocks.saturating_add(worker.load.num_queued_blocks as u64);
    let num_taken = num_blocks.saturating_add(num_awaited);
    worker.load.num_total_blocks > 0 && num_taken > worker.load.num_free_blocks as u64
}
