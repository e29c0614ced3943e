//! What waits to be saved: sequences in the pool, records on their way to a tier, and what tiers had no room for. What is to be forgotten
//! waits behind them.

use std::sync::Arc;

use baton_kv_cache::{BlockHash, BlockId, BlockStorage};
use baton_kv_events::Keep;
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use crate::record::Record;

/// Sequences that wait to be copied out of the pool. Each keeps its blocks, and copies are fast: a longer queue would keep
/// more of the pool than it is worth.
pub const MAX_SAVES: usize = 16;
/// Memory of records that wait for the disk, and of those that wait for the object store: this part of the pool, but no less and no
/// more than so many bytes. It is to last for a step of the engine, at whose end more blocks come.
const QUEUED_PART: usize = 16;
const MIN_QUEUED_BYTES: usize = 64 << 20;
const MAX_QUEUED_BYTES: usize = 1 << 30;

/// Blocks of a sequence in a pool, to be copied. `G` keeps them as they are.
#[derive(Debug)]
pub struct SequenceBlocks<G> {
    /// The start of the chain of hashes.
    pub root: BlockHash,
    /// Hashes of the blocks, in order.
    pub hashes: Arc<[BlockHash]>,
    /// How the request wants each to be kept.
    pub keeps: Arc<[Keep]>,
    /// Their tokens, one after the other.
    pub tokens: Arc<[u32]>,
    /// Where they are. There may be fewer than hashes.
    pub blocks: Vec<BlockId>,
    /// The request has ended: this counts as a use of its blocks.
    pub has_ended: bool,
    /// No block is written before this is dropped.
    pub guard: G,
}

/// Blocks of a sequence, by their places in it, that one tier is still to get.
#[derive(Debug)]
pub struct SaveRest {
    /// The tier, by its number; after those with slots the object store.
    pub(crate) target: usize,
    pub(crate) first: usize,
    pub(crate) end: usize,
}

/// What the thread that copies does, in this order.
pub(crate) enum ToCopy {
    Save(Save),
    Forget(Forget),
}

/// What the thread that writes to disks does, in this order.
pub(crate) enum ToWrite {
    Record(Write),
    Forget(Forget),
}

/// Blocks that are to be forgotten.
pub(crate) struct Forget {
    pub(crate) hashes: Vec<BlockHash>,
    pub(crate) done: oneshot::Sender<()>,
}

/// A sequence on its way to the thread that copies.
pub(crate) struct Save {
    pub(crate) sequence: SequenceBlocks<Box<dyn Send>>,
    pub(crate) wanted: Vec<SaveRest>,
    pub(crate) rests: oneshot::Sender<Vec<SaveRest>>,
}

/// A record on its way to a tier.
pub(crate) struct Write {
    pub(crate) tier: usize,
    pub(crate) keep: Keep,
    pub(crate) record: Arc<Record>,
    /// In the queue for a disk.
    pub(crate) _place: Option<OwnedSemaphorePermit>,
}

/// Records that wait for one tier at most.
pub(crate) fn num_queued(storage: &BlockStorage) -> usize {
    let max_bytes = (storage.size_bytes() / QUEUED_PART).clamp(MIN_QUEUED_BYTES, MAX_QUEUED_BYTES);
    (max_bytes / storage.layout().block_bytes()).max(1)
}

impl SaveRest {
    /// The tier that had no room for it: a number below [`KvStore::num_targets`].
    pub fn target(&self) -> usize {
        self.target
    }
}
