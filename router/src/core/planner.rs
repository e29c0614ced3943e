//! The planner's policy and its prefix index, behind a lock that is held for lookups only.

use std::{
    borrow::Cow,
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use baton_cluster::{Role, WorkerRecord};
use baton_kv_cache::{BlockHash, HashRoot};
use baton_planner::{
    ClusterView, NoPlan, Plan, PlanRequest, Policy, Prefill, PrefillMode, PrefixAware, PrefixAwareConfig,
    PrefixIndex, WorkerKey,
};
use baton_request::Request;

use crate::workers::Workers;

/// Plans requests.
#[derive(Debug)]
pub(crate) struct Planner {
    policy: Box<dyn Policy>,
    index: Mutex<PrefixIndex<BlockHash>>,
}

/// From where to where a running request migrates.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Migrating<'a> {
    pub(crate) from: &'a Arc<WorkerRecord>,
    /// `None`: the worker that serves it best.
    pub(crate) to: Option<&'a WorkerKey>,
}

impl Planner {
    pub(crate) fn new(config: PrefixAwareConfig, index_blocks: usize) -> Planner {
        Planner {
            policy: Box::new(PrefixAware::new(config)),
            index: Mutex::new(PrefixIndex::new(index_blocks)),
        }
    }

    /// Plans, and remembers where the prefix is going to be.
    pub(crate) fn plan(
        &self,
        workers: &Workers,
        request: &Request,
        prefill: PrefillMode,
        excluded: &[WorkerKey],
        migrating: Option<Migrating<'_>>,
    ) -> Result<Plan, NoPlan> {
        let mut view = workers.view();
        let hashes = hashes(&view, |_| true, request);
        let mut request = PlanRequest {
            num_tokens: request.num_known_tokens(),
            max_tokens: request.max_num_tokens(usize::MAX),
            cached: self.cached(&hashes),
            excluded: excluded.to_vec(),
            prefill,
        };
        if let Some(Migrating { from, to }) = migrating {
            request.excluded.push(WorkerKey::of(from));
            // All but a part of a block is there.
            request.prefill = PrefillMode::Local;
            let is_allowed = |key: WorkerKey| to.is_none_or(|to| *to == key);
            view.workers.retain(|worker| {
                worker.record.role != Role::Decode
                    || (is_allowed(WorkerKey::of(&worker.record))
                        && worker.record.kv_format.difference(&from.kv_format).is_none())
            });
        }
        let mut plan = self.policy.plan(&request, &view)?;
        if let Some(Migrating { from, .. }) = migrating {
            plan.prefix_source = Some(from.clone());
        }
        let mut index = self.index();
        index.insert(&hashes[&plan.decode.kv_format.block_size], &WorkerKey::of(&plan.decode));
        if let Prefill::Remote(worker) = &plan.prefill {
            index.insert(&hashes[&worker.kv_format.block_size], &WorkerKey::of(worker));
        }
        Ok(plan)
    }

    /// Remembers that a decode worker holds a whole conversation now: its next turn begins with it.
    pub(crate) fn note_finished(&self, workers: &Workers, worker: &WorkerKey, request: &Request) {
        let hashes = hashes(&workers.view(), |other| other == worker, request);
        for hashes in hashes.values() {
            self.index().insert(hashes, worker);
        }
    }

    /// Why a small request could not be served now; `None` when it could.
    pub(crate) fn probe(&self, view: &ClusterView) -> Option<NoPlan> {
        self.policy.plan(&PlanRequest::default(), view).err()
    }

    /// Tokens at the front that each worker is believed to hold: a worker is remembered by blocks of its own size.
    fn cached(&self, hashes: &Hashes) -> Vec<(WorkerKey, usize)> {
        let index = self.index();
        let holders = hashes.iter().flat_map(|(block_size, hashes)| {
            let holders = index.holders(hashes).into_iter();
            holders.map(move |(key, num_blocks)| (key, num_blocks * block_size))
        });
        holders.collect()
    }

    fn index(&self) -> MutexGuard<'_, PrefixIndex<BlockHash>> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Of one sequence, by block size.
type Hashes = BTreeMap<usize, Vec<BlockHash>>;

/// The sequence's blocks, in every size that one of these workers has.
fn hashes(view: &ClusterView, of: impl Fn(&WorkerKey) -> bool, request: &Request) -> Hashes {
    let mut hashes = Hashes::new();
    let tokens = match &request.output[..] {
        [] => Cow::Borrowed(&request.prompt[..]),
        output => Cow::Owned([&request.prompt[..], output].concat()),
    };
    for worker in view.workers.iter().filter(|worker| of(&WorkerKey::of(&worker.record))) {
        let format = &worker.record.kv_format;
        hashes.entry(format.block_size).or_insert_with(|| {
            let root = HashRoot::new(&format.model_revision, "", &request.cache_salt);
            root.block_hashes(&tokens, format.block_size).collect()
        });
    }
    hashes
}
