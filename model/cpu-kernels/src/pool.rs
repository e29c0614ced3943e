//! A few threads that share the work of one operation at a time: one pool for all executors of a process, so that
//! there are as many busy threads as processors.
//!
//! An operation is a closure that every participant calls once; it takes its pieces of work from a
//! counter of its own, so it is complete whoever takes part. Threads spin briefly between operations
//! and sleep when none comes: a forward pass has a dozen operations per layer, each microseconds
//! after the other. Nothing is allocated per operation, and nobody waits for a lock: an operation that finds the pool
//! busy with another thread's runs on its caller alone.
//!
//! ```text
//! state   | epoch (32) | open (1) | active (31) |
//! caller:  epoch+1, open, 0 active --> runs its share --> not open --> waits for active == 0
//! helper:  sees a new open epoch --> active+1 (fails once closed) --> runs --> active-1
//! ```
//! A helper that wakes too late finds the operation closed and loses nothing.

use std::cell::UnsafeCell;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use crate::affinity::{CpuList, CpuListError};

const OPEN: u64 = 1 << 31;
const ACTIVE: u64 = OPEN - 1;
/// Looks at the state before a helper sleeps: some 20 to 50 microseconds.
const SPINS: u32 = 4000;

type Work<'a> = &'a (dyn Fn(usize) + Sync);

struct Shared {
    state: AtomicU64,
    work: UnsafeCell<Option<Work<'static>>>,
    num_sleeping: AtomicU32,
    panicked: AtomicBool,
    stop: AtomicBool,
}

// SAFETY: `work` is written only by the call of `run` that made the pool busy, while no operation is open and none active,
// and read only by participants that are counted in `active`.
unsafe impl Sync for Shared {}

/// Threads that compute, to be shared by the executors of a process. Those that are called from one thread, as a
/// target's and its draft model's are, have all of them in turn; of two threads that compute at the same time, one has
/// the helpers for an operation, and the other computes its own alone.
pub struct ThreadPool {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
    /// Whether somebody's operation has the helpers. Apart from what these look at all the time.
    is_busy: AtomicBool,
    /// The processor of each participant, if it is kept to one.
    cpus: Option<CpuList>,
}

impl ThreadPool {
    /// `num_threads` participants, the thread that calls an executor being one of them.
    ///
    /// # Errors
    /// When threads cannot be started.
    pub fn new(num_threads: usize) -> io::Result<ThreadPool> {
        ThreadPool::start(num_threads, None)
    }

    /// A participant for each of these processors, which it does not leave. The thread that calls an executor is kept to
    /// the first by [`attach_thread`](Self::attach_thread).
    ///
    /// # Errors
    /// When this process may not use one of them, or threads cannot be started.
    pub fn pinned(cpus: CpuList) -> Result<ThreadPool, CpuListError> {
        cpus.check()?;
        Ok(ThreadPool::start(cpus.num_cpus(), Some(cpus))?)
    }

