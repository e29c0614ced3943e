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
//! Only the copies out of the pool hold blocks of the pool, and a disk is never waited for meanwhile. What a slow disk cannot
//! take is not written, and counted. It does not know engines: the caller says which blocks hold what, and keeps them.

#[cfg(test)]
#[path = "tests/store.rs"]
pub(crate) mod tests;

use std::{
    fmt, io,
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        mpsc::{self, Receiver, RecvTimeoutError, SyncSender, TrySendError},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use baton_kv_cache::{BlockHash, BlockId, BlockStorage, HostBlocks, KvFormat};
use baton_kv_events::{CacheEvent, Keep};

use crate::{
    buffer::PAGE,
    copy,
    counts::{Count, TierCounters, TierCounts},
    directory::{Directory, SlotPlace},
    disk::{DiskSlots, StoreOpenError},
    host::HostSlots,
    object::{ObjectConfig, ObjectOpenError, ObjectTier},
    recall_pace::RecallPace,
    record::{Record, RecordName, RecordShape},
    seal::KvKey,
    shared::SharedSlots,
    slots::{ReadError, Sharing, SlotChange, Slots},
};

/// Sequences that wait to be copied out of the pool. Each keeps its blocks, and copies are fast: a longer queue would keep
/// more of the pool than it is worth.
const MAX_SAVES: usize = 16;
/// Memory of records that wait for the disk, and of those that wait for the object store: enough for bursts.
const MAX_QUEUED_BYTES: usize = 64 << 20;
/// How long the end waits for what is queued. A disk that hangs does not keep the process.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// How late a worker learns of what others did to slots that it shares, at most.
const FOLLOW_EVERY: Duration = Duration::from_millis(50);
/// How long host tiers stay that no worker uses, beside one that is used.
const TIDY_EVERY: Duration = Duration::from_secs(30);
/// Blocks that were used by others are spared at most so often for one record, and so many slots are tried that others take first.
const MAX_SPARED: usize = 1024;
const MAX_CLAIMS: usize = 16;

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

/// Blocks of a sequence in a pool, to be copied. `G` keeps them as they are.
#[derive(Debug)]
pub struct SequenceBlocks<G> {
    /// The start of the chain of hashes.
    pub root: BlockHash,
    /// Hashes of the blocks, in order.
    pub hashes: Vec<BlockHash>,
    /// How the request wants each to be kept.
    pub keeps: Vec<Keep>,
    /// Their tokens, one after the other.
    pub tokens: Vec<u32>,
    /// Where they are. There may be fewer than hashes.
    pub blocks: Vec<BlockId>,
    /// The request has ended: this counts as a use of its blocks.
    pub has_ended: bool,
    /// No block is written before this is dropped.
    pub guard: G,
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
    saves: Option<SyncSender<Save>>,
    threads: Vec<JoinHandle<()>>,
}

type Save = SequenceBlocks<Box<dyn Send>>;

pub(crate) struct Shared {
    pub(crate) directory: Mutex<Directory>,
    pub(crate) recalls: Mutex<RecallPace>,
    pub(crate) tiers: Vec<Box<dyn Slots>>,
    pub(crate) counters: Vec<TierCounters>,
    pub(crate) object: Option<ObjectTier>,
    pub(crate) storage: Arc<BlockStorage>,
    /// Room for records that the pool's device reads and writes itself. `None`: a processor copies.
    pub(crate) room: Option<Arc<HostBlocks>>,
    opened: Instant,
    on_change: Box<OnChange>,
}

/// Is told what changed in a tier.
type OnChange = dyn Fn(usize, Vec<CacheEvent>) + Send + Sync;

/// A record on its way to a tier.
struct Write {
    tier: usize,
    keep: Keep,
    record: Arc<Record>,
}

impl KvStore {
    /// Opens the tiers of a pool. `on_change` is told of each, by its number, which blocks came into it and which left it; first of all,
    /// what was found there, if anything. The fastest tier is 0. It is called under a lock, in the order of the changes. What is in an
    /// object store is not told: all workers that share it have it.
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
        let mut room = None;
        let mut num_damaged = 0;
        let shape = |key| RecordShape::new(format, storage.layout(), key);
        match &config.host {
            Some(HostConfig { max_bytes, dir: None }) => {
                let slots = HostSlots::new(*max_bytes, storage.layout().block_bytes());
                let num_slots = slots.num_slots() as usize;
                room = room_for(&storage, num_slots + num_queued(&storage).min(num_slots));
                tiers.push(Box::new(slots));
            }
            // What is in memory is not sealed.
            Some(HostConfig { max_bytes, dir: Some(dir) }) => {
                let mut slots = SharedSlots::open(dir, *max_bytes, shape(None))?;
                num_damaged += slots.num_damaged();
                let is_reached = slots.reach(&storage).unwrap_or_else(|error| {
                    tracing::warn!(%error, "the device of the pool does not read the host tier: a processor copies its kv");
                    false
                });
                // What a device saves is on its way to this tier, too, and to two queues.
                room = is_reached.then(|| room_for(&storage, 2 * num_queued(&storage) + 2)).flatten();
                tiers.push(Box::new(slots));
            }
            None => {}
        }
        if let Some(DiskConfig { dir, max_bytes }) = &config.disk {
            let slots = DiskSlots::open(dir, *max_bytes, shape(config.key.clone()))?;
            num_damaged += slots.num_damaged();
            tiers.push(Box::new(slots));
        }
        let open = |object| ObjectTier::open(object, shape(config.key.clone()), MAX_QUEUED_BYTES);
        let object = config.object.as_ref().map(open);
        Ok(KvStore::over(tiers, object.transpose()?, storage, room, num_damaged, Box::new(on_change)))
    }

    /// The tiers of a pool over these stores, the fastest first, as [`open`](Self::open).
    pub fn over_slots(
        tiers: Vec<Box<dyn Slots>>,
        storage: Arc<BlockStorage>,
        on_change: impl Fn(usize, Vec<CacheEvent>) + Send + Sync + 'static,
    ) -> KvStore {
        KvStore::over(tiers, None, storage, None, 0, Box::new(on_change))
    }

    /// Over these stores, the fastest first.
    pub(crate) fn over(
        mut tiers: Vec<Box<dyn Slots>>,
        object: Option<ObjectTier>,
        storage: Arc<BlockStorage>,
        room: Option<Arc<HostBlocks>>,
        num_damaged: usize,
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
        if let Some(last) = counters.last() {
            last.add(Count::Damaged, num_damaged as u64);
        }
        let shared = Arc::new(Shared {
            directory: Mutex::new(directory),
            recalls: Mutex::new(RecallPace::new(tiers.len())),
            tiers,
            counters,
            object,
            storage,
            room,
            opened: Instant::now(),
            on_change,
        });
        (0..shared.tiers.len()).for_each(|tier| (shared.on_change)(tier, Vec::new()));
        shared.update(|_| ());
        let (saves, to_copy) = mpsc::sync_channel(MAX_SAVES);
        let (writes, to_write) = mpsc::sync_channel(num_queued(&shared.storage));
        let copier = thread::spawn({
            let shared = shared.clone();
            move || shared.copy_all(&to_copy, &writes)
        });
        let writer = thread::spawn({
            let shared = shared.clone();
            move || to_write.iter().for_each(|write: Write| shared.write(&write))
        });
        KvStore { shared, saves: Some(saves), threads: vec![copier, writer] }
    }

    /// Copies a sequence's blocks to the tiers that lack them, in the background. When too many sequences wait already, these
    /// are not copied.
    pub fn save(&self, sequence: SequenceBlocks<impl Send + 'static>) {
        let SequenceBlocks { root, hashes, keeps, tokens, blocks, has_ended, guard } = sequence;
        let num_blocks = blocks.len() as u64;
        let guard = Box::new(guard) as Box<dyn Send>;
        let save = SequenceBlocks { root, hashes, keeps, tokens, blocks, has_ended, guard };
        let saves = self.saves.as_ref().expect("the store is open");
        if saves.try_send(save).is_err() {
            for counters in &self.shared.counters {
                counters.add(Count::Dropped, num_blocks);
            }
        }
    }

    /// Writes records into blocks of the pool, and waits for them. The caller owns the blocks, and no other code reads or
    /// writes them meanwhile.
    ///
    /// # Errors
    /// When the device of the pool fails, or finds that a record is not what was saved. That one is forgotten, and counted as
    /// damaged.
    pub fn write_to_pool(&self, records: &[Arc<Record>], blocks: &[BlockId]) -> io::Result<()> {
        let num_whole = copy::to_pool(&self.shared.storage, records, blocks)?;
        let Some(damaged) = records.get(num_whole) else { return Ok(()) };
        let hash = damaged.name.hash;
        if self.shared.sharing().any(|(_, slots)| slots.has_replaced(damaged)) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "another worker replaced the record meanwhile",
            ));
        }
        let found = {
            let directory = self.shared.lock();
            directory.find(hash).map(|place| (place, directory.version(place)))
        };
        if let Some((place, version)) = found {
            self.shared.read_failed(place, version, hash, &ReadError::Damaged);
        }
        Err(io::Error::new(io::ErrorKind::InvalidData, ReadError::Damaged))
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
        tiers.chain(self.shared.object.iter().map(ObjectTier::counts)).collect()
    }
}

