//! Several ranks that compute one model together, each on a thread of its own, behind one executor.
//!
//! ```text
//! caller           rank 0 (the caller's thread)        rank 1 .. (a thread each)
//! execute ---+---> its part of every layer <--meets--> its part of every layer <--- job
//!            +---> logits <------------------gathers-- its tokens' logits      ---> outcome
//! ```
//! Ranks that draw leave that to the first, which has all logits, and take its tokens from there ([`sampling`]).
//!
//! A rank that fails leaves the others, which fails them, too; the executor then says who was first, and is of no use any
//! more. What a rank computes with, and how it meets the others, is its own business.

mod sampling;

use std::any::Any;
use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use baton_kv_cache::{BlockStorage, KvLayout};

use crate::{Batch, ExecuteError, Executor, SamplingExecutor, TokenSampling};
pub(crate) use sampling::SamplingRank;

/// One rank: what it computes with, and its end of what connects it with the others.
pub(crate) trait RankExecutor: Send + 'static {
    /// Whether ranks meet before one tells of a layer, so that all have written it. Otherwise each tells of what it has
    /// written itself.
    const MEETS_FOR_LAYERS: bool;

    /// What it computes on, as errors name it.
    fn device(&self) -> &str;

    /// As of an executor of the whole model.
    fn kv_layout(&self) -> KvLayout;

    /// Likewise.
    fn vocab_size(&self) -> usize;

    /// As [`Executor::attach_thread`].
    fn attach_thread(&mut self) -> Result<(), ExecuteError>;

    /// The rank's part of a step; how many logits there are, 0 for all ranks but the first.
    ///
    /// # Errors
    /// When it fails, or another rank is gone.
    ///
    /// # Safety
    /// As [`Executor::execute`]; all ranks compute the same batch on the same storage.
    unsafe fn compute(
        &mut self,
        batch: &Batch<'_>,
        storage: &BlockStorage,
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<usize, RankError>;

    /// The first logits of the last step.
    fn logits(&self, num_logits: usize) -> &[f32];

    /// The same as one that draws; `None` where logits come to the host.
    fn sampling(&mut self) -> Option<&mut dyn SamplingRank> {
        None
    }

    /// Ends its part in what the ranks do together: whoever waits for it, or comes to wait, is told. It is not asked for
    /// anything any more.
    fn leave(&mut self);
}

/// Why a rank has not computed its part of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RankError {
    /// Another is gone, which is not its fault.
    Missed(String),
    /// Its own device failed.
    Failed(String),
}

/// Computes by several ranks.
pub(crate) struct ParallelExecutor<R> {
    first: Seat<R>,
    others: Vec<RankThread>,
    /// Every rank computed every step so far.
    is_whole: bool,
    /// Of steps that were launched, the oldest first.
    under_way: VecDeque<Written>,
    /// Of steps that have been computed, for others: steps allocate nothing.
    done: Vec<Written>,
}

impl<R: RankExecutor> ParallelExecutor<R> {
    /// Of ranks in their order: the first computes on the thread of whoever calls, the others each on a new one.
    ///
    /// # Errors
    /// When threads cannot be started, or not be attached.
    ///
    /// # Panics
    /// When there are none.
    pub(crate) fn new(ranks: impl IntoIterator<Item = R>) -> io::Result<ParallelExecutor<R>> {
        let mut seats = ranks.into_iter().enumerate().map(|(idx, rank)| Seat { idx, rank });
        let first = seats.next().expect("a model has at least one part");
        let others = seats.map(RankThread::start).collect::<Result<_, _>>()?;
        Ok(ParallelExecutor { first, others, is_whole: true, under_way: VecDeque::new(), done: Vec::new() })
    }

    pub(crate) fn num_ranks(&self) -> usize {
        self.others.len() + 1
    }

    /// Gives the others `job` and does `work`, the first rank's part of it, here; what comes of that. Tells of the layers
    /// that all have written by then.
    ///
    /// # Errors
    /// When a rank fails, or has failed before.
    ///
    /// # Safety
    /// What `job` points to is there, and is as [`RankExecutor::compute`] or [`SamplingRank::launch`] needs it.
    unsafe fn run<T>(
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
    fn nothing_written(&mut self) -> Written {
        let mut written =
            self.done.pop().unwrap_or_else(|| Written { num_told: 0, by_others: vec![0; self.others.len()] });
        written.num_told = 0;
        written.by_others.fill(0);
        written
    }

    /// Tells of the layers that are left: all ranks have written all.
    fn finish(&mut self, mut written: Written, on_layer: &mut dyn FnMut(usize)) {
        written.tell(self.first.rank.kv_layout().num_layers, on_layer);
        self.done.push(written);
    }
}

/// How far a step has come.
struct Written {
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

/// A rank and which it is, whoever's thread it computes on.
struct Seat<R> {
    idx: usize,
    rank: R,
}

/// Why a rank ended.
#[derive(Clone, Debug)]
struct Failure {
    rank_idx: usize,
    device: String,
    what: What,
}

#[derive(Clone, Debug)]
enum What {
    Error(RankError),
    Panic(String),
    /// Its thread is not there.
    Gone,
}

impl Failure {
    /// Who misses another rank is not who began.
    fn or_its_cause(self, other: Failure) -> Failure {
        if matches!(self.what, What::Error(RankError::Missed(_))) { other } else { self }
    }
}

impl From<Failure> for ExecuteError {
    fn from(failure: Failure) -> ExecuteError {
        let message = match failure.what {
            What::Error(RankError::Missed(message) | RankError::Failed(message)) => message,
            What::Panic(message) => format!("panicked: {message}"),
            What::Gone => "its thread has ended".to_owned(),
        };
        ExecuteError { device: format!("{}, rank {}", failure.device, failure.rank_idx), message }
    }
}

impl<R: RankExecutor> Seat<R> {
    /// The rank's part of a job; what comes of it. After a failure it has left the others.
    ///
    /// # Errors
    /// When it fails or panics, or another rank is gone.
    fn run<T>(&mut self, work: impl FnOnce(&mut R) -> Result<T, RankError>) -> Result<T, Failure> {
        // What a panic leaves behind is not used again.
        let outcome = catch_unwind(AssertUnwindSafe(|| work(&mut self.rank)));
        let what = match outcome {
            Ok(Ok(done)) => return Ok(done),
            Ok(Err(error)) => What::Error(error),
            Err(panic) => What::Panic(message_of(&*panic)),
        };
        self.rank.leave();
        Err(Failure { rank_idx: self.idx, device: self.rank.device().to_owned(), what })
    }

