//! Where a worker stands between its start and its end, and who must be waited for.
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

/// Where it stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Not yet known to a router.
    Starting,
    /// A router can send.
    Serving,
    /// About to leave: takes nothing new.
    Draining,
}

/// Shared by everything in a worker. Cheap to clone.
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
    /// At its start.
    pub fn new() -> Lifecycle {
        let inner = Inner {
            phase: watch::Sender::new(Phase::Starting),
            drain: CancellationToken::new(),
            halt: CancellationToken::new(),
            tasks: TaskTracker::new(),
        };
        Lifecycle { inner: Arc::new(inner) }
    }

    /// Where it stands now.
    pub fn phase(&self) -> Phase {
        *self.inner.phase.borrow()
    }

    /// Follows where it stands.
    pub fn watch(&self) -> watch::Receiver<Phase> {
        self.inner.phase.subscribe()
    }

    /// A router can send from now on.
    pub fn ready(&self) {
        self.inner.phase.send_if_modified(|phase| {
            let first = *phase == Phase::Starting;
            if first {
                *phase = Phase::Serving;
            }
            first
        });
    }

    /// Takes nothing new from now on. May be called again.
    pub fn drain(&self) {
        self.inner
            .phase
            .send_if_modified(|phase| std::mem::replace(phase, Phase::Draining) != Phase::Draining);
        self.inner.drain.cancel();
    }

    /// Whether nothing new is taken.
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

    /// Ends what still runs: the time for draining is over.
    pub(crate) fn halt(&self) {
        self.drain();
        self.inner.halt.cancel();
    }

    /// Cancelled when what runs must end at once, with a failure that lets the router plan again.
    pub fn halted(&self) -> CancellationToken {
        self.inner.halt.clone()
    }

    /// Runs a task that the worker waits for before it ends.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.inner.tasks.spawn(task);
    }

    /// Stands for work that is no task of its own; the worker waits until it is dropped.
    pub fn token(&self) -> TaskTrackerToken {
        self.inner.tasks.token()
    }

    /// Waits for every task and token. To be called while draining.
    pub(crate) async fn idle(&self) {
        self.inner.tasks.close();
        self.inner.tasks.wait().await;
    }

    /// Tasks and tokens alive.
    pub fn num_busy(&self) -> usize {
        self.inner.tasks.len()
    }
}
