//! Several ranks that compute one model together, each on threads of its own, over one block storage.
//!
//! ```text
//! caller           rank 0 (the caller's thread)        rank 1 .. (a thread each)
//! execute ---+---> its part of every layer <--meets--> its part of every layer <--- job
//!            +---> logits <------------------gathers-- its tokens' logits      ---> outcome
//! ```
//! Each rank writes its kv heads where the layout of the whole model has them, so that blocks are those that one rank
//! alone would make, and whoever takes or gives them need not know of ranks. A layer is announced when all have written.
//!
//! A rank that fails drops its end of the communicator, which fails the others; the executor then says who was first,
//! and is of no use any more.

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use baton_kv_cache::{BlockStorage, KvLayout};

use super::forward::Ranks;
use super::{CpuExecutor, ThreadPool};
use crate::{Batch, CommunicatorError, ExecuteError, Executor, LoadedModel, Rank, ThreadCommunicator};

/// Computes on this machine's processors by several ranks.
pub struct ParallelCpuExecutor {
    first: RankExecutor,
    others: Vec<RankThread>,
    /// Every rank computed every step so far.
    is_whole: bool,
}

impl ParallelCpuExecutor {
    /// Ranks with the threads of each, in their order. A pool is one rank's alone: ranks compute at the same time.
    ///
    /// # Errors
    /// When threads cannot be started, or not be kept to their processors.
    ///
    /// # Panics
    /// When the ranks are not all the parts of one model, in order.
    pub fn new(ranks: Vec<(LoadedModel, Arc<ThreadPool>)>) -> io::Result<ParallelCpuExecutor> {
        let ends = ThreadCommunicator::group(ranks.len());
        let ends = ends.into_iter().map(|end| Box::new(end) as Box<Ranks>);
        ParallelCpuExecutor::connected(ranks, ends)
    }

    fn connected(
        ranks: Vec<(LoadedModel, Arc<ThreadPool>)>,
        ends: impl Iterator<Item = Box<Ranks>>,
    ) -> io::Result<ParallelCpuExecutor> {
        let found: Vec<Rank> = ranks.iter().map(|(model, _)| model.shard().rank()).collect();
        assert_eq!(found, Rank::all(ranks.len()).collect::<Vec<_>>(), "all the parts, in order");
        let (revision, layout) = (ranks[0].0.revision().to_owned(), ranks[0].0.kv_layout());
        let are_one =
            ranks.iter().all(|(model, _)| *model.revision() == revision && model.kv_layout() == layout);
        assert!(are_one, "parts of one model");
        let mut ranks = ranks.into_iter().zip(ends).map(|((model, pool), end)| RankExecutor {
            idx: model.shard().rank().idx,
            executor: CpuExecutor::new(model, pool),
            communicator: Some(end),
        });
        let first = ranks.next().expect("a model has at least one part");
        Ok(ParallelCpuExecutor {
            first,
            others: ranks.map(RankThread::start).collect::<Result<_, _>>()?,
            is_whole: true,
        })
    }
}

impl std::fmt::Debug for ParallelCpuExecutor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ParallelCpuExecutor")
            .field("num_ranks", &(self.others.len() + 1))
            .finish_non_exhaustive()
    }
}

impl Executor for ParallelCpuExecutor {
    fn kv_layout(&self) -> KvLayout {
        self.first.executor.kv_layout()
    }

    fn vocab_size(&self) -> usize {
        self.first.executor.vocab_size()
    }

    fn attach_thread(&mut self) -> Result<(), ExecuteError> {
        self.first.executor.attach_thread()
    }

