//! Which blocks the tiers hold, where, and which make room. Pure: block hashes in, slots out. It knows neither bytes nor
//! files, and no clock.
//!
//! ```text
//!                begin_write                end_write
//!   free slot  --------------->  writing  ------------->  holds a block  ---+
//!       ^                           |                          |            | chosen for another block
//!       |        fail_write         |          forget          |            v
//!       +---------------------------+--------------------------+        writing
//! ```
//!
//! A block is found while a slot holds it. It is in each tier at most once, and may be in several. The slots of a tier may be those
//! of other workers, too: then this follows what they do with them. If two of them write the same block at the same time, all find
//! it in the lower slot.

use std::{
    collections::{BTreeSet, HashMap},
    mem,
    time::Duration,
};

use baton_kv_cache::BlockHash;
use baton_kv_events::{BlockKey, CacheEvent, EvictionOrder, Keep, PendingEvents};

/// What the tiers hold. Tiers are numbered from the fastest, 0; slots in each tier from 0.
#[derive(Debug)]
pub struct Directory {
    tiers: Vec<Tier>,
}

/// What another worker did to a slot that workers share.
#[derive(Debug, PartialEq, Eq)]
pub enum SlotChange {
    /// It is free.
    Free,
    /// It is being written: what it held is gone.
    Taken,
    /// It holds this block, which follows `before`, to be kept so.
    Holds {
        /// Of the block.
        hash: BlockHash,
        /// `None`: it begins a sequence.
        before: Option<BlockHash>,
        /// How it is to be kept.
        keep: Keep,
    },
}

/// Where a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotPlace {
    /// The tier.
    pub tier: usize,
    /// Its slot there.
    pub slot: u32,
}

#[derive(Debug)]
struct Tier {
    slots: Vec<Slot>,
    /// How often each slot has changed.
    versions: Vec<u32>,
    /// Low slots are taken first, which keeps the touched memory small.
    free: BTreeSet<u32>,
    /// Slots that are being written and, of those that hold this block, the lowest.
    by_hash: HashMap<BlockHash, u32>,
    /// The slots that hold a block.
    order: EvictionOrder,
    num_evicted: u64,
    /// Slots that are free because a lower one holds the same block.
    doubles: Vec<u32>,
    events: PendingEvents,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    Free,
    Writing(BlockHash),
    Holds(BlockHash),
    /// Another worker writes it.
    Taken,
}

impl Directory {
    /// Of empty tiers with so many slots.
    pub fn new(num_slots: &[u32]) -> Directory {
        Directory { tiers: num_slots.iter().map(|&num| Tier::new(num)).collect() }
    }

    /// The time since any fixed moment, for blocks that are kept for some time.
    pub fn set_time(&mut self, now: Duration) {
        self.tiers.iter_mut().for_each(|tier| tier.order.set_time(now));
    }

    /// The fastest place of a block; `None` when no tier holds it.
    pub fn find(&self, hash: BlockHash) -> Option<SlotPlace> {
        (0..self.tiers.len()).find_map(|tier| self.find_in(tier, hash).map(|slot| SlotPlace { tier, slot }))
    }

    /// The places of the longest prefix of `hashes`, a sequence's hashes in order.
    pub fn find_prefix(&self, hashes: &[BlockHash]) -> Vec<SlotPlace> {
        hashes.iter().map_while(|&hash| self.find(hash)).collect()
    }

    /// Whether a tier neither holds a block nor will, and may take it.
    pub fn lacks(&self, tier: usize, hash: BlockHash, keep: Keep) -> bool {
        let Tier { by_hash, free, .. } = &self.tiers[tier];
        !by_hash.contains_key(&hash) && (keep != Keep::Low || !free.is_empty())
    }

    /// Whether `place` holds this block.
    pub fn holds(&self, place: SlotPlace, hash: BlockHash) -> bool {
        self.tiers[place.tier].slots[place.slot as usize] == Slot::Holds(hash)
    }

