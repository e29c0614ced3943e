//! The newest events of a worker, and what its cache holds: enough to continue any reader.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    iter,
};

use crate::{BatchKind, BlockKey, CacheEvent, CacheLevel, EventBatch, MAX_TIERS, PendingEvents};

/// A part of a cache, which holds blocks. A reader is told that a block is stored as long as one of them holds it; and, from the first
/// word of a tier on, what the parts that are faster than this tier hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockHolder {
    /// The engine's memory: the block pool, and the passages that it keeps.
    Pool,
    /// A tier below it. Tiers are numbered from the fastest, 0, and there are at most [`MAX_TIERS`].
    Tier(usize),
}

/// The newest events, bounded by the blocks that they name, and all that is cached now.
#[derive(Debug)]
pub struct EventLog {
    ring: VecDeque<CacheEvent>,
    /// The number of the next event.
    next: u64,
    /// Blocks that the events of the ring name.
    num_blocks: usize,
    max_blocks: usize,
    cached: HashMap<BlockKey, Cached>,
    /// Tiers that have said something.
    num_tiers: usize,
}

/// A block that is cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cached {
    /// The block before it.
    parent: Option<BlockKey>,
    /// A bit of each [`BlockHolder`].
    holders: u8,
}

/// All that was cached before event `next`.
#[derive(Debug)]
pub struct CacheDump {
    next: u64,
    blocks: Vec<(BlockKey, Cached)>,
    num_tiers: usize,
}

/// One reader's place in the log of a worker.
#[derive(Debug)]
pub struct CacheReader {
    /// The next event that it lacks. `None`: it knows nothing yet.
    next: Option<u64>,
    /// Parts of a dump that it has not got yet, the last one first.
    parts: Vec<EventBatch>,
}

/// Blocks in one batch: a quarter of a megabyte.
const BATCH_BLOCKS: usize = 1 << 15;

impl EventLog {
    /// Of a pool of so many blocks. A reader that is farther behind than this many blocks, and than all that is cached in pool and tiers,
    /// gets a dump, which is no longer.
    pub fn new(num_pool_blocks: usize) -> EventLog {
        EventLog {
            ring: VecDeque::new(),
            next: 0,
            num_blocks: 0,
            max_blocks: num_pool_blocks.max(64),
            cached: HashMap::new(),
            num_tiers: 0,
        }
    }

    /// Numbers the events of one holder, which tell what it stores and removes. Readers get those that change a level of the cache. A
    /// tier is told of from its first call on, even without events.
    pub fn append(&mut self, holder: BlockHolder, events: Vec<CacheEvent>) {
        let mut changes: [PendingEvents; MAX_TIERS + 1] = Default::default();
        let begun = self.begin(holder);
        let levels =
            || CacheLevel::all_of(self.num_tiers).filter(|&level| holder.bit() & holders_of(level) != 0);
        for event in events.into_iter().filter(|event| event.level() == CacheLevel::ALL) {
            match event {
                CacheEvent::Stored { mut parent, blocks, .. } => {
                    for block in blocks {
                        let cached = self.cached.entry(block).or_insert(Cached { parent, holders: 0 });
                        for level in levels().filter(|&level| !cached.is_at(level)) {
                            changes[usize::from(level.0)].stored(parent, block);
                        }
                        cached.holders |= holder.bit();
                        parent = Some(block);
                    }
                }
                CacheEvent::Removed { blocks, .. } => {
                    for block in blocks {
                        let Some(cached) = self.cached.get_mut(&block) else { continue };
                        let before = *cached;
                        cached.holders &= !holder.bit();
                        let after = *cached;
                        for level in levels().filter(|&level| before.is_at(level) && !after.is_at(level)) {
                            changes[usize::from(level.0)].removed(block);
                        }
                        if after.holders == 0 {
                            self.cached.remove(&block);
                        }
                    }
                }
            }
        }
        let [all, parts @ ..] = &mut changes;
        let of_parts = parts.iter_mut().enumerate().flat_map(|(tier, part)| {
            part.take().into_iter().map(move |event| event.at(CacheLevel::above(tier)))
        });
        for event in all.take().into_iter().chain(begun).chain(of_parts) {
            self.num_blocks += event.blocks().len();
            self.next += 1;
            self.ring.push_back(event);
            while self.num_blocks > self.max_blocks.max(self.cached.len()) {
                let Some(oldest) = self.ring.pop_front() else { break };
                self.num_blocks -= oldest.blocks().len();
            }
        }
    }

