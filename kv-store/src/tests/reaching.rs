//! Pools that read host memory themselves: of a device that reaches it, and in host memory.

use std::{os::unix::fs::FileExt, ptr::NonNull, sync::atomic::AtomicUsize};

use baton_kv_cache::{BlockKernels, DeviceCopy, HostAccess, KvDtype, KvLayout, WireCodec};

use super::*;

/// Blocks of one page.
const LAYOUT: KvLayout =
    KvLayout { block_size: BLOCK_SIZE, num_layers: 2, num_kv_heads: 2, head_dim: 32, dtype: KvDtype::F32 };

/// A device that reads and writes host memory itself, as a GPU does, and flips a bit when it is told to.
#[derive(Debug)]
struct Device {
    memory: BlockStorage,
    kernels: Mutex<Box<dyn BlockKernels>>,
}

/// Counts down to the copy that is wrong.
#[derive(Debug)]
struct Kernels {
    wrong_in: Arc<AtomicUsize>,
}

impl Device {
    /// The copy that `wrong_in` counts down to is wrong.
    fn storage(num_blocks: usize, wrong_in: &Arc<AtomicUsize>) -> Arc<BlockStorage> {
        let kernels = Kernels { wrong_in: wrong_in.clone() };
        let memory = BlockStorage::new(LAYOUT, num_blocks).expect("memory");
        let device = Device { memory, kernels: Mutex::new(Box::new(kernels)) };
        Arc::new(BlockStorage::on_device(Box::new(device), LAYOUT, num_blocks))
    }
}

// SAFETY: the storage stays where it is.
#[allow(unsafe_code)]
unsafe impl DeviceMemory for Device {
    fn device(&self) -> u32 {
        0
    }

    fn address(&self) -> Option<u64> {
        Some(self.memory.address())
    }

    fn bind(&self) -> io::Result<()> {
        Ok(())
    }

    unsafe fn read(&self, _: usize, _: &mut [u8]) -> io::Result<()> {
        unreachable!("it has kernels")
    }

    unsafe fn write(&self, offset: usize, bytes: &[u8]) -> io::Result<()> {
        let to = (self.memory.address() as usize + offset) as *mut u8;
        // SAFETY: in bounds, and not used otherwise, by the caller's word.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    fn handle(&self) -> Option<[u8; 64]> {
        None
    }

    unsafe fn access_host(&self, _: NonNull<u8>, _: usize) -> io::Result<Option<HostAccess>> {
        Ok(Some(Box::new(())))
    }

    fn kernels(&self) -> Option<&Mutex<Box<dyn BlockKernels>>> {
        Some(&self.kernels)
    }
}

#[allow(unsafe_code)]
impl BlockKernels for Kernels {
    /// For the test alone: records come by copies.
    unsafe fn gather(&mut self, places: &[u64], bytes: &mut [u8]) -> io::Result<()> {
        let len = bytes.len() / places.len();
        for (&place, bytes) in places.iter().zip(bytes.chunks_exact_mut(len)) {
            // SAFETY: there, and not written meanwhile, by the caller's word.
            unsafe { std::ptr::copy_nonoverlapping(place as *const u8, bytes.as_mut_ptr(), len) };
        }
        Ok(())
    }

    unsafe fn scatter(&mut self, _: &[u64], _: &[u8]) -> io::Result<()> {
        unreachable!("the device reads from the host itself")
    }

    unsafe fn copy(&mut self, _: usize, copies: &[DeviceCopy]) -> io::Result<()> {
        for &DeviceCopy { source, target, len } in copies {
            // SAFETY: there, and not used meanwhile, by the caller's word.
            unsafe { std::ptr::copy_nonoverlapping(source as *const u8, target as *mut u8, len) };
            if self.wrong_in.fetch_sub(1, Ordering::Relaxed) == 1 {
                // SAFETY: as above.
                unsafe { *(target as *mut u8).add(len / 2) ^= 1 };
            }
        }
        Ok(())
    }

    fn settle(&mut self) -> io::Result<()> {
        Ok(())
    }

    unsafe fn checksums(&mut self, places: &[u64], len: usize, seed: u64) -> io::Result<Option<Vec<u64>>> {
        // SAFETY: as above.
        let bytes = |&place: &u64| unsafe { std::slice::from_raw_parts(place as *const u8, len) };
        let sum = |place| xxhash_rust::xxh3::xxh3_64_with_seed(bytes(place), seed);
        Ok(Some(places.iter().map(sum).collect()))
    }

    unsafe fn gather_coded(
        &mut self,
        _: &WireCodec,
        _: &[u64],
        _: &mut [u8],
        _: u64,
    ) -> io::Result<Option<Vec<u64>>> {
        unreachable!("nothing is encoded")
    }

