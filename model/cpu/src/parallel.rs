//! Several ranks on this machine's CPUs, each with its own threads, over one block storage.
//!
//! Each rank writes its KV heads to their place in the layout of the whole model. So blocks are the same as those of
//! a single rank, and senders and receivers of KV need not know about ranks. A layer is reported when all ranks have
//! written it.

use std::io;
use std::sync::Arc;

use baton_checkpoint::LoadedDecoder;
use baton_cpu_threads::ThreadPool;
use baton_kv_cache::{BlockStorage, KvLayout};
use baton_model_spec::{
    Batch, ExecuteError, Executor, ParallelExecutor, RankError, RankExecutor, ThreadCommunicator,
};

use crate::executor::CpuExecutor;
use crate::forward::Ranks;
use crate::model::CpuModel;

/// Computes one model with several ranks on this machine's CPUs.
pub struct ParallelCpuExecutor(ParallelExecutor<CpuRank>);

impl ParallelCpuExecutor {
    /// Creates an executor of ranks, in their order, each with its own thread pool: ranks compute at the same time.
    ///
    /// # Errors
    /// When threads cannot be started or pinned to their CPUs.
    ///
    /// # Panics
    /// When the ranks are not all parts of one model, in order.
    pub fn new(ranks: Vec<(CpuModel, Arc<ThreadPool>)>) -> io::Result<ParallelCpuExecutor> {
        let ends = ThreadCommunicator::group(ranks.len());
        let ends = ends.into_iter().map(|end| Box::new(end) as Box<Ranks>);
        ParallelCpuExecutor::connected(ranks, ends)
    }

    fn connected(
        ranks: Vec<(CpuModel, Arc<ThreadPool>)>,
        ends: impl Iterator<Item = Box<Ranks>>,
    ) -> io::Result<ParallelCpuExecutor> {
        LoadedDecoder::check_ranks(ranks.iter().map(|(model, _)| model.decoder()));
        let ranks = ranks.into_iter().zip(ends).map(|((model, pool), end)| CpuRank {
            executor: CpuExecutor::new(model, pool),
            communicator: Some(end),
        });
        ParallelExecutor::new(ranks).map(ParallelCpuExecutor)
    }
}

impl std::fmt::Debug for ParallelCpuExecutor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ParallelCpuExecutor").field("num_ranks", &self.0.num_ranks()).finish_non_exhaustive()
    }
}

impl Executor for ParallelCpuExecutor {
    fn kv_layout(&self) -> KvLayout {
        self.0.kv_layout()
    }

    fn vocab_size(&self) -> usize {
        self.0.vocab_size()
    }

    fn attach_thread(&mut self) -> Result<(), ExecuteError> {
        self.0.attach_thread()
    }

    unsafe fn execute(
        &mut self,
        batch: &Batch<'_>,
        storage: &BlockStorage,
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<&[f32], ExecuteError> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.0.execute(batch, storage, on_layer) }
    }
}

struct CpuRank {
    executor: CpuExecutor,
    /// Dropped when the rank leaves, so that no other rank waits for it.
    communicator: Option<Box<Ranks>>,
}

impl RankExecutor for CpuRank {
    const MEETS_FOR_LAYERS: bool = true;

    fn device(&self) -> &str {
        "cpu"
    }

    fn kv_layout(&self) -> KvLayout {
        self.executor.kv_layout()
    }

    fn vocab_size(&self) -> usize {
        self.executor.vocab_size()
    }

    fn attach_thread(&mut self) -> Result<(), ExecuteError> {
        self.executor.attach_thread()
    }

