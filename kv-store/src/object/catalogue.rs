//! Which segments of an object store hold which blocks, which blocks are worth writing, and which own segment makes room. Pure:
//! names and hashes in, places out. It knows neither bytes nor the store, and no clock.

use std::{
    collections::{HashMap, HashSet},
    mem,
};

use baton_kv_cache::BlockHash;
use baton_kv_events::Keep;

/// Records that are known at most: 60 bytes of memory each.
const MAX_RECORDS: usize = 1 << 20;
/// Blocks whose first use is remembered: twice as many at most.
const MAX_SEEN: usize = 1 << 17;

/// What is known of a store.
#[derive(Debug)]
pub(crate) struct Catalogue {
    max_records: usize,
    segments: HashMap<u32, Segment>,
    by_name: HashMap<String, u32>,
    /// Segments of others that made room for records, or never had any. They are not learned as long as they exist.
    passed_over: HashSet<String>,
    by_hash: HashMap<BlockHash, RecordPlace>,
    /// Where else blocks are that several segments hold.
    others: HashMap<BlockHash, Vec<RecordPlace>>,
    /// Blocks on their way to a segment of this worker.
    pending: HashSet<BlockHash>,
    /// Of those, the ones that were forgotten meanwhile.
    spoiled: HashSet<BlockHash>,
    /// Own segments with a forgotten block, until they are deleted. They are not learned.
    unwanted: HashSet<String>,
    seen: Seen,
    num_records: usize,
    own_bytes: u64,
    num_own_records: usize,
    num_evicted: u64,
    next_segment: u32,
    num_uses: u64,
    /// Changes with every segment that comes or goes.
    version: u64,
}

/// What a reader was told of a store's segments.
#[derive(Debug, Default)]
pub struct SegmentReader {
    told: HashSet<u32>,
    /// Of the catalogue, when all was told. `None`: not all is.
    version: Option<u64>,
}

/// What a reader was not told of a store's segments.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SegmentChanges {
    /// Segments that are there, by number, with the blocks that they hold. No number comes twice.
    pub added: Vec<(u32, Vec<BlockHash>)>,
    /// Segments that are gone.
    pub removed: Vec<u32>,
    /// Nothing more is known now.
    pub is_current: bool,
}

/// Where a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RecordPlace {
    pub(crate) segment: u32,
    /// Its record there, numbered from 0.
    pub(crate) record: u32,
}

/// A segment.
#[derive(Debug)]
pub(crate) struct Segment {
    pub(crate) name: String,
    /// Of its records, in order. None if there was no room to know them.
    pub(crate) hashes: Vec<BlockHash>,
    num_bytes: u64,
    /// This worker wrote it, in this life or an earlier one.
    is_own: bool,
    /// The number of the last use.
    used: u64,
}

/// A segment as the store lists it.
#[derive(Debug)]
pub(crate) struct ListedSegment {
    pub(crate) name: String,
    pub(crate) num_bytes: u64,
    pub(crate) num_records: usize,
    pub(crate) is_own: bool,
}

/// Blocks that were used once, the newest ones.
#[derive(Debug, Default)]
struct Seen {
    new: HashSet<BlockHash>,
    old: HashSet<BlockHash>,
}

impl Default for Catalogue {
    fn default() -> Catalogue {
        Catalogue::new(MAX_RECORDS)
    }
}

impl Catalogue {
    /// Of at most so many records.
    pub(super) fn new(max_records: usize) -> Catalogue {
        Catalogue {
            max_records,
            segments: HashMap::new(),
            by_name: HashMap::new(),
            passed_over: HashSet::new(),
            by_hash: HashMap::new(),
            others: HashMap::new(),
            pending: HashSet::new(),
            spoiled: HashSet::new(),
            unwanted: HashSet::new(),
            seen: Seen::default(),
            num_records: 0,
            own_bytes: 0,
            num_own_records: 0,
            num_evicted: 0,
            next_segment: 0,
            num_uses: 0,
            version: 0,
        }
    }

    /// Where a block is.
    pub(crate) fn find(&self, hash: BlockHash) -> Option<RecordPlace> {
        self.by_hash.get(&hash).copied()
    }

