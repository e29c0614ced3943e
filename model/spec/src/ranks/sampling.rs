//! Sampling with several ranks. The first rank has all logits and samples on its device. If a step follows, it hands
//! the tokens to the other ranks directly, without the host.

use std::ptr;

use baton_kv_cache::BlockStorage;

use super::executor::ParallelExecutor;
use super::rank::RankExecutor;
use super::thread::{Borrowed, Job, as_sampling};
use crate::executor::{Batch, ExecuteError, SamplingExecutor};
use crate::sampling::{SampledRow, TokenSampling};

impl<R: RankExecutor> SamplingExecutor for ParallelExecutor<R> {
    unsafe fn launch(
        &mut self,
        batch: &Batch<'_>,
        samplings: &[TokenSampling<'_>],
        follows: &[usize],
        storage: &BlockStorage,
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<bool, ExecuteError> {
        let borrowed = Borrowed { batch: ptr::from_ref(batch).cast(), storage };
        let samplings_borrowed = ptr::slice_from_raw_parts(samplings.as_ptr().cast(), samplings.len());
        let job = Job::Launch { borrowed, samplings: samplings_borrowed, follows };
        let mut progress = self.start_progress();
        // SAFETY: guaranteed by the caller; every rank gets the same batch, samplings and storage.
        let samples_all = unsafe {
            self.run(job, &mut progress, on_layer, |rank, on_layer| {
                as_sampling(rank).launch(batch, samplings, follows, storage, on_layer)
            })
        }?;
        self.launched.push_back(progress);
        Ok(samples_all)
    }

    fn mask(&mut self, masks: &[u32]) -> Result<(), ExecuteError> {
        self.run_on_first(|rank| as_sampling(rank).mask(masks))
    }

    fn collect(&mut self, on_layer: &mut dyn FnMut(usize)) -> Result<Vec<SampledRow<'_>>, ExecuteError> {
        let mut progress = self.launched.pop_front().expect("a step was launched");
        // SAFETY: this job holds no pointers.
        unsafe {
            self.run(Job::Collect, &mut progress, on_layer, |rank, on_layer| {
                as_sampling(rank).collect(on_layer)
            })
        }?;
        self.finish(progress, on_layer);
        Ok(as_sampling(&mut self.first.rank).answers())
    }
}
