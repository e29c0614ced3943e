//! Whole stores: blocks leave a pool and come back.

#[path = "reaching.rs"]
mod reaching;

use std::{
    path::Path,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
};

use baton_kv_cache::DeviceMemory;

use super::*;
use tokio::sync::oneshot;

use crate::{
    record::RecordName,
    save_queue::{SaveRest, SequenceBlocks},
    testing::{BLOCK_SIZE, body, chain, format, layout, root, tokens},
};

/// Records that wait for a store which is no memory.
const NUM_QUEUED: usize = 4;

/// A pool whose block `idx` may hold any block.
pub(crate) struct Pool {
    storage: Arc<BlockStorage>,
    pub(crate) events: Arc<Mutex<Vec<CacheEvent>>>,
}

fn in_process(max_bytes: u64) -> HostConfig {
    HostConfig { max_bytes, dir: None }
}

impl Pool {
    pub(crate) fn new() -> Pool {
        let storage = BlockStorage::new(layout(), 64).expect("memory");
        Pool { storage: Arc::new(storage), events: Arc::default() }
    }

    /// On a device, with its memory.
    fn on_device() -> (Pool, Arc<Mutex<Vec<u8>>>) {
        let memory = Arc::new(Mutex::new(vec![0; 64 * layout().block_bytes()]));
        let storage = BlockStorage::on_device(Box::new(FakeDevice(memory.clone())), layout(), 64);
        (Pool { storage: Arc::new(storage), events: Arc::default() }, memory)
    }

    fn open(&self, host_blocks: u64, disk: Option<&Path>) -> KvStore {
        self.try_open(&StoreConfig {
            host: (host_blocks > 0).then(|| in_process(host_blocks * layout().block_bytes() as u64)),
            disk: disk.map(|dir| DiskConfig { dir: dir.to_owned(), max_bytes: 1 << 20 }),
            ..StoreConfig::default()
        })
        .expect("it opens")
    }

    pub(crate) fn try_open(&self, config: &StoreConfig) -> Result<KvStore, TierOpenError> {
        let events = self.events.clone();
        let tell = move |_, new| events.lock().unwrap().extend(new);
        KvStore::open(config, &format(), self.storage.clone(), tell)
    }

    fn over(&self, tiers: Vec<Box<dyn Slots>>) -> KvStore {
        KvStore::over_slots(tiers, self.storage.clone(), NUM_QUEUED, |_, _| ())
    }

    pub(crate) fn over_object(&self, object: ObjectTier) -> KvStore {
        KvStore::over(
            Vec::new(),
            Some(object),
            self.storage.clone(),
            None,
            NUM_QUEUED,
            &[],
            Box::new(|_, _| ()),
        )
    }

    /// Writes the KV of a sequence to the pool's first blocks.
    fn fill(&self, hashes: &[BlockHash]) {
        for (idx, &hash) in hashes.iter().enumerate() {
            let bytes = self.body(hash);
            for (layer_idx, bytes) in bytes.chunks_exact(self.storage.layout().layer_bytes()).enumerate() {
                // SAFETY: the test alone uses the pool.
                #[allow(unsafe_code)]
                unsafe { self.storage.store(BlockId(idx as u32), layer_idx, bytes) }.expect("memory");
            }
        }
    }

    fn holds(&self, block: BlockId, hash: BlockHash) -> bool {
        let mut bytes = vec![0; self.storage.layout().block_bytes()];
        let pieces = [(block, 0), (block, 1)];
        // SAFETY: as above.
        #[allow(unsafe_code)]
        unsafe { self.storage.load_all(&pieces, &mut bytes) }.expect("memory");
        bytes == self.body(hash)
    }

    fn body(&self, hash: BlockHash) -> Vec<u8> {
        body(hash).repeat(self.storage.layout().block_bytes() / layout().block_bytes())
    }

    /// Fills the pool with a sequence, saves it, and waits until its blocks are not needed any more.
    pub(crate) fn save(&self, store: &KvStore, seed: u64, num_blocks: usize) -> Vec<BlockHash> {
        self.save_kept(store, seed, num_blocks, Keep::Normal)
    }

