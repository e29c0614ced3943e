use std::{
    fs::File,
    sync::Arc,
    thread,
    time::{Duration, Instant, SystemTime},
};

use baton_cost::LinkLine;
use baton_kv_cache::BlockHash;
use baton_kv_events::Keep;
use object_store::path::Path;

use super::{
    super::{ObjectConfig, ObjectOpenError, ObjectTier, SegmentReader, catalogue::Catalogue},
    lying::{Lie, LyingStore},
};
use crate::{
    record::RecordShape,
    store::tests::Pool,
    testing::{body, chain, key, record, shape},
};

const NUM_BLOCKS: usize = 6;

fn open_sealed(store: &LyingStore, worker: &str, max_bytes: u64, shape: RecordShape) -> ObjectTier {
    let config = ObjectConfig { url: String::new(), worker: worker.into(), max_bytes };
    ObjectTier::over(Arc::new(store.clone()), Path::from("kv"), &config, shape, 1 << 10)
}

fn open(store: &LyingStore, worker: &str) -> ObjectTier {
    open_sealed(store, worker, 1 << 20, shape())
}

/// A sequence is used twice, and its second use is written.
fn save(tier: &ObjectTier, seed: u64) -> Vec<BlockHash> {
    let hashes = chain(seed, NUM_BLOCKS);
    assert!(hashes.iter().all(|&hash| !tier.admit(hash, Keep::Normal)), "the first use");
    for (idx, &hash) in hashes.iter().enumerate() {
        assert!(tier.admit(hash, Keep::Normal) && tier.write(Arc::new(record(idx, seed))));
    }
    hashes
}

fn eventually(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        thread::sleep(Duration::from_millis(5));
    }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

/// What is read is right, and so many blocks.
fn num_right(tier: &ObjectTier, hashes: &[BlockHash], until: Instant) -> usize {
    let records = tier.read(hashes, until);
    assert!(records.iter().zip(hashes).all(|(record, &hash)| record.body() == body(hash)), "wrong KV");
    records.len()
}

/// What is read from the end is right, and the index of the first block that came.
fn first_right(tier: &ObjectTier, hashes: &[BlockHash], until: Instant) -> usize {
    let mut end = hashes.len();
    let is_whole = tier.read_from_end(hashes, until, |first, records| {
        assert_eq!(first + records.len(), end, "piece by piece");
        let mut pairs = records.iter().zip(&hashes[first..]);
        assert!(pairs.all(|(record, &hash)| record.body() == body(hash)), "wrong KV");
        end = first;
        true
    });
    assert_eq!(is_whole, end == 0);
    end
}

/// A store with one sequence, and a tier of another worker that has found and measured it.
fn filled() -> (LyingStore, ObjectTier, Vec<BlockHash>) {
    let store = LyingStore::default();
    let hashes = {
        let writer = open(&store, "writer");
        // Dropping it writes what waits.
        save(&writer, 1)
    };
    let reader = open(&store, "reader");
    eventually("found and measured", || {
        hashes.iter().all(|&hash| reader.holds(hash)) && reader.speed().is_some()
    });
    (store, reader, hashes)
}

#[test]
fn what_one_worker_writes_another_finds_and_reads() {
    let (store, reader, hashes) = filled();
    assert_eq!(num_right(&reader, &hashes, soon()), NUM_BLOCKS);
    assert_eq!(num_right(&reader, &hashes[2..5], soon()), 3);
    assert_eq!(num_right(&reader, &chain(2, 3), soon()), 0);
    let counts = reader.counts();
    assert_eq!((counts.hits, counts.damaged, counts.read_errors), (9, 0, 0));
    assert_eq!((counts.num_held, store.num_puts()), (0, 1), "one segment, of the other");
    // It has them: they are not written again.
    assert!(hashes.iter().chain(&hashes).all(|&hash| !reader.admit(hash, Keep::Normal)));
    assert_eq!(open(&store, "reader").counts().num_held, 0);
}

#[test]
fn workers_that_share_a_store_name_it_alike_and_tell_what_it_has_and_how_fast() {
    let (store, reader, hashes) = filled();
    let name = |tier: &ObjectTier| tier.counts().store_name;
    let writer = open(&store, "writer");
    assert_eq!(name(&reader), name(&writer));
    let sealed = |nth| open_sealed(&store, "sealed", 1 << 20, RecordShape { key: Some(key(nth)), ..shape() });
    assert!(name(&reader) != name(&sealed(1)), "it reads none of theirs");
    assert!(name(&sealed(1)) == name(&sealed(1)) && name(&sealed(1)) != name(&sealed(2)));

    let mut told = SegmentReader::default();
    let changes = reader.changes(&mut told).expect("a segment");
    assert_eq!((changes.added.len(), &changes.added[0].1, changes.is_current), (1, &hashes, true));
    assert_eq!(reader.changes(&mut told), None);
    let counts = reader.counts();
    assert!(counts.recall_token_seconds > 0.0, "{counts:?}");
    // Without a measurement it has no time.
    reader.shared.speed().line = None;
    let counts = reader.counts();
    assert_eq!((counts.recall_token_seconds, counts.recall_latency_seconds), (0.0, 0.0));
}

