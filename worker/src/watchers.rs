//! Which routers read this worker's load now. It does not know what they read.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use baton_cluster::WorkerId;

/// The routers that read. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Watchers {
    /// Streams of each router, by its name.
    num_streams: Arc<Mutex<BTreeMap<u64, usize>>>,
}

/// One stream; it counts until it is dropped.
#[derive(Debug)]
pub(crate) struct Watching {
    watchers: Watchers,
    router: u64,
}

impl Watchers {
    /// A router begins to read. 0: a reader without a name, which does not count.
    pub(crate) fn enter(&self, router: u64) -> Watching {
        if router != 0 {
            *self.lock().entry(router).or_default() += 1;
        }
        Watching { watchers: self.clone(), router }
    }

    /// Whether the worker belongs to another router than this one.
    pub(crate) fn prefer_another(&self, worker: &WorkerId, router: u64) -> bool {
        router != 0 && worker.home_router(self.lock().keys().copied()).is_some_and(|home| home != router)
    }

    /// No user code runs under the lock, so a poisoned one holds whole data.
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, usize>> {
        self.num_streams.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        let mut all = self.watchers.lock();
        if let Some(num) = all.get_mut(&self.router) {
            *num -= 1;
            if *num == 0 {
                all.remove(&self.router);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_belongs_to_one_of_the_routers_that_read() {
        let (watchers, worker) = (Watchers::default(), WorkerId::from("d1"));
        let first = watchers.enter(7);
        assert!(!watchers.prefer_another(&worker, 7), "there is no other");
        let (again, second) = (watchers.enter(7), watchers.enter(8));
        let others = [7, 8].map(|router| watchers.prefer_another(&worker, router));
        assert_eq!(others.iter().filter(|&&is_other| is_other).count(), 1);
        assert!(!watchers.prefer_another(&worker, 0), "a reader without a name plans nothing");
        drop((first, second));
        assert!(!watchers.prefer_another(&worker, 7), "one stream of 7 is left");
        drop(again);
        assert!(watchers.lock().is_empty());
    }
}
