//! The planner's policy, and what it asks of workers and the index of their caches.

use std::sync::atomic::{AtomicU64, Ordering};

use baton_cluster::{Role, WorkerRecord};
use baton_planner::{
    BlendedPassages, ClusterView, NoPlan, Plan, PlanByTime, PlanRequest, Policy, Prefill, PrefillMode,
    PrefixAware, Slo, WorkerKey, expected_output,
};
use baton_request::Request;
use baton_router_workers::{SequenceHashes, Workers};

use crate::config::{PlanBasis, RouterConfig};

/// Plans requests.
#[derive(Debug)]
pub(crate) struct Planner {
    policy: Box<dyn Policy>,
    slo: Slo,
    /// Differs from plan to plan and from router to router.
    seed: AtomicU64,
    /// Output tokens of a request that has finished, on average over the newest, as the bits of an `f64`.
    num_expected: AtomicU64,
}

/// What a plan is asked for, beside the request itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlanWish<'a> {
    pub(crate) prefill: PrefillMode,
    pub(crate) excluded: &'a [WorkerKey],
    /// `None` where the router's own holds.
    pub(crate) slo: Slo,
    pub(crate) explain: bool,
    pub(crate) migrating: Option<Migrating<'a>>,
}

/// From where to where a running request migrates.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Migrating<'a> {
    pub(crate) from: &'a std::sync::Arc<WorkerRecord>,
    /// `None`: the worker that serves it best.
    pub(crate) to: Option<&'a WorkerKey>,
    /// Whether the old worker can give its KV.
    pub(crate) with_kv: bool,
}

impl Planner {
    /// `seed` differs from router to router.
    pub(crate) fn new(config: &RouterConfig, seed: u64) -> Planner {
        let constants = PrefixAware::new(config.policy.clone());
        Planner {
            policy: match config.plan_by {
                PlanBasis::Time => Box::new(PlanByTime::new(constants)),
                PlanBasis::Constants => Box::new(constants),
            },
            slo: config.slo,
            seed: AtomicU64::new(seed),
            num_expected: AtomicU64::new(0),
        }
    }

    /// Plans, and remembers where the prefix is going to be. `hashes` are those of the request's known tokens.
    pub(crate) fn plan(
        &self,
        workers: &Workers,
        request: &Request,
        hashes: &SequenceHashes,
        wish: PlanWish<'_>,
    ) -> Result<Plan, NoPlan> {
        let mut view = workers.view();
        let PlanWish { prefill, excluded, slo, explain, migrating } = wish;
        let blend = request.blended().map(|marks| BlendedPassages {
            num_tokens: marks.passages.iter().map(ExactSizeIterator::len).sum(),
            end_idx: marks.end_idx(),
            layer: marks.layer,
            ratio: marks.ratio.unwrap_or(1.0),
            kept: workers.kept_passages(hashes.passages()),
        });
        let mut cached = workers.cached(hashes);
        // A part of a blended head is never used.
        cached.retain(|cached| blend.as_ref().is_none_or(|blend| cached.num_tokens >= blend.end_idx));
        let mut request = PlanRequest {
            num_tokens: request.num_known_tokens(),
            num_arriving: 0,
            max_tokens: request.max_num_tokens(usize::MAX),
            cached,
            blend,
            excluded: excluded.to_vec(),
            prefill,
            slo: Slo { ttft: slo.ttft.or(self.slo.ttft), tpot: slo.tpot.or(self.slo.tpot) },
            num_expected_tokens: self.num_expected_tokens(),
            seed: self.seed.fetch_add(1, Ordering::Relaxed),
            explain,
        };
        if let Some(Migrating { from, to, with_kv }) = migrating {
            request.excluded.push(WorkerKey::of(from));
            if with_kv {
                // All but a part of a block is there.
                let block_size = from.kv_format.block_size.max(1);
                request.num_arriving = request.num_tokens / block_size * block_size;
            }
            request.prefill = PrefillMode::Local;
            let is_allowed = |key: WorkerKey| to.is_none_or(|to| *to == key);
            view.workers.retain(|worker| {
                worker.record.role != Role::Decode
                    || (is_allowed(WorkerKey::of(&worker.record))
                        && worker.record.kv_format.difference(&from.kv_format).is_none())
            });
        }
        let mut plan = self.policy.plan(&request, &view)?;
        if let Some(Migrating { from, with_kv: true, .. }) = migrating {
            plan.prefix_source = Some(from.clone());
        }
        let computes = match &plan.prefill {
            Prefill::Remote(worker) => worker,
            Prefill::Local => &plan.decode,
        };
        for (hash, _) in hashes.passages() {
            workers.expect_cached(&WorkerKey::of(computes), std::slice::from_ref(hash));
        }
        workers.expect_cached(&WorkerKey::of(&plan.decode), hashes.of(&plan.decode.kv_format));
        if let Prefill::Remote(worker) = &plan.prefill {
            workers.expect_cached(&WorkerKey::of(worker), hashes.of(&worker.kv_format));
        }
        Ok(plan)
    }

    /// Remembers that a decode worker holds a whole conversation now: its next turn begins with it. `hashes` are those that it
    /// was planned with, of which only the output is hashed; `None`: it holds nothing of it.
    pub(crate) fn note_finished(
        &self,
        workers: &Workers,
        worker: &WorkerKey,
        request: &Request,
        hashes: Option<&mut SequenceHashes>,
    ) {
        if let (Some(hashes), Some(record)) = (hashes, workers.record(worker)) {
            hashes.advance(request);
            workers.note_cached(worker, hashes.of(&record.kv_format));
        }
        let newest = request.output.len() as f64;
        let update = |bits| Some(expected_output(f64::from_bits(bits), newest).to_bits());
        // It always returns some.
        let _ = self.num_expected.fetch_update(Ordering::Relaxed, Ordering::Relaxed, update);
    }

    /// Why a small request could not be served now; `None` when it could.
    pub(crate) fn probe(&self, view: &ClusterView) -> Option<NoPlan> {
        self.policy.plan(&PlanRequest::default(), view).err()
    }

    fn num_expected_tokens(&self) -> usize {
        f64::from_bits(self.num_expected.load(Ordering::Relaxed)) as usize
    }
}
