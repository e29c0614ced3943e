//! The workers the router can send to: follows the membership, keeps a channel to each worker, and
//! watches its load reports, which also show that it lives.
//!
//! It does not know policies; it answers with a [`ClusterView`]. Of requests it knows the [hashes](SequenceHashes) of their blocks.
#![forbid(unsafe_code)]

mod channel;
mod hashes;
mod report;
mod segments;
mod watch;

use std::{
    collections::{BTreeMap, HashMap, VecDeque, hash_map::Entry},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use baton_cluster::{Dialer, KvClass, Membership, Role, WorkerRecord};
use baton_kv_cache::BlockHash;
use baton_kv_index::{
    BlockKey, CacheSource, IndexSize, KvIndex, SourceState, StoredBlocks, StoredFront, TokensHeld,
};
use baton_planner::{BackOff, ClusterView, HeldPrefix, Ledger, SentWork, Usability, WorkerKey, WorkerView};
use baton_proto::worker::Ticket;
use baton_request::BlendPoint;
use tokio::sync::watch as notify;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::transport::Channel;

pub use hashes::{BlockKind, PromptHashes, SequenceHashes};
pub use watch::Report;

/// Of the longest sequences that decode workers serve, prompt and output together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contexts {
    /// Some worker's: what may be asked for.
    pub longest: usize,
    /// Every worker's: what is meant where nothing was said, so that all can be asked. Pools of GPUs that are alike
    /// differ by a few blocks.
    pub shortest: usize,
}

impl Contexts {
    /// All alike.
    pub fn of(length: usize) -> Contexts {
        Contexts { longest: length, shortest: length }
    }
}

/// Whether prompts of the model are blended, by what its workers measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ModelBlending {
    /// As workers have calibrated, the most careful one of them; a client may choose another ratio. `None` while none has.
    Open(Option<BlendPoint>),
    /// Audits of a worker found that blended prompts differ too much. The others compute the same model.
    Closed,
}

/// Workers that drained and are remembered, for what still breaks off there.
const MAX_LEFT: usize = 256;

/// Workers in the index at a time; more are planned without a look at their caches.
const MAX_INDEXED: usize = 1 << 15;

/// Every known worker. Shared by all requests.
#[derive(Debug)]
pub struct Workers {
    /// This router's name in tickets. Not 0.
    name: u64,
    /// The model that is served. Workers of others are not asked.
    model: String,
    keep_alive: Duration,
    dialer: Dialer,
    /// Which worker holds which blocks.
    index: Arc<KvIndex>,
    /// The next worker's name there.
    next_owner: AtomicU32,
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
    /// The kinds of their blocks.
    block_kinds: Arc<[BlockKind]>,
    /// Workers of other models.
    of_other_models: Vec<Arc<WorkerRecord>>,
    /// Of each object store that workers share, by its name: what it has.
    stores: HashMap<u64, Arc<StoredBlocks>>,
    /// When a worker of each role was last usable.
    last_usable: BTreeMap<Role, Instant>,
    /// The last workers that said that they drain and are no members any more.
    left: VecDeque<Arc<WorkerKey>>,
    /// Where ledgers begin. A worker that comes back in the same life remembers which numbers it had.
    first_number: u64,
}

#[derive(Debug)]
struct Worker {
    key: Arc<WorkerKey>,
    record: Arc<WorkerRecord>,
    kv_class: KvClass,
    channel: Channel,
    /// The newest report; absent while it does not answer.
    report: Option<Report>,
    /// A report has said that it drains. A process that drains never serves again.
    is_leaving: bool,
    back_off: BackOff,
    /// Attempts that failed by its fault.
    num_failures: u64,
    assigned: Arc<Assigned>,
    cache: Arc<CacheSource>,
    /// A report of it cannot be true, and was logged.
    is_absurd: bool,
    stop: CancellationToken,
}

/// What this router has sent to one life of a worker.
#[derive(Debug)]
struct Assigned {
    num_requests: AtomicUsize,
    /// Locked for a few operations, and nothing is locked meanwhile.
    ledger: Mutex<Ledger>,
}

