//! Reads of a sequence's records: of its front, before it is computed, and of its end, meanwhile.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use baton_kv_cache::BlockHash;
use baton_tier_policy::{ReadMode, SlotPlace, TierRun, Worth};

use crate::{
    counts::Count,
    record::Record,
    slots::Direction,
    store::{KvStore, Shared},
};

/// Bytes of a [batch](KvStore::batch).
const BATCH_BYTES: usize = 32 << 20;
const REACHED_BATCH_BYTES: usize = 1 << 30;
/// Bytes that are read at once from the end of a sequence.
const END_BATCH_BYTES: usize = 16 << 20;

impl KvStore {
    /// What of a sequence tiers hold and is read in less time than it is computed. `compute` says how long so many blocks of it
    /// take to compute; each of those that are found counts the same. Memory and disks are taken to be faster until they were
    /// measured, an object store is not waited for before that.
    pub fn worth(
        &self,
        hashes: &[BlockHash],
        compute: impl FnOnce(usize) -> Duration,
        mode: ReadMode,
    ) -> Worth {
        let shared = &*self.shared;
        let places = shared.places(hashes);
        if places.is_empty() {
            return Worth::default();
        }
        let compute_block = compute(places.len()) / places.len() as u32;
        let found =
            baton_tier_policy::worth(&shared.runs(&places), shared.block_bytes(), compute_block, mode);
        if mode == ReadMode::Alone {
            shared.declined(&places[found.num_blocks..]);
        }
        found
    }

    /// Blocks at the end of a sequence that are read, from the last one on, in the time in which those before them are computed.
    /// 0 if tiers do not hold all of the sequence. `compute` says how long its first so many blocks take.
    pub fn meeting(&self, hashes: &[BlockHash], compute: impl Fn(usize) -> Duration) -> usize {
        let shared = &*self.shared;
        let places = shared.places(hashes);
        if places.len() < hashes.len() {
            return 0;
        }
        let num_blocks = baton_tier_policy::meeting(&shared.runs(&places), shared.block_bytes(), compute);
        if num_blocks == 0 {
            shared.declined(&places);
        }
        num_blocks
    }

    /// Blocks at the front of a sequence, by its hashes in order, that tiers hold.
    #[cfg(test)]
    pub(crate) fn num_found(&self, hashes: &[BlockHash]) -> usize {
        self.shared.places(hashes).len()
    }

    /// The records of blocks that follow each other, until the first one that no tier holds whole, or that an object store has
    /// not sent before `until`. Waits for both, and for a disk.
    pub fn read(&self, hashes: &[BlockHash], until: Instant) -> Vec<Arc<Record>> {
        let shared = &*self.shared;
        let places = shared.places(hashes);
        shared.used(&hashes[..places.len()], &[]);
        let mut records = Vec::with_capacity(places.len());
        let mut rest = hashes;
        for run in runs_of(&places) {
            let (own, later) = rest.split_at(run.len());
            rest = later;
            if run[0].is_none() {
                let object = shared.object.as_ref().expect("what no slot holds, it does");
                records.extend(object.read(own, until));
            } else {
                records.extend(shared.read_slots(run, own, Direction::Forwards));
            }
            if records.len() < hashes.len() - rest.len() {
                break;
            }
        }
        records
    }

    /// Reads the records of blocks that follow each other from the last one on, until one is not held whole, or an object store
    /// has not sent it before `until`. `take` gets them piece by piece: the index of the first of a piece, and records that follow
    /// each other. It says whether to go on.
    pub fn read_from_end(
        &self,
        hashes: &[BlockHash],
        until: Instant,
        mut take: impl FnMut(usize, Vec<Arc<Record>>) -> bool,
    ) {
        let shared = &*self.shared;
        let places = shared.places(hashes);
        if places.len() < hashes.len() {
            return;
        }
        shared.used(hashes, &[]);
        let mut end = hashes.len();
        let batch = (END_BATCH_BYTES / shared.block_bytes()).max(1);
        for run in runs_of(&places).rev() {
            let start = end - run.len();
            if run[0].is_none() {
                let object = shared.object.as_ref().expect("what no slot holds, it does");
                let is_whole = object
                    .read_from_end(&hashes[start..end], until, |first, records| take(start + first, records));
                if !is_whole {
                    return;
                }
            } else {
                for (run, own) in run.rchunks(batch).zip(hashes[start..end].rchunks(batch)) {
                    let records = shared.read_slots(run, own, Direction::FromEnd);
                    let is_whole = records.len() == own.len();
                    end -= records.len();
                    if !records.is_empty() && !take(end, records) || !is_whole {
                        return;
                    }
                }
            }
            end = start;
        }
    }

