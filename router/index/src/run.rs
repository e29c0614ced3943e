//! A run: blocks that follow each other, and how many of them each member holds.
//!
//! A run begins after a block of another run, or at the beginning of a sequence. Runs are never split: what diverges from one
//! is another run, and a member that holds only the front of a run holds a shorter prefix.
//!
//! ```text
//!   run 0   a b c d e f          members 1: 6, 2: 4
//!                 |
//!   run 1         x y            begins after d; member 2: 2, so that it holds a b c d x y
//! ```
//!
//! One writer at a time changes a run, any number of readers read it meanwhile, word by word: a reader sees every member that
//! is there all the time, and none that was never there.

use std::sync::{
    Arc,
    atomic::{AtomicU32, AtomicU64, Ordering},
};

use arc_swap::ArcSwapOption;

/// Blocks of a run at most.
pub(crate) const MAX_RUN: usize = 512;
/// Members above cannot be named.
pub(crate) const MAX_MEMBERS: u32 = (1 << 20) - 1;
/// Runs that there may be.
pub(crate) const MAX_RUNS: usize = (1 << (40 - OFFSET_BITS)) - 2;
const OFFSET_BITS: u32 = 10;

/// A run and a place in it. 0: none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Spot(pub(crate) u64);

impl Spot {
    #[inline]
    pub(crate) fn new(run: u32, offset: usize) -> Spot {
        Spot(u64::from(run + 1) << OFFSET_BITS | offset as u64)
    }

    #[inline]
    pub(crate) fn run(self) -> u32 {
        ((self.0 >> OFFSET_BITS) as u32).wrapping_sub(1)
    }

    #[inline]
    pub(crate) fn offset(self) -> usize {
        (self.0 & ((1 << OFFSET_BITS) - 1)) as usize
    }
}

/// A member, how many blocks of the run it holds, and its node for it. 0: none.
///
/// `| member + 1, 20 bits | blocks, 12 bits | node, 32 bits |`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Holding(u64);

impl Holding {
    #[inline]
    pub(crate) fn new(member: u32, num_blocks: usize, node: u32) -> Holding {
        Holding(u64::from(member + 1) << 44 | (num_blocks as u64) << 32 | u64::from(node))
    }

    #[cfg(test)]
    fn is_none(self) -> bool {
        self.0 == 0
    }

    #[inline]
    pub(crate) fn member(self) -> u32 {
        ((self.0 >> 44) as u32).wrapping_sub(1)
    }

    #[inline]
    pub(crate) fn num_blocks(self) -> usize {
        (self.0 >> 32 & 0xFFF) as usize
    }

    #[inline]
    pub(crate) fn node(self) -> u32 {
        self.0 as u32
    }
}

/// The number of members and a sum of their hashes: sets of one mark are taken to be equal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Mark(u64);

impl Mark {
    #[inline]
    pub(crate) fn count(self) -> u32 {
        (self.0 >> 44) as u32
    }

    fn of(member: u32) -> u64 {
        1 << 44 | u64::from(member + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 20
    }

    /// The sum of hashes has 44 bits: what it carries does not reach the count.
    fn join(self, member: u32, sign: bool) -> Mark {
        const SUM: u64 = (1 << 44) - 1;
        let one = Mark::of(member);
        let (count, sum) = if sign {
            ((self.0 >> 44) + 1, self.0.wrapping_add(one))
        } else {
            ((self.0 >> 44) - 1, self.0.wrapping_sub(one))
        };
        Mark(count << 44 | sum & SUM)
    }
}

#[derive(Debug)]
pub(crate) struct Run {
    /// No two runs have the same; a longer copy of a run has that of the run.
    pub(crate) serial: u64,
    /// The block that it begins after; none: it begins a sequence.
    pub(crate) after: Spot,
    len: AtomicU32,
    keys: Box<[AtomicU64]>,
    mark: AtomicU64,
    /// The first member.
    one: AtomicU64,
    others: ArcSwapOption<Box<[AtomicU64]>>,
}

impl Run {
    /// Without members. With room for so many blocks.
    pub(crate) fn new(serial: u64, after: Spot, capacity: usize) -> Run {
        Run {
            serial,
            after,
            len: AtomicU32::new(0),
            keys: (0..capacity).map(|_| AtomicU64::new(0)).collect(),
            mark: AtomicU64::new(0),
            one: AtomicU64::new(0),
            others: ArcSwapOption::const_empty(),
        }
    }

