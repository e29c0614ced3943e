//! Moves KV between pools and staging buffers of a device: `kernels/blocks.cu`.
//!
//! What moves is what [`KvMapping`](baton_kv_cache::KvMapping) finds: pieces, ranges of heads, parts of heads where block
//! sizes differ, vectors where types do. A coded piece of [`WireFormat`](baton_kv_cache::WireFormat) fp8 or int8 lies as a
//! piece of that type does, so that conversion is its coding, too.

use baton_kv_cache::mapping::{Extent, Run};
use baton_kv_cache::{KvDtype, KvLayout};

use super::kernel::{Address, Kernel, LaunchShape, Source};
use super::pool;

/// For conversions between these layouts; copies work with any.
pub(crate) fn source(from: &KvLayout, to: &KvLayout) -> Source {
    debug_assert_eq!(from.head_dim, to.head_dim, "vectors stay as long as they are");
    Source {
        file: "blocks.cu",
        text: include_str!("kernels/blocks.cu"),
        defines: vec![
            ("HEAD_DIM", from.head_dim as u64),
            ("FROM", pool::number_of(from.dtype)),
            ("TO", pool::number_of(to.dtype)),
            ("FROM_ALIGN", pool::alignment(from)),
            ("TO_ALIGN", pool::alignment(to)),
        ],
    }
}

/// For conversions to types of eight bits and back.
pub(crate) fn sources() -> Vec<Source> {
    let layout = |dtype| KvLayout { block_size: 16, num_layers: 1, num_kv_heads: 1, head_dim: 128, dtype };
    let [bf16, fp8, int8] = [KvDtype::Bf16, KvDtype::Fp8, KvDtype::Int8].map(layout);
    [(bf16, fp8), (fp8, bf16), (bf16, int8), (int8, bf16)].map(|(from, to)| source(&from, &to)).into()
}

/// Bytes that lie together on both sides: offsets from the two sides' beginnings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct ByteRun {
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) num_bytes: u64,
}

// SAFETY: three words.
unsafe impl bytemuck::NoUninit for ByteRun {}

/// One head's vectors of consecutive tokens: offsets from the two sides' beginnings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct VectorRun {
    pub(crate) from: u64,
    pub(crate) to: u64,
    /// Of the first one's scale, where the type has scales.
    pub(crate) from_scales: u64,
    pub(crate) to_scales: u64,
    pub(crate) num_vectors: u64,
}

// SAFETY: five words.
unsafe impl bytemuck::NoUninit for VectorRun {}

/// What a run is to a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceRun {
    /// For [`CopyRuns`].
    Bytes(ByteRun),
    /// For [`ConvertRuns`].
    Vectors(VectorRun),
}

impl DeviceRun {
    /// `run` between pieces that begin at these offsets.
    pub(crate) fn between(run: &Run, source: u64, destination: u64) -> DeviceRun {
        let (from, to) = (source + run.source.offset as u64, destination + run.destination.offset as u64);
        match run.extent {
            Extent::Bytes(len) => DeviceRun::Bytes(ByteRun { from, to, num_bytes: len as u64 }),
            Extent::Vectors { num_tokens, source_scales, destination_scales } => {
                DeviceRun::Vectors(VectorRun {
                    from,
                    to,
                    from_scales: source + source_scales as u64,
                    to_scales: destination + destination_scales as u64,
                    num_vectors: num_tokens as u64,
                })
            }
        }
    }
}

/// Copies runs, none of which overlap.
///
/// Moves each byte twice, 16 at a time where all is aligned: bound by memory, or by the link that one side is behind.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct CopyRuns {
    pub(crate) from: Address,
    pub(crate) to: Address,
    /// `[runs]`, [`ByteRun`].
    pub(crate) runs: Address,
    pub(crate) num_runs: u32,
    /// How many blocks of threads share a run; one for each 16 KiB of the longest is enough.
    pub(crate) num_parts: u32,
}

// SAFETY: as `CopyRuns` in the file.
unsafe impl Kernel for CopyRuns {
    const NAME: &'static str = "copy_runs";

    fn shape(&self) -> LaunchShape {
        LaunchShape { grid: [self.num_runs, self.num_parts, 1], threads: 256, shared_bytes: 0 }
    }
}

/// Converts runs, none of which overlap: the bytes are those that the host's rounding gives.
///
/// Moves the elements of both types once: bound by memory.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct ConvertRuns {
    pub(crate) from: Address,
    pub(crate) to: Address,
    /// `[runs]`, [`VectorRun`].
    pub(crate) runs: Address,
    pub(crate) num_runs: u32,
    /// How many blocks of threads share a run; one for each 8 vectors is the most that helps.
    pub(crate) num_parts: u32,
}

// SAFETY: as `ConvertRuns` in the file.
unsafe impl Kernel for ConvertRuns {
    const NAME: &'static str = "convert_runs";

    fn shape(&self) -> LaunchShape {
        LaunchShape { grid: [self.num_runs, self.num_parts, 1], threads: 128, shared_bytes: 0 }
    }
}

