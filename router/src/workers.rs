//! The workers the router can send to: follows the membership, keeps a channel to each worker, and
//! watches its load reports, which also show that it lives.
//!
//! It does not know requests or policies; it answers with a [`ClusterView`].

mod channel;
mod watch;

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use baton_cluster::{Dialer, Membership, Role, WorkerRecord};
use baton_planner::{ClusterView, Load, Usability, WorkerKey, WorkerView};
use baton_proto::v1;
use tokio::sync::watch as notify;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::transport::Channel;

/// Of the longest sequences that decode workers serve, prompt and output together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Contexts {
    /// Some worker's: what may be asked for.
    pub(crate) longest: usize,
    /// Every worker's: what is meant where nothing was said, so that all can be asked. Pools of GPUs that are alike
    /// differ by a few blocks.
    pub(crate) shortest: usize,
}

impl Contexts {
    /// All alike.
    pub(crate) fn of(length: usize) -> Contexts {
        Contexts { longest: length, shortest: length }
    }
}

const BACKOFF_FIRST: Duration = Duration::from_millis(250);
const BACKOFF_LIMIT: Duration = Duration::from_secs(5);

/// Every known worker. Shared by all requests.
#[derive(Debug)]
pub(crate) struct Workers {
    keep_alive: Duration,
    dialer: Dialer,
    state: Mutex<State>,
    /// Counts changes of who is usable.
    changed: notify::Sender<u64>,
    tasks: TaskTracker,
    /// Cancelled when the membership is to stay as it is.
    settled: CancellationToken,
    stop: CancellationToken,
}

#[derive(Debug, Default)]
struct State {
    workers: BTreeMap<WorkerKey, Worker>,
    /// When a worker of each role was last usable.
    last_usable: BTreeMap<Role, Instant>,
}

#[derive(Debug)]
struct Worker {
    record: Arc<WorkerRecord>,
    channel: Channel,
    /// The newest report; absent while it does not answer.
    report: Option<Report>,
    /// A report has said that it drains. A process that drains never serves again.
    is_leaving: bool,
    /// Failures in a row.
    num_failures: u32,
    spared_until: Option<Instant>,
    num_assigned: Arc<AtomicUsize>,
    stop: CancellationToken,
}

#[derive(Clone, Debug)]
pub(crate) struct Report {
    pub(crate) load: v1::Load,
    pub(crate) at: Instant,
}

/// A worker with its newest report, for listings.
#[derive(Clone, Debug)]
pub(crate) struct Listed {
    pub(crate) record: Arc<WorkerRecord>,
    pub(crate) report: Option<Report>,
}

/// A request is with a worker as long as this lives.
#[derive(Debug)]
pub(crate) struct Assignment(Arc<AtomicUsize>);

impl Drop for Assignment {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Workers {
    /// No workers yet; [`follow`](Self::follow) fills it.
    pub(crate) fn new(keep_alive: Duration, dialer: Dialer) -> Arc<Workers> {
        let stop = CancellationToken::new();
        Arc::new(Workers {
            keep_alive,
            dialer,
            state: Mutex::default(),
            changed: notify::Sender::new(0),
            tasks: TaskTracker::new(),
            settled: stop.child_token(),
            stop,
        })
    }

    /// Follows the membership until it is [settled](Self::settle).
    pub(crate) fn follow(self: &Arc<Self>, mut members: Membership) {
        let workers = self.clone();
        let settled = self.settled.clone();
        self.tasks.spawn(async move {
            loop {
                let records: Vec<_> = members.borrow_and_update().iter().cloned().collect();
                workers.update(records);
                tokio::select! {
                    biased;
                    () = settled.cancelled() => return,
                    // When discovery has ended, the last known membership stays.
                    changed = members.changed() => if changed.is_err() { return },
                }
            }
        });
    }

    /// Keeps the membership as it is from now on. To be called before discovery stops: its end would look as if every
    /// worker had left, while running requests may still need another plan.
    pub(crate) fn settle(&self) {
        self.settled.cancel();
    }

