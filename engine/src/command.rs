//! What other threads ask of the engine thread. Closed: nothing else crosses.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
    mpsc,
};

use baton_kv_cache::{BlockHash, BlockId};
use tokio::sync::oneshot;

use baton_model::SampledToken;
use baton_request::Request;

use crate::{
    block_pool::PoolReport,
    events::{PrefillEvent, Sink, TokenEvent},
    handle::{IdleError, Reservation},
    sampler::TokenHistory,
    scheduler::PrefixBlocks,
    sequence::{Sequence, SequenceId},
};

/// The channel is unbounded so that a `drop` never waits; what can be in it is bounded all the same:
/// submissions by `max_waiting`, the rest by a few per accepted request.
pub(crate) type Commands = mpsc::Sender<Command>;

pub(crate) enum Command {
    /// A new sequence.
    Submit(Box<Submission>),
    /// A granted reservation's prompt is computed; continue after its first token.
    Decode { id: SequenceId, first: SampledToken, sink: Sink<TokenEvent> },
    /// The reader of the sequence's events left.
    Cancel(SequenceId),
    /// The holder of its blocks left: a hold, or a reservation, granted or not.
    Release(SequenceId),
    /// Hold what is cached of a prefix, and say which blocks that are.
    HoldCached { id: SequenceId, hashes: Vec<BlockHash>, reply: oneshot::Sender<Vec<BlockId>> },
    /// Hold what is cached of a prefix, and set blocks aside for the rest, if there is room now.
    ReservePrefix { id: SequenceId, hashes: Vec<BlockHash>, reply: oneshot::Sender<Option<PrefixBlocks>> },
    /// The blocks of a reserved prefix hold what these hashes say.
    CachePrefix { id: SequenceId, hashes: Vec<BlockHash> },
    /// Answer whether everything has been returned.
    CheckIdle(oneshot::Sender<Result<PoolReport, IdleError>>),
    /// End every stream, then the thread.
    Shutdown,
}

pub(crate) struct Submission {
    pub(crate) sequence: Sequence,
    pub(crate) request: Request,
    pub(crate) history: TokenHistory,
    pub(crate) reply: Reply,
    pub(crate) ticket: Ticket,
}

/// Whom to tell, by role.
pub(crate) enum Reply {
    Tokens(Sink<TokenEvent>),
    Prefill(Sink<PrefillEvent>),
    /// `None` once it was granted; then `Decode` brings a sink.
    Reservation(Option<oneshot::Sender<Reservation>>),
}

/// A place in the queue, from submission until admission or the end.
#[derive(Debug)]
pub(crate) struct Ticket(Arc<AtomicUsize>);

impl Ticket {
    /// One of at most `max_waiting`; `Err` with their number when there is none.
    pub(crate) fn take(num_taken: &Arc<AtomicUsize>, max_waiting: usize) -> Result<Ticket, usize> {
        let more = |num| (num < max_waiting).then_some(num + 1);
        num_taken.try_update(Ordering::AcqRel, Ordering::Acquire, more)?;
        Ok(Ticket(num_taken.clone()))
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Sends a command about a sequence when it is dropped.
#[derive(Debug)]
pub(crate) struct Owner {
    pub(crate) id: SequenceId,
    commands: Option<Commands>,
    at_drop: fn(SequenceId) -> Command,
}

impl Owner {
    pub(crate) fn new(id: SequenceId, commands: Commands, at_drop: fn(SequenceId) -> Command) -> Owner {
        Owner { id, commands: Some(commands), at_drop }
    }

    /// The duty has passed to somebody else.
    pub(crate) fn disarm(mut self) {
        self.commands = None;
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        if let Some(commands) = &self.commands {
            // Fails when the engine has ended; nothing is owned then.
            let _ = commands.send((self.at_drop)(self.id));
        }
    }
}
