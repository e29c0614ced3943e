//! The requests that decode somewhere, by worker, and how one is told to go elsewhere.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use baton_planner::{Balance, WorkerKey};
use tokio::sync::{Semaphore, oneshot};
use tokio_util::sync::CancellationToken;

use crate::workers::Workers;

/// Requests under way from one worker to another at a time. Each reads KV at one end and writes it at the other, beside
/// steps that want the memory, too.
const MAX_MOVING: usize = 8;

/// How often reports are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Whether running requests move from one decode worker to another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Migration {
    /// They stay where they run. A worker that leaves finishes them.
    Off,
    /// They go from a worker that leaves.
    Drain,
    /// They also go from a much fuller worker to an emptier one.
    #[default]
    Balance,
}

/// Every request that could move. Shared by all.
#[derive(Debug)]
pub(crate) struct Moves {
    pub(crate) migration: Migration,
    /// Who moves has one.
    pub(crate) permits: Arc<Semaphore>,
    seats: Mutex<Seats>,
}

#[derive(Debug, Default)]
struct Seats {
    next: u64,
    by_worker: BTreeMap<WorkerKey, BTreeMap<u64, oneshot::Sender<WorkerKey>>>,
}

/// A request's place at a worker; it is given up when this is dropped.
#[derive(Debug)]
pub(crate) struct Seat {
    moves: Arc<Moves>,
    worker: WorkerKey,
    number: u64,
    asked: oneshot::Receiver<WorkerKey>,
}

impl Moves {
    pub(crate) fn new(migration: Migration) -> Arc<Moves> {
        let permits = Arc::new(Semaphore::new(MAX_MOVING));
        Arc::new(Moves { migration, permits, seats: Mutex::default() })
    }

    /// A request decodes at `worker` from now on.
    pub(crate) fn sit(self: &Arc<Self>, worker: &WorkerKey) -> Seat {
        let (ask, asked) = oneshot::channel();
        let mut seats = self.lock();
        seats.next += 1;
        let number = seats.next;
        seats.by_worker.entry(worker.clone()).or_default().insert(number, ask);
        Seat { moves: self.clone(), worker: worker.clone(), number, asked }
    }

    /// Moves requests from fuller workers to emptier ones, until `stop`.
    pub(crate) async fn balance(self: Arc<Self>, workers: Arc<Workers>, stop: CancellationToken) {
        let mut balance = Balance::default();
        while stop.run_until_cancelled(tokio::time::sleep(LOOK_EVERY)).await.is_some() {
            let num_running =
                self.lock().by_worker.iter().map(|(key, seats)| (key.clone(), seats.len())).collect();
            if let Some(next) = balance.next(&workers.view(), &num_running, Instant::now()) {
                tracing::info!(from = %next.from, to = %next.to, "a request moves to an emptier worker");
                self.ask(&next.from, next.to);
            }
        }
    }

    /// Tells the newest request at `from` to go: it is likely to have the least KV and the longest way to go.
    fn ask(&self, from: &WorkerKey, to: WorkerKey) {
        let newest = self.lock().by_worker.get_mut(from).and_then(BTreeMap::pop_last);
        if let Some((_, ask)) = newest {
            // It may have ended this moment.
            let _ = ask.send(to);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Seats> {
        self.seats.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Seat {
    /// Completes when the request is told to go, with where to; at most once.
    pub(crate) async fn asked(&mut self) -> WorkerKey {
        match (&mut self.asked).await {
            Ok(to) => to,
            // The other end lives as long as the seat: it is used up.
            Err(_) => std::future::pending().await,
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut seats = self.moves.lock();
        if let Some(at_worker) = seats.by_worker.get_mut(&self.worker) {
            at_worker.remove(&self.number);
            if at_worker.is_empty() {
                seats.by_worker.remove(&self.worker);
            }
        }
    }
}