/// A worker with its newest report, for listings.
#[derive(Clone, Debug)]
pub struct Listed {
    /// What it says of itself.
    pub record: Arc<WorkerRecord>,
    /// Whether it can be sent to.
    pub usability: Usability,
    /// Its newest load report, once there is one.
    pub report: Option<Report>,
    /// How far it is known what it has cached.
    pub source: SourceState,
    /// Attempts that failed by its fault.
    pub num_failures: u64,
}

/// A request is with a worker as long as this lives.
#[derive(Debug)]
pub struct Assignment {
    assigned: Arc<Assigned>,
    number: u64,
}

impl Assigned {
    fn starting_at(first_number: u64) -> Assigned {
        let ledger = Mutex::new(Ledger::starting_at(first_number));
        Assigned { num_requests: AtomicUsize::new(0), ledger }
    }

    /// No user code runs under the lock, so a poisoned one holds whole data.
    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Assignment {
    /// The first token has come: the prompt is no work any more.
    pub fn computed(&self) {
        self.assigned.ledger().computed(self.number);
    }
}

impl Drop for Assignment {
    fn drop(&mut self) {
        self.assigned.num_requests.fetch_sub(1, Ordering::Relaxed);
        self.assigned.ledger().settle(self.number);
    }
}

impl Workers {
    /// No workers yet; [`follow`](Self::follow) fills it with those that serve `model`.
    /// `name` is this router's in tickets: not 0, and new at every start.
    pub fn new(name: u64, model: String, keep_alive: Duration, dialer: Dialer) -> Arc<Workers> {
        let stop = CancellationToken::new();
        Arc::new(Workers {
            name,
            model,
            keep_alive,
            dialer,
            index: Arc::new(KvIndex::new(MAX_INDEXED)),
            next_owner: AtomicU32::new(0),
            state: Mutex::default(),
            changed: notify::Sender::new(0),
            tasks: TaskTracker::new(),
            settled: stop.child_token(),
            stop,
        })
    }