    pub(crate) fn save_kept(
        &self,
        store: &KvStore,
        seed: u64,
        num_blocks: usize,
        keep: Keep,
    ) -> Vec<BlockHash> {
        let hashes = chain(seed, num_blocks);
        self.fill(&hashes);
        let sequence = || self.sequence(&hashes, seed, keep);
        let mut rests = received(store.save(sequence()));
        while let Some(rest) = rests.pop() {
            runtime().block_on(store.room(&rest));
            rests.extend(received(store.save_rest(sequence(), rest)));
        }
        hashes
    }

    /// The sequence with which the pool was filled.
    fn sequence(&self, hashes: &[BlockHash], seed: u64, keep: Keep) -> SequenceBlocks<()> {
        SequenceBlocks {
            root: root(),
            hashes: hashes.into(),
            keeps: vec![keep; hashes.len()].into(),
            tokens: tokens(seed, hashes.len()).into(),
            blocks: (0..hashes.len() as u32).map(BlockId).collect(),
            has_ended: true,
            guard: (),
        }
    }
}

fn received(rests: oneshot::Receiver<Vec<SaveRest>>) -> Vec<SaveRest> {
    rests.blocking_recv().expect("few sequences wait")
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}

/// Memory of a device: the host sees copies, and errors when it has gone.
#[derive(Debug)]
struct FakeDevice(Arc<Mutex<Vec<u8>>>);

// SAFETY: there is no address to keep.
#[allow(unsafe_code)]
unsafe impl DeviceMemory for FakeDevice {
    fn device(&self) -> u32 {
        0
    }

    fn address(&self) -> Option<u64> {
        None
    }

    fn bind(&self) -> io::Result<()> {
        Ok(())
    }

    unsafe fn read(&self, offset: usize, bytes: &mut [u8]) -> io::Result<()> {
        let memory = self.0.lock().unwrap();
        bytes.copy_from_slice(memory.get(offset..offset + bytes.len()).ok_or(io::ErrorKind::BrokenPipe)?);
        Ok(())
    }