    /// It changes with what a slot is for: while it is the same, the slot holds the same record.
    pub fn version(&self, place: SlotPlace) -> u32 {
        self.tiers[place.tier].versions[place.slot as usize]
    }

    /// A sequence used these blocks, which are its hashes in order, and wants them to be kept so. Of blocks beyond `keeps` it says
    /// nothing. Returns which blocks are to be kept otherwise than before, and how.
    pub fn used(&mut self, hashes: &[BlockHash], keeps: &[Keep]) -> Vec<(SlotPlace, Keep)> {
        let mut changed = Vec::new();
        for (tier_idx, tier) in self.tiers.iter_mut().enumerate() {
            // In reverse, so that the last block of a sequence makes room first: it is useless without the blocks before it.
            for (idx, hash) in hashes.iter().enumerate().rev() {
                let Some(&slot) = tier.by_hash.get(hash) else { continue };
                let is_held = matches!(tier.slots[slot as usize], Slot::Holds(_));
                if is_held {
                    tier.order.remove(slot);
                }
                if let Some(&keep) = keeps.get(idx) {
                    let before = tier.order.keep(slot);
                    tier.order.mark(slot, keep);
                    let after = tier.order.keep(slot);
                    if is_held && before != after {
                        changed.push((SlotPlace { tier: tier_idx, slot }, after));
                    }
                }
                if is_held {
                    tier.order.push(slot);
                }
            }
        }
        changed
    }

    /// A slot for block `block_idx` of a sequence, free or taken from the first block that makes room. `None`: the tier
    /// holds the block or will, every slot is being written, or the sequence is longer than the tier, whose end would make
    /// its beginning go. A low block takes a free slot alone: it would make room for the next one of its own sequence.
    pub fn begin_write(
        &mut self,
        tier_idx: usize,
        hash: BlockHash,
        block_idx: u32,
        keep: Keep,
    ) -> Option<u32> {
        let tier = &mut self.tiers[tier_idx];
        if tier.by_hash.contains_key(&hash) || block_idx as usize >= tier.slots.len() {
            return None;
        }
        let slot = match tier.free.pop_first() {
            Some(slot) => slot,
            None if keep == Keep::Low => return None,
            None => {
                let slot = tier.order.pop()?;
                let Slot::Holds(evicted) = tier.slots[slot as usize] else {
                    unreachable!("only slots that hold a block are in the order")
                };
                tier.by_hash.remove(&evicted);
                tier.num_evicted += 1;
                tier.events.removed(key(evicted));
                slot
            }
        };
        tier.set(slot, Slot::Writing(hash));
        tier.order.mark(slot, keep);
        tier.by_hash.insert(hash, slot);
        Some(slot)
    }

    /// The slot holds its block now, which follows `before`. Nothing happens if another worker has taken the slot already.
    pub fn end_write(&mut self, place: SlotPlace, before: Option<BlockHash>) {
        let tier = &mut self.tiers[place.tier];
        let Slot::Writing(hash) = tier.slots[place.slot as usize] else { return };
        tier.hold(place.slot, hash, before);
    }

    /// The block was not written: its slot is free.
    pub fn fail_write(&mut self, place: SlotPlace) {
        let tier = &mut self.tiers[place.tier];
        if let Slot::Writing(_) = tier.slots[place.slot as usize] {
            tier.free_slot(place.slot);
        }
    }

    /// The slot turned out not to hold its block: it is free. Nothing happens if it holds another block meanwhile.
    pub fn forget(&mut self, place: SlotPlace, hash: BlockHash) {
        if self.holds(place, hash) {
            self.vacated(place);
        }
    }

    /// A tier holds none of these blocks any more. Returns the slots that held one: they are free.
    pub fn forget_blocks(&mut self, tier: usize, hashes: &[BlockHash]) -> Vec<u32> {
        let slots = self.slots_of(tier, hashes);
        slots.iter().for_each(|&slot| self.vacated(SlotPlace { tier, slot }));
        slots
    }

