//! The members of a set, in one word as long as they are few, and the memory for larger sets.
//!
//! ```text
//! word   0                                    no member
//!        | member + 1 | member + 1 | member + 1 | 01 |       up to three, 20 bits each
//!        | place in the arena                   | 10 |       more
//! arena  | capacity, mark | chunk 20 bits, 44 members | chunk, 44 members | ...
//! ```
//!
//! The *mark* of a set is the number of its members and a sum of hashes of them: sets of one mark are taken to be equal.
//!
//! One writer changes a set, any number of readers read it meanwhile. Each word is read and written whole, so that a reader
//! sees every member that is there all the time, and none that was never there. Memory of the arena is never used twice: the
//! table that it belongs to is copied when much of it is unused.

use std::sync::{
    OnceLock,
    atomic::{AtomicU64, Ordering},
};

/// Members of a chunk.
pub(crate) const CHUNK: u32 = 44;
const CHUNK_MASK: u64 = (1 << CHUNK) - 1;
/// Members above cannot be named.
pub(crate) const MAX_MEMBERS: u32 = (1 << 20) - 1;

const TAG: u64 = 3;
const FEW: u64 = 1;
const MANY: u64 = 2;
const ID_BITS: u32 = 20;
const ID_MASK: u64 = (1 << ID_BITS) - 1;

/// Words of the first part of an arena; each further part has twice as many as the one before.
const FIRST_PART: u32 = 64;
const NUM_PARTS: usize = 26;

/// Memory of the sets with many members.
#[derive(Debug, Default)]
pub(crate) struct Arena {
    parts: [OnceLock<Box<[AtomicU64]>>; NUM_PARTS],
}

/// What only the writer of an arena needs to know.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ArenaUse {
    /// Words that were given out, or skipped at the end of a part.
    pub(crate) num_used: u32,
    /// Words of sets that are not reachable any more.
    pub(crate) num_garbage: u32,
    /// Words of memory.
    pub(crate) num_words: u32,
}

/// The number of members (20 bits) and the sum of their hashes (24 bits) of a set. Equal sets have equal marks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Mark(u64);

const SUM_BITS: u32 = 24;
const SUM_MASK: u64 = (1 << SUM_BITS) - 1;
const MARK_BITS: u32 = SUM_BITS + ID_BITS;
const MARK_MASK: u64 = (1 << MARK_BITS) - 1;

impl Mark {
    /// How many members there are.
    pub(crate) fn count(self) -> u32 {
        (self.0 >> SUM_BITS) as u32
    }

    fn hash(id: u32) -> u64 {
        u64::from(id + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (u64::BITS - SUM_BITS)
    }

    fn with(self, id: u32) -> Mark {
        let sum = (self.0 + Mark::hash(id)) & SUM_MASK;
        Mark(((self.0 >> SUM_BITS) + 1) << SUM_BITS | sum)
    }

    fn without(self, id: u32) -> Mark {
        let sum = self.0.wrapping_sub(Mark::hash(id)) & SUM_MASK;
        Mark(((self.0 >> SUM_BITS) - 1) << SUM_BITS | sum)
    }

    fn header(self, capacity: usize) -> u64 {
        (capacity as u64) << MARK_BITS | self.0
    }

    fn of(header: u64) -> Mark {
        Mark(header & MARK_MASK)
    }
}

/// Some members: those of a chunk that a mask names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Some44 {
    pub(crate) chunk: u32,
    pub(crate) mask: u64,
}

impl Some44 {
    fn one(id: u32) -> Some44 {
        Some44 { chunk: id / CHUNK, mask: 1 << (id % CHUNK) }
    }

    fn word(self) -> u64 {
        u64::from(self.chunk) << CHUNK | self.mask
    }

    fn of(word: u64) -> Some44 {
        Some44 { chunk: (word >> CHUNK) as u32, mask: word & CHUNK_MASK }
    }
}

fn few(ids: [u64; 3]) -> u64 {
    let [a, b, c] = ids;
    if a | b | c == 0 { 0 } else { (c << (2 * ID_BITS) | b << ID_BITS | a) << 2 | FEW }
}

/// The members plus one; 0 for none.
fn ids_of(word: u64) -> [u64; 3] {
    let ids = word >> 2;
    [ids & ID_MASK, ids >> ID_BITS & ID_MASK, ids >> (2 * ID_BITS) & ID_MASK]
}

impl Arena {
    fn part_of(place: u32) -> (usize, u32) {
        let shifted = place + FIRST_PART;
        let part = shifted.ilog2() - FIRST_PART.ilog2();
        (part as usize, shifted - (FIRST_PART << part))
    }

    /// The set at a place: its header, and its words.
    fn set(&self, place: u32) -> Option<(&AtomicU64, &[AtomicU64])> {
        let (part, offset) = Arena::part_of(place);
        let (header, rest) = self.parts.get(part)?.get()?.get(offset as usize..)?.split_first()?;
        let capacity = (header.load(Ordering::Acquire) >> MARK_BITS) as usize;
        Some((header, rest.get(..capacity)?))
    }