    unsafe fn write(&self, offset: usize, bytes: &[u8]) -> io::Result<()> {
        self.0.lock().unwrap()[offset..][..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn handle(&self) -> Option<[u8; 64]> {
        None
    }
}

#[test]
fn a_pool_on_a_device_is_saved_and_restored_by_copies() {
    let (pool, _) = Pool::on_device();
    let store = pool.open(8, None);
    let hashes = pool.save(&store, 1, 5);
    pool.fill(&chain(2, 10));
    let blocks: Vec<_> = (20..25).map(BlockId).collect();
    store.write_to_pool(&read(&store, &hashes), &blocks).expect("memory");
    assert!(blocks.iter().zip(&hashes).all(|(&block, &hash)| pool.holds(block, hash)));
}

#[test]
fn what_a_device_that_fails_keeps_from_all_tiers_counts_as_dropped() {
    let (pool, memory) = Pool::on_device();
    let tier = || Box::new(HostSlots::new(1 << 20, layout().block_bytes())) as Box<dyn Slots>;
    let store = pool.over(vec![tier(), tier()]);
    pool.save(&store, 1, 5);
    memory.lock().unwrap().clear();
    let lost = pool.sequence(&chain(2, 5), 2, Keep::Normal);
    assert!(received(store.save(lost)).is_empty());
    assert_eq!(store.counts().iter().map(|tier| tier.dropped).collect::<Vec<_>>(), [5, 5]);
}

pub(crate) fn read(store: &KvStore, hashes: &[BlockHash]) -> Vec<Arc<Record>> {
    store.read(hashes, Instant::now() + Duration::from_secs(60))
}

pub(crate) fn eventually(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn blocks_leave_the_pool_and_come_back() {
    let dir = tempfile::tempdir().expect("a directory");
    let pool = Pool::new();
    for (host_blocks, disk) in [(8, None), (0, Some(dir.path())), (2, Some(&*dir.path().join("other")))] {
        let store = pool.open(host_blocks, disk);
        let hashes = pool.save(&store, 1, 5);
        eventually("all are saved", || store.num_found(&hashes) == 5);
        pool.fill(&chain(2, 10));
        let records = read(&store, &hashes);
        let blocks: Vec<_> = (20..25).map(BlockId).collect();
        store.write_to_pool(&records, &blocks).expect("memory");
        assert!(blocks.iter().zip(&hashes).all(|(&block, &hash)| pool.holds(block, hash)));
        let counts = store.counts();
        assert_eq!(counts.iter().map(|tier| tier.hits).sum::<u64>(), 5);
        assert_eq!((counts[0].evictions, counts[0].damaged, counts[0].dropped), (0, 0, 0));
        assert_eq!(read(&store, &chain(3, 2)).len(), 0);
    }
}

#[test]
fn a_sequence_is_saved_once_and_its_new_end_later() {
    let pool = Pool::new();
    let store = pool.open(16, None);
    pool.save(&store, 1, 3);
    pool.save(&store, 1, 3);
    let hashes = pool.save(&store, 1, 6);
    eventually("all are saved", || store.num_found(&hashes) == 6);
    assert_eq!(store.counts()[0].writes, 6);
    let events = pool.events.lock().unwrap();
    let stored: Vec<_> = events.iter().flat_map(CacheEvent::blocks).map(|key| key.0).collect();
    assert_eq!(stored, hashes.iter().map(|hash| hash.short()).collect::<Vec<_>>());
}

#[test]
fn another_store_of_the_directory_tells_what_it_found_and_serves_it() {
    let dir = tempfile::tempdir().expect("a directory");
    let hashes = {
        let pool = Pool::new();
        let store = pool.open(0, Some(dir.path()));
        pool.save(&store, 1, 7)
    };
    let pool = Pool::new();
    let store = pool.open(4, Some(dir.path()));
    let told: usize = pool.events.lock().unwrap().iter().map(|event| event.blocks().len()).sum();
    assert_eq!((told, store.num_found(&hashes)), (7, 7));
    assert_eq!(read(&store, &hashes).len(), 7);
    assert_eq!(store.counts()[1].hits, 7);
}

#[test]
fn each_tier_tells_what_it_holds_and_what_its_reads_take() {
    let dir = tempfile::tempdir().expect("a directory");
    let pool = Pool::new();
    let told = Arc::new(Mutex::new(Vec::new()));
    let config = StoreConfig {
        host: Some(in_process(2 * layout().block_bytes() as u64)),
        disk: Some(DiskConfig { dir: dir.path().to_owned(), max_bytes: 1 << 20 }),
        ..StoreConfig::default()
    };
    let open = || {
        let told = told.clone();
        let tell = move |tier, events: Vec<CacheEvent>| told.lock().unwrap().push((tier, events));
        KvStore::open(&config, &format(), pool.storage.clone(), tell).expect("it opens")
    };
    let store = open();
    assert_eq!(*told.lock().unwrap(), [(0, vec![]), (1, vec![])], "both are named at once");
    let hashes = pool.save(&store, 1, 5);
    eventually("the disk has all", || store.counts()[1].writes == 5);
    let num_told = |wanted: usize| -> usize {
        let told = told.lock().unwrap();
        let of_tier = told.iter().filter(|(tier, _)| *tier == wanted).flat_map(|(_, events)| events);
        of_tier.map(|event| event.blocks().len()).sum()
    };
    assert_eq!([0, 1].map(num_told), [2, 5]);
    drop(store);

    told.lock().unwrap().clear();
    let store = open();
    assert_eq!([0, 1].map(num_told), [0, 5], "memory is empty again");
    assert_eq!([0, 1].map(|tier| store.counts()[tier].recall_token_seconds), [0.0, 0.0]);
    assert_eq!(read(&store, &hashes).len(), 5);
    let seconds = [0, 1].map(|tier| store.counts()[tier].recall_token_seconds);
    assert!(seconds[0] == 0.0 && seconds[1] > 0.0, "{seconds:?}");
}

#[test]
fn damage_is_a_counted_miss_that_is_told_and_saved_again() {
    let dir = tempfile::tempdir().expect("a directory");
    let pool = Pool::new();
    let hashes = {
        let store = pool.open(0, Some(dir.path()));
        pool.save(&store, 1, 4)
    };
    let slabs = dir.path().join("slabs");
    let mut bytes = std::fs::read(&slabs).expect("it is there");
    bytes[4096 + 5] ^= 1;
    std::fs::write(&slabs, bytes).expect("it is there");
    let store = pool.open(0, Some(dir.path()));
    pool.events.lock().unwrap().clear();
    assert_eq!(read(&store, &hashes).len(), 1, "the second block is damaged");
    assert_eq!((store.counts()[0].damaged, store.num_found(&hashes)), (1, 1));
    let removed: Vec<_> = pool.events.lock().unwrap().iter().flat_map(CacheEvent::blocks).copied().collect();
    assert_eq!(removed, [baton_kv_events::BlockKey(hashes[1].short())]);
    pool.save(&store, 1, 4);
    eventually("it is saved again", || read(&store, &hashes).len() == 4);
}

#[test]
fn the_end_of_a_sequence_is_read_up_to_the_first_damage() {
    let dir = tempfile::tempdir().expect("a directory");
    let pool = Pool::new();
    let hashes = {
        let store = pool.open(0, Some(dir.path()));
        pool.save(&store, 1, 6)
    };
    let slabs = dir.path().join("slabs");
    let mut bytes = std::fs::read(&slabs).expect("it is there");
    for block in [1, 2] {
        bytes[block * 4096 + 5] ^= 1;
    }
    std::fs::write(&slabs, bytes).expect("it is there");
    let store = pool.open(0, Some(dir.path()));
    let first = |hashes: &[BlockHash], num_wanted: usize| {
        let mut end = hashes.len();
        store.read_from_end(hashes, Instant::now() + Duration::from_secs(60), |first, records| {
            assert_eq!(first + records.len(), end, "piece by piece");
            assert!(records.iter().zip(&hashes[first..]).all(|(record, &hash)| record.name.hash == hash));
            end = first;
            hashes.len() - end < num_wanted
        });
        end
    };
    assert_eq!(first(&hashes, usize::MAX), 3, "the third block is damaged");
    assert_eq!((store.counts()[0].damaged, store.counts()[0].hits), (1, 3));
    // What is not all there is not read: its beginning would be computed, and its end be in vain.
    assert_eq!(first(&hashes, usize::MAX), 6);
    assert_eq!(first(&hashes[3..], 1), 0, "a piece has several blocks");
    assert_eq!(store.meeting(&hashes[3..], |num| Duration::from_secs(num as u64)), 2);
    assert_eq!(store.meeting(&hashes, |num| Duration::from_secs(num as u64)), 0);
}

#[test]
fn forgotten_blocks_are_a_miss_in_memory_and_on_disk_and_after_a_restart() {
    let dir = tempfile::tempdir().expect("a directory");
    let pool = Pool::new();
    for (host_blocks, disk) in [(8, None), (0, Some(dir.path())), (8, Some(&*dir.path().join("other")))] {
        let store = pool.open(host_blocks, disk);
        let (hashes, other) = (pool.save(&store, 1, 5), pool.save(&store, 2, 3));
        // A disk may not have written them yet.
        store.forget(hashes[2..].to_vec()).blocking_recv().expect("the store is open");
        let found = |store: &KvStore| [&hashes, &other].map(|hashes| store.num_found(hashes));
        assert_eq!((found(&store), read(&store, &hashes).len()), ([2, 3], 2));
        assert!(store.counts().iter().all(|tier| (tier.num_held, tier.damaged) == (5, 0)));
        drop(store);
        let store = pool.open(host_blocks, disk);
        assert_eq!(found(&store), if disk.is_some() { [2, 3] } else { [0, 0] });
        pool.save(&store, 1, 5);
        eventually("they are saved again", || read(&store, &hashes).len() == 5);
    }
}

#[test]
fn what_waits_for_a_disk_is_forgotten_as_well() {
    let hangs = Arc::new(AtomicBool::new(true));
    let pool = Pool::new();
    let store = pool.over(vec![Box::new(BadDisk { hangs: hangs.clone(), fails: false })]);
    let hashes = chain(1, NUM_QUEUED);
    pool.fill(&hashes);
    assert!(received(store.save(pool.sequence(&hashes, 1, Keep::Normal))).is_empty());
    let forgotten = store.forget(hashes[1..].to_vec());
    hangs.store(false, Ordering::Relaxed);
    forgotten.blocking_recv().expect("the store is open");
    let counts = store.counts()[0];
    assert_eq!((counts.writes as usize, counts.num_held), (NUM_QUEUED, 1));
}

/// A disk that can hang and fail.
#[derive(Debug)]
struct BadDisk {
    hangs: Arc<AtomicBool>,
    fails: bool,
}

impl Slots for BadDisk {
    fn name(&self) -> &'static str {
        "bad"
    }

    fn is_memory(&self) -> bool {
        false
    }

    fn num_slots(&self) -> u32 {
        1 << 20
    }

    fn record_bytes(&self) -> usize {
        layout().block_bytes()
    }

    fn write(&self, _: u32, _: &Arc<Record>) -> io::Result<()> {
        while self.hangs.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(1));
        }
        if self.fails { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    }

    fn read(&self, wanted: &[(u32, BlockHash)]) -> Vec<Result<Arc<Record>, ReadError>> {
        wanted.iter().map(|_| Err(io::Error::other("broken").into())).collect()
    }

    fn keep(&self, _: u32, _: Keep) -> io::Result<()> {
        Ok(())
    }

    fn take_found(&mut self) -> Vec<(u32, RecordName, Keep)> {
        Vec::new()
    }
}

#[test]
fn a_disk_that_hangs_keeps_no_blocks_and_what_it_cannot_take_is_dropped() {
    let hangs = Arc::new(AtomicBool::new(true));
    let pool = Pool::new();
    let store = pool.over(vec![Box::new(BadDisk { hangs: hangs.clone(), fails: false })]);
    let queue = NUM_QUEUED;
    let mut num_saved = 0;
    // Each returns although the disk hangs: more than the queue takes.
    for seed in 0..queue as u64 / 60 + 3 {
        let hashes = chain(seed, 60);
        pool.fill(&hashes);
        let rests = received(store.save(pool.sequence(&hashes, seed, Keep::Normal)));
        rests.into_iter().for_each(|rest| store.give_up(rest));
        num_saved += 60;
    }
    let dropped = store.counts()[0].dropped;
    assert!(dropped > 0 && store.counts()[0].writes == 0, "{dropped} of {num_saved}");
    hangs.store(false, Ordering::Relaxed);
    eventually("the queue is written", || store.counts()[0].writes as usize >= queue);
}

#[test]
fn what_a_disk_has_no_room_for_is_saved_later_from_where_it_ended() {
    let hangs = Arc::new(AtomicBool::new(true));
    let pool = Pool::new();
    let store = pool.over(vec![Box::new(BadDisk { hangs: hangs.clone(), fails: false })]);
    let queue = NUM_QUEUED;
    let runtime = runtime();
    let hashes = chain(1, 60);
    pool.fill(&hashes);
    let mut rests = received(store.save(pool.sequence(&hashes, 1, Keep::Normal)));
    // None that was queued is written yet, so none has given its room up.
    let room = |rest| {
        runtime.block_on(async { tokio::time::timeout(Duration::from_millis(20), store.room(rest)).await })
    };
    assert!(rests.len() == 1 && room(&rests[0]).is_err());
    hangs.store(false, Ordering::Relaxed);
    let mut num_pieces = 1;
    while let Some(rest) = rests.pop() {
        runtime.block_on(store.room(&rest));
        rests = received(store.save_rest(pool.sequence(&hashes, 1, Keep::Normal), rest));
        num_pieces += 1;
    }
    eventually("all is written", || store.num_found(&hashes) == 60);
    assert!((2..=2 * 60 / queue + 1).contains(&num_pieces), "{num_pieces}");
    assert_eq!((store.counts()[0].writes, store.counts()[0].dropped), (60, 0), "each once");
    eventually("the queue is empty", || store.shared.queue.available_permits() == queue);
    // The pool has lost the end of a sequence meanwhile.
    hangs.store(true, Ordering::Relaxed);
    let hashes = chain(2, 60);
    pool.fill(&hashes);
    let rest = received(store.save(pool.sequence(&hashes, 2, Keep::Normal))).pop().expect("a rest");
    let mut sequence = pool.sequence(&hashes, 2, Keep::Normal);
    sequence.blocks.truncate(1);
    assert!(received(store.save_rest(sequence, rest)).is_empty());
    assert_eq!(store.counts()[0].dropped as usize, 60 - queue);
    hangs.store(false, Ordering::Relaxed);
}

#[test]
fn a_full_disk_and_a_broken_one_are_counted_and_the_host_goes_on() {
    let pool = Pool::new();
    let bad = |fails| Box::new(BadDisk { hangs: Arc::default(), fails });
    let host = HostSlots::new(1 << 20, layout().block_bytes());
    let store = pool.over(vec![Box::new(host), bad(true)]);
    let hashes = pool.save(&store, 1, 5);
    eventually("every write failed", || store.counts()[1].write_errors == 5);
    assert_eq!(read(&store, &hashes).len(), 5);

    let store = pool.over(vec![bad(false)]);
    let hashes = pool.save(&store, 1, 5);
    eventually("all are written", || store.num_found(&hashes) == 5);
    assert_eq!(read(&store, &hashes).len(), 0);
    assert_eq!((store.counts()[0].read_errors, store.num_found(&hashes)), (1, 0));
}

#[test]
fn readers_and_writers_of_few_slots_never_meet_wrong_kv() {
    let dir = tempfile::tempdir().expect("a directory");
    let pool = Pool::new();
    let config = StoreConfig {
        host: Some(in_process(8 * layout().block_bytes() as u64)),
        disk: Some(DiskConfig { dir: dir.path().to_owned(), max_bytes: 4096 + 12 * (512 + 4096) }),
        ..StoreConfig::default()
    };
    let store = KvStore::open(&config, &format(), pool.storage.clone(), |_, _| ()).expect("it opens");
    let (is_over, num_right) = (AtomicBool::new(false), AtomicUsize::new(0));
    thread::scope(|scope| {
        for reader in 0..2 {
            let (store, is_over, num_right) = (&store, &is_over, &num_right);
            scope.spawn(move || {
                let mut random = baton_random::Random::new(reader);
                while !is_over.load(Ordering::Relaxed) {
                    let hashes = chain(random.below(6), 5);
                    for (record, &hash) in read(store, &hashes).iter().zip(&hashes) {
                        assert!(record.name.hash == hash && record.body() == body(hash), "wrong KV");
                        num_right.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
        // Until a reader has found some, also on a busy machine.
        let (mut nth, deadline) = (0, Instant::now() + Duration::from_secs(60));
        while nth < 600 || (num_right.load(Ordering::Relaxed) == 0 && Instant::now() < deadline) {
            pool.save(&store, nth % 6, 5);
            nth += 1;
        }
        is_over.store(true, Ordering::Relaxed);
    });
    let counts = store.counts();
    assert!(counts.iter().all(|tier| tier.evictions > 0 && tier.damaged == 0), "{counts:?}");
    assert!(num_right.into_inner() > 0, "every read found nothing");
}

#[test]
fn what_is_to_be_kept_is_kept_by_the_next_life_of_a_store() {
    let (pool, dir) = (Pool::new(), tempfile::tempdir().expect("a directory"));
    let store = pool.open(0, Some(dir.path()));
    let num_slots = store.counts()[0].num_slots as usize;
    let (num, high) = (num_slots / 4, Keep::High(Duration::from_secs(3600)));
    let kept = pool.save_kept(&store, 1, num, high);
    let normal = pool.save(&store, 2, num);
    // Said when it is on disk already.
    let later = pool.save(&store, 3, num);
    drop(store);
    let store = pool.open(0, Some(dir.path()));
    pool.save_kept(&store, 3, num, high);
    drop(store);
    let store = pool.open(0, Some(dir.path()));
    let found = || [&kept, &normal, &later].map(|hashes| store.num_found(hashes));
    assert_eq!(found(), [num; 3]);
    for nth in 1..=6 {
        pool.save(&store, 10 + nth, num);
        // The writer takes them one after the other.
        while store.counts()[0].writes < nth * num as u64 {
            thread::sleep(Duration::from_millis(1));
        }
    }
    assert_eq!(found(), [num, 0, num]);
}
