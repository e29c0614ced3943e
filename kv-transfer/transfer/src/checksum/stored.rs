//! Checksums of pieces in a pool, in host memory or on a device.

use std::io;

use baton_handoff::Generation;
use baton_kv_cache::{BlockId, BlockStorage};

use super::{SumOf, of_heads};

/// Bytes that are fetched from a device at a time.
const FETCHED_BYTES: usize = 4 << 20;

/// Computes checksums of pieces in a pool. The device that holds the pieces computes them if it can, so that only
/// checksums travel to the host. Otherwise the pieces are fetched to the host.
#[derive(Default)]
pub struct Hasher {
    fetched: Vec<u8>,
}

impl Hasher {
    /// The checksum of each of `pieces` (block, layer). `sum_of` says what it covers.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Safety
    /// The pieces exist in the storage. The checksum of a piece that is written meanwhile is undefined.
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

/// The checksums that the devices compute in place. `None`: they cannot.
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