#[test]
fn all_of_a_sequence_is_written_however_few_records_wait() {
    const NUM_QUEUED: usize = 4;
    const NUM_SAVED: usize = 60;
    let store = LyingStore::default();
    let config = ObjectConfig { url: String::new(), worker: "one".into(), max_bytes: 1 << 20 };
    let tier = ObjectTier::over(Arc::new(store.clone()), Path::from("kv"), &config, shape(), NUM_QUEUED);
    let pool = Pool::new();
    let saves = pool.over_object(tier);
    // The second use is written.
    pool.save(&saves, 1, NUM_SAVED);
    let hashes = pool.save(&saves, 1, NUM_SAVED);
    let counts = || saves.counts().pop().expect("one tier");
    eventually("all is written", || counts().writes as usize == NUM_SAVED);
    assert_eq!(counts().dropped, 0);
    let reader = open(&store, "reader");
    eventually("found", || hashes.iter().all(|&hash| reader.holds(hash)));
    assert_eq!(num_right(&reader, &hashes, soon()), NUM_SAVED);
}

#[test]
fn room_for_less_than_a_segment_is_refused() {
    let config = ObjectConfig { url: "s3://kv".into(), worker: "one".into(), max_bytes: 1000 };
    let refused = ObjectTier::open(&config, shape(), 1 << 10);
    assert!(matches!(refused, Err(ObjectOpenError::TooSmall { max_bytes: 1000, .. })), "{refused:?}");
}

#[test]
fn what_a_killed_worker_left_of_a_segment_is_removed_from_its_directory() {
    let root = tempfile::tempdir().expect("a directory");
    let url = format!("file://{}", root.path().display());
    let config = ObjectConfig { url, worker: "one".into(), max_bytes: 1 << 20 };
    let open = || ObjectTier::open(&config, shape(), 1 << 10).expect("the directory can be used");
    let tier = open();
    let hashes = save(&tier, 1);
    let dir = root.path().join(tier.shared.own_dir.to_string());
    // Dropping it writes what waits.
    drop(tier);
    let hour = Duration::from_secs(3600);
    let (old, new) = (SystemTime::now() - hour, SystemTime::now() + hour);
    for (name, written) in [("0-0#1", old), ("0-1#12", old), ("0-2#1", new), ("0-3#x", old)] {
        File::create(dir.join(name)).and_then(|file| file.set_modified(written)).expect("a file");
    }
    let tier = open();
    let is_there = |name: &str| dir.join(name).exists();
    assert_eq!(["0-0#1", "0-1#12", "0-2#1", "0-3#x"].map(is_there), [false, false, true, true]);
    eventually("the segment is found", || hashes.iter().all(|&hash| tier.holds(hash)));
}

#[test]
fn a_worker_finds_its_own_segments_again_and_deletes_the_oldest_of_them() {
    let store = LyingStore::default();
    // A segment takes a quarter of the room: half of a sequence.
    let num_records = NUM_BLOCKS / 2;
    let room = 4 * (shape().manifest_bytes(num_records) + num_records * shape().record_bytes()) as u64;
    let mut saved = Vec::new();
    for seed in 0..4 {
        let tier = open_sealed(&store, "one", room, shape());
        eventually("the segments of earlier lives", || {
            tier.counts().num_held == NUM_BLOCKS as u64 * seed.min(2)
        });
        saved.push(save(&tier, seed));
    }
    let tier = open_sealed(&store, "other", room, shape());
    eventually("two are left", || saved[2..].iter().flatten().all(|&hash| tier.holds(hash)));
    assert!(saved[..2].iter().flatten().all(|&hash| !tier.holds(hash)));
}

#[test]
fn a_tier_whose_index_is_full_writes_on_and_deletes_the_oldest() {
    const NUM_SEQUENCES: usize = 16;
    let tier = open(&LyingStore::default(), "one");
    *tier.shared.lock() = Catalogue::new(NUM_SEQUENCES * NUM_BLOCKS);
    let holds = |hashes: &[BlockHash]| hashes.iter().all(|&hash| tier.holds(hash));
    // All but a sixteenth.
    let old: Vec<_> = (1..NUM_SEQUENCES as u64).flat_map(|seed| save(&tier, seed)).collect();
    eventually("the index is full", || holds(&old));
    let new = save(&tier, 0);
    eventually("there is room", || holds(&new) && tier.counts().evictions > 0);
    assert!(!holds(&old));
}