    pub(crate) fn num_bytes(&self) -> u64 {
        let own = size_of::<Run>() + 32 + self.keys.len() * size_of::<u64>();
        own as u64 + self.others.load().as_ref().map_or(0, |others| bytes_of(others.len()))
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.len.load(Ordering::Acquire) as usize
    }

    pub(crate) fn capacity(&self) -> usize {
        self.keys.len()
    }

    #[inline]
    pub(crate) fn key(&self, offset: usize) -> u64 {
        self.keys[offset].load(Ordering::Relaxed)
    }

    /// The key of a place, if there is room for one.
    #[inline]
    pub(crate) fn get(&self, offset: usize) -> Option<u64> {
        self.keys.get(offset).map(|key| key.load(Ordering::Relaxed))
    }

    pub(crate) fn keys_from(&self, offset: usize) -> impl Iterator<Item = u64> {
        self.keys[offset..self.len()].iter().map(|key| key.load(Ordering::Relaxed))
    }

    #[inline]
    pub(crate) fn mark(&self) -> Mark {
        Mark(self.mark.load(Ordering::Acquire))
    }

    /// How many of `keys` the blocks from `offset` on are.
    pub(crate) fn num_same(&self, offset: usize, keys: impl Iterator<Item = u64>) -> usize {
        self.keys[offset..self.len()]
            .iter()
            .zip(keys)
            .take_while(|(own, key)| own.load(Ordering::Relaxed) == *key)
            .count()
    }

    pub(crate) fn push(&self, key: u64) {
        let len = self.len.load(Ordering::Relaxed);
        self.keys[len as usize].store(key, Ordering::Relaxed);
        self.len.store(len + 1, Ordering::Release);
    }

    pub(crate) fn truncate(&self, len: usize) {
        self.len.store(len as u32, Ordering::Release);
    }

    /// The same run with room for more blocks.
    pub(crate) fn grown(&self, capacity: usize) -> Run {
        let new = Run::new(self.serial, self.after, capacity);
        (0..self.len()).for_each(|offset| new.push(self.key(offset)));
        new.mark.store(self.mark.load(Ordering::Relaxed), Ordering::Relaxed);
        new.one.store(self.one.load(Ordering::Relaxed), Ordering::Relaxed);
        new.others.store(self.others.load_full());
        new
    }

    /// Visits its members, and places without one.
    #[inline]
    pub(crate) fn for_each(&self, mut visit: impl FnMut(Holding)) {
        let mut one = |word: &AtomicU64| visit(Holding(word.load(Ordering::Acquire)));
        one(&self.one);
        if let Some(others) = self.others.load().as_ref() {
            others.iter().for_each(one);
        }
    }

    /// What a member holds of it. `hint`: where that is expected.
    fn place_of(&self, member: u32, hint: u32) -> Option<u32> {
        let is_own = |word: &AtomicU64| Holding(word.load(Ordering::Relaxed)).member() == member;
        if is_own(&self.one) {
            return Some(0);
        }
        let others = self.others.load();
        let others = others.as_ref()?;
        if hint > 0 && others.get(hint as usize - 1).is_some_and(is_own) {
            return Some(hint);
        }
        others.iter().position(is_own).map(|place| place as u32 + 1)
    }

    /// The node of a member.
    pub(crate) fn holding(&self, member: u32) -> Option<Holding> {
        let place = self.place_of(member, 0)?;
        let word = |word: &AtomicU64| Holding(word.load(Ordering::Relaxed));
        Some(if place == 0 {
            word(&self.one)
        } else {
            word(self.others.load().as_ref()?.get(place as usize - 1)?)
        })
    }

    fn store(&self, place: u32, word: u64) {
        if place == 0 {
            self.one.store(word, Ordering::Release);
        } else if let Some(others) = self.others.load().as_ref() {
            others[place as usize - 1].store(word, Ordering::Release);
        }
    }

    /// Adds a member. Where it is, and the bytes that it took.
    pub(crate) fn join(&self, holding: Holding) -> (u32, u64) {
        let mark = self.mark();
        let (place, num_bytes) = self.free_place(mark.count() as usize);
        self.store(place, holding.0);
        self.mark.store(mark.join(holding.member(), true).0, Ordering::Release);
        (place, num_bytes)
    }

