//! One layer of one block: what is to be written, and what was.

use std::{ops::Range, sync::Arc};

use baton_kv_layout::BlockId;

use crate::transport::TransportKind;

/// One layer of one block, written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Counted in the grant's `block_ids`.
    pub block_idx: u32,
    /// Decoder layer.
    pub layer_idx: u32,
    /// Of its bytes; the transfer computes and compares it.
    pub checksum: u64,
}

/// One layer of one of the decode worker's blocks, to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PieceWrite {
    /// Decoder layer.
    pub layer_idx: u32,
    /// Counted in the grant's `block_ids`.
    pub block_idx: u32,
    /// Where its KV is.
    pub src: Source,
    /// The decode worker's block: `block_ids[block_idx]`.
    pub dst: BlockId,
}

impl PieceWrite {
    /// The prefill worker's piece, where the blocks of both sides have one size.
    pub fn source(&self) -> (BlockId, usize) {
        (self.src.blocks()[0], self.layer_idx as usize)
    }
}

/// Where the prefill worker has the KV of one of the decode worker's blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// In this block of as many tokens, full or not.
    Block(BlockId),
    /// In blocks of another size.
    Tokens {
        /// Positions in the sequence.
        tokens: Range<usize>,
        /// The blocks that hold them, in the order of the sequence.
        blocks: Arc<[BlockId]>,
    },
}

impl From<BlockId> for Source {
    fn from(block: BlockId) -> Source {
        Source::Block(block)
    }
}

impl Source {
    /// Its blocks.
    pub fn blocks(&self) -> &[BlockId] {
        match self {
            Source::Block(block) => std::slice::from_ref(block),
            Source::Tokens { blocks, .. } => blocks,
        }
    }
}

/// Pieces that a push has placed in the granted blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pushed {
    /// Which, and their checksums.
    pub pieces: Vec<Piece>,
    /// What carried them.
    pub transport: TransportKind,
    /// Their bytes.
    pub bytes: u64,
}
