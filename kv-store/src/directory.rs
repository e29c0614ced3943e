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
//! A block is found while a slot holds it. It is in each tier at most once, and may be in several.

use std::collections::HashMap;

use baton_kv_cache::BlockHash;
use baton_kv_events::{BlockKey, CacheEvent, EvictionOrder, PendingEvents};

/// What the tiers hold. Tiers are numbered from the fastest, 0; slots in each tier from 0.
#[derive(Debug)]
pub struct Directory {
    tiers: Vec<Tier>,
    events: PendingEvents,
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
    free: Vec<u32>,
    by_hash: HashMap<BlockHash, u32>,
    /// The slots that hold a block.
    order: EvictionOrder,
    num_evicted: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    Free,
    Writing(BlockHash),
    Holds(BlockHash),
}

impl Directory {
    /// Of empty tiers with so many slots.
    pub fn new(num_slots: &[u32]) -> Directory {
        Directory {
            tiers: num_slots.iter().map(|&num| Tier::new(num)).collect(),
            events: PendingEvents::default(),
        }
    }

    /// The fastest place of a block; `None` when no tier holds it.
    pub fn find(&self, hash: BlockHash) -> Option<SlotPlace> {
        (0..self.tiers.len()).find_map(|tier| self.find_in(tier, hash).map(|slot| SlotPlace { tier, slot }))
    }

    /// The places of the longest prefix of `hashes`, a sequence's hashes in order.
    pub fn find_prefix(&self, hashes: &[BlockHash]) -> Vec<SlotPlace> {
        hashes.iter().map_while(|&hash| self.find(hash)).collect()
    }

    /// Whether a tier holds a block, or will.
    pub fn is_expected(&self, tier: usize, hash: BlockHash) -> bool {
        self.tiers[tier].by_hash.contains_key(&hash)
    }

    /// Whether `place` holds this block.
    pub fn holds(&self, place: SlotPlace, hash: BlockHash) -> bool {
        self.tiers[place.tier].slots[place.slot as usize] == Slot::Holds(hash)
    }

    /// A sequence used these blocks, which are its hashes in order.
    pub fn used(&mut self, hashes: &[BlockHash]) {
        for tier in &mut self.tiers {
            // In reverse, so that the last block of a sequence makes room first: it is useless without the blocks before it.
            for hash in hashes.iter().rev() {
                if let Some(&slot) = tier.by_hash.get(hash)
                    && matches!(tier.slots[slot as usize], Slot::Holds(_))
                {
                    tier.order.remove(slot);
                    tier.order.push(slot);
                }
            }
        }
    }

    /// A slot for block `block_idx` of a sequence, free or taken from the block that was used longest ago. `None`: the tier
    /// holds the block or will, every slot is being written, or the sequence is longer than the tier, whose end would make
    /// its beginning go.
    pub fn begin_write(&mut self, tier_idx: usize, hash: BlockHash, block_idx: u32) -> Option<u32> {
        let tier = &mut self.tiers[tier_idx];
        if tier.by_hash.contains_key(&hash) || block_idx as usize >= tier.slots.len() {
            return None;
        }
        let slot = match tier.free.pop() {
            Some(slot) => slot,
            None => {
                let slot = tier.order.pop()?;
                let Slot::Holds(evicted) = tier.slots[slot as usize] else {
                    unreachable!("only slots that hold a block are in the order")
                };
                tier.by_hash.remove(&evicted);
                tier.num_evicted += 1;
                self.tell_removed(evicted);
                slot
            }
        };
        let tier = &mut self.tiers[tier_idx];
        tier.slots[slot as usize] = Slot::Writing(hash);
        tier.by_hash.insert(hash, slot);
        Some(slot)
    }

    /// The slot holds its block now, which follows `before`.
    pub fn end_write(&mut self, place: SlotPlace, before: Option<BlockHash>) {
        let Slot::Writing(hash) = self.tiers[place.tier].slots[place.slot as usize] else {
            panic!("slot {} of tier {} is not being written", place.slot, place.tier)
        };
        let is_new = self.find(hash).is_none();
        let tier = &mut self.tiers[place.tier];
        tier.slots[place.slot as usize] = Slot::Holds(hash);
        tier.order.push(place.slot);
        if is_new {
            self.events.stored(before.map(key), key(hash));
        }
    }

