//! Records in an object store, which all workers share that name it: [`ObjectTier`].
//!
//! ```text
//! <location>/<fingerprint>/<worker>/<incarnation>-<number>      a segment
//! ```
//!
//! A worker writes segments, and deletes its own when they take too much. The listing of the store says which there are: it is
//! read every few seconds, and of each new segment its manifest. A request waits for the bytes of its own records only, and only
//! when that was measured to take less time than computing. All else runs in a thread of its own.
//!
//! The store may be slow, lie, fail, hang or lose segments: what it gives is verified (invariant 4), and a failure or a read that
//! is late leaves the tier unmeasured. Then no request waits for it until it was measured again.

mod catalogue;
mod location;
mod segment;
mod shared;
mod speed;
#[cfg(test)]
mod tests;
mod upload;

use std::{
    fmt,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use baton_cost::LinkLine;
use baton_kv_cache::BlockHash;
use baton_kv_events::Keep;
use object_store::{ObjectStore, path::Path};
use ring::rand::{SecureRandom, SystemRandom};
use tokio::{
    runtime::{Builder, Runtime},
    sync::{Notify, mpsc},
    task::JoinHandle,
};
use xxhash_rust::xxh3::xxh3_64;

pub use self::{
    catalogue::{SegmentChanges, SegmentReader},
    location::ObjectOpenError,
};
use self::{
    shared::{Shared, keep_up},
    speed::Timing,
};
use crate::{
    counts::{Count, TierCounters, TierCounts},
    record::{Record, RecordShape},
    seal::KvKey,
};

/// New segments that a reader is told of at once: half a megabyte of names.
const MAX_TOLD: usize = 32;
/// How long the end waits for what is to be written.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// An object store as a tier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectConfig {
    /// `s3://bucket/prefix` or `file:///directory`.
    pub url: String,
    /// The name of this worker, the same in each of its lives. Others do not have it.
    pub worker: String,
    /// Bytes of the segments of this worker.
    pub max_bytes: u64,
}

/// The records of an object store.
pub(crate) struct ObjectTier {
    shared: Arc<Shared>,
    /// `None` only while it is dropped, as the next one.
    to_write: Option<mpsc::Sender<Arc<Record>>>,
    runtime: Option<Runtime>,
    /// Ends when all is written.
    writer: JoinHandle<()>,
    /// Of the store and what this worker can read of it: workers of one name share it. Not 0.
    name: u64,
}

impl ObjectTier {
    /// The tier at a location. Nothing is sent before this returns.
    pub(crate) fn open(
        config: &ObjectConfig,
        shape: RecordShape,
        num_queued: usize,
    ) -> Result<ObjectTier, ObjectOpenError> {
        let segment_bytes = (shape.manifest_bytes(1) + shape.record_bytes()) as u64;
        if config.max_bytes < segment_bytes {
            return Err(ObjectOpenError::TooSmall { max_bytes: config.max_bytes, segment_bytes });
        }
        let (store, location) = location::open(&config.url)?;
        let tier = ObjectTier::over(store, location, config, shape, num_queued);
        location::remove_left(&config.url, &tier.shared.own_dir);
        Ok(tier)
    }

    /// What a reader lacks of what is known of all workers' segments.
    pub(crate) fn changes(&self, reader: &mut SegmentReader) -> Option<SegmentChanges> {
        self.shared.lock().changes(reader, MAX_TOLD)
    }

    fn over(
        store: Arc<dyn ObjectStore>,
        location: Path,
        config: &ObjectConfig,
        shape: RecordShape,
        num_queued: usize,
    ) -> ObjectTier {
        let fingerprint: String = shape.fingerprint.0.iter().map(|byte| format!("{byte:02x}")).collect();
        let sealed = if shape.key.is_some() { "-sealed" } else { "" };
        let dir = location.join(format!("{fingerprint}{sealed}"));
        let key_name = shape.key.as_ref().map_or(0, KvKey::name);
        let name = format!("{} {dir} {key_name}", location::place(&config.url));
        let name = xxh3_64(name.as_bytes()).max(1);
        let shared = Arc::new(Shared {
            store,
            own_dir: dir.clone().join(config.worker.as_str()),
            dir,
            max_bytes: config.max_bytes,
            shape,
            catalogue: Mutex::default(),
            counters: TierCounters::default(),
            speed: Mutex::default(),
            is_wanted: AtomicBool::new(false),
            wanted: Notify::new(),
            num_not_deleted: AtomicU64::new(0),
        });
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("kv-object")
            .enable_all()
            .build()
            .expect("the system has room for a thread");
        let (to_write, records) = mpsc::channel(num_queued);
        let mut incarnation = [0; 8];
        SystemRandom::new().fill(&mut incarnation).expect("the system has random numbers");
        let incarnation = u64::from_le_bytes(incarnation);
        let writer = runtime.spawn(upload::all(shared.clone(), incarnation, records));
        // Ends with the runtime.
        runtime.spawn(keep_up(shared.clone()));
        ObjectTier { shared, to_write: Some(to_write), runtime: Some(runtime), writer, name }
    }

    /// Whether a segment holds the block.
    pub(crate) fn holds(&self, hash: BlockHash) -> bool {
        self.shared.lock().find(hash).is_some()
    }

    /// What it takes to read so many bytes; `None`: not measured, or too long ago.
    pub(crate) fn speed(&self) -> Option<LinkLine> {
        self.shared.speed().line
    }

