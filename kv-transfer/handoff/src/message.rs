//! The messages of the two sides of a handoff, as plain values.
//!
//! The worker service converts them to and from the wire's messages. The request's tokens and sampling are not here:
//! the handoff needs only the number of tokens. `T` is the engine's type of the first token.

use std::time::Duration;

use baton_kv_layout::BlockId;
use baton_request::Failure;

use crate::{
    access::{AccessKey, Generation, Secret},
    piece::Pushed,
    transport::TransportOffer,
};

/// A message of the decode worker to the prefill worker.
#[derive(Clone, Debug, PartialEq)]
pub enum DecodeMessage {
    /// The first message: compute this sequence, and hand its KV over.
    Begin(Begin),
    /// The first message: hand over what is cached at the front of this sequence, in full blocks. Compute nothing.
    Fetch(Begin),
    /// Write into these blocks.
    Grant(Grant),
    /// The first token has come, and this side waits for blocks of its own while its queue moves: deadlines restart. Sent now
    /// and then, until `Grant`.
    Progress,
    /// Everything is verified: free your blocks. The last message.
    Commit {
        /// Of the grant that is committed.
        generation: Generation,
    },
    /// Stop, and answer `Stopped`.
    Cancel {
        /// For the log.
        reason: String,
    },
    /// The first token ended the request: its KV is not needed. Stop, and answer `Stopped`.
    Done,
}

/// A message of the prefill worker to the decode worker.
#[derive(Clone, Debug, PartialEq)]
pub enum PrefillMessage<T> {
    /// The scheduler has started the request: reserve blocks now.
    Started,
    /// Answer to `Fetch`: what is cached of the sequence is held.
    Held {
        /// Tokens at the front of the sequence that will be handed over, full blocks of the decode worker; perhaps none.
        num_tokens: usize,
    },
    /// The request waits or is computed, and the engine makes progress, or a prefix of it is brought in: deadlines restart.
    /// Sent now and then, until the first token.
    Progress,
    /// The first token was sampled.
    FirstToken(T),
    /// These pieces are in the granted blocks.
    Written(Written),
    /// Answer to `Cancel`: no byte is written after this.
    Stopped,
    /// The prefill side gives up. `Stopped` follows once it writes no byte any more.
    Failed(Failure),
}

/// What the handoff must know about a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Begin {
    /// The id of the client's request.
    pub request_id: String,
    /// How often the router planned it before.
    pub attempt: u32,
    /// The prefill worker this is meant for.
    pub prefill_incarnation: u64,
    /// Tokens of the whole sequence.
    pub num_tokens: usize,
    /// Tokens in a block of the decode worker.
    pub block_size: usize,
    /// The decode side gives up, and frees its blocks, this long after `Begin` or the last `Progress` of either side. The
    /// prefill side waits a quarter longer after a `Progress`.
    pub deadline: Duration,
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
    /// The name of the grant.
    pub generation: Generation,
    /// The secret part of its access key.
    pub secret: Secret,
    /// Whole blocks at the front of the sequence that need not be written.
    pub num_cached_blocks: usize,
    /// The decode worker's block for each block of the sequence from `num_cached_blocks` on.
    pub block_ids: Vec<BlockId>,
    /// Offers to reach the blocks, best first.
    pub offers: Vec<TransportOffer>,
}

impl Grant {
    /// The access key that its writer shows.
    pub fn access_key(&self) -> AccessKey {
        AccessKey { generation: self.generation, secret: self.secret }
    }
}

/// What the granted blocks hold now, beside what was named before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// The grant that was written.
    pub generation: Generation,
    /// The pieces of one push; `None` when there was nothing to write.
    pub pushed: Option<Pushed>,
    /// Every piece has been named now.
    pub last: bool,
}
