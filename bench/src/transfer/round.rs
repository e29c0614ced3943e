//! The pieces of blocks that one round moves, and their memory.

use std::sync::Arc;

use anyhow::Context;
use baton_kv_cache::{BlockId, BlockStorage, KvDtype, KvLayout};
use clap::ValueEnum;
use serde::Serialize;

/// How the pieces of a transfer are placed in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Shape {
    /// One run, in pieces of up to 1 MiB.
    Contiguous,
    /// Pieces of --piece in any order, on both sides.
    Scattered,
}

/// A block's piece, and the block of the other pool that it goes to.
#[derive(Clone, Copy)]
pub(super) struct Move {
    pub(super) src: BlockId,
    pub(super) dst: BlockId,
}

/// One transfer: the pieces, in memory of both sides.
pub(super) struct Round {
    pub(super) source: Arc<BlockStorage>,
    pub(super) moves: Vec<Move>,
    pub(super) size_bytes: usize,
}

/// Blocks of one piece each.
pub(super) fn layout(piece_bytes: usize) -> KvLayout {
    let mut layout =
        KvLayout { block_size: 16, num_layers: 1, num_kv_heads: 1, head_dim: 1, dtype: KvDtype::Bf16 };
    layout.head_dim = piece_bytes / layout.layer_bytes();
    layout
}

/// Memory with all pages mapped, so that no page fault is measured. `seed` decides its content.
pub(super) fn storage(layout: KvLayout, num_blocks: usize, seed: u64) -> anyhow::Result<BlockStorage> {
    let storage = BlockStorage::new(layout, num_blocks).context("memory for the blocks")?;
    let mut word = seed;
    for block_idx in 0..num_blocks {
        // SAFETY: only this function knows this memory yet.
        let bytes = unsafe { storage.layer_mut(BlockId(block_idx as u32), 0) };
        for bytes in bytes.as_chunks_mut::<8>().0 {
            word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            *bytes = word.to_le_bytes();
        }
    }
    Ok(storage)
}