    /// The block was not written: its slot is free.
    pub fn fail_write(&mut self, place: SlotPlace) {
        let tier = &mut self.tiers[place.tier];
        if let Slot::Writing(hash) = tier.slots[place.slot as usize] {
            tier.free_slot(place.slot, hash);
        }
    }

    /// The slot turned out not to hold its block: it is free. Nothing happens if it holds another block meanwhile.
    pub fn forget(&mut self, place: SlotPlace, hash: BlockHash) {
        if self.holds(place, hash) {
            let tier = &mut self.tiers[place.tier];
            tier.order.remove(place.slot);
            tier.free_slot(place.slot, hash);
            self.tell_removed(hash);
        }
    }

    /// A free slot was found to hold this block, after a restart. False: the tier holds the block already, and the slot stays
    /// free.
    pub fn restore(&mut self, place: SlotPlace, hash: BlockHash, before: Option<BlockHash>) -> bool {
        let is_known = self.find(hash).is_some();
        let tier = &mut self.tiers[place.tier];
        if tier.by_hash.contains_key(&hash) {
            return false;
        }
        debug_assert_eq!(tier.slots[place.slot as usize], Slot::Free);
        tier.slots[place.slot as usize] = Slot::Holds(hash);
        tier.by_hash.insert(hash, place.slot);
        tier.order.push(place.slot);
        if !is_known {
            self.events.stored(before.map(key), key(hash));
        }
        true
    }

    /// Ends a series of [`restore`](Self::restore)s: slots that were restored are no longer free.
    pub fn end_restore(&mut self, tier_idx: usize) {
        let Tier { free, slots, .. } = &mut self.tiers[tier_idx];
        free.retain(|&slot| slots[slot as usize] == Slot::Free);
    }

    /// Blocks that a tier holds.
    pub fn num_held(&self, tier: usize) -> usize {
        self.tiers[tier].order.len()
    }

    /// Blocks that made room for others in a tier.
    pub fn num_evicted(&self, tier: usize) -> u64 {
        self.tiers[tier].num_evicted
    }

    /// Which blocks came into the first tier, and which left the last one, since the last call.
    pub fn take_events(&mut self) -> Vec<CacheEvent> {
        self.events.take()
    }

    fn find_in(&self, tier: usize, hash: BlockHash) -> Option<u32> {
        let tier = &self.tiers[tier];
        let slot = *tier.by_hash.get(&hash)?;
        matches!(tier.slots[slot as usize], Slot::Holds(_)).then_some(slot)
    }

    fn tell_removed(&mut self, hash: BlockHash) {
        if self.find(hash).is_none() {
            self.events.removed(key(hash));
        }
    }
}

impl Tier {
    fn new(num_slots: u32) -> Tier {
        Tier {
            slots: vec![Slot::Free; num_slots as usize],
            // Popped from the end: low slots come first, which keeps the touched memory small.
            free: (0..num_slots).rev().collect(),
            by_hash: HashMap::new(),
            order: EvictionOrder::new(num_slots as usize),
            num_evicted: 0,
        }
    }

    fn free_slot(&mut self, slot: u32, hash: BlockHash) {
        self.slots[slot as usize] = Slot::Free;
        self.by_hash.remove(&hash);
        self.free.push(slot);
    }
}

