//! What other systems do, to compare with. They are policies of the planner's seam and get what the real one gets: the same
//! reports, ledger and index.

use std::sync::atomic::{AtomicU64, Ordering};

use baton_cost::PromptWork;
use baton_planner::{
    ClusterView, NoPlan, Plan, PlanRequest, Policy, Prefill, WorkerKey, WorkerView, decode_candidates,
    prefill_candidates,
};

/// A policy of other systems: who is chosen, and where prompts are computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Baseline {
    /// Who is chosen among those that may be asked.
    pub choice: BaselineChoice,
    /// Whether prompts go to prefill workers: all, or none.
    pub is_separated: bool,
}

/// Who is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum BaselineChoice {
    /// One after the other.
    RoundRobin,
    /// The one with the fewest requests.
    LeastLoaded,
    /// The one with the most of the prompt cached, unless it has so many times the mean number of requests.
    PrefixOnly {
        /// 1: never above the mean.
        most_imbalance: f64,
    },
    /// The least product of uncached tokens, its queue's included, and requests (LMetric).
    NewTokensTimesBatch,
}

/// A baseline with its state.
#[derive(Debug)]
pub struct BaselinePolicy {
    baseline: Baseline,
    turns: [AtomicU64; 2],
}

impl BaselinePolicy {
    /// In its first state.
    pub fn new(baseline: Baseline) -> BaselinePolicy {
        BaselinePolicy { baseline, turns: Default::default() }
    }

    fn choose<'a>(
        &self,
        candidates: &[&'a WorkerView],
        turn: &AtomicU64,
        request: &PlanRequest,
    ) -> Option<&'a WorkerView> {
        let num_requests = |worker: &WorkerView| {
            (worker.load.num_running + worker.load.num_waiting) as u64 + worker.sent.num_requests
        };
        let least = |candidates: &[&'a WorkerView], cost: &dyn Fn(&WorkerView) -> f64| {
            // Of equals the seed decides, as in the real policy.
            let place =
                |idx: usize| (idx as u64).wrapping_add(request.seed).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            let costs =
                candidates.iter().enumerate().map(|(idx, worker)| (cost(worker), place(idx), *worker));
            costs.min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1))).map(|(.., worker)| worker)
        };
        match self.baseline.choice {
            BaselineChoice::RoundRobin => {
                let turn = turn.fetch_add(1, Ordering::Relaxed);
                candidates.get((turn % candidates.len().max(1) as u64) as usize).copied()
            }
            BaselineChoice::LeastLoaded => least(candidates, &|worker| num_requests(worker) as f64),
            BaselineChoice::PrefixOnly { most_imbalance } => {
                let total: u64 = candidates.iter().map(|worker| num_requests(worker)).sum();
                let most = (most_imbalance * total as f64 / candidates.len().max(1) as f64).max(1.0);
                let even: Vec<&WorkerView> =
                    candidates.iter().copied().filter(|worker| num_requests(worker) as f64 <= most).collect();
                let even = if even.is_empty() { candidates } else { &even };
                // Of the same prefix, the one with the fewest requests.
                least(even, &|worker| uncached(worker, request) as f64 + 1e-6 * num_requests(worker) as f64)
            }
            BaselineChoice::NewTokensTimesBatch => least(candidates, &|worker| {
                let queued = worker.load.num_queued_tokens + worker.sent.num_tokens;
                (uncached(worker, request) as u64 + queued) as f64 * (num_requests(worker) + 1) as f64
            }),
        }
    }
}

impl Policy for BaselinePolicy {
    fn plan(&self, request: &PlanRequest, view: &ClusterView) -> Result<Plan, NoPlan> {
        let candidates = decode_candidates(request, view)?;
        if !self.baseline.is_separated {
            let decode = self.choose(&candidates, &self.turns[0], request).ok_or(NoPlan::NoDecodeWorker)?;
            let prompt = PromptWork::new(request.num_tokens, request.num_tokens - uncached(decode, request));
            return Ok(Plan::new(request, decode, Prefill::Local, None, &prompt));
        }
        // What decodes has nothing to compute: the fewest requests.
        let fewest = |worker: &&&WorkerView| {
            (worker.load.num_running + worker.load.num_waiting) as u64 + worker.sent.num_requests
        };
        let decode = match self.baseline.choice {
            BaselineChoice::RoundRobin => self.choose(&candidates, &self.turns[0], request),
            _ => candidates.iter().min_by_key(fewest).copied(),
        };
        let decode = decode.ok_or(NoPlan::NoDecodeWorker)?;
        let peers: Vec<&WorkerView> = prefill_candidates(request, decode, view).collect();
        let prefill = self.choose(&peers, &self.turns[1], request).ok_or(NoPlan::NoPrefillWorker)?;
        let prompt = PromptWork::new(request.num_tokens, request.num_tokens - uncached(prefill, request));
        Ok(Plan::new(request, decode, Prefill::Remote(prefill.record.clone()), None, &prompt))
    }
}

/// Tokens of the request that the worker must compute.
fn uncached(worker: &WorkerView, request: &PlanRequest) -> usize {
    let is_it = |key: &WorkerKey| key.id == worker.record.id && key.incarnation == worker.record.incarnation;
    let cached =
        request.cached.iter().find(|cached| is_it(&cached.worker)).map_or(0, |cached| cached.num_tokens);
    request.num_tokens.saturating_sub(cached)
}
