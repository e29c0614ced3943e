//! Pieces, before and after a transfer. A piece is one layer of one block of the decode worker.

use std::{ops::Range, sync::Arc};

use baton_kv_layout::BlockId;

use crate::transport::TransportKind;

/// A piece that was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Index into the grant's `block_ids`.
    pub block_idx: u32,
    /// Decoder layer.
    pub layer_idx: u32,
    /// Checksum of the piece's bytes. The data plane computes and compares it.
    pub checksum: u64,
}

/// A piece to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PieceWrite {
    /// Decoder layer.
    pub layer_idx: u32,
    /// Index into the grant's `block_ids`.
    pub block_idx: u32,
    /// The prefill worker's blocks that hold its KV.
    pub src: Source,
    /// The decode worker's block: `block_ids[block_idx]`.
    pub dst: BlockId,
}

impl PieceWrite {
    /// The prefill worker's block and layer that hold its KV, if the blocks of both sides have the same size.
    pub fn source(&self) -> (BlockId, usize) {
        (self.src.blocks()[0], self.layer_idx as usize)
    }
}

/// Where the prefill worker has the KV of one of the decode worker's blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// The blocks of both sides have the same size: in this block, which may be partly filled.
    Block(BlockId),
    /// The blocks of the sides differ in size.
    Tokens {
        /// Positions in the sequence.
        tokens: Range<usize>,
        /// The blocks that hold these tokens, in the order of the sequence.
        blocks: Arc<[BlockId]>,
    },
}

impl From<BlockId> for Source {
    fn from(block: BlockId) -> Source {
        Source::Block(block)
    }
}

impl Source {
    /// The blocks to read.
    pub fn blocks(&self) -> &[BlockId] {
        match self {
            Source::Block(block) => std::slice::from_ref(block),
            Source::Tokens { blocks, .. } => blocks,
        }
    }
}

/// The pieces that one push has written into the granted blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pushed {
    /// The pieces and their checksums.
    pub pieces: Vec<Piece>,
    /// The transport that carried them.
    pub transport: TransportKind,
    /// Bytes that were transferred.
    pub bytes: u64,
}
