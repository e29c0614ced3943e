//! Memory of blocks whose kv heads lie on several devices: each rank of a model has those that it computes, in blocks of
//! its own, and whoever takes or gives a block sees one of the whole model.
//!
//! ```text
//! whole    | K: head 0 | head 1 | head 2 | head 3 | V: head 0 | ...      offsets that others use
//! rank 0   | K: head 0 | head 1 |                 | V: head 0 | ...      the same halves, of fewer heads
//! rank 1                        | K: head 2 | head 3 | V: ...
//! ```
//! Replicas, ranks that have the same heads, are all written; the first of them is read.

use std::io;
use std::ops::Range;

use crate::{DeviceMemory, KvLayout, KvShard, ShardError};

/// The memories of all ranks as one, which is copied from and to but has no address.
#[derive(Debug)]
pub struct DividedMemory {
    parts: Vec<Box<dyn DeviceMemory>>,
    shards: Vec<KvShard>,
    whole: KvLayout,
}

/// Bytes of one rank that an access reaches, and where they are among those of the access.
struct Run {
    rank: usize,
    offset: usize,
    bytes: Range<usize>,
}

impl DividedMemory {
    /// The memories of the ranks, in their order, for blocks of `whole`: each has as many, of [its layout](KvShard::layout).
    ///
    /// # Errors
    /// When the kv heads cannot be divided among so many.
    pub fn new(whole: KvLayout, parts: Vec<Box<dyn DeviceMemory>>) -> Result<DividedMemory, ShardError> {
        let shards = (0..parts.len()).map(|rank| KvShard::new(&whole, parts.len(), rank));
        Ok(DividedMemory { shards: shards.collect::<Result<_, _>>()?, parts, whole })
    }

    /// What an access to so many bytes from `offset` on reaches of the ranks that `takes_part` of it.
    fn runs(&self, offset: usize, len: usize, takes_part: fn(&KvShard) -> bool) -> Vec<Run> {
        let (half_bytes, head_bytes) = (self.whole.half_bytes(), self.whole.head_bytes());
        let mut runs = Vec::new();
        for half_idx in offset / half_bytes..(offset + len).div_ceil(half_bytes) {
            for (rank, shard) in self.shards.iter().enumerate().filter(|(_, shard)| takes_part(shard)) {
                let heads = shard.heads();
                let first = half_idx * half_bytes + heads.start * head_bytes;
                let start = first.max(offset);
                let end = (first + heads.len() * head_bytes).min(offset + len);
                if start < end {
                    let offset_of_rank = half_idx * shard.layout().half_bytes() + start - first;
                    runs.push(Run { rank, offset: offset_of_rank, bytes: start - offset..end - offset });
                }
            }
        }
        runs
    }
}

// SAFETY: the regions of the ranks stay where they are.
unsafe impl DeviceMemory for DividedMemory {
    /// That of the first rank.
    fn device(&self) -> u32 {
        self.parts[0].device()
    }

    fn address(&self) -> Option<u64> {
        None
    }

    fn parts(&self) -> &[Box<dyn DeviceMemory>] {
        &self.parts
    }

    fn bind(&self) -> io::Result<()> {
        self.parts[0].bind()
    }

    unsafe fn read(&self, offset: usize, bytes: &mut [u8]) -> io::Result<()> {
        for run in self.runs(offset, bytes.len(), |shard| shard.replica_idx() == 0) {
            // SAFETY: what lies in the whole lies in the ranks' regions; unwritten by the caller's word.
            unsafe { self.parts[run.rank].read(run.offset, &mut bytes[run.bytes]) }?;
        }
        Ok(())
    }

    unsafe fn write(&self, offset: usize, bytes: &[u8]) -> io::Result<()> {
        for run in self.runs(offset, bytes.len(), |_| true) {
            // SAFETY: as above; not used by others by the caller's word.
            unsafe { self.parts[run.rank].write(run.offset, &bytes[run.bytes]) }?;
        }
        Ok(())
    }

