//! Memory of blocks as devices address it, rank by rank.

use crate::{BlockId, BlockStorage, DeviceMemory, KvLayout, KvShard};

/// What one rank has of every block: all of it, unless the heads lie on several devices.
#[derive(Clone, Copy, Debug)]
pub struct Region<'a> {
    address: u64,
    shard: KvShard,
    num_blocks: usize,
    device: Option<&'a dyn DeviceMemory>,
}

impl<'a> Region<'a> {
    /// Address of the first byte, for a device that reads or writes by itself.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Bytes from there on.
    pub fn size_bytes(&self) -> usize {
        self.num_blocks * self.layout().block_bytes()
    }

    /// How the rank's blocks are arranged.
    pub fn layout(&self) -> &KvLayout {
        self.shard.layout()
    }

    /// The device that has it, unless that is the host.
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
    /// Ranks that have memories of their own here: more than one if the blocks [are divided](Self::is_divided).
    pub fn num_ranks(&self) -> usize {
        self.parts().len().max(1)
    }

    /// The memory of one of them.
    ///
    /// # Panics
    /// When there is no such rank.
    pub fn region(&self, rank: usize) -> Region<'_> {
        let (address, device) = match self.parts() {
            [] => (self.address(), self.device()),
            parts => (parts[rank].address().expect("of one device"), Some(&*parts[rank])),
        };
        let shard = KvShard::new(self.layout(), self.num_ranks(), rank).expect("it is divided so");
        Region { address, shard, num_blocks: self.num_blocks(), device }
    }

    fn parts(&self) -> &[Box<dyn DeviceMemory>] {
        self.device().map_or(&[], DeviceMemory::parts)
    }
}
