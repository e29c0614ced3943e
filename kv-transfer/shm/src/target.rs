//! A peer's pool in this process: mapped host memory, or device memory that was opened by its CUDA IPC handles. And how
//! a frame is copied there from this side's pool, which is in host or device memory, too.

use std::io;

use baton_handoff::{Piece, PieceWrite};
use baton_kv_cache::{BlockStorage, DeviceCopy, DeviceMemory, DividedMemory, KvLayout, KvShard};
use baton_transfer::{
    checksum::{self, Hasher},
    cuda::{self, Device, DeviceCopies},
    ranks::RankPair,
    sender::{RouteState, Staging},
};

use super::wire::HANDLE_BYTES;

/// Opens memory of another process on the device of this number by its handle. It has at least so many bytes.
pub(super) type OpenHandle = fn(u32, [u8; HANDLE_BYTES], usize) -> io::Result<Box<dyn DeviceMemory>>;

/// Opens it with CUDA's driver.
pub(super) fn open_handle(
    ordinal: u32,
    handle: [u8; HANDLE_BYTES],
    size_bytes: usize,
) -> io::Result<Box<dyn DeviceMemory>> {
    let device = Device::open(ordinal).map_err(io::Error::other)?;
    cuda::memory_of_handle(&device, handle, size_bytes)
}

/// The peer's blocks.
pub(super) struct Target {
    memory: Memory,
    num_blocks: usize,
    num_ranks: usize,
    hasher: Hasher,
}

/// How the blocks are written.
enum Memory {
    /// Copies into the mapping at this address.
    Mapped(BlockStorage),
    /// Copies from host memory to devices.
    Stored(BlockStorage),
    /// Copies from devices to devices.
    Copied(Copies),
}

/// The copies of pieces from the memories of this side's ranks to those of the peer's ranks.
struct Copies {
    /// Copies of each rank on this side one by one. None is in progress between two frames. Empty if the devices have
    /// kernels, which copy.
    sources: Vec<DeviceCopies>,
    ways: Vec<Way>,
}

struct Way {
    pair: RankPair,
    /// The peer's memory, opened on the source's device.
    target: Box<dyn DeviceMemory>,
    /// The layout of the peer's blocks in it.
    layout: KvLayout,
}

impl Target {
    /// A pool in host memory.
    pub(super) fn mapped(blocks: BlockStorage) -> Target {
        let num_blocks = blocks.num_blocks();
        Target { memory: Memory::Mapped(blocks), num_blocks, num_ranks: 1, hasher: Hasher::default() }
    }

    /// A pool on devices, with one memory for each rank. The devices of this side's pool reach them, or the first
    /// device does if this side's pool is in host memory.
    ///
    /// # Errors
    /// When this host has no device, or a device cannot open a handle.
    pub(super) fn opened(
        own: &BlockStorage,
        open_handle: OpenHandle,
        handles: &[[u8; HANDLE_BYTES]],
        layout: KvLayout,
        num_blocks: usize,
    ) -> io::Result<Target> {
        let ordinal_of = |rank| own.region(rank).device().map_or(0, |memory| memory.device());
        let open = |source: usize, rank: usize| {
            let layout = *KvShard::new(&layout, handles.len(), rank).map_err(io::Error::other)?.layout();
            let size_bytes = BlockStorage::bytes_of(&layout, num_blocks)?;
            let memory = open_handle(ordinal_of(source), handles[rank], size_bytes)?;
            Ok((memory, layout))
        };
        let memory = if own.device().is_some() && layout == *own.layout() {
            let pairs = RankPair::all(&layout, own.num_ranks(), handles.len()).map_err(io::Error::other)?;
            let way = |pair: RankPair| {
                open(pair.source, pair.target).map(|(target, layout)| Way { pair, target, layout })
            };
            let ways = pairs.into_iter().map(way).collect::<io::Result<_>>()?;
            let copies =
                |rank| Device::open(ordinal_of(rank)).and_then(DeviceCopies::new).map_err(io::Error::other);
            let num_sources = if own.has_kernels() { 0 } else { own.num_ranks() };
            let sources = (0..num_sources).map(copies).collect::<io::Result<_>>()?;
            Memory::Copied(Copies { sources, ways })
        } else {
            let parts = (0..handles.len()).map(|rank| open(0, rank).map(|(memory, _)| memory));
            let divided = DividedMemory::new(layout, parts.collect::<io::Result<_>>()?);
            let memory = Box::new(divided.map_err(io::Error::other)?);
            Memory::Stored(BlockStorage::on_device(memory, layout, num_blocks))
        };
        Ok(Target { memory, num_blocks, num_ranks: handles.len(), hasher: Hasher::default() })
    }

    pub(super) fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// The number of ranks that hold the blocks.
    pub(super) fn num_ranks(&self) -> usize {
        self.num_ranks
    }

    pub(super) fn is_on_devices(&self) -> bool {
        !matches!(self.memory, Memory::Mapped(_))
    }

