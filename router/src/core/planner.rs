//! The policy with what it must remember: the prefix index. The lock is held for lookups only.

use std::sync::{Mutex, MutexGuard, PoisonError};

use baton_kv_cache::{BlockHash, HashRoot};

use crate::{
    plan::{
        ClusterView, NoPlan, Plan, PlanRequest, Policy, Prefill, PrefillMode, PrefixAware, PrefixAwareConfig,
        PrefixIndex, WorkerKey,
    },
    workers::Workers,
};

/// Plans requests.
#[derive(Debug)]
pub(crate) struct Planner {
    policy: Box<dyn Policy>,
    index: Mutex<PrefixIndex>,
}

/// What is to be planned.
#[derive(Debug)]
pub(crate) struct Wanted<'a> {
    pub(crate) prompt: &'a [u32],
    pub(crate) output: &'a [u32],
    pub(crate) max_tokens: u32,
    pub(crate) cache_salt: &'a str,
    pub(crate) prefill: PrefillMode,
    pub(crate) excluded: &'a [WorkerKey],
}

impl Planner {
    pub(crate) fn new(config: PrefixAwareConfig, index_blocks: usize) -> Planner {
        Planner {
            policy: Box::new(PrefixAware::new(config)),
            index: Mutex::new(PrefixIndex::new(index_blocks)),
        }
    }

    /// Plans, and remembers where the prefix is going to be.
    pub(crate) fn plan(&self, workers: &Workers, wanted: &Wanted<'_>) -> Result<Plan, NoPlan> {
        let (hashes, block_size) = self.hashes(workers, wanted.prompt, wanted.output, wanted.cache_salt);
        let holders = self.index().holders(&hashes);
        let request = PlanRequest {
            num_tokens: wanted.prompt.len() + wanted.output.len(),
            max_tokens: wanted.prompt.len() + wanted.max_tokens as usize,
            cached: holders.into_iter().map(|(key, num_blocks)| (key, num_blocks * block_size)).collect(),
            excluded: wanted.excluded.to_vec(),
            prefill: wanted.prefill,
        };
        let plan = self.policy.plan(&request, &workers.view())?;
        let mut index = self.index();
        index.insert(&hashes, &WorkerKey::of(&plan.decode));
        if let Prefill::Remote(worker) = &plan.prefill {
            index.insert(&hashes, &WorkerKey::of(worker));
        }
        Ok(plan)
    }

    /// Remembers that a decode worker holds a whole conversation now: its next turn begins with it.
    pub(crate) fn note_finished(
        &self,
        workers: &Workers,
        worker: &WorkerKey,
        prompt: &[u32],
        output: &[u32],
        salt: &str,
    ) {
        let (hashes, _) = self.hashes(workers, prompt, output, salt);
        self.index().insert(&hashes, worker);
    }

    /// Why a small request could not be served now; `None` when it could.
    pub(crate) fn probe(&self, view: &ClusterView) -> Option<NoPlan> {
        self.policy.plan(&PlanRequest::default(), view).err()
    }

    fn hashes(
        &self,
        workers: &Workers,
        prompt: &[u32],
        output: &[u32],
        salt: &str,
    ) -> (Vec<BlockHash>, usize) {
        let Some(record) = workers.any_decode() else { return (Vec::new(), 0) };
        let format = &record.kv_format;
        let root = HashRoot::new(&format.model_revision, "", salt);
        let hashes = if output.is_empty() {
            root.block_hashes(prompt, format.block_size).collect()
        } else {
            root.block_hashes(&[prompt, output].concat(), format.block_size).collect()
        };
        (hashes, format.block_size)
    }

    fn index(&self) -> MutexGuard<'_, PrefixIndex> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
