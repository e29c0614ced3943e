//! The requests that decode now, by worker, and which of them is told to migrate.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use baton_planner::{Balance, WorkerKey};
use baton_router_workers::Workers;
use tokio::sync::{Semaphore, oneshot};
use tokio_util::sync::CancellationToken;

/// Requests that migrate at a time. Each reads KV at one worker and writes it at another, beside steps that need the
/// same memory bandwidth.
const MAX_MIGRATING: usize = 8;

/// How often the load reports are compared.
const INTERVAL: Duration = Duration::from_millis(250);

/// Whether running requests migrate from one decode worker to another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MigrationMode {
    /// They stay where they run. A worker that drains finishes them.
    Off,
    /// They leave a worker that drains.
    Drain,
    /// They also leave a much fuller worker for an emptier one.
    #[default]
    Balance,
}

/// Every request that could migrate. All requests share it.
#[derive(Debug)]
pub struct Migrator {
    pub(crate) mode: MigrationMode,
    /// A request that migrates holds one.
    pub(crate) permits: Arc<Semaphore>,
    candidates: Mutex<Candidates>,
}

#[derive(Debug, Default)]
struct Candidates {
    next_number: u64,
    by_worker: BTreeMap<WorkerKey, BTreeMap<u64, oneshot::Sender<WorkerKey>>>,
}

/// A request that decodes at a worker and can be told to leave it, until this is dropped.
#[derive(Debug)]
pub(crate) struct Candidate {
    migrator: Arc<Migrator>,
    worker: WorkerKey,
    number: u64,
    target: oneshot::Receiver<WorkerKey>,
}

impl Migrator {
    pub(crate) fn new(mode: MigrationMode) -> Arc<Migrator> {
        let permits = Arc::new(Semaphore::new(MAX_MIGRATING));
        Arc::new(Migrator { mode, permits, candidates: Mutex::default() })
    }

    /// Enters a request that decodes at `worker`.
    pub(crate) fn enter(self: &Arc<Self>, worker: &WorkerKey) -> Candidate {
        let (tell, target) = oneshot::channel();
        let mut candidates = self.lock();
        candidates.next_number += 1;
        let number = candidates.next_number;
        candidates.by_worker.entry(worker.clone()).or_default().insert(number, tell);
        Candidate { migrator: self.clone(), worker: worker.clone(), number, target }
    }

    /// Migrates requests from fuller workers to emptier ones, until `stop`.
    pub async fn balance(self: Arc<Self>, workers: Arc<Workers>, stop: CancellationToken) {
        let mut balance = Balance::default();
        while stop.run_until_cancelled(tokio::time::sleep(INTERVAL)).await.is_some() {
            let num_running = self
                .lock()
                .by_worker
                .iter()
                .map(|(key, candidates)| (key.clone(), candidates.len()))
                .collect();
            if let Some(migration) = balance.next(&workers.view(), &num_running, Instant::now()) {
                tracing::info!(
                    from = %migration.from, to = %migration.to,
                    "a request migrates to an emptier decode worker"
                );
                self.tell(&migration.from, migration.to);
            }
        }
    }

    /// Tells the newest request at `from` to migrate: it is likely to have the least KV and the most tokens to go.
    fn tell(&self, from: &WorkerKey, to: WorkerKey) {
        let newest = self.lock().by_worker.get_mut(from).and_then(BTreeMap::pop_last);
        if let Some((_, tell)) = newest {
            // The request may have ended this moment.
            let _ = tell.send(to);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Candidates> {
        self.candidates.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Candidate {
    /// Completes with the target when the request is told to migrate; at most once.
    pub(crate) async fn told(&mut self) -> WorkerKey {
        match (&mut self.target).await {
            Ok(to) => to,
            // The request was told before: the sender is gone.
            Err(_) => std::future::pending().await,
        }
    }
}

impl Drop for Candidate {
    fn drop(&mut self) {
        let mut candidates = self.migrator.lock();
        if let Some(at_worker) = candidates.by_worker.get_mut(&self.worker) {
            at_worker.remove(&self.number);
            if at_worker.is_empty() {
                candidates.by_worker.remove(&self.worker);
            }
        }
    }
}
