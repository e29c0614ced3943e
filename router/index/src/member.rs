//! One member of the index, and what it holds.

use std::sync::Arc;

use baton_kv_events::BlockKey;

use crate::{
    held::Held,
    index::{IndexFull, KvIndex, MemberId},
};

/// A member. Dropping it makes it hold nothing, at once.
#[derive(Debug)]
pub(crate) struct Member {
    index: Arc<KvIndex>,
    id: MemberId,
    held: Held,
    max_held: usize,
}

impl Member {
    /// Of `owner`, with at most so many blocks.
    pub(crate) fn join(index: &Arc<KvIndex>, owner: u32, max_held: usize) -> Result<Member, IndexFull> {
        let id = index.join(owner)?;
        Ok(Member { index: index.clone(), id, held: Held::default(), max_held })
    }

    /// It may hold so many blocks from now on. What it holds already stays.
    pub(crate) fn allow(&mut self, max_held: usize) {
        self.max_held = max_held;
    }

    pub(crate) fn num_held(&self) -> usize {
        self.held.num_held()
    }

    /// Blocks that follow each other, the first one after `parent`. How many were refused.
    pub(crate) fn store(&mut self, parent: Option<BlockKey>, blocks: &[BlockKey]) -> usize {
        let before = self.held.num_bytes();
        let mut runs = self.index.runs().change();
        let num_refused = self.held.store(&mut runs, self.id.0, parent, blocks, self.max_held);
        drop(runs);
        self.finish(before, blocks.len());
        num_refused
    }

    /// Blocks that are not held any more.
    pub(crate) fn remove(&mut self, blocks: &[BlockKey]) {
        let before = self.held.num_bytes();
        let mut runs = self.index.runs().change();
        self.held.remove(&mut runs, self.id.0, blocks);
        drop(runs);
        self.finish(before, blocks.len());
    }

    fn finish(&self, bytes_before: usize, num_blocks: usize) {
        self.index.note_bytes(bytes_before, self.held.num_bytes());
        // Who writes sweeps twice as much, so that it ends.
        self.index.sweep(2 * num_blocks);
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.index.retire(self.id, std::mem::take(&mut self.held));
    }
}
