//! One router: the real policy, ledgers, prefix index and back-off, around what reports say. It does not know workers beyond
//! their records and reports.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use baton_cluster_record::{Role, WorkerId, WorkerRecord};
use baton_kv_cache::BlockHash;
use baton_kv_index::{BlockKey, CacheFeed, EventBatch, KvIndex, MAX_TIERS, TokensHeld};
use baton_planner::{
    BackOff, Balance, ClusterView, HeldPrefix, Ledger, Load, NoPlan, Plan, PlanByTime, PlanRequest, Policy,
    Prefill, PrefixAware, SentWork, Usability, WorkerKey, WorkerView, expected_output,
};

use crate::{
    cluster::{ClusterSpec, PolicyName},
    policies::BaselinePolicy,
};

/// One router.
#[derive(Debug)]
pub(crate) struct Router {
    policy: Box<dyn Policy>,
    view: ClusterView,
    workers: Vec<KnownWorker>,
    places: HashMap<WorkerId, usize>,
    index: Arc<KvIndex>,
    seed: u64,
    num_expected: f64,
    /// Workers whose back-off may last.
    backing_off: Vec<usize>,
    last_usable: [Option<Instant>; 2],
    balance: Balance,
}

#[derive(Debug)]
struct KnownWorker {
    key: Arc<WorkerKey>,
    /// Its name in the index: its place.
    owner: u32,
    ledger: Ledger,
    back_off: BackOff,
    /// What it has cached.
    feed: CacheFeed,
    /// As its reports say them.
    tier_blocks: [usize; MAX_TIERS],
    /// The newest report, unless the worker has failed since.
    reported_at: Option<Instant>,
}

impl KnownWorker {
    fn new(
        index: &Arc<KvIndex>,
        idx: usize,
        record: &WorkerRecord,
        tier_blocks: [usize; MAX_TIERS],
    ) -> KnownWorker {
        let mut feed = CacheFeed::new(index.clone(), idx as u32, record.capacity.num_blocks);
        feed.set_tier_blocks(tier_blocks);
        KnownWorker {
            key: Arc::new(WorkerKey::of(record)),
            owner: idx as u32,
            ledger: Ledger::default(),
            back_off: BackOff::default(),
            feed,
            tier_blocks,
            reported_at: None,
        }
    }
}

fn block_key(hash: BlockHash) -> BlockKey {
    BlockKey(hash.short())
}

impl Router {
    pub(crate) fn new(spec: &ClusterSpec, records: &[Arc<WorkerRecord>], router_idx: usize) -> Router {
        let policy: Box<dyn Policy> = match spec.policy {
            PolicyName::Baton => Box::new(PlanByTime::default()),
            PolicyName::Constants => Box::new(PrefixAware::default()),
            PolicyName::Baseline(baseline) => Box::new(BaselinePolicy::new(baseline)),
        };
        let view = |record: &Arc<WorkerRecord>| WorkerView {
            record: record.clone(),
            kv_class: record.kv_format.class(),
            usability: Usability::Unreachable,
            load: Load::default(),
            num_assigned: 0,
            sent: SentWork::default(),
        };
        // A worker has what it says, for each level, and what is believed of it; one that left is swept.
        let num_levels = 1 + spec.workers.iter().map(|worker| worker.tiers.len()).max().unwrap_or(0);
        let index = Arc::new(KvIndex::new(2 * (num_levels + 1) * records.len()));
        Router {
            policy,
            view: ClusterView { workers: records.iter().map(view).collect() },
            workers: records
                .iter()
                .enumerate()
                .map(|(idx, record)| KnownWorker::new(&index, idx, record, spec.workers[idx].tier_blocks()))
                .collect(),
            places: records.iter().enumerate().map(|(idx, record)| (record.id.clone(), idx)).collect(),
            index,
            // Far apart: seeds count plans.
            seed: spec.seed.wrapping_add((router_idx as u64) << 40),
            num_expected: 0.0,
            backing_off: Vec::new(),
            last_usable: [None; 2],
            balance: Balance::default(),
        }
    }

