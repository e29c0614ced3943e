//! What the two sides of a handoff say to each other, as plain values.
//!
//! The worker service turns them into and out of the wire's messages. What a request asks for (its
//! tokens, its sampling) is not here: the handoff needs only its size. `T` is the first token, of
//! whatever type the engine has.

use std::time::Duration;

use baton_kv_layout::BlockId;
pub use baton_request::{Failure as Failed, FailureKind};

use crate::{
    access::{AccessKey, Generation, Secret},
    piece::Piece,
    transport::{TransportKind, TransportOffer},
};

/// Decode worker to prefill worker.
#[derive(Clone, Debug, PartialEq)]
pub enum DecodeMessage {
    /// The first message: compute this.
    Begin(Begin),
    /// Write here.
    Grant(Grant),
    /// Everything is verified: free your blocks. The last message.
    Commit {
        /// Of the grant that is committed.
        generation: Generation,
    },
    /// Stop, and say so.
    Cancel {
        /// For the log.
        reason: String,
    },
}

/// Prefill worker to decode worker.
#[derive(Clone, Debug, PartialEq)]
pub enum PrefillMessage<T> {
    /// The scheduler has taken the request up: set blocks aside now.
    Started,
    /// The same of [`Extent::Cached`]: what there is of it is held.
    Held {
        /// Tokens at the front of the sequence that will be handed over, full blocks of the decode worker; perhaps none.
        num_tokens: usize,
    },
    /// The request waits its turn or is computed, and the engine computes: deadlines count anew. Now and then, until the
    /// first token.
    Progress,
    /// Sampled.
    FirstToken(T),
    /// These pieces lie in the granted blocks.
    Written(Written),
    /// Answer to `Cancel`: no byte is written after this.
    Stopped,
    /// It ends here; `Stopped` follows once no byte is written any more.
    Failed(Failed),
}

/// What the handoff must know about a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Begin {
    /// The client's request.
    pub request_id: String,
    /// How often the router planned it before.
    pub attempt: u32,
    /// The prefill worker this is meant for.
    pub prefill_incarnation: u64,
    /// Who will decode.
    pub decode_worker_id: String,
    /// Which life of it.
    pub decode_incarnation: u64,
    /// Tokens of the whole sequence.
    pub num_tokens: usize,
    /// Tokens in a block of the decode worker.
    pub block_size: usize,
    /// Both sides give up, and free, this long after `Begin` or the last `Progress`, of which the prefill worker, whose word
    /// it is, takes a quarter longer.
    pub deadline: Duration,
    /// How much of the sequence is wanted.
    pub extent: Extent,
}

/// How much of a sequence is handed over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Extent {
    /// All of it, computed where it must be, and the token after it.
    #[default]
    Whole,
    /// The front of it that is cached already, in full blocks. Nothing is computed.
    Cached,
}

impl Begin {
    /// The decode worker's blocks of the whole sequence, the last one perhaps in part.
    ///
    /// # Panics
    /// When a block has no tokens.
    pub fn num_blocks(&self) -> usize {
        self.num_tokens.div_ceil(self.block_size)
    }
}

/// Blocks to write into.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Its name.
    pub generation: Generation,
    /// The right to write.
    pub secret: Secret,
    /// Whole blocks at the front of the sequence that need not be written.
    pub num_cached_blocks: usize,
    /// The decode worker's block for each block of the sequence from `num_cached_blocks` on.
    pub block_ids: Vec<BlockId>,
    /// Ways to reach them, best first.
    pub offers: Vec<TransportOffer>,
}

impl Grant {
    /// What its writer shows.
    pub fn access_key(&self) -> AccessKey {
        AccessKey { generation: self.generation, secret: self.secret }
    }
}

/// Pieces that lie in the granted blocks now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// Of the grant.
    pub generation: Generation,
    /// What carried them.
    pub transport: TransportKind,
    /// Which, and what they hold.
    pub pieces: Vec<Piece>,
    /// Every piece has been named now.
    pub last: bool,
    /// Bytes of these pieces.
    pub bytes: u64,
}
