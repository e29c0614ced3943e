//! Memory of blocks whose kv heads are divided among several devices. Each rank of a model has the heads that it
//! computes, in blocks of its own. Readers and writers of a block see one block of the whole model.
//!
//! ```text
//! whole    | K: head 0 | head 1 | head 2 | head 3 | V: head 0 | ...      offsets that callers use
//! rank 0   | K: head 0 | head 1 |                 | V: head 0 | ...      the same halves, of fewer heads
//! rank 1                        | K: head 2 | head 3 | V: ...
//! ```
//!
//! All replicas (ranks with the same heads) are written. The first of them is read.

use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Mutex;

use crate::{BlockKernels, DeviceCopy, DeviceMemory, HostAccess, KvLayout, KvShard, ShardError, WireCodec};

/// The memories of all ranks as one. It can be copied from and to, but has no address: only [its
/// parts](crate::BlockStorage::region) have.
#[derive(Debug)]
pub struct DividedMemory {
    parts: Vec<Box<dyn DeviceMemory>>,
    shards: Vec<KvShard>,
    whole: KvLayout,
    kernels: Option<Mutex<Box<dyn BlockKernels>>>,
}

/// Bytes of one rank that an access touches, and their position among the bytes of the access.
struct Run {
    rank: usize,
    offset: usize,
    bytes: Range<usize>,
}

impl DividedMemory {
    /// Joins the memories of the ranks, in their order, for blocks of `whole`. Each has as many blocks, of [its own
    /// layout](KvShard::layout).
    ///
    /// # Errors
    /// When the kv heads cannot be divided among so many ranks.
    pub fn new(whole: KvLayout, parts: Vec<Box<dyn DeviceMemory>>) -> Result<DividedMemory, ShardError> {
        let shards = (0..parts.len()).map(|rank| KvShard::new(&whole, parts.len(), rank));
        Ok(DividedMemory { shards: shards.collect::<Result<_, _>>()?, parts, whole, kernels: None })
    }

    /// Has the devices of the ranks gather and scatter many pieces at once, each its own heads.
    ///
    /// # Panics
    /// When there is not one for each rank, or the memory of a rank has no address.
    pub fn with_kernels(self, kernels: Vec<Box<dyn BlockKernels>>) -> DividedMemory {
        assert_eq!(kernels.len(), self.parts.len(), "each rank has kernels");
        let bases =
            self.parts.iter().map(|part| part.address().expect("memory of one device has an address"));
        let ranks = bases.zip(self.shards.iter().cloned()).zip(kernels);
        let ranks = ranks.map(|((base, shard), kernels)| RankKernels { base, shard, kernels }).collect();
        let kernels = DividedKernels { whole: self.whole, ranks, staged: Vec::new() };
        DividedMemory { kernels: Some(Mutex::new(Box::new(kernels))), ..self }
    }

    /// The runs that an access to `len` bytes at `offset` touches on the ranks for which `takes_part` holds.
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

// SAFETY: the regions of the ranks never move.
unsafe impl DeviceMemory for DividedMemory {
    /// The device of the first rank.
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
            // SAFETY: every byte of the whole is in a rank's region; the caller guarantees that it is not written.
            unsafe { self.parts[run.rank].read(run.offset, &mut bytes[run.bytes]) }?;
        }
        Ok(())
    }

    unsafe fn write(&self, offset: usize, bytes: &[u8]) -> io::Result<()> {
        for run in self.runs(offset, bytes.len(), |_| true) {
            // SAFETY: as above; the caller guarantees exclusive access.
            unsafe { self.parts[run.rank].write(run.offset, &bytes[run.bytes]) }?;
        }
        Ok(())
    }

    fn handle(&self) -> Option<[u8; 64]> {
        None
    }

    unsafe fn access_host(&self, base: NonNull<u8>, size_bytes: usize) -> io::Result<Option<HostAccess>> {
        // Access of one device is that of all: their addresses are unified.
        // SAFETY: by the caller's word.
        unsafe { self.parts[0].access_host(base, size_bytes) }
    }

    fn kernels(&self) -> Option<&Mutex<Box<dyn BlockKernels>>> {
        self.kernels.as_ref()
    }
}

/// The operations of the ranks' devices on their heads of whole pieces. A place is an offset.
#[derive(Debug)]
struct DividedKernels {
    whole: KvLayout,
    ranks: Vec<RankKernels>,
    /// One rank's heads of pieces, one piece after the other.
    staged: Vec<u8>,
}

#[derive(Debug)]
struct RankKernels {
    /// Address of its first block.
    base: u64,
    shard: KvShard,
    kernels: Box<dyn BlockKernels>,
}