    /// The migration that is due: from which worker and to which. `num_running` counts this router's requests at each.
    pub(crate) fn balance(
        &mut self,
        num_running: &BTreeMap<WorkerKey, usize>,
        now: Instant,
    ) -> Option<(usize, usize)> {
        let migration = self.balance.next(&self.view, num_running, now)?;
        Some((self.place(&migration.from.id), self.place(&migration.to.id)))
    }

    /// The place of a worker.
    pub(crate) fn place(&self, id: &WorkerId) -> usize {
        self.places[id]
    }

    /// A worker was replaced by another life of it.
    pub(crate) fn replace(&mut self, idx: usize, record: &Arc<WorkerRecord>) {
        self.view.workers[idx].record = record.clone();
        let tier_blocks = self.workers[idx].tier_blocks;
        let KnownWorker { key, feed, .. } = KnownWorker::new(&self.index, idx, record, tier_blocks);
        let worker = &mut self.workers[idx];
        (worker.key, worker.feed) = (key, feed);
        worker.back_off.come_back();
    }

    /// A worker does not answer.
    pub(crate) fn lose(&mut self, idx: usize, now: Instant) {
        self.note_usable(now);
        self.workers[idx].reported_at = None;
        self.view.workers[idx].load = Load::default();
        self.update(idx, now);
    }

    /// A load report, and what the worker has cached since the last one. `covered` are the numbers of this router's requests that
    /// it counts.
    pub(crate) fn enter(
        &mut self,
        idx: usize,
        load: &Load,
        cached: &[EventBatch],
        covered: &[u64],
        now: Instant,
    ) {
        let worker = &mut self.workers[idx];
        for batch in cached {
            // A worker that joins late has events from its start on.
            worker.feed.take(batch).expect("no event is missed, and the index has room");
        }
        worker.feed.on_report();
        if !covered.is_empty() {
            worker.ledger.cover(0, covered);
            self.view.workers[idx].sent = worker.ledger.sent();
        }
        self.view.workers[idx].load = *load;
        if worker.reported_at.replace(now).is_none() {
            worker.back_off.come_back();
            self.update(idx, now);
        }
    }

    /// Plans, and remembers where the prefix is going to be.
    pub(crate) fn plan(
        &mut self,
        mut request: PlanRequest,
        hashes: &[BlockHash],
        block_size: usize,
        now: Instant,
    ) -> Result<Plan, NoPlan> {
        for idx in std::mem::take(&mut self.backing_off) {
            self.update(idx, now);
        }
        for (worker, view) in self.workers.iter().zip(&mut self.view.workers) {
            view.load.age = worker.reported_at.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        }
        let held = self.index.tokens_held(std::iter::once((block_size, hashes)), block_key);
        let cached = |worker: &KnownWorker| {
            let TokensHeld { num_tokens, above } = held.get(&worker.owner)?;
            Some(HeldPrefix::above_tiers(worker.key.clone(), *num_tokens, &above[..worker.feed.num_tiers()]))
        };
        request.cached = self.workers.iter().filter_map(cached).collect();
        request.num_expected_tokens = self.num_expected as usize;
        self.seed = self.seed.wrapping_add(1);
        request.seed = self.seed;
        let plan = self.policy.plan(&request, &self.view)?;
        self.expect_cached(&plan.decode.id, hashes);
        if let Prefill::Remote(worker) = &plan.prefill {
            self.expect_cached(&worker.id, hashes);
        }
        Ok(plan)
    }

    /// A prompt is about to be sent there.
    fn expect_cached(&mut self, id: &WorkerId, hashes: &[BlockHash]) {
        let idx = self.place(id);
        // Without room in the index it is not noted.
        let _ = self.workers[idx].feed.expect(hashes.iter().copied().map(block_key));
    }

    /// A request is sent. Returns its number, for the worker's echo.
    pub(crate) fn send(&mut self, idx: usize, work: SentWork) -> u64 {
        let number = self.workers[idx].ledger.send(work);
        let view = &mut self.view.workers[idx];
        view.num_assigned += 1;
        view.sent = self.workers[idx].ledger.sent();
        number
    }

    /// Its first token has come.
    pub(crate) fn computed(&mut self, idx: usize, number: u64) {
        self.workers[idx].ledger.computed(number);
        self.view.workers[idx].sent = self.workers[idx].ledger.sent();
    }