    /// What is at each level that readers were not told of before.
    fn begin(&mut self, holder: BlockHolder) -> Vec<CacheEvent> {
        let mut begun = Vec::new();
        let BlockHolder::Tier(newest) = holder else { return begun };
        for level in (self.num_tiers..=newest).map(CacheLevel::above) {
            let cached = self.cached.iter().map(|(&block, &cached)| (block, cached));
            let sequences = sequences_at(level, cached).into_iter();
            begun.extend(sequences.map(|(parent, blocks)| CacheEvent::Stored { level, parent, blocks }));
        }
        self.num_tiers = self.num_tiers.max(newest + 1);
        begun
    }

    /// How many blocks at the front of `keys`, a sequence's in order, this holder has.
    pub fn num_held(&self, holder: BlockHolder, keys: impl Iterator<Item = BlockKey>) -> usize {
        let is_held = |key| self.cached.get(&key).is_some_and(|cached| cached.holders & holder.bit() != 0);
        keys.take_while(|&key| is_held(key)).count()
    }

    /// The number of the next event.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// The events from this number on, as far as one batch goes. `None`: the log has lost some, or they are not its own.
    fn since(&self, from: u64) -> Option<EventBatch> {
        let num_behind = usize::try_from(self.next.checked_sub(from)?).ok()?;
        let start = self.ring.len().checked_sub(num_behind)?;
        let mut num_blocks = 0;
        let fits = |event: &&CacheEvent| {
            num_blocks += event.blocks().len();
            num_blocks <= BATCH_BLOCKS || num_blocks == event.blocks().len()
        };
        let events = self.ring.iter().skip(start).take_while(fits).cloned().collect();
        Some(EventBatch { first: from, events, kind: BatchKind::Events })
    }

    fn dump(&self) -> CacheDump {
        CacheDump {
            next: self.next,
            blocks: self.cached.iter().map(|(&key, &cached)| (key, cached)).collect(),
            num_tiers: self.num_tiers,
        }
    }
}

impl BlockHolder {
    fn bit(self) -> u8 {
        match self {
            BlockHolder::Pool => 1,
            BlockHolder::Tier(tier) => 2 << tier,
        }
    }
}

impl Cached {
    fn is_at(self, level: CacheLevel) -> bool {
        self.holders & holders_of(level) != 0
    }
}

/// Bits of the holders whose blocks are at a level.
fn holders_of(level: CacheLevel) -> u8 {
    level.tier().map_or(u8::MAX, |tier| (2 << tier) - 1)
}

/// Sequences of those of these blocks that are at a level. Of a part of a cache at least one, by which a reader learns that it is told
/// of it.
fn sequences_at(
    level: CacheLevel,
    blocks: impl Iterator<Item = (BlockKey, Cached)> + Clone,
) -> Vec<(Option<BlockKey>, Vec<BlockKey>)> {
    let held = blocks.filter(|(_, cached)| cached.is_at(level)).map(|(block, cached)| (block, cached.parent));
    let mut found = sequences(held);
    if found.is_empty() && level != CacheLevel::ALL {
        found.push((None, Vec::new()));
    }
    found
}

