//! Workers that share a directory: whole stores of one process, slots of several threads, and processes that are killed.

use std::{
    collections::HashMap,
    env,
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt,
    path::Path,
    process::Child,
    sync::atomic::AtomicBool,
    thread,
    time::{Duration, Instant},
};

use baton_kv_cache::BlockHash;
use baton_kv_events::CacheEvent;
use baton_random::Random;
use tempfile::TempDir;

use baton_tier_policy::{Directory, SlotPlace};

use super::*;
use crate::{
    HostConfig, KvStore, StoreConfig, TierOpenError,
    store::tests::{Pool, eventually, read},
    testing::{body, chain, key, record, run_again, shape},
};

/// A slot takes a head, and a page of which the body of a block is a part.
const SLOT_BYTES: u64 = 512 + 4096;

fn room(num_slots: u64) -> u64 {
    4096 + num_slots * SLOT_BYTES
}

fn in_memory() -> TempDir {
    tempfile::tempdir_in("/dev/shm").expect("a directory in memory")
}

fn config(dir: &Path, num_slots: u64) -> StoreConfig {
    let host = HostConfig { max_bytes: room(num_slots), dir: Some(dir.to_owned()) };
    StoreConfig { host: Some(host), ..StoreConfig::default() }
}

/// A worker with a pool of its own.
struct Worker {
    pool: Pool,
    store: KvStore,
}

impl Worker {
    fn new(dir: &Path, num_slots: u64) -> Worker {
        let pool = Pool::new();
        let store = pool.try_open(&config(dir, num_slots)).expect("it opens");
        Worker { pool, store }
    }

    fn save(&self, seed: u64, num_blocks: usize) -> Vec<BlockHash> {
        self.pool.save(&self.store, seed, num_blocks)
    }

    /// Blocks that it holds by what it told.
    fn num_told(&self) -> usize {
        let num = |event: &CacheEvent| match event {
            CacheEvent::Stored { blocks, .. } => blocks.len() as isize,
            CacheEvent::Removed { blocks, .. } => -(blocks.len() as isize),
        };
        self.pool.events.lock().unwrap().iter().map(num).sum::<isize>() as usize
    }
}

#[test]
fn a_directory_that_another_user_may_change_is_refused() {
    let dir = in_memory();
    let base = dir.path().join("kv");
    let opened = || Pool::new().try_open(&config(&base, 8)).map(drop);
    let set_mode =
        |path: &Path, mode| fs::set_permissions(path, Permissions::from_mode(mode)).expect("it is ours");
    fs::create_dir(&base).expect("a directory");
    for (mode, is_fine) in [(0o777, false), (0o770, false), (0o1777, true), (0o755, true)] {
        set_mode(&base, mode);
        let result = opened();
        assert_eq!(result.is_ok(), is_fine, "{mode:o}: {result:?}");
        let refused = result.is_err_and(|error| error.to_string().contains("other users may change it"));
        assert_eq!(refused, !is_fine);
    }
    let own = fs::read_dir(&base)
        .expect("it can be read")
        .next()
        .expect("one was made")
        .expect("it is there")
        .path();
    set_mode(&own, 0o755);
    assert!(opened().unwrap_err().to_string().contains("other users may look into it"));
    // A link leads to a directory of ours that another user chose.
    let elsewhere = dir.path().join("elsewhere");
    fs::rename(&own, &elsewhere).expect("it is ours");
    set_mode(&elsewhere, 0o700);
    std::os::unix::fs::symlink(&elsewhere, &own).expect("a link");
    assert!(opened().unwrap_err().to_string().contains("it is no directory"));
}

#[test]
fn what_one_worker_saves_all_have_also_after_they_ended() {
    let dir = in_memory();
    let (one, other) = (Worker::new(dir.path(), 8), Worker::new(dir.path(), 8));
    let hashes = one.save(1, 5);
    let records = read(&other.store, &hashes);
    assert!(
        records.iter().zip(&hashes).all(|(record, &hash)| record.body() == body(hash)) && records.len() == 5
    );
    eventually("the other tells", || other.num_told() == 5);
    // Nothing is written twice.
    other.save(1, 5);
    eventually("looked at", || other.store.counts()[0].num_held == 5);
    assert_eq!([&one, &other].map(|worker| worker.store.counts()[0].writes), [5, 0]);
    drop((one, other));
    let later = Worker::new(dir.path(), 8);
    assert_eq!((read(&later.store, &hashes).len(), later.num_told()), (5, 5));
}

