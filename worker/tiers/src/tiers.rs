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
    time::timeout,
};
use tokio_util::task::TaskTracker;

use crate::limits::FetchLimits;

/// Recalls that read memory at once, and as many that read devices. Each has at most a batch of KV between a tier and the pool, so this
/// bounds memory, and the threads that a disk that hangs can keep.
const MAX_RECALLS: usize = 4;
/// This part of its time a recall waits for others that read: the rest must do for its own reads.
const WAITING_PART: u32 = 4;
/// Rests of sequences that wait for room in a tier at most, each with its tokens and hashes. More are not saved.
const MAX_RESTS: usize = 256;

/// What the tiers of a worker are.
#[derive(Clone, Debug, Default)]
pub struct TiersConfig {
    /// The stores, without the key.
    pub stores: StoreConfig,
    /// The file with the key that seals what leaves this process.
    pub key_file: Option<PathBuf>,
}

/// Permits of recalls that read. Those of devices are apart: one that hangs keeps its readers.
#[derive(Debug)]
pub(crate) struct ReadPermits {
    pub(crate) memory: Arc<Semaphore>,
    /// Of what reads memory and devices.
    pub(crate) devices: Arc<Semaphore>,
}

/// A permit to read.
#[derive(Debug)]
pub(crate) struct ReadPermit {
    is_for_devices: bool,
    _permit: OwnedSemaphorePermit,
}

/// What still reads or writes keeps it, also if that is not waited for any more.
pub(crate) type Permit = Arc<ReadPermit>;

/// The tiers of a worker.
#[derive(Debug)]
pub struct Tiers {
    pub(crate) store: KvStore,
    pub(crate) limits: FetchLimits,
    /// The worker waits for them before it ends.
    pub(crate) tasks: TaskTracker,
    pub(crate) reading: ReadPermits,
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
    /// Opens the tiers of a configuration; `None` if it names none, or one alone that is [left out](KvStore::open).
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
        Ok((store.num_targets() > 0).then(|| Tiers::over(store, limits, tasks)))
    }

    /// Over a store, which tells the cache log of the engine what it holds.
    pub fn over(store: KvStore, limits: FetchLimits, tasks: TaskTracker) -> Tiers {
        Tiers {
            turns: (0..store.num_targets()).map(|_| Mutex::new(())).collect(),
            store,
            limits,
            tasks,
            reading: ReadPermits {
                memory: Arc::new(Semaphore::new(MAX_RECALLS)),
                devices: Arc::new(Semaphore::new(MAX_RECALLS)),
            },
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

    /// A permit to read blocks that follow each other, when it is there; only those at their front that are in memory, if too many recalls
    /// read devices. `None`: these or others read for a good part of `limit`, the time of the whole recall.
    pub(crate) async fn permit(&self, hashes: &[BlockHash], limit: Duration) -> Option<Permit> {
        let ReadPermits { memory, devices } = &self.reading;
        let num_in_memory = self.store.num_in_memory(hashes);
        let is_for_devices = num_in_memory < hashes.len();
        let wanted = if is_for_devices { devices } else { memory };
        let permit = match timeout(limit / WAITING_PART, wanted.clone().acquire_owned()).await {
            Ok(Ok(permit)) => ReadPermit { is_for_devices, _permit: permit },
            _ if is_for_devices && num_in_memory > 0 => {
                ReadPermit { is_for_devices: false, _permit: memory.clone().try_acquire_owned().ok()? }
            }
            _ => return None,
        };
        Some(Arc::new(permit))
    }

    /// Whether all of these blocks may be read with a permit.
    pub(crate) fn is_permitted(&self, hashes: &[BlockHash], permit: &Permit) -> bool {
        permit.is_for_devices || self.store.num_in_memory(hashes) == hashes.len()
    }

    /// The blocks of [a batch](KvStore::batch) that may be read with a permit. Others may have left memory since it was given.
    pub(crate) fn batch<'a>(&self, hashes: &'a [BlockHash], permit: &Permit) -> &'a [BlockHash] {
        let batch = self.store.batch(hashes);
        let num_permitted = if permit.is_for_devices { batch.len() } else { self.store.num_in_memory(batch) };
        &batch[..num_permitted]
    }

    /// Reads [a batch](Self::batch) of records as [`KvStore::read`], and says how long that took.
    pub(crate) async fn read(
        self: &Arc<Self>,
        batch: &[BlockHash],
        until: Instant,
        permit: &Permit,
    ) -> anyhow::Result<(Vec<Arc<Record>>, Duration)> {
        let wanted = batch.to_vec();
        let (tiers, permit) = (self.clone(), permit.clone());
        let read = move || {
            let _permit = permit;
            let started = Instant::now();
            (tiers.store.read(&wanted, until), started.elapsed())
        };
        Ok(spawn_blocking(read).await?)
    }
}
