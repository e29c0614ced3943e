//! Which blocks an object store has. Workers share it, so one of them says it for all.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hasher},
    sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
};

use baton_kv_events::BlockKey;

/// Blocks of all segments at most: of twice as many as a worker looks at. More are not taken.
const MAX_BLOCKS: usize = 1 << 21;

/// The blocks of a store's segments, as a worker tells them. A lookup waits while a segment is entered, at most a thousand blocks.
#[derive(Debug, Default)]
pub struct StoredBlocks {
    known: RwLock<Known>,
}

#[derive(Debug, Default)]
struct Known {
    segments: HashMap<u32, Box<[BlockKey]>>,
    /// Segments that hold each.
    num_holders: HashMap<u64, u32, BuildHasherDefault<KeyHasher>>,
    num_blocks: usize,
}

/// A block's name is a hash.
#[derive(Debug, Default)]
struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for part in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..part.len()].copy_from_slice(part);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u64(&mut self, number: u64) {
        self.0 ^= number;
    }
}

/// How far the store has a prompt, from some of its blocks on: each block is looked up once.
#[derive(Debug)]
pub struct StoredFront<'a, T> {
    blocks: &'a StoredBlocks,
    chain: &'a [T],
    /// Where it was begun to look, and the first block from there that the store lacks.
    found: Vec<(usize, usize)>,
}

impl StoredBlocks {
    /// A segment is there. One of the same number is replaced.
    pub fn add(&self, number: u32, blocks: impl Iterator<Item = BlockKey>) {
        let mut known = self.write();
        known.remove(number);
        let room = MAX_BLOCKS - known.num_blocks;
        let blocks: Box<[BlockKey]> = blocks.take(room).collect();
        known.num_blocks += blocks.len();
        for block in &blocks {
            *known.num_holders.entry(block.0).or_default() += 1;
        }
        known.segments.insert(number, blocks);
    }

    /// A segment is gone.
    pub fn remove(&self, number: u32) {
        self.write().remove(number);
    }

    /// Blocks that some segment holds.
    pub fn num_blocks(&self) -> usize {
        self.read().num_holders.len()
    }

    /// How far it has a prompt of these blocks.
    pub fn front<'a, T>(&'a self, chain: &'a [T]) -> StoredFront<'a, T> {
        StoredFront { blocks: self, chain, found: Vec::new() }
    }

    /// No user code runs under the lock, so a poisoned one holds whole data.
    fn read(&self) -> RwLockReadGuard<'_, Known> {
        self.known.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Known> {
        self.known.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    fn remove(&mut self, number: u32) {
        let blocks = self.segments.remove(&number).unwrap_or_default();
        self.num_blocks -= blocks.len();
        for block in blocks {
            if let Some(num) = self.num_holders.get_mut(&block.0) {
                *num -= 1;
                if *num == 0 {
                    self.num_holders.remove(&block.0);
                }
            }
        }
    }
}

impl<T: Copy> StoredFront<'_, T> {
    /// Where the front ends whose first `num_before` blocks are elsewhere: at the first block after them that the store lacks.
    pub fn end_after(&mut self, num_before: usize, key: impl Fn(T) -> BlockKey) -> usize {
        if let Some(&(_, end)) = self.found.iter().find(|&&(from, end)| (from..=end).contains(&num_before)) {
            return end;
        }
        let after = self.chain.get(num_before..).unwrap_or_default();
        // For this alone: a thread that reads twice waits for ever when a writer comes in between.
        let known = self.blocks.read();
        let is_stored = |block: T| known.num_holders.contains_key(&key(block).0);
        let end = num_before + after.iter().take_while(|&&block| is_stored(block)).count();
        self.found.push((num_before, end));
        end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(range: std::ops::Range<u64>) -> impl Iterator<Item = BlockKey> {
        range.map(BlockKey)
    }

    #[test]
    fn a_front_goes_on_with_the_blocks_that_any_segment_holds() {
        let blocks = StoredBlocks::default();
        blocks.add(1, keys(0..10));
        blocks.add(2, keys(8..20));
        blocks.add(3, keys(30..40));
        let chain: Vec<u64> = (0..35).collect();
        let ends = |froms: &[usize]| {
            let mut front = blocks.front(&chain);
            froms.iter().map(|&from| front.end_after(from, BlockKey)).collect::<Vec<_>>()
        };
        // From within what was found, from a block that is lacking, after it, and from beyond the prompt.
        assert_eq!(ends(&[0, 5, 20, 25, 30, 35, 40]), [20, 20, 20, 25, 35, 35, 40]);
        assert_eq!(blocks.num_blocks(), 30);
        // Two blocks are in another segment, too.
        blocks.remove(2);
        assert_eq!(ends(&[12, 0]), [12, 10]);
        blocks.add(1, keys(0..3));
        blocks.remove(7);
        assert_eq!((ends(&[0]), blocks.num_blocks()), (vec![3], 13));
    }

    #[test]
    fn fronts_that_are_kept_keep_no_writer_out() {
        let blocks = StoredBlocks::default();
        let mut front = blocks.front(&[1_u64, 2]);
        assert_eq!(front.end_after(0, BlockKey), 0);
        blocks.add(1, keys(1..3));
        assert_eq!(blocks.front(&[1_u64, 2]).end_after(0, BlockKey), 2);
        assert_eq!(front.end_after(0, BlockKey), 0, "it was looked up once");
    }

    #[test]
    fn more_blocks_than_there_is_room_for_are_not_taken() {
        let blocks = StoredBlocks::default();
        for number in 0..3 {
            let first = u64::from(number) << 20;
            blocks.add(number, keys(first..first + (1 << 20)));
        }
        assert_eq!(blocks.num_blocks(), MAX_BLOCKS);
        blocks.remove(0);
        blocks.add(2, keys(0..5));
        assert_eq!(blocks.num_blocks(), (1 << 20) + 5);
    }
}