    /// Pieces that [`read_from_end`](Self::read_from_end) may be ahead: with no more memory than what is saved takes.
    pub fn num_pieces_ahead(&self) -> usize {
        let num_blocks = (END_BATCH_BYTES / self.shared.block_bytes()).max(1);
        (self.shared.num_queued / num_blocks).max(1)
    }

    /// The blocks at the front of a sequence that are read at once: 32 MiB, or 1 GiB of those that the pool's device reads
    /// itself, as that takes no memory. At least one, unless the sequence is empty.
    pub fn batch<'a>(&self, hashes: &'a [BlockHash]) -> &'a [BlockHash] {
        let block_bytes = self.shared.block_bytes();
        let num_blocks = match self.num_reached(hashes) {
            0 => BATCH_BYTES / block_bytes,
            num_reached => num_reached.min(REACHED_BATCH_BYTES / block_bytes),
        };
        &hashes[..hashes.len().min(num_blocks.max(1))]
    }

    /// Blocks at the front of a sequence that the pool's device reads itself.
    fn num_reached(&self, hashes: &[BlockHash]) -> usize {
        if self.shared.room.is_some() { self.num_in_memory(hashes) } else { 0 }
    }

    /// Blocks at the front of a sequence that are in memory: reading them waits for no device.
    pub fn num_in_memory(&self, hashes: &[BlockHash]) -> usize {
        let directory = self.shared.lock();
        let in_memory = |place: SlotPlace| self.shared.tiers[place.tier].is_memory();
        hashes.iter().take_while(|&&hash| directory.find(hash).is_some_and(in_memory)).count()
    }

    /// From the end of its reads until it was in the pool, a recall of so many blocks took so long.
    pub fn note_rest(&self, num_blocks: usize, took: Duration) {
        self.shared.recalls().observe_rest(num_blocks, took);
    }

    /// A read of these blocks goes on for so long, and is not waited for: as far as a tier with slots is known to be slow.
    pub fn note_late(&self, hashes: &[BlockHash], took: Duration) {
        let places = self.shared.places(hashes);
        let Some(slowest) = places.iter().flatten().map(|place| place.tier).max() else { return };
        let num_blocks = places.iter().flatten().filter(|place| place.tier == slowest).count();
        self.shared.recalls().observe_read(slowest, num_blocks, took);
    }
}

impl Shared {
    fn block_bytes(&self) -> usize {
        self.storage.layout().block_bytes()
    }

    fn runs(&self, places: &[Option<SlotPlace>]) -> Vec<TierRun> {
        let recalls = self.recalls().clone();
        let speed = |place: Option<SlotPlace>| match (place, &self.object) {
            (None, Some(object)) => object.speed(),
            (Some(place), _) => Some(recalls.speed(place.tier, self.block_bytes() as f64)),
            (None, None) => None,
        };
        runs_of(places).map(|run| TierRun { num_blocks: run.len(), speed: speed(run[0]) }).collect()
    }

    /// Blocks of an object store were not worth reading.
    fn declined(&self, places: &[Option<SlotPlace>]) {
        let num_declined = places.iter().filter(|place| place.is_none()).count();
        if let (Some(object), 1..) = (&self.object, num_declined) {
            object.declined(num_declined);
        }
    }

    /// The records of a run in the slots of one tier, up to the first one, in this direction, that it does not hold whole.
    fn read_slots(
        &self,
        run: &[Option<SlotPlace>],
        hashes: &[BlockHash],
        direction: Direction,
    ) -> Vec<Arc<Record>> {
        let places: Vec<SlotPlace> = run.iter().copied().flatten().collect();
        let tier = places[0].tier;
        let versions: Vec<u32> = {
            let directory = self.lock();
            places.iter().map(|&place| directory.version(place)).collect()
        };
        let wanted: Vec<_> = places.iter().zip(hashes).map(|(place, &hash)| (place.slot, hash)).collect();
        let started = Instant::now();
        let mut read: Vec<_> = self.tiers[tier].read(&wanted).into_iter().map(Some).collect();
        self.recalls().observe_read(tier, run.len(), started.elapsed());
        let records = direction.collect(0..read.len(), |idx| match read[idx].take()? {
            Ok(record) => Some(record),
            Err(error) => {
                self.read_failed(places[idx], versions[idx], hashes[idx], &error);
                None
            }
        });
        self.counters[tier].add(Count::Hits, records.len() as u64);
        records
    }
}

/// Blocks that follow each other in one tier, or in the object store.
fn runs_of(places: &[Option<SlotPlace>]) -> impl DoubleEndedIterator<Item = &[Option<SlotPlace>]> {
    places.chunk_by(|one, next| one.map(|place| place.tier) == next.map(|place| place.tier))
}
