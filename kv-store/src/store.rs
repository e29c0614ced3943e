//! The tiers of one worker: [`KvStore`]. Blocks of sequences that ended are copied out of the pool, and come back before a
//! later prompt is computed.
//!
//! ```text
//! save    pool --copy--> record --> host slot
//!                          |
//!                          +--bounded queue--> writer --> disk slot
//!                          |
//!                          +--bounded queue, at the second use--> object store
//! read    host slot, disk slot, object store --verify--> record --copy--> pool
//! ```
//!
//! Only the copies out of the pool hold blocks of the pool, and a disk is never waited for meanwhile: see [`saves`](crate::saves).
//! It does not know engines: the caller says which blocks hold what, and keeps them.

#[cfg(test)]
#[path = "tests/store.rs"]
pub(crate) mod tests;

use std::{
    fmt, io,
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        mpsc::{self, SyncSender},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use baton_kv_cache::{BlockHash, BlockId, BlockStorage, HostBlocks, KvFormat};
use baton_kv_events::{CacheEvent, Keep};
use baton_tier_policy::{Directory, RecallPace, SlotPlace};
use tokio::sync::Semaphore;

use crate::{
    buffer::PAGE,
    copy,
    counts::{Count, TierCounters, TierCounts},
    disk::{DiskSlots, StoreOpenError},
    host::HostSlots,
    object::{ObjectConfig, ObjectOpenError, ObjectTier, SegmentChanges, SegmentReader},
    record::{Record, RecordShape},
    save_queue::{MAX_SAVES, ToCopy, ToWrite, num_queued},
    seal::KvKey,
    shared::SharedSlots,
    slots::{ReadError, Sharing, Slots},
};

/// How long the end waits for what is queued. A disk that hangs does not keep the process.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// What a worker's tiers are.
#[derive(Clone, Debug, Default)]
pub struct StoreConfig {
    /// `None`: no host tier.
    pub host: Option<HostConfig>,
    /// `None`: no disk tier.
    pub disk: Option<DiskConfig>,
    /// `None`: no object store.
    pub object: Option<ObjectConfig>,
    /// Seals what leaves this process; `None`: it is plain.
    pub key: Option<KvKey>,
}

/// A host tier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostConfig {
    /// Bytes of host memory.
    pub max_bytes: u64,
    /// A directory in memory, for all workers that name it; `None`: memory of this process.
    pub dir: Option<PathBuf>,
}

/// A disk tier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskConfig {
    /// Its directory, of this worker alone.
    pub dir: PathBuf,
    /// Bytes of its files.
    pub max_bytes: u64,
}