#[test]
fn what_one_worker_forgets_no_worker_has_nor_a_later_one() {
    let dir = in_memory();
    let (one, other) = (Worker::new(dir.path(), 8), Worker::new(dir.path(), 8));
    let hashes = one.save(1, 5);
    eventually("the other tells", || other.num_told() == 5);
    one.store.forget(hashes[1..].to_vec()).blocking_recv().expect("the store is open");
    for worker in [&one, &other] {
        assert_eq!(read(&worker.store, &hashes).len(), 1);
        assert_eq!((worker.num_told(), worker.store.counts()[0].damaged), (1, 0));
    }
    drop((one, other));
    let later = Worker::new(dir.path(), 8);
    assert_eq!((read(&later.store, &hashes).len(), later.num_told()), (1, 1));
    later.save(1, 5);
    eventually("it is saved again", || read(&later.store, &hashes).len() == 5);
}

#[test]
fn a_worker_makes_room_for_all_and_spares_what_others_use() {
    let dir = in_memory();
    let (one, other) = (Worker::new(dir.path(), 6), Worker::new(dir.path(), 6));
    let used = one.save(1, 3);
    let unused = one.save(2, 3);
    eventually("all is told", || other.num_told() == 6);
    // To the worker that makes room this was used longest ago.
    assert_eq!(read(&one.store, &used).len(), 3);
    let new = other.save(3, 3);
    for worker in [&one, &other] {
        eventually("the others made room", || read(&worker.store, &new).len() == 3);
        assert_eq!([&used, &unused].map(|hashes| read(&worker.store, hashes).len()), [3, 0]);
        eventually("it is told", || worker.num_told() == 6);
    }
    assert_eq!([&one, &other].map(|worker| worker.store.counts()[0].damaged), [0, 0]);
}

#[test]
fn what_is_to_be_kept_others_keep() {
    let dir = in_memory();
    let (one, other) = (Worker::new(dir.path(), 6), Worker::new(dir.path(), 6));
    let kept = one.pool.save_kept(&one.store, 1, 2, Keep::High(Duration::from_secs(60)));
    let later = Worker::new(dir.path(), 6);
    for worker in [&other, &later] {
        for seed in 2..6 {
            worker.save(seed, 4);
        }
        assert_eq!(read(&worker.store, &kept).len(), 2);
    }
}

/// Directories of tiers below this one.
fn num_dirs(base: &Path) -> usize {
    std::fs::read_dir(base).expect("it is there").count()
}

/// As if no process had used the tiers below this directory for an hour. Others may remove them meanwhile.
fn age(base: &Path) {
    for tier in fs::read_dir(base).into_iter().flatten().flatten() {
        let lock = fs::File::options().write(true).open(tier.path().join("lock"));
        let _ = lock.and_then(|lock| lock.set_modified(SystemTime::now() - Duration::from_secs(3600)));
    }
}

#[test]
fn each_format_and_size_has_its_own_slots_and_what_is_not_used_goes() {
    let base = in_memory();
    let six = Worker::new(base.path(), 6);
    let hashes = six.save(1, 3);
    let seven = Worker::new(base.path(), 7);
    assert!(read(&seven.store, &hashes).is_empty());
    let other_format = || {
        SharedSlots::open(base.path(), room(6), RecordShape { block_size: 8, ..shape() }).expect("it opens")
    };
    drop(other_format());
    assert_eq!(num_dirs(base.path()), 3, "a directory of its own is not removed");
    drop(six);
    let slots = other_format();
    slots.tidy();
    assert_eq!(num_dirs(base.path()), 3, "a worker that was killed finds them again");
    age(base.path());
    drop(other_format());
    assert_eq!(num_dirs(base.path()), 2, "six slots are in no use");
    drop(seven);
    assert_eq!(num_dirs(base.path()), 2);
    age(base.path());
    slots.tidy();
    assert_eq!(num_dirs(base.path()), 1);
    assert!(read(&Worker::new(base.path(), 6).store, &hashes).is_empty());
    // Other files are not touched.
    std::fs::write(base.path().join("baton-kv-"), "").expect("written");
    std::fs::create_dir_all(base.path().join("other/lock")).expect("made");
    // A process was killed while it removed one.
    std::fs::create_dir_all(base.path().join("baton-kv-removed-1-0")).expect("made");
    age(base.path());
    slots.tidy();
    assert_eq!(num_dirs(base.path()), 3);
}