    /// Ends every task and waits for them.
    pub(crate) async fn shut_down(&self) {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// What a policy needs to know.
    pub(crate) fn view(&self) -> ClusterView {
        let state = self.lock();
        let now = Instant::now();
        let workers = state.workers.values().map(|worker| worker.view(now)).collect();
        ClusterView { workers }
    }

    /// Follows the changes of who is usable. Subscribe before looking, then wait.
    pub(crate) fn changes(&self) -> notify::Receiver<u64> {
        self.changed.subscribe()
    }

    /// When a worker of this role was last usable; now, if one is.
    pub(crate) fn last_usable(&self, role: Role) -> Option<Instant> {
        let state = self.lock();
        if state.has_usable(role) { Some(Instant::now()) } else { state.last_usable.get(&role).copied() }
    }

    /// Whether a decode worker is usable.
    pub(crate) fn is_ready(&self) -> bool {
        self.lock().has_usable(Role::Decode)
    }

    /// What decode workers serve; `None` while no worker has said it.
    pub(crate) fn contexts(&self) -> Option<Contexts> {
        let state = self.lock();
        let decode = state.workers.values().filter(|worker| worker.record.role == Role::Decode);
        let lengths = decode.map(|worker| worker.record.capacity.context_length).filter(|&length| length > 0);
        lengths.fold(None, |contexts, length| {
            let Contexts { longest, shortest } = contexts.unwrap_or(Contexts::of(length));
            Some(Contexts { longest: longest.max(length), shortest: shortest.min(length) })
        })
    }

    /// Counts a request to the worker, and gives the way to it. `None` when it has gone.
    pub(crate) fn assign(&self, key: &WorkerKey) -> Option<(Channel, Assignment)> {
        let state = self.lock();
        let worker = state.workers.get(key)?;
        worker.num_assigned.fetch_add(1, Ordering::Relaxed);
        Some((worker.channel.clone(), Assignment(worker.num_assigned.clone())))
    }

    /// The worker broke off or could not be reached: no request is sent to it for a while.
    pub(crate) fn report_failure(&self, key: &WorkerKey) {
        let mut state = self.lock();
        let now = Instant::now();
        let Some(worker) = state.workers.get_mut(key) else { return };
        if worker.spared_until.is_some_and(|until| now < until) {
            return; // One crash breaks many streams, and is one failure.
        }
        let wait = BACKOFF_FIRST.saturating_mul(1 << worker.num_failures.min(8)).min(BACKOFF_LIMIT);
        worker.num_failures += 1;
        worker.spared_until = Some(now + wait);
        tracing::warn!(worker = %key, ?wait, "worker failed a request; no request is sent to it for a while");
    }

    /// Whether the worker has said that it drains, or is not a member any more.
    pub(crate) fn is_leaving(&self, key: &WorkerKey) -> bool {
        self.lock().workers.get(key).is_none_or(|worker| worker.is_leaving)
    }

    /// The worker answered a request.
    pub(crate) fn report_success(&self, key: &WorkerKey) {
        let mut state = self.lock();
        if let Some(worker) = state.workers.get_mut(key) {
            worker.num_failures = 0;
            worker.spared_until = None;
        }
    }

    /// Every worker with its newest report.
    pub(crate) fn list(&self) -> Vec<Listed> {
        let state = self.lock();
        let listed =
            |worker: &Worker| Listed { record: worker.record.clone(), report: worker.report.clone() };
        state.workers.values().map(listed).collect()
    }

    /// Makes the known workers those of the records.
    fn update(self: &Arc<Self>, records: Vec<Arc<WorkerRecord>>) {
        let mut state = self.lock();
        state.note_usable();
        let mut old = std::mem::take(&mut state.workers);
        for record in records {
            let key = WorkerKey::of(&record);
            let worker = match old.remove(&key) {
                Some(mut worker) if worker.record.address == record.address => {
                    worker.record = record;
                    worker
                }
                replaced => {
                    if let Some(worker) = replaced {
                        worker.stop.cancel();
                    }
                    match self.meet(record) {
                        Some(worker) => worker,
                        None => continue,
                    }
                }
            };
            state.workers.insert(key, worker);
        }
        for gone in old.into_values() {
            gone.stop.cancel();
        }
        drop(state);
        self.notify();
    }

    fn meet(self: &Arc<Self>, record: Arc<WorkerRecord>) -> Option<Worker> {
        let channel = match channel::open(&self.dialer, &record.address, self.keep_alive) {
            Ok(channel) => channel,
            Err(error) => {
                tracing::error!(worker = %record.id, address = record.address, %error, "worker is ignored: its address is unusable");
                return None;
            }
        };
        let stop = self.stop.child_token();
        let watcher = watch::Watcher::new(self.clone(), WorkerKey::of(&record), channel.clone());
        self.tasks.spawn(watcher.run(stop.clone()));
        Some(Worker {
            record,
            channel,
            report: None,
            is_leaving: false,
            num_failures: 0,
            spared_until: None,
            num_assigned: Arc::default(),
            stop,
        })
    }

    /// Enters a load report, or that there is none.
    fn enter(&self, key: &WorkerKey, report: Option<Report>) {
        let mut state = self.lock();
        let now = Instant::now();
        state.note_usable();
        let Some(worker) = state.workers.get_mut(key) else { return };
        let before = worker.view(now).usability;
        if worker.report.is_none() && report.is_some() {
            // It was away and is back: what failed before says nothing any more.
            worker.spared_until = None;
        }
        worker.is_leaving |= report.as_ref().is_some_and(|report| report.load.draining);
        worker.report = report;
        let after = worker.view(now).usability;
        drop(state);
        if before != after {
            tracing::debug!(worker = %key, ?before, ?after, "worker's usability changed");
            self.notify();
        }
    }

    fn notify(&self) {
        self.changed.send_modify(|count| *count += 1);
    }

    /// No user code runs under the lock, so a poisoned one holds whole data.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn has_usable(&self, role: Role) -> bool {
        let now = Instant::now();
        let mut workers = self.workers.values().filter(|worker| worker.record.role == role);
        workers.any(|worker| matches!(worker.view(now).usability, Usability::Ready | Usability::BackingOff))
    }

    /// Called before a change that may take the last one away.
    fn note_usable(&mut self) {
        for role in [Role::Prefill, Role::Decode] {
            if self.has_usable(role) {
                self.last_usable.insert(role, Instant::now());
            }
        }
    }
}

impl Worker {
    fn view(&self, now: Instant) -> WorkerView {
        let usability = match &self.report {
            None => Usability::Unreachable,
            Some(report) if report.load.draining => Usability::Draining,
            Some(_) if self.spared_until.is_some_and(|until| now < until) => Usability::BackingOff,
            Some(_) => Usability::Ready,
        };
        let load = self.report.as_ref().map(|report| load(&report.load)).unwrap_or_default();
        let num_assigned = self.num_assigned.load(Ordering::Relaxed);
        WorkerView { record: self.record.clone(), usability, load, num_assigned }
    }
}

fn load(load: &v1::Load) -> Load {
    Load {
        num_waiting: load.num_waiting as usize,
        num_running: load.num_running as usize,
        num_free_blocks: load.num_free_blocks as usize,
        num_total_blocks: load.num_total_blocks as usize,
        num_queued_tokens: load.num_queued_tokens,
        prefill_tokens_per_second: load.prefill_tokens_per_second,
    }
}