    /// Other workers that have the slots of this tier changed some.
    pub fn follow(&mut self, tier: usize, changes: Vec<(u32, SlotChange)>) {
        // First of all what is gone: a block may be in another slot now.
        changes.iter().for_each(|&(slot, _)| self.vacated(SlotPlace { tier, slot }));
        for (slot, change) in changes {
            match change {
                SlotChange::Free => {}
                SlotChange::Taken => {
                    let tier = &mut self.tiers[tier];
                    tier.free.remove(&slot);
                    tier.set(slot, Slot::Taken);
                }
                SlotChange::Holds { hash, before, keep } => {
                    self.restore(SlotPlace { tier, slot }, hash, before, keep);
                }
            }
        }
    }

    /// A slot holds nothing now.
    fn vacated(&mut self, place: SlotPlace) {
        let tier = &mut self.tiers[place.tier];
        let before = tier.slots[place.slot as usize];
        tier.free_slot(place.slot);
        if let Slot::Holds(hash) = before {
            tier.events.removed(key(hash));
        }
    }

    /// The slot whose block would make room for one that is to be kept so; `None` if that takes a free slot, or gets none.
    pub fn next_evicted(&self, tier_idx: usize, keep: Keep) -> Option<u32> {
        let tier = &self.tiers[tier_idx];
        if keep == Keep::Low || !tier.free.is_empty() { None } else { tier.order.first() }
    }

    /// Another worker used the block that a slot holds, and all say that it is to be kept so.
    pub fn used_slot(&mut self, SlotPlace { tier, slot }: SlotPlace, keep: Keep) {
        let tier = &mut self.tiers[tier];
        if matches!(tier.slots[slot as usize], Slot::Holds(_)) {
            tier.order.remove(slot);
            tier.order.mark(slot, keep);
            tier.order.push(slot);
        }
    }

    /// The slots of a tier that hold some of these blocks.
    pub fn slots_of(&self, tier: usize, hashes: &[BlockHash]) -> Vec<u32> {
        hashes.iter().filter_map(|&hash| self.find_in(tier, hash)).collect()
    }

    /// A slot that neither holds a block nor is written by this worker was found to hold this block, to be kept so. If the tier holds
    /// the block twice now, the higher slot is free.
    pub fn restore(&mut self, place: SlotPlace, hash: BlockHash, before: Option<BlockHash>, keep: Keep) {
        let tier = &mut self.tiers[place.tier];
        debug_assert!(matches!(tier.slots[place.slot as usize], Slot::Free | Slot::Taken));
        tier.free.remove(&place.slot);
        tier.order.mark(place.slot, keep);
        tier.hold(place.slot, hash, before);
    }

    /// Blocks that a tier holds.
    pub fn num_held(&self, tier: usize) -> usize {
        self.tiers[tier].order.len()
    }

    /// Blocks that made room for others in a tier.
    pub fn num_evicted(&self, tier: usize) -> u64 {
        self.tiers[tier].num_evicted
    }

    /// Slots of a tier that this counts as free, as lower ones hold the same blocks, since the last call.
    pub fn take_doubles(&mut self, tier: usize) -> Vec<u32> {
        mem::take(&mut self.tiers[tier].doubles)
    }

    /// Which blocks came into a tier, and which left it, since the last call.
    pub fn take_events(&mut self, tier: usize) -> Vec<CacheEvent> {
        self.tiers[tier].events.take()
    }

    fn find_in(&self, tier: usize, hash: BlockHash) -> Option<u32> {
        self.tiers[tier].find(hash)
    }
}

impl Tier {
    fn new(num_slots: u32) -> Tier {
        Tier {
            slots: vec![Slot::Free; num_slots as usize],
            versions: vec![0; num_slots as usize],
            free: (0..num_slots).collect(),
            by_hash: HashMap::new(),
            order: EvictionOrder::new(num_slots as usize),
            num_evicted: 0,
            doubles: Vec::new(),
            events: PendingEvents::default(),
        }
    }

    fn find(&self, hash: BlockHash) -> Option<u32> {
        let slot = *self.by_hash.get(&hash)?;
        matches!(self.slots[slot as usize], Slot::Holds(_)).then_some(slot)
    }