    /// The segment of a place, if there still is one.
    pub(crate) fn segment(&self, place: RecordPlace) -> Option<&Segment> {
        self.segments.get(&place.segment)
    }

    /// Blocks were used: their segments make room last.
    pub(crate) fn used(&mut self, hashes: &[BlockHash]) {
        self.num_uses += 1;
        for hash in hashes {
            if let Some(place) = self.by_hash.get(hash) {
                self.segments.get_mut(&place.segment).expect("a place is in a segment").used = self.num_uses;
            }
        }
    }

    /// A request that ended used this block: whether it is to be written. That is at its second use, at the first if it is high, and
    /// never for those to whom it is low, unless a segment holds it or will. One that is to be written is pending, until
    /// [written](Self::written) or [given up](Self::give_up).
    pub(crate) fn admit(&mut self, hash: BlockHash, keep: Keep) -> bool {
        let is_known = self.by_hash.contains_key(&hash) || self.pending.contains(&hash);
        let is_worth_it = match keep {
            _ if is_known => false,
            Keep::Low => false,
            Keep::Normal => self.seen.again(hash),
            Keep::High(_) => true,
        };
        is_worth_it && self.pending.insert(hash)
    }

    /// Blocks that will not be written. They are at their next use.
    pub(crate) fn give_up(&mut self, hashes: impl IntoIterator<Item = BlockHash>) {
        hashes.into_iter().for_each(|hash| {
            self.pending.remove(&hash);
            self.spoiled.remove(&hash);
        });
    }

    /// This worker wrote a segment.
    pub(crate) fn written(&mut self, name: String, hashes: Vec<BlockHash>, num_bytes: u64) {
        self.add(name, hashes.clone(), num_bytes, true);
        self.give_up(hashes);
    }

    /// No try to write a segment succeeded. One of them may have stored it all the same.
    pub(crate) fn not_written(&mut self, name: String, hashes: Vec<BlockHash>) {
        if hashes.iter().any(|&hash| self.is_spoiled(hash)) {
            self.remove(&name);
            self.unwanted.insert(name);
        }
        self.give_up(hashes);
    }

    /// A segment exists. Nothing happens if it is known. If too much is, nothing is known of its records. An own one is unwanted if a block of
    /// it was forgotten while it was written.
    pub(crate) fn add(&mut self, name: String, mut hashes: Vec<BlockHash>, num_bytes: u64, is_own: bool) {
        let has_room = self.num_records + hashes.len() <= self.max_records;
        let is_known = self.by_name.contains_key(&name) || self.unwanted.contains(&name);
        if is_known || !has_room && !is_own {
            return;
        }
        if is_own && hashes.iter().any(|&hash| self.is_spoiled(hash)) {
            self.unwanted.insert(name);
            return;
        }
        if !has_room {
            hashes.clear();
        }
        let id = self.next_segment;
        self.next_segment += 1;
        for (record, &hash) in (0..).zip(&hashes) {
            if let Some(other) = self.by_hash.insert(hash, RecordPlace { segment: id, record }) {
                self.others.entry(hash).or_default().push(other);
            }
        }
        self.num_records += hashes.len();
        if is_own {
            self.own_bytes += num_bytes;
            self.num_own_records += hashes.len();
        }
        self.num_uses += 1;
        self.version += 1;
        self.by_name.insert(name.clone(), id);
        self.segments.insert(id, Segment { name, hashes, num_bytes, is_own, used: self.num_uses });
    }

    /// A segment does not exist any more.
    pub(crate) fn remove(&mut self, name: &str) {
        let Some(id) = self.by_name.remove(name) else { return };
        let segment = self.segments.remove(&id).expect("a name is of a segment");
        self.version += 1;
        self.num_records -= segment.hashes.len();
        if segment.is_own {
            self.own_bytes -= segment.num_bytes;
            self.num_own_records -= segment.hashes.len();
        }
        for (record, hash) in (0..).zip(segment.hashes) {
            self.forget(hash, RecordPlace { segment: id, record });
        }
    }

