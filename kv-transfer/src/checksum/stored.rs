//! Checksums of pieces where they lie.

use std::io;

use baton_kv_cache::{BlockId, BlockStorage};

use super::checksum;
use crate::message::Generation;

/// Takes checksums of pieces in a storage: has the device that they are on take them where it can, so that only sums come to
/// the host, else fetches what is not there.
#[derive(Default)]
pub(crate) struct Hasher {
    fetched: Vec<u8>,
}

impl Hasher {
    /// Of each of `pieces` (layers of blocks).
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Safety
    /// The pieces are there. One that is written meanwhile has any checksum.
    pub(crate) unsafe fn checksums(
        &mut self,
        storage: &BlockStorage,
        pieces: &[(BlockId, usize)],
        generation: Generation,
    ) -> io::Result<Vec<u64>> {
        // SAFETY: by the caller's word.
        if let Some(sums) = unsafe { storage.checksums_there(pieces, generation.0) }? {
            return Ok(sums);
        }
        let sums = pieces.iter().map(|&(block, layer_idx)| {
            // SAFETY: by the caller's word.
            let bytes = unsafe { storage.load(block, layer_idx, &mut self.fetched) }?;
            Ok(checksum(bytes, generation))
        });
        sums.collect()
    }
}