    /// Reads the memory of the set that a word names.
    pub(crate) fn peek(&self, word: u64) -> u64 {
        if word & TAG != MANY {
            return 0;
        }
        let (part, offset) = Arena::part_of((word >> 2) as u32);
        let part = self.parts.get(part).and_then(OnceLock::get);
        part.and_then(|part| part.get(offset as usize)).map_or(0, |header| header.load(Ordering::Relaxed))
    }

    /// Of the members that a word names.
    pub(crate) fn mark(&self, word: u64) -> Mark {
        match word & TAG {
            FEW => {
                let ids = ids_of(word);
                ids.iter().filter(|&&id| id != 0).fold(Mark::default(), |mark, &id| mark.with(id as u32 - 1))
            }
            MANY => match self.set((word >> 2) as u32) {
                Some((header, _)) => Mark::of(header.load(Ordering::Acquire)),
                None => Mark::default(),
            },
            _ => Mark::default(),
        }
    }

    /// Visits the members that a word names.
    pub(crate) fn for_each(&self, word: u64, mut visit: impl FnMut(Some44)) {
        match word & TAG {
            FEW => {
                let ids = ids_of(word);
                ids.iter().filter(|&&id| id != 0).for_each(|&id| visit(Some44::one(id as u32 - 1)));
            }
            MANY => {
                let Some((_, words)) = self.set((word >> 2) as u32) else { return };
                let words = words.iter().map(|word| word.load(Ordering::Acquire));
                words.filter(|&word| word != 0).for_each(|word| visit(Some44::of(word)));
            }
            _ => {}
        }
    }

    /// A set of these words, with room for as many as `capacity`.
    fn allocate(&self, used: &mut ArenaUse, words: &[u64], mark: Mark, capacity: usize) -> u32 {
        let size = capacity as u32 + 1;
        loop {
            let (part, offset) = Arena::part_of(used.num_used);
            let part_size = FIRST_PART << part;
            if offset + size > part_size {
                // The next part is larger.
                used.num_used += part_size - offset;
                continue;
            }
            let memory = self.parts[part].get_or_init(|| {
                used.num_words += part_size;
                (0..part_size).map(|_| AtomicU64::new(0)).collect()
            });
            let place = used.num_used;
            used.num_used += size;
            let set = &memory[offset as usize..];
            set[0].store(mark.header(capacity), Ordering::Release);
            set[1..].iter().zip(words).for_each(|(to, &word)| to.store(word, Ordering::Release));
            return place;
        }
    }

    /// The word of the set with one more member; `None`: it is a member already.
    pub(crate) fn with(&self, used: &mut ArenaUse, word: u64, id: u32) -> Option<u64> {
        let one = Some44::one(id);
        if word & TAG != MANY {
            let mut ids = ids_of(word);
            let own = u64::from(id) + 1;
            if ids.contains(&own) {
                return None;
            }
            if let Some(free) = ids.iter_mut().find(|id| **id == 0) {
                *free = own;
                return Some(few(ids));
            }
            let mut words: Vec<u64> = Vec::with_capacity(4);
            ids.iter().for_each(|&id| join(&mut words, Some44::one(id as u32 - 1)));
            join(&mut words, one);
            words.sort_unstable();
            let mark = self.mark(word).with(id);
            return Some(u64::from(self.allocate(used, &words, mark, words.len().max(3))) << 2 | MANY);
        }
        let (header, words) = self.set((word >> 2) as u32).expect("a word names a set of its table");
        let place = place_of(words, one.chunk);
        let mark = Mark::of(header.load(Ordering::Relaxed)).with(id);
        if let Some(place) = place {
            let before = words[place].load(Ordering::Relaxed);
            if before & one.mask != 0 {
                return None;
            }
            words[place].store(before | one.word(), Ordering::Release);
            header.store(mark.header(words.len()), Ordering::Release);
            return Some(word);
        }
        if let Some(free) = words.iter().find(|word| word.load(Ordering::Relaxed) == 0) {
            free.store(one.word(), Ordering::Release);
            header.store(mark.header(words.len()), Ordering::Release);
            return Some(word);
        }
        used.num_garbage += words.len() as u32 + 1;
        let mut all: Vec<u64> = words.iter().map(|word| word.load(Ordering::Relaxed)).collect();
        all.push(one.word());
        all.sort_unstable();
        let capacity = all.len() + all.len() / 2;
        Some(u64::from(self.allocate(used, &all, mark, capacity)) << 2 | MANY)
    }

