//! The KV that arrives under a grant: which pieces the peer has reported, and how many of them are not verified yet.
//! Both machines of the decode side use it while they receive.

use crate::{
    access::Generation,
    error::KvFault,
    message::{Grant, Written},
    piece::{Piece, Pushed},
    piece_set::{Insert, PieceSet},
    transport::TransportKind,
};

/// All KV of a grant was written and verified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Committed {
    /// The grant whose blocks hold the verified KV.
    pub generation: Generation,
    /// The transport that carried it. `None`: every block was cached.
    pub transport: Option<TransportKind>,
    /// Bytes that were transferred, as the peer counts them.
    pub bytes: u64,
}

/// The pieces of one grant.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(super) struct Incoming {
    generation: Generation,
    /// Pieces that the peer has reported as written.
    reported: PieceSet,
    num_unverified: usize,
    /// Whether the peer has reported that no piece follows.
    is_complete: bool,
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
            reported: PieceSet::new(grant.block_ids.len(), num_layers),
            num_unverified: 0,
            is_complete: false,
            transport: None,
            bytes: 0,
        })
    }

    pub(super) fn generation(&self) -> Generation {
        self.generation
    }

    /// Records a report of written pieces and returns those that must be verified, if there are any.
    pub(super) fn written(&mut self, written: Written) -> Result<Option<Vec<Piece>>, KvFault> {
        // Invariant 4: the generation and, below, the count of pieces.
        if written.generation != self.generation {
            return Err(KvFault::WrongGeneration);
        }
        let pieces = written.pushed.as_ref().map_or(&[][..], |pushed| &pushed.pieces);
        for &Piece { block_idx, layer_idx, .. } in pieces {
            match self.reported.insert(block_idx as usize, layer_idx as usize) {
                Insert::New => {}
                Insert::Present => return Err(KvFault::DuplicatePiece { block_idx, layer_idx }),
                Insert::OutOfRange => return Err(KvFault::UnknownPiece { block_idx, layer_idx }),
            }
        }
        if written.last && !self.reported.is_full() {
            return Err(KvFault::MissingPieces { missing: self.reported.num_missing() });
        }
        self.is_complete |= written.last;
        let Some(Pushed { pieces, transport, bytes }) = written.pushed else { return Ok(None) };
        self.num_unverified += pieces.len();
        self.transport = Some(transport);
        // The peer's own count, for logs.
        self.bytes = self.bytes.saturating_add(bytes);
        Ok(Some(pieces).filter(|pieces| !pieces.is_empty()))
    }

    /// Records the result of verifying `num_pieces` of the reported pieces.
    pub(super) fn verified(&mut self, num_pieces: usize, result: Result<(), KvFault>) -> Result<(), KvFault> {
        result?;
        self.num_unverified -= num_pieces;
        Ok(())
    }

    /// Whether the peer has reported every piece.
    pub(super) fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// The received KV, once all of it is reported and verified.
    pub(super) fn committed(&self) -> Option<Committed> {
        // Invariant 4: both machines of the decode side commit only what this returns.
        if !self.is_complete || self.num_unverified > 0 {
            return None;
        }
        debug_assert!(self.reported.is_full());
        Some(Committed { generation: self.generation, transport: self.transport, bytes: self.bytes })
    }
}
