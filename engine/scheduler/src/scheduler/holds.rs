//! Blocks that are held from outside the engine: of prefilled prompts, of prefixes, and of reservations.
//! It does not know the queue, nor whether there is room for a hold.

use std::collections::BTreeMap;

use baton_kv_cache::{BlockHash, BlockId};

use crate::{
    block_pool::BlockPool,
    sequence::{Sequence, SequenceId},
};

/// Blocks set aside for a prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefixBlocks {
    /// In the order of the prefix.
    pub blocks: Vec<BlockId>,
    /// So many of them at the front are cached. They are shared and must never be written.
    pub num_cached_blocks: usize,
}

/// The tables of blocks that an owner outside the engine holds until it releases them.
#[derive(Debug, Default)]
pub(super) struct Holds {
    /// The second owner of prefilled and of recalled blocks, and the owner of prefixes and of reservations without a slot. The
    /// table of a prefill that still waits is empty.
    tables: BTreeMap<SequenceId, Vec<BlockId>>,
    /// Sequences whose KV comes from elsewhere, into blocks that are set aside here.
    reserved: BTreeMap<SequenceId, Sequence>,
}

impl Holds {
    /// Adds the hold of a sequence that has no blocks yet.
    pub(super) fn register(&mut self, id: SequenceId) {
        self.tables.insert(id, Vec::new());
    }

    /// Makes the hold of an admitted sequence, if it has one, a second owner of its blocks.
    pub(super) fn extend(&mut self, sequence: &Sequence, pool: &mut BlockPool) {
        if let Some(table) = self.tables.get_mut(&sequence.id) {
            table.extend_from_slice(&sequence.blocks);
            // Invariant 5: the transfer owns the blocks too, and they outlive the sequence until it is over.
            pool.acquire(&sequence.blocks);
        }
    }

    /// A sequence has another block at `idx`. Its hold, if it has one, does too.
    pub(super) fn exchange(&mut self, id: SequenceId, idx: usize, block: BlockId, pool: &mut BlockPool) {
        if let Some(table) = self.tables.get_mut(&id) {
            pool.acquire(&[block]);
            pool.release(&[std::mem::replace(&mut table[idx], block)]);
        }
    }

    /// Keeps a granted reservation.
    pub(super) fn reserve(&mut self, sequence: Sequence) {
        self.reserved.insert(sequence.id, sequence);
    }

    /// Gives a granted reservation back, blocks included.
    pub(super) fn take_reserved(&mut self, id: SequenceId) -> Option<Sequence> {
        self.reserved.remove(&id)
    }

    /// Makes a granted reservation a plain hold of its blocks. False when there is none of this id.
    pub(super) fn give_up_slot(&mut self, id: SequenceId) -> bool {
        let Some(sequence) = self.reserved.remove(&id) else { return false };
        // Invariant 5: the blocks keep their owner, which releases them after the fence.
        self.tables.insert(id, sequence.blocks);
        true
    }

    /// Releases a hold or a granted reservation. False when there is none of this id.
    pub(super) fn release(&mut self, id: SequenceId, pool: &mut BlockPool) -> bool {
        let blocks = match self.tables.remove(&id) {
            Some(table) => Some(table),
            None => self.reserved.remove(&id).map(|sequence| sequence.blocks),
        };
        // Invariant 5: the table is removed first, so a second release finds nothing.
        blocks.map(|blocks| pool.release(&blocks)).is_some()
    }

    /// Holds the cached blocks of the longest prefix of `hashes`.
    pub(super) fn hold_cached(
        &mut self,
        id: SequenceId,
        hashes: &[BlockHash],
        pool: &mut BlockPool,
    ) -> Vec<BlockId> {
        let blocks = pool.find_prefix(hashes);
        pool.acquire(&blocks);
        self.tables.insert(id, blocks.clone());
        blocks
    }

    /// Holds `cached`, and as many free blocks as make `num_blocks` with them.
    ///
    /// # Panics
    /// When there are not enough free blocks.
    pub(super) fn reserve_prefix(
        &mut self,
        id: SequenceId,
        cached: Vec<BlockId>,
        num_blocks: usize,
        pool: &mut BlockPool,
    ) -> PrefixBlocks {
        let num_cached_blocks = cached.len();
        let mut blocks = cached;
        pool.acquire(&blocks);
        while blocks.len() < num_blocks {
            blocks.push(pool.allocate().expect("there is room"));
        }
        self.tables.insert(id, blocks.clone());
        PrefixBlocks { blocks, num_cached_blocks }
    }

    /// Enters held blocks from `first` on, which follow that of `after`, into the prefix cache.
    pub(super) fn cache_prefix(
        &self,
        id: SequenceId,
        first: usize,
        after: Option<BlockHash>,
        hashes: &[BlockHash],
        pool: &mut BlockPool,
    ) {
        let blocks = self.tables.get(&id).expect("a prefix is cached before it is released");
        pool.cache_all(after, blocks[first..].iter().copied().zip(hashes.iter().copied()));
    }

    /// A granted reservation.
    pub(super) fn reservation(&self, id: SequenceId) -> Option<&Sequence> {
        self.reserved.get(&id)
    }

    /// Granted reservations, oldest first.
    pub(super) fn reserved(&self) -> impl ExactSizeIterator<Item = &Sequence> {
        self.reserved.values()
    }

    /// Holds of prefilled prompts, prefixes and reservations without a slot.
    pub(super) fn tables(&self) -> impl ExactSizeIterator<Item = &[BlockId]> {
        self.tables.values().map(|table| &table[..])
    }
}
