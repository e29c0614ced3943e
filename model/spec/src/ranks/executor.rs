//! The executor of several ranks: it gives each its part of a step and tells of the layers that all have written.
//!
//! It does not know what a rank computes with, nor how ranks meet.

use std::collections::VecDeque;
use std::io;

use baton_kv_cache::{BlockStorage, KvLayout};

use super::rank::{RankError, RankExecutor};
use super::thread::{Job, Lent, NumberedRank, RankThread};
use crate::executor::{Batch, ExecuteError, Executor, SamplingExecutor};

/// Computes by several ranks.
pub struct ParallelExecutor<R> {
    pub(super) first: NumberedRank<R>,
    others: Vec<RankThread>,
    /// Every rank computed every step so far.
    is_whole: bool,
    /// Of steps that were launched, the oldest first.
    pub(super) under_way: VecDeque<Written>,
    /// Of steps that have been computed, for others: steps allocate nothing.
    done: Vec<Written>,
}

impl<R: RankExecutor> ParallelExecutor<R> {
    /// Of ranks in their order: the first computes on the caller's thread, the others each on a new one.
    ///
    /// # Errors
    /// When threads cannot be started, or not be attached.
    ///
    /// # Panics
    /// When there are none.
    pub fn new(ranks: impl IntoIterator<Item = R>) -> io::Result<ParallelExecutor<R>> {
        let mut numbered = ranks.into_iter().enumerate().map(|(idx, rank)| NumberedRank { idx, rank });
        let first = numbered.next().expect("a model has at least one part");
        let others = numbered.map(RankThread::start).collect::<Result<_, _>>()?;
        Ok(ParallelExecutor { first, others, is_whole: true, under_way: VecDeque::new(), done: Vec::new() })
    }

    /// How many ranks there are.
    pub fn num_ranks(&self) -> usize {
        self.others.len() + 1
    }

    /// Gives the others `job` and does `work`, the first rank's part of it, here; what comes of that. Tells of the layers
    /// that all have written by then.
    ///
    /// # Errors
    /// When a rank fails, or has failed before.
    ///
    /// # Safety
    /// What `job` points to is there, and is as [`RankExecutor::compute`] or [`SamplingRank::launch`](super::SamplingRank::launch) needs it.
    pub(super) unsafe fn run<T>(
        &mut self,
        job: Job,
        written: &mut Written,
        on_layer: &mut dyn FnMut(usize),
        work: impl FnOnce(&mut R, &mut dyn FnMut(usize)) -> Result<T, RankError>,
    ) -> Result<T, ExecuteError> {
        if !self.is_whole {
            let message = "a rank failed in an earlier step".to_owned();
            return Err(ExecuteError { device: self.first.rank.device().to_owned(), message });
        }
        for (other, num_written) in self.others.iter().zip(&written.by_others) {
            other.give(job, *num_written);
        }
        let others = &self.others;
        let first = self.first.run(|rank| {
            work(rank, &mut |layer_idx| {
                let by_others = others.iter().map(RankThread::num_written).min();
                let by_others = by_others.filter(|_| !R::MEETS_FOR_LAYERS).unwrap_or(usize::MAX);
                written.tell(by_others.min(layer_idx + 1), on_layer);
            })
        });
        // What the job points to is borrowed until every rank has answered. Nothing above unwinds: a rank returns its
        // panics.
        let outcome = others.iter().map(RankThread::wait).fold(first, |before, outcome| match outcome {
            Ok(()) => before,
            Err(failure) => Err(match before {
                Ok(_) => failure,
                Err(before) => before.or_its_cause(failure),
            }),
        });
        for (num_written, other) in written.by_others.iter_mut().zip(others) {
            *num_written = other.num_written();
        }
        outcome.map_err(|failure| {
            self.is_whole = false;
            failure.into()
        })
    }

    /// Of a step that begins.
    pub(super) fn nothing_written(&mut self) -> Written {
        let mut written =
            self.done.pop().unwrap_or_else(|| Written { num_told: 0, by_others: vec![0; self.others.len()] });
        written.num_told = 0;
        written.by_others.fill(0);
        written
    }

    /// Tells of the layers that are left: all ranks have written all.
    pub(super) fn finish(&mut self, mut written: Written, on_layer: &mut dyn FnMut(usize)) {
        written.tell(self.first.rank.kv_layout().num_layers, on_layer);
        self.done.push(written);
    }
}

/// How far a step has come.
pub(super) struct Written {
    /// Layers that were told of.
    num_told: usize,
    /// Layers that each of the others has told of.
    by_others: Vec<usize>,
}

impl Written {
    fn tell(&mut self, num_written: usize, on_layer: &mut dyn FnMut(usize)) {
        (self.num_told..num_written).for_each(on_layer);
        self.num_told = self.num_told.max(num_written);
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
        let job = Job::Compute(Lent { batch: std::ptr::from_ref(batch).cast(), storage });
        let mut written = self.nothing_written();
        // SAFETY: by the caller's word; every rank is given the same.
        let num_logits = unsafe {
            self.run(job, &mut written, on_layer, |rank, on_layer| rank.compute(batch, storage, on_layer))
        }?;
        self.finish(written, on_layer);
        Ok(self.first.rank.logits(num_logits))
    }

    fn sampling(&mut self) -> Option<&mut dyn SamplingExecutor> {
        self.first.rank.sampling().is_some().then_some(self)
    }
}