#[cfg(test)]
mod tests {
    use baton_kv_cache::{KvMapping, KvShard};

    use super::*;
    use crate::cpu::testing::noise;
    use crate::cuda::emulator::Emulator;

    /// Where the sequence's blocks are on either side.
    const SOURCE_BLOCKS: [usize; 4] = [4, 1, 3, 0];
    const DESTINATION_BLOCKS: [usize; 4] = [2, 0, 3, 1];
    const LAYER_IDX: usize = 1;

    fn layout(dtype: KvDtype, block_size: usize, head_dim: usize) -> KvLayout {
        KvLayout { block_size, num_layers: 2, num_kv_heads: 4, head_dim, dtype }
    }

    /// Vectors in every piece, and one of zeroes in each head.
    fn pool(layout: &KvLayout, num_blocks: usize) -> Vec<u8> {
        let mut pool = vec![0; num_blocks * layout.block_bytes()];
        for (idx, head) in pool.chunks_exact_mut(layout.head_bytes()).enumerate() {
            let (elements, scales) = head.split_at_mut(layout.scale_offset(0));
            let mut vectors = noise(idx as u64 + 1, layout.block_size * layout.head_dim);
            vectors.iter_mut().enumerate().for_each(|(i, x)| *x *= 10f32.powi((i % 7) as i32 - 3));
            vectors[..layout.head_dim].fill(0.0);
            layout.dtype.store_vectors(&vectors, layout.head_dim, elements, scales);
        }
        pool
    }

    /// Moves tokens 1..14 from rank 0 of 1 to rank 1 of 2.
    fn check(from: KvLayout, to: KvLayout, num_ranks: usize, num_parts: u32) {
        let source = KvShard::new(&from, 1, 0).expect("a shard");
        let destination = KvShard::new(&to, num_ranks, num_ranks - 1).expect("a shard");
        let mapping = KvMapping::new(&source, &destination).expect("of the same model");
        let (from, to) = (*source.layout(), *destination.layout());
        let from_pool = pool(&from, 5);
        let mut expected = vec![0xff; 4 * to.block_bytes()];
        let (mut bytes, mut vectors) = (vec![], vec![]);
        for run in mapping.runs(mapping.fill_up(1..14)) {
            let piece = |layout: &KvLayout, block: usize| {
                block * layout.block_bytes() + layout.layer_offset(LAYER_IDX)
            };
            let from_piece = piece(&from, SOURCE_BLOCKS[run.source.block_idx]);
            let to_piece = piece(&to, DESTINATION_BLOCKS[run.destination.block_idx]);
            mapping.apply(&run, &from_pool[from_piece..], &mut expected[to_piece..], &mut vec![]);
            match DeviceRun::between(&run, from_piece as u64, to_piece as u64) {
                DeviceRun::Bytes(run) => bytes.push(run),
                DeviceRun::Vectors(run) => vectors.push(run),
            }
        }
        let mut emulator = Emulator::new(super::source(&from, &to));
        let from_address = emulator.buffer(&from_pool);
        let to_address = emulator.poisoned(expected.len());
        if !bytes.is_empty() {
            let runs = emulator.buffer(bytemuck::cast_slice(&bytes));
            let num_runs = bytes.len() as u32;
            emulator.launch(&CopyRuns { from: from_address, to: to_address, runs, num_runs, num_parts });
        }
        if !vectors.is_empty() {
            let runs = emulator.buffer(bytemuck::cast_slice(&vectors));
            let num_runs = vectors.len() as u32;
            emulator.launch(&ConvertRuns { from: from_address, to: to_address, runs, num_runs, num_parts });
        }
        assert_eq!(bytes.is_empty(), from.dtype != to.dtype);
        assert!(emulator.run().of(to_address) == expected, "{from:?} to {to:?}");
    }

    #[test]
    fn blocks_arrive_as_the_mapping_says() {
        let bf16 = layout(KvDtype::Bf16, 4, 16);
        // Pieces, then ranges of heads, then parts of heads.
        check(bf16, bf16, 1, 1);
        check(bf16, bf16, 2, 3);
        check(bf16, KvLayout { block_size: 6, ..bf16 }, 2, 1);
        let int8 = layout(KvDtype::Int8, 5, 9);
        check(int8, KvLayout { block_size: 4, ..int8 }, 2, 2);
    }

    #[test]
    fn vectors_are_converted_to_the_bit() {
        let cases = [
            (KvDtype::Bf16, KvDtype::Fp8, 4, 128),
            (KvDtype::F32, KvDtype::Int8, 5, 80),
            (KvDtype::Fp8, KvDtype::Bf16, 5, 66),
            (KvDtype::Int8, KvDtype::F16, 4, 64),
            (KvDtype::F16, KvDtype::F32, 4, 37),
        ];
        for (from, to, block_size, head_dim) in cases {
            let from = layout(from, block_size, head_dim);
            check(from, KvLayout { dtype: to, block_size: 4, ..from }, 2, 2);
        }
    }
}