    unsafe fn execute(
        &mut self,
        batch: &Batch<'_>,
        storage: &BlockStorage,
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<&[f32], ExecuteError> {
        if !self.is_whole {
            let message = "a rank failed in an earlier step".to_owned();
            return Err(ExecuteError { device: "cpu".into(), message });
        }
        let job = Job { batch: std::ptr::from_ref(batch).cast(), storage };
        for other in &self.others {
            other.give(job);
        }
        // SAFETY: by the caller's word; every rank is given the same.
        let first = unsafe { self.first.compute(batch, storage, on_layer) };
        // What the job points to is borrowed until every rank has answered. Nothing above unwinds: a rank returns its
        // panics.
        let outcome = self.others.iter().map(RankThread::wait).fold(first, |before, outcome| match outcome {
            Ok(_) => before,
            Err(failure) => Err(before.err().map_or(failure.clone(), |before| before.or_its_cause(failure))),
        });
        match outcome {
            Ok(num_logits) => Ok(self.first.executor.logits(num_logits)),
            Err(failure) => {
                self.is_whole = false;
                Err(failure.into())
            }
        }
    }
}

/// One rank, whoever's thread it runs on.
struct RankExecutor {
    idx: usize,
    executor: CpuExecutor,
    /// Dropped when the rank fails, so that nobody waits for it.
    communicator: Option<Box<Ranks>>,
}

/// Why a rank ended.
#[derive(Clone, Debug)]
struct Failure {
    rank_idx: usize,
    what: What,
}

#[derive(Clone, Debug)]
enum What {
    Communicator(CommunicatorError),
    Panic(String),
    /// Its thread is not there.
    Gone,
}

impl Failure {
    /// Who misses another rank is not who began.
    fn or_its_cause(self, other: Failure) -> Failure {
        if matches!(self.what, What::Communicator(_)) { other } else { self }
    }
}

impl From<Failure> for ExecuteError {
    fn from(failure: Failure) -> ExecuteError {
        let message = match &failure.what {
            What::Communicator(error) => error.to_string(),
            What::Panic(message) => format!("panicked: {message}"),
            What::Gone => "its thread has ended".to_owned(),
        };
        ExecuteError { device: format!("cpu, rank {}", failure.rank_idx), message }
    }
}

impl RankExecutor {
    /// The rank's part of a step; how many logits there are.
    ///
    /// # Errors
    /// When it panics, or another rank is gone. It is then gone itself.
    ///
    /// # Safety
    /// As [`CpuExecutor::compute`].
    unsafe fn compute(
        &mut self,
        batch: &Batch<'_>,
        storage: &BlockStorage,
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<usize, Failure> {
        let failure = |what| Failure { rank_idx: self.idx, what };
        let Some(mut communicator) = self.communicator.take() else { return Err(failure(What::Gone)) };
        // Taken out, it is dropped by whatever goes wrong.
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            // SAFETY: by the caller's word.
            let outcome =
                unsafe { self.executor.compute(batch, storage, on_layer, Some(&mut *communicator)) };
            outcome.map(|num_logits| (num_logits, communicator))
        }));
        match outcome {
            Ok(Ok((num_logits, communicator))) => {
                self.communicator = Some(communicator);
                Ok(num_logits)
            }
            Ok(Err(error)) => Err(failure(What::Communicator(error))),
            Err(panic) => Err(failure(What::Panic(message_of(&*panic)))),
        }
    }
}

fn message_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}

/// What a rank is to compute. It points to what the caller of `execute` lends until every rank has answered.
#[derive(Clone, Copy)]
struct Job {
    batch: *const Batch<'static>,
    storage: *const BlockStorage,
}

// SAFETY: batches and storages may be shared between threads, and these are lent until the answer.
unsafe impl Send for Job {}

/// A rank on a thread of its own.
struct RankThread {
    idx: usize,
    /// Holds one: the rank takes a job before it is given the next. `None` once the rank is to end.
    jobs: Option<SyncSender<Job>>,
    /// One for each job.
    outcomes: Receiver<Result<usize, Failure>>,
    thread: Option<JoinHandle<()>>,
}

impl RankThread {
    fn start(mut rank: RankExecutor) -> io::Result<RankThread> {
        let idx = rank.idx;
        let (jobs, inbox) = sync_channel(1);
        let (answer, outcomes) = sync_channel(1);
        let (attached, is_attached) = sync_channel(1);
        let run = move || {
            let outcome = rank.executor.attach_thread();
            let failed = outcome.is_err();
            if attached.send(outcome).is_err() || failed {
                return;
            }
            serve(rank, &inbox, &answer);
        };
        let thread = std::thread::Builder::new().name(format!("baton-rank-{idx}")).spawn(run)?;
        let thread = RankThread { idx, jobs: Some(jobs), outcomes, thread: Some(thread) };
        match is_attached.recv() {
            Ok(outcome) => outcome.map(|()| thread).map_err(io::Error::other),
            Err(_) => Err(io::Error::other(format!("the thread of rank {idx} has ended"))),
        }
    }

