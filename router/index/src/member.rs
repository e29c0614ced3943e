//! One member of the index: what it holds, and what of that is published.

use std::sync::Arc;

use baton_kv_events::BlockKey;

use crate::{
    chain::Chains,
    index::{IndexFull, KvIndex, MemberId},
};

/// A member. Dropping it makes it hold nothing, at once.
#[derive(Debug)]
pub(crate) struct Member {
    index: Arc<KvIndex>,
    id: MemberId,
    chains: Chains,
    max_held: usize,
    /// Reused.
    keys: Vec<BlockKey>,
}

impl Member {
    /// Of `owner`, with at most so many blocks.
    pub(crate) fn join(index: &Arc<KvIndex>, owner: u32, max_held: usize) -> Result<Member, IndexFull> {
        let id = index.join(owner)?;
        Ok(Member { index: index.clone(), id, chains: Chains::default(), max_held, keys: Vec::new() })
    }

    pub(crate) fn num_held(&self) -> usize {
        self.chains.num_held()
    }

    pub(crate) fn holds(&self, block: BlockKey) -> bool {
        self.chains.holds(block)
    }

    /// Blocks that follow each other, the first one after `parent`. How many were refused.
    pub(crate) fn store(&mut self, parent: Option<BlockKey>, blocks: &[BlockKey]) -> usize {
        self.change(blocks.len(), |chains, max_held, keys, index, id| {
            let num_refused = chains.store(parent, blocks, max_held, keys);
            index.add(id, keys);
            num_refused
        })
    }

    /// Blocks that are not held any more.
    pub(crate) fn remove(&mut self, blocks: &[BlockKey]) {
        self.change(blocks.len(), |chains, _, keys, index, id| {
            chains.remove(blocks, keys);
            index.remove(id, keys);
        });
    }

    fn change<T>(
        &mut self,
        num_blocks: usize,
        change: impl FnOnce(&mut Chains, usize, &mut Vec<BlockKey>, &KvIndex, MemberId) -> T,
    ) -> T {
        let Member { index, id, chains, max_held, keys } = self;
        let before = chains.num_bytes();
        keys.clear();
        let changed = change(chains, *max_held, keys, index, *id);
        // What a hole hid at once is rare.
        keys.shrink_to(1 << 12);
        index.note_bytes(before, chains.num_bytes());
        // Who writes sweeps twice as much, so that it ends.
        index.sweep(2 * num_blocks);
        changed
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.index.retire(self.id, std::mem::take(&mut self.chains));
    }
}
