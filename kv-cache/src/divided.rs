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
use std::sync::Mutex;

use crate::{BlockKernels, DeviceMemory, KvLayout, KvShard, ShardError, WireCodec};

/// The memories of all ranks as one, which is copied from and to but has no address: only
/// [its parts](crate::BlockStorage::region) have.
#[derive(Debug)]
pub struct DividedMemory {
    parts: Vec<Box<dyn DeviceMemory>>,
    shards: Vec<KvShard>,
    whole: KvLayout,
    kernels: Option<Mutex<Box<dyn BlockKernels>>>,
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
        Ok(DividedMemory { shards: shards.collect::<Result<_, _>>()?, parts, whole, kernels: None })
    }

    /// Has the ranks' devices gather and scatter many pieces at once, each its heads of them.
    ///
    /// # Panics
    /// When there is not one for each rank, or a rank's memory has no address.
    pub fn with_kernels(self, kernels: Vec<Box<dyn BlockKernels>>) -> DividedMemory {
        assert_eq!(kernels.len(), self.parts.len(), "each rank has some");
        let bases = self.parts.iter().map(|part| part.address().expect("memory of one device"));
        let ranks = bases.zip(self.shards.iter().cloned()).zip(kernels);
        let ranks = ranks.map(|((base, shard), kernels)| RankKernels { base, shard, kernels }).collect();
        let kernels = DividedKernels { whole: self.whole, ranks, staged: Vec::new() };
        DividedMemory { kernels: Some(Mutex::new(Box::new(kernels))), ..self }
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

    fn kernels(&self) -> Option<&Mutex<Box<dyn BlockKernels>>> {
        self.kernels.as_ref()
    }
}

/// What the ranks' devices do by themselves with their heads of whole pieces, of which a place is the offset.
#[derive(Debug)]
struct DividedKernels {
    whole: KvLayout,
    ranks: Vec<RankKernels>,
    /// One rank's heads of pieces, one behind the other.
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
    /// Where its heads of pieces are.
    fn places(&self, whole: &KvLayout, offsets: &[u64]) -> Vec<u64> {
        let (piece_bytes, own_bytes) = (whole.layer_bytes() as u64, self.shard.layout().layer_bytes() as u64);
        debug_assert!(offsets.iter().all(|offset| offset % piece_bytes == 0), "whole pieces");
        offsets.iter().map(|offset| self.base + offset / piece_bytes * own_bytes).collect()
    }

    /// Where a head is, that begins there in the whole, if it is one of the rank's.
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

    /// Its heads of K and of V: where they are in a whole piece, and in its own.
    fn halves(&self, whole: &KvLayout) -> [(Range<usize>, Range<usize>); 2] {
        let (own, first) = (self.shard.layout(), whole.head_offset(self.shard.heads().start));
        [0, 1].map(|half| {
            let start = half * whole.half_bytes() + first;
            let own_start = half * own.half_bytes();
            (start..start + own.half_bytes(), own_start..own_start + own.half_bytes())
        })
    }
}

impl BlockKernels for DividedKernels {
    unsafe fn gather(&mut self, places: &[u64], bytes: &mut [u8]) -> io::Result<()> {
        let DividedKernels { whole, ranks, staged } = self;
        for rank in ranks.iter_mut().filter(|rank| rank.shard.replica_idx() == 0) {
            let own_bytes = rank.shard.layout().layer_bytes();
            staged.resize(places.len() * own_bytes, 0);
            let (places, halves) = (rank.places(whole, places), rank.halves(whole));
            // SAFETY: what lies in the whole lies in the ranks' regions; unwritten by the caller's word.
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
            let (places, halves) = (rank.places(whole, places), rank.halves(whole));
            let pieces = bytes.chunks_exact(whole.layer_bytes()).zip(staged.chunks_exact_mut(own_bytes));
            for (piece, own) in pieces {
                for (of_piece, of_own) in halves.clone() {
                    own[of_own].copy_from_slice(&piece[of_piece]);
                }
            }
            // SAFETY: as above; not used by others by the caller's word.
            unsafe { rank.kernels.scatter(&places, staged) }?;
        }
        Ok(())
    }

    /// Of heads, which lie on a device each. No device has more.
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
            // SAFETY: what lies in the whole lies in the ranks' regions; unwritten by the caller's word.
            let Some(found) = (unsafe { rank.kernels.checksums(&own, num_bytes, seed) })? else {
                return Ok(None);
            };
            idxs.into_iter().zip(found).for_each(|(idx, sum)| sums[idx] = sum);
        }
        Ok(Some(sums))
    }

    /// Its checksums would be of whole pieces.
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