    fn handle(&self) -> Option<[u8; 64]> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::testing::Remote;
    use crate::{BlockId, BlockStorage, KvDtype};

    const NUM_BLOCKS: usize = 3;

    fn layout(num_kv_heads: usize) -> KvLayout {
        KvLayout { block_size: 4, num_layers: 2, num_kv_heads, head_dim: 6, dtype: KvDtype::Int8 }
    }

    fn divided(whole: KvLayout, num_ranks: usize) -> DividedMemory {
        let part = |rank| -> Box<dyn DeviceMemory> {
            let of_rank = *KvShard::new(&whole, num_ranks, rank).unwrap().layout();
            Box::new(Remote::new(rank as u32, BlockStorage::bytes_of(&of_rank, NUM_BLOCKS).unwrap()))
        };
        DividedMemory::new(whole, (0..num_ranks).map(part).collect()).unwrap()
    }

    /// Every rank's heads are where its own layout has them, whatever range they are written by.
    #[test]
    fn each_rank_has_its_heads_of_every_block() {
        for (num_kv_heads, num_ranks) in [(4, 1), (4, 2), (4, 4), (2, 4), (1, 3), (6, 3)] {
            let whole = layout(num_kv_heads);
            let memory = divided(whole, num_ranks);
            let size_bytes = BlockStorage::bytes_of(&whole, NUM_BLOCKS).unwrap();
            let bytes: Vec<u8> = (0..size_bytes).map(|i| (i * 31 + i / 251) as u8).collect();
            for chunk_bytes in [size_bytes, 7, whole.layer_bytes() + 1] {
                // SAFETY: this test is the only user of the memory.
                unsafe {
                    memory.write(0, &vec![0; size_bytes]).unwrap();
                    for (nth, chunk) in bytes.chunks(chunk_bytes).enumerate() {
                        memory.write(nth * chunk_bytes, chunk).unwrap();
                    }
                }
                for rank in 0..num_ranks {
                    let shard = KvShard::new(&whole, num_ranks, rank).unwrap();
                    let of_rank = shard.layout();
                    let mut found = vec![0; of_rank.half_bytes()];
                    for half_idx in 0..NUM_BLOCKS * whole.num_layers * 2 {
                        // SAFETY: as above.
                        unsafe { memory.parts()[rank].read(half_idx * found.len(), &mut found) }.unwrap();
                        let first = half_idx * whole.half_bytes() + whole.head_offset(shard.heads().start);
                        assert_eq!(found, bytes[first..][..found.len()], "rank {rank} of {num_ranks}");
                    }
                }
                for start in [0, 1, whole.head_bytes() - 1, size_bytes - 9] {
                    let mut found = vec![0; (size_bytes - start).min(2 * whole.half_bytes() + 3)];
                    // SAFETY: as above.
                    unsafe { memory.read(start, &mut found) }.unwrap();
                    assert_eq!(found, bytes[start..][..found.len()]);
                }
            }
        }
    }

    #[test]
    fn pieces_of_the_whole_go_in_and_out() {
        let whole = layout(4);
        let storage = BlockStorage::on_device(Box::new(divided(whole, 2)), whole, NUM_BLOCKS);
        assert!(storage.is_divided());
        let piece: Vec<u8> = (0..whole.layer_bytes()).map(|i| i as u8).collect();
        let mut room = vec![];
        // SAFETY: this test is the only user of the memory.
        unsafe {
            storage.store(BlockId(2), 1, &piece).unwrap();
            assert_eq!(storage.load(BlockId(2), 1, &mut room).unwrap(), piece);
            assert!(storage.load(BlockId(2), 0, &mut room).unwrap().iter().all(|&byte| byte == 0));
        }
    }

    #[test]
    fn heads_that_cannot_be_divided_are_refused() {
        let parts = (0..4).map(|rank| -> Box<dyn DeviceMemory> { Box::new(Remote::new(rank, 1)) });
        let error = DividedMemory::new(layout(6), parts.collect()).unwrap_err().to_string();
        assert_eq!(error, "6 kv heads cannot be divided among 4 ranks");
    }
}