#[test]
fn a_worker_that_uses_its_slots_says_so_and_those_that_none_uses_make_room_for_others() {
    let base = in_memory();
    drop(open(base.path(), 6));
    let seven = open(base.path(), 7);
    age(base.path());
    seven.tidy();
    assert_eq!(num_dirs(base.path()), 1);
    drop(seven);
    let eight = open(base.path(), 8);
    assert_eq!(num_dirs(base.path()), 2, "it was used a moment ago");
    let refused = SharedSlots::open(base.path(), 1 << 44, shape());
    assert!(matches!(refused, Err(StoreOpenError::Full { .. })), "{refused:?}");
    assert!(num_dirs(base.path()) == 1 && eight.dir.exists());
}

#[test]
fn a_directory_that_is_not_in_memory_or_too_small_is_refused_and_one_that_is_damaged_made_anew() {
    let base = in_memory();
    let open = |base: &Path, bytes| SharedSlots::open(base, bytes, shape());
    let on_disk = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a directory");
    let refused = open(&on_disk.path().join("new"), room(7));
    assert_eq!(num_dirs(on_disk.path()), 0);
    assert!(matches!(refused, Err(StoreOpenError::NotMemory { .. })), "{refused:?}");
    assert!(matches!(open(base.path(), 5000), Err(StoreOpenError::TooSmall { .. })));
    assert!(matches!(open(base.path(), 1 << 44), Err(StoreOpenError::Full { .. })));
    assert_eq!(num_dirs(base.path()), 0, "nothing is left");
    let worker = Worker::new(base.path(), 6);
    let hashes = worker.save(1, 3);
    drop(worker);
    let [dir] = &std::fs::read_dir(base.path())
        .expect("it is there")
        .flatten()
        .map(|entry| entry.path())
        .collect::<Vec<_>>()[..]
    else {
        panic!("one directory")
    };
    std::fs::write(dir.join("index"), "nothing").expect("written");
    assert!(read(&Worker::new(base.path(), 6).store, &hashes).is_empty());
}

#[test]
fn a_worker_for_which_those_in_use_leave_no_room_serves_without_the_tier() {
    let base = in_memory();
    let too_large = || {
        let host = HostConfig { max_bytes: 1 << 44, dir: Some(base.path().to_owned()) };
        Pool::new().try_open(&StoreConfig { host: Some(host), ..StoreConfig::default() })
    };
    let is_full = |opened: Result<KvStore, TierOpenError>| {
        matches!(opened, Err(TierOpenError::Dir(StoreOpenError::Full { .. })))
    };
    assert!(is_full(too_large()), "no worker will give back what is missing");
    let old = Worker::new(base.path(), 6);
    let new = too_large().expect("it opens");
    assert_eq!((new.num_targets(), new.counts().len()), (0, 0));
    assert!(read(&new, &old.save(1, 3)).is_empty());
    assert_eq!(num_dirs(base.path()), 1);
    drop((old, new));
    assert!(is_full(too_large()), "none uses it any more");
    assert_eq!(num_dirs(base.path()), 0);
}

#[test]
fn a_file_that_was_made_shorter_costs_the_tier_and_no_worker() {
    for (name, part) in ["index", "slabs", "words"].into_iter().flat_map(|name| [(name, 0), (name, 2)]) {
        let base = in_memory();
        let worker = Worker::new(base.path(), 6);
        let hashes = worker.save(1, 3);
        drop(worker);
        let path = open(base.path(), 6).dir.join(name);
        let file = fs::File::options().write(true).open(path).expect("it is there");
        let bytes = file.metadata().expect("it is there").len();
        file.set_len(bytes.checked_div(part).unwrap_or(0)).expect("shorter");
        let worker = Worker::new(base.path(), 6);
        assert!(read(&worker.store, &hashes).is_empty(), "{name}");
        worker.save(1, 3);
        eventually("it is saved again", || read(&worker.store, &hashes).len() == 3);
        assert_eq!(file.metadata().expect("it is there").len(), bytes, "{name}");
    }
}

#[test]
fn workers_that_start_and_end_at_the_same_time_have_whole_slots() {
    let base = in_memory();
    thread::scope(|scope| {
        for nth in 0..4 {
            let base = base.path();
            scope.spawn(move || {
                for round in 0..40 {
                    // Two sizes: each may remove the other's.
                    age(base);
                    let slots = open(base, 6 + (nth + round) % 2);
                    assert!(slots.dir.join("slabs").exists());
                    let slot = nth as u32;
                    if slots.claim(slot) {
                        slots.write(slot, &Arc::new(record(0, nth))).expect("there is room");
                    }
                }
            });
        }
    });
}

