//! Operations that the device of the blocks does itself: encoding, decoding and checksums.
//!
//! Each method says when the device does not. Then the caller computes on the processor.

use std::io;

use crate::{BlockId, BlockStorage, DeviceCopy, KvLayout, WireCodec};

impl BlockStorage {
    /// Has the device encode pieces with `codec`, one after the other into `coded`. Returns the checksums, seeded
    /// with `seed`, of the decoded pieces. `None` when the device does not encode.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Safety
    /// As [`load_all`](Self::load_all).
    pub unsafe fn encode_there(
        &self,
        codec: &WireCodec,
        pieces: &[(BlockId, usize)],
        coded: &mut [u8],
        seed: u64,
    ) -> io::Result<Option<Vec<u64>>> {
        assert_eq!(coded.len(), pieces.len() * codec.piece_bytes(), "bytes of the pieces");
        // SAFETY: in bounds by `layer_offset`; the caller guarantees that the pieces are not written.
        self.kernels().map_or(Ok(None), |mut kernels| unsafe {
            kernels.gather_coded(codec, &self.places(pieces), coded, seed)
        })
    }

    /// Has the device decode pieces, and waits for them. `false`, without any effect, when the device does not
    /// decode.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Safety
    /// As [`store_all`](Self::store_all).
    pub unsafe fn decode_there(
        &self,
        codec: &WireCodec,
        pieces: &[(BlockId, usize)],
        coded: &[u8],
    ) -> io::Result<bool> {
        assert_eq!(coded.len(), pieces.len() * codec.piece_bytes(), "bytes of the pieces");
        // SAFETY: in bounds by `layer_offset`; the caller guarantees exclusive access.
        self.kernels().map_or(Ok(false), |mut kernels| unsafe {
            kernels.scatter_coded(codec, &self.places(pieces), coded)
        })
    }

    /// Whether the device has kernels for what these methods do.
    pub fn has_kernels(&self) -> bool {
        self.kernels().is_some()
    }

    /// Has the device of `rank` make copies from its memory, and waits for them. `false`, without any effect, when it has
    /// no kernels: then the caller copies.
    ///
    /// # Errors
    /// When the device fails. It may still read and write until [`settle_there`](Self::settle_there) has returned.
    ///
    /// # Safety
    /// The device reaches all bytes. The sources are not written and the targets are not used meanwhile.
    pub unsafe fn copy_there(&self, rank: usize, copies: &[DeviceCopy]) -> io::Result<bool> {
        let Some(mut kernels) = self.kernels() else { return Ok(false) };
        // SAFETY: by the caller's word.
        unsafe { kernels.copy(rank, copies) }.map(|()| true)
    }

    /// Waits until the kernels of all devices have ended, also after an error of theirs.
    ///
    /// # Errors
    /// When a device fails. It may still read and write.
    pub fn settle_there(&self) -> io::Result<()> {
        self.kernels().map_or(Ok(()), |mut kernels| kernels.settle())
    }

    /// XXH3-64 of pieces, seeded with `seed`, computed by the device. `None` when the device does not compute it:
    /// then the caller does, over the bytes of [`load_all`](Self::load_all).
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Safety
    /// As [`load_all`](Self::load_all).
    pub unsafe fn checksums_there(
        &self,
        pieces: &[(BlockId, usize)],
        seed: u64,
    ) -> io::Result<Option<Vec<u64>>> {
        // SAFETY: in bounds by `layer_offset`; the caller guarantees that the pieces are not written.
        self.kernels().map_or(Ok(None), |mut kernels| unsafe {
            kernels.checksums(&self.places(pieces), self.layout().layer_bytes(), seed)
        })
    }

    /// [`checksums_there`](Self::checksums_there) of each head of pieces: those of a piece's K, then those of its V.
    ///
    /// # Errors
    /// When a device fails.
    ///
    /// # Safety
    /// As [`load_all`](Self::load_all).
    pub unsafe fn head_checksums_there(
        &self,
        pieces: &[(BlockId, usize)],
        seed: u64,
    ) -> io::Result<Option<Vec<u64>>> {
        let KvLayout { num_kv_heads, .. } = *self.layout();
        let head_bytes = self.layout().head_bytes();
        let heads = |piece: u64| (0..2 * num_kv_heads).map(move |nth| piece + (nth * head_bytes) as u64);
        // SAFETY: as `checksums_there`.
        self.kernels().map_or(Ok(None), |mut kernels| unsafe {
            let places: Vec<u64> = self.places(pieces).into_iter().flat_map(heads).collect();
            kernels.checksums(&places, head_bytes, seed)
        })
    }
}