    /// Whether a device copies all pieces of a frame by one launch.
    pub(super) fn is_copied_at_once(&self) -> bool {
        matches!(&self.memory, Memory::Copied(copies) if copies.sources.is_empty())
    }

    /// Writes pieces and computes their checksums. The pieces are in the peer's blocks when this returns.
    ///
    /// # Errors
    /// When a device fails. It may still write the blocks, unless they are [settled](Self::is_settled).
    ///
    /// # Safety
    /// The source blocks are final, and the route's guard keeps them. The destinations exist, are granted to this
    /// route, and are as large as its pieces.
    pub(super) unsafe fn write(
        &mut self,
        route: &RouteState,
        pieces: &[PieceWrite],
        staging: &mut Staging,
    ) -> io::Result<Vec<Piece>> {
        let Target { memory, hasher, .. } = self;
        let sums = match memory {
            // SAFETY: by the caller's word.
            Memory::Copied(copies) => unsafe { copies.copy(route, pieces, hasher) },
            // SAFETY: as above.
            Memory::Mapped(blocks) => unsafe {
                write_each(route, pieces, staging, |bytes, piece| {
                    let target = blocks.layer_ptr(piece.dst, piece.layer_idx as usize);
                    Ok(checksum::copy(bytes, target.as_ptr(), route.generation()))
                })
            },
            // SAFETY: as above.
            Memory::Stored(blocks) => unsafe {
                write_each(route, pieces, staging, |bytes, piece| {
                    blocks.store(piece.dst, piece.layer_idx as usize, bytes)?;
                    Ok(route.checksum(bytes))
                })
            },
        };
        let written = pieces.iter().zip(sums?).map(|(piece, checksum)| Piece {
            block_idx: piece.block_idx,
            layer_idx: piece.layer_idx,
            checksum,
        });
        Ok(written.collect())
    }

    /// Waits after an error until no device writes the blocks any more. `false`: one may still write. `own` is this side's
    /// pool.
    pub(super) fn is_settled(&self, own: &BlockStorage) -> bool {
        match &self.memory {
            // A device has failed to give its bytes. This side's thread, which writes the blocks, has stopped.
            Memory::Mapped(_) => true,
            // The driver, which was waited for, did not say that the copy has ended.
            Memory::Stored(_) => false,
            Memory::Copied(copies) => own.settle_there().and_then(|()| copies.finish()).is_ok(),
        }
    }
}

/// Writes from host memory. `write` copies a piece's bytes to their place and returns their checksum.
///
/// # Safety
/// The source blocks are as in [`Target::write`].
unsafe fn write_each(
    route: &RouteState,
    pieces: &[PieceWrite],
    staging: &mut Staging,
    write: impl Fn(&[u8], &PieceWrite) -> io::Result<u64>,
) -> io::Result<Vec<u64>> {
    let (room, scratch) = staging.of(route, 1);
    let sums = pieces.iter().enumerate().map(|(nth, piece)| {
        if let Some(next) = pieces.get(nth + 1) {
            route.fetch_ahead(next);
        }
        // SAFETY: by the caller's word.
        let bytes = unsafe { route.bytes(piece, room, &mut scratch.assembly) }?;
        write(bytes, piece)
    });
    sums.collect()
}

impl Copies {
    /// Copies from device to device, and hashes the pieces meanwhile.
    ///
    /// # Safety
    /// As of [`Target::write`].
    unsafe fn copy(
        &self,
        route: &RouteState,
        pieces: &[PieceWrite],
        hasher: &mut Hasher,
    ) -> io::Result<Vec<u64>> {
        let own = route.storage();
        for Way { pair, target, layout } in &self.ways {
            let (source, base) = (own.region(pair.source), target.address().expect("of one device"));
            let copies = pieces.iter().flat_map(|piece| {
                let (block, layer_idx) = piece.source();
                let to = base + layout.piece_offset(piece.dst, layer_idx) as u64;
                pair.copies(source.piece(block, layer_idx), to)
            });
            let copies: Vec<DeviceCopy> = copies.collect();
            // One launch: the driver takes microseconds for each copy, and a frame has hundreds.
            // SAFETY: by the caller's word.
            if unsafe { own.copy_there(pair.source, &copies) }? {
                continue;
            }
            for copy in &copies {
                // SAFETY: as above.
                unsafe { self.sources[pair.source].begin(copy) }.map_err(io::Error::other)?;
            }
        }
        let sources: Vec<_> = pieces.iter().map(PieceWrite::source).collect();
        // SAFETY: as above.
        let sums = unsafe { hasher.checksums(own, &sources, route.generation(), route.sum_of()) };
        self.finish()?;
        sums
    }

    /// Waits for the copies that were begun one by one.
    fn finish(&self) -> io::Result<()> {
        self.sources.iter().try_for_each(DeviceCopies::finish).map_err(io::Error::other)
    }
}