    /// So many blocks were not read, as computing them is faster or the speed is not known. It is measured again soon.
    pub(crate) fn declined(&self, num_blocks: usize) {
        self.shared.counters.add(Count::Declined, num_blocks as u64);
        self.shared.is_wanted.store(true, Ordering::Relaxed);
        self.shared.wanted.notify_one();
    }

    /// A request that ended used this block. True: it is to be [written](Self::write).
    pub(crate) fn admit(&self, hash: BlockHash, keep: Keep) -> bool {
        self.shared.lock().admit(hash, keep)
    }

    /// Takes a record to write. False: too much waits.
    pub(crate) fn write(&self, record: Arc<Record>) -> bool {
        let hash = record.name.hash;
        let is_taken = self.queue().try_send(record).is_ok();
        if !is_taken {
            self.give_up(hash);
        }
        is_taken
    }

    /// A block that was to be written is not.
    pub(crate) fn give_up(&self, hash: BlockHash) {
        self.shared.lock().give_up([hash]);
    }

    /// Blocks are not found any more in the segments that are known, nor written if they wait. Own segments with one of them are deleted.
    pub(crate) fn forget(&self, hashes: &[BlockHash]) {
        self.shared.lock().forget_all(hashes);
        let shared = self.shared.clone();
        // Ends with the runtime. What this does not delete, the writer does, at its end at the latest.
        let runtime = self.runtime.as_ref().expect("the tier is open");
        runtime.spawn(async move { shared.make_room().await });
    }

    /// Records that wait at most: in the queue, and in the segment that is gathered.
    pub(crate) fn max_waiting(&self) -> usize {
        self.queue().max_capacity() + upload::max_records(&self.shared)
    }

    /// Waits until half of the queue is free.
    pub(crate) async fn room(&self) {
        let queue = self.queue();
        // An error: the tier ends.
        drop(queue.reserve_many(queue.max_capacity().div_ceil(2)).await);
    }

    /// So many blocks that were to be written are not.
    pub(crate) fn dropped(&self, num_blocks: u64) {
        self.shared.counters.add(Count::Dropped, num_blocks);
    }

    fn queue(&self) -> &mpsc::Sender<Arc<Record>> {
        self.to_write.as_ref().expect("the tier is open")
    }

    /// A sequence used these blocks.
    pub(crate) fn used(&self, hashes: &[BlockHash]) {
        self.shared.lock().used(hashes);
    }

    /// The records of blocks that follow each other, as far as they come whole and before `until`. Waits for them.
    pub(crate) fn read(&self, hashes: &[BlockHash], until: Instant) -> Vec<Arc<Record>> {
        let runtime = self.runtime.as_ref().expect("the tier is open");
        let (records, timing) = runtime.handle().block_on(self.shared.read(hashes, until));
        self.observe(records.len(), timing);
        records
    }

    /// Reads from the last one on, as [`KvStore::read_from_end`](crate::KvStore::read_from_end). True if all came and `take` wants
    /// more.
    pub(crate) fn read_from_end(
        &self,
        hashes: &[BlockHash],
        until: Instant,
        mut take: impl FnMut(usize, Vec<Arc<Record>>) -> bool,
    ) -> bool {
        let runtime = self.runtime.as_ref().expect("the tier is open");
        let (shared, hashes) = (self.shared.clone(), hashes.to_vec());
        let num_wanted = hashes.len();
        let (sender, mut pieces) = mpsc::channel(1);
        let read = runtime.spawn(async move { shared.read_from_end(&hashes, until, sender).await });
        let (mut first, mut wants_more) = (num_wanted, true);
        while wants_more && let Some(records) = pieces.blocking_recv() {
            first -= records.len();
            wants_more = take(first, records);
        }
        drop(pieces);
        // It ends with the runtime at the latest.
        self.observe(num_wanted - first, runtime.block_on(read).unwrap_or_default());
        wants_more && first == 0
    }

    /// So many records came, as fast as this.
    fn observe(&self, num_records: usize, timing: Option<Timing>) {
        if let Some(timing) = timing {
            let mut speed = self.shared.speed();
            speed.line = speed.line.map(|line| speed::after(line, timing));
            speed.measured = Some(Instant::now());
        }
        self.shared.counters.add(Count::Hits, num_records as u64);
    }

    /// What it holds of this worker, and has done. A token's time is that of its bytes alone.
    pub(crate) fn counts(&self) -> TierCounts {
        let Shared { shape, counters, max_bytes, .. } = &*self.shared;
        let record_bytes = shape.record_bytes() as u64;
        let (num_held, num_evicted) = {
            let catalogue = self.shared.lock();
            (catalogue.num_own_records(), catalogue.num_evicted())
        };
        let counts = counters.read("object", max_bytes / record_bytes, record_bytes, num_held, num_evicted);
        let (latency, token) = self.speed().map_or((0.0, 0.0), |line| {
            let token_bytes = record_bytes as f64 / shape.block_size as f64;
            (line.latency_seconds, token_bytes / line.bytes_per_second)
        });
        TierCounts {
            recall_token_seconds: token,
            recall_latency_seconds: latency,
            store_name: self.name,
            ..counts
        }
    }
}

impl Drop for ObjectTier {
    fn drop(&mut self) {
        self.to_write = None;
        let deadline = Instant::now() + END_TIMEOUT;
        while !self.writer.is_finished() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(1));
        }
        if !self.writer.is_finished() {
            tracing::warn!("the object store takes too long: kv that waits for it is not saved");
        }
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl fmt::Debug for ObjectTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObjectTier").field("store", &self.shared.store).finish_non_exhaustive()
    }
}
