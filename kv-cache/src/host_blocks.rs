//! Blocks outside a pool, in host memory that the pool's device reads and writes itself, many blocks at a time: no processor copies
//! them. A pool in host memory itself reads them likewise, without a copy on the way.

use std::{
    fs::File,
    io,
    mem::forget,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use crate::{BlockId, BlockStorage, DeviceCopy, HostAccess, Region};

/// Bytes that a device moves before other work on blocks has its turn.
const TURN_BYTES: usize = 64 << 20;

/// Room for blocks. Where a device accesses it, its pages are pinned.
#[derive(Debug)]
pub struct HostBlocks {
    /// Ends before the memory does: fields are dropped in this order.
    _access: Option<HostAccess>,
    memory: BlockStorage,
    free: Mutex<Vec<BlockId>>,
}

/// One block of [`HostBlocks`]. Dropping it gives its room back, if it was taken.
#[derive(Debug)]
pub struct HostBlock {
    blocks: Arc<HostBlocks>,
    id: BlockId,
    is_own: bool,
}

impl HostBlocks {
    /// Room for `num_blocks` blocks of this pool. `None` when no device with kernels holds the pool, or it cannot access host
    /// memory.
    ///
    /// # Errors
    /// When there is too little memory, or the driver refuses.
    pub fn of(pool: &BlockStorage, num_blocks: usize) -> io::Result<Option<Arc<HostBlocks>>> {
        if !pool.has_kernels() {
            return Ok(None);
        }
        let free = (0..num_blocks as u32).rev().map(BlockId).collect();
        HostBlocks::over(pool, free, || {
            let memory = BlockStorage::new(*pool.layout(), num_blocks)?;
            // If the kernel has no huge pages, small ones come when they are pinned.
            let _ = memory.populate_all();
            Ok(memory)
        })
    }

    /// The first `num_blocks` blocks in a file, which no process makes shorter while this lives. Others write it: there is nothing to
    /// [take](Self::take). `None` when a device without kernels holds the pool, or it cannot access host memory.
    ///
    /// # Errors
    /// When the file is too short, or the driver refuses.
    pub fn in_file(
        pool: &BlockStorage,
        file: &File,
        num_blocks: usize,
    ) -> io::Result<Option<Arc<HostBlocks>>> {
        HostBlocks::over(pool, Vec::new(), || BlockStorage::of_file(file, *pool.layout(), num_blocks))
    }

    fn over(
        pool: &BlockStorage,
        free: Vec<BlockId>,
        memory: impl FnOnce() -> io::Result<BlockStorage>,
    ) -> io::Result<Option<Arc<HostBlocks>>> {
        if pool.device().is_some() && !pool.has_kernels() {
            return Ok(None);
        }
        let memory = memory()?;
        let access = pool.device().map(|device| {
            // SAFETY: the memory is dropped after the access.
            unsafe { device.access_host(memory.layer_ptr(BlockId(0), 0), memory.size_bytes()) }
        });
        let access = match access.transpose()? {
            Some(None) => return Ok(None),
            access => access.flatten(),
        };
        Ok(Some(Arc::new(HostBlocks { _access: access, memory, free: Mutex::new(free) })))
    }

    /// Room for a block; `None` when there is none.
    pub fn take(self: &Arc<HostBlocks>) -> Option<HostBlock> {
        let id = self.free().pop()?;
        Some(HostBlock { blocks: self.clone(), id, is_own: true })
    }

    /// Blocks that can be [taken](Self::take).
    pub fn num_free(&self) -> usize {
        self.free().len()
    }

    /// The block at this place [in a file](Self::in_file), whatever is written there now.
    ///
    /// # Panics
    /// When there are fewer blocks.
    pub fn at(self: &Arc<HostBlocks>, idx: u32) -> HostBlock {
        assert!((idx as usize) < self.memory.num_blocks(), "block {idx} of {}", self.memory.num_blocks());
        HostBlock { blocks: self.clone(), id: BlockId(idx), is_own: false }
    }

    fn free(&self) -> MutexGuard<'_, Vec<BlockId>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HostBlock {
    /// Its place.
    pub fn idx(&self) -> u32 {
        self.id.0
    }

    /// Whether it was [taken](HostBlocks::take): nothing else writes it.
    pub fn is_own(&self) -> bool {
        self.is_own
    }

    /// The block's bytes, layer after layer.
    ///
    /// # Panics
    /// When the block is not [its own](Self::is_own).
    pub fn bytes(&self) -> &[u8] {
        assert!(self.is_own(), "other processes write the block");
        let memory = &self.blocks.memory;
        let base = memory.layer_ptr(self.id, 0).as_ptr();
        // SAFETY: the layers of a block follow each other. Only `copy_out` has a device write them, which owns the block.
        unsafe { std::slice::from_raw_parts(base, memory.layout().block_bytes()) }
    }

    fn address(&self) -> u64 {
        self.blocks.memory.layer_ptr(self.id, 0).as_ptr() as u64
    }
}

impl Drop for HostBlock {
    fn drop(&mut self) {
        if self.is_own {
            self.blocks.free().push(self.id);
        }
    }
}

/// A run of a block: its address in host memory, that in a rank's region, and its bytes.
type Run = (u64, u64, usize);

/// The runs of a rank's heads of a block.
fn runs(pool: &BlockStorage, region: &Region<'_>, host: u64, block: BlockId) -> Vec<Run> {
    let (whole, own) = (pool.layout(), region.layout());
    if own == whole {
        return vec![(host, region.piece(block, 0), whole.block_bytes())];
    }
    let halves = region.shard().halves(whole);
    let of_layer = |layer_idx| {
        let (host, piece) = (host + whole.layer_offset(layer_idx) as u64, region.piece(block, layer_idx));
        halves.clone().map(|(in_whole, in_own)| {
            (host + in_whole.start as u64, piece + in_own.start as u64, in_own.len())
        })
    };
    (0..whole.num_layers).flat_map(of_layer).collect()
}

impl BlockStorage {
    /// Has the devices of this pool copy blocks into it, each its own heads, and waits for them, or copies them to a pool in host memory.
    /// What others write meanwhile to a block that is not [its own](HostBlock::is_own) is copied in part.
    ///
    /// # Errors
    /// When a device fails. It may still write.
    ///
    /// # Panics
    /// When the blocks are of another layout.
    ///
    /// # Safety
    /// The blocks of the pool are not used otherwise meanwhile.
    pub unsafe fn copy_in(&self, blocks: &[(&HostBlock, BlockId)]) -> io::Result<()> {
        let assert_alike =
            |host: &HostBlock| assert_eq!(host.blocks.memory.layout(), self.layout(), "blocks of this pool");
        if self.device().is_none() {
            for &(host, block) in blocks {
                assert_alike(host);
                let (source, target) = (host.blocks.memory.layer_ptr(host.id, 0), self.layer_ptr(block, 0));
                // SAFETY: the layers of a block follow each other. By the caller's word nothing uses the target, which is in other memory.
                unsafe { source.copy_to_nonoverlapping(target, self.layout().block_bytes()) };
            }
            return Ok(());
        }
        for blocks in blocks.chunks((TURN_BYTES / self.layout().block_bytes()).max(1)) {
            for rank in 0..self.num_ranks() {
                let region = self.region(rank);
                let of_block = |&(host, block): &(&HostBlock, BlockId)| {
                    assert_alike(host);
                    runs(self, &region, host.address(), block)
                };
                let copy = |(source, target, len)| DeviceCopy { source, target, len };
                let copies: Vec<_> = blocks.iter().flat_map(of_block).map(copy).collect();
                // SAFETY: the device reaches the host's blocks. By the caller's word nothing uses the others.
                unsafe { self.must_copy(rank, &copies) }?;
            }
        }
        Ok(())
    }

    /// Has the devices of this pool copy a block of it to `host`, and waits for them.
    ///
    /// # Errors
    /// When a device fails. The room is not used again then, as the device may still write.
    ///
    /// # Panics
    /// As [`copy_in`](Self::copy_in).
    ///
    /// # Safety
    /// The block of the pool is not written meanwhile.
    pub unsafe fn copy_out(&self, block: BlockId, host: HostBlock) -> io::Result<HostBlock> {
        assert_eq!(host.blocks.memory.layout(), self.layout(), "a block of this pool");
        for rank in 0..self.num_ranks() {
            let region = self.region(rank);
            if region.shard().replica_idx() > 0 {
                continue;
            }
            let copy = |(target, source, len)| DeviceCopy { source, target, len };
            let copies: Vec<_> = runs(self, &region, host.address(), block).into_iter().map(copy).collect();
            // SAFETY: the device reaches the room, which this function owns. By the caller's word nothing writes the block.
            if let Err(error) = unsafe { self.must_copy(rank, &copies) } {
                forget(host);
                return Err(error);
            }
        }
        Ok(host)
    }

    /// [`copy_there`](Self::copy_there), by devices that have kernels.
    ///
    /// # Safety
    /// As there.
    unsafe fn must_copy(&self, rank: usize, copies: &[DeviceCopy]) -> io::Result<()> {
        // SAFETY: by the caller's word.
        match unsafe { self.copy_there(rank, copies) }? {
            true => Ok(()),
            false => Err(io::ErrorKind::Unsupported.into()),
        }
    }
}