impl RankKernels {
    /// The addresses of its heads of pieces.
    fn places(&self, whole: &KvLayout, offsets: &[u64]) -> Vec<u64> {
        let (piece_bytes, own_bytes) = (whole.layer_bytes() as u64, self.shard.layout().layer_bytes() as u64);
        debug_assert!(offsets.iter().all(|offset| offset % piece_bytes == 0), "whole pieces");
        offsets.iter().map(|offset| self.base + offset / piece_bytes * own_bytes).collect()
    }

    /// The address of the head at `place` of the whole, if the head is one of the rank's.
    fn head(&self, whole: &KvLayout, place: u64) -> Option<u64> {
        let (half_bytes, head_bytes) = (whole.half_bytes() as u64, whole.head_bytes() as u64);
        debug_assert!(place.is_multiple_of(head_bytes), "a head");
        let (half_idx, head) = (place / half_bytes, (place % half_bytes / head_bytes) as usize);
        let (own, heads) = (self.shard.layout(), self.shard.heads());
        heads.contains(&head).then(|| {
            let offset = half_idx * own.half_bytes() as u64 + own.head_offset(head - heads.start) as u64;
            self.base + offset
        })
    }
}

impl BlockKernels for DividedKernels {
    unsafe fn gather(&mut self, places: &[u64], bytes: &mut [u8]) -> io::Result<()> {
        let DividedKernels { whole, ranks, staged } = self;
        for rank in ranks.iter_mut().filter(|rank| rank.shard.replica_idx() == 0) {
            let own_bytes = rank.shard.layout().layer_bytes();
            staged.resize(places.len() * own_bytes, 0);
            let (places, halves) = (rank.places(whole, places), rank.shard.halves(whole));
            // SAFETY: every byte of the whole is in a rank's region; the caller guarantees that it is not written.
            unsafe { rank.kernels.gather(&places, staged) }?;
            let pieces = bytes.chunks_exact_mut(whole.layer_bytes()).zip(staged.chunks_exact(own_bytes));
            for (piece, own) in pieces {
                for (of_piece, of_own) in halves.clone() {
                    piece[of_piece].copy_from_slice(&own[of_own]);
                }
            }
        }
        Ok(())
    }

    unsafe fn scatter(&mut self, places: &[u64], bytes: &[u8]) -> io::Result<()> {
        let DividedKernels { whole, ranks, staged } = self;
        for rank in ranks {
            let own_bytes = rank.shard.layout().layer_bytes();
            staged.resize(places.len() * own_bytes, 0);
            let (places, halves) = (rank.places(whole, places), rank.shard.halves(whole));
            let pieces = bytes.chunks_exact(whole.layer_bytes()).zip(staged.chunks_exact_mut(own_bytes));
            for (piece, own) in pieces {
                for (of_piece, of_own) in halves.clone() {
                    own[of_own].copy_from_slice(&piece[of_piece]);
                }
            }
            // SAFETY: as above; the caller guarantees exclusive access.
            unsafe { rank.kernels.scatter(&places, staged) }?;
        }
        Ok(())
    }

    unsafe fn copy(&mut self, rank: usize, copies: &[DeviceCopy]) -> io::Result<()> {
        // SAFETY: by the caller's word.
        unsafe { self.ranks[rank].kernels.copy(0, copies) }
    }

    fn settle(&mut self) -> io::Result<()> {
        self.ranks.iter_mut().try_for_each(|rank| rank.kernels.settle())
    }

    /// Only of heads: each head is on one device, and no device has more than heads.
    unsafe fn checksums(
        &mut self,
        places: &[u64],
        num_bytes: usize,
        seed: u64,
    ) -> io::Result<Option<Vec<u64>>> {
        let DividedKernels { whole, ranks, .. } = self;
        if num_bytes != whole.head_bytes() {
            return Ok(None);
        }
        let mut sums = vec![0; places.len()];
        for rank in ranks.iter_mut().filter(|rank| rank.shard.replica_idx() == 0) {
            let own =
                places.iter().enumerate().filter_map(|(idx, &place)| Some((idx, rank.head(whole, place)?)));
            let (idxs, own): (Vec<usize>, Vec<u64>) = own.unzip();
            // SAFETY: every byte of the whole is in a rank's region; the caller guarantees that it is not written.
            let Some(found) = (unsafe { rank.kernels.checksums(&own, num_bytes, seed) })? else {
                return Ok(None);
            };
            idxs.into_iter().zip(found).for_each(|(idx, sum)| sums[idx] = sum);
        }
        Ok(Some(sums))
    }

    /// The checksums would be of whole pieces, which no device has.
    unsafe fn gather_coded(
        &mut self,
        _: &WireCodec,
        _: &[u64],
        _: &mut [u8],
        _: u64,
    ) -> io::Result<Option<Vec<u64>>> {
        Ok(None)
    }

    unsafe fn scatter_coded(&mut self, _: &WireCodec, _: &[u64], _: &[u8]) -> io::Result<bool> {
        Ok(false)
    }
}
