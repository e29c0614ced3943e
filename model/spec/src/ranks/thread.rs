//! A rank and its thread: jobs go in, outcomes come out.
//!
//! It does not know what an outcome means for the other ranks.

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use baton_kv_cache::BlockStorage;

use super::rank::{RankError, RankExecutor, SamplingRank};
use crate::executor::{Batch, ExecuteError};
use crate::sampling::TokenSampling;

/// A rank and its index. It computes on the caller's thread or on its own.
pub(super) struct NumberedRank<R> {
    pub(super) idx: usize,
    pub(super) rank: R,
}

/// Why a rank ended.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    rank_idx: usize,
    device: String,
    cause: Cause,
}

#[derive(Clone, Debug)]
pub(super) enum Cause {
    Error(RankError),
    Panic(String),
    /// The rank's thread has ended.
    ThreadEnded,
}

impl Failure {
    /// The cause of a failure: a rank that lost another rank is not the cause, so `other` is.
    pub(super) fn or_the_cause(self, other: Failure) -> Failure {
        if matches!(self.cause, Cause::Error(RankError::Missed(_))) { other } else { self }
    }
}

impl From<Failure> for ExecuteError {
    fn from(failure: Failure) -> ExecuteError {
        let message = match failure.cause {
            Cause::Error(RankError::Missed(message) | RankError::Failed(message)) => message,
            Cause::Panic(message) => format!("panicked: {message}"),
            Cause::ThreadEnded => "its thread has ended".to_owned(),
        };
        ExecuteError { device: format!("{}, rank {}", failure.device, failure.rank_idx), message }
    }
}

impl<R: RankExecutor> NumberedRank<R> {
    /// Runs the rank's part of a job and returns its result. After a failure the rank has left the group.
    ///
    /// # Errors
    /// When this rank fails or panics, or another rank is lost.
    pub(super) fn run<T>(&mut self, work: impl FnOnce(&mut R) -> Result<T, RankError>) -> Result<T, Failure> {
        // The state that a panic leaves is not used again.
        let outcome = catch_unwind(AssertUnwindSafe(|| work(&mut self.rank)));
        let cause = match outcome {
            Ok(Ok(done)) => return Ok(done),
            Ok(Err(error)) => Cause::Error(error),
            Err(panic) => Cause::Panic(message_of(&*panic)),
        };
        self.rank.leave();
        Err(Failure { rank_idx: self.idx, device: self.rank.device().to_owned(), cause })
    }

    /// Runs a job on a rank that is not the first.
    ///
    /// # Safety
    /// The memory that the job points to is valid, and satisfies [`RankExecutor::compute`] or
    /// [`SamplingRank::launch`].
    unsafe fn serve(&mut self, job: Job, on_layer: &mut dyn FnMut(usize)) -> Result<(), Failure> {
        self.run(|rank| {
            // SAFETY: guaranteed by the caller.
            unsafe {
                match job {
                    Job::Compute(Borrowed { batch, storage }) => {
                        rank.compute(&*batch, &*storage, on_layer).map(drop)
                    }
                    Job::Launch { borrowed: Borrowed { batch, storage }, samplings, follows } => {
                        as_sampling(rank)
                            .launch(&*batch, &*samplings, &*follows, &*storage, on_layer)
                            .map(drop)
                    }
                    Job::Collect => as_sampling(rank).collect(on_layer),
                }
            }
        })
    }
}

fn message_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}

/// A rank's job. It points to memory that the executor's caller lends until every rank has answered.
#[derive(Clone, Copy)]
pub(super) enum Job {
    Compute(Borrowed),
    /// As [`SamplingExecutor::launch`](crate::SamplingExecutor::launch).
    Launch {
        borrowed: Borrowed,
        samplings: *const [TokenSampling<'static>],
        follows: *const [usize],
    },
    /// As [`SamplingExecutor::collect`](crate::SamplingExecutor::collect).
    Collect,
}

#[derive(Clone, Copy)]
pub(super) struct Borrowed {
    pub(super) batch: *const Batch<'static>,
    pub(super) storage: *const BlockStorage,
}

// SAFETY: batches, storages, samplings and numbers may be shared between threads. They are borrowed until the answer.
unsafe impl Send for Job {}

/// A rank that runs on its own thread.
pub(super) struct RankThread {
    idx: usize,
    device: String,
    /// Holds one job: the rank takes it before the next is sent. `None` tells the thread to end.
    jobs: Option<SyncSender<Job>>,
    /// One outcome for each job.
    outcomes: Receiver<Result<(), Failure>>,
    /// Layers that the rank has reported of the current step.
    num_written: Arc<AtomicUsize>,
    thread: Option<JoinHandle<()>>,
}

impl RankThread {
    pub(super) fn start<R: RankExecutor>(mut numbered: NumberedRank<R>) -> io::Result<RankThread> {
        let (idx, device) = (numbered.idx, numbered.rank.device().to_owned());
        let (jobs, inbox) = sync_channel(1);
        let (answer, outcomes) = sync_channel(1);
        let (attached, is_attached) = sync_channel(1);
        let num_written = Arc::new(AtomicUsize::new(0));
        let written = Arc::clone(&num_written);
        let run = move || {
            let outcome = numbered.rank.attach_thread();
            let failed = outcome.is_err();
            if attached.send(outcome).is_err() || failed {
                return;
            }
            serve(numbered, &inbox, &answer, &written);
        };
        let thread = std::thread::Builder::new().name(format!("baton-rank-{idx}")).spawn(run)?;
        let thread =
            RankThread { idx, device, jobs: Some(jobs), outcomes, num_written, thread: Some(thread) };
        match is_attached.recv() {
            Ok(outcome) => outcome.map(|()| thread).map_err(io::Error::other),
            Err(_) => Err(io::Error::other(format!("the thread of rank {idx} has ended"))),
        }
    }

    /// Sends a job of a step of which the rank has reported `num_written` layers. If the thread has ended, `wait`
    /// says so.
    pub(super) fn send(&self, job: Job, num_written: usize) {
        // The rank waits for the job, so it does not access the counter now.
        self.num_written.store(num_written, Ordering::Relaxed);
        let _ = self.jobs.as_ref().expect("present until drop").send(job);
    }

    pub(super) fn num_written(&self) -> usize {
        self.num_written.load(Ordering::Acquire)
    }

    pub(super) fn wait(&self) -> Result<(), Failure> {
        let ended = || Failure { rank_idx: self.idx, device: self.device.clone(), cause: Cause::ThreadEnded };
        self.outcomes.recv().unwrap_or_else(|_| Err(ended()))
    }
}

impl Drop for RankThread {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // The thread does not panic: it returns a job's panic as its outcome.
            let _ = thread.join();
        }
    }
}

fn serve<R: RankExecutor>(
    mut numbered: NumberedRank<R>,
    jobs: &Receiver<Job>,
    answer: &SyncSender<Result<(), Failure>>,
    num_written: &AtomicUsize,
) {
    for job in jobs {
        let mut on_layer = |layer_idx: usize| num_written.store(layer_idx + 1, Ordering::Release);
        // SAFETY: the sender of the job keeps its memory valid until it has the answer, and guarantees exclusive
        // access to the blocks of the batch.
        let outcome = unsafe { numbered.serve(job, &mut on_layer) };
        if answer.send(outcome).is_err() {
            return;
        }
    }
}

/// The rank as one that samples.
pub(super) fn as_sampling<R: RankExecutor>(rank: &mut R) -> &mut dyn SamplingRank {
    rank.sampling().expect("all ranks sample where the first does")
}
