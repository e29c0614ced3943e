//! Bounds the number of communicators. Each takes device memory and threads of NCCL. The one that was idle longest ends
//! to make room for a new one.

use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// Most communicators of one end. More peers take turns.
pub(super) const MAX_COMMUNICATORS: usize = 16;

/// The communicators of one end.
pub(super) struct Communicators {
    max: usize,
    table: Mutex<Table>,
    left: Condvar,
}

#[derive(Default)]
struct Table {
    entries: Vec<Entry>,
    next_id: u64,
    /// A clock that counts uses.
    clock: u64,
}

struct Entry {
    id: u64,
    last_used: u64,
    is_busy: bool,
    /// Asks its connection to end. `None` once it was asked.
    evict: Option<Box<dyn FnOnce() + Send>>,
}

/// The right to have one communicator, until it is dropped.
pub(super) struct Slot {
    communicators: Arc<Communicators>,
    id: u64,
}

impl Communicators {
    pub(super) fn new(max: usize) -> Arc<Communicators> {
        Arc::new(Communicators { max, table: Mutex::default(), left: Condvar::new() })
    }

    /// A new slot, which is idle. If none is free, the connection that was idle longest is asked to end, by its
    /// `evict`, which must not wait. `None`: no slot became free within `patience`.
    pub(super) fn enter(
        self: &Arc<Self>,
        evict: impl FnOnce() + Send + 'static,
        patience: Duration,
    ) -> Option<Slot> {
        let deadline = Instant::now() + patience;
        let mut table = self.table();
        while table.entries.len() >= self.max {
            let is_leaving = table.entries.iter().any(|entry| entry.evict.is_none());
            if !is_leaving && let Some(evict) = table.take_victim() {
                drop(table);
                evict();
                table = self.table();
                continue;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            table = self.left.wait_timeout(table, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        let id = table.next_id;
        table.next_id += 1;
        let last_used = table.tick();
        table.entries.push(Entry { id, last_used, is_busy: false, evict: Some(Box::new(evict)) });
        Some(Slot { communicators: Arc::clone(self), id })
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // Every change is complete before anything can panic.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    fn take_victim(&mut self) -> Option<Box<dyn FnOnce() + Send>> {
        let idle = self.entries.iter_mut().filter(|entry| !entry.is_busy && entry.evict.is_some());
        idle.min_by_key(|entry| entry.last_used)?.evict.take()
    }
}

impl Slot {
    /// Marks the communicator as busy or idle. A busy one is not asked to end. `false`: it was asked to end before.
    pub(super) fn set_busy(&self, is_busy: bool) -> bool {
        let mut table = self.communicators.table();
        let last_used = table.tick();
        let Some(entry) = table.entries.iter_mut().find(|entry| entry.id == self.id) else { return false };
        (entry.last_used, entry.is_busy) = (last_used, is_busy);
        let is_wanted = entry.evict.is_some();
        drop(table);
        if !is_busy {
            // `enter` may wait for an idle communicator.
            self.communicators.left.notify_one();
        }
        is_wanted
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.communicators.table().entries.retain(|entry| entry.id != self.id);
        self.communicators.left.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const NOW: Duration = Duration::ZERO;
    const LONG: Duration = Duration::from_secs(60);

    fn enter(
        all: &Arc<Communicators>,
        name: u32,
        asked: &mpsc::Sender<u32>,
        patience: Duration,
    ) -> Option<Slot> {
        let asked = asked.clone();
        all.enter(move || asked.send(name).unwrap(), patience)
    }

    #[test]
    fn the_one_that_was_idle_for_the_longest_is_asked_to_leave() {
        let all = Communicators::new(3);
        let (asked, leaving) = mpsc::channel();
        let slots: Vec<_> = (0..3).map(|name| enter(&all, name, &asked, NOW).unwrap()).collect();
        // 0 is busy, 2 was used before 1.
        assert!(slots[0].set_busy(true));
        for idx in [2, 1] {
            assert!(slots[idx].set_busy(true) && slots[idx].set_busy(false));
        }
        assert!(enter(&all, 3, &asked, NOW).is_none(), "no slot is free yet");
        assert_eq!(leaving.try_iter().collect::<Vec<_>>(), [2]);
        assert!(enter(&all, 3, &asked, NOW).is_none());
        assert_eq!(leaving.try_iter().count(), 0, "one connection is leaving: no other is asked");
        assert!(!slots[2].set_busy(true), "too late to begin something");
        let mut slots = slots;
        drop(slots.remove(2));
        let new = enter(&all, 3, &asked, NOW).unwrap();
        assert!(new.set_busy(true));
    }

    #[test]
    fn when_all_are_busy_a_new_one_waits_for_one_to_fall_idle_and_leave() {
        let all = Communicators::new(1);
        let (asked, leaving) = mpsc::channel();
        let first = enter(&all, 0, &asked, NOW).unwrap();
        first.set_busy(true);
        assert!(enter(&all, 1, &asked, Duration::from_millis(10)).is_none());
        assert_eq!(leaving.try_iter().count(), 0);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| enter(&all, 1, &asked, LONG).is_some());
            first.set_busy(false);
            assert_eq!(leaving.recv_timeout(LONG), Ok(0));
            drop(first);
            assert!(waiting.join().unwrap());
        });
        assert!(all.table().entries.is_empty());
    }
}
