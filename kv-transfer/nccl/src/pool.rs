//! What the threads of a sender and of its pools share.

use std::sync::{Arc, atomic::AtomicBool};

use baton_kv_cache::{BlockStorage, KvLayout};
use baton_transfer::{SenderContext, sender::Jobs};

use super::{
    communicators::{Communicators, MAX_COMMUNICATORS},
    fabric::{Fabric, FabricError, ReachableMemory},
};

/// What all peers of a sender share.
pub(super) struct NcclSender {
    pub(super) fabric: Arc<dyn Fabric>,
    /// The source pool.
    pub(super) pool: ReachableMemory,
    pub(super) communicators: Arc<Communicators>,
}

impl NcclSender {
    /// # Errors
    /// When the fabric cannot read `storage`.
    pub(super) fn new(
        fabric: Arc<dyn Fabric>,
        storage: &Arc<BlockStorage>,
    ) -> Result<NcclSender, FabricError> {
        let pool = fabric.reach(storage)?;
        Ok(NcclSender { fabric, pool, communicators: Communicators::new(MAX_COMMUNICATORS) })
    }
}

/// One pool of another process, as its threads see it.
pub(super) struct Shared {
    pub(super) context: Arc<SenderContext>,
    pub(super) nccl: Arc<NcclSender>,
    pub(super) address: String,
    pub(super) pool: u64,
    /// The layout of its blocks.
    pub(super) layout: KvLayout,
    pub(super) jobs: Jobs,
    pub(super) is_connected: AtomicBool,
}