    /// A slot that is in no list holds this block now, which follows `before`, unless a lower one does.
    fn hold(&mut self, slot: u32, hash: BlockHash, before: Option<BlockHash>) {
        if self.find(hash).is_none() {
            self.events.stored(before.map(key), key(hash));
        }
        self.set(slot, Slot::Holds(hash));
        self.order.push(slot);
        let other = self.by_hash.get(&hash).copied().unwrap_or(slot);
        let is_double = other != slot && self.slots[other as usize] == Slot::Holds(hash);
        if is_double {
            self.free_slot(slot.max(other));
            self.doubles.push(slot.max(other));
        }
        self.by_hash.insert(hash, if is_double { slot.min(other) } else { slot });
    }

    fn free_slot(&mut self, slot: u32) {
        if let Slot::Holds(hash) | Slot::Writing(hash) = self.slots[slot as usize]
            && self.by_hash.get(&hash) == Some(&slot)
        {
            self.by_hash.remove(&hash);
        }
        if self.order.contains(slot) {
            self.order.remove(slot);
        }
        self.order.forget(slot);
        self.set(slot, Slot::Free);
        self.free.insert(slot);
    }

    fn set(&mut self, slot: u32, state: Slot) {
        self.slots[slot as usize] = state;
        self.versions[slot as usize] = self.versions[slot as usize].wrapping_add(1);
    }
}

fn key(hash: BlockHash) -> BlockKey {
    BlockKey(hash.short())
}

#[cfg(test)]
mod tests {
    use baton_kv_cache::HashRoot;

    use super::*;

    /// The hashes of a sequence, by a seed.
    fn chain(seed: u32, num_blocks: u32) -> Vec<BlockHash> {
        let tokens: Vec<u32> = (0..num_blocks).map(|idx| 1000 * seed + idx).collect();
        HashRoot::new("model", "", "").block_hashes(&tokens, 1).collect()
    }

    fn keys(hashes: &[BlockHash]) -> Vec<BlockKey> {
        hashes.iter().copied().map(key).collect()
    }

    /// Writes a sequence's blocks to a tier, as far as there are slots for them.
    fn write(directory: &mut Directory, tier: usize, hashes: &[BlockHash]) {
        write_kept(directory, tier, hashes, Keep::Normal);
    }

    fn write_kept(directory: &mut Directory, tier: usize, hashes: &[BlockHash], keep: Keep) {
        for (idx, &hash) in hashes.iter().enumerate() {
            if let Some(slot) = directory.begin_write(tier, hash, idx as u32, keep) {
                directory.end_write(SlotPlace { tier, slot }, idx.checked_sub(1).map(|idx| hashes[idx]));
            }
        }
        directory.used(hashes, &vec![keep; hashes.len()]);
    }

    #[test]
    fn kept_blocks_make_room_after_others_and_low_ones_before_them() {
        let mut directory = Directory::new(&[6]);
        let [a, b, c, d] = [1, 2, 3, 4].map(|seed| chain(seed, 2));
        write_kept(&mut directory, 0, &a, Keep::High(Duration::from_secs(60)));
        write_kept(&mut directory, 0, &b, Keep::Normal);
        write_kept(&mut directory, 0, &c, Keep::Low);
        let found =
            |directory: &Directory| [&a, &b, &c, &d].map(|hashes| directory.find_prefix(hashes).len());
        write_kept(&mut directory, 0, &d, Keep::Low);
        assert_eq!(found(&directory), [2, 2, 2, 0], "no slot is free for a low block");
        assert!(!directory.lacks(0, d[0], Keep::Low) && directory.lacks(0, d[0], Keep::Normal));
        write(&mut directory, 0, &chain(5, 2));
        assert_eq!(found(&directory), [2, 2, 0, 0]);
        write(&mut directory, 0, &chain(6, 2));
        directory.used(&a, &[]);
        write(&mut directory, 0, &chain(7, 2));
        assert_eq!(found(&directory), [2, 0, 0, 0]);
        directory.set_time(Duration::from_secs(60));
        write(&mut directory, 0, &chain(8, 4));
        assert_eq!(found(&directory), [0; 4]);
    }

