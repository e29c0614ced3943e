//! The tiers below a worker's pool.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::Context;
use baton_kv_cache::{BlockHash, KvFormat};
use baton_kv_events::BlockHolder;
use baton_kv_store::{
    KvKey, KvStore, MAX_SAVES, Record, SegmentChanges, SegmentReader, StoreConfig, TierCounts,
};
use tokio::{
    sync::{Mutex, OwnedSemaphorePermit, Semaphore},
    task::spawn_blocking,
};
use tokio_util::task::TaskTracker;

use crate::limits::FetchLimits;

/// Recalls that read at once. Each has at most a batch of KV between a tier and the pool, so this bounds memory, and
/// the threads that a disk that hangs can keep.
const MAX_RECALLS: usize = 4;
/// Rests of sequences that wait for room in a tier at most, each with its tokens. More are not saved.
const MAX_RESTS: usize = 256;

/// What the tiers of a worker are.
#[derive(Clone, Debug, Default)]
pub struct TiersConfig {
    /// The stores, without the key.
    pub stores: StoreConfig,
    /// The file with the key that seals what leaves this process.
    pub key_file: Option<PathBuf>,
}

/// A permit to read.
pub(crate) type Permit = Arc<OwnedSemaphorePermit>;

/// The tiers of a worker.
#[derive(Debug)]
pub struct Tiers {
    pub(crate) store: KvStore,
    pub(crate) limits: FetchLimits,
    /// The worker waits for them before it ends.
    pub(crate) tasks: TaskTracker,
    /// Permits of recalls that read.
    pub(crate) reading: Arc<Semaphore>,
    /// Permits of sequences that are copied.
    pub(crate) copying: Semaphore,
    /// By tier: whose turn it is to save what it had no room for.
    pub(crate) turns: Vec<Mutex<()>>,
    /// Permits of what waits for its turn.
    pub(crate) waiting: Arc<Semaphore>,
    /// Tokens of preempted sequences that came back.
    pub(crate) num_resumed_tokens: AtomicU64,
}

impl Tiers {
    /// Opens the tiers of a configuration; `None` if it names none.
    ///
    /// # Errors
    /// When one of them cannot be used, or the key.
    pub fn open(
        config: TiersConfig,
        format: &KvFormat,
        limits: FetchLimits,
        tasks: TaskTracker,
    ) -> anyhow::Result<Option<Tiers>> {
        let TiersConfig { mut stores, key_file } = config;
        if stores.host.is_none() && stores.disk.is_none() && stores.object.is_none() {
            return Ok(None);
        }
        let key = key_file.as_deref().map(|path| {
            KvKey::read(path).with_context(|| format!("cannot use --kv-key-file {}", path.display()))
        });
        stores.key = key.transpose()?;
        let started = Instant::now();
        let log = limits.engine.cache_log().clone();
        let tell = move |tier, events| log.append(BlockHolder::Tier(tier), events);
        let store = KvStore::open(&stores, format, limits.engine.storage().clone(), tell);
        let store = store.context("cannot open the tiers of KV below the pool")?;
        for TierCounts { name, num_slots, num_held, record_bytes, .. } in store.counts() {
            let elapsed = started.elapsed();
            tracing::info!(tier = name, num_slots, num_held, record_bytes, ?elapsed, "tier of KV opened");
        }
        Ok(Some(Tiers::over(store, limits, tasks)))
    }

    /// Over a store, which tells the cache log of the engine what it holds.
    pub fn over(store: KvStore, limits: FetchLimits, tasks: TaskTracker) -> Tiers {
        Tiers {
            turns: (0..store.num_targets()).map(|_| Mutex::new(())).collect(),
            store,
            limits,
            tasks,
            reading: Arc::new(Semaphore::new(MAX_RECALLS)),
            copying: Semaphore::new(MAX_SAVES),
            waiting: Arc::new(Semaphore::new(MAX_RESTS)),
            num_resumed_tokens: AtomicU64::new(0),
        }
    }

    /// What runs for requests that may be over.
    pub fn tasks(&self) -> &TaskTracker {
        &self.tasks
    }

    /// What each tier holds and has done.
    pub fn counts(&self) -> Vec<TierCounts> {
        self.store.counts()
    }

    /// What a reader lacks of what is known of the object store; see [`KvStore::segment_changes`].
    pub fn segment_changes(&self, reader: &mut SegmentReader) -> Option<SegmentChanges> {
        self.store.segment_changes(reader)
    }

    /// Whether one of them is an object store.
    pub fn has_object_store(&self) -> bool {
        self.store.has_object_store()
    }

    /// Tokens of preempted sequences whose KV came back.
    pub fn num_resumed_tokens(&self) -> u64 {
        self.num_resumed_tokens.load(Ordering::Relaxed)
    }

    pub(crate) fn block_size(&self) -> usize {
        self.limits.engine.storage().layout().block_size
    }

    /// The permit to read, when it is there. It is kept by what still reads or writes, also if that is not waited for any more.
    pub(crate) async fn permit(&self) -> anyhow::Result<Permit> {
        Ok(Arc::new(self.reading.clone().acquire_owned().await?))
    }

    /// Reads [a batch](KvStore::batch) of records as [`KvStore::read`], and says how long that took.
    pub(crate) async fn read(
        self: &Arc<Self>,
        hashes: &[BlockHash],
        until: Instant,
        permit: &Permit,
    ) -> anyhow::Result<(Vec<Arc<Record>>, Duration)> {
        let wanted = self.store.batch(hashes).to_vec();
        let (tiers, permit) = (self.clone(), permit.clone());
        let read = move || {
            let _permit = permit;
            let started = Instant::now();
            (tiers.store.read(&wanted, until), started.elapsed())
        };
        Ok(spawn_blocking(read).await?)
    }
}
