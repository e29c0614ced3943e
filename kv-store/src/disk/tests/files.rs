//! Directories: good ones, and every way in which one can be bad.

use std::{fs, os::unix::fs::FileExt, path::Path, sync::Arc, time::Duration};

use baton_kv_events::Keep;

use crate::{
    disk::{DiskSlots, StoreOpenError},
    record::{Fingerprint, Record, RecordShape},
    slots::{ReadError, Slots},
    testing::{body, key, record, shape},
};

const ROOM: u64 = 64 << 10;

fn open(dir: &Path) -> Result<DiskSlots, StoreOpenError> {
    DiskSlots::open(dir, ROOM, shape())
}

fn is_right(read: &Result<Arc<Record>, ReadError>) -> bool {
    read.as_ref().is_ok_and(|record| record.body() == body(record.name.hash))
}

/// Three records in slots 0, 2 and 4 of a directory that is closed again.
fn filled(dir: &Path) -> Vec<(u32, Arc<Record>)> {
    let slots = open(dir).expect("a new directory");
    let records: Vec<_> = (0..3).map(|idx| (2 * idx, Arc::new(record(idx as usize, 7)))).collect();
    for (slot, record) in &records {
        slots.write(*slot, record).expect("there is room");
    }
    records
}

fn wanted(records: &[(u32, Arc<Record>)]) -> Vec<(u32, baton_kv_cache::BlockHash)> {
    records.iter().map(|(slot, record)| (*slot, record.name.hash)).collect()
}

#[test]
fn records_come_back_after_the_directory_was_closed() {
    let dir = tempfile::tempdir().expect("a directory");
    let records = filled(&dir.path().join("new/kv"));
    let mut slots = open(&dir.path().join("new/kv")).expect("as it was left");
    let found = slots.take_found();
    let expected: Vec<_> =
        records.iter().map(|(slot, record)| (*slot, record.name.clone(), Keep::Normal)).collect();
    assert_eq!(found, expected);
    assert!(slots.read(&wanted(&records)).iter().all(is_right));
    // Another block than the slot holds, and an empty slot.
    for (slot, idx) in [(0, 1), (1, 0)] {
        let read = slots.read(&[(slot, records[idx].1.name.hash)]);
        assert!(matches!(read[..], [Err(ReadError::Damaged)]), "{read:?}");
    }
}

#[test]
fn how_blocks_are_to_be_kept_is_known_after_the_directory_was_closed() {
    let dir = tempfile::tempdir().expect("a directory");
    let records = filled(dir.path());
    let keeps =
        |slots: &mut DiskSlots| slots.take_found().into_iter().map(|(_, _, keep)| keep).collect::<Vec<_>>();
    let mut slots = open(dir.path()).expect("as it was left");
    assert_eq!(keeps(&mut slots), [Keep::Normal; 3]);
    slots.keep(0, Keep::High(Duration::from_secs(3600))).expect("noted");
    slots.keep(2, Keep::Low).expect("noted");
    slots.keep(4, Keep::Low).expect("noted");
    // Another record: nothing was said of it.
    slots.write(4, &records[2].1).expect("written");
    drop(slots);
    let keeps = keeps(&mut open(dir.path()).expect("as it was left"));
    let Keep::High(left) = keeps[0] else { panic!("{keeps:?}") };
    assert!(left > Duration::from_secs(3500), "{left:?}");
    assert_eq!(keeps[1..], [Keep::Low, Keep::Normal]);
}

#[test]
fn a_larger_or_smaller_size_keeps_what_fits() {
    let dir = tempfile::tempdir().expect("a directory");
    let records = filled(dir.path());
    let larger = DiskSlots::open(dir.path(), 2 * ROOM, shape()).expect("more room");
    assert!(larger.num_slots() > open_slots(ROOM));
    assert!(larger.read(&wanted(&records)).iter().all(is_right));
    drop(larger);
    let smaller = DiskSlots::open(dir.path(), 4096 + 4 * (512 + 4096), shape()).expect("less room");
    assert_eq!((smaller.num_slots(), smaller.found.len()), (4, 2), "slot 4 is gone");
}

fn open_slots(room: u64) -> u32 {
    ((room - 4096) / (512 + 4096)) as u32
}

#[test]
fn one_process_at_a_time() {
    let dir = tempfile::tempdir().expect("a directory");
    let first = open(dir.path()).expect("free");
    assert!(matches!(open(dir.path()), Err(StoreOpenError::InUse { .. })));
    // As a process has it that was forked and has not run its program yet.
    let inherited = first._lock.as_ref().expect("locked").0.try_clone().expect("a descriptor");
    drop(first);
    open(dir.path()).expect("free again");
    drop(inherited);
}

#[test]
fn files_of_another_format_are_refused_and_stay() {
    let dir = tempfile::tempdir().expect("a directory");
    let records = filled(dir.path());
    for foreign in [
        RecordShape { fingerprint: Fingerprint([9; 16]), ..shape() },
        RecordShape { block_size: 8, ..shape() },
        RecordShape { body: crate::record::BodyShape { bytes: 2048, ..shape().body }, ..shape() },
        RecordShape { key: Some(key(1)), ..shape() },
    ] {
        let refused = DiskSlots::open(dir.path(), ROOM, foreign);
        assert!(matches!(refused, Err(StoreOpenError::Foreign { .. })), "{refused:?}");
    }
    assert!(open(dir.path()).expect("untouched").read(&wanted(&records)).iter().all(is_right));
}

