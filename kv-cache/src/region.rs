//! Memory of blocks as devices address it, rank by rank.

use crate::{BlockId, BlockStorage, DeviceMemory, KvLayout, KvShard};

/// One rank's part of every block: all of it, unless the heads are divided among several devices.
#[derive(Clone, Copy, Debug)]
pub struct Region<'a> {
    address: u64,
    shard: KvShard,
    num_blocks: usize,
    device: Option<&'a dyn DeviceMemory>,
}

impl<'a> Region<'a> {
    /// Address of the first byte, for a device that reads or writes directly.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Bytes of the region.
    pub fn size_bytes(&self) -> usize {
        self.num_blocks * self.layout().block_bytes()
    }

    /// How the rank's blocks are arranged.
    pub fn layout(&self) -> &KvLayout {
        self.shard.layout()
    }

    /// The rank's part of a block.
    pub(crate) fn shard(&self) -> &KvShard {
        &self.shard
    }

    /// The device that holds the region; `None` for host memory.
    pub fn device(&self) -> Option<&'a dyn DeviceMemory> {
        self.device
    }

    /// Address of the rank's heads of a piece.
    pub fn piece(&self, block: BlockId, layer_idx: usize) -> u64 {
        debug_assert!(block.idx() < self.num_blocks, "no block {block}");
        self.address + self.layout().piece_offset(block, layer_idx) as u64
    }
}

impl BlockStorage {
    /// Ranks with memory of their own here: more than one if the blocks [are divided](Self::is_divided).
    pub fn num_ranks(&self) -> usize {
        self.parts().len().max(1)
    }

    /// The memory of one rank.
    ///
    /// # Panics
    /// When there is no such rank.
    pub fn region(&self, rank: usize) -> Region<'_> {
        let (address, device) = match self.parts() {
            [] => (self.address(), self.device()),
            parts => {
                (parts[rank].address().expect("memory of one device has an address"), Some(&*parts[rank]))
            }
        };
        let shard = KvShard::new(self.layout(), self.num_ranks(), rank)
            .expect("the memory is divided among these ranks");
        Region { address, shard, num_blocks: self.num_blocks(), device }
    }

    fn parts(&self) -> &[Box<dyn DeviceMemory>] {
        self.device().map_or(&[], DeviceMemory::parts)
    }
}