    unsafe fn scatter_coded(&mut self, _: &WireCodec, _: &[u64], _: &[u8]) -> io::Result<bool> {
        unreachable!("nothing is encoded")
    }
}

/// A store over a device that reads host memory itself, with a host tier of eight blocks.
struct Reaching {
    pool: Pool,
    store: KvStore,
    /// The copy after so many is wrong.
    wrong_in: Arc<AtomicUsize>,
}

impl Reaching {
    fn new() -> Reaching {
        Reaching::over(None)
    }

    /// With a host tier in this directory.
    fn over(dir: Option<&Path>) -> Reaching {
        let wrong_in = Arc::new(AtomicUsize::new(0));
        Reaching::with(Device::storage(64, &wrong_in), dir, wrong_in)
    }

    fn with(storage: Arc<BlockStorage>, dir: Option<&Path>, wrong_in: Arc<AtomicUsize>) -> Reaching {
        let pool = Pool { storage, events: Arc::default() };
        let config = StoreConfig {
            host: Some(match dir {
                None => in_process(8 * LAYOUT.block_bytes() as u64),
                Some(dir) => HostConfig {
                    max_bytes: 4096 + 8 * (512 + LAYOUT.block_bytes() as u64),
                    dir: Some(dir.to_owned()),
                },
            }),
            ..StoreConfig::default()
        };
        let format = KvFormat::new("model".into(), &LAYOUT, "theta=1".into());
        let store = KvStore::open(&config, &format, pool.storage.clone(), |_, _| ()).expect("it opens");
        Reaching { pool, store, wrong_in }
    }

    /// Restores what the tier has of a sequence to blocks 20 and later. Returns the number of blocks that are whole.
    fn restore(&self, hashes: &[BlockHash]) -> usize {
        let blocks: Vec<_> = (20..).map(BlockId).take(hashes.len()).collect();
        self.pool.fill(&chain(99, 40));
        let records = read(&self.store, hashes);
        let num_whole = self.store.write_to_pool(&records, &blocks).expect("the device works");
        let mut restored = blocks.iter().zip(hashes).take(num_whole);
        assert!(restored.all(|(&block, &hash)| self.pool.holds(block, hash)));
        num_whole
    }
}

#[test]
fn a_device_that_reaches_the_host_moves_blocks_itself_and_verifies_them() {
    let at = Reaching::new();
    let hashes = at.pool.save(&at.store, 1, 5);
    assert_eq!((at.store.batch(&hashes).len(), at.restore(&hashes)), (5, 5));
    // The second of the five copies back.
    at.wrong_in.store(2, Ordering::Relaxed);
    assert_eq!(at.restore(&hashes), 1);
    assert_eq!((at.store.counts()[0].damaged, at.store.num_found(&hashes)), (1, 1));
    assert_eq!(at.restore(&hashes), 1);
    at.pool.save(&at.store, 1, 5);
    assert_eq!(at.restore(&hashes), 5, "saved again");
}

#[test]
fn a_device_reads_what_another_worker_saved_in_shared_memory_and_verifies_it() {
    let dir = tempfile::tempdir_in("/dev/shm").expect("a directory in memory");
    let [one, other] = [(), ()].map(|()| Reaching::over(Some(dir.path())));
    let hashes = one.pool.save(&one.store, 1, 5);
    assert_eq!((other.store.batch(&hashes).len(), other.restore(&hashes)), (5, 5));
    other.wrong_in.store(2, Ordering::Relaxed);
    assert_eq!(other.restore(&hashes), 1);
    assert_eq!((other.store.counts()[0].damaged, other.store.num_found(&hashes)), (1, 1));
    // What is replaced before it is copied is a miss, and damage to none.
    let records = read(&one.store, &hashes);
    one.pool.save(&one.store, 2, 8);
    let blocks: Vec<_> = (20..25).map(BlockId).collect();
    let num_whole = one.store.write_to_pool(&records, &blocks).expect("the device works");
    assert!(num_whole < hashes.len(), "some are replaced");
    assert!(blocks.iter().zip(&hashes).take(num_whole).all(|(&block, &hash)| one.pool.holds(block, hash)));
    assert_eq!(one.store.counts()[0].damaged, 0);
}

