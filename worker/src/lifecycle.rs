//! The phases of a worker between its start and its end, and the tasks that it waits for.
//!
//! ```text
//! Starting --ready()--> Serving --drain()--> Draining --halt()--> Draining, ends what still runs
//!     +------------------drain()----------------^
//! ```

use std::sync::Arc;

use tokio::sync::watch;
use tokio_util::{
    sync::CancellationToken,
    task::{TaskTracker, task_tracker::TaskTrackerToken},
};

/// A phase of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// No router knows it yet.
    Starting,
    /// Routers can send requests.
    Serving,
    /// It is leaving, and accepts nothing new.
    Draining,
}

/// The phase and the tasks of a worker, for all of its parts. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Lifecycle {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    phase: watch::Sender<Phase>,
    drain: CancellationToken,
    halt: CancellationToken,
    tasks: TaskTracker,
}

impl Default for Lifecycle {
    fn default() -> Lifecycle {
        Lifecycle::new()
    }
}

impl Lifecycle {
    /// A worker that starts.
    pub fn new() -> Lifecycle {
        let inner = Inner {
            phase: watch::Sender::new(Phase::Starting),
            drain: CancellationToken::new(),
            halt: CancellationToken::new(),
            tasks: TaskTracker::new(),
        };
        Lifecycle { inner: Arc::new(inner) }
    }

    /// The current phase.
    pub fn phase(&self) -> Phase {
        *self.inner.phase.borrow()
    }

    /// Follows the phase.
    pub fn watch(&self) -> watch::Receiver<Phase> {
        self.inner.phase.subscribe()
    }

    /// Routers can send from now on.
    pub fn ready(&self) {
        self.inner.phase.send_if_modified(|phase| {
            // Invariant 11: no other call leaves `Starting` for `Serving`, and a draining worker stays draining.
            let first = *phase == Phase::Starting;
            if first {
                *phase = Phase::Serving;
            }
            first
        });
    }

    /// Accepts nothing new from now on. May be called again.
    pub fn drain(&self) {
        self.inner
            .phase
            .send_if_modified(|phase| std::mem::replace(phase, Phase::Draining) != Phase::Draining);
        self.inner.drain.cancel();
    }

    /// Whether it drains.
    pub fn is_draining(&self) -> bool {
        self.phase() == Phase::Draining
    }

    /// Completes when draining begins.
    pub async fn draining(&self) {
        self.inner.drain.cancelled().await;
    }

    /// Cancelled when draining begins.
    pub fn drain_signal(&self) -> CancellationToken {
        self.inner.drain.clone()
    }

    /// Ends what still runs: the drain timeout has passed.
    pub(crate) fn halt(&self) {
        self.drain();
        self.inner.halt.cancel();
    }

    /// Cancelled when running work must end at once, with a failure after which the router plans again.
    pub fn halted(&self) -> CancellationToken {
        self.inner.halt.clone()
    }

    /// Runs a task that the worker waits for before it ends.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.inner.tasks.spawn(task);
    }

    /// The tasks that the worker waits for before it ends.
    pub(crate) fn tasks(&self) -> TaskTracker {
        self.inner.tasks.clone()
    }

    /// Stands for work without a task of its own; the worker waits until it is dropped.
    pub fn token(&self) -> TaskTrackerToken {
        self.inner.tasks.token()
    }

    /// Waits for all tasks and tokens. Called while draining.
    pub(crate) async fn idle(&self) {
        self.inner.tasks.close();
        self.inner.tasks.wait().await;
    }

    /// Tasks and tokens alive.
    pub fn num_busy(&self) -> usize {
        self.inner.tasks.len()
    }
}
