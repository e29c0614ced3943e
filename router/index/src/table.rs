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

/// Of a key. The upper half chooses the bucket, 24 bits are in the word, and the others say which part of many tables it is.
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
    pub(crate) fn find<T>(&self, hash: KeyHash, mut is_it: impl FnMut(Spot) -> Option<T>) -> Option<T> {
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
            let bucket = &self.buckets[place];
            let unused = bucket.places(|word| word == FREE || word == GONE);
            if unused != 0 {
                let word = &bucket.0[unused.trailing_zeros() as usize];
                used.num_keys += 1;
                used.num_used += usize::from(word.load(Ordering::Relaxed) == FREE);
                word.store(hash.0 << SPOT_BITS | spot.0, Ordering::Release);
                return;
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
            let bucket = &self.buckets[place];
            let found = bucket.places(|word| word == own);
            // A free word says that the bucket was never full.
            let has_free = bucket.places(|word| word == FREE) != 0;
            if found != 0 {
                let now = if has_free { FREE } else { GONE };
                bucket.0[found.trailing_zeros() as usize].store(now, Ordering::Release);
                used.num_keys -= 1;
                used.num_used -= usize::from(has_free);
                return;
            }
            if has_free {
                debug_assert!(false, "the key is there");
                return;
            }
            place = if place + 1 == self.buckets.len() { 0 } else { place + 1 };
        }
    }
}

impl Bucket {
    /// A bit for each word that `is_it` accepts. Without branches, which nothing could predict.
    #[inline]
    fn places(&self, is_it: impl Fn(u64) -> bool) -> u32 {
        let bit = |(idx, word): (usize, &AtomicU64)| u32::from(is_it(word.load(Ordering::Relaxed))) << idx;
        self.0.iter().enumerate().map(bit).sum()
    }
}

impl KeyHash {
    /// Keys are hashes. This spreads those that are not (the finaliser of splitmix64; Steele, Lea, Flood 2014).
    #[inline]
    pub(crate) fn of(key: u64) -> KeyHash {
        KeyHash(mix(key))
    }

    /// Which of so many parts, at most 256.
    #[inline]
    pub(crate) fn part(self, num_parts: usize) -> usize {
        (self.0 >> 24) as u8 as usize % num_parts
    }
}