    fn free_place(&self, num_members: usize) -> (u32, u64) {
        if self.one.load(Ordering::Relaxed) == 0 {
            return (0, 0);
        }
        let others = self.others.load();
        let len = others.as_ref().map_or(0, |others| others.len());
        if num_members <= len
            && let Some(others) = others.as_ref()
        {
            // Places fill up from the front, so the next one is likely to be there.
            let guess = num_members - 1;
            let is_free = |place: &usize| others[*place].load(Ordering::Relaxed) == 0;
            let place = Some(guess).filter(is_free).or_else(|| (0..len).find(is_free));
            return (place.map_or(0, |place| place as u32 + 1), 0);
        }
        let words = others.iter().flat_map(|others| others.iter()).map(|word| word.load(Ordering::Relaxed));
        let mut new: Vec<AtomicU64> = words.map(AtomicU64::new).collect();
        let place = new.len();
        new.resize_with((len + len / 2).max(3), || AtomicU64::new(0));
        let num_bytes = bytes_of(new.len()) - bytes_of(len);
        drop(others);
        self.others.store(Some(Arc::new(new.into())));
        (place as u32 + 1, num_bytes)
    }

    /// A member holds another number of blocks. `hint`: where it is expected; where it is.
    pub(crate) fn update(&self, hint: u32, holding: Holding) -> u32 {
        let place = self.place_of(holding.member(), hint).expect("it is a member");
        self.store(place, holding.0);
        place
    }

    /// Removes a member. The bytes that this gave back.
    pub(crate) fn leave(&self, member: u32, hint: u32) -> u64 {
        let place = self.place_of(member, hint).expect("it is a member");
        let mark = self.mark().join(member, false);
        self.store(place, 0);
        self.mark.store(mark.0, Ordering::Release);
        let others = self.others.load();
        let len = others.as_ref().map_or(0, |others| others.len());
        if len <= 3 || mark.count() as usize * 3 >= len {
            return 0;
        }
        let words = others.iter().flat_map(|others| others.iter()).map(|word| word.load(Ordering::Relaxed));
        let mut new: Vec<AtomicU64> = words.filter(|&word| word != 0).map(AtomicU64::new).collect();
        new.resize_with((mark.count() as usize + 1).max(3), || AtomicU64::new(0));
        let num_bytes = bytes_of(len) - bytes_of(new.len());
        drop(others);
        self.others.store(Some(Arc::new(new.into())));
        num_bytes
    }

    /// The most blocks that any member holds.
    pub(crate) fn longest(&self) -> usize {
        let mut longest = 0;
        self.for_each(|holding| longest = longest.max(holding.num_blocks()));
        longest
    }
}

/// Of so many members beside the first.
fn bytes_of(num_others: usize) -> u64 {
    if num_others == 0 { 0 } else { 40 + (num_others * size_of::<u64>()) as u64 }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn a_run_holds_what_joined_and_did_not_leave() {
        for (limit, num_changes) in [(3, 2000), (100, 5000), (2000, 20_000)] {
            let run = Run::new(1, Spot::default(), 4);
            let mut plain = BTreeMap::new();
            let mut random = 7_u64;
            for change in 0..num_changes {
                random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let member = ((random >> 33) % limit) as u32;
                let num = 1 + (random >> 20) as usize % MAX_RUN;
                let hint = (random >> 40) as u32 % 50;
                match (plain.contains_key(&member), random >> 62) {
                    (false, _) => drop(run.join(Holding::new(member, num, change))),
                    (true, 0 | 1) => drop(run.update(hint, Holding::new(member, num, change))),
                    (true, _) => drop(run.leave(member, hint)),
                }
                if plain.contains_key(&member) && random >> 62 > 1 {
                    plain.remove(&member);
                } else {
                    plain.insert(member, (num, change));
                }
                let holding = run.holding(member).map(|found| (found.num_blocks(), found.node()));
                assert_eq!(holding, plain.get(&member).copied());
                if change % 37 == 0 {
                    let mut found = BTreeMap::new();
                    run.for_each(|holding| {
                        if holding.is_none() {
                            return;
                        }
                        let before = found.insert(holding.member(), (holding.num_blocks(), holding.node()));
                        assert_eq!(before, None, "named twice");
                    });
                    assert_eq!(found, plain);
                    let mark = plain.keys().fold(Mark::default(), |mark, &member| mark.join(member, true));
                    assert_eq!(run.mark(), mark);
                    assert_eq!(mark.count() as usize, plain.len());
                    assert_eq!(run.longest(), plain.values().map(|&(num, _)| num).max().unwrap_or(0));
                }
            }
        }
    }
}
