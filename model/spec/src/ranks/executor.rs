//! The executor of several ranks. It gives each rank its part of a step and reports a layer when all ranks have
//! written it.
//!
//! It does not know how a rank computes, nor how ranks communicate.

use std::collections::VecDeque;
use std::io;

use baton_kv_cache::{BlockStorage, KvLayout};

use super::rank::{RankError, RankExecutor};
use super::thread::{Borrowed, Job, NumberedRank, RankThread};
use crate::executor::{Batch, ExecuteError, Executor, SamplingExecutor};

/// Computes one model with several ranks.
pub struct ParallelExecutor<R> {
    pub(super) first: NumberedRank<R>,
    others: Vec<RankThread>,
    /// Every rank has computed every step so far.
    is_intact: bool,
    /// Progress of the launched steps, the oldest first.
    pub(super) launched: VecDeque<Progress>,
    /// Progress records of collected steps, kept for reuse: a step allocates no memory.
    done: Vec<Progress>,
}

impl<R: RankExecutor> ParallelExecutor<R> {
    /// Creates an executor from ranks in their order. The first computes on the caller's thread, each other on a new
    /// thread.
    ///
    /// # Errors
    /// When a thread cannot be started or attached.
    ///
    /// # Panics
    /// When there are no ranks.
    pub fn new(ranks: impl IntoIterator<Item = R>) -> io::Result<ParallelExecutor<R>> {
        let mut numbered = ranks.into_iter().enumerate().map(|(idx, rank)| NumberedRank { idx, rank });
        let first = numbered.next().expect("a model has at least one part");
        let others = numbered.map(RankThread::start).collect::<Result<_, _>>()?;
        Ok(ParallelExecutor { first, others, is_intact: true, launched: VecDeque::new(), done: Vec::new() })
    }

    /// The number of ranks.
    pub fn num_ranks(&self) -> usize {
        self.others.len() + 1
    }

    /// Sends `job` to the other ranks and runs `work`, the first rank's part, on this thread. Returns the result of
    /// `work`. Reports the layers that all ranks have written by then.
    ///
    /// # Errors
    /// When a rank fails, or failed in an earlier step.
    ///
    /// # Safety
    /// The memory that `job` points to is valid, and satisfies [`RankExecutor::compute`] or
    /// [`SamplingRank::launch`](super::SamplingRank::launch).
    pub(super) unsafe fn run<T>(
        &mut self,
        job: Job,
        progress: &mut Progress,
        on_layer: &mut dyn FnMut(usize),
        work: impl FnOnce(&mut R, &mut dyn FnMut(usize)) -> Result<T, RankError>,
    ) -> Result<T, ExecuteError> {
        if !self.is_intact {
            let message = "a rank failed in an earlier step".to_owned();
            return Err(ExecuteError { device: self.first.rank.device().to_owned(), message });
        }
        for (other, num_written) in self.others.iter().zip(&progress.by_others) {
            other.send(job, *num_written);
        }
        let others = &self.others;
        let first = self.first.run(|rank| {
            work(rank, &mut |layer_idx| {
                let by_others = others.iter().map(RankThread::num_written).min();
                let by_others = by_others.filter(|_| !R::MEETS_FOR_LAYERS).unwrap_or(usize::MAX);
                progress.report(by_others.min(layer_idx + 1), on_layer);
            })
        });
        // The job's memory stays borrowed until every rank has answered. Nothing above unwinds: a rank returns its
        // panics.
        let outcome = others.iter().map(RankThread::wait).fold(first, |before, outcome| match outcome {
            Ok(()) => before,
            Err(failure) => Err(match before {
                Ok(_) => failure,
                Err(before) => before.or_the_cause(failure),
            }),
        });
        for (num_written, other) in progress.by_others.iter_mut().zip(others) {
            *num_written = other.num_written();
        }
        outcome.map_err(|failure| {
            self.is_intact = false;
            failure.into()
        })
    }

    /// Runs `work` on the first rank alone.
    ///
    /// # Errors
    /// When it fails.
    pub(super) fn run_on_first<T>(
        &mut self,
        work: impl FnOnce(&mut R) -> Result<T, RankError>,
    ) -> Result<T, ExecuteError> {
        self.first.run(work).map_err(|failure| {
            self.is_intact = false;
            failure.into()
        })
    }

    /// The progress of a step that starts.
    pub(super) fn start_progress(&mut self) -> Progress {
        let mut progress = self
            .done
            .pop()
            .unwrap_or_else(|| Progress { num_reported: 0, by_others: vec![0; self.others.len()] });
        progress.num_reported = 0;
        progress.by_others.fill(0);
        progress
    }

    /// Reports the remaining layers: all ranks have written all layers.
    pub(super) fn finish(&mut self, mut progress: Progress, on_layer: &mut dyn FnMut(usize)) {
        progress.report(self.first.rank.kv_layout().num_layers, on_layer);
        self.done.push(progress);
    }
}

/// The progress of a step.
pub(super) struct Progress {
    /// Layers that were reported to the caller.
    num_reported: usize,
    /// Layers that each of the other ranks has reported.
    by_others: Vec<usize>,
}

impl Progress {
    fn report(&mut self, num_written: usize, on_layer: &mut dyn FnMut(usize)) {
        (self.num_reported..num_written).for_each(on_layer);
        self.num_reported = self.num_reported.max(num_written);
    }
}

impl<R: RankExecutor> Executor for ParallelExecutor<R> {
    fn kv_layout(&self) -> KvLayout {
        self.first.rank.kv_layout()
    }

    fn vocab_size(&self) -> usize {
        self.first.rank.vocab_size()
    }

    fn attach_thread(&mut self) -> Result<(), ExecuteError> {
        self.first.rank.attach_thread()
    }

    unsafe fn execute(
        &mut self,
        batch: &Batch<'_>,
        storage: &BlockStorage,
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<&[f32], ExecuteError> {
        let job = Job::Compute(Borrowed { batch: std::ptr::from_ref(batch).cast(), storage });
        let mut progress = self.start_progress();
        // SAFETY: guaranteed by the caller; every rank gets the same batch and storage.
        let num_logits = unsafe {
            self.run(job, &mut progress, on_layer, |rank, on_layer| rank.compute(batch, storage, on_layer))
        }?;
        self.finish(progress, on_layer);
        Ok(self.first.rank.logits(num_logits))
    }

    fn sampling(&mut self) -> Option<&mut dyn SamplingExecutor> {
        self.first.rank.sampling().is_some().then_some(self)
    }
}
