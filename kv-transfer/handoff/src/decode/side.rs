//! What both machines of the decode side share: their inputs, their actions, and how a handoff ends.

use std::time::{Duration, Instant};

use super::incoming::{Committed, Incoming};

use baton_request::{Failure, FailureKind};

use crate::{
    access::Generation,
    deadlines::Deadlines,
    error::{HandoffError, KvFault, Side},
    message::{DecodeMessage, Grant, PrefillMessage},
    piece::Piece,
};

/// What happened.
#[derive(Clone, Debug)]
pub enum DecodeInput<T> {
    /// From the prefill side.
    Message(PrefillMessage<T>),
    /// The stream ended or broke, for this reason.
    StreamClosed(String),
    /// Answer to [`DecodeAction::Reserve`]: blocks are reserved and the data plane accepts writes into them.
    /// Allowed at any time; a late one is answered with [`DecodeAction::Revoke`].
    Granted(Grant),
    /// Answer to [`DecodeAction::Reserve`]: there will be no blocks.
    ReserveFailed(Failure),
    /// Answer to one [`DecodeAction::Verify`].
    Verified {
        /// How many pieces it named.
        num_pieces: usize,
        /// Whether all of them are right.
        result: Result<(), KvFault>,
    },
    /// The result is not wanted any more.
    Cancel(String),
    /// Time has passed: due at the machine's `deadline`.
    Tick,
}

/// What the driver must do, in this order. `T` is the first token, `E` how the handoff can end well.
#[derive(Clone, Debug, PartialEq)]
pub enum DecodeAction<T, E> {
    /// Send to the prefill side.
    Send(DecodeMessage),
    /// Reserve blocks for so many tokens, make a grant of them, answer [`DecodeInput::Granted`]. Give up at `Finish`.
    Reserve {
        /// Of the sequence, from its front.
        num_tokens: usize,
    },
    /// Pass the first token on. Once, before `Finish(Ok)`.
    FirstToken(T),
    /// Compare checksums with the blocks' memory, answer [`DecodeInput::Verified`].
    Verify(Vec<Piece>),
    /// Revoke the grant; the blocks return when the data plane has fenced them.
    Revoke(Generation),
    /// The peer says that it writes no more: tell the data plane.
    WriterStopped(Generation),
    /// The outcome, once.
    Finish(Result<E, HandoffError>),
    /// Drop the stream. Only `Revoke` for a late `Granted` follows.
    Close,
}

/// The outcome is known. The stream stays open until the peer has stopped, or for a limited time.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(super) struct Stopping {
    pub(super) until: Instant,
    pub(super) granted: Option<Generation>,
}

impl Stopping {
    /// `None` when the handoff is over.
    pub(super) fn on<T, U, E>(
        self,
        input: DecodeInput<T>,
        now: Instant,
        actions: &mut Vec<DecodeAction<U, E>>,
    ) -> Option<Stopping> {
        match input {
            DecodeInput::Granted(grant) => {
                actions.push(DecodeAction::Revoke(grant.generation));
                return Some(self);
            }
            DecodeInput::Message(PrefillMessage::Stopped) => {
                actions.extend(self.granted.map(DecodeAction::WriterStopped));
            }
            DecodeInput::StreamClosed(_) => {}
            DecodeInput::Tick if now >= self.until => {}
            // Sent before the peer heard of the end.
            _ => return Some(self),
        }
        actions.push(DecodeAction::Close);
        None
    }
}

pub(super) const RESERVING: &str = "waiting for free blocks";
pub(super) const RECEIVING: &str = "receiving kv";

/// Takes input after the peer has said everything and closed the stream.
pub(super) fn verify_rest<T, U, E>(
    deadlines: &mut Deadlines,
    incoming: &mut Incoming,
    input: DecodeInput<T>,
    stall: Duration,
    now: Instant,
    actions: &mut Vec<DecodeAction<U, E>>,
) -> Result<Option<Committed>, Abort> {
    match input {
        DecodeInput::Verified { num_pieces, result } => {
            incoming.verified(num_pieces, result)?;
            deadlines.stall = Some(now + stall);
            Ok(incoming.committed())
        }
        DecodeInput::StreamClosed(_) => Ok(None),
        input => refuse(input, RECEIVING, deadlines.next(), now, actions).map(|()| None),
    }
}

/// A handoff that is over only revokes what is granted late.
pub(super) fn on_after_end<T, U, E>(input: DecodeInput<T>, actions: &mut Vec<DecodeAction<U, E>>) {
    if let DecodeInput::Granted(grant) = input {
        actions.push(DecodeAction::Revoke(grant.generation));
    }
}