    /// A place turned out not to hold its block. Another segment may.
    pub(crate) fn forget(&mut self, hash: BlockHash, place: RecordPlace) {
        if let Some(others) = self.others.get_mut(&hash) {
            others.retain(|other| *other != place);
        }
        if self.by_hash.get(&hash) == Some(&place) {
            match self.others.get_mut(&hash).and_then(Vec::pop) {
                Some(other) => self.by_hash.insert(hash, other),
                None => self.by_hash.remove(&hash),
            };
        }
        if self.others.get(&hash).is_some_and(Vec::is_empty) {
            self.others.remove(&hash);
        }
    }

    /// These blocks are not to be found any more. Those that are pending are not to be written, own segments with one of them are
    /// [to be deleted](Self::unwanted), and others' segments are taken to lack them.
    pub(crate) fn forget_all(&mut self, hashes: &[BlockHash]) {
        for &hash in hashes {
            while let Some(place) = self.find(hash) {
                let segment = &self.segments[&place.segment];
                if segment.is_own {
                    let name = segment.name.clone();
                    self.remove(&name);
                    self.unwanted.insert(name);
                } else {
                    self.forget(hash, place);
                }
            }
            if self.pending.contains(&hash) {
                self.spoiled.insert(hash);
            }
        }
    }

    /// Whether a block was forgotten while it was pending.
    pub(crate) fn is_spoiled(&self, hash: BlockHash) -> bool {
        self.spoiled.contains(&hash)
    }

    /// Own segments that are to be deleted for what they hold.
    pub(crate) fn unwanted(&self) -> Vec<String> {
        self.unwanted.iter().cloned().collect()
    }

    /// An unwanted segment does not exist any more.
    pub(crate) fn deleted(&mut self, name: &str) {
        self.unwanted.remove(name);
    }

    /// The store listed these segments: others are gone, unless they were added after [`next_segment`](Self::next_segment) was
    /// `known_before`. If these are not the whole list, they are all of this worker's own, and nothing is said of the others.
    pub(crate) fn listed(&mut self, names: &HashSet<&str>, known_before: u32, is_whole: bool) {
        let known = self.by_name.iter().filter(|&(name, &id)| {
            id < known_before && !names.contains(name.as_str()) && (is_whole || self.segments[&id].is_own)
        });
        let gone: Vec<String> = known.map(|(name, _)| name.clone()).collect();
        gone.iter().for_each(|name| self.remove(name));
        self.passed_over.retain(|name| names.contains(name.as_str()));
    }

    /// Which of these segments, the oldest first, are to be learned: the newest that can be known together, own ones before others. Older
    /// own ones count when room is made, and nothing else is known of them. Others are passed over.
    pub(crate) fn choose(&mut self, new: Vec<ListedSegment>) -> Vec<ListedSegment> {
        let mut room = self.most_records();
        let mut takes = |num_records: usize| {
            let rest = room.checked_sub(num_records);
            room = rest.unwrap_or(room);
            rest.is_some()
        };
        let mut newest_without_room = |is_own: bool| {
            new.iter().rposition(|segment| segment.is_own == is_own && !takes(segment.num_records))
        };
        let (own_end, others_end) = (newest_without_room(true), newest_without_room(false));
        let mut chosen = Vec::new();
        for (idx, segment) in new.into_iter().enumerate() {
            let end = if segment.is_own { own_end } else { others_end };
            if Some(idx) > end {
                chosen.push(segment);
            } else if segment.is_own {
                self.add(segment.name, Vec::new(), segment.num_bytes, true);
            } else {
                self.passed_over.insert(segment.name);
            }
        }
        chosen
    }

    /// Records that may stay known. The last sixteenth is for segments that are being written or learned.
    fn most_records(&self) -> usize {
        self.max_records - self.max_records / 16
    }

    /// The number of the next segment that is added.
    pub(crate) fn next_segment(&self) -> u32 {
        self.next_segment
    }

    /// Whether there is a segment of this name, or one that is passed over or unwanted.
    pub(crate) fn is_known(&self, name: &str) -> bool {
        self.by_name.contains_key(name) || self.passed_over.contains(name) || self.unwanted.contains(name)
    }