#[test]
fn sealed_records_come_back_with_their_key_and_count_as_damaged_with_another() {
    let dir = tempfile::tempdir().expect("a directory");
    let open = |seed| {
        let shape = RecordShape { key: Some(key(seed)), ..shape() };
        DiskSlots::open(dir.path(), ROOM, shape).expect("a directory of sealed records")
    };
    let records: Vec<_> = (0..3).map(|idx| (idx, Arc::new(record(idx as usize, 7)))).collect();
    let slots = open(1);
    records.iter().for_each(|(slot, record)| slots.write(*slot, record).expect("there is room"));
    drop(slots);
    let mut slots = open(1);
    assert_eq!((slots.take_found().len(), slots.num_damaged()), (3, 0));
    assert!(slots.read(&wanted(&records)).iter().all(is_right));
    drop(slots);
    let mut slots = open(2);
    assert_eq!((slots.take_found().len(), slots.num_damaged()), (0, 3));
    let read = slots.read(&wanted(&records));
    assert!(read.iter().all(|read| matches!(read, Err(ReadError::Damaged))), "{read:?}");
}

#[test]
fn what_cannot_be_used_is_said() {
    let dir = tempfile::tempdir().expect("a directory");
    let too_small = DiskSlots::open(dir.path(), 5000, shape());
    assert!(matches!(too_small, Err(StoreOpenError::TooSmall { .. })), "{too_small:?}");
    // /dev/shm and the like would be filled; no file system here has so much.
    let full = DiskSlots::open(&dir.path().join("full"), 1 << 50, shape());
    assert!(matches!(full, Err(StoreOpenError::Full { .. } | StoreOpenError::Io { .. })), "{full:?}");

    let records = filled(&dir.path().join("full"));
    DiskSlots::open(&dir.path().join("full"), 1 << 50, shape()).expect_err("still full");
    assert!(open(&dir.path().join("full")).expect("as before").read(&wanted(&records)).iter().all(is_right));

    let file = dir.path().join("file");
    fs::write(&file, "no directory").expect("a file");
    assert!(matches!(open(&file), Err(StoreOpenError::Io { action: "cannot make the directory", .. })));

    let garbage = dir.path().join("garbage");
    fs::create_dir(&garbage).expect("a directory");
    fs::write(garbage.join("index"), [7; 5000]).expect("a file");
    assert!(matches!(open(&garbage), Err(StoreOpenError::Damaged { .. })));

    let folder = dir.path().join("folder");
    fs::create_dir_all(folder.join("slabs")).expect("a directory");
    assert!(matches!(open(&folder), Err(StoreOpenError::Io { action: "cannot open", .. })));
}

#[test]
fn no_permission_is_said() {
    // Root may do everything, except write where the kernel itself refuses.
    let refused = open(Path::new("/proc/baton-kv"));
    assert!(
        matches!(refused, Err(StoreOpenError::Io { action: "cannot make the directory", .. })),
        "{refused:?}"
    );
}

#[test]
fn truncated_slabs_and_index_are_misses() {
    for (name, len) in [("slabs", 0), ("slabs", 2 * 4096 + 100), ("index", 0), ("index", 4096 + 700)] {
        let dir = tempfile::tempdir().expect("a directory");
        let records = filled(dir.path());
        let file = fs::OpenOptions::new().write(true).open(dir.path().join(name)).expect("it is there");
        file.set_len(len).expect("cut");
        let slots = open(dir.path()).expect("it is filled up");
        for ((_, record), read) in records.iter().zip(slots.read(&wanted(&records))) {
            match read {
                Ok(read) => assert_eq!(read.body(), record.body()),
                Err(error) => assert!(matches!(error, ReadError::Damaged), "{name} {len}: {error:?}"),
            }
        }
        let num_whole = slots.read(&wanted(&records)).iter().filter(|read| read.is_ok()).count();
        assert_eq!(num_whole, usize::from(len > 4096), "{name} {len}");
    }
}

#[test]
fn a_file_that_shrinks_under_the_process_is_an_error() {
    let dir = tempfile::tempdir().expect("a directory");
    let records = filled(dir.path());
    let slots = open(dir.path()).expect("as it was left");
    let file = fs::OpenOptions::new().write(true).open(dir.path().join("slabs")).expect("it is there");
    file.set_len(0).expect("cut");
    assert!(matches!(slots.read(&wanted(&records)[1..])[..], [Err(ReadError::Io(_)), Err(ReadError::Io(_))]));
}

#[test]
fn a_changed_bit_of_a_body_is_a_miss() {
    let dir = tempfile::tempdir().expect("a directory");
    let records = filled(dir.path());
    let slots = open(dir.path()).expect("as it was left");
    let file = fs::OpenOptions::new().read(true).write(true).open(dir.path().join("slabs")).expect("there");
    for at in [0, 511, 1023] {
        let offset = 2 * 4096 + at;
        let mut byte = [0];
        file.read_exact_at(&mut byte, offset).expect("whole");
        file.write_all_at(&[byte[0] ^ 16], offset).expect("whole");
        let reads = slots.read(&wanted(&records));
        assert_eq!(reads.iter().map(is_right).collect::<Vec<_>>(), [true, false, true], "byte {at}");
        file.write_all_at(&byte, offset).expect("whole");
    }
    assert!(slots.read(&wanted(&records)).iter().all(is_right));
}
