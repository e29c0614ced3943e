//! A peer's pool, as this process has it: memory of the host that is mapped, or a device's that is opened by its handle
//! (CUDA IPC); and how a frame gets there from this side's pool, which is of either kind, too.

use std::io;

use baton_kv_cache::{BlockStorage, KvLayout};

use crate::{
    checksum::{self, Hasher, checksum},
    cuda::{self, Device, DeviceCopies},
    message::{Piece, PieceWrite},
    sender::{RouteState, Staging},
};

/// The peer's blocks.
pub(super) struct Target {
    blocks: BlockStorage,
    /// There if they are on a device. Nothing is under way between two frames.
    copies: Option<DeviceCopies>,
    hasher: Hasher,
}

impl Target {
    /// Memory of the host.
    pub(super) fn mapped(blocks: BlockStorage) -> Target {
        Target { blocks, copies: None, hasher: Hasher::default() }
    }

    /// Memory of a device, which the device of this side's pool reaches, or the first one if that is in host memory.
    ///
    /// # Errors
    /// When there is no device here, or the handle cannot be opened on it.
    pub(super) fn opened(
        own: &BlockStorage,
        handle: [u8; 64],
        layout: KvLayout,
        num_blocks: usize,
    ) -> io::Result<Target> {
        let device =
            Device::open(own.device().map_or(0, |memory| memory.device())).map_err(io::Error::other)?;
        let blocks = cuda::blocks_of_handle(&device, handle, layout, num_blocks)?;
        let copies = DeviceCopies::new(device).map_err(io::Error::other)?;
        Ok(Target { blocks, copies: Some(copies), hasher: Hasher::default() })
    }

    pub(super) fn num_blocks(&self) -> usize {
        self.blocks.num_blocks()
    }

    pub(super) fn is_on_device(&self) -> bool {
        self.copies.is_some()
    }

    /// Writes pieces, and computes their checksums; they are there when this returns.
    ///
    /// # Errors
    /// When a device fails: then nobody knows what it still does.
    ///
    /// # Safety
    /// The source blocks are final and kept by the route's guard; the destinations exist, are granted to this route, and
    /// are as large as its pieces.
    pub(super) unsafe fn write(
        &mut self,
        route: &RouteState,
        pieces: &[PieceWrite],
        staging: &mut Staging,
    ) -> io::Result<Vec<Piece>> {
        let is_copied_there = route.storage().device().is_some() && route.room_bytes() == 0;
        let sums = match &self.copies {
            // SAFETY: by the caller's word.
            Some(copies) if is_copied_there => unsafe {
                copy(copies, route, pieces, &self.blocks, &mut self.hasher)
            },
            // SAFETY: as above.
            _ => unsafe { self.write_each(route, pieces, staging) },
        };
        let written = pieces.iter().zip(sums?).map(|(piece, checksum)| Piece {
            block_idx: piece.block_idx,
            layer_idx: piece.layer_idx,
            checksum,
        });
        Ok(written.collect())
    }

    /// # Safety
    /// As of [`write`](Self::write).
    unsafe fn write_each(
        &self,
        route: &RouteState,
        pieces: &[PieceWrite],
        staging: &mut Staging,
    ) -> io::Result<Vec<u64>> {
        let (room, scratch) = staging.of(route, 1);
        let (blocks, generation) = (&self.blocks, route.generation());
        let sums = pieces.iter().enumerate().map(|(nth, piece)| {
            if let Some(next) = pieces.get(nth + 1) {
                route.fetch_ahead(next);
            }
            let layer_idx = piece.layer_idx as usize;
            // SAFETY: all of it by the caller's word.
            unsafe {
                let bytes = route.bytes(piece, room, &mut scratch.assembly)?;
                if self.is_on_device() {
                    blocks.store(piece.dst, layer_idx, bytes)?;
                    return Ok(checksum(bytes, generation));
                }
                let target = blocks.layer_ptr(piece.dst, layer_idx);
                Ok(checksum::copy(bytes, target.as_ptr(), generation))
            }
        });
        sums.collect()
    }
}

/// From device to device, hashed meanwhile.
///
/// # Safety
/// As of [`Target::write`].
unsafe fn copy(
    copies: &DeviceCopies,
    route: &RouteState,
    pieces: &[PieceWrite],
    blocks: &BlockStorage,
    hasher: &mut Hasher,
) -> io::Result<Vec<u64>> {
    let own = route.storage();
    let sources: Vec<_> =
        pieces.iter().map(|piece| (piece.src.blocks()[0], piece.layer_idx as usize)).collect();
    for (piece, &(source, layer_idx)) in pieces.iter().zip(&sources) {
        let from = own.address() + own.layer_offset(source, layer_idx) as u64;
        let to = blocks.address() + blocks.layer_offset(piece.dst, layer_idx) as u64;
        // SAFETY: by the caller's word.
        unsafe { copies.begin(to, from, route.piece_bytes()) }.map_err(io::Error::other)?;
    }
    // SAFETY: as above.
    let sums = unsafe { hasher.checksums(own, &sources, route.generation()) };
    copies.finish().map_err(io::Error::other)?;
    sums
}
