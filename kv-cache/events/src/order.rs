//! Which block makes room in a pool or a tier: [`EvictionOrder`].

use std::{collections::BTreeSet, mem, time::Duration};

/// The end of a list.
const NONE: u32 = u32::MAX;

/// How a request wants a block to be kept that it used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Keep {
    /// It makes room before others.
    Low,
    /// It makes room when it was used longest ago.
    #[default]
    Normal,
    /// For so long it makes room after others.
    High(Duration),
}

/// Slots with blocks that may make room. Lower [standings](Keep) go first; among equal ones, the one that was used longest ago.
/// Pure: the time is what [`set_time`](Self::set_time) was told.
///
/// ```text
/// Low      oldest use  <-->  newest use                         goes first
/// Normal   oldest use  <-->  newest use   \ the older of both
/// Lapsed   first       <-->  last         /
/// High     oldest use  <-->  newest use                         goes last
///             |                                 ^
///             +-- to Lapsed: its time is over, or High has more than half of the slots
/// ```
///
/// So no request keeps more than half of a pool or tier from the others. Lists are linked through one array: a change takes constant
/// time, one of a high slot also a search among the times of high slots. A lapsed slot waits behind those that lapsed before it,
/// also behind such that were used later: a place by its use would have to be searched.
#[derive(Debug)]
pub struct EvictionOrder {
    entries: Vec<Entry>,
    /// By [standing](Standing::list).
    lists: [List; 4],
    /// When the slots in the high list lapse.
    lapses: BTreeSet<(Duration, u32)>,
    num_uses: u64,
    now: Duration,
}

#[derive(Clone, Debug)]
struct Entry {
    older: u32,
    newer: u32,
    /// The number of its last use; 0 while it is in no list.
    used: u64,
    /// `None`: no request has said anything of its block.
    standing: Option<Standing>,
}

#[derive(Clone, Copy, Debug)]
struct List {
    oldest: u32,
    newest: u32,
    len: usize,
}

/// What all requests have said of a block: the greatest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Standing {
    Low,
    Normal,
    /// It was high.
    Lapsed,
    High {
        until: Duration,
    },
}

const LAPSED: usize = 2;
const HIGH: usize = 3;

impl Standing {
    fn list(self) -> usize {
        match self {
            Standing::Low => 0,
            Standing::Normal => 1,
            Standing::Lapsed => LAPSED,
            Standing::High { .. } => HIGH,
        }
    }
}

impl EvictionOrder {
    /// None of `num_slots` slots is in it.
    pub fn new(num_slots: usize) -> EvictionOrder {
        EvictionOrder {
            entries: vec![Entry { older: NONE, newer: NONE, used: 0, standing: None }; num_slots],
            lists: [List { oldest: NONE, newest: NONE, len: 0 }; 4],
            lapses: BTreeSet::new(),
            num_uses: 0,
            now: Duration::ZERO,
        }
    }

    /// The time since any fixed moment. It never goes back.
    pub fn set_time(&mut self, now: Duration) {
        self.now = now;
        while let Some(&(until, slot)) = self.lapses.first()
            && until <= now
        {
            self.lapse(slot);
        }
    }

    /// Slots in the order.
    pub fn len(&self) -> usize {
        self.lists.iter().map(|list| list.len).sum()
    }

    /// Whether no slot is in it.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether a slot is in it.
    pub fn contains(&self, slot: u32) -> bool {
        self.entries[slot as usize].used > 0
    }

    /// A request used the block of a slot that is not in the order, and wants it to be kept so. That lowers nothing: a block is low
    /// if all say so, and high until the last time that one named.
    pub fn mark(&mut self, slot: u32, keep: Keep) {
        debug_assert!(!self.contains(slot));
        let standing = match keep {
            Keep::Low => Standing::Low,
            Keep::Normal => Standing::Normal,
            Keep::High(ttl) => Standing::High { until: self.now.saturating_add(ttl) },
        };
        let entry = &mut self.entries[slot as usize];
        entry.standing = entry.standing.max(Some(standing));
    }

    /// How the block of a slot is to be kept, by all that was said of it.
    pub fn keep(&self, slot: u32) -> Keep {
        match self.entries[slot as usize].standing {
            Some(Standing::Low) => Keep::Low,
            Some(Standing::High { until }) if until > self.now => Keep::High(until - self.now),
            _ => Keep::Normal,
        }
    }

    /// The block of a slot that is not in the order is gone: what was said of it is forgotten.
    pub fn forget(&mut self, slot: u32) {
        debug_assert!(!self.contains(slot));
        self.entries[slot as usize].standing = None;
    }