#[test]
fn a_pool_in_host_memory_reads_shared_memory_itself_and_verifies_it() {
    let dir = tempfile::tempdir_in("/dev/shm").expect("a directory in memory");
    let [one, other] = [(), ()].map(|()| {
        let storage = BlockStorage::new(LAYOUT, 64).expect("memory");
        Reaching::with(Arc::new(storage), Some(dir.path()), Arc::default())
    });
    let hashes = one.pool.save(&one.store, 1, 5);
    assert_eq!(other.restore(&hashes), 5);
    assert!(read(&other.store, &hashes).iter().all(|record| record.as_reached().is_some()));
    // A byte of the second block, which is in the second slot.
    let tier = std::fs::read_dir(dir.path()).expect("it is there").flatten().next().expect("one tier").path();
    let slabs =
        std::fs::File::options().read(true).write(true).open(tier.join("slabs")).expect("it is there");
    let (mut byte, at) = ([0], LAYOUT.block_bytes() as u64 + 77);
    slabs.read_exact_at(&mut byte, at).expect("it is long enough");
    slabs.write_all_at(&[byte[0] ^ 8], at).expect("it is long enough");
    assert_eq!(other.restore(&hashes), 1);
    assert_eq!((other.store.counts()[0].damaged, other.store.num_found(&hashes)), (1, 1));
    assert_eq!(other.restore(&hashes), 1);
}

#[test]
fn while_readers_keep_what_is_in_no_slot_any_more_nothing_is_saved() {
    let Reaching { pool, store, .. } = &Reaching::new();
    let kept = [1, 2].map(|seed| read(store, &pool.save(store, seed, 8)));
    assert!(kept.iter().all(|records| records.len() == 8));
    let hashes = pool.save(store, 3, 8);
    assert_eq!((store.counts()[0].dropped, store.num_found(&hashes)), (8, 0));
    drop(kept);
    assert_eq!(store.num_found(&pool.save(store, 3, 8)), 8);
}

#[test]
fn without_room_of_the_device_memory_goes_without_and_a_disk_gets_all_later() {
    let pool = Pool { storage: Device::storage(64, &Arc::default()), events: Arc::default() };
    let hangs = Arc::new(AtomicBool::new(false));
    let host = HostSlots::new(8 * LAYOUT.block_bytes() as u64, LAYOUT.block_bytes());
    let tiers: Vec<Box<dyn Slots>> =
        vec![Box::new(host), Box::new(BadDisk { hangs: hangs.clone(), fails: false })];
    // As if readers kept the rest.
    let room = room_for(&pool.storage, 8 + NUM_QUEUED);
    let store = KvStore::over(tiers, None, pool.storage.clone(), room, NUM_QUEUED, &[], Box::new(|_, _| ()));
    pool.save(&store, 1, 8);
    let is_idle = || store.shared.queue.available_permits() == NUM_QUEUED;
    eventually("the memory is full", || store.counts()[1].writes == 8 && is_idle());

    hangs.store(true, Ordering::Relaxed);
    let (long, other) = (chain(2, 20), chain(3, 8));
    let sequence = |seed, hashes: &[BlockHash]| {
        pool.fill(hashes);
        pool.sequence(hashes, seed, Keep::Normal)
    };
    let rests = received(store.save_rest(sequence(2, &long), SaveRest { target: 1, first: 0, end: 20 }));
    assert_eq!(rests.iter().map(|rest| (rest.first, rest.end)).collect::<Vec<_>>(), [(NUM_QUEUED, 20)]);
    let others = received(store.save(sequence(3, &other)));
    assert_eq!(others.iter().map(|rest| (rest.target, rest.first)).collect::<Vec<_>>(), [(1, 0)]);
    assert_eq!([0, 1].map(|tier| store.counts()[tier].dropped), [8, 0]);

    hangs.store(false, Ordering::Relaxed);
    for (seed, hashes, mut rests) in [(2, long, rests), (3, other, others)] {
        while let Some(rest) = rests.pop() {
            runtime().block_on(store.room(&rest));
            rests = received(store.save_rest(sequence(seed, &hashes), rest));
        }
    }
    eventually("all is written", || store.counts()[1].writes == 8 + 20 + 8);
    assert_eq!(store.counts()[1].dropped, 0);
}

#[test]
fn a_device_has_room_for_all_that_waits_beside_a_full_host_tier() {
    let [disk, object] = [(), ()].map(|()| tempfile::tempdir().expect("a directory"));
    let pool = Pool { storage: Device::storage(64, &Arc::default()), events: Arc::default() };
    let config = StoreConfig {
        host: Some(in_process(8 * LAYOUT.block_bytes() as u64)),
        disk: Some(DiskConfig { dir: disk.path().to_owned(), max_bytes: 1 << 20 }),
        object: Some(ObjectConfig {
            url: format!("file://{}", object.path().display()),
            worker: "worker".into(),
            max_bytes: 1 << 20,
        }),
        key: None,
    };
    let format = KvFormat::new("model".into(), &LAYOUT, "theta=1".into());
    let store = KvStore::open(&config, &format, pool.storage.clone(), |_, _| ()).expect("it opens");
    let num_free = store.shared.room.as_ref().expect("the device reaches it").num_free();
    assert!(num_free > 8 + 2 * num_queued(&pool.storage), "{num_free}");
}