    #[test]
    fn what_is_said_of_a_block_that_is_being_written_holds_when_it_is() {
        let mut directory = Directory::new(&[4]);
        let (a, b) = (chain(1, 2), chain(2, 2));
        let slots = [0, 1].map(|idx| directory.begin_write(0, a[idx], idx as u32, Keep::Low).expect("free"));
        directory.used(&a, &[Keep::High(Duration::from_secs(60)), Keep::Normal]);
        write(&mut directory, 0, &b);
        slots.into_iter().for_each(|slot| directory.end_write(SlotPlace { tier: 0, slot }, None));
        write(&mut directory, 0, &chain(3, 3));
        assert_eq!([&a, &b].map(|hashes| directory.find_prefix(hashes).len()), [1, 0]);
        // A slot that is free has no more of it.
        directory.forget(directory.find(a[0]).expect("it is kept"), a[0]);
        let c = chain(4, 1);
        write(&mut directory, 0, &c);
        write(&mut directory, 0, &chain(5, 4));
        assert!(directory.find(c[0]).is_none());
    }

    #[test]
    fn the_end_of_the_sequence_that_was_used_longest_ago_makes_room() {
        let mut directory = Directory::new(&[6]);
        let [a, b, c] = [1, 2, 3].map(|seed| chain(seed, 3));
        write(&mut directory, 0, &a);
        write(&mut directory, 0, &b);
        directory.used(&a, &[]);
        write(&mut directory, 0, &c[..2]);
        let found = |directory: &Directory, hashes| directory.find_prefix(hashes).len();
        assert_eq!([&a, &b, &c].map(|hashes| found(&directory, hashes)), [3, 1, 2]);
        assert_eq!((directory.num_held(0), directory.num_evicted(0)), (6, 2));
        let events = directory.take_events(0);
        assert_eq!(events[0], CacheEvent::stored(None, keys(&a)));
        assert_eq!(events[2], CacheEvent::removed(keys(&[b[2]])));
    }

    #[test]
    fn a_sequence_longer_than_a_tier_keeps_its_beginning() {
        let mut directory = Directory::new(&[4]);
        let long = chain(1, 9);
        write(&mut directory, 0, &chain(2, 4));
        write(&mut directory, 0, &long);
        assert_eq!(directory.find_prefix(&long).len(), 4);
        write(&mut directory, 0, &long);
        assert_eq!(directory.find_prefix(&long).len(), 4);
    }

    #[test]
    fn a_block_is_found_in_the_fastest_tier_and_gone_when_it_left_the_last_one() {
        let mut directory = Directory::new(&[2, 4]);
        let (a, b, c) = (chain(1, 2), chain(2, 2), chain(3, 2));
        write(&mut directory, 1, &a);
        write(&mut directory, 0, &a);
        assert_eq!(directory.find_prefix(&a).iter().map(|place| place.tier).collect::<Vec<_>>(), [0, 0]);
        write(&mut directory, 0, &b);
        assert_eq!(directory.find_prefix(&a).iter().map(|place| place.tier).collect::<Vec<_>>(), [1, 1]);
        let stored = |hashes| CacheEvent::stored(None, keys(hashes));
        let removed = |hashes| CacheEvent::removed(keys(hashes));
        assert_eq!(
            directory.take_events(0),
            [
                stored(&a),
                removed(&a[1..]),
                stored(&b[..1]),
                removed(&a[..1]),
                CacheEvent::stored(Some(key(b[0])), keys(&b[1..])),
            ]
        );
        assert_eq!(directory.take_events(1), [stored(&a)]);
        write(&mut directory, 1, &b);
        write(&mut directory, 1, &c);
        assert_eq!(directory.find_prefix(&a).len(), 0);
        assert_eq!(
            directory.take_events(1),
            [
                stored(&b),
                removed(&a[1..]),
                stored(&c[..1]),
                removed(&a[..1]),
                CacheEvent::stored(Some(key(c[0])), keys(&c[1..])),
            ]
        );
        assert_eq!(directory.take_events(0), [], "each tier tells what it holds itself");
    }

