//! Checksums of pieces where they lie.

use std::io;

use baton_handoff::Generation;
use baton_kv_cache::{BlockId, BlockStorage};

use super::{SumOf, of_heads};

/// Bytes that are fetched at a time.
const FETCHED_BYTES: usize = 4 << 20;

/// Takes checksums of pieces in a storage: has the device that they are on take them where it can, so that only sums come to
/// the host, else fetches what is not there.
#[derive(Default)]
pub struct Hasher {
    fetched: Vec<u8>,
}

impl Hasher {
    /// Of each of `pieces` (layers of blocks), as `sum_of` says.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Safety
    /// The pieces are there. One that is written meanwhile has any checksum.
    pub unsafe fn checksums(
        &mut self,
        storage: &BlockStorage,
        pieces: &[(BlockId, usize)],
        generation: Generation,
        sum_of: SumOf,
    ) -> io::Result<Vec<u64>> {
        // SAFETY: by the caller's word.
        if let Some(sums) = unsafe { checksums_there(storage, pieces, generation, sum_of) }? {
            return Ok(sums);
        }
        if storage.device().is_none() {
            // SAFETY: by the caller's word.
            let sum =
                |&(block, layer_idx)| sum_of.sum(unsafe { storage.layer(block, layer_idx) }, generation);
            return Ok(pieces.iter().map(sum).collect());
        }
        let piece_bytes = storage.layout().layer_bytes();
        let mut sums = Vec::with_capacity(pieces.len());
        for pieces in pieces.chunks((FETCHED_BYTES / piece_bytes).max(1)) {
            self.fetched.resize(pieces.len() * piece_bytes, 0);
            // SAFETY: by the caller's word.
            unsafe { storage.load_all(pieces, &mut self.fetched) }?;
            sums.extend(self.fetched.chunks_exact(piece_bytes).map(|piece| sum_of.sum(piece, generation)));
        }
        Ok(sums)
    }
}

/// What the devices take where the pieces lie, if they do.
///
/// # Safety
/// As of [`Hasher::checksums`].
unsafe fn checksums_there(
    storage: &BlockStorage,
    pieces: &[(BlockId, usize)],
    generation: Generation,
    sum_of: SumOf,
) -> io::Result<Option<Vec<u64>>> {
    if sum_of == SumOf::Pieces {
        // SAFETY: by the caller's word.
        return unsafe { storage.checksums_there(pieces, generation.0) };
    }
    // SAFETY: as above.
    let heads = unsafe { storage.head_checksums_there(pieces, generation.0) }?;
    let num_heads = 2 * storage.layout().num_kv_heads;
    Ok(heads.map(|heads| heads.chunks_exact(num_heads).map(|heads| of_heads(heads, generation)).collect()))
}
