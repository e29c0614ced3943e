//! Bounds the time that one sequence may spend on its grammar, so that it does not stall the sequences of the same step.
//!
//! llguidance bounds the size of a step, but the time of an ambiguous grammar grows with the cube of that. A thread looks
//! every [`TICK`] which operations are running, charges their sequences for it, and cancels where the allowance is used up.
//! So an operation costs two writes to memory, and a machine that stands still for a while charges for one tick.

use std::{
    io,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicI64, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use llguidance::CancellationHandle;

pub(crate) const TICK: Duration = Duration::from_millis(5);

/// The time that the operations of one sequence may take. What it does not use is kept, up to `ahead`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrammarTime {
    /// At the start.
    pub ahead: Duration,
    /// More with each token of the output.
    pub per_token: Duration,
}

/// The thread that looks at running operations. Dropping it waits for the thread to end.
pub(crate) struct Watch {
    state: Arc<State>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct State {
    watched: Mutex<Watched>,
    has_changed: Condvar,
}

#[derive(Default)]
struct Watched {
    meters: Vec<Weak<Meter>>,
    has_ended: bool,
}

/// The allowance of one sequence.
pub(crate) struct Meter {
    is_running: AtomicBool,
    /// In nanoseconds. Below 0 when it was cancelled.
    left: AtomicI64,
    time: GrammarTime,
    handle: Mutex<CancellationHandle>,
}

/// An operation, until it is dropped.
pub(crate) struct Operation(Arc<Meter>);

impl Watch {
    pub(crate) fn start() -> io::Result<Watch> {
        let state = Arc::<State>::default();
        let of_thread = state.clone();
        let thread = thread::Builder::new().name("grammar-watch".into()).spawn(move || of_thread.watch())?;
        Ok(Watch { state, thread: Some(thread) })
    }

    /// Watches a sequence whose operations `handle` cancels, until the meter is dropped.
    pub(crate) fn meter(&self, time: GrammarTime, handle: CancellationHandle) -> Arc<Meter> {
        let meter = Arc::new(Meter::new(time, handle));
        let mut watched = self.state.lock();
        watched.meters.push(Arc::downgrade(&meter));
        if watched.meters.len() == 1 {
            self.state.has_changed.notify_one();
        }
        drop(watched);
        meter
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.state.lock().has_ended = true;
        self.state.has_changed.notify_one();
        if let Some(thread) = self.thread.take() {
            // It has nothing that panics.
            let _ = thread.join();
        }
    }
}

impl State {
    fn watch(&self) {
        let mut watched = self.lock();
        while !watched.has_ended {
            if watched.meters.is_empty() {
                watched = self.has_changed.wait(watched).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let waited = self.has_changed.wait_timeout(watched, TICK);
            let (now, waited) = waited.unwrap_or_else(PoisonError::into_inner);
            watched = now;
            // Only a whole tick is charged.
            if waited.timed_out() {
                watched.meters.retain(|meter| meter.upgrade().is_some_and(|meter| meter.charge()));
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Watched> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Meter {
    pub(crate) fn new(time: GrammarTime, handle: CancellationHandle) -> Meter {
        let left = AtomicI64::new(nanos(time.ahead));
        Meter { is_running: AtomicBool::new(false), left, time, handle: Mutex::new(handle) }
    }

    /// From now on `handle` cancels its operations.
    pub(crate) fn cancel_by(&self, handle: CancellationHandle) {
        let mut current = self.handle();
        // The watch may just have cancelled the old one, and looks no more.
        if self.has_run_out() {
            handle.cancel();
        }
        *current = handle;
    }

    /// Begins an operation. Operations of one sequence do not overlap.
    pub(crate) fn begin(self: &Arc<Meter>) -> Operation {
        self.is_running.store(true, Relaxed);
        Operation(self.clone())
    }

    /// One more token of the output, or of a draft.
    pub(crate) fn add_token(&self) {
        let GrammarTime { ahead, per_token } = self.time;
        let more = |left: i64| (left >= 0).then(|| (left + nanos(per_token)).min(nanos(ahead)));
        // A sequence that was cancelled stays so.
        let _ = self.left.fetch_update(Relaxed, Relaxed, more);
    }

    pub(crate) fn time(&self) -> GrammarTime {
        self.time
    }

    /// Whether its operations took longer than they may.
    pub(crate) fn has_run_out(&self) -> bool {
        self.left.load(Relaxed) < 0
    }

    /// Whether enough is left to spend some on what may never come.
    pub(crate) fn has_reserve(&self) -> bool {
        self.left.load(Relaxed) >= nanos(self.time.ahead) / 2
    }

    /// Charges a running operation for one tick. False when nothing is left.
    pub(crate) fn charge(&self) -> bool {
        let tick = nanos(TICK);
        if !self.is_running.load(Relaxed) || self.left.fetch_sub(tick, Relaxed) >= tick {
            return true;
        }
        self.handle().cancel();
        false
    }

    fn handle(&self) -> MutexGuard<'_, CancellationHandle> {
        // A handle is whole at any time.
        self.handle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        self.0.is_running.store(false, Relaxed);
    }
}

fn nanos(time: Duration) -> i64 {
    i64::try_from(time.as_nanos()).unwrap_or(i64::MAX)
}