#[test]
fn lies_are_counted_misses() {
    for (lie, num_whole) in
        [(Lie::Short, NUM_BLOCKS - 1), (Lie::FlippedBit(0), NUM_BLOCKS / 2), (Lie::OtherRange, 0)]
    {
        let (store, reader, hashes) = filled();
        store.tell(lie);
        assert_eq!(num_right(&reader, &hashes, soon()), num_whole, "{lie:?}");
        assert_eq!(reader.counts().damaged, 1, "{lie:?}");
        // The others are still there, and that one is forgotten.
        store.tell(Lie::Nothing);
        assert!(!reader.holds(hashes[num_whole]) && reader.speed().is_some());
        assert_eq!(num_right(&reader, &hashes, soon()), num_whole);
    }
}

#[test]
fn what_is_read_from_the_end_is_whole_up_to_the_first_lie() {
    for (lie, first, num_damaged, num_errors) in [
        (Lie::Nothing, 0, 0, 0),
        (Lie::Short, NUM_BLOCKS, 1, 0),
        (Lie::FlippedBit(0), NUM_BLOCKS / 2 + 1, 1, 0),
        (Lie::OtherRange, NUM_BLOCKS, 1, 0),
        (Lie::Fails, NUM_BLOCKS, 0, 1),
        (Lie::Vanished, NUM_BLOCKS, 0, 1),
    ] {
        let (store, reader, hashes) = filled();
        store.tell(lie);
        assert_eq!(first_right(&reader, &hashes, soon()), first, "{lie:?}");
        let counts = reader.counts();
        assert_eq!((counts.damaged, counts.read_errors), (num_damaged, num_errors), "{lie:?}");
        assert_eq!(counts.hits as usize, NUM_BLOCKS - first, "{lie:?}");
    }
    // No prompt waits for it: one that hangs is given up when computing is over.
    let (store, reader, hashes) = filled();
    store.tell(Lie::Hangs);
    assert_eq!(first_right(&reader, &hashes, Instant::now() + Duration::from_millis(50)), NUM_BLOCKS);
    assert_eq!(reader.counts().read_errors, 0);
    store.tell(Lie::Nothing);
    assert!(!reader.read_from_end(&hashes, soon(), |_, _| false), "the taker has enough");
    let longer = [&hashes[..], &chain(2, 1)].concat();
    assert!(!reader.read_from_end(&longer, soon(), |_, _| unreachable!("its end is not there")));
}

#[test]
fn a_store_that_fails_or_hangs_is_not_waited_for_until_it_was_measured_again() {
    for lie in [Lie::Fails, Lie::Hangs, Lie::Slow(Duration::from_secs(3600))] {
        let (store, reader, hashes) = filled();
        store.tell(lie);
        let started = Instant::now();
        assert_eq!(num_right(&reader, &hashes, Instant::now() + Duration::from_millis(50)), 0, "{lie:?}");
        assert!(started.elapsed() < Duration::from_secs(20), "{lie:?}");
        assert_eq!((reader.speed(), reader.counts().read_errors), (None, 1), "{lie:?}");
        assert!(reader.holds(hashes[0]), "it may come back");
        if lie == Lie::Fails {
            store.tell(Lie::Nothing);
            reader.declined(NUM_BLOCKS);
            eventually("measured again", || reader.speed().is_some());
            assert_eq!(num_right(&reader, &hashes, soon()), NUM_BLOCKS);
        }
    }
}

#[test]
fn a_store_that_had_less_time_than_it_takes_is_not_slow() {
    let (store, reader, hashes) = filled();
    assert_eq!(num_right(&reader, &hashes, Instant::now()), 0, "it is too late to ask");
    assert_eq!((reader.speed().is_some(), reader.counts().read_errors), (true, 0));
    let hour = LinkLine { latency_seconds: 3600.0, bytes_per_second: 1e9 };
    reader.shared.speed().line = Some(hour);
    store.tell(Lie::Hangs);
    assert_eq!(num_right(&reader, &hashes, Instant::now() + Duration::from_millis(50)), 0);
    assert_eq!((reader.speed(), reader.counts().read_errors), (Some(hour), 0));
}

#[test]
fn a_segment_that_cannot_be_read_keeps_no_later_one_from_being_found() {
    let store = LyingStore::default();
    let [withheld, later] =
        [("withheld", 1), ("later", 2)].map(|(worker, seed)| save(&open(&store, worker), seed));
    store.tell(Lie::Withholds("withheld"));
    let reader = open(&store, "reader");
    let holds = |hashes: &[BlockHash]| hashes.iter().all(|&hash| reader.holds(hash));
    eventually("the later one is found", || holds(&later));
    assert!(!holds(&withheld) && reader.counts().read_errors > 0);
    store.tell(Lie::Nothing);
    eventually("it is asked for again", || holds(&withheld));
}