    /// A rank whose thread has ended shows it when it is waited for.
    fn give(&self, job: Job) {
        let _ = self.jobs.as_ref().expect("until it is dropped").send(job);
    }

    fn wait(&self) -> Result<usize, Failure> {
        self.outcomes.recv().unwrap_or(Err(Failure { rank_idx: self.idx, what: What::Gone }))
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

fn serve(mut rank: RankExecutor, jobs: &Receiver<Job>, answer: &SyncSender<Result<usize, Failure>>) {
    for job in jobs {
        // SAFETY: whoever gave the job waits for the answer before what it points to goes away, and vouches for the
        // blocks of the batch.
        let outcome = unsafe { rank.compute(&*job.batch, &*job.storage, &mut |_| {}) };
        if answer.send(outcome).is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use baton_kv_cache::BlockId;

    use super::*;
    use crate::{BatchSequence, Communicator, LoadOptions, load_ranks};

    /// An end of a rank that panics when it is to meet the others for the `fails_at`-th time.
    struct Fragile {
        end: ThreadCommunicator,
        fails_at: usize,
    }

    impl Fragile {
        fn count(&mut self) {
            self.fails_at = self.fails_at.checked_sub(1).expect("a fault on purpose");
        }
    }

    impl Communicator for Fragile {
        type Buffer = [f32];

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

    fn executor(num_ranks: usize, fragile: usize, fails_at: usize) -> ParallelCpuExecutor {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/parity/fixtures/llama");
        let options = LoadOptions { threads: Some(1), ..LoadOptions::default() };
        let ranks = load_ranks(&dir, num_ranks, &options, &mut |_| {}).unwrap();
        let ranks = ranks.into_iter().map(|model| (model, Arc::new(ThreadPool::new(1).unwrap())));
        let ends = ThreadCommunicator::group(num_ranks).into_iter().map(|end| {
            let fails_at = if end.rank().idx == fragile { fails_at } else { usize::MAX };
            Box::new(Fragile { end, fails_at }) as Box<Ranks>
        });
        ParallelCpuExecutor::connected(ranks.collect(), ends).unwrap()
    }

    fn step(executor: &mut ParallelCpuExecutor, token: u32) -> Result<Vec<f32>, ExecuteError> {
        let storage = BlockStorage::new(executor.kv_layout(), 1).unwrap();
        let tokens = [token, 2, 3];
        let sequence = BatchSequence { tokens: &tokens, start_idx: 0, blocks: &[BlockId(0)], num_logits: 1 };
        let batch = Batch { sequences: vec![sequence] };
        // SAFETY: nobody else uses the storage.
        unsafe { executor.execute(&batch, &storage, &mut |_| {}) }.map(<[f32]>::to_vec)
    }

    #[test]
    fn a_rank_that_panics_is_named_and_nobody_waits_for_it() {
        for num_ranks in [2, 4] {
            // A barrier and two sums for each of three layers, and the logits.
            const NUM_MEETINGS: usize = 10;
            for fails_at in 0..2 * NUM_MEETINGS {
                let fragile = fails_at % num_ranks;
                let mut executor = executor(num_ranks, fragile, fails_at);
                if fails_at >= NUM_MEETINGS {
                    assert!(step(&mut executor, 1).is_ok());
                }
                let error = step(&mut executor, 1).unwrap_err().to_string();
                assert_eq!(error, format!("cpu, rank {fragile}: panicked: a fault on purpose"));
                let error = step(&mut executor, 1).unwrap_err().to_string();
                assert_eq!(error, "cpu: a rank failed in an earlier step");
            }
        }
    }

    #[test]
    fn a_batch_that_no_rank_can_compute_is_an_error() {
        let error = step(&mut executor(2, 0, usize::MAX), 999).unwrap_err().to_string();
        assert!(error.contains("panicked: token 999 outside the vocabulary"), "{error}");
    }
}
