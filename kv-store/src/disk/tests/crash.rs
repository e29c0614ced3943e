//! Crashes in the middle of writes, torn sectors and changed bits, in files of memory: whatever is left, a read returns the
//! record that was asked for or none.

use std::{
    collections::HashMap,
    io,
    sync::{Arc, Mutex},
};

use baton_random::Random;

use crate::{
    disk::{DiskSlots, Medium},
    record::Record,
    slots::Slots,
    testing::{record, shape},
};

const SECTOR: usize = 512;
const NUM_SLOTS: u32 = 6;
const NUM_RECORDS: usize = 24;

/// How a process ends.
#[derive(Clone, Copy, Debug)]
enum Crash {
    /// SIGKILL: what it wrote stays, in order.
    Killed,
    /// Of each sector that was written, any version stays.
    PowerLoss,
}

#[derive(Clone, Debug)]
struct FakeFile(Arc<Mutex<Sectors>>);

#[derive(Debug)]
struct Sectors {
    bytes: Vec<u8>,
    /// Every version of each sector that was written in this life.
    versions: HashMap<usize, Vec<[u8; SECTOR]>>,
    /// Sectors that may still be written, of both files together.
    budget: Arc<Mutex<usize>>,
}

impl FakeFile {
    fn new(len: usize, budget: &Arc<Mutex<usize>>) -> FakeFile {
        let sectors = Sectors { bytes: vec![0; len], versions: HashMap::new(), budget: budget.clone() };
        FakeFile(Arc::new(Mutex::new(sectors)))
    }

    fn crash(&self, crash: Crash, random: &mut Random) {
        let mut sectors = self.0.lock().unwrap();
        let mut written: Vec<_> = std::mem::take(&mut sectors.versions).into_iter().collect();
        written.sort_unstable_by_key(|&(sector, _)| sector);
        if let Crash::PowerLoss = crash {
            for (sector, versions) in written {
                let version = versions[random.below(versions.len() as u64) as usize];
                sectors.bytes[sector * SECTOR..][..SECTOR].copy_from_slice(&version);
            }
        }
    }

    fn flip_a_bit(&self, random: &mut Random) {
        let mut sectors = self.0.lock().unwrap();
        let bit = random.below(8 * sectors.bytes.len() as u64) as usize;
        sectors.bytes[bit / 8] ^= 1 << (bit % 8);
    }
}

impl Medium for FakeFile {
    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        bytes.copy_from_slice(&self.0.lock().unwrap().bytes[offset as usize..][..bytes.len()]);
        Ok(())
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let mut sectors = self.0.lock().unwrap();
        for (idx, new) in bytes.chunks_exact(SECTOR).enumerate() {
            {
                let mut budget = sectors.budget.lock().unwrap();
                if *budget == 0 {
                    return Err(io::Error::other("the process is dead"));
                }
                *budget -= 1;
            }
            let sector = offset as usize / SECTOR + idx;
            let Sectors { bytes, versions, .. } = &mut *sectors;
            let place = &mut bytes[sector * SECTOR..][..SECTOR];
            let versions =
                versions.entry(sector).or_insert_with(|| vec![(&*place).try_into().expect("a sector")]);
            place.copy_from_slice(new);
            versions.push(new.try_into().expect("a sector"));
        }
        Ok(())
    }
}

/// What was read in all lives.
#[derive(Debug, Default)]
struct Reads {
    num_right: usize,
    num_refused: usize,
}

/// Crashes so often, and reads everything after each crash.
fn crash(num_crashes: usize, seed: u64) -> Reads {
    let mut random = Random::new(seed);
    let records: Vec<Arc<Record>> =
        (0..NUM_RECORDS).map(|idx| Arc::new(record(idx % 4, 100 + idx as u64 / 4))).collect();
    let by_hash: HashMap<_, _> = records.iter().map(|record| (record.name.hash, record)).collect();
    let budget = Arc::new(Mutex::new(0));
    let index = FakeFile::new(4096 + NUM_SLOTS as usize * shape().head_bytes(), &budget);
    let slabs = FakeFile::new(NUM_SLOTS as usize * shape().body_pages_bytes(), &budget);
    let open = || DiskSlots::over(index.clone(), slabs.clone(), NUM_SLOTS, shape()).expect("it opens");
    let mut reads = Reads::default();
    for nth in 0..num_crashes {
        let slots = open();
        *budget.lock().unwrap() = random.below(60) as usize;
        while slots
            .write(
                random.below(u64::from(NUM_SLOTS)) as u32,
                &records[random.below(NUM_RECORDS as u64) as usize],
            )
            .is_ok()
        {}
        let way = if random.below(2) == 0 { Crash::Killed } else { Crash::PowerLoss };
        index.crash(way, &mut random);
        slabs.crash(way, &mut random);
        for file in [&index, &slabs] {
            if random.below(4) == 0 {
                file.flip_a_bit(&mut random);
            }
        }
        let mut slots = open();
        for (slot, name, _) in slots.take_found() {
            let expected = by_hash.get(&name.hash).expect("a head that was written");
            match &slots.read(&[(slot, name.hash)])[0] {
                Ok(read) => {
                    assert_eq!(read.name, expected.name, "crash {nth} of seed {seed}, {way:?}");
                    assert!(read.body() == expected.body(), "crash {nth} of seed {seed}, {way:?}: wrong KV");
                    reads.num_right += 1;
                }
                Err(_) => reads.num_refused += 1,
            }
        }
    }
    reads
}

#[test]
fn no_crash_leaves_wrong_kv() {
    let reads = crash(3000, 1);
    // Both happen, or the test shows nothing.
    assert!(reads.num_right > 3000 && reads.num_refused > 300, "{reads:?}");
}

#[test]
#[ignore = "a minute; by hand"]
fn a_hundred_thousand_crashes_leave_no_wrong_kv() {
    for seed in 1..=4 {
        println!("25000 crashes of seed {seed}: {:?}", crash(25_000, seed));
    }
}
