//! The owners of blocks, and the prefix cache over them. Pure bookkeeping: it knows block ids and hashes, not bytes,
//! tokens or sequences.
//!
//! ```text
//!            allocate                     release, no hash
//!   free  -------------->  owned (n >= 1) ---------------->  free
//!    ^                       |   ^
//!    |         release, hash |   | acquire (a prefix was found)
//!    |                       v   |
//!    +-----------------  cached, no owner      evicted in the eviction order,
//!        (reused)                              only when no block is free
//! ```
//!
//! A block enters the cache while it is owned, as soon as its KV is complete. Other sequences may acquire it from
//! then on. A cached block is never written again before it is evicted.

use std::{collections::HashMap, time::Duration};

use baton_kv_cache::{BlockHash, BlockId};
use baton_kv_events::{BlockKey, CacheEvent, EvictionOrder, Keep, PendingEvents};

/// The blocks of one engine.
#[derive(Debug)]
pub struct BlockPool {
    blocks: Vec<Block>,
    /// Blocks without an owner or a hash.
    free: Vec<BlockId>,
    /// Blocks without an owner but with a hash.
    evictable: EvictionOrder,
    /// Every block with a hash.
    by_hash: HashMap<BlockHash, BlockId>,
    /// One more than the largest id ever allocated.
    num_used: usize,
    /// What has changed in the prefix cache, if it is to be told.
    events: Option<PendingEvents>,
}

#[derive(Clone, Debug, Default)]
struct Block {
    num_owners: u32,
    hash: Option<BlockHash>,
}

/// Counts of a pool's blocks by state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolReport {
    /// All blocks.
    pub num_total: usize,
    /// Blocks without an owner and without content.
    pub num_free: usize,
    /// Blocks without an owner, kept for their content.
    pub num_cached: usize,
    /// Blocks with an owner.
    pub num_owned: usize,
}

/// The pool's block accounting contradicts itself, or the tables of the owners.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("block pool: {0}")]
pub struct IntegrityError(pub String);

impl BlockPool {
    /// A pool of `num_blocks` free blocks.
    pub fn new(num_blocks: usize) -> BlockPool {
        BlockPool {
            blocks: vec![Block::default(); num_blocks],
            // Popped from the end: low ids come first, which keeps the touched memory small.
            free: (0..num_blocks as u32).rev().map(BlockId).collect(),
            evictable: EvictionOrder::new(num_blocks),
            by_hash: HashMap::new(),
            num_used: 0,
            events: None,
        }
    }

    /// The time since any fixed moment, for blocks that are kept for some time.
    pub fn set_time(&mut self, now: Duration) {
        self.evictable.set_time(now);
    }

    /// Keeps what is stored and evicted from now on, for [`take_events`](Self::take_events).
    pub fn record_events(&mut self) {
        self.events.get_or_insert_default();
    }

    /// What was stored and evicted since the last call.
    pub fn take_events(&mut self) -> Vec<CacheEvent> {
        self.events.as_mut().map(PendingEvents::take).unwrap_or_default()
    }

    /// All blocks.
    pub fn num_blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Blocks that [`allocate`](Self::allocate) can return.
    pub fn num_available(&self) -> usize {
        self.free.len() + self.evictable.len()
    }

    /// The first so many blocks contain all that were ever allocated.
    pub fn num_used(&self) -> usize {
        self.num_used
    }

    /// Whether `block` is cached: it holds its KV for good.
    pub fn is_cached(&self, block: BlockId) -> bool {
        self.blocks[block.idx()].hash.is_some()
    }

    /// Whether `block` has no owner. Acquiring such a block makes one fewer available.
    pub fn is_unowned(&self, block: BlockId) -> bool {
        self.blocks[block.idx()].num_owners == 0
    }

    /// A block with one owner and no content; `None` when all are owned.
    pub fn allocate(&mut self) -> Option<BlockId> {
        let id = match self.free.pop() {
            Some(id) => id,
            None => self.evict()?,
        };
        let block = &mut self.blocks[id.idx()];
        debug_assert!(block.num_owners == 0 && block.hash.is_none());
        block.num_owners = 1;
        self.num_used = self.num_used.max(id.idx() + 1);
        Some(id)
    }

    fn evict(&mut self) -> Option<BlockId> {
        let id = BlockId(self.evictable.pop()?);
        let hash = self.blocks[id.idx()].hash.take().expect("an evictable block has a hash");
        self.by_hash.remove(&hash);
        if let Some(events) = &mut self.events {
            events.removed(key(hash));
        }
        Some(id)
    }

    /// The cached blocks of the longest prefix of `hashes`, which are a sequence's hashes in order.
    pub fn find_prefix(&self, hashes: &[BlockHash]) -> Vec<BlockId> {
        hashes.iter().map_while(|hash| self.find(hash)).collect()
    }

    /// The block that is cached under `hash`.
    pub fn find(&self, hash: &BlockHash) -> Option<BlockId> {
        self.by_hash.get(hash).copied()
    }

    /// Adds an owner to each of `blocks`, which are owned or cached.
    pub fn acquire(&mut self, blocks: &[BlockId]) {
        for id in blocks {
            let block = &mut self.blocks[id.idx()];
            if block.num_owners == 0 {
                assert!(block.hash.is_some(), "acquired a block that has no owner and is not cached");
                self.evictable.remove(id.0);
            }
            block.num_owners += 1;
        }
    }

    /// A request used these blocks, which are owned, and wants those that are cached to be kept so.
    pub fn mark(&mut self, blocks: impl IntoIterator<Item = (BlockId, Keep)>) {
        for (id, keep) in blocks {
            if self.blocks[id.idx()].hash.is_some() {
                self.evictable.mark(id.0, keep);
            }
        }
    }