    #[test]
    fn a_block_is_found_only_when_it_is_written_and_while_it_is_whole() {
        let mut directory = Directory::new(&[2]);
        let a = chain(1, 2);
        let slot = directory.begin_write(0, a[0], 0, Keep::Normal).expect("a free slot");
        let place = SlotPlace { tier: 0, slot };
        assert!(directory.find(a[0]).is_none() && !directory.lacks(0, a[0], Keep::Normal));
        assert!(directory.begin_write(0, a[0], 0, Keep::Normal).is_none(), "it is being written");
        directory.fail_write(place);
        assert!(directory.lacks(0, a[0], Keep::Normal) && directory.take_events(0).is_empty());

        write(&mut directory, 0, &a);
        let place = directory.find(a[0]).expect("written");
        directory.forget(place, a[1]);
        assert!(directory.holds(place, a[0]), "another block's damage");
        directory.forget(place, a[0]);
        assert!(directory.find_prefix(&a).is_empty() && directory.find(a[1]).is_some());
        assert_eq!(directory.take_events(0)[1..], [CacheEvent::removed(keys(&a[..1]))]);
        directory.forget(place, a[0]);
        assert_eq!((directory.num_held(0), directory.take_events(0)), (1, vec![]));
    }

    #[test]
    fn blocks_are_forgotten_in_one_tier() {
        let mut directory = Directory::new(&[4, 4]);
        let (a, b) = (chain(1, 3), chain(2, 1));
        [0, 1].into_iter().for_each(|tier| write(&mut directory, tier, &a));
        [0, 1].into_iter().for_each(|tier| drop(directory.take_events(tier)));
        assert_eq!(directory.forget_blocks(0, &[a[1], a[2], b[0]]), [1, 2]);
        assert_eq!((directory.num_held(0), directory.num_held(1)), (1, 3));
        assert_eq!(directory.find(a[1]).map(|place| place.tier), Some(1));
        assert_eq!(directory.take_events(0), [CacheEvent::removed(keys(&a[1..]))]);
        assert!(directory.lacks(0, a[1], Keep::Low), "it may be saved again");
    }

    #[test]
    fn slots_that_are_being_written_are_not_taken() {
        let mut directory = Directory::new(&[2]);
        let a = chain(1, 3);
        let slots =
            [0, 1].map(|idx| directory.begin_write(0, a[idx], idx as u32, Keep::Normal).expect("free"));
        assert!(directory.begin_write(0, chain(2, 1)[0], 0, Keep::Normal).is_none());
        directory.end_write(SlotPlace { tier: 0, slot: slots[1] }, Some(a[0]));
        assert_eq!(directory.begin_write(0, chain(2, 1)[0], 0, Keep::Normal), Some(slots[1]));
    }

    #[test]
    fn a_restored_directory_holds_what_the_slots_hold() {
        let mut directory = Directory::new(&[4]);
        let a = chain(1, 3);
        directory.restore(SlotPlace { tier: 0, slot: 3 }, a[0], None, Keep::Normal);
        directory.restore(SlotPlace { tier: 0, slot: 1 }, a[1], Some(a[0]), Keep::Normal);
        directory.restore(SlotPlace { tier: 0, slot: 2 }, a[1], Some(a[0]), Keep::Normal);
        assert_eq!((directory.take_doubles(0), directory.take_doubles(0)), (vec![2], vec![]));
        directory.used(&a[1..2], &[Keep::Low]);
        assert_eq!(directory.find_prefix(&a).len(), 2);
        assert_eq!(directory.take_events(0), [CacheEvent::stored(None, keys(&a[..2]))]);
        let slots: Vec<_> = (0..3)
            .filter_map(|idx| directory.begin_write(0, chain(5, 3)[idx], idx as u32, Keep::Normal))
            .collect();
        assert_eq!(slots, [0, 2, 3], "free ones first, then the one restored first");
    }
}
