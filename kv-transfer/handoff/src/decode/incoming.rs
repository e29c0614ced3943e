//! The KV that arrives under a grant: which pieces the peer has reported, and how many of them are not verified yet.
//! Both machines of the decode side use it while they receive.

use crate::{
    access::Generation,
    error::KvFault,
    message::{Grant, Written},
    piece::{Piece, Pushed},
    pieces::{Insert, PieceSet},
    transport::TransportKind,
};

/// All KV of a grant was written and verified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Committed {
    /// The grant whose blocks hold the verified KV.
    pub generation: Generation,
    /// The transport that carried it. `None`: every block was cached.
    pub transport: Option<TransportKind>,
    /// Bytes that moved.
    pub bytes: u64,
}

/// The pieces of one grant.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(super) struct Incoming {
    generation: Generation,
    named: PieceSet,
    num_unverified: usize,
    is_last_named: bool,
    transport: Option<TransportKind>,
    bytes: u64,
}

impl Incoming {
    /// A grant without pieces so far. `None`: the grant and the sequence have different numbers of blocks.
    pub(super) fn new(grant: &Grant, num_blocks: usize, num_layers: usize) -> Option<Incoming> {
        if grant.num_cached_blocks + grant.block_ids.len() != num_blocks {
            return None;
        }
        Some(Incoming {
            generation: grant.generation,
            named: PieceSet::new(grant.block_ids.len(), num_layers),
            num_unverified: 0,
            is_last_named: false,
            transport: None,
            bytes: 0,
        })
    }

    pub(super) fn generation(&self) -> Generation {
        self.generation
    }

    /// Notes what is written and returns what must be verified.
    pub(super) fn note(&mut self, written: Written) -> Result<Vec<Piece>, KvFault> {
        // Invariant 4: the generation and, below, the count of pieces.
        if written.generation != self.generation {
            return Err(KvFault::WrongGeneration);
        }
        let pieces = written.pushed.as_ref().map_or(&[][..], |pushed| &pushed.pieces);
        for &Piece { block_idx, layer_idx, .. } in pieces {
            match self.named.insert(block_idx as usize, layer_idx as usize) {
                Insert::New => {}
                Insert::Present => return Err(KvFault::DuplicatePiece { block_idx, layer_idx }),
                Insert::OutOfRange => return Err(KvFault::UnknownPiece { block_idx, layer_idx }),
            }
        }
        if written.last && !self.named.is_full() {
            return Err(KvFault::MissingPieces { missing: self.named.num_missing() });
        }
        self.is_last_named |= written.last;
        let Some(Pushed { pieces, transport, bytes }) = written.pushed else { return Ok(Vec::new()) };
        self.num_unverified += pieces.len();
        self.transport = Some(transport);
        // The peer's own count, for logs.
        self.bytes = self.bytes.saturating_add(bytes);
        Ok(pieces)
    }

    /// Notes that `num_pieces` of the reported pieces were verified.
    pub(super) fn verified(&mut self, num_pieces: usize, result: Result<(), KvFault>) -> Result<(), KvFault> {
        result?;
        self.num_unverified -= num_pieces;
        Ok(())
    }

    /// Whether the peer has reported every piece, and the last one as the last.
    pub(super) fn is_named(&self) -> bool {
        self.is_last_named
    }

    /// The received KV, once all of it is reported and verified.
    pub(super) fn committed(&self) -> Option<Committed> {
        // Invariant 4: both machines of the decode side commit only what this returns.
        if !self.is_last_named || self.num_unverified > 0 {
            return None;
        }
        debug_assert!(self.named.is_full());
        Some(Committed { generation: self.generation, transport: self.transport, bytes: self.bytes })
    }
}