    /// Adds a slot that is not in the order. Its block was used last.
    pub fn push(&mut self, slot: u32) {
        debug_assert!(!self.contains(slot));
        self.num_uses += 1;
        let entry = &mut self.entries[slot as usize];
        entry.used = self.num_uses;
        let mut standing = entry.standing.unwrap_or(Standing::Normal);
        if let Standing::High { until } = standing {
            if until <= self.now {
                standing = Standing::Lapsed;
                entry.standing = Some(standing);
            } else {
                self.lapses.insert((until, slot));
            }
        }
        self.append(standing.list(), slot);
        if self.lists[HIGH].len > self.entries.len() / 2 {
            self.lapse(self.lists[HIGH].oldest);
        }
    }

    /// Removes a slot that is in the order.
    pub fn remove(&mut self, slot: u32) {
        let Entry { older, newer, used, standing } = &mut self.entries[slot as usize];
        debug_assert!(*used > 0);
        *used = 0;
        let (older, newer, standing) = (*older, *newer, standing.unwrap_or(Standing::Normal));
        if let Standing::High { until } = standing {
            self.lapses.remove(&(until, slot));
        }
        let list = &mut self.lists[standing.list()];
        match older {
            NONE => list.oldest = newer,
            older => self.entries[older as usize].newer = newer,
        }
        match newer {
            NONE => list.newest = older,
            newer => self.entries[newer as usize].older = older,
        }
        list.len -= 1;
    }

    /// The slot that makes room first.
    pub fn first(&self) -> Option<u32> {
        let [low, normal, lapsed, high] = self.lists.map(|list| list.oldest);
        let used = |slot: u32| if slot == NONE { u64::MAX } else { self.entries[slot as usize].used };
        let middle = if used(lapsed) < used(normal) { lapsed } else { normal };
        [low, middle, high].into_iter().find(|&slot| slot != NONE)
    }

    /// Removes the slot that makes room first. What was said of its block is forgotten.
    pub fn pop(&mut self) -> Option<u32> {
        let slot = self.first()?;
        self.remove(slot);
        self.forget(slot);
        Some(slot)
    }

    /// A high slot is high no longer. It keeps the number of its last use.
    fn lapse(&mut self, slot: u32) {
        let used = self.entries[slot as usize].used;
        self.remove(slot);
        self.entries[slot as usize].used = used;
        self.entries[slot as usize].standing = Some(Standing::Lapsed);
        self.append(LAPSED, slot);
    }

