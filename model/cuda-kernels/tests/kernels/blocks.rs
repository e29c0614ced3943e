//! `kernels/blocks.cu` against a plain reference.

use baton_cuda_emulator::emulator::Emulator;
use baton_cuda_kernels::blocks::{ByteRun, CopyRuns, source as kernels_of_file};
use baton_kv_cache::mapping::RunKind;
use baton_kv_cache::{KvDtype, KvLayout, KvMapping, KvShard};

/// The sequence's blocks on both sides.
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
    let from_pool: Vec<u8> = (0..num_bytes).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let mut expected = vec![0xff; 4 * to.block_bytes()];
    let mut runs = vec![];
    for run in mapping.runs(mapping.fill_up(1..14)) {
        let piece =
            |layout: &KvLayout, block: usize| block * layout.block_bytes() + layout.layer_offset(LAYER_IDX);
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
    let mut emulator = Emulator::new(kernels_of_file());
    let from_address = emulator.buffer(&from_pool);
    let to_address = emulator.poisoned(expected.len());
    let num_runs = runs.len() as u32;
    let runs = emulator.buffer(bytemuck::cast_slice(&runs));
    emulator.launch(&CopyRuns { from: from_address, to: to_address, runs, num_runs, num_parts });
    assert!(emulator.run().of(to_address) == expected, "{from:?} to {to:?}");
}

#[test]
fn copied_blocks_match_the_mapping() {
    let bf16 = layout(KvDtype::Bf16, 4, 16);
    // Pieces, then ranges of heads, then parts of heads.
    check(bf16, bf16, 1, 1);
    check(bf16, bf16, 2, 3);
    check(bf16, KvLayout { block_size: 6, ..bf16 }, 2, 1);
    let int8 = layout(KvDtype::Int8, 5, 9);
    check(int8, KvLayout { block_size: 4, ..int8 }, 2, 2);
}