    /// Forgets what was used longest ago: own segments while they have more than so many bytes, any while too many records are known.
    /// Returns the first own one, which is to be deleted; `None`: there is room.
    pub(crate) fn make_room(&mut self, max_bytes: u64) -> Option<String> {
        loop {
            let is_too_large = self.own_bytes > max_bytes;
            if !is_too_large && self.num_records <= self.most_records() {
                return None;
            }
            let may_go = self.segments.values().filter(|segment| segment.is_own || !is_too_large);
            let oldest = may_go.min_by_key(|segment| segment.used)?;
            let (name, num_records, is_own) = (oldest.name.clone(), oldest.hashes.len(), oldest.is_own);
            self.remove(&name);
            if is_own {
                self.num_evicted += num_records as u64;
                return Some(name);
            }
            self.passed_over.insert(name);
        }
    }

    /// What the reader lacks, of at most so many new segments at once. `None`: nothing. At first it is told that it is current, also if
    /// there is no segment.
    pub(crate) fn changes(&self, reader: &mut SegmentReader, max_added: usize) -> Option<SegmentChanges> {
        if reader.version == Some(self.version) {
            return None;
        }
        let removed: Vec<u32> =
            reader.told.iter().filter(|id| !self.segments.contains_key(id)).copied().collect();
        removed.iter().for_each(|id| {
            reader.told.remove(id);
        });
        let new = self.segments.iter().filter(|(id, _)| !reader.told.contains(id));
        let added: Vec<_> = new.take(max_added).map(|(&id, segment)| (id, segment.hashes.clone())).collect();
        reader.told.extend(added.iter().map(|&(id, _)| id));
        let is_current = reader.told.len() == self.segments.len();
        reader.version = is_current.then_some(self.version);
        Some(SegmentChanges { added, removed, is_current })
    }

    /// The first records of a segment, at most so many; of another segment for another `nth`.
    pub(crate) fn any_places(&self, nth: usize, max_records: usize) -> Vec<(BlockHash, RecordPlace)> {
        let known = || self.segments.iter().filter(|(_, segment)| !segment.hashes.is_empty());
        let Some((&id, segment)) = known().nth(nth % known().count().max(1)) else { return Vec::new() };
        let places = (0..).map(|record| RecordPlace { segment: id, record });
        segment.hashes.iter().copied().zip(places).take(max_records).collect()
    }

    /// Records in segments that this worker wrote.
    pub(crate) fn num_own_records(&self) -> usize {
        self.num_own_records
    }

    /// Records of own segments that made room.
    pub(crate) fn num_evicted(&self) -> u64 {
        self.num_evicted
    }
}