#[test]
fn a_worker_makes_the_slots_that_a_killed_one_had_not_made_yet() {
    let base = in_memory();
    let dir = open(base.path(), 6).dir;
    let lock = fs::File::open(dir.join("lock")).expect("it is there");
    for _ in 0..50 {
        // As after a kill while memory is reserved: the superblock is written last.
        fs::File::options()
            .write(true)
            .open(dir.join("index"))
            .and_then(|it| it.set_len(0))
            .expect("shorter");
        let is_open = AtomicBool::new(false);
        thread::scope(|scope| {
            // Others die all the time, so this one sees the lock taken, and free a moment later.
            scope.spawn(|| {
                while !is_open.load(Ordering::Relaxed) {
                    if lock.try_lock().is_ok() {
                        lock.unlock().expect("it was locked");
                    }
                }
            });
            let opened = SharedSlots::open(base.path(), room(6), shape()).map(drop);
            is_open.store(true, Ordering::Relaxed);
            opened.expect("it opens");
        });
    }
}

#[test]
fn the_host_tier_is_plain_also_where_what_leaves_the_machine_is_sealed() {
    let dir = in_memory();
    let plain = Worker::new(dir.path(), 6);
    let pool = Pool::new();
    let sealing = StoreConfig { key: Some(key(1)), ..config(dir.path(), 6) };
    let store = pool.try_open(&sealing).expect("it opens");
    let hashes = plain.save(1, 3);
    assert_eq!(read(&store, &hashes).len(), 3);
}

fn open(dir: &Path, num_slots: u64) -> SharedSlots {
    SharedSlots::open(dir, room(num_slots), shape()).expect("it opens")
}

#[test]
fn what_a_dead_worker_was_writing_is_free_and_what_a_live_one_writes_is_not() {
    let dir = in_memory();
    let (dead, live) = (open(dir.path(), 4), open(dir.path(), 4));
    assert!(dead.claim(1) && live.claim(2));
    assert_eq!(live.changes(), [(1, SlotChange::Taken)]);
    drop(dead);
    let new = open(dir.path(), 4);
    assert_eq!(new.changes(), [(1, SlotChange::Free), (2, SlotChange::Taken)]);
    assert!(!new.claim(2));
    assert_eq!(live.changes(), [(1, SlotChange::Free)]);
    assert!(new.claim(1), "as many numbers as workers");
    assert_ne!(new.number, live.number);
    // A worker that is taken for dead writes nothing of which others think that it is there.
    assert!(live.words.change(2, live.words.state(2), live.words.state(2).then(SlotUse::Free)));
    live.changes();
    assert!(live.write(2, &Arc::new(record(1, 1))).is_err());
    live.release(2);
    assert_eq!(live.words.state(2).slot_use(), SlotUse::Free);
}

#[test]
fn a_worker_that_is_stopped_while_it_claims_a_slot_keeps_no_other_from_saving() {
    let dir = in_memory();
    let (worker, stopped) = (Worker::new(dir.path(), 6), open(dir.path(), 6));
    let claimed = stopped.words.state(0).then(SlotUse::Writing(stopped.number));
    stopped.words.change_untold(0, claimed);
    let hashes = worker.save(1, 3);
    assert_eq!(worker.store.num_found(&hashes), 3);
    assert_eq!(stopped.words.state(0), claimed);
}

#[test]
fn workers_that_write_at_the_same_time_agree_and_never_read_wrong_kv() {
    const NUM_SLOTS: u64 = 24;
    let dir = in_memory();
    let workers: Vec<Worker> = (0..4).map(|_| Worker::new(dir.path(), NUM_SLOTS)).collect();
    thread::scope(|scope| {
        for (nth, worker) in workers.iter().enumerate() {
            scope.spawn(move || {
                let mut random = Random::new(nth as u64);
                let until = Instant::now() + Duration::from_millis(700);
                while Instant::now() < until {
                    let (seed, num_blocks) = (random.below(8), 1 + random.below(6) as usize);
                    if random.below(2) == 0 {
                        worker.save(seed, num_blocks);
                        continue;
                    }
                    let hashes = chain(seed, num_blocks);
                    for (record, &hash) in read(&worker.store, &hashes).iter().zip(&hashes) {
                        assert!(record.name.hash == hash && record.body() == body(hash), "wrong KV");
                    }
                }
            });
        }
    });
    let found =
        |worker: &Worker| (0..8).map(|seed| worker.store.num_found(&chain(seed, 6))).collect::<Vec<_>>();
    let agreed = found(&workers[0]);
    assert!(agreed.iter().sum::<usize>() > 0);
    for worker in &workers {
        assert_eq!(found(worker), agreed);
        let counts = &worker.store.counts()[0];
        assert_eq!((counts.damaged, counts.write_errors), (0, 0));
        eventually("it is told", || worker.num_told() as u64 == worker.store.counts()[0].num_held);
    }
}