    /// The word of the set with one member fewer; `None`: it is none.
    pub(crate) fn without(&self, used: &mut ArenaUse, word: u64, id: u32) -> Option<u64> {
        if word & TAG != MANY {
            let mut ids = ids_of(word);
            let own = ids.iter_mut().find(|own| **own == u64::from(id) + 1)?;
            *own = 0;
            return Some(few(ids));
        }
        let one = Some44::one(id);
        let (header, words) = self.set((word >> 2) as u32).expect("a word names a set of its table");
        let place = place_of(words, one.chunk)?;
        let before = words[place].load(Ordering::Relaxed);
        if before & one.mask == 0 {
            return None;
        }
        let left = before & !one.mask;
        let mark = Mark::of(header.load(Ordering::Relaxed)).without(id);
        words[place].store(if left & CHUNK_MASK == 0 { 0 } else { left }, Ordering::Release);
        header.store(mark.header(words.len()), Ordering::Release);
        if mark.count() > 2 {
            return Some(word);
        }
        // One fewer than a word can name: a set at the limit does not go to and fro.
        used.num_garbage += words.len() as u32 + 1;
        let mut ids = [0; 3];
        let mut free = ids.iter_mut();
        self.for_each(word, |some| {
            for bit in bits(some.mask) {
                *free.next().expect("they are two") = u64::from(some.chunk * CHUNK + bit) + 1;
            }
        });
        Some(few(ids))
    }

    /// The word of the same set, copied into another arena.
    pub(crate) fn copy(&self, word: u64, to: &Arena, used: &mut ArenaUse) -> u64 {
        if word & TAG != MANY {
            return word;
        }
        let mut words = Vec::new();
        self.for_each(word, |some| words.push(some.word()));
        words.sort_unstable();
        let capacity = words.len() + words.len() / 4;
        u64::from(to.allocate(used, &words, self.mark(word), capacity.max(3))) << 2 | MANY
    }
}

/// Where the members of a chunk are. A set with members of every chunk has them in order.
fn place_of(words: &[AtomicU64], chunk: u32) -> Option<usize> {
    let is_there = |place: usize| {
        let word = words.get(place).map_or(0, |word| word.load(Ordering::Relaxed));
        word != 0 && Some44::of(word).chunk == chunk
    };
    let guess = chunk as usize;
    if is_there(guess) { Some(guess) } else { (0..words.len()).find(|&place| is_there(place)) }
}

fn join(words: &mut Vec<u64>, one: Some44) {
    match words.iter_mut().find(|word| Some44::of(**word).chunk == one.chunk) {
        Some(word) => *word |= one.mask,
        None => words.push(one.word()),
    }
}

/// The places of the bits of a mask.
pub(crate) fn bits(mut mask: u64) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        let bit = mask.trailing_zeros();
        mask &= mask.checked_sub(1)?;
        Some(bit)
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn members(arena: &Arena, word: u64) -> BTreeSet<u32> {
        let mut all = BTreeSet::new();
        arena.for_each(word, |some| {
            for bit in bits(some.mask) {
                assert!(all.insert(some.chunk * CHUNK + bit), "named twice");
            }
        });
        assert_eq!(arena.mark(word).count() as usize, all.len());
        assert_eq!(arena.mark(word), all.iter().fold(Mark::default(), |mark, &id| mark.with(id)));
        all
    }

    #[test]
    fn sets_of_any_size_hold_what_was_added_and_not_removed() {
        for (limit, num_changes) in [(4, 2000), (100, 4000), (3000, 20_000), (MAX_MEMBERS, 3000)] {
            let (arena, mut used) = (Arena::default(), ArenaUse::default());
            let (mut word, mut plain) = (0, BTreeSet::new());
            let mut random = 7_u64;
            for change in 0..num_changes {
                random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let id = ((random >> 33) % u64::from(limit)) as u32;
                // Grows first, and then goes up and down.
                let adds = change < num_changes / 4 || random >> 63 == 0;
                let next =
                    if adds { arena.with(&mut used, word, id) } else { arena.without(&mut used, word, id) };
                let changed = if adds { plain.insert(id) } else { plain.remove(&id) };
                assert_eq!(next.is_some(), changed, "{id}");
                word = next.unwrap_or(word);
                if change % 37 == 0 {
                    assert_eq!(members(&arena, word), plain);
                }
            }
            let (other, mut other_used) = (Arena::default(), ArenaUse::default());
            let copied = arena.copy(word, &other, &mut other_used);
            assert_eq!(members(&other, copied), plain);
            assert!(other_used.num_used <= used.num_used);
            while let Some(&id) = plain.iter().next() {
                plain.remove(&id);
                word = arena.without(&mut used, word, id).expect("it is a member");
            }
            assert_eq!(word, 0);
        }
    }

    #[test]
    fn a_thousand_neighbours_take_two_hundred_bytes() {
        let (arena, mut used) = (Arena::default(), ArenaUse::default());
        let word = (0..1000).fold(0, |word, id| arena.with(&mut used, word, id).expect("a new member"));
        let (other, mut used) = (Arena::default(), ArenaUse::default());
        arena.copy(word, &other, &mut used);
        assert!(used.num_used - used.num_garbage <= 30, "{used:?}");
    }
}
