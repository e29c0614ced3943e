//! A hash table from a block's key to where it is: a run, and the place in it.
//!
//! One writer changes it, any number of readers read it meanwhile. An entry is one word and stays where it is, and a table
//! that is replaced lives on until its last reader has left it.

use std::sync::atomic::{AtomicU64, Ordering};

use baton_random::mix;

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
const ROOM: usize = 36;
const SMALLEST: usize = 64;

/// Of a key. The upper half chooses the bucket, three bits where the search in it begins, and 24 are in the word.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeyHash(u64);

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
    /// With room for more than twice as many keys.
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

    #[inline]
    fn home(&self, hash: KeyHash) -> usize {
        (((hash.0 >> 32) * self.buckets.len() as u64) >> 32) as usize
    }

    /// The first spot of a key that `is_it` accepts. Other keys may be offered, too, though rarely.
    pub(crate) fn find<T>(&self, key: u64, mut is_it: impl FnMut(Spot) -> Option<T>) -> Option<T> {
        let hash = KeyHash::of(key);
        let mut place = self.home(hash);
        loop {
            let mut has_free = false;
            for word in &self.buckets[place].0 {
                let word = word.load(Ordering::Acquire);
                has_free |= word == FREE;
                if (word ^ hash.0 << SPOT_BITS) >> SPOT_BITS == 0 && word != FREE && word != GONE {
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
    #[inline]
    pub(crate) fn peek(&self, hash: KeyHash) -> u64 {
        self.buckets[self.home(hash)].0[0].load(Ordering::Relaxed)
    }

    /// Adds a key that is not there at that spot. There is room.
    #[inline]
    pub(crate) fn add(&self, used: &mut TableUse, hash: KeyHash, spot: Spot) {
        let mut place = self.home(hash);
        loop {
            let words = &self.buckets[place].0;
            for idx in hash.order() {
                let before = words[idx].load(Ordering::Relaxed);
                if before == FREE || before == GONE {
                    words[idx].store(hash.0 << SPOT_BITS | spot.0, Ordering::Release);
                    used.num_keys += 1;
                    used.num_used += usize::from(before == FREE);
                    return;
                }
            }
            place = if place + 1 == self.buckets.len() { 0 } else { place + 1 };
        }
    }

    /// Removes a key from a spot where it is.
    #[inline]
    pub(crate) fn remove(&self, used: &mut TableUse, hash: KeyHash, spot: Spot) {
        let own = hash.0 << SPOT_BITS | spot.0;
        let mut place = self.home(hash);
        loop {
            let words = &self.buckets[place].0;
            let is = |idx: usize, word: u64| words[idx].load(Ordering::Relaxed) == word;
            if let Some(idx) = hash.order().find(|&idx| is(idx, own)) {
                // Another free word says that the bucket was never full.
                let has_free = hash.order().any(|idx| is(idx, FREE));
                words[idx].store(if has_free { FREE } else { GONE }, Ordering::Release);
                used.num_keys -= 1;
                used.num_used -= usize::from(has_free);
                return;
            }
            if (0..BUCKET).any(|idx| is(idx, FREE)) {
                debug_assert!(false, "the key is there");
                return;
            }
            place = if place + 1 == self.buckets.len() { 0 } else { place + 1 };
        }
    }
}

impl KeyHash {
    /// Keys are hashes. This spreads those that are not (the finaliser of splitmix64; Steele, Lea, Flood 2014).
    #[inline]
    pub(crate) fn of(key: u64) -> KeyHash {
        KeyHash(mix(key))
    }

    /// The words of a bucket, the likeliest first.
    #[inline]
    fn order(self) -> impl Iterator<Item = usize> {
        (0..BUCKET).map(move |idx| (idx + (self.0 >> 24) as usize) % BUCKET)
    }
}