impl CacheDump {
    /// Its parts, the last one first.
    fn into_parts(self) -> Vec<EventBatch> {
        let CacheDump { next, blocks, num_tiers } = self;
        let part = || EventBatch { first: next, events: Vec::new(), kind: BatchKind::DumpPart };
        let (mut parts, mut room) = (vec![part()], BATCH_BLOCKS);
        let mut add = |level: CacheLevel, parent: Option<BlockKey>, sequence: &[BlockKey]| {
            let (mut parent, mut rest) = (parent, sequence);
            loop {
                let (run, left) = rest.split_at(rest.len().min(room));
                (rest, room) = (left, room - run.len());
                let event = CacheEvent::Stored { level, parent, blocks: run.to_vec() };
                parts.last_mut().expect("there is one").events.push(event);
                parent = run.last().copied();
                if room == 0 {
                    room = BATCH_BLOCKS;
                    parts.push(part());
                }
                if rest.is_empty() {
                    break;
                }
            }
        };
        for level in CacheLevel::all_of(num_tiers) {
            for (parent, sequence) in sequences_at(level, blocks.iter().copied()) {
                add(level, parent, &sequence);
            }
        }
        parts.last_mut().expect("there is one").kind = BatchKind::DumpEnd;
        parts.reverse();
        parts
    }
}

/// Sequences of blocks, each with the block before its first: blocks that follow each other are in one.
fn sequences(
    blocks: impl Iterator<Item = (BlockKey, Option<BlockKey>)> + Clone,
) -> Vec<(Option<BlockKey>, Vec<BlockKey>)> {
    // One block after each; the others begin sequences of their own.
    let after: HashMap<BlockKey, BlockKey> =
        blocks.clone().filter_map(|(block, parent)| Some((parent?, block))).collect();
    let is_there: HashSet<BlockKey> = blocks.clone().map(|(block, _)| block).collect();
    let follows = |block: BlockKey, parent: Option<BlockKey>| {
        parent.is_some_and(|parent| is_there.contains(&parent) && after.get(&parent) == Some(&block))
    };
    let firsts = blocks.filter(|&(block, parent)| !follows(block, parent));
    let sequence = |first| iter::successors(Some(first), |block| after.get(block).copied()).collect();
    firsts.map(|(first, parent)| (parent, sequence(first))).collect()
}

impl CacheReader {
    /// A reader that has all events before this number. `None`: it has nothing, and gets a dump first.
    pub fn new(next: Option<u64>) -> CacheReader {
        CacheReader { next, parts: Vec::new() }
    }

    /// The next batch, if the reader lacks anything. `read` reads the log, and should hold it for no longer than that.
    pub fn next(&mut self, read: impl FnOnce(&mut dyn FnMut(&EventLog))) -> Option<EventBatch> {
        if let Some(part) = self.parts.pop() {
            return Some(part);
        }
        let mut found = None;
        let mut dump = None;
        read(&mut |log| match self.next.and_then(|next| log.since(next)) {
            Some(events) => found = Some(events),
            None => dump = Some(log.dump()),
        });
        if let Some(dump) = dump {
            self.next = Some(dump.next);
            self.parts = dump.into_parts();
            return self.parts.pop();
        }
        let batch = found.filter(|batch| !batch.events.is_empty())?;
        self.next = Some(batch.next());
        Some(batch)
    }

    /// Whether a dump is under way.
    pub fn has_parts(&self) -> bool {
        !self.parts.is_empty()
    }