/// Records that wait for one tier at most.
fn num_queued(storage: &BlockStorage) -> usize {
    (MAX_QUEUED_BYTES / storage.layout().block_bytes()).max(1)
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
    fn copy_all(&self, saves: &Receiver<Save>, writes: &SyncSender<Write>) {
        let is_shared = self.sharing().next().is_some();
        let mut tidied = Instant::now();
        loop {
            // What other workers do to shared slots is told also while nothing else happens.
            let save = match is_shared {
                true => saves.recv_timeout(FOLLOW_EVERY),
                false => saves.recv().map_err(RecvTimeoutError::from),
            };
            match save {
                Ok(save) => {
                    self.copy(&save, writes);
                    self.used(&save.hashes, &save.keeps);
                }
                Err(RecvTimeoutError::Timeout) => {
                    drop(self.lock());
                    if tidied.elapsed() > TIDY_EVERY {
                        self.sharing().for_each(|(_, slots)| slots.remove_unused());
                        tidied = Instant::now();
                    }
                }
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Copies what tiers lack, in the order of the sequence. A tier that cannot take a block gets none of the later ones: they
    /// are useless without it.
    fn copy(&self, save: &Save, writes: &SyncSender<Write>) {
        let block_size = self.storage.layout().block_size;
        let mut parent = save.root;
        let mut takes = vec![true; self.tiers.len()];
        let mut object = self.object.as_ref().filter(|_| save.has_ended);
        let hashes = save.hashes.iter().zip(&save.keeps);
        let blocks = save.blocks.iter().zip(hashes).zip(save.tokens.chunks_exact(block_size));
        for (block_idx, ((&block, (&hash, &keep)), tokens)) in blocks.enumerate() {
            let lacking: Vec<usize> = {
                let directory = self.lock();
                (0..self.tiers.len())
                    .filter(|&tier| takes[tier] && directory.lacks(tier, hash, keep))
                    .collect()
            };
            let to_object = object.filter(|object| object.admit(hash, keep));
            if !lacking.is_empty() || to_object.is_some() {
                let name = RecordName {
                    root: save.root,
                    hash,
                    parent,
                    block_idx: block_idx as u32,
                    tokens: tokens.to_vec(),
                };
                debug_assert_eq!(parent.child(tokens), hash, "the tokens are those of the hash");
                let room = self.room.as_ref().map(HostBlocks::take);
                if let Some(None) = room {
                    // Readers keep the room of records that are in no slot any more.
                    let num_dropped = (save.blocks.len() - block_idx) as u64;
                    for tier in lacking {
                        self.counters[tier].add(Count::Dropped, num_dropped);
                    }
                    return;
                }
                let record = match copy::from_pool(&self.storage, block, name, room.flatten()) {
                    Ok(record) => Arc::new(record),
                    Err(error) => {
                        tracing::warn!(%error, "kv not saved: the pool's device fails");
                        return;
                    }
                };
                for tier in lacking {
                    takes[tier] = self.take(Write { tier, keep, record: record.clone() }, writes);
                }
                if to_object.is_some_and(|object| !object.write(record)) {
                    object = None;
                }
            }
            parent = hash;
        }
    }

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
    fn keep(&self, SlotPlace { tier, slot }: SlotPlace, keep: Keep) {
        if let Err(error) = self.tiers[tier].keep(slot, keep) {
            tracing::debug!(tier = self.tiers[tier].name(), %error, "how a block is to be kept is not noted");
        }
    }

    /// Writes to memory at once, and leaves a disk to the writer. False when the tier does not take the record.
    fn take(&self, write: Write, writes: &SyncSender<Write>) -> bool {
        if self.tiers[write.tier].is_memory() {
            self.write(&write);
            return true;
        }
        match writes.try_send(write) {
            Ok(()) => true,
            Err(TrySendError::Full(write) | TrySendError::Disconnected(write)) => {
                self.counters[write.tier].add(Count::Dropped, 1);
                false
            }
        }
    }

    fn write(&self, Write { tier, keep, record }: &Write) {
        let RecordName { hash, block_idx, .. } = record.name;
        let slot = match self.tiers[*tier].shared() {
            None => self.update(|directory| directory.begin_write(*tier, hash, block_idx, *keep)),
            Some(shared) => self.claim(shared, *tier, &record.name, *keep),
        };
        let Some(slot) = slot else { return };
        let place = SlotPlace { tier: *tier, slot };
        match self.tiers[*tier].write(slot, record) {
            Ok(()) => {
                self.counters[*tier].add(Count::Writes, 1);
                if *keep != Keep::Normal {
                    self.keep(place, *keep);
                }
                self.update(|directory| directory.end_write(place, record.name.block_before()));
            }
            Err(error) => {
                let name = self.tiers[*tier].name();
                let num_before = self.counters[*tier].add(Count::WriteErrors, 1);
                // A full disk refuses every write.
                if num_before.is_power_of_two() || num_before == 0 {
                    tracing::warn!(tier = name, %error, num_before, "kv not saved: the tier refuses a write");
                }
                self.tiers[*tier].shared().iter().for_each(|shared| shared.release(slot));
                self.update(|directory| directory.fail_write(place));
            }
        }
    }

    /// A slot of a shared tier for a record, which is this process's now. A block that others used since this one last asked does not make
    /// room for it.
    fn claim(&self, shared: &dyn Sharing, tier: usize, name: &RecordName, keep: Keep) -> Option<u32> {
        for _ in 0..MAX_CLAIMS {
            let (slot, is_claimed) = self.update(|directory| {
                for _ in 0..MAX_SPARED {
                    let Some(slot) = directory.next_evicted(tier, keep) else { break };
                    let Some(keep) = shared.used_by_others(slot) else { break };
                    directory.used_slot(SlotPlace { tier, slot }, keep);
                }
                let slot = directory.begin_write(tier, name.hash, name.block_idx, keep)?;
                let is_claimed = shared.claim(slot);
                if !is_claimed {
                    // Another process was first. It may have been stopped before it told more.
                    directory.follow(tier, vec![(slot, SlotChange::Taken)]);
                }
                Some((slot, is_claimed))
            })?;
            if is_claimed {
                return Some(slot);
            }
        }
        None
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
    fn update<R>(&self, change: impl FnOnce(&mut Directory) -> R) -> R {
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
        self.recalls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The tiers that other processes have, too.
    fn sharing(&self) -> impl Iterator<Item = (usize, &dyn Sharing)> {
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