    fn append(&mut self, list: usize, slot: u32) {
        let list = &mut self.lists[list];
        let newest = mem::replace(&mut list.newest, slot);
        list.len += 1;
        match newest {
            NONE => list.oldest = slot,
            newest => self.entries[newest as usize].newer = slot,
        }
        let entry = &mut self.entries[slot as usize];
        (entry.older, entry.newer) = (newest, NONE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const HIGH_3: Keep = Keep::High(Duration::from_secs(3));
    const HIGH_9: Keep = Keep::High(Duration::from_secs(9));

    /// Uses a block: `None` says nothing of it.
    fn used(order: &mut EvictionOrder, slot: u32, keep: Option<Keep>) {
        if order.contains(slot) {
            order.remove(slot);
        }
        keep.into_iter().for_each(|keep| order.mark(slot, keep));
        order.push(slot);
    }

    fn all(order: &mut EvictionOrder) -> Vec<u32> {
        std::iter::from_fn(|| order.pop()).collect()
    }

    #[test]
    fn low_blocks_go_first_and_high_ones_last_each_by_their_use() {
        use Keep::{Low, Normal};
        let (some, none) = (Some, None);
        for (uses, passed, expected) in [
            (vec![(0, none), (1, some(Normal)), (2, none), (0, none)], 0, vec![1, 2, 0]),
            (vec![(0, some(HIGH_9)), (1, some(Low)), (2, none), (3, some(Low))], 0, vec![1, 3, 2, 0]),
            // A block is low if all say so; a use that says nothing changes nothing.
            (vec![(0, some(Low)), (1, none), (0, none), (2, some(Low)), (2, some(Normal))], 0, vec![0, 1, 2]),
            (vec![(0, some(Normal)), (1, some(Low)), (0, some(Low))], 0, vec![1, 0]),
            // High blocks stay so when others use them, and until the last time that one named.
            (vec![(0, some(HIGH_9)), (1, none), (0, some(Low)), (2, none)], 0, vec![1, 2, 0]),
            (vec![(0, some(HIGH_9)), (0, some(HIGH_3)), (1, some(HIGH_3)), (2, none)], 3, vec![1, 2, 0]),
            // Lapsed ones are where they would be without a mark.
            (vec![(1, none), (0, some(HIGH_3)), (2, none)], 2, vec![1, 2, 0]),
            (vec![(1, none), (0, some(HIGH_3)), (2, none)], 3, vec![1, 0, 2]),
            (vec![(1, none), (0, some(HIGH_9)), (2, some(HIGH_3)), (3, none)], 9, vec![1, 2, 0, 3]),
        ] {
            let mut order = EvictionOrder::new(8);
            uses.iter().for_each(|&(slot, keep)| used(&mut order, slot, keep));
            order.set_time(passed * SECOND);
            assert_eq!(all(&mut order), expected, "{uses:?} after {passed} s");
        }
    }

    #[test]
    fn high_blocks_take_half_of_the_slots_and_the_oldest_lapse() {
        let mut order = EvictionOrder::new(6);
        used(&mut order, 0, None);
        (1..=4).for_each(|slot| used(&mut order, slot, Some(HIGH_9)));
        used(&mut order, 5, None);
        assert_eq!(all(&mut order), [0, 1, 5, 2, 3, 4]);
    }

    #[test]
    fn a_mark_holds_while_the_slot_is_away_and_not_for_its_next_block() {
        let mut order = EvictionOrder::new(4);
        used(&mut order, 0, Some(HIGH_3));
        order.remove(0);
        order.set_time(2 * SECOND);
        order.push(0);
        used(&mut order, 1, None);
        assert_eq!(all(&mut order), [1, 0]);
        // It is the slot of another block now; its time ends while it is away.
        used(&mut order, 0, Some(HIGH_3));
        order.remove(0);
        order.set_time(5 * SECOND);
        order.push(0);
        used(&mut order, 1, None);
        assert_eq!((order.len(), all(&mut order)), (2, vec![0, 1]));
        used(&mut order, 0, Some(Keep::Low));
        order.remove(0);
        order.forget(0);
        used(&mut order, 1, None);
        used(&mut order, 0, None);
        assert_eq!(all(&mut order), [1, 0]);
    }

    #[test]
    fn the_lists_are_those_of_plain_queues() {
        let mut random = 1_u64;
        let mut below = |limit: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % limit
        };
        let (mut order, mut now, num_slots) = (EvictionOrder::new(20), Duration::ZERO, 20);
        // Slots, the numbers of their uses, and when they lapse.
        let mut queues: [Vec<(u32, u64, Duration)>; 4] = Default::default();
        for use_number in 0..20_000 {
            let slot = below(num_slots) as u32;
            let place = queues.iter().enumerate().find_map(|(list, queue)| {
                queue.iter().position(|&(queued, ..)| queued == slot).map(|at| (list, at))
            });
            match (below(4), place) {
                (0, _) => {
                    let middle = if queues[LAPSED].first().map_or(u64::MAX, |first| first.1)
                        < queues[1].first().map_or(u64::MAX, |first| first.1)
                    {
                        LAPSED
                    } else {
                        1
                    };
                    let list = [0, middle, HIGH].into_iter().find(|&list| !queues[list].is_empty());
                    assert_eq!(order.pop(), list.map(|list| queues[list].remove(0).0));
                }
                (1, Some((list, at))) => {
                    queues[list].remove(at);
                    order.remove(slot);
                    order.forget(slot);
                }
                (_, Some(_)) => {
                    now += below(2) as u32 * SECOND;
                    order.set_time(now);
                    let mut lapsed: Vec<_> = queues[HIGH].extract_if(.., |high| high.2 <= now).collect();
                    lapsed.sort_by_key(|&(slot, _, until)| (until, slot));
                    queues[LAPSED].extend(lapsed);
                }
                (_, None) => {
                    let (list, keep) = [(0, Keep::Low), (1, Keep::Normal), (HIGH, HIGH_3), (HIGH, HIGH_9)]
                        [below(4) as usize];
                    order.mark(slot, keep);
                    order.push(slot);
                    let ttl = if let Keep::High(ttl) = keep { ttl } else { Duration::ZERO };
                    queues[list].push((slot, use_number, now + ttl));
                    if queues[HIGH].len() as u64 > num_slots / 2 {
                        let oldest = queues[HIGH].remove(0);
                        queues[LAPSED].push(oldest);
                    }
                }
            }
            assert_eq!(order.len(), queues.iter().map(Vec::len).sum());
            assert_eq!(order.lapses.len(), queues[HIGH].len());
        }
    }
}
