//! Copies KV between pools and staging buffers of a device: `kernels/blocks.cu`.
//!
//! What moves is what [`KvMapping`](baton_kv_cache::KvMapping) finds where the two sides have the same type: pieces, ranges
//! of heads, parts of heads where block sizes differ.

use super::kernel::{Address, Kernel, LaunchShape, Source};

pub(crate) fn source() -> Source {
    Source { file: "blocks.cu", text: include_str!("kernels/blocks.cu"), defines: vec![] }
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

#[cfg(test)]
mod tests {
    use baton_kv_cache::mapping::RunKind;
    use baton_kv_cache::{KvDtype, KvLayout, KvMapping, KvShard};

    use super::*;
    use crate::cuda::emulator::Emulator;

    /// Where the sequence's blocks are on either side.
    const SOURCE_BLOCKS: [usize; 4] = [4, 1, 3, 0];
    const DESTINATION_BLOCKS: [usize; 4] = [2, 0, 3, 1];
    const LAYER_IDX: usize = 1;

    fn layout(dtype: KvDtype, block_size: usize, head_dim: usize) -> KvLayout {
        KvLayout { block_size, num_layers: 2, num_kv_heads: 4, head_dim, dtype }
    }

    /// Moves tokens 1..14 from rank 0 of 1 to rank 1 of 2.
    fn check(from: KvLayout, to: KvLayout, num_ranks: usize, num_parts: u32) {
        let source = KvShard::new(&from, 1, 0).expect("a shard");
        let destination = KvShard::new(&to, num_ranks, num_ranks - 1).expect("a shard");
        let mapping = KvMapping::new(&source, &destination).expect("of the same model");
        let (from, to) = (*source.layout(), *destination.layout());
        let num_bytes = 5 * from.block_bytes() as u32;
        let from_pool: Vec<u8> =
            (0..num_bytes).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let mut expected = vec![0xff; 4 * to.block_bytes()];
        let mut runs = vec![];
        for run in mapping.runs(mapping.fill_up(1..14)) {
            let piece = |layout: &KvLayout, block: usize| {
                block * layout.block_bytes() + layout.layer_offset(LAYER_IDX)
            };
            let from_piece = piece(&from, SOURCE_BLOCKS[run.source.block_idx]);
            let to_piece = piece(&to, DESTINATION_BLOCKS[run.destination.block_idx]);
            mapping.apply(&run, &from_pool[from_piece..], &mut expected[to_piece..], &mut vec![]);
            let RunKind::Bytes(len) = run.kind else { panic!("the types are the same") };
            runs.push(ByteRun {
                from: (from_piece + run.source.offset) as u64,
                to: (to_piece + run.destination.offset) as u64,
                num_bytes: len as u64,
            });
        }
        let mut emulator = Emulator::new(super::source());
        let from_address = emulator.buffer(&from_pool);
        let to_address = emulator.poisoned(expected.len());
        let num_runs = runs.len() as u32;
        let runs = emulator.buffer(bytemuck::cast_slice(&runs));
        emulator.launch(&CopyRuns { from: from_address, to: to_address, runs, num_runs, num_parts });
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
}
