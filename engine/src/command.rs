//! What other threads ask of the engine thread. `Command` is closed: nothing else crosses.

use std::sync::mpsc;

use baton_kv_cache::{BlockHash, BlockId};
use tokio::sync::oneshot;

use baton_model_spec::SampledToken;

use crate::{
    block_pool::PoolReport,
    events::{Sink, TokenEvent},
    live_request::LiveRequest,
    scheduler::PrefixBlocks,
    sequence::{Sequence, SequenceId},
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
    /// The holder of its blocks is gone: of a hold, or of a reservation, granted or not.
    Release(SequenceId),
    /// Hold the cached part of a prefix, and reply with its blocks.
    HoldCached { id: SequenceId, hashes: Vec<BlockHash>, reply: oneshot::Sender<Vec<BlockId>> },
    /// Hold the cached part of a prefix, and set blocks aside for the rest if there is room now.
    ReservePrefix { id: SequenceId, hashes: Vec<BlockHash>, reply: oneshot::Sender<Option<PrefixBlocks>> },
    /// The blocks of a reserved prefix hold the KV that these hashes name.
    CachePrefix { id: SequenceId, hashes: Vec<BlockHash> },
    /// Reply whether everything was returned.
    CheckIdle(oneshot::Sender<Result<PoolReport, IdleError>>),
    /// End every stream, then the thread.
    Shutdown,
}

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