    fn start(num_threads: usize, cpus: Option<CpuList>) -> io::Result<ThreadPool> {
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            work: UnsafeCell::new(None),
            num_sleeping: AtomicU32::new(0),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        });
        let mut pool = ThreadPool { shared, helpers: Vec::new(), is_busy: AtomicBool::new(false), cpus };
        let (pinned, outcomes) = mpsc::channel();
        for idx in 1..num_threads.max(1) {
            let (shared, cpus, pinned) = (Arc::clone(&pool.shared), pool.cpus.clone(), pinned.clone());
            let helper = std::thread::Builder::new().name(format!("baton-cpu-{idx}")).spawn(move || {
                // Whoever does not wait for the outcome has failed to start another.
                let _ = pinned.send(cpus.map_or(Ok(()), |cpus| cpus.pin(idx)));
                drop(pinned);
                help(&shared, idx);
            })?;
            pool.helpers.push(helper);
        }
        drop(pinned);
        outcomes.into_iter().collect::<io::Result<()>>()?;
        Ok(pool)
    }

    /// Keeps the calling thread, participant 0 of what it will run, to its processor.
    pub fn attach_thread(&self) -> io::Result<()> {
        self.cpus.as_ref().map_or(Ok(()), |cpus| cpus.pin(0))
    }

    /// Participants, so that each can have memory of its own.
    pub fn num_threads(&self) -> usize {
        self.helpers.len() + 1
    }

    /// Calls `work(thread_idx)` on this thread (0) and on those helpers that come in time.
    ///
    /// # Panics
    /// When `work` panicked, after all participants have left it.
    fn run(&self, work: Work<'_>) {
        if self.helpers.is_empty() {
            return work(0);
        }
        let Some(_busy) = Busy::new(&self.is_busy) else { return work(0) };
        let shared = &*self.shared;
        shared.panicked.store(false, Ordering::Relaxed);
        // SAFETY: the lifetime ends with this call: `Closing` waits until nobody is inside, and
        // nobody enters once the operation is closed.
        let work_forever = unsafe { std::mem::transmute::<Work<'_>, Work<'static>>(work) };
        // SAFETY: no operation is open, as this call made the pool busy, so nobody reads.
        unsafe { *shared.work.get() = Some(work_forever) };
        let epoch = (shared.state.load(Ordering::Relaxed) >> 32).wrapping_add(1);
        shared.state.store(epoch << 32 | OPEN, Ordering::SeqCst);
        if shared.num_sleeping.load(Ordering::SeqCst) > 0 {
            for helper in &self.helpers {
                helper.thread().unpark();
            }
        }
        let closing = Closing(shared);
        work(0);
        drop(closing);
        if shared.panicked.load(Ordering::Relaxed) {
            panic!("a compute thread panicked");
        }
    }

    /// Calls `item(thread_idx, item_idx)` for every item below `num_items`, in some order.
    pub fn for_each(&self, num_items: usize, item: impl Fn(usize, usize) + Sync) {
        let next = AtomicUsize::new(0);
        let work = |thread_idx: usize| {
            loop {
                let item_idx = next.fetch_add(1, Ordering::Relaxed);
                if item_idx >= num_items {
                    return;
                }
                item(thread_idx, item_idx);
            }
        };
        if num_items <= 1 { work(0) } else { self.run(&work) }
    }
}

impl std::fmt::Debug for ThreadPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ThreadPool").field("num_threads", &self.num_threads()).finish_non_exhaustive()
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for helper in self.helpers.drain(..) {
            helper.thread().unpark();
            // A helper does not panic: panics of the work are caught.
            let _ = helper.join();
        }
    }
}

/// The pool is one operation's until this is dropped.
struct Busy<'a>(&'a AtomicBool);

impl<'a> Busy<'a> {
    /// `None` when it is another's.
    fn new(is_busy: &'a AtomicBool) -> Option<Busy<'a>> {
        // Only the owner has a guard, for dropping it ends the ownership.
        if is_busy.swap(true, Ordering::Acquire) { None } else { Some(Busy(is_busy)) }
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// Closes the operation and waits for the helpers inside, also when the caller's share panics.
struct Closing<'a>(&'a Shared);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.state.fetch_and(!OPEN, Ordering::AcqRel);
        let mut spins = 0u32;
        while self.0.state.load(Ordering::Acquire) & ACTIVE != 0 {
            spins = spins.wrapping_add(1);
            // A helper may have lost its core to somebody else: let it have this one.
            if spins.is_multiple_of(256) { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
    }
}

fn help(shared: &Shared, thread_idx: usize) {
    let mut seen = 0;
    loop {
        let state = wait(shared, seen);
        let Some(state) = state else { return };
        seen = state >> 32;
        if !enter(shared, state) {
            continue;
        }
        // SAFETY: counted in `active`, so the caller waits for us before it ends or changes `work`.
        let work = unsafe { *shared.work.get() }.expect("set before the operation opened");
        if std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(thread_idx))).is_err() {
            shared.panicked.store(true, Ordering::Relaxed);
        }
        shared.state.fetch_sub(1, Ordering::Release);
    }
}

/// Waits for an open operation other than `seen`; `None` when the pool stops.
fn wait(shared: &Shared, seen: u64) -> Option<u64> {
    let is_new = |state: u64| state & OPEN != 0 && state >> 32 != seen;
    loop {
        for _ in 0..SPINS {
            let state = shared.state.load(Ordering::Acquire);
            if is_new(state) {
                return Some(state);
            }
            std::hint::spin_loop();
        }
        shared.num_sleeping.fetch_add(1, Ordering::SeqCst);
        // Looked at once more after announcing the sleep: either we see the operation here or its
        // caller sees us sleeping and unparks.
        if !is_new(shared.state.load(Ordering::SeqCst)) && !shared.stop.load(Ordering::SeqCst) {
            std::thread::park();
        }
        shared.num_sleeping.fetch_sub(1, Ordering::SeqCst);
        if shared.stop.load(Ordering::SeqCst) {
            return None;
        }
    }
}