fn key(hash: BlockHash) -> BlockKey {
    BlockKey(hash.short())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::chain;

    fn keys(hashes: &[BlockHash]) -> Vec<BlockKey> {
        hashes.iter().copied().map(key).collect()
    }

    /// Writes a sequence's blocks to a tier, as far as there are slots for them.
    fn write(directory: &mut Directory, tier: usize, hashes: &[BlockHash]) {
        for (idx, &hash) in hashes.iter().enumerate() {
            if let Some(slot) = directory.begin_write(tier, hash, idx as u32) {
                directory.end_write(SlotPlace { tier, slot }, idx.checked_sub(1).map(|idx| hashes[idx]));
            }
        }
        directory.used(hashes);
    }

    #[test]
    fn the_end_of_the_sequence_that_was_used_longest_ago_makes_room() {
        let mut directory = Directory::new(&[6]);
        let [a, b, c] = [1, 2, 3].map(|seed| chain(seed, 3));
        write(&mut directory, 0, &a);
        write(&mut directory, 0, &b);
        directory.used(&a);
        write(&mut directory, 0, &c[..2]);
        let found = |directory: &Directory, hashes| directory.find_prefix(hashes).len();
        assert_eq!([&a, &b, &c].map(|hashes| found(&directory, hashes)), [3, 1, 2]);
        assert_eq!((directory.num_held(0), directory.num_evicted(0)), (6, 2));
        let events = directory.take_events();
        assert_eq!(events[0], CacheEvent::Stored { parent: None, blocks: keys(&a) });
        assert_eq!(events[2], CacheEvent::Removed { blocks: keys(&[b[2]]) });
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
        let stored = |hashes| CacheEvent::Stored { parent: None, blocks: keys(hashes) };
        assert_eq!(directory.take_events(), [stored(&a), stored(&b)], "a is stored all the time");
        write(&mut directory, 1, &b);
        write(&mut directory, 1, &c);
        assert_eq!(directory.find_prefix(&a).len(), 0);
        assert_eq!(
            directory.take_events(),
            [
                CacheEvent::Removed { blocks: keys(&a[1..]) },
                CacheEvent::Stored { parent: None, blocks: keys(&c[..1]) },
                CacheEvent::Removed { blocks: keys(&a[..1]) },
                CacheEvent::Stored { parent: Some(key(c[0])), blocks: keys(&c[1..]) },
            ]
        );
    }

    #[test]
    fn a_block_is_found_only_when_it_is_written_and_while_it_is_whole() {
        let mut directory = Directory::new(&[2]);
        let a = chain(1, 2);
        let slot = directory.begin_write(0, a[0], 0).expect("a free slot");
        let place = SlotPlace { tier: 0, slot };
        assert!(directory.find(a[0]).is_none() && directory.is_expected(0, a[0]));
        assert!(directory.begin_write(0, a[0], 0).is_none(), "it is being written");
        directory.fail_write(place);
        assert!(!directory.is_expected(0, a[0]) && directory.take_events().is_empty());

        write(&mut directory, 0, &a);
        let place = directory.find(a[0]).expect("written");
        directory.forget(place, a[1]);
        assert!(directory.holds(place, a[0]), "another block's damage");
        directory.forget(place, a[0]);
        assert!(directory.find_prefix(&a).is_empty() && directory.find(a[1]).is_some());
        assert_eq!(directory.take_events()[1..], [CacheEvent::Removed { blocks: keys(&a[..1]) }]);
        directory.forget(place, a[0]);
        assert_eq!((directory.num_held(0), directory.take_events()), (1, vec![]));
    }

    #[test]
    fn slots_that_are_being_written_are_not_taken() {
        let mut directory = Directory::new(&[2]);
        let a = chain(1, 3);
        let slots = [0, 1].map(|idx| directory.begin_write(0, a[idx], idx as u32).expect("free"));
        assert!(directory.begin_write(0, chain(2, 1)[0], 0).is_none());
        directory.end_write(SlotPlace { tier: 0, slot: slots[1] }, Some(a[0]));
        assert_eq!(directory.begin_write(0, chain(2, 1)[0], 0), Some(slots[1]));
    }

    #[test]
    fn a_restored_directory_holds_what_the_slots_hold() {
        let mut directory = Directory::new(&[4]);
        let a = chain(1, 3);
        assert!(directory.restore(SlotPlace { tier: 0, slot: 3 }, a[0], None));
        assert!(directory.restore(SlotPlace { tier: 0, slot: 1 }, a[1], Some(a[0])));
        assert!(!directory.restore(SlotPlace { tier: 0, slot: 2 }, a[1], Some(a[0])), "held already");
        directory.end_restore(0);
        assert_eq!(directory.find_prefix(&a).len(), 2);
        assert_eq!(directory.take_events(), [CacheEvent::Stored { parent: None, blocks: keys(&a[..2]) }]);
        let slots: Vec<_> =
            (0..3).filter_map(|idx| directory.begin_write(0, chain(5, 3)[idx], idx as u32)).collect();
        assert_eq!(slots, [0, 2, 3], "free ones first, then the one restored first");
    }
}