    /// Removes an owner from each of `blocks`, which are a sequence's table in order.
    pub fn release(&mut self, blocks: &[BlockId]) {
        // In reverse, so that the last block of a sequence is evicted first: it is useless without the blocks before
        // it.
        for id in blocks.iter().rev() {
            let block = &mut self.blocks[id.idx()];
            assert!(block.num_owners > 0, "released {id}, which has no owner");
            block.num_owners -= 1;
            // Invariant 5: the block returns with its last owner.
            if block.num_owners > 0 {
                continue;
            }
            if block.hash.is_some() {
                self.evictable.push(id.0);
            } else {
                self.free.push(*id);
            }
        }
    }

    /// Declares that the owned `block` holds the KV that `hash` names, for good, which follows that of `after`. When another
    /// block is cached under `hash`, that one stays.
    pub fn cache(&mut self, block: BlockId, hash: BlockHash, after: Option<BlockHash>) {
        let entry = &mut self.blocks[block.idx()];
        debug_assert!(entry.num_owners > 0, "only an owner knows what a block holds");
        if entry.hash.is_none() && !self.by_hash.contains_key(&hash) {
            entry.hash = Some(hash);
            self.by_hash.insert(hash, block);
            if let Some(events) = &mut self.events {
                events.stored(after.map(key), key(hash));
            }
        }
    }

    /// [Caches](Self::cache) blocks that follow each other, each under its hash.
    pub fn cache_all(
        &mut self,
        mut after: Option<BlockHash>,
        blocks: impl IntoIterator<Item = (BlockId, BlockHash)>,
    ) {
        for (block, hash) in blocks {
            self.cache(block, hash, after);
            after = Some(hash);
        }
    }

    /// What these blocks hold is found no more. Their owners keep them.
    pub fn forget(&mut self, blocks: &[BlockId]) {
        for id in blocks {
            let block = &mut self.blocks[id.idx()];
            debug_assert!(block.num_owners > 0, "only an owner knows what a block holds");
            if let Some(hash) = block.hash.take() {
                self.by_hash.remove(&hash);
                self.evictable.forget(id.0);
                if let Some(events) = &mut self.events {
                    events.removed(key(hash));
                }
            }
        }
    }

    /// Checks every rule above and the counts of owners. `tables` are the block tables of all owners.
    pub fn check_integrity<'a>(
        &self,
        tables: impl IntoIterator<Item = &'a [BlockId]>,
    ) -> Result<PoolReport, IntegrityError> {
        let fail = |what: String| Err(IntegrityError(what));
        let mut num_owners = vec![0; self.blocks.len()];
        for id in tables.into_iter().flatten() {
            num_owners[id.idx()] += 1;
        }
        let mut is_free = vec![false; self.blocks.len()];
        for id in &self.free {
            if std::mem::replace(&mut is_free[id.idx()], true) {
                return fail(format!("{id} is in the free list twice"));
            }
        }
        let mut num_hashed = 0;
        let mut num_owned = 0;
        for (idx, block) in self.blocks.iter().enumerate() {
            let id = BlockId(idx as u32);
            if block.num_owners != num_owners[idx] {
                return fail(format!("{id} counts {} owners, has {}", block.num_owners, num_owners[idx]));
            }
            if let Some(hash) = &block.hash {
                num_hashed += 1;
                if self.by_hash.get(hash) != Some(&id) {
                    return fail(format!("{id} has a hash that names another block"));
                }
            }
            let is_evictable = self.evictable.contains(id.0);
            let expected = match (block.num_owners, block.hash) {
                (0, None) => (true, false),
                (0, Some(_)) => (false, true),
                _ => (false, false),
            };
            if (is_free[idx], is_evictable) != expected {
                return fail(format!(
                    "{id} with {} owners: free {}, evictable {is_evictable}",
                    block.num_owners, is_free[idx]
                ));
            }
            num_owned += usize::from(block.num_owners > 0);
        }
        if num_hashed != self.by_hash.len() {
            return fail(format!("{} hashes name {num_hashed} blocks", self.by_hash.len()));
        }
        let report = PoolReport {
            num_total: self.blocks.len(),
            num_free: self.free.len(),
            num_cached: self.evictable.len(),
            num_owned,
        };
        if report.num_free + report.num_cached + report.num_owned != report.num_total {
            return fail(format!("{report:?} does not add up"));
        }
        Ok(report)
    }
}

fn key(hash: BlockHash) -> BlockKey {
    BlockKey(hash.short())
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_kv_cache::HashRoot;

    #[test]
    fn what_was_said_of_a_forgotten_content_is_not_said_of_the_next() {
        let hashes: Vec<_> = HashRoot::new("m", "", "").block_hashes(&[1, 2, 3], 1).collect();
        for (keep, used) in [(Keep::High(Duration::from_secs(9)), [0, 1]), (Keep::Low, [1, 0])] {
            let mut pool = BlockPool::new(2);
            let blocks = [(); 2].map(|()| pool.allocate().expect("one is free"));
            pool.cache(blocks[0], hashes[0], None);
            pool.mark([(blocks[0], keep)]);
            pool.forget(&blocks[..1]);
            pool.cache_all(None, blocks.into_iter().zip([hashes[1], hashes[2]]));
            let used = used.map(|idx| blocks[idx]);
            used.iter().for_each(|&block| pool.release(&[block]));
            assert_eq!(
                used.map(|_| pool.allocate()),
                used.map(Some),
                "the one that was used first goes first"
            );
        }
    }
}
