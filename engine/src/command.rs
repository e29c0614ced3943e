//! What other threads ask of the engine thread. `Command` is closed: nothing else crosses.

use std::sync::{Arc, mpsc};

use baton_kv_cache::{BlockHash, BlockId};
use baton_scheduler::{PoolReport, PrefixBlocks, Sequence, SequenceId};
use tokio::sync::{mpsc as async_mpsc, oneshot};

use baton_model_spec::SampledToken;

use crate::{
    events::{Sink, TokenEvent},
    live_request::LiveRequest,
    status::IdleError,
};

/// The sender of commands. The channel is unbounded so that a `drop` never waits. Its length is bounded all the same:
/// by `max_waiting` for submissions, and by a few commands per accepted request for the rest.
pub(crate) type Commands = mpsc::Sender<Command>;

pub(crate) enum Command {
    /// A new sequence.
    Submit(Sequence, Box<LiveRequest>),
    /// The prompt of a granted reservation is computed. Continue after its first token.
    Decode { id: SequenceId, first: SampledToken, sink: Sink<TokenEvent> },
    /// The reader of the sequence's events is gone.
    Cancel(SequenceId),
    /// The holder of its blocks is gone: of a hold, or of a reservation, granted or not. Or nothing is expected any more.
    Release(SequenceId),
    /// The granted reservation will not decode. Its blocks stay held until `Release`.
    GiveUpSlot(SequenceId),
    /// Hold the cached part of a prefix, and reply with its blocks.
    HoldCached { id: SequenceId, hashes: Arc<[BlockHash]>, reply: oneshot::Sender<Vec<BlockId>> },
    /// Hold the cached part of a prefix, and set blocks aside for as much of the rest as there is room for now; nothing if that makes
    /// fewer blocks than `least`.
    ReservePrefix {
        id: SequenceId,
        hashes: Vec<BlockHash>,
        least: usize,
        reply: oneshot::Sender<Option<PrefixBlocks>>,
    },
    /// The blocks of a sequence from here on, the first of which has this hash, are on their way.
    Expect { id: SequenceId, block_idx: usize, hash: BlockHash },
    /// The blocks of a reserved prefix, from block `first` on, hold the KV that these hashes name, after that of `after`.
    CachePrefix { id: SequenceId, first: usize, after: Option<BlockHash>, hashes: Vec<BlockHash> },
    /// From now on, ask for the blocks of preempted sequences before they run again.
    RecallPreempted(Resumptions),
    /// From now on, tell of blocks whose KV may be wrong.
    TellSpoiled(Spoiled),
    /// So many blocks at the front of a preempted sequence hold their KV. It runs again.
    Resume { id: SequenceId, num_blocks: usize },
    /// Reply whether everything was returned.
    CheckIdle(oneshot::Sender<Result<PoolReport, IdleError>>),
    /// End every stream, then the thread.
    Shutdown,
}

/// Where an engine sends the hashes of blocks whose KV may be wrong, of one request at a time. The channel is unbounded so that the engine
/// never waits and none is lost. Its length is bounded by the requests that fail.
pub(crate) type Spoiled = async_mpsc::UnboundedSender<Vec<BlockHash>>;

/// Sends a command about a sequence when it is dropped.
#[derive(Debug)]
pub(crate) struct DropCommand {
    pub(crate) id: SequenceId,
    commands: Option<Commands>,
    at_drop: fn(SequenceId) -> Command,
}

impl DropCommand {
    pub(crate) fn new(id: SequenceId, commands: Commands, at_drop: fn(SequenceId) -> Command) -> DropCommand {
        DropCommand { id, commands: Some(commands), at_drop }
    }

    /// Drops it without the command: another value has taken over the duty.
    pub(crate) fn disarm(mut self) {
        self.commands = None;
    }
}

impl Drop for DropCommand {
    fn drop(&mut self) {
        if let Some(commands) = &self.commands {
            // Fails when the engine has ended. It then owns nothing.
            let _ = commands.send((self.at_drop)(self.id));
        }
    }
}

/// A preempted sequence that has blocks again, of which the cache has lost some. It does not run, and its blocks stay as they
/// are, until this is dropped. Then the engine computes what was not [loaded](Self::loaded).
#[derive(Debug)]
pub struct Resumption {
    id: SequenceId,
    hashes: Vec<BlockHash>,
    blocks: Vec<BlockId>,
    num_ready: usize,
    commands: Commands,
}

/// Where an engine sends its resumptions.
pub(crate) struct Resumptions {
    /// Bounded by the sequences that hold blocks at a time: each has one at most, so none is refused.
    pub(crate) sender: async_mpsc::Sender<Resumption>,
    pub(crate) commands: Commands,
}

impl Resumption {
    /// The hashes of its full blocks, in order.
    pub fn hashes(&self) -> &[BlockHash] {
        &self.hashes
    }

    /// Those blocks.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// So many of them at the front hold their KV. They must never be written.
    pub fn num_ready(&self) -> usize {
        self.num_ready
    }

    /// `num_blocks` more of them hold their KV.
    ///
    /// # Panics
    /// When there are fewer.
    pub fn loaded(&mut self, num_blocks: usize) {
        self.num_ready += num_blocks;
        assert!(self.num_ready <= self.blocks.len(), "more blocks were loaded than the sequence has");
    }
}

impl Drop for Resumption {
    fn drop(&mut self) {
        // Fails when the engine has ended. It then owns nothing.
        let _ = self.commands.send(Command::Resume { id: self.id, num_blocks: self.num_ready });
    }
}

impl Resumptions {
    /// Asks for the blocks of a sequence that was admitted with `num_cached_blocks`. Without a reader it runs at once.
    pub(crate) fn ask(&self, sequence: &Sequence, num_cached_blocks: usize) {
        let hashes = sequence.sharable_hashes().to_vec();
        let blocks = sequence.blocks()[..hashes.len()].to_vec();
        let (id, commands) = (sequence.id, self.commands.clone());
        // What is not sent is dropped, and that resumes it.
        drop(self.sender.try_send(Resumption { id, hashes, blocks, num_ready: num_cached_blocks, commands }));
    }
}
