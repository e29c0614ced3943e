//! A hash table from a block's key to where it is: a run, and the place in it.
//!
//! One writer changes it, any number of readers read it meanwhile. An entry is one word and stays where it is, and a table
//! that is replaced lives on until its last reader has left it.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::run::Spot;

/// Words that are read together: a line of the processor's cache.
const BUCKET: usize = 8;
const FREE: u64 = 0;
/// It was in use, and its bucket was full.
const GONE: u64 = u64::MAX;
const SPOT_BITS: u32 = 40;
const SPOT_MASK: u64 = (1 << SPOT_BITS) - 1;
/// A table is replaced when so much of it is in use or gone.
const FULL: (usize, usize) = (7, 10);
/// A new one has room for so many times its keys, in tenths.
const ROOM: usize = 22;
const SMALLEST: usize = 64;

/// The upper 24 bits of a word are of the key, the others its spot.
#[derive(Debug)]
pub(crate) struct Table {
    buckets: Box<[Bucket]>,
}

#[derive(Debug, Default)]
#[repr(align(64))]
struct Bucket([AtomicU64; BUCKET]);

/// What only the writer of a table needs to know.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TableUse {
    /// Keys.
    pub(crate) num_keys: usize,
    /// Words that are not free.
    num_used: usize,
}

impl Table {
    /// With room for so many keys and as many again.
    pub(crate) fn new(num_keys: usize) -> Table {
        let num_words = (num_keys * ROOM / 10).max(SMALLEST);
        Table { buckets: (0..num_words.div_ceil(BUCKET)).map(|_| Bucket::default()).collect() }
    }

    pub(crate) fn num_bytes(&self) -> u64 {
        (self.buckets.len() * size_of::<Bucket>()) as u64
    }

    fn num_words(&self) -> usize {
        self.buckets.len() * BUCKET
    }

    /// Whether it has no room for so many more keys, or far too much.
    pub(crate) fn is_unfit(&self, used: &TableUse, num_more: usize) -> bool {
        (used.num_used + num_more) * FULL.1 > self.num_words() * FULL.0
            || used.num_keys * 16 + 1024 < self.num_words()
    }

    fn home(&self, hash: u64) -> usize {
        (((hash >> 32) * self.buckets.len() as u64) >> 32) as usize
    }

    /// The first spot of a key that `is_it` accepts. Other keys may be offered, too, though rarely.
    pub(crate) fn find<T>(&self, key: u64, mut is_it: impl FnMut(Spot) -> Option<T>) -> Option<T> {
        let hash = spread(key);
        let mut place = self.home(hash);
        loop {
            let mut has_free = false;
            for word in &self.buckets[place].0 {
                let word = word.load(Ordering::Acquire);
                has_free |= word == FREE;
                if (word ^ hash << SPOT_BITS) >> SPOT_BITS == 0 && word != FREE && word != GONE {
                    let found = is_it(Spot(word & SPOT_MASK));
                    if found.is_some() {
                        return found;
                    }
                }
            }
            if has_free {
                // A bucket that was full once has no free word any more.
                return None;
            }
            place = if place + 1 == self.buckets.len() { 0 } else { place + 1 };
        }
    }

    /// Reads the memory where a key is expected.
    pub(crate) fn peek(&self, key: u64) -> u64 {
        self.buckets[self.home(spread(key))].0[0].load(Ordering::Relaxed)
    }

    /// Adds a key that is not there at that spot. There is room.
    pub(crate) fn add(&self, used: &mut TableUse, key: u64, spot: Spot) {
        let hash = spread(key);
        let mut place = self.home(hash);
        loop {
            for word in &self.buckets[place].0 {
                let before = word.load(Ordering::Relaxed);
                if before == FREE || before == GONE {
                    word.store(hash << SPOT_BITS | spot.0, Ordering::Release);
                    used.num_keys += 1;
                    used.num_used += usize::from(before == FREE);
                    return;
                }
            }
            place = if place + 1 == self.buckets.len() { 0 } else { place + 1 };
        }
    }

    /// Removes a key from a spot where it is.
    pub(crate) fn remove(&self, used: &mut TableUse, key: u64, spot: Spot) {
        let hash = spread(key);
        let own = hash << SPOT_BITS | spot.0;
        let mut place = self.home(hash);
        loop {
            let words = &self.buckets[place].0;
            let has_free = words[BUCKET - 1].load(Ordering::Relaxed) == FREE
                || words.iter().any(|word| word.load(Ordering::Relaxed) == FREE);
            if let Some(word) = words.iter().find(|word| word.load(Ordering::Relaxed) == own) {
                word.store(if has_free { FREE } else { GONE }, Ordering::Release);
                used.num_keys -= 1;
                used.num_used -= usize::from(has_free);
                return;
            }
            debug_assert!(!has_free, "the key is there");
            if has_free {
                return;
            }
            place = if place + 1 == self.buckets.len() { 0 } else { place + 1 };
        }
    }
}

/// Keys are hashes. This spreads those that are not (the finaliser of splitmix64; Steele, Lea, Flood 2014).
fn spread(key: u64) -> u64 {
    let mut z = key;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