/// Why a tier cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum TierOpenError {
    /// The disk tier, or a host tier that workers share.
    #[error(transparent)]
    Dir(#[from] StoreOpenError),
    /// The object store.
    #[error(transparent)]
    Object(#[from] ObjectOpenError),
}

/// The tiers of one worker. Dropping it waits a bounded time for what is queued.
pub struct KvStore {
    pub(crate) shared: Arc<Shared>,
    /// `None` only while it is dropped.
    pub(crate) saves: Option<SyncSender<ToCopy>>,
    threads: Vec<JoinHandle<()>>,
}

pub(crate) struct Shared {
    pub(crate) directory: Mutex<Directory>,
    pub(crate) recalls: Mutex<RecallPace>,
    pub(crate) tiers: Vec<Box<dyn Slots>>,
    pub(crate) counters: Vec<TierCounters>,
    pub(crate) object: Option<ObjectTier>,
    /// Room for records that wait for the disk, and how many that are at most.
    pub(crate) queue: Arc<Semaphore>,
    pub(crate) num_queued: usize,
    pub(crate) storage: Arc<BlockStorage>,
    /// Room for records that the pool's device reads and writes itself. `None`: a processor copies.
    pub(crate) room: Option<Arc<HostBlocks>>,
    opened: Instant,
    on_change: Box<OnChange>,
}

/// Is told what changed in a tier.
type OnChange = dyn Fn(usize, Vec<CacheEvent>) + Send + Sync;

impl KvStore {
    /// Opens the tiers of a pool. `on_change` is told of each, by its number, which blocks came into it and which left it; first of all,
    /// what was found there, if anything. The fastest tier is 0. It is called under a lock, in the order of the changes. What is in an
    /// object store is told by [`segment_changes`](Self::segment_changes): all workers that share it have it. A host tier that workers share
    /// is left out where those of other formats, which others use, leave no room.
    ///
    /// # Errors
    /// When the directory of the disk tier cannot be used, or what is said of the object store.
    pub fn open(
        config: &StoreConfig,
        format: &KvFormat,
        storage: Arc<BlockStorage>,
        on_change: impl Fn(usize, Vec<CacheEvent>) + Send + Sync + 'static,
    ) -> Result<KvStore, TierOpenError> {
        let mut tiers: Vec<Box<dyn Slots>> = Vec::new();
        // Records that have room for the pool's device, beside those that wait.
        let mut num_kept = None;
        let mut num_damaged = Vec::new();
        let shape = |key| RecordShape::new(format, storage.layout(), key);
        match &config.host {
            Some(HostConfig { max_bytes, dir: None }) => {
                let slots = HostSlots::new(*max_bytes, storage.layout().block_bytes());
                let num_slots = slots.num_slots() as usize;
                // Readers keep some that are in no slot any more, and one is on its way.
                num_kept = Some(num_slots + num_queued(&storage).min(num_slots));
                tiers.push(Box::new(slots));
                num_damaged.push(0);
            }
            // What is in memory is not sealed.
            Some(HostConfig { max_bytes, dir: Some(dir) }) => {
                if let Some(mut slots) = SharedSlots::open_beside_others(dir, *max_bytes, shape(None))? {
                    num_damaged.push(slots.num_damaged());
                    let is_reached = slots.reach(&storage).unwrap_or_else(|error| {
                        tracing::warn!(%error, "the device of the pool does not read the host tier: a processor copies its kv");
                        false
                    });
                    // What a device saves is on its way to this tier.
                    num_kept = is_reached.then_some(2);
                    tiers.push(Box::new(slots));
                }
            }
            None => {}
        }
        if let Some(DiskConfig { dir, max_bytes }) = &config.disk {
            let slots = DiskSlots::open(dir, *max_bytes, shape(config.key.clone()))?;
            num_damaged.push(slots.num_damaged());
            tiers.push(Box::new(slots));
        }
        let open = |object| ObjectTier::open(object, shape(config.key.clone()), num_queued(&storage));
        let object = config.object.as_ref().map(open).transpose()?;
        let num_queued = num_queued(&storage);
        let num_for_disk = if config.disk.is_some() { num_queued } else { 0 };
        let num_waiting = num_for_disk + object.as_ref().map_or(0, ObjectTier::max_waiting);
        let room = num_kept.and_then(|num_kept| room_for(&storage, num_kept + num_waiting));
        Ok(KvStore::over(tiers, object, storage, room, num_queued, &num_damaged, Box::new(on_change)))
    }

    /// The tiers of a pool over these stores, the fastest first, as [`open`](Self::open). At most `num_queued` records wait for those that
    /// are no memory.
    pub fn over_slots(
        tiers: Vec<Box<dyn Slots>>,
        storage: Arc<BlockStorage>,
        num_queued: usize,
        on_change: impl Fn(usize, Vec<CacheEvent>) + Send + Sync + 'static,
    ) -> KvStore {
        KvStore::over(tiers, None, storage, None, num_queued, &[], Box::new(on_change))
    }

    /// Over these stores, the fastest first. So many of their records were damaged when they were opened.
    pub(crate) fn over(
        mut tiers: Vec<Box<dyn Slots>>,
        object: Option<ObjectTier>,
        storage: Arc<BlockStorage>,
        room: Option<Arc<HostBlocks>>,
        num_queued: usize,
        num_damaged: &[usize],
        on_change: Box<OnChange>,
    ) -> KvStore {
        let mut directory = Directory::new(&tiers.iter().map(|tier| tier.num_slots()).collect::<Vec<_>>());
        for (tier, slots) in tiers.iter_mut().enumerate() {
            let mut found = slots.take_found();
            // The beginnings of sequences last: the ends make room first.
            found.sort_by_key(|(_, name, _)| std::cmp::Reverse(name.block_idx));
            for (slot, name, keep) in found {
                directory.restore(SlotPlace { tier, slot }, name.hash, name.block_before(), keep);
            }
        }
        let counters: Vec<TierCounters> = tiers.iter().map(|_| TierCounters::default()).collect();
        for (tier, &num) in counters.iter().zip(num_damaged) {
            tier.add(Count::Damaged, num as u64);
        }
        let shared = Arc::new(Shared {
            directory: Mutex::new(directory),
            recalls: Mutex::new(RecallPace::new(tiers.len())),
            tiers,
            counters,
            object,
            queue: Arc::new(Semaphore::new(num_queued)),
            num_queued,
            storage,
            room,
            opened: Instant::now(),
            on_change,
        });
        (0..shared.tiers.len()).for_each(|tier| (shared.on_change)(tier, Vec::new()));
        shared.update(|_| ());
        let (saves, to_copy) = mpsc::sync_channel(MAX_SAVES);
        let (writes, to_write) = mpsc::channel();
        let copier = thread::spawn({
            let shared = shared.clone();
            move || shared.copy_all(&to_copy, &writes)
        });
        let writer = thread::spawn({
            let shared = shared.clone();
            move || {
                to_write.iter().for_each(|next| match next {
                    ToWrite::Record(write) => shared.write(&write),
                    ToWrite::Forget(forget) => shared.forget_written(forget),
                });
            }
        });
        KvStore { shared, saves: Some(saves), threads: vec![copier, writer] }
    }

    /// Writes records into blocks of the pool, and waits for them. The caller owns the blocks, and no other code reads or
    /// writes them meanwhile. Returns how many at the front are there: the next one is not what was saved. It is forgotten, and counted as
    /// damaged, unless another worker replaced it.
    ///
    /// # Errors
    /// When the device of the pool fails.
    pub fn write_to_pool(&self, records: &[Arc<Record>], blocks: &[BlockId]) -> io::Result<usize> {
        let num_whole = copy::to_pool(&self.shared.storage, records, blocks)?;
        let Some(damaged) = records.get(num_whole) else { return Ok(num_whole) };
        let hash = damaged.name.hash;
        if self.shared.sharing().any(|(_, slots)| slots.has_replaced(damaged)) {
            tracing::debug!("another worker replaced the record of a block; it is computed again");
            return Ok(num_whole);
        }
        let found = {
            let directory = self.shared.lock();
            directory.find(hash).map(|place| (place, directory.version(place)))
        };
        if let Some((place, version)) = found {
            self.shared.read_failed(place, version, hash, &ReadError::Damaged);
        }
        Ok(num_whole)
    }

    /// What each tier holds and has done.
    pub fn counts(&self) -> Vec<TierCounts> {
        let directory = self.shared.lock();
        let recalls = self.shared.recalls();
        let block_size = self.shared.storage.layout().block_size as f64;
        let tiers = self.shared.tiers.iter().zip(&self.shared.counters).enumerate();
        let tiers = tiers.map(|(tier, (slots, counters))| {
            let (num_slots, record_bytes) = (u64::from(slots.num_slots()), slots.record_bytes() as u64);
            let (num_held, num_evicted) = (directory.num_held(tier), directory.num_evicted(tier));
            let recall_token_seconds = recalls.seconds(tier).unwrap_or(0.0) / block_size;
            let counts = counters.read(slots.name(), num_slots, record_bytes, num_held, num_evicted);
            TierCounts { recall_token_seconds, ..counts }
        });
        let rest_seconds = recalls.rest_seconds() / block_size;
        let object = self.shared.object.iter().map(|object| {
            let counts = object.counts();
            let is_measured = counts.recall_token_seconds > 0.0;
            let rest_seconds = if is_measured { rest_seconds } else { 0.0 };
            TierCounts { recall_token_seconds: counts.recall_token_seconds + rest_seconds, ..counts }
        });
        tiers.chain(object).collect()
    }

    /// What a reader lacks of what is known of the segments in the object store, of all workers that share it. `None`: nothing, or there
    /// is no object store.
    pub fn segment_changes(&self, reader: &mut SegmentReader) -> Option<SegmentChanges> {
        self.shared.object.as_ref()?.changes(reader)
    }

    /// Whether there is an object store.
    pub fn has_object_store(&self) -> bool {
        self.shared.object.is_some()
    }
}

/// Room for so many records, if the pool's device can read them itself.
fn room_for(storage: &BlockStorage, num_records: usize) -> Option<Arc<HostBlocks>> {
    // Disks are written in whole pages.
    if !storage.layout().block_bytes().is_multiple_of(PAGE) {
        return None;
    }
    HostBlocks::of(storage, num_records).unwrap_or_else(|error| {
        tracing::warn!(%error, "no memory that the device of the pool reads itself: a processor copies the host tier's kv");
        None
    })
}

impl Shared {
    /// Where the front of a sequence is, as far as tiers hold it: in slots, or `None`: in the object store.
    pub(crate) fn places(&self, hashes: &[BlockHash]) -> Vec<Option<SlotPlace>> {
        let directory = self.lock();
        let in_object = |hash| self.object.as_ref().is_some_and(|object| object.holds(hash));
        let place = |&hash: &BlockHash| match directory.find(hash) {
            None if in_object(hash) => Some(None),
            place => place.map(Some),
        };
        hashes.iter().map_while(place).collect()
    }

    pub(crate) fn used(&self, hashes: &[BlockHash], keeps: &[Keep]) {
        let changed = {
            let mut directory = self.lock();
            self.sharing().for_each(|(tier, slots)| slots.note_used(&directory.slots_of(tier, hashes)));
            directory.used(hashes, keeps)
        };
        changed.into_iter().for_each(|(place, keep)| self.keep(place, keep));
        self.object.iter().for_each(|object| object.used(hashes));
    }

    /// If another record takes the slot meanwhile, that one is kept so: it costs the order, and nothing else.
    pub(crate) fn keep(&self, SlotPlace { tier, slot }: SlotPlace, keep: Keep) {
        if let Err(error) = self.tiers[tier].keep(slot, keep) {
            tracing::debug!(tier = self.tiers[tier].name(), %error, "how a block is to be kept is not noted");
        }
    }

    /// The slot had this version when the read began.
    pub(crate) fn read_failed(&self, place: SlotPlace, version: u32, hash: BlockHash, error: &ReadError) {
        self.update(|directory| {
            // Another record may have taken the slot while it was read, and even this one again.
            if !directory.holds(place, hash) || directory.version(place) != version {
                return;
            }
            let count = match error {
                ReadError::Damaged => Count::Damaged,
                ReadError::Io(_) => Count::ReadErrors,
            };
            directory.forget(place, hash);
            self.counters[place.tier].add(count, 1);
            let name = self.tiers[place.tier].name();
            tracing::warn!(tier = name, slot = place.slot, %error, "kv of a block is lost; it is computed again");
        });
    }

    /// Changes the directory, and tells of the changes.
    pub(crate) fn update<R>(&self, change: impl FnOnce(&mut Directory) -> R) -> R {
        let mut directory = self.lock();
        let result = change(&mut directory);
        self.tell(&mut directory);
        result
    }

    fn tell(&self, directory: &mut Directory) {
        for (tier, slots) in self.sharing() {
            directory.take_doubles(tier).into_iter().for_each(|slot| slots.give_up(slot));
        }
        for tier in 0..self.tiers.len() {
            let events = directory.take_events(tier);
            if !events.is_empty() {
                (self.on_change)(tier, events);
            }
        }
    }

    /// No other code runs under the lock, so a poisoned one holds whole data.
    pub(crate) fn recalls(&self) -> MutexGuard<'_, RecallPace> {
        let mut recalls = self.recalls.lock().unwrap_or_else(PoisonError::into_inner);
        recalls.set_time(self.opened.elapsed());
        recalls
    }

    /// The tiers that other processes have, too.
    pub(crate) fn sharing(&self) -> impl Iterator<Item = (usize, &dyn Sharing)> {
        self.tiers.iter().enumerate().filter_map(|(tier, slots)| Some((tier, slots.shared()?)))
    }

    /// The directory, which knows what other processes did to the slots until now. A panic under the lock is one of the directory's own
    /// rules; what it holds is checked before it is used.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Directory> {
        let mut directory = self.directory.lock().unwrap_or_else(PoisonError::into_inner);
        directory.set_time(self.opened.elapsed());
        self.sharing().for_each(|(tier, slots)| directory.follow(tier, slots.changes()));
        self.tell(&mut directory);
        directory
    }
}

impl Drop for KvStore {
    fn drop(&mut self) {
        // The copier ends after the last save, and the writer after the copier.
        self.saves = None;
        let deadline = Instant::now() + END_TIMEOUT;
        for thread in self.threads.drain(..) {
            while !thread.is_finished() && Instant::now() < deadline {
                thread::sleep(Duration::from_millis(1));
            }
            match thread.is_finished() {
                true => thread.join().expect("a thread of the store does not panic"),
                false => tracing::warn!("the disk takes too long: kv that waits for it is not saved"),
            }
        }
    }
}

impl fmt::Debug for KvStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvStore").field("tiers", &self.shared.tiers).finish_non_exhaustive()
    }
}