#[test]
fn forgotten_blocks_are_a_miss_and_own_segments_with_them_are_deleted() {
    let (store, reader, hashes) = filled();
    reader.forget(&hashes[3..4]);
    assert_eq!(num_right(&reader, &hashes, soon()), 3, "the segment is another worker's");
    assert!(!reader.holds(hashes[3]) && reader.holds(hashes[4]));
    let writer = open(&store, "writer");
    eventually("the segment is found", || hashes.iter().all(|&hash| writer.holds(hash)));
    writer.forget(&hashes[3..4]);
    assert!(hashes.iter().all(|&hash| !writer.holds(hash)));
    // Dropping it deletes what is unwanted.
    drop(writer);
    assert_eq!(num_right(&reader, &hashes, soon()), 0);
    assert!(!reader.holds(hashes[0]), "the segment is gone");
}

#[test]
fn a_block_that_is_forgotten_while_it_waits_is_not_written() {
    let store = LyingStore::default();
    let tier = open(&store, "one");
    let hashes = chain(1, NUM_BLOCKS);
    assert!(hashes.iter().all(|&hash| tier.admit(hash, Keep::High(Duration::from_secs(60)))));
    tier.forget(&hashes[1..2]);
    assert!((0..NUM_BLOCKS).all(|idx| tier.write(Arc::new(record(idx, 1)))));
    let others = || hashes.iter().enumerate().filter(|&(idx, _)| idx != 1);
    eventually("the others are written", || others().all(|(_, &hash)| tier.holds(hash)));
    assert_eq!((tier.holds(hashes[1]), tier.counts().writes), (false, NUM_BLOCKS as u64 - 1));
    assert!(tier.admit(hashes[1], Keep::High(Duration::from_secs(60))), "it is at its next use");
}

#[test]
fn a_block_that_is_forgotten_while_it_is_written_is_not_found_later() {
    let store = LyingStore::default();
    store.tell(Lie::Fails);
    let tier = open(&store, "one");
    let hashes = save(&tier, 1);
    eventually("the first try", || store.num_puts() > 0);
    tier.forget(&hashes[1..2]);
    store.tell(Lie::Nothing);
    eventually("written", || tier.counts().writes > 0);
    // Dropping it deletes what is unwanted.
    drop(tier);
    let later = save(&open(&store, "other"), 2);
    let reader = open(&store, "reader");
    eventually("the later one is found", || later.iter().all(|&hash| reader.holds(hash)));
    assert!(!reader.holds(hashes[1]));
}

#[test]
fn segments_that_vanish_are_misses() {
    let (store, reader, hashes) = filled();
    store.tell(Lie::Vanished);
    assert_eq!(num_right(&reader, &hashes, soon()), 0);
    assert!(!reader.holds(hashes[0]) && reader.speed().is_some());
    assert_eq!(reader.counts().read_errors, 1);
}

#[test]
fn a_segment_that_cannot_be_written_is_tried_again() {
    let store = LyingStore::default();
    store.tell(Lie::Fails);
    let tier = open(&store, "one");
    let hashes = save(&tier, 1);
    eventually("the first try", || store.num_puts() == 2);
    assert!(hashes.iter().all(|&hash| !tier.admit(hash, Keep::Normal)), "it is still to be written");
    store.tell(Lie::Nothing);
    eventually("written", || tier.counts().writes == NUM_BLOCKS as u64);
    assert_eq!((tier.counts().write_errors, tier.counts().num_held), (0, NUM_BLOCKS as u64));
    assert!(hashes.iter().all(|&hash| tier.holds(hash)));
}

#[test]
fn what_is_sealed_opens_with_its_key_and_counts_as_damaged_with_another() {
    let store = LyingStore::default();
    let sealed = |seed| RecordShape { key: Some(key(seed)), ..shape() };
    let hashes = save(&open_sealed(&store, "writer", 1 << 20, sealed(1)), 1);
    let reader = open_sealed(&store, "reader", 1 << 20, sealed(1));
    eventually("found", || hashes.iter().all(|&hash| reader.holds(hash)));
    assert_eq!(num_right(&reader, &hashes, soon()), NUM_BLOCKS);
    let other = open_sealed(&store, "other", 1 << 20, sealed(2));
    eventually("refused", || other.counts().damaged == NUM_BLOCKS as u64);
    assert!(!other.holds(hashes[0]));
}
