//! How a handoff, a route or a push can fail.

use baton_request::{Failure, FailureKind};
use thiserror::Error;

/// How a handoff ended without KV. The variants are named for what the caller can do.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum HandoffError {
    /// The prefill worker broke off or broke the protocol: prefill elsewhere.
    #[error("prefill worker lost: {0}")]
    PrefillLost(String),
    /// The decode worker broke off or broke the protocol (seen by the prefill worker): forget it.
    #[error("decode worker lost: {0}")]
    DecodeLost(String),
    /// The KV that arrived is not the KV that was announced: never decode on it, prefill again.
    #[error("kv rejected: {0}")]
    KvRejected(#[from] KvFault),
    /// The KV could not be moved (seen by the prefill worker).
    #[error("transfer failed: {0}")]
    TransferFailed(String),
    /// Time ran out while `state`.
    #[error("deadline passed while {state}")]
    Deadline {
        /// What the handoff was waiting for.
        state: &'static str,
    },
    /// The peer has nothing cached of the prefix (seen by the decode side): compute it.
    #[error("nothing of it is cached there")]
    NotCached,
    /// The result is not wanted any more: nothing to do.
    #[error("cancelled: {0}")]
    Cancelled(String),
    /// A side's engine or service refused. The kind says whether another worker could do it.
    #[error("refused by the {by} worker: {}", failed.message)]
    Refused {
        /// The side that refused.
        by: Side,
        /// Why.
        failed: Failure,
    },
}

impl HandoffError {
    /// The failure to report to the router (from D) or to the peer (from P).
    pub fn kind(&self) -> FailureKind {
        match self {
            HandoffError::PrefillLost(_) | HandoffError::TransferFailed(_) => FailureKind::PrefillLost,
            HandoffError::KvRejected(_) => FailureKind::KvRejected,
            HandoffError::Deadline { .. } => FailureKind::Deadline,
            HandoffError::Refused { failed, .. } => failed.kind,
            HandoffError::DecodeLost(_) | HandoffError::NotCached | HandoffError::Cancelled(_) => {
                FailureKind::Internal
            }
        }
    }

    /// Every [`label`](Self::label).
    pub const LABELS: [&'static str; 10] = [
        "prefill_lost",
        "decode_lost",
        "kv_rejected",
        "transfer_failed",
        "deadline",
        "not_cached",
        "cancelled",
        "full",
        "draining",
        "refused",
    ];

    /// A word for logs and metric labels. A refusal for want of room, or because a side leaves, is no fault: each has a word of its own.
    pub fn label(&self) -> &'static str {
        match self {
            HandoffError::PrefillLost(_) => "prefill_lost",
            HandoffError::DecodeLost(_) => "decode_lost",
            HandoffError::KvRejected(_) => "kv_rejected",
            HandoffError::TransferFailed(_) => "transfer_failed",
            HandoffError::Deadline { .. } => "deadline",
            HandoffError::NotCached => "not_cached",
            HandoffError::Cancelled(_) => "cancelled",
            HandoffError::Refused { failed, .. } => match failed.kind {
                FailureKind::Full | FailureKind::PrefillFull => "full",
                FailureKind::Draining | FailureKind::PrefillDraining => "draining",
                _ => "refused",
            },
        }
    }
}

/// A side of the handoff.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// Computes the prompt.
    Prefill,
    /// Owns the request.
    Decode,
}

impl std::fmt::Display for Side {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Side::Prefill => "prefill",
            Side::Decode => "decode",
        })
    }
}

/// What is wrong with KV that the peer reported as written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum KvFault {
    /// The pieces were reported under another grant.
    #[error("written under another generation")]
    WrongGeneration,
    /// The piece is not in the grant.
    #[error("piece {block_idx}/{layer_idx} was never granted")]
    UnknownPiece {
        /// In the grant.
        block_idx: u32,
        /// Decoder layer.
        layer_idx: u32,
    },
    /// The piece was reported twice.
    #[error("piece {block_idx}/{layer_idx} was written twice")]
    DuplicatePiece {
        /// In the grant.
        block_idx: u32,
        /// Decoder layer.
        layer_idx: u32,
    },
    /// The peer reported the last piece, but some were never reported.
    #[error("{missing} pieces are missing")]
    MissingPieces {
        /// How many.
        missing: usize,
    },
    /// The device does not return the bytes, so they cannot be compared.
    #[error("piece {block_idx}/{layer_idx} cannot be read back")]
    Unreadable {
        /// In the grant.
        block_idx: u32,
        /// Decoder layer.
        layer_idx: u32,
    },
    /// The bytes differ from the sender's.
    #[error("piece {block_idx}/{layer_idx} has a wrong checksum")]
    Checksum {
        /// In the grant.
        block_idx: u32,
        /// Decoder layer.
        layer_idx: u32,
    },
}

/// Why no transport reaches a decode worker's blocks.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum RouteError {
    /// The two sides have no transport in common, or only shared memory on different hosts.
    #[error("no common transport: the peer offers {offered}, this worker allows {allowed}")]
    NoCommonTransport {
        /// Names of the offers.
        offered: String,
        /// Names of what is configured.
        allowed: String,
    },
    /// Every offer was tried and failed.
    #[error("no route to the peer's blocks: {0}")]
    Unreachable(String),
    /// The peer does not know the grant, or it does not accept this side as its writer. It does not tell which.
    #[error("{0} refuses: it has restarted or taken the grant back, or the grant is not for this worker")]
    OtherIncarnation(String),
    /// The peer's blocks cannot hold what this side has.
    #[error("kv cannot go to the peer's blocks: {0}")]
    OtherKv(String),
    /// The sender is shutting down.
    #[error("the sender is shut down")]
    Closed,
}

/// Why pieces were not written.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PushError {
    /// The receiver does not know the generation, or has revoked it.
    #[error("the grant is revoked")]
    Revoked,
    /// The receiver or this side refused the destination.
    #[error("refused: {0}")]
    Refused(String),
    /// The connection to the peer broke. `Written` was not sent, so the pieces count as not written.
    #[error("connection lost: {0}")]
    Lost(String),
    /// The route was closed first.
    #[error("the route is closed")]
    Closed,
}