    /// Does a job, as one of the others.
    ///
    /// # Safety
    /// What it points to is there, and is as [`RankExecutor::compute`] or [`SamplingRank::launch`] needs it.
    unsafe fn serve(&mut self, job: Job, on_layer: &mut dyn FnMut(usize)) -> Result<(), Failure> {
        self.run(|rank| {
            // SAFETY: by the caller's word.
            unsafe {
                match job {
                    Job::Compute(Lent { batch, storage }) => {
                        rank.compute(&*batch, &*storage, on_layer).map(drop)
                    }
                    Job::Launch { lent: Lent { batch, storage }, draws, follows } => {
                        sampling::of(rank).launch(&*batch, &*draws, &*follows, &*storage, on_layer).map(drop)
                    }
                    Job::Collect => sampling::of(rank).collect(on_layer),
                }
            }
        })
    }
}

fn message_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}

/// What a rank is to do. It points to what the caller of the executor lends until every rank has answered.
#[derive(Clone, Copy)]
enum Job {
    Compute(Lent),
    /// As [`SamplingExecutor::launch`].
    Launch {
        lent: Lent,
        draws: *const [TokenSampling<'static>],
        follows: *const [usize],
    },
    /// As [`SamplingExecutor::collect`].
    Collect,
}

#[derive(Clone, Copy)]
struct Lent {
    batch: *const Batch<'static>,
    storage: *const BlockStorage,
}

// SAFETY: batches, storages, draws and numbers may be shared between threads, and these are lent until the answer.
unsafe impl Send for Job {}

/// A rank on a thread of its own.
struct RankThread {
    idx: usize,
    device: String,
    /// Holds one: the rank takes a job before it is given the next. `None` once the rank is to end.
    jobs: Option<SyncSender<Job>>,
    /// One for each job.
    outcomes: Receiver<Result<(), Failure>>,
    /// Layers of this job's step that it has told of.
    num_written: Arc<AtomicUsize>,
    thread: Option<JoinHandle<()>>,
}

impl RankThread {
    fn start<R: RankExecutor>(mut seat: Seat<R>) -> io::Result<RankThread> {
        let (idx, device) = (seat.idx, seat.rank.device().to_owned());
        let (jobs, inbox) = sync_channel(1);
        let (answer, outcomes) = sync_channel(1);
        let (attached, is_attached) = sync_channel(1);
        let num_written = Arc::new(AtomicUsize::new(0));
        let written = Arc::clone(&num_written);
        let run = move || {
            let outcome = seat.rank.attach_thread();
            let failed = outcome.is_err();
            if attached.send(outcome).is_err() || failed {
                return;
            }
            serve(seat, &inbox, &answer, &written);
        };
        let thread = std::thread::Builder::new().name(format!("baton-rank-{idx}")).spawn(run)?;
        let thread =
            RankThread { idx, device, jobs: Some(jobs), outcomes, num_written, thread: Some(thread) };
        match is_attached.recv() {
            Ok(outcome) => outcome.map(|()| thread).map_err(io::Error::other),
            Err(_) => Err(io::Error::other(format!("the thread of rank {idx} has ended"))),
        }
    }

    /// A job of a step of which it has told of so many layers. A rank whose thread has ended shows it when it is waited for.
    fn give(&self, job: Job, num_written: usize) {
        // It waits for the job.
        self.num_written.store(num_written, Ordering::Relaxed);
        let _ = self.jobs.as_ref().expect("until it is dropped").send(job);
    }

    fn num_written(&self) -> usize {
        self.num_written.load(Ordering::Acquire)
    }

    fn wait(&self) -> Result<(), Failure> {
        let gone = || Failure { rank_idx: self.idx, device: self.device.clone(), what: What::Gone };
        self.outcomes.recv().unwrap_or_else(|_| Err(gone()))
    }
}

impl Drop for RankThread {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // It does not panic: what panics in a job is returned.
            let _ = thread.join();
        }
    }
}

fn serve<R: RankExecutor>(
    mut seat: Seat<R>,
    jobs: &Receiver<Job>,
    answer: &SyncSender<Result<(), Failure>>,
    num_written: &AtomicUsize,
) {
    for job in jobs {
        let mut on_layer = |layer_idx: usize| num_written.store(layer_idx + 1, Ordering::Release);
        // SAFETY: whoever gave the job waits for the answer before what it points to goes away, and vouches for the
        // blocks of the batch.
        let outcome = unsafe { seat.serve(job, &mut on_layer) };
        if answer.send(outcome).is_err() {
            return;
        }
    }
}