    /// It is not with the worker any more.
    pub(crate) fn settle(&mut self, idx: usize, number: u64) {
        self.workers[idx].ledger.settle(number);
        let view = &mut self.view.workers[idx];
        view.num_assigned = view.num_assigned.saturating_sub(1);
        view.sent = self.workers[idx].ledger.sent();
    }

    /// A request has finished at a decode worker with so many tokens. `hashes` are those of its whole sequence, which the worker
    /// has cached: the next turn begins with it.
    pub(crate) fn note_finished(&mut self, decode: usize, hashes: &[BlockHash], num_output_tokens: u32) {
        // Without room in the index it is not noted.
        let _ = self.workers[decode].feed.finished(hashes.iter().copied().map(block_key));
        self.num_expected = expected_output(self.num_expected, f64::from(num_output_tokens));
    }

    pub(crate) fn report_failure(&mut self, key: &WorkerKey, now: Instant) {
        let idx = self.place(&key.id);
        if self.view.workers[idx].record.incarnation == key.incarnation {
            self.note_usable(now);
            self.workers[idx].back_off.fail(now);
            self.update(idx, now);
        }
    }

    pub(crate) fn report_success(&mut self, idx: usize) {
        self.workers[idx].back_off.succeed();
    }

    /// When a worker of this role was last usable; now, if one is.
    pub(crate) fn last_usable(&mut self, role: Role, now: Instant) -> Option<Instant> {
        self.note_usable(now);
        self.last_usable[role as usize]
    }

    fn note_usable(&mut self, now: Instant) {
        for role in [Role::Prefill, Role::Decode] {
            let mut workers = self.view.workers.iter().filter(|worker| worker.record.role == role);
            if workers.any(|worker| matches!(worker.usability, Usability::Ready | Usability::BackingOff)) {
                self.last_usable[role as usize] = Some(now);
            }
        }
    }

    fn update(&mut self, idx: usize, now: Instant) {
        let worker = &self.workers[idx];
        let usability = match (worker.reported_at.is_some(), worker.back_off.lasts(now)) {
            (false, _) => Usability::Unreachable,
            (true, true) => Usability::BackingOff,
            (true, false) => Usability::Ready,
        };
        self.view.workers[idx].usability = usability;
        if usability == Usability::BackingOff {
            self.backing_off.push(idx);
        }
    }
}

#[cfg(test)]
mod tests {
    use baton_kv_cache::HashRoot;
    use baton_kv_index::{BatchKind, CacheEvent};

    use super::*;
    use crate::{
        test_clusters::{cluster, workers},
        worker::Worker,
    };

    #[test]
    fn a_finished_sequence_is_believed_whole_until_two_reports_say_nothing_of_it() {
        let (spec, now) = (cluster(workers(1, 0)), Instant::now());
        let worker = Worker::new(&spec.workers[0], 0, 1, 0.0);
        let mut router = Router::new(&spec, std::slice::from_ref(&worker.record), 0);
        let mut first = 0;
        let mut report = |router: &mut Router| {
            let nothing = EventBatch { first, events: Vec::new(), kind: BatchKind::Events };
            // The first report brings an event, so that the worker is one that says what it holds.
            let removed = CacheEvent::removed(vec![BlockKey(1)]);
            let batch = if first == 0 { EventBatch { events: vec![removed], ..nothing } } else { nothing };
            first = 1;
            router.enter(0, &Load::default(), &[batch], &[], now);
        };
        report(&mut router);
        let root = HashRoot::new("r", "", "");
        let tokens: Vec<u32> = (0..160).collect();
        let hashes: Vec<BlockHash> = root.block_hashes(&tokens, 16).collect();
        let held = |router: &Router| {
            let held = router.index.tokens_held(std::iter::once((16, &hashes[..])), block_key);
            held.get(&0).map(|held| held.num_tokens)
        };
        let asked = PlanRequest { num_tokens: 100, max_tokens: 200, ..PlanRequest::default() };
        router.plan(asked, &hashes[..6], 16, now).expect("there is a worker");
        assert_eq!(held(&router), Some(96));
        router.note_finished(0, &hashes, 60);
        assert_eq!(held(&router), Some(160));
        for _ in 0..3 {
            report(&mut router);
        }
        assert_eq!(held(&router), None, "what no event has confirmed is not believed any more");
    }
}
