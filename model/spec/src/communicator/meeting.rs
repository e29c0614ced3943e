//! A place where a fixed number of threads wait for each other, again and again, unless one is gone.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

use super::contract::CommunicatorError;

/// Looks before a thread sleeps: some 20 to 50 microseconds. A layer has three meetings, and who computes as much as the
/// others comes soon.
const SPINS: u32 = 4000;
/// Looks after which a thread lets others have the processor: whoever it waits for may need it.
const SPINS_PER_YIELD: u32 = 256;
/// `lost` while nobody is.
const NOBODY: usize = usize::MAX;

/// Threads meet when the last of them has arrived.
pub(super) struct Meeting {
    num_members: usize,
    num_arrived: AtomicUsize,
    /// Meetings that were.
    num_held: AtomicUsize,
    lost: AtomicUsize,
    num_sleeping: AtomicUsize,
    lock: Mutex<()>,
    changed: Condvar,
}

impl Meeting {
    pub(super) fn new(num_members: usize) -> Meeting {
        Meeting {
            num_members,
            num_arrived: AtomicUsize::new(0),
            num_held: AtomicUsize::new(0),
            lost: AtomicUsize::new(NOBODY),
            num_sleeping: AtomicUsize::new(0),
            lock: Mutex::new(()),
            changed: Condvar::new(),
        }
    }

    /// Waits until every member has arrived. What each did before, all see after.
    ///
    /// A meeting that all have come to is held, also if somebody leaves right after it: so either every member's call
    /// succeeds, or none does.
    ///
    /// # Errors
    /// When a member is gone without having arrived; from then on always.
    pub(super) fn arrive(&self) -> Result<(), CommunicatorError> {
        // Who was refused once would be counted twice. Whoever is gone has left the meetings before, so nobody is still
        // on the way to those.
        if let Some(error) = self.lost() {
            return Err(error);
        }
        let num_held = self.num_held.load(Ordering::Acquire);
        // Whoever is gone never arrives, so no meeting without it is held.
        if self.num_arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.num_members {
            self.num_arrived.store(0, Ordering::Relaxed);
            self.num_held.store(num_held.wrapping_add(1), Ordering::SeqCst);
            self.wake();
            return Ok(());
        }
        let outcome = || {
            if self.num_held.load(Ordering::SeqCst) != num_held {
                return Some(Ok(()));
            }
            self.lost().map(Err)
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
        // Announced before the last look: either that sees the change, or whoever makes it sees a sleeper to wake.
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

    /// Says that a member will not come any more. The first that is lost is remembered.
    pub(super) fn lose(&self, rank: usize) {
        let _ = self.lost.compare_exchange(NOBODY, rank, Ordering::SeqCst, Ordering::SeqCst);
        self.wake();
    }

    fn lost(&self) -> Option<CommunicatorError> {
        match self.lost.load(Ordering::SeqCst) {
            NOBODY => None,
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
