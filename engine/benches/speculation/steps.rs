//! Durations of single steps.

use std::{sync::Arc, time::Instant};

use baton_kv_cache::{BlockId, BlockStorage};
use baton_model::{Batch, BatchSequence, CpuExecutor, Executor, LoadedModel, ThreadPool};

/// Position of the steps that are measured.
const CONTEXT: usize = 192;
const NUM_DRAFTS: usize = 4;
const NUM_ROUNDS: usize = 41;

/// Costs in steps of the target that compute a token of each sequence.
pub(crate) struct DraftCosts {
    /// A step of the draft model.
    pub(crate) draft: f64,
    /// One more token of each sequence in a step of the target.
    pub(crate) verify: f64,
}

struct Steps {
    executor: CpuExecutor,
    storage: BlockStorage,
    num_sequences: usize,
}

impl DraftCosts {
    /// Medians of alternating steps, as when drafting.
    pub(crate) fn measure(
        target: &LoadedModel,
        draft: &LoadedModel,
        pool: &Arc<ThreadPool>,
        num_sequences: usize,
    ) -> DraftCosts {
        let [mut target, mut draft] =
            [target, draft].map(|model| Steps::new(model.cpu_executor_on(Arc::clone(pool)), num_sequences));
        let mut times = [const { Vec::new() }; 3];
        for _ in 0..NUM_ROUNDS {
            times[0].push(draft.time(1));
            times[1].push(target.time(1 + NUM_DRAFTS));
            times[2].push(target.time(1));
        }
        let [draft, verifying, plain] = times.map(|mut times| {
            times.sort_by(f64::total_cmp);
            times[NUM_ROUNDS / 2]
        });
        DraftCosts { draft: draft / plain, verify: (verifying / plain - 1.0) / NUM_DRAFTS as f64 }
    }
}

impl Steps {
    fn new(executor: CpuExecutor, num_sequences: usize) -> Steps {
        let layout = executor.kv_layout();
        let num_blocks = num_sequences * (CONTEXT + 1 + NUM_DRAFTS).div_ceil(layout.block_size);
        let storage = BlockStorage::new(layout, num_blocks).expect("memory for the blocks");
        Steps { executor, storage, num_sequences }
    }

    /// Seconds of a step with so many tokens of each sequence.
    fn time(&mut self, num_tokens: usize) -> f64 {
        let blocks: Vec<_> = (0..self.storage.num_blocks() as u32).map(BlockId).collect();
        let sequences = blocks.chunks_exact(blocks.len() / self.num_sequences);
        let tokens = vec![7; num_tokens];
        let sequences = sequences.map(|blocks| BatchSequence {
            tokens: &tokens,
            start_idx: CONTEXT,
            blocks,
            num_logits: num_tokens,
        });
        let batch = Batch { sequences: sequences.collect() };
        let started = Instant::now();
        // SAFETY: the storage is used only here.
        #[allow(unsafe_code)]
        unsafe { self.executor.execute(&batch, &self.storage, &mut |_| {}) }.expect("processors do not fail");
        started.elapsed().as_secs_f64()
    }
}