    /// Follows the membership until it is [settled](Self::settle).
    pub fn follow(self: &Arc<Self>, mut members: Membership) {
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
    pub fn settle(&self) {
        self.settled.cancel();
    }

    /// Ends every task and waits for them.
    pub async fn shut_down(&self) {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// What a policy needs to know.
    pub fn view(&self) -> ClusterView {
        let state = self.lock();
        let now = Instant::now();
        let workers = state.workers.values().map(|worker| worker.view(now)).collect();
        ClusterView { workers }
    }

    /// The record of a worker that is known.
    pub fn record(&self, key: &WorkerKey) -> Option<Arc<WorkerRecord>> {
        self.lock().workers.get(key).map(|worker| worker.record.clone())
    }

    /// The kinds of blocks that the known workers have.
    pub fn block_kinds(&self) -> Arc<[BlockKind]> {
        self.lock().block_kinds.clone()
    }

    /// What each worker has cached of the front of a sequence, or is believed to. A worker that is absent has nothing.
    pub fn cached(&self, hashes: &SequenceHashes) -> Vec<HeldPrefix> {
        let found = self.index.tokens_held(hashes.all(), block_key);
        let cached = |worker: &Worker| {
            let TokensHeld { num_tokens, above } = *found.get(&worker.cache.owner())?;
            let above = &above[..worker.cache.num_tiers()];
            Some(HeldPrefix::above_tiers(worker.key.clone(), num_tokens, above))
        };
        let state = self.lock();
        if state.stores.is_empty() {
            if found.is_empty() {
                return Vec::new();
            }
            return state.workers.values().filter_map(cached).collect();
        }
        let stores = state.stores.clone();
        let with_stores = |worker: &Worker| {
            let held = cached(worker).unwrap_or_else(|| HeldPrefix::pooled(worker.key.clone(), 0));
            (held, worker.store(), worker.record.clone())
        };
        let held: Vec<_> = state.workers.values().map(with_stores).collect();
        drop(state);
        // By the store, and by where the chain begins.
        let mut fronts: HashMap<(u64, *const BlockHash), StoredFront<'_, BlockHash>> = HashMap::new();
        let mut add_stored = |(mut held, store, record): (HeldPrefix, Option<u64>, Arc<WorkerRecord>)| {
            if let Some(name) = store
                && let Some(blocks) = stores.get(&name)
            {
                let (chain, block_size) = (hashes.of(&record.kv_format), record.kv_format.block_size.max(1));
                let front = fronts.entry((name, chain.as_ptr())).or_insert_with(|| blocks.front(chain));
                let num_blocks = front.end_after(held.num_tokens / block_size, block_key);
                held.with_store = held.with_store.max(num_blocks * block_size);
            }
            (held.with_store > 0).then_some(held)
        };
        held.into_iter().filter_map(&mut add_stored).collect()
    }

    /// Blocks that the object stores have which workers share, as far as it is known.
    pub fn num_stored_blocks(&self) -> usize {
        self.lock().stores.values().map(|blocks| blocks.num_blocks()).sum()
    }

    /// Tokens of passages whose KV each worker keeps or is believed to. A worker that is absent keeps none.
    pub fn kept_passages(&self, passages: &[(BlockHash, usize)]) -> Vec<(Arc<WorkerKey>, usize)> {
        let mut kept: HashMap<u32, usize> = HashMap::new();
        for (hash, num_tokens) in passages {
            // In the index a passage is a sequence of one block.
            let chain = std::iter::once((*num_tokens, std::slice::from_ref(hash)));
            for (owner, held) in self.index.tokens_held(chain, block_key) {
                *kept.entry(owner).or_default() += held.num_tokens;
            }
        }
        if kept.is_empty() {
            return Vec::new();
        }
        let state = self.lock();
        let tokens = |worker: &Worker| kept.get(&worker.cache.owner()).copied();
        state.workers.values().filter_map(|worker| Some((worker.key.clone(), tokens(worker)?))).collect()
    }

    /// A prompt is about to be sent to the worker, which will have its blocks.
    pub fn expect_cached(&self, key: &WorkerKey, hashes: &[BlockHash]) {
        let cache = self.lock().workers.get(key).map(|worker| worker.cache.clone());
        if let Some(cache) = cache {
            cache.expect(hashes.iter().copied().map(block_key));
        }
    }

    /// A sequence has ended at the worker, which has its blocks.
    pub fn note_cached(&self, key: &WorkerKey, hashes: &[BlockHash]) {
        let cache = self.lock().workers.get(key).map(|worker| worker.cache.clone());
        if let Some(cache) = cache {
            cache.finished(hashes.iter().copied().map(block_key));
        }
    }

    /// What the index of cached blocks holds.
    pub fn index_size(&self) -> IndexSize {
        // Perhaps no event comes for a while.
        self.index.sweep(1 << 16);
        self.index.size()
    }

    /// Follows the changes of who is usable. Subscribe before looking, then wait.
    pub fn changes(&self) -> notify::Receiver<u64> {
        self.changed.subscribe()
    }

    /// When a worker of this role was last usable; now, if one is.
    pub fn last_usable(&self, role: Role) -> Option<Instant> {
        let state = self.lock();
        if state.has_usable(role) { Some(Instant::now()) } else { state.last_usable.get(&role).copied() }
    }

    /// Whether prompts are blended, by the newest reports of the workers that answer: with a point that each worker's audits count.
    pub fn blending(&self) -> ModelBlending {
        let state = self.lock();
        let loads = || state.workers.values().filter_map(|worker| Some(&worker.report.as_ref()?.load));
        if loads().any(|load| load.blend_closed) {
            return ModelBlending::Closed;
        }
        ModelBlending::Open(loads().filter_map(report::blend_point).reduce(BlendPoint::max))
    }

    /// Whether a decode worker is usable.
    pub fn is_ready(&self) -> bool {
        self.lock().has_usable(Role::Decode)
    }

    /// What decode workers serve; `None` while no worker has said it.
    pub fn contexts(&self) -> Option<Contexts> {
        let state = self.lock();
        let decode = state.workers.values().filter(|worker| worker.record.role == Role::Decode);
        let lengths = decode.map(|worker| worker.record.capacity.context_length).filter(|&length| length > 0);
        lengths.fold(None, |contexts, length| {
            let Contexts { longest, shortest } = contexts.unwrap_or(Contexts::of(length));
            Some(Contexts { longest: longest.max(length), shortest: shortest.min(length) })
        })
    }

    /// Counts a request to the worker, which brings it this work, and gives the way to it, and its number for the worker's
    /// reports. `None` when it has gone.
    pub fn assign(&self, key: &WorkerKey, work: SentWork) -> Option<(Channel, Assignment, Ticket)> {
        let state = self.lock();
        let worker = state.workers.get(key)?;
        let assigned = worker.assigned.clone();
        assigned.num_requests.fetch_add(1, Ordering::Relaxed);
        let mut ledger = assigned.ledger();
        let number = ledger.send(work);
        let ticket = Ticket { router: self.name, number, settled_below: ledger.settled_below() };
        drop(ledger);
        Some((worker.channel.clone(), Assignment { assigned, number }, ticket))
    }

    /// Counts a failed attempt of the workers that are at fault.
    pub fn count_failure(&self, at_fault: &[WorkerKey]) {
        let mut state = self.lock();
        for key in at_fault {
            if let Some(worker) = state.workers.get_mut(key) {
                worker.num_failures += 1;
            }
        }
    }

    /// The worker broke off or could not be reached: no request is sent to it for a while.
    pub fn report_failure(&self, key: &WorkerKey) {
        let mut state = self.lock();
        let now = Instant::now();
        let Some(worker) = state.workers.get_mut(key) else { return };
        if let Some(wait) = worker.back_off.fail(now) {
            tracing::warn!(worker = %key, ?wait, "worker failed a request; no request is sent to it for a while");
        }
    }

    /// Whether the worker has said that it drains. One that is no member any more may have crashed.
    pub fn is_leaving(&self, key: &WorkerKey) -> bool {
        let state = self.lock();
        let has_left = || state.left.iter().any(|left| **left == *key);
        state.workers.get(key).map_or_else(has_left, |worker| worker.is_leaving)
    }

    /// The worker answered a request.
    pub fn report_success(&self, key: &WorkerKey) {
        let mut state = self.lock();
        if let Some(worker) = state.workers.get_mut(key) {
            worker.back_off.succeed();
        }
    }

    /// Every worker with its newest report.
    pub fn list(&self) -> Vec<Listed> {
        let state = self.lock();
        let now = Instant::now();
        let listed = |worker: &Worker| Listed {
            record: worker.record.clone(),
            usability: worker.usability(now),
            report: worker.report.clone(),
            source: worker.cache.state(),
            num_failures: worker.num_failures,
        };
        state.workers.values().map(listed).collect()
    }

    /// A worker of another model, if there is one.
    pub fn of_another_model(&self) -> Option<Arc<WorkerRecord>> {
        self.lock().of_other_models.first().cloned()
    }

    /// Makes the known workers those of the records that serve this model.
    fn update(self: &Arc<Self>, records: Vec<Arc<WorkerRecord>>) {
        let (records, of_other_models): (Vec<_>, Vec<_>) =
            records.into_iter().partition(|record| record.model == self.model);
        let mut state = self.lock();
        for WorkerRecord { id, model, .. } in
            of_other_models.iter().filter(|new| !state.of_other_models.contains(new)).map(|new| &**new)
        {
            tracing::warn!(
                worker = %id, model, served = self.model,
                "a worker serves another model and gets no requests: give workers and router one --model-name, and each \
                 model its own discovery (--etcd-prefix)"
            );
        }
        state.of_other_models = of_other_models;
        state.note_usable();
        let mut old = std::mem::take(&mut state.workers);
        for record in records {
            let key = WorkerKey::of(&record);
            let worker = match old.remove(&key) {
                Some(mut worker) if worker.record.address == record.address => {
                    (worker.kv_class, worker.record) = (record.kv_format.class(), record);
                    worker
                }
                replaced => {
                    replaced.into_iter().for_each(|worker| state.part(worker));
                    match self.meet(record, state.first_number) {
                        Some(worker) => worker,
                        None => continue,
                    }
                }
            };
            state.workers.insert(key, worker);
        }
        old.into_values().for_each(|gone| state.part(gone));
        let kinds = hashes::block_kinds(state.workers.values().map(|worker| &worker.record.kv_format));
        state.block_kinds = kinds.into();
        drop(state);
        self.notify();
    }

    fn meet(self: &Arc<Self>, record: Arc<WorkerRecord>, first_number: u64) -> Option<Worker> {
        let channel = match channel::open(&self.dialer, &record.address, self.keep_alive) {
            Ok(channel) => channel,
            Err(error) => {
                tracing::error!(worker = %record.id, address = record.address, %error, "worker is ignored: its address is unusable");
                return None;
            }
        };
        let stop = self.stop.child_token();
        let owner = self.next_owner.fetch_add(1, Ordering::Relaxed);
        let cache = Arc::new(CacheSource::new(&self.index, owner, record.capacity.num_blocks));
        let watcher = {
            let (workers, key) = (self.clone(), WorkerKey::of(&record));
            let take = move |report| workers.enter(&key, report);
            watch::Watcher::new(WorkerKey::of(&record), self.name, channel.clone(), cache.clone(), take)
        };
        self.tasks.spawn(watcher.run(stop.clone()));
        Some(Worker {
            key: Arc::new(WorkerKey::of(&record)),
            kv_class: record.kv_format.class(),
            record,
            channel,
            report: None,
            is_leaving: false,
            back_off: BackOff::default(),
            num_failures: 0,
            assigned: Arc::new(Assigned::starting_at(first_number)),
            cache,
            is_absurd: false,
            stop,
        })
    }

    /// Enters a load report, or that there is none.
    fn enter(self: &Arc<Self>, key: &WorkerKey, report: Option<Report>) {
        let mut state = self.lock();
        let now = Instant::now();
        let Some(worker) = state.workers.get_mut(key) else { return };
        let before = worker.usability(now);
        if worker.report.is_none() && report.is_some() {
            worker.back_off.come_back();
        }
        if let Some(report) = &report {
            let mut ledger = worker.assigned.ledger();
            match &report.load.covered {
                Some(covered) => ledger.cover(covered.below, &covered.numbers),
                None => ledger.cover_silently(),
            }
        }
        if let Some(what) = report.as_ref().and_then(|report| report::absurdity(&report.load))
            && !std::mem::replace(&mut worker.is_absurd, true)
        {
            tracing::warn!(worker = %key, what, "the worker's load reports have numbers that cannot be: they are ignored, and not logged again");
        }
        let closes = |report: Option<&Report>| report.is_some_and(|report| report.load.blend_closed);
        if closes(report.as_ref()) && !closes(worker.report.as_ref()) {
            tracing::warn!(
                worker = %key,
                "audits of this worker found that blended prompts differ too much: no worker blends until it is started again"
            );
        }
        worker.is_leaving |= report.as_ref().is_some_and(|report| report.load.draining);
        worker.report = report;
        let (after, store, role) = (worker.usability(now), worker.store(), worker.record.role);
        if is_usable(before) && !is_usable(after) {
            state.last_usable.insert(role, now);
        }
        if let Some(name) = store
            && let Entry::Vacant(unknown) = state.stores.entry(name)
        {
            unknown.insert(Arc::default());
            self.tasks.spawn(self.clone().watch_store(name));
        }
        drop(state);
        if before != after {
            tracing::debug!(worker = %key, ?before, ?after, "worker's usability changed");
            self.notify();
        }
    }

    /// Follows what an object store has while workers report it.
    async fn watch_store(self: Arc<Self>, name: u64) {
        let teller = |last: Option<&WorkerKey>| {
            let mut state = self.lock();
            let after = state.workers.iter().filter(|(key, _)| last.is_none_or(|last| *key > last));
            let mut in_turn = after.chain(&state.workers).filter(|(_, worker)| worker.store() == Some(name));
            let found = in_turn.next().map(|(key, worker)| (key.clone(), worker.channel.clone()));
            if found.is_none() {
                state.stores.remove(&name);
            }
            found
        };
        let take = |blocks| {
            if let Some(known) = self.lock().stores.get_mut(&name) {
                *known = blocks;
            }
        };
        self.stop.run_until_cancelled(segments::watch(teller, take)).await;
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
        workers.any(|worker| is_usable(worker.usability(now)))
    }

    /// A worker is no member any more.
    fn part(&mut self, worker: Worker) {
        worker.stop.cancel();
        self.first_number = self.first_number.max(worker.assigned.ledger().next_number());
        if worker.is_leaving {
            if self.left.len() == MAX_LEFT {
                self.left.pop_front();
            }
            self.left.push_back(worker.key);
        }
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
    /// The name of its object store, if it has one and answers.
    fn store(&self) -> Option<u64> {
        segments::object_tier(&self.report.as_ref()?.load).map(|tier| tier.store_name)
    }

    fn usability(&self, now: Instant) -> Usability {
        match &self.report {
            None => Usability::Unreachable,
            Some(report) if report.load.draining => Usability::Draining,
            Some(_) if self.back_off.lasts(now) => Usability::BackingOff,
            Some(_) => Usability::Ready,
        }
    }

    fn view(&self, now: Instant) -> WorkerView {
        let usability = self.usability(now);
        let load = self.report.as_ref().map(|report| report::load(report, now)).unwrap_or_default();
        let num_assigned = self.assigned.num_requests.load(Ordering::Relaxed);
        let sent = self.assigned.ledger().sent();
        WorkerView {
            record: self.record.clone(),
            kv_class: self.kv_class,
            usability,
            load,
            num_assigned,
            sent,
        }
    }
}

/// Whether requests are sent to such a worker, now or after a pause.
fn is_usable(usability: Usability) -> bool {
    matches!(usability, Usability::Ready | Usability::BackingOff)
}

/// The name of a block in the index.
fn block_key(hash: BlockHash) -> BlockKey {
    BlockKey(hash.short())
}

#[cfg(test)]
mod tests {
    use baton_cluster::Capacity;
    use baton_kv_cache::{KvDtype, KvFormat, KvLayout};
    use baton_proto::v1;

    use super::*;

    fn record() -> Arc<WorkerRecord> {
        let layout =
            KvLayout { block_size: 16, num_layers: 2, num_kv_heads: 2, head_dim: 8, dtype: KvDtype::F32 };
        Arc::new(WorkerRecord {
            id: "d0".into(),
            incarnation: 1,
            role: Role::Decode,
            address: "http://127.0.0.1:9".into(),
            model: "tiny".into(),
            kv_format: KvFormat::new("r1".into(), &layout, "theta=10000".into()),
            capacity: Capacity { num_blocks: 8, block_size: 16, max_running: 4, context_length: 128 },
            compute: None,
        })
    }

    fn report(below: Option<u64>, draining: bool) -> Report {
        let covered = below.map(|below| v1::Covered { below, numbers: vec![] });
        Report { load: v1::Load { covered, draining, ..v1::Load::default() }, at: Instant::now() }
    }

    #[tokio::test]
    async fn a_worker_that_comes_back_covers_nothing_that_it_has_not_seen() {
        let workers = Workers::new(1, "tiny".to_owned(), Duration::from_secs(1), Dialer::new(None));
        let (record, work) = (record(), SentWork { num_requests: 1, ..SentWork::default() });
        let key = WorkerKey::of(&record);
        let not_covered = || workers.lock().workers[&key].assigned.ledger().sent().num_requests;
        workers.update(vec![record.clone()]);
        let before: Vec<_> = (0..10).map(|_| workers.assign(&key, work).expect("it is there")).collect();
        workers.enter(&key, Some(report(Some(10), false)));
        assert_eq!(not_covered(), 0);
        workers.update(vec![]);
        workers.update(vec![record]);
        let after = workers.assign(&key, work).expect("it is there");
        workers.enter(&key, Some(report(Some(10), false)));
        assert_eq!(not_covered(), 1, "it has not come yet");
        workers.enter(&key, Some(report(Some(11), false)));
        assert_eq!(not_covered(), 0);
        drop((before, after));
        workers.shut_down().await;
    }

    #[tokio::test]
    async fn audits_of_one_worker_close_blending_for_all_while_it_is_there() {
        let workers = Workers::new(1, "tiny".to_owned(), Duration::from_secs(1), Dialer::new(None));
        let (d0, d1) = (record(), Arc::new(WorkerRecord { id: "d1".into(), ..(*record()).clone() }));
        workers.update(vec![d0.clone(), d1.clone()]);
        let says_layer = |record: &WorkerRecord, blend_layer, blend_ratio, blend_closed| {
            let load = v1::Load { blend_ratio, blend_layer, blend_closed, ..v1::Load::default() };
            workers.enter(&WorkerKey::of(record), Some(Report { load, at: Instant::now() }));
            workers.blending()
        };
        let says = |record: &WorkerRecord, ratio, is_closed| says_layer(record, 0, ratio, is_closed);
        let open = |layer, ratio| ModelBlending::Open(Some(BlendPoint { layer, ratio }));
        assert_eq!(says(&d0, None, false), ModelBlending::Open(None));
        assert_eq!(says(&d0, Some(0.2), false), open(1, 0.2));
        assert_eq!(says(&d1, Some(0.3), false), open(1, 0.3));
        assert_eq!(says_layer(&d1, 2, Some(0.1), false), open(2, 0.2), "at least what each needs");
        assert_eq!(says_layer(&d1, 9, Some(0.3), false), open(1, 0.2), "no layer that may decide");
        assert_eq!(says(&d1, Some(f32::NAN), false), open(1, 0.2));
        assert_eq!(says(&d1, None, false), open(1, 0.2), "it could not calibrate");
        assert_eq!(says(&d1, None, true), ModelBlending::Closed);
        assert_eq!(says(&d0, Some(0.2), false), ModelBlending::Closed);
        workers.update(vec![d0]);
        assert_eq!(workers.blending(), open(1, 0.2));
        workers.shut_down().await;
    }

    #[tokio::test]
    async fn a_role_was_usable_until_its_last_worker_stopped_answering() {
        let workers = Workers::new(1, "tiny".to_owned(), Duration::from_secs(1), Dialer::new(None));
        let (d0, d1) = (record(), Arc::new(WorkerRecord { id: "d1".into(), ..(*record()).clone() }));
        workers.update(vec![d0.clone(), d1.clone()]);
        let enter = |record: &WorkerRecord, report| workers.enter(&WorkerKey::of(record), report);
        let last_usable = || workers.last_usable(Role::Decode);
        assert_eq!(last_usable(), None, "none has answered");
        enter(&d0, Some(report(None, false)));
        enter(&d1, Some(report(None, false)));
        enter(&d0, None);
        let before = Instant::now();
        assert!(last_usable() >= Some(before), "the other one answers");
        enter(&d1, Some(report(None, true)));
        let (last, after) = (last_usable(), Instant::now());
        assert!((Some(before)..=Some(after)).contains(&last));
        enter(&d1, Some(report(None, true)));
        enter(&d0, None);
        assert_eq!(last_usable(), last);
        assert_eq!(workers.last_usable(Role::Prefill), None);
        workers.shut_down().await;
    }

    #[tokio::test]
    async fn the_kinds_of_blocks_are_those_of_the_members() {
        let workers = Workers::new(1, "tiny".to_owned(), Duration::from_secs(1), Dialer::new(None));
        let old = record();
        let mut new = WorkerRecord { id: "d1".into(), ..(*old).clone() };
        new.kv_format.model_revision = "r2".into();
        let twin = WorkerRecord { id: "d2".into(), ..(*old).clone() };
        let new = Arc::new(new);
        let kinds = |records: Vec<Arc<WorkerRecord>>| {
            workers.update(records);
            workers.block_kinds().to_vec()
        };
        let (of_old, of_new) = (BlockKind::of(&old.kv_format), BlockKind::of(&new.kv_format));
        assert_eq!(kinds(vec![old.clone(), new.clone(), twin.into()]), [of_old, of_new.clone()]);
        assert_eq!(workers.record(&WorkerKey::of(&old)), Some(old));
        assert_eq!(kinds(vec![new]), [of_new]);
        assert_eq!(kinds(vec![]), []);
        workers.shut_down().await;
    }

    #[tokio::test]
    async fn workers_of_other_models_are_not_asked() {
        let workers = Workers::new(1, "tiny".to_owned(), Duration::from_secs(1), Dialer::new(None));
        let ours = record();
        let other = Arc::new(WorkerRecord { id: "d1".into(), model: "other".into(), ..(*ours).clone() });
        workers.update(vec![ours.clone(), other.clone()]);
        let listed: Vec<_> = workers.list().into_iter().map(|listed| listed.record).collect();
        assert_eq!(listed, [ours]);
        assert_eq!(workers.of_another_model(), Some(other));
        workers.update(vec![]);
        assert_eq!(workers.of_another_model(), None);
        workers.shut_down().await;
    }

    #[tokio::test]
    async fn a_worker_that_is_gone_without_a_word_has_not_drained() {
        for drains in [false, true] {
            let workers = Workers::new(1, "tiny".to_owned(), Duration::from_secs(1), Dialer::new(None));
            let record = record();
            let key = WorkerKey::of(&record);
            workers.update(vec![record]);
            workers.enter(&key, Some(report(None, drains)));
            workers.update(vec![]);
            assert_eq!(workers.is_leaving(&key), drains);
            workers.shut_down().await;
        }
    }
}