    unsafe fn compute(
        &mut self,
        batch: &Batch<'_>,
        storage: &BlockStorage,
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<usize, RankError> {
        let ranks = self.communicator.as_deref_mut();
        assert!(ranks.is_some(), "a rank that left does not compute");
        // SAFETY: guaranteed by the caller.
        let outcome = unsafe { self.executor.compute(batch, storage, on_layer, ranks) };
        outcome.map_err(|error| RankError::Missed(error.to_string()))
    }

    fn logits(&self, num_logits: usize) -> &[f32] {
        self.executor.logits(num_logits)
    }

    fn leave(&mut self) {
        self.communicator = None;
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use baton_kv_cache::BlockId;

    use super::*;
    use crate::load::load_ranks;
    use baton_checkpoint::LoadOptions;
    use baton_model_spec::{BatchSequence, Communicator, CommunicatorError, Rank};

    /// A communicator that panics at its `fails_at`-th operation.
    struct FailingCommunicator {
        end: ThreadCommunicator,
        fails_at: usize,
    }

    impl FailingCommunicator {
        fn count(&mut self) {
            self.fails_at = self.fails_at.checked_sub(1).expect("a fault on purpose");
        }
    }

    impl Communicator for FailingCommunicator {
        fn rank(&self) -> Rank {
            self.end.rank()
        }

        fn all_reduce_sum(&mut self, buffer: &mut [f32]) -> Result<(), CommunicatorError> {
            self.count();
            self.end.all_reduce_sum(buffer)
        }

        fn gather(&mut self, part: &[f32], all: Option<&mut [f32]>) -> Result<(), CommunicatorError> {
            self.count();
            self.end.gather(part, all)
        }

        fn barrier(&mut self) -> Result<(), CommunicatorError> {
            self.count();
            self.end.barrier()
        }
    }

    fn executor(num_ranks: usize, failing: usize, fails_at: usize) -> ParallelCpuExecutor {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/fixtures/llama");
        let options = LoadOptions { threads: Some(1), ..LoadOptions::default() };
        let ranks = load_ranks(&dir, num_ranks, &options, &mut |_| {}).unwrap();
        let ranks = ranks.into_iter().map(|model| (model, Arc::new(ThreadPool::new(1).unwrap())));
        let ends = ThreadCommunicator::group(num_ranks).into_iter().map(|end| {
            let fails_at = if end.rank().idx == failing { fails_at } else { usize::MAX };
            Box::new(FailingCommunicator { end, fails_at }) as Box<Ranks>
        });
        ParallelCpuExecutor::connected(ranks.collect(), ends).unwrap()
    }

    fn step(executor: &mut ParallelCpuExecutor, token: u32) -> Result<Vec<f32>, ExecuteError> {
        step_of(executor, token, 1)
    }

    fn step_of(
        executor: &mut ParallelCpuExecutor,
        token: u32,
        num_logits: usize,
    ) -> Result<Vec<f32>, ExecuteError> {
        let storage = BlockStorage::new(executor.kv_layout(), 1).unwrap();
        let tokens = [token, 2, 3];
        let sequence = BatchSequence { tokens: &tokens, start_idx: 0, blocks: &[BlockId(0)], num_logits };
        let batch = Batch { sequences: vec![sequence] };
        // SAFETY: no other code uses the storage.
        unsafe { executor.execute(&batch, &storage, &mut |_| {}) }.map(<[f32]>::to_vec)
    }

    #[test]
    fn a_panicking_rank_is_named_and_the_others_end() {
        for num_ranks in [2, 4] {
            // A barrier and two sums for each of three layers, and the gathered logits.
            const NUM_MEETINGS: usize = 10;
            for fails_at in 0..2 * NUM_MEETINGS {
                let failing = fails_at % num_ranks;
                let mut executor = executor(num_ranks, failing, fails_at);
                if fails_at >= NUM_MEETINGS {
                    assert!(step(&mut executor, 1).is_ok());
                }
                let error = step(&mut executor, 1).unwrap_err().to_string();
                assert_eq!(error, format!("cpu, rank {failing}: panicked: a fault on purpose"));
                let error = step(&mut executor, 1).unwrap_err().to_string();
                assert_eq!(error, "cpu: a rank failed in an earlier step");
            }
        }
    }

    #[test]
    fn without_logits_nothing_follows_the_last_layers_kv() {
        // As above, but for the last layer's two sums.
        const NUM_MEETINGS: usize = 8;
        assert!(step_of(&mut executor(2, 1, NUM_MEETINGS), 1, 0).is_ok());
        assert!(step_of(&mut executor(2, 1, NUM_MEETINGS - 1), 1, 0).is_err());
    }

    #[test]
    fn a_batch_that_no_rank_can_compute_is_an_error() {
        let error = step(&mut executor(2, 0, usize::MAX), 999).unwrap_err().to_string();
        assert!(error.contains("panicked: token 999 outside the vocabulary"), "{error}");
    }
}