/// Becomes a participant unless the operation of `state` was closed meanwhile.
fn enter(shared: &Shared, mut state: u64) -> bool {
    let epoch = state >> 32;
    while state & OPEN != 0 && state >> 32 == epoch {
        match shared.state.compare_exchange_weak(state, state + 1, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return true,
            Err(now) => state = now,
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_runs_once() {
        for num_threads in [1, 2, 5] {
            let pool = ThreadPool::new(num_threads).unwrap();
            for num_items in [0, 1, 2, 7, 1000] {
                let counts: Vec<AtomicUsize> = (0..num_items).map(|_| AtomicUsize::new(0)).collect();
                for _ in 0..50 {
                    pool.for_each(num_items, |thread_idx, idx| {
                        assert!(thread_idx < num_threads);
                        counts[idx].fetch_add(1, Ordering::Relaxed);
                    });
                }
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 50));
            }
        }
    }

    #[test]
    fn sleeping_helpers_are_woken_or_not_needed() {
        let pool = ThreadPool::new(3).unwrap();
        for _ in 0..20 {
            // Longer than the helpers spin.
            while pool.shared.num_sleeping.load(Ordering::SeqCst) < 2 {
                std::thread::yield_now();
            }
            let sum = AtomicUsize::new(0);
            pool.for_each(100, |_, idx| {
                sum.fetch_add(idx, Ordering::Relaxed);
            });
            assert_eq!(sum.into_inner(), 4950);
        }
    }

    #[test]
    fn pinned_threads_stay_on_their_processors() {
        let allowed = CpuList::allowed().unwrap();
        let pool = ThreadPool::pinned(allowed.clone()).unwrap();
        assert_eq!(pool.num_threads(), allowed.num_cpus());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                pool.attach_thread().unwrap();
                // Every participant takes one item and waits for the others.
                let everybody = std::sync::Barrier::new(pool.num_threads());
                pool.for_each(pool.num_threads(), |thread_idx, _| {
                    everybody.wait();
                    let expected = allowed.divide(allowed.num_cpus()).unwrap().swap_remove(thread_idx);
                    assert_eq!(CpuList::allowed().unwrap(), expected);
                });
            });
        });
        assert_eq!(CpuList::allowed().unwrap(), allowed, "whoever makes a pool is not kept to a processor");
    }

    #[test]
    fn operations_of_several_threads_are_complete() {
        let pool = ThreadPool::new(3).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..300 {
                        let counts: Vec<AtomicUsize> = (0..100).map(|_| AtomicUsize::new(0)).collect();
                        pool.for_each(100, |_, idx| {
                            counts[idx].fetch_add(1, Ordering::Relaxed);
                        });
                        assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
                    }
                });
            }
        });
        assert!(!pool.is_busy.load(Ordering::Relaxed));
    }

    #[test]
    fn who_finds_the_pool_busy_leaves_it_busy() {
        let is_busy = AtomicBool::new(false);
        let owner = Busy::new(&is_busy);
        assert!(owner.is_some());
        for _ in 0..2 {
            assert!(Busy::new(&is_busy).is_none());
        }
        drop(owner);
        assert!(Busy::new(&is_busy).is_some());
    }

    #[test]
    fn an_operation_within_an_operation_runs_alone() {
        let pool = ThreadPool::new(3).unwrap();
        let sum = AtomicUsize::new(0);
        pool.for_each(10, |_, _| {
            pool.for_each(10, |thread_idx, idx| {
                assert_eq!(thread_idx, 0);
                sum.fetch_add(idx, Ordering::Relaxed);
            });
        });
        assert_eq!(sum.into_inner(), 450);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
        let pool = ThreadPool::new(2).unwrap();
        for panicking in [40..41, 0..64] {
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                pool.for_each(64, |_, idx| assert!(!panicking.contains(&idx), "on purpose"));
            }));
            assert!(result.is_err());
        }
        let count = AtomicUsize::new(0);
        pool.for_each(64, |_, _| {
            count.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(count.into_inner(), 64);
    }
}
