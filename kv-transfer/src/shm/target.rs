//! A peer's pool, as this process has it: memory of the host that is mapped, or a device's that is opened by its handle
//! (CUDA IPC); and how a frame gets there from this side's pool, which is of either kind, too.

use std::io;

use baton_kv_cache::{BlockStorage, KvLayout};

use crate::{
    checksum::{self, checksum},
    cuda::{self, Device, DeviceCopies},
    message::{Piece, PieceWrite},
    sender::{RouteState, Staging},
};

/// The peer's blocks.
pub(super) struct Target {
    blocks: BlockStorage,
    /// There if they are on a device. Nothing is under way between two frames.
    copies: Option<DeviceCopies>,
    /// A piece that was fetched from this side's device.
    fetched: Vec<u8>,
}

impl Target {
    /// Memory of the host.
    pub(super) fn mapped(blocks: BlockStorage) -> Target {
        Target { blocks, copies: None, fetched: Vec::new() }
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
        Ok(Target { blocks, copies: Some(copies), fetched: Vec::new() })
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
        let Target { blocks, copies, fetched } = self;
        let (room, scratch) = staging.of(route, 1);
        let mut written = Vec::with_capacity(pieces.len());
        for piece in pieces {
            let (source, layer_idx) = (piece.src.blocks()[0], piece.layer_idx as usize);
            let generation = route.generation();
            // SAFETY: all of it by the caller's word.
            let checksum = unsafe {
                match (route.storage().device(), &*copies) {
                    (_, None) => {
                        let bytes = route.bytes(piece, room, &mut scratch.assembly)?;
                        let target = blocks.layer_ptr(piece.dst, layer_idx);
                        checksum::copy(bytes, target.as_ptr(), generation)
                    }
                    (Some(own), Some(copies)) if route.room_bytes() == 0 => {
                        let from = own.address() + route.storage().layer_offset(source, layer_idx) as u64;
                        let to = blocks.address() + blocks.layer_offset(piece.dst, layer_idx) as u64;
                        copies.begin(to, from, route.piece_bytes()).map_err(io::Error::other)?;
                        // Hashed while the device copies the same bytes.
                        checksum(route.storage().load(source, layer_idx, fetched)?, generation)
                    }
                    (_, Some(_)) => {
                        let bytes = route.bytes(piece, room, &mut scratch.assembly)?;
                        blocks.store(piece.dst, layer_idx, bytes)?;
                        checksum(bytes, generation)
                    }
                }
            };
            written.push(Piece { block_idx: piece.block_idx, layer_idx: piece.layer_idx, checksum });
        }
        if let Some(copies) = copies {
            copies.finish().map_err(io::Error::other)?;
        }
        Ok(written)
    }
}