impl Seen {
    /// Whether the block was seen before. It is from now on.
    fn again(&mut self, hash: BlockHash) -> bool {
        if self.new.contains(&hash) || self.old.contains(&hash) {
            return true;
        }
        if self.new.len() == MAX_SEEN {
            self.old = mem::take(&mut self.new);
        }
        self.new.insert(hash);
        false
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::testing::chain;

    fn found(catalogue: &Catalogue, hashes: &[BlockHash]) -> usize {
        hashes.iter().filter(|&&hash| catalogue.find(hash).is_some()).count()
    }

    #[test]
    fn a_block_is_written_at_its_second_use_and_once() {
        let mut catalogue = Catalogue::default();
        let [a, b] = [0, 1].map(|idx| chain(1, 2)[idx]);
        assert_eq!([a, b, a, a].map(|hash| catalogue.admit(hash, Keep::Normal)), [false, false, true, false]);
        catalogue.give_up([a]);
        assert!(catalogue.admit(a, Keep::Normal), "it was not written");
        catalogue.written("one".into(), vec![a], 10);
        assert!(!catalogue.admit(a, Keep::Normal) && catalogue.admit(b, Keep::Normal));
        catalogue.remove("one");
        assert!(catalogue.admit(a, Keep::Normal), "it is gone");
    }

    #[test]
    fn a_block_to_be_kept_is_written_at_its_first_use_and_a_low_one_never() {
        let mut catalogue = Catalogue::default();
        let [a, b] = [0, 1].map(|idx| chain(1, 2)[idx]);
        assert!(catalogue.admit(a, Keep::High(Duration::from_secs(1))));
        let low = [Keep::Low, Keep::Low, Keep::Normal, Keep::Normal];
        assert_eq!(low.map(|keep| catalogue.admit(b, keep)), [false, false, false, true]);
    }

    #[test]
    fn a_forgotten_block_is_in_no_segment_and_own_ones_with_it_are_to_be_deleted() {
        let mut catalogue = Catalogue::default();
        let [a, b] = [1, 2].map(|seed| chain(seed, 2));
        catalogue.add("own".into(), a.clone(), 10, true);
        catalogue.add("other".into(), [&a[..], &b].concat(), 10, false);
        catalogue.forget_all(&[a[0]]);
        assert_eq!((found(&catalogue, &a), found(&catalogue, &b)), (1, 2), "the rest of the other is used");
        assert_eq!((catalogue.unwanted(), catalogue.own_bytes), (vec!["own".to_owned()], 0));
        // It is listed until it is deleted.
        catalogue.listed(&HashSet::from(["own", "other"]), catalogue.next_segment(), true);
        assert!(catalogue.is_known("own"));
        catalogue.add("own".into(), a.clone(), 10, true);
        assert!(catalogue.find(a[0]).is_none());
        catalogue.deleted("own");
        assert!(catalogue.unwanted().is_empty() && !catalogue.is_known("own"));
        assert!(!catalogue.is_spoiled(a[0]), "nothing was pending");
    }

    #[test]
    fn a_block_that_is_forgotten_while_it_is_pending_makes_its_segment_unwanted() {
        let high = Keep::High(Duration::from_secs(1));
        // The listing may have the segment before its writer knows that it is written.
        for is_listed_first in [false, true] {
            let mut catalogue = Catalogue::default();
            let a = chain(1, 2);
            assert!(a.iter().all(|&hash| catalogue.admit(hash, high)));
            catalogue.forget_all(&a[..1]);
            assert!(catalogue.is_spoiled(a[0]) && !catalogue.is_spoiled(a[1]));
            assert!(!catalogue.admit(a[0], high), "it is on its way");
            if is_listed_first {
                catalogue.add("own".into(), a.clone(), 10, true);
            }
            catalogue.written("own".into(), a.clone(), 10);
            assert_eq!((found(&catalogue, &a), catalogue.unwanted()), (0, vec!["own".to_owned()]));
            assert!(catalogue.admit(a[0], high) && !catalogue.is_spoiled(a[0]), "it is computed again");
            // A try that failed may have stored it.
            catalogue.forget_all(&a[..1]);
            catalogue.not_written("another".into(), a.clone());
            catalogue.add("another".into(), a.clone(), 10, true);
            assert!(catalogue.find(a[1]).is_none() && catalogue.unwanted().contains(&"another".to_owned()));
        }
    }

    #[test]
    fn first_uses_are_remembered_for_a_while() {
        let mut seen = Seen::default();
        let hash = |idx: u32| chain(1, 1)[0].child(&[idx]);
        assert!(!seen.again(hash(0)));
        (1..=MAX_SEEN as u32).for_each(|idx| assert!(!seen.again(hash(idx))));
        assert!(seen.again(hash(0)));
        (MAX_SEEN as u32 + 1..=2 * MAX_SEEN as u32).for_each(|idx| assert!(!seen.again(hash(idx))));
        assert!(!seen.again(hash(0)));
        assert!(seen.new.len() + seen.old.len() <= 2 * MAX_SEEN);
    }

    #[test]
    fn the_own_segment_used_longest_ago_makes_room() {
        let mut catalogue = Catalogue::default();
        let [a, b, c] = [1, 2, 3].map(|seed| chain(seed, 2));
        catalogue.add("a".into(), a.clone(), 10, true);
        catalogue.add("b".into(), b.clone(), 10, true);
        catalogue.add("c".into(), c.clone(), 10, false);
        assert_eq!(catalogue.make_room(20), None, "others' segments are theirs");
        catalogue.used(&a);
        assert_eq!(catalogue.make_room(19), Some("b".into()));
        assert_eq!([&a, &b, &c].map(|hashes| found(&catalogue, hashes)), [2, 0, 2]);
        assert_eq!((catalogue.num_own_records(), catalogue.num_evicted()), (2, 2));
        assert_eq!(catalogue.make_room(19), None);
    }

    #[test]
    fn what_the_store_lists_is_what_it_has() {
        let mut catalogue = Catalogue::default();
        let [a, b, c] = [1, 2, 3].map(|seed| chain(seed, 2));
        catalogue.add("a".into(), a.clone(), 10, true);
        catalogue.add("b".into(), b.clone(), 10, false);
        let known_before = catalogue.next_segment();
        catalogue.add("c".into(), c.clone(), 10, true);
        catalogue.listed(&HashSet::from(["b", "d"]), known_before, true);
        let held = [&a, &b, &c].map(|hashes| found(&catalogue, hashes));
        assert_eq!(held, [0, 2, 2], "c was written after the listing began");
        assert!(!catalogue.is_known("d") && catalogue.is_known("b"));
        assert_eq!((catalogue.num_own_records(), catalogue.own_bytes), (2, 10));
    }

    #[test]
    fn a_block_of_two_segments_is_found_in_either_when_the_other_is_gone() {
        let a = chain(1, 2);
        for gone in ["one", "two"] {
            let mut catalogue = Catalogue::default();
            catalogue.add("one".into(), a.clone(), 10, true);
            catalogue.add("two".into(), a.clone(), 10, false);
            catalogue.remove(gone);
            assert_eq!(found(&catalogue, &a), 2, "{gone} is gone");
            let place = catalogue.find(a[0]).expect("it is in the other");
            catalogue.forget(a[0], place);
            catalogue.remove(if gone == "one" { "two" } else { "one" });
            assert_eq!((found(&catalogue, &a), catalogue.others.len()), (0, 0));
        }
    }

    #[test]
    fn what_was_used_longest_ago_makes_room_for_records_and_others_segments_are_not_deleted() {
        let mut catalogue = Catalogue::new(32);
        let [a, b, c, d] = [1, 2, 3, 4].map(|seed| chain(seed, 10));
        catalogue.add("a".into(), a.clone(), 10, true);
        catalogue.add("b".into(), b.clone(), 10, false);
        catalogue.add("c".into(), c.clone(), 10, true);
        catalogue.used(&a);
        assert_eq!(catalogue.make_room(100), None, "there is room for these");
        catalogue.add("d".into(), d[..2].to_vec(), 10, true);
        assert!(catalogue.admit(d[2], Keep::High(Duration::from_secs(1))), "room is made");
        assert_eq!(catalogue.make_room(100), None, "it is of another worker");
        assert_eq!([&a, &b, &c].map(|hashes| found(&catalogue, hashes)), [10, 0, 10]);
        assert!(catalogue.is_known("b"), "it is not learned again");
        catalogue.add("e".into(), b.clone(), 10, false);
        assert_eq!(catalogue.make_room(100), Some("c".into()));
        assert_eq!(catalogue.make_room(100), None);
        assert_eq!([&a, &b, &c].map(|hashes| found(&catalogue, hashes)), [10, 10, 0]);
        assert_eq!((catalogue.num_own_records(), catalogue.num_evicted()), (12, 10));
    }

    #[test]
    fn the_newest_segments_are_learned_if_not_all_can_be_and_own_ones_before_others() {
        let mut catalogue = Catalogue::new(32);
        let new = |&(name, is_own): &(&str, bool)| ListedSegment {
            name: name.to_owned(),
            num_bytes: 10,
            num_records: 10,
            is_own,
        };
        let listed = [("a", true), ("b", false), ("c", false), ("d", true), ("e", false)];
        let chosen = catalogue.choose(listed.iter().map(new).collect());
        assert!(chosen.iter().map(|segment| &segment.name[..]).eq(["a", "d", "e"]), "{chosen:?}");
        let is_known = listed.map(|(name, _)| catalogue.is_known(name));
        assert_eq!(is_known, [false, true, true, false, false], "b and c are passed over");
        catalogue.listed(&HashSet::from(["a", "c", "d", "e"]), catalogue.next_segment(), true);
        assert_eq!(["b", "c"].map(|name| catalogue.is_known(name)), [false, true]);
        // Own ones that are not learned make room first.
        let chosen = catalogue.choose(["f", "g", "h", "i"].map(|name| new(&(name, true))).into());
        assert_eq!((chosen.len(), catalogue.own_bytes), (3, 10));
        catalogue.add("i".into(), chain(1, 10), 10, true);
        assert_eq!(catalogue.make_room(10), Some("f".into()));
    }

    #[test]
    fn a_worker_makes_room_also_when_what_it_wrote_cannot_be_known() {
        let mut catalogue = Catalogue::new(32);
        catalogue.add("others".into(), chain(1, 30), 280, false);
        let own = chain(2, 6);
        catalogue.add("own".into(), own.clone(), 60, true);
        assert_eq!((found(&catalogue, &own), catalogue.own_bytes), (0, 60));
        assert_eq!(catalogue.make_room(59), Some("own".into()));
        assert_eq!(catalogue.own_bytes, 0);
        assert_eq!(catalogue.any_places(7, 3).len(), 3);
    }

    #[test]
    fn what_a_part_of_a_listing_lacks_is_gone_if_it_is_own() {
        let mut catalogue = Catalogue::default();
        for (seed, name, is_own) in [(1, "a", true), (2, "b", false), (3, "c", true), (4, "d", false)] {
            catalogue.add(name.into(), chain(seed, 2), 10, is_own);
        }
        catalogue.listed(&HashSet::from(["b", "c"]), catalogue.next_segment(), false);
        assert_eq!(["a", "b", "c", "d"].map(|name| catalogue.is_known(name)), [false, true, true, true]);
    }

    #[test]
    fn a_reader_is_told_of_each_segment_once_and_when_it_is_gone() {
        let mut catalogue = Catalogue::default();
        let mut reader = SegmentReader::default();
        let empty = SegmentChanges { is_current: true, ..SegmentChanges::default() };
        assert_eq!([(); 2].map(|()| catalogue.changes(&mut reader, 2)), [Some(empty), None]);

        let segments = [1, 2, 3].map(|seed| (seed - 1, chain(u64::from(seed), 2)));
        for (id, hashes) in &segments {
            catalogue.add(id.to_string(), hashes.clone(), 10, true);
        }
        let [first, second] = [(); 2].map(|()| catalogue.changes(&mut reader, 2).expect("three are new"));
        assert_eq!((first.added.len(), first.is_current), (2, false));
        assert_eq!((second.added.len(), second.is_current), (1, true));
        let mut told = [first.added, second.added].concat();
        told.sort();
        assert_eq!((told, catalogue.changes(&mut reader, 2)), (segments.to_vec(), None));

        catalogue.remove("1");
        let gone = SegmentChanges { removed: vec![1], is_current: true, ..SegmentChanges::default() };
        assert_eq!([(); 2].map(|()| catalogue.changes(&mut reader, 2)), [Some(gone), None]);
        // One that came and went meanwhile is not told of.
        catalogue.add("x".into(), chain(9, 2), 10, false);
        catalogue.remove("x");
        let nothing = SegmentChanges { is_current: true, ..SegmentChanges::default() };
        assert_eq!(catalogue.changes(&mut reader, 2), Some(nothing));
    }

    #[test]
    fn a_block_of_two_segments_is_in_the_newer_one_and_forgotten_only_there() {
        let mut catalogue = Catalogue::default();
        let a = chain(1, 2);
        catalogue.add("one".into(), a.clone(), 10, true);
        let old = catalogue.find(a[0]).expect("it was added");
        catalogue.add("two".into(), a.clone(), 10, true);
        catalogue.forget(a[0], old);
        catalogue.remove("one");
        assert_eq!(found(&catalogue, &a), 2);
        let place = catalogue.find(a[0]).expect("it is in the other");
        assert_eq!(catalogue.segment(place).map(|segment| &segment.name[..]), Some("two"));
        catalogue.forget(a[0], place);
        assert_eq!((found(&catalogue, &a), found(&catalogue, &a[1..])), (1, 1));
    }
}