/// Why a handoff fails, and what the peer must still be told.
#[derive(Debug)]
pub(super) struct Abort {
    error: HandoffError,
    peer: PeerStream,
    granted: Option<Generation>,
}

/// The stream to the peer when a handoff fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PeerStream {
    /// The peer must be told.
    Listening,
    /// The peer ended the handoff itself, and will say when it has stopped.
    Stopping,
    /// Closed.
    Closed,
}

impl Abort {
    pub(super) fn new(error: HandoffError, peer: PeerStream) -> Abort {
        Abort { error, peer, granted: None }
    }

    /// The same, with a grant that must be revoked.
    pub(super) fn under(self, granted: Generation) -> Abort {
        Abort { granted: Some(granted), ..self }
    }

    /// The same, of a handoff whose stream has closed before.
    pub(super) fn without_stream(self) -> Abort {
        Abort { peer: PeerStream::Closed, ..self }
    }

    /// Ends the handoff; `None` when nothing is waited for.
    pub(super) fn end<U, E>(
        self,
        stop: Duration,
        now: Instant,
        actions: &mut Vec<DecodeAction<U, E>>,
    ) -> Option<Stopping> {
        actions.extend(self.granted.map(DecodeAction::Revoke));
        if self.peer == PeerStream::Listening {
            let reason = self.error.to_string();
            actions.push(DecodeAction::Send(DecodeMessage::Cancel { reason }));
        }
        actions.push(DecodeAction::Finish(Err(self.error)));
        if self.peer == PeerStream::Closed {
            actions.push(DecodeAction::Close);
            return None;
        }
        Some(Stopping { until: now + stop, granted: self.granted })
    }
}

impl From<KvFault> for Abort {
    fn from(fault: KvFault) -> Abort {
        Abort::new(fault.into(), PeerStream::Listening)
    }
}

/// Handles input that a running state does not expect: the input is ignored, or the handoff fails.
pub(super) fn refuse<T, U, E>(
    input: DecodeInput<T>,
    doing: &'static str,
    deadline: Instant,
    now: Instant,
    actions: &mut Vec<DecodeAction<U, E>>,
) -> Result<(), Abort> {
    let (error, peer) = match input {
        DecodeInput::Message(PrefillMessage::Failed(failed)) => {
            (HandoffError::Refused { by: Side::Prefill, failed }, PeerStream::Stopping)
        }
        DecodeInput::Message(message) => {
            let what = format!("{} while {doing}", name(&message));
            (HandoffError::PrefillLost(what), PeerStream::Listening)
        }
        DecodeInput::StreamClosed(why) => (HandoffError::PrefillLost(why), PeerStream::Closed),
        DecodeInput::Granted(grant) => return Err(refuse_grant(&grant, doing, actions)),
        DecodeInput::ReserveFailed(failed) => {
            (HandoffError::Refused { by: Side::Decode, failed }, PeerStream::Listening)
        }
        DecodeInput::Cancel(why) => (HandoffError::Cancelled(why), PeerStream::Listening),
        DecodeInput::Tick if now >= deadline => {
            (HandoffError::Deadline { state: doing }, PeerStream::Listening)
        }
        DecodeInput::Tick | DecodeInput::Verified { .. } => return Ok(()),
    };
    Err(Abort::new(error, peer))
}

/// Refuses a grant that does not match the reservation. This is a fault of this side.
pub(super) fn refuse_grant<U, E>(
    grant: &Grant,
    doing: &'static str,
    actions: &mut Vec<DecodeAction<U, E>>,
) -> Abort {
    actions.push(DecodeAction::Revoke(grant.generation));
    let (num_cached, num_granted) = (grant.num_cached_blocks, grant.block_ids.len());
    let what = format!("a grant of {num_cached} + {num_granted} blocks does not fit while {doing}");
    let failed = Failure::new(FailureKind::Internal, what);
    Abort::new(HandoffError::Refused { by: Side::Decode, failed }, PeerStream::Listening)
}

pub(super) fn name<T>(message: &PrefillMessage<T>) -> &'static str {
    match message {
        PrefillMessage::Started => "Started",
        PrefillMessage::Held { .. } => "Held",
        PrefillMessage::Progress => "Progress",
        PrefillMessage::FirstToken(_) => "FirstToken",
        PrefillMessage::Written(_) => "Written",
        PrefillMessage::Stopped => "Stopped",
        PrefillMessage::Failed(_) => "Failure",
    }
}
