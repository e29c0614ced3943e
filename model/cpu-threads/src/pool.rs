//! A pool of threads that share the work of one operation at a time. All executors of a process share one pool, so
//! that there are as many busy threads as CPUs.
//!
//! An operation is a closure that every participant calls once. Participants take work items from a shared counter,
//! so the operation completes with any number of them. Threads spin briefly between operations and then sleep: a
//! forward pass has a dozen operations per layer, microseconds apart. An operation allocates nothing and never waits
//! for a lock. If the pool is busy with another thread's operation, the caller computes its operation alone.
//!
//! ```text
//! state   | epoch (32) | open (1) | active (31) |
//! caller:  epoch+1, open, 0 active --> runs its share --> not open --> waits for active == 0
//! helper:  sees a new open epoch --> active+1 (fails once closed) --> runs --> active-1
//! ```
//! A helper that wakes too late finds the operation closed and continues to wait.

use std::cell::UnsafeCell;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use crate::affinity::{CpuList, CpuListError};

const OPEN: u64 = 1 << 31;
const ACTIVE: u64 = OPEN - 1;
/// Polls of the state before a helper sleeps: about 20 to 50 microseconds.
const SPINS: u32 = 4000;

type Work<'a> = &'a (dyn Fn(usize) + Sync);

struct Shared {
    state: AtomicU64,
    work: UnsafeCell<Option<Work<'static>>>,
    num_sleeping: AtomicU32,
    panicked: AtomicBool,
    stop: AtomicBool,
}

// SAFETY: only the call of `run` that made the pool busy writes `work`, while no operation is open and no participant
// is active. Only participants that are counted in `active` read it.
unsafe impl Sync for Shared {}

/// Compute threads that the executors of a process share. Executors called from one thread, such as a target model's
/// and its draft model's, use all threads in turn. If two threads compute at the same time, one has the helpers for
/// an operation, and the other computes its operation alone.
pub struct ThreadPool {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
    /// Whether an operation has the helpers. Kept apart from the state that helpers poll.
    is_busy: AtomicBool,
    /// The CPU of each participant, if threads are pinned.
    cpus: Option<CpuList>,
}

impl ThreadPool {
    /// A pool of `num_threads` participants. The thread that calls an executor is one of them.
    ///
    /// # Errors
    /// When threads cannot be started.
    pub fn new(num_threads: usize) -> io::Result<ThreadPool> {
        ThreadPool::start(num_threads, None)
    }

    /// A pool with one participant pinned to each of these CPUs. [`attach_thread`](Self::attach_thread) pins the
    /// calling thread to the first.
    ///
    /// # Errors
    /// When this process may not use one of the CPUs, or threads cannot be started.
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
                // If the receiver is dropped, starting another helper has failed.
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

    /// Pins the calling thread, participant 0, to its CPU.
    pub fn attach_thread(&self) -> io::Result<()> {
        self.cpus.as_ref().map_or(Ok(()), |cpus| cpus.pin(0))
    }

    /// The number of participants, for memory per thread.
    pub fn num_threads(&self) -> usize {
        self.helpers.len() + 1
    }

    /// Calls `work(thread_idx)` on this thread (index 0) and on the helpers that arrive in time.
    ///
    /// # Panics
    /// When `work` panics, after all participants have left it.
    fn run(&self, work: Work<'_>) {
        if self.helpers.is_empty() {
            return work(0);
        }
        let Some(_busy) = Busy::new(&self.is_busy) else { return work(0) };
        let shared = &*self.shared;
        shared.panicked.store(false, Ordering::Relaxed);
        // SAFETY: the borrow ends with this call. `Closing` waits until no participant is inside, and none enters
        // after the operation is closed.
        let work_forever = unsafe { std::mem::transmute::<Work<'_>, Work<'static>>(work) };
        // SAFETY: this call made the pool busy, so no operation is open and no participant reads.
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

    /// Calls `item(thread_idx, item_idx)` for every item below `num_items`, in any order.
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
            // A helper does not panic: it catches panics of the work.
            let _ = helper.join();
        }
    }
}

/// Ownership of the pool by one operation, until dropped.
struct Busy<'a>(&'a AtomicBool);

impl<'a> Busy<'a> {
    /// `None` if another operation owns the pool.
    fn new(is_busy: &'a AtomicBool) -> Option<Busy<'a>> {
        // Only the owner gets a guard, because dropping it ends the ownership.
        if is_busy.swap(true, Ordering::Acquire) { None } else { Some(Busy(is_busy)) }
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// Closes the operation and waits for the helpers inside, also if the caller's share panics.
struct Closing<'a>(&'a Shared);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.state.fetch_and(!OPEN, Ordering::AcqRel);
        let mut spins = 0u32;
        while self.0.state.load(Ordering::Acquire) & ACTIVE != 0 {
            spins = spins.wrapping_add(1);
            // A helper may have lost its CPU to another thread: this yields the caller's CPU to it.
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
        // SAFETY: this participant is counted in `active`, so the caller waits for it before it ends or changes
        // `work`.
        let work = unsafe { *shared.work.get() }.expect("set before the operation opened");
        if std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(thread_idx))).is_err() {
            shared.panicked.store(true, Ordering::Relaxed);
        }
        shared.state.fetch_sub(1, Ordering::Release);
    }
}

/// Waits for an open operation other than `seen`; `None` if the pool stops.
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
        // Checks again after announcing the sleep: either this thread sees the operation here, or the operation's
        // caller sees the sleeper and unparks it.
        if !is_new(shared.state.load(Ordering::SeqCst)) && !shared.stop.load(Ordering::SeqCst) {
            std::thread::park();
        }
        shared.num_sleeping.fetch_sub(1, Ordering::SeqCst);
        if shared.stop.load(Ordering::SeqCst) {
            return None;
        }
    }
}

/// Becomes a participant, unless the operation of `state` was closed meanwhile.
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
            // Waits longer than the helpers spin.
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
    fn pinned_threads_stay_on_their_cpus() {
        let allowed = CpuList::allowed().unwrap();
        let pool = ThreadPool::pinned(allowed.clone()).unwrap();
        assert_eq!(pool.num_threads(), allowed.num_cpus());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                pool.attach_thread().unwrap();
                // Every participant takes one item and waits for the others.
                let all_participants = std::sync::Barrier::new(pool.num_threads());
                pool.for_each(pool.num_threads(), |thread_idx, _| {
                    all_participants.wait();
                    let expected = allowed.divide(allowed.num_cpus()).unwrap().swap_remove(thread_idx);
                    assert_eq!(CpuList::allowed().unwrap(), expected);
                });
            });
        });
        assert_eq!(CpuList::allowed().unwrap(), allowed, "the thread that makes a pool is not pinned");
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
    fn a_caller_that_finds_the_pool_busy_leaves_it_busy() {
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
    fn a_nested_operation_runs_alone() {
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
    fn a_panic_reaches_the_caller_and_the_pool_keeps_working() {
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
