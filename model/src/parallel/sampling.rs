//! Several ranks that draw: the first has all logits where it computes, draws there, and hands its tokens to the others
//! when a step follows, so that all take them without the host.

use std::ptr;

use baton_kv_cache::BlockStorage;

use super::{Job, Lent, ParallelExecutor, RankError, RankExecutor};
use crate::{Batch, ExecuteError, SampledRow, SamplingExecutor, TokenSampling};

/// A rank that computes where tokens can be drawn. All launch and collect the same steps.
pub(crate) trait SamplingRank {
    /// The rank's part of [`SamplingExecutor::launch`]; what the first returns is whether it draws every row.
    ///
    /// # Errors
    /// When it fails, or another rank is gone.
    ///
    /// # Safety
    /// As [`SamplingExecutor::launch`].
    unsafe fn launch(
        &mut self,
        batch: &Batch<'_>,
        draws: &[TokenSampling<'_>],
        follows: &[usize],
        storage: &BlockStorage,
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<bool, RankError>;

    /// Waits for its part of the oldest step that was launched.
    ///
    /// # Errors
    /// As [`launch`](Self::launch).
    fn collect(&mut self, on_layer: &mut dyn FnMut(usize)) -> Result<(), RankError>;

    /// What follows the wanted rows of the step that was collected last, of the first rank.
    fn answers(&self) -> Vec<SampledRow<'_>>;
}

/// A rank of those that draw.
pub(super) fn of<R: RankExecutor>(rank: &mut R) -> &mut dyn SamplingRank {
    rank.sampling().expect("all ranks draw where the first does")
}

impl<R: RankExecutor> SamplingExecutor for ParallelExecutor<R> {
    unsafe fn launch(
        &mut self,
        batch: &Batch<'_>,
        draws: &[TokenSampling<'_>],
        follows: &[usize],
        storage: &BlockStorage,
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<bool, ExecuteError> {
        let lent = Lent { batch: ptr::from_ref(batch).cast(), storage };
        let draws_lent = ptr::slice_from_raw_parts(draws.as_ptr().cast(), draws.len());
        let job = Job::Launch { lent, draws: draws_lent, follows };
        let mut written = self.nothing_written();
        // SAFETY: by the caller's word; every rank is given the same.
        let draws_all = unsafe {
            self.run(job, &mut written, on_layer, |rank, on_layer| {
                of(rank).launch(batch, draws, follows, storage, on_layer)
            })
        }?;
        self.under_way.push_back(written);
        Ok(draws_all)
    }

    fn collect(&mut self, on_layer: &mut dyn FnMut(usize)) -> Result<Vec<SampledRow<'_>>, ExecuteError> {
        let mut written = self.under_way.pop_front().expect("a step is under way");
        // SAFETY: the job points to nothing.
        unsafe {
            self.run(Job::Collect, &mut written, on_layer, |rank, on_layer| of(rank).collect(on_layer))
        }?;
        self.finish(written, on_layer);
        Ok(of(&mut self.first.rank).answers())
    }
}