    /// Whether it lacks nothing that comes before event `next`.
    pub fn is_at(&self, next: u64) -> bool {
        self.parts.is_empty() && self.next == Some(next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(range: std::ops::Range<u64>) -> Vec<BlockKey> {
        range.map(BlockKey).collect()
    }

    fn stored(parent: Option<u64>, range: std::ops::Range<u64>) -> CacheEvent {
        CacheEvent::stored(parent.map(BlockKey), keys(range))
    }

    fn read(reader: &mut CacheReader, log: &EventLog) -> Option<EventBatch> {
        reader.next(|take| take(log))
    }

    /// What a cache stores or removes next.
    fn random_event(random: &mut u64) -> CacheEvent {
        *random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let place = (*random >> 40) % 60;
        match *random >> 62 {
            0 => CacheEvent::removed(keys(place..place + 3)),
            _ => stored(Some(place), place + 1..place + 4),
        }
    }

    /// What a reader knows after all that it has read.
    fn replay(reader: &mut CacheReader, log: &EventLog, known: &mut HashMap<BlockKey, Cached>) {
        let mut dump: Option<HashMap<_, _>> = None;
        while let Some(batch) = read(reader, log) {
            let mut own = EventLog::new(usize::MAX);
            own.cached = match batch.kind {
                BatchKind::Events => std::mem::take(known),
                _ => dump.take().unwrap_or_default(),
            };
            own.append(BlockHolder::Pool, batch.events);
            match batch.kind {
                BatchKind::DumpPart => dump = Some(own.cached),
                _ => *known = own.cached,
            }
        }
    }

    #[test]
    fn a_reader_gets_a_dump_and_then_what_happens_and_after_an_overrun_a_dump_again() {
        let mut log = EventLog::new(64);
        log.append(BlockHolder::Pool, vec![stored(None, 0..10), CacheEvent::removed(keys(8..10))]);
        let mut reader = CacheReader::new(None);
        let first = read(&mut reader, &log).expect("a dump");
        assert_eq!((first.first, first.kind, first.next()), (2, BatchKind::DumpEnd, 2));
        assert_eq!(first.events, [stored(None, 0..8)]);
        assert!(reader.is_at(2) && read(&mut reader, &log).is_none());

        log.append(BlockHolder::Pool, vec![stored(Some(7), 20..22)]);
        assert!(!reader.is_at(3));
        let then = read(&mut reader, &log).expect("an event");
        assert_eq!((then.first, then.kind, then.next()), (2, BatchKind::Events, 3));
        assert_eq!(then.events, [stored(Some(7), 20..22)]);

        for idx in 0..50 {
            log.append(BlockHolder::Pool, vec![stored(Some(21), 1000 + idx..1001 + idx)]);
            log.append(BlockHolder::Pool, vec![CacheEvent::removed(keys(1000 + idx..1001 + idx))]);
        }
        let again = read(&mut reader, &log).expect("the ring has lost some");
        assert_eq!((again.first, again.kind), (103, BatchKind::DumpEnd));
        // A number that this life of the worker has not reached.
        assert_eq!(
            read(&mut CacheReader::new(Some(500)), &log).map(|batch| batch.kind),
            Some(BatchKind::DumpEnd)
        );
        assert_eq!(read(&mut CacheReader::new(Some(103)), &log), None);
    }

    #[test]
    fn an_empty_cache_is_dumped_too_and_a_reader_may_begin_with_the_first_event() {
        let mut log = EventLog::new(64);
        let nothing = read(&mut CacheReader::new(None), &log).expect("all that there is");
        assert_eq!((nothing.first, nothing.events.len(), nothing.kind), (0, 0, BatchKind::DumpEnd));
        log.append(BlockHolder::Pool, vec![stored(None, 0..3)]);
        let mut reader = CacheReader::new(Some(0));
        assert_eq!(read(&mut reader, &log).map(|batch| batch.events), Some(vec![stored(None, 0..3)]));
    }

    #[test]
    fn long_dumps_come_in_parts_that_hold_each_block_once_after_its_parent() {
        let mut log = EventLog::new(1 << 20);
        let num = 3 * BATCH_BLOCKS as u64 + 5;
        log.append(
            BlockHolder::Pool,
            vec![
                stored(None, 0..num),
                stored(Some(100), num..num + 50),
                stored(Some(9_999_999), 1 << 40..(1 << 40) + 2),
            ],
        );
        let mut reader = CacheReader::new(None);
        let mut parts = Vec::new();
        while let Some(part) = read(&mut reader, &log) {
            assert!(part.events.iter().map(|event| event.blocks().len()).sum::<usize>() <= BATCH_BLOCKS);
            parts.push(part);
        }
        assert_eq!(parts.len(), 4);
        let kinds: Vec<_> = parts.iter().map(|part| part.kind).collect();
        assert_eq!(kinds, [[BatchKind::DumpPart; 3].as_slice(), &[BatchKind::DumpEnd]].concat());
        let mut known = HashMap::new();
        replay(&mut CacheReader::new(None), &log, &mut known);
        assert_eq!(known, log.cached);
    }

    #[test]
    fn readers_of_any_speed_end_with_what_the_cache_holds() {
        let mut log = EventLog::new(64);
        let mut readers: Vec<_> = (1..8).map(|_| (CacheReader::new(None), HashMap::new())).collect();
        let mut random = 1_u64;
        for step in 0..2000_u64 {
            let event = random_event(&mut random);
            log.append(BlockHolder::Pool, vec![event]);
            for (idx, (reader, known)) in readers.iter_mut().enumerate() {
                if step % (1 << (2 * idx)) == 0 {
                    replay(reader, &log, known);
                    assert_eq!(*known, log.cached, "reader {idx} after {step}");
                    assert!(reader.is_at(log.next()));
                }
            }
        }
    }

    #[test]
    fn readers_of_a_cache_with_tiers_know_what_is_at_each_level() {
        let mut log = EventLog::new(64);
        let nothing = || (CacheReader::new(None), [const { None::<HashSet<BlockKey>> }; MAX_TIERS + 1]);
        let mut readers: Vec<_> = (1..8).map(|_| nothing()).collect();
        let mut random = 1_u64;
        for step in 0..3000_u64 {
            let event = random_event(&mut random);
            // One tier is opened after a while, and later another.
            let holder = match random >> 60 & 3 {
                1 if step > 100 => BlockHolder::Tier(0),
                2 if step > 1000 => BlockHolder::Tier(1),
                _ => BlockHolder::Pool,
            };
            log.append(holder, vec![event]);
            for (idx, (reader, known)) in readers.iter_mut().enumerate() {
                if step % (1 << (2 * idx)) != 0 {
                    continue;
                }
                while let Some(batch) = read(reader, &log) {
                    if batch.kind != BatchKind::Events {
                        // All dumps of this size have one part.
                        *known = Default::default();
                    }
                    for event in batch.events {
                        let held = known[usize::from(event.level().0)].get_or_insert_default();
                        match event {
                            CacheEvent::Stored { blocks, .. } => {
                                let num_new = blocks.iter().filter(|&&block| held.insert(block)).count();
                                assert_eq!(num_new, blocks.len(), "each is told once");
                            }
                            CacheEvent::Removed { blocks, .. } => {
                                assert!(blocks.iter().all(|block| held.remove(block)), "it was there");
                            }
                        }
                    }
                }
                for (level, known) in known.iter().enumerate() {
                    let level = CacheLevel(level as u8);
                    let held = log.cached.iter().filter(|(_, cached)| cached.is_at(level));
                    let held: HashSet<_> = held.map(|(&block, _)| block).collect();
                    let is_told = level.tier().is_none_or(|tier| tier < log.num_tiers);
                    assert_eq!(
                        known.clone().unwrap_or_default(),
                        if is_told { held } else { HashSet::new() }
                    );
                    assert!(known.is_some() == is_told || level == CacheLevel::ALL, "{level:?} after {step}");
                }
            }
        }
        assert_eq!(log.num_tiers, 2);
    }

    #[test]
    fn the_log_is_bounded() {
        let mut log = EventLog::new(64);
        for round in 0..1000 {
            log.append(BlockHolder::Pool, vec![stored(None, 0..50), CacheEvent::removed(keys(0..50))]);
            assert!(log.ring.len() <= 2 && log.num_blocks <= 100, "{round}");
        }
        assert_eq!(log.cached.len(), 0);
    }

    #[test]
    fn a_reader_gets_what_it_missed_as_long_as_a_dump_is_longer() {
        let mut log = EventLog::new(64);
        log.append(BlockHolder::Tier(0), vec![stored(None, 0..1000)]);
        let mut reader = CacheReader::new(Some(log.next()));
        // More than the pool has.
        for (num_behind, kind) in [(800, BatchKind::Events), (1600, BatchKind::DumpEnd)] {
            for _ in 0..num_behind / 80 {
                log.append(BlockHolder::Pool, vec![stored(None, 0..40), CacheEvent::removed(keys(0..40))]);
            }
            let batch = read(&mut reader, &log).expect("it lacks some");
            assert_eq!(batch.kind, kind, "{num_behind} blocks behind");
        }
        assert!(log.num_blocks <= 1080, "{}", log.num_blocks);
    }

    #[test]
    fn a_block_is_stored_until_its_last_holder_has_removed_it() {
        let (pool, tier) = (BlockHolder::Pool, BlockHolder::Tier(0));
        let mut log = EventLog::new(64);
        log.append(pool, vec![stored(None, 0..4)]);
        log.append(tier, vec![stored(None, 0..3)]);
        assert_eq!(log.next(), 2, "nothing new but what the pool has");
        let num_held = |log: &EventLog, holder| log.num_held(holder, (0..10).map(BlockKey));
        assert_eq!([pool, tier].map(|holder| num_held(&log, holder)), [4, 3]);
        let removed = |range| CacheEvent::removed(keys(range));
        log.append(pool, vec![removed(2..4)]);
        log.append(tier, vec![stored(Some(2), 3..6), removed(0..2)]);
        log.append(pool, vec![removed(0..2)]);
        let mut reader = CacheReader::new(Some(0));
        let events = read(&mut reader, &log).expect("events").events;
        let expected = [
            stored(None, 0..4),
            stored(None, 0..4).at(CacheLevel::POOL),
            removed(3..4),
            removed(2..4).at(CacheLevel::POOL),
            stored(Some(2), 3..6),
            removed(0..2),
            removed(0..2).at(CacheLevel::POOL),
        ];
        assert_eq!(events, expected);
        assert_eq!(num_held(&log, tier), 0, "a prefix without its beginning");
        assert_eq!(log.cached.len(), 4);
    }

    #[test]
    fn two_tiers_are_told_apart_from_their_first_word_on() {
        let [pool, host, disk] = [BlockHolder::Pool, BlockHolder::Tier(0), BlockHolder::Tier(1)];
        let mut log = EventLog::new(64);
        log.append(host, Vec::new());
        log.append(disk, vec![stored(None, 0..4)]);
        log.append(host, vec![stored(None, 0..2)]);
        log.append(pool, vec![stored(None, 0..3)]);
        log.append(host, vec![CacheEvent::removed(keys(0..2))]);
        log.append(pool, vec![CacheEvent::removed(keys(1..3))]);
        let events = read(&mut CacheReader::new(Some(0)), &log).expect("events").events;
        let in_memory = CacheLevel::above(1);
        let nothing = CacheEvent::stored(None, Vec::new());
        let expected = [
            nothing.clone().at(CacheLevel::POOL),
            stored(None, 0..4),
            nothing.at(in_memory),
            stored(None, 0..2).at(in_memory),
            stored(None, 0..3).at(CacheLevel::POOL),
            stored(Some(1), 2..3).at(in_memory),
            CacheEvent::removed(keys(1..3)).at(CacheLevel::POOL),
            CacheEvent::removed(keys(1..3)).at(in_memory),
        ];
        assert_eq!(events, expected);
    }
}
