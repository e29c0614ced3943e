//! Blocks whose KV is wrong are forgotten: no tier gives them back, and what waits of them is not saved.
//!
//! What is to be forgotten goes the way of what is saved. So it comes after all that was saved before, and each slot still has one writer.

use std::sync::mpsc::Sender;

use baton_kv_cache::BlockHash;
use tokio::sync::oneshot;

use crate::{
    save_queue::{Forget, ToCopy, ToWrite},
    store::{KvStore, Shared},
};

impl KvStore {
    /// Forgets blocks in all tiers, in the background, also those that were given to [`save`](Self::save) before this. What is received
    /// when this is done. What is saved later under these hashes is kept.
    ///
    /// Later lives of a directory do not find them, unless its disk refuses a write or the process is killed before. Of an object
    /// store the own segments that are known to hold one of them are deleted, with all that they hold. Segments of other workers are not
    /// this one's to delete: in those that are known now it does not read these blocks again. A segment that is learned later, also by
    /// other workers and later lives, may bring them back.
    ///
    /// Waits while [`MAX_SAVES`](crate::MAX_SAVES) sequences wait to be copied; for no disk and no object store.
    pub fn forget(&self, hashes: Vec<BlockHash>) -> oneshot::Receiver<()> {
        let (done, receiver) = oneshot::channel();
        let saves = self.saves.as_ref().expect("the store is open");
        // Fails after a panic of the thread that copies. The receiver says so.
        let _ = saves.send(ToCopy::Forget(Forget { hashes, done }));
        receiver
    }
}

impl Shared {
    /// On the thread that copies, which alone writes to memory.
    pub(crate) fn forget_copied(&self, forget: Forget, writes: &Sender<ToWrite>) {
        let memory = (0..self.tiers.len()).filter(|&tier| self.tiers[tier].is_memory());
        memory.for_each(|tier| self.forget_in(tier, &forget.hashes));
        self.object.iter().for_each(|object| object.forget(&forget.hashes));
        // Fails after a panic of the thread that writes. The receiver says so.
        let _ = writes.send(ToWrite::Forget(forget));
    }

    /// On the thread that writes, which alone writes to disks.
    pub(crate) fn forget_written(&self, Forget { hashes, done }: Forget) {
        let disks = (0..self.tiers.len()).filter(|&tier| !self.tiers[tier].is_memory());
        disks.for_each(|tier| self.forget_in(tier, &hashes));
        // The caller may not wait.
        let _ = done.send(());
    }

    /// The calling thread is the only one of this process that writes to the tier: none of these blocks is being written.
    fn forget_in(&self, tier: usize, hashes: &[BlockHash]) {
        let slots = &*self.tiers[tier];
        let freed = self.update(|directory| {
            let freed = directory.forget_blocks(tier, hashes);
            if let Some(shared) = slots.shared() {
                // Under the lock: later the directory may follow another process that took a slot.
                freed.iter().for_each(|&slot| shared.give_up(slot));
            }
            freed
        });
        for slot in freed {
            if let Err(error) = slots.clear(slot) {
                let name = slots.name();
                tracing::warn!(tier = name, slot, %error, "wrong kv stays in a slot: the next life of the tier may find it");
            }
        }
    }
}
