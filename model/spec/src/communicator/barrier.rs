//! A reusable barrier for a fixed number of threads. It fails when a thread is lost.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

use super::contract::CommunicatorError;

/// Polls before a thread sleeps: about 20 to 50 microseconds. A layer has three barriers, and ranks with equal work
/// arrive soon.
const SPINS: u32 = 4000;
/// Polls between two calls of `yield_now`: the thread that is waited for may need this CPU.
const SPINS_PER_YIELD: u32 = 256;
/// The value of `lost` while no thread is lost.
const NO_RANK: usize = usize::MAX;

/// A barrier: all threads continue when the last has arrived.
pub(super) struct Barrier {
    num_threads: usize,
    num_arrived: AtomicUsize,
    /// Barriers completed so far.
    num_completed: AtomicUsize,
    lost: AtomicUsize,
    num_sleeping: AtomicUsize,
    lock: Mutex<()>,
    changed: Condvar,
}

impl Barrier {
    pub(super) fn new(num_threads: usize) -> Barrier {
        Barrier {
            num_threads,
            num_arrived: AtomicUsize::new(0),
            num_completed: AtomicUsize::new(0),
            lost: AtomicUsize::new(NO_RANK),
            num_sleeping: AtomicUsize::new(0),
            lock: Mutex::new(()),
            changed: Condvar::new(),
        }
    }

    /// Waits until every thread has arrived. All threads then see what each wrote to memory before.
    ///
    /// A barrier at which all threads arrived succeeds, even if a thread leaves right after it. So either every
    /// thread's call succeeds, or none does.
    ///
    /// # Errors
    /// When a thread was lost before it arrived, and in every later call.
    pub(super) fn wait(&self) -> Result<(), CommunicatorError> {
        // A thread that got an error must not be counted again. A lost thread has completed all earlier barriers, so
        // no thread still waits in one of them.
        if let Some(error) = self.lost() {
            return Err(error);
        }
        let num_completed = self.num_completed.load(Ordering::Acquire);
        // A lost thread never arrives, so no barrier completes without it.
        if self.num_arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.num_threads {
            self.num_arrived.store(0, Ordering::Relaxed);
            self.num_completed.store(num_completed.wrapping_add(1), Ordering::SeqCst);
            self.wake();
            return Ok(());
        }
        let is_completed = || self.num_completed.load(Ordering::SeqCst) != num_completed;
        let outcome = || {
            if is_completed() {
                return Some(Ok(()));
            }
            let error = self.lost()?;
            // A thread may have completed this barrier and left between the two looks.
            Some(if is_completed() { Ok(()) } else { Err(error) })
        };
        for spins in 1..=SPINS {
            if let Some(outcome) = outcome() {
                return outcome;
            }
            if spins.is_multiple_of(SPINS_PER_YIELD) {
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        // `num_sleeping` rises before the last check: either the check sees the change, or the thread that makes the
        // change sees a sleeper and wakes it.
        self.num_sleeping.fetch_add(1, Ordering::SeqCst);
        let outcome = loop {
            if let Some(outcome) = outcome() {
                break outcome;
            }
            guard = self.changed.wait(guard).unwrap_or_else(PoisonError::into_inner);
        };
        self.num_sleeping.fetch_sub(1, Ordering::SeqCst);
        outcome
    }

    /// Records that a thread is lost and never arrives again. The first lost thread is kept.
    pub(super) fn mark_lost(&self, rank: usize) {
        let _ = self.lost.compare_exchange(NO_RANK, rank, Ordering::SeqCst, Ordering::SeqCst);
        self.wake();
    }

    fn lost(&self) -> Option<CommunicatorError> {
        match self.lost.load(Ordering::SeqCst) {
            NO_RANK => None,
            rank => Some(CommunicatorError::Lost { rank }),
        }
    }

    fn wake(&self) {
        if self.num_sleeping.load(Ordering::SeqCst) > 0 {
            drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
            self.changed.notify_all();
        }
    }
}