const DIR: &str = "BATON_TEST_KILLED_SHARER";
const NUM_SLOTS: u64 = 12;

/// Not a test of its own: a process that [`killed_workers_cost_no_slot_and_leave_whole_records`] kills.
#[test]
#[ignore = "the child of another test"]
fn killed_sharer() {
    let Ok(dir) = env::var(DIR) else { return };
    let mut slots = open(Path::new(&dir), NUM_SLOTS);
    let mut directory = Directory::new(&[NUM_SLOTS as u32]);
    for (slot, name, keep) in slots.take_found() {
        directory.restore(SlotPlace { tier: 0, slot }, name.hash, name.block_before(), keep);
    }
    let records: Vec<_> = (0..32).map(|idx| Arc::new(record(idx % 4, idx as u64 / 4))).collect();
    let mut random = Random::new(u64::from(std::process::id()));
    loop {
        let record = &records[random.below(32) as usize];
        directory.follow(0, slots.changes());
        directory.take_doubles(0).into_iter().for_each(|slot| slots.give_up(slot));
        let slot = directory.begin_write(0, record.name.hash, record.name.block_idx, Keep::Normal);
        let Some(slot) = slot else { continue };
        let place = SlotPlace { tier: 0, slot };
        if slots.claim(slot) {
            slots.write(slot, record).expect("there is room");
            directory.end_write(place, record.name.block_before());
        } else {
            directory.fail_write(place);
        }
    }
}

fn start(dir: &Path) -> Child {
    run_again("shared::tests::killed_sharer", DIR, dir)
}

fn kill(num_kills: u64) -> usize {
    let dir = in_memory();
    let mut slots = open(dir.path(), NUM_SLOTS);
    assert!(slots.take_found().is_empty());
    let mut children: Vec<Child> = (0..3).map(|_| start(dir.path())).collect();
    let mut random = Random::new(1);
    let (mut num_right, mut held) = (0, HashMap::new());
    for nth in 0..num_kills {
        let until = Instant::now() + Duration::from_micros(20_000 + random.below(30_000));
        while Instant::now() < until {
            for (slot, change) in slots.changes() {
                match change {
                    SlotChange::Holds { hash, .. } => held.insert(slot, hash),
                    _ => held.remove(&slot),
                };
            }
            for (&slot, &hash) in &held {
                // Another process may write it meanwhile.
                let Ok(record) = slots.read(&[(slot, hash)]).remove(0) else { continue };
                assert!(record.body() == body(hash), "kill {nth}: wrong KV");
                num_right += 1;
            }
        }
        let child = &mut children[random.below(3) as usize];
        child.kill().expect("it writes until it is killed");
        child.wait().expect("it is killed");
        *child = start(dir.path());
    }
    for child in &mut children {
        child.kill().expect("it writes until it is killed");
        child.wait().expect("it is killed");
    }
    let mut slots = open(dir.path(), NUM_SLOTS);
    assert_eq!(slots.num_damaged(), 0);
    for (slot, name, _) in slots.take_found() {
        let read = slots.read(&[(slot, name.hash)]).remove(0).expect("whole");
        assert!(read.body() == body(name.hash), "wrong KV");
    }
    let is_written = |slot| matches!(slots.words.state(slot).slot_use(), SlotUse::Writing(_));
    assert!(!(0..NUM_SLOTS as u32).any(is_written), "a slot is lost");
    num_right
}

#[test]
fn killed_workers_cost_no_slot_and_leave_whole_records() {
    assert!(kill(12) > 0);
}

#[test]
#[ignore = "a minute; by hand"]
fn a_thousand_killed_workers_cost_no_slot() {
    println!("{} records were read while 1000 workers were killed", kill(1000));
}
