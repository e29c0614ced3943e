//! What the two sides of a handoff say to each other, as plain values.
//!
//! The worker service turns them into and out of the wire's messages. What a request asks for (its
//! tokens, its sampling) is not here: the handoff needs only its size. `T` is the first token, of
//! whatever type the engine has.

use std::{fmt, ops::Range, path::PathBuf, sync::Arc, time::Duration};

use baton_kv_cache::BlockId;
use serde::{Deserialize, Serialize};

pub use baton_request::{Failure as Failed, FailureKind};

/// Name of one grant: 64 bits that nobody can guess, so that a late write under an older one finds nothing.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Generation(pub u64);

impl fmt::Debug for Generation {
    /// Shows too little of it to write with.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "g…{:04x}", self.0 & 0xffff)
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// The right to write into a grant's blocks: 128 bits of the kernel's randomness, told to the one peer that shall write.
#[derive(Clone, Copy, Default, Eq)]
pub struct Token(pub [u8; Token::NUM_BYTES]);

impl Token {
    /// Its size.
    pub const NUM_BYTES: usize = 16;
}

impl PartialEq for Token {
    /// Takes as long wherever the first difference is.
    fn eq(&self, other: &Token) -> bool {
        let differing = self.0.iter().zip(&other.0).fold(0, |differing, (a, b)| differing | (a ^ b));
        std::hint::black_box(differing) == 0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

/// What a writer shows to write under a grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pass {
    /// Of the grant.
    pub generation: Generation,
    /// Of the grant.
    pub token: Token,
}

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
    pub token: Token,
    /// Whole blocks at the front of the sequence that need not be written.
    pub num_cached_blocks: usize,
    /// The decode worker's block for each block of the sequence from `num_cached_blocks` on.
    pub block_ids: Vec<BlockId>,
    /// Ways to reach them, best first.
    pub offers: Vec<TransportOffer>,
}

impl Grant {
    /// What its writer shows.
    pub fn pass(&self) -> Pass {
        Pass { generation: self.generation, token: self.token }
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

/// One layer of one block, written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Counted in the grant's `block_ids`.
    pub block_idx: u32,
    /// Decoder layer.
    pub layer_idx: u32,
    /// Of its bytes, see [`checksum`](crate::checksum).
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
    /// The prefill worker's piece, where the two sides' are the same.
    pub(crate) fn source(&self) -> (BlockId, usize) {
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
        /// The blocks in which they lie, in the order of the sequence.
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

/// What moves KV between two workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TransportKind {
    /// The decode worker's memory, mapped: same user, same host.
    Shm,
    /// One-sided writes by a network device, through NIXL.
    Rdma,
    /// From one device to another, through NCCL.
    Nccl,
    /// Sockets.
    Tcp,
}

impl TransportKind {
    /// Every kind, best first.
    pub const ALL: [TransportKind; 4] =
        [TransportKind::Shm, TransportKind::Rdma, TransportKind::Nccl, TransportKind::Tcp];

    /// "shm", "rdma", "nccl" or "tcp".
    pub fn name(self) -> &'static str {
        match self {
            TransportKind::Shm => "shm",
            TransportKind::Rdma => "rdma",
            TransportKind::Nccl => "nccl",
            TransportKind::Tcp => "tcp",
        }
    }

    /// Whether it carries blocks that lie on several devices, some heads on each.
    pub fn takes_ranks(self) -> bool {
        self != TransportKind::Nccl
    }

    /// The inverse of [`name`](Self::name).
    pub fn from_name(name: &str) -> Option<TransportKind> {
        TransportKind::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

impl fmt::Display for TransportKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A way to reach the decode worker's blocks. `pool` is the incarnation of its block pool: whoever
/// answers at the address with another one has restarted, and is not written to.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum TransportOffer {
    /// Shared memory.
    Shm {
        /// Boot id and name of the host.
        host_id: String,
        /// Unix socket that hands out the pool's memory.
        socket_path: PathBuf,
        /// Incarnation of the pool.
        pool: u64,
    },
    /// One-sided writes by a network device.
    Rdma {
        /// "host:port" of the control listener, which hands out addresses and keys.
        address: String,
        /// Incarnation of the pool.
        pool: u64,
    },
    /// From one device to another, through NCCL.
    Nccl {
        /// "host:port" of the control listener, through which communicators are arranged.
        address: String,
        /// Incarnation of the pool.
        pool: u64,
    },
    /// Sockets.
    Tcp {
        /// "host:port" of the data listener.
        address: String,
        /// Incarnation of the pool.
        pool: u64,
    },
}

impl TransportOffer {
    /// Which transport it is for.
    pub fn kind(&self) -> TransportKind {
        match self {
            TransportOffer::Shm { .. } => TransportKind::Shm,
            TransportOffer::Rdma { .. } => TransportKind::Rdma,
            TransportOffer::Nccl { .. } => TransportKind::Nccl,
            TransportOffer::Tcp { .. } => TransportKind::Tcp,
        }
    }
}
