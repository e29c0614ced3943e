//! How a handoff ends on the decode side: the last states of both machines, and the failures that lead to them.

use std::time::{Duration, Instant};

use baton_request::{Failure, FailureKind};

use super::{
    incoming::{Committed, Incoming},
    side::{DecodeAction, DecodeInput},
};
use crate::{
    access::Generation,
    deadlines::Deadlines,
    error::{HandoffError, KvFault, Side},
    limits::Limits,
    message::{DecodeMessage, Grant, PrefillMessage},
};

/// The last states of both machines.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(super) enum Ending {
    /// The peer has reported all KV and closed the stream. This side verifies the rest.
    Verifying { deadlines: Deadlines, incoming: Incoming },
    /// The outcome is known. The stream stays open until the peer has stopped, or until this time.
    Stopping { until: Instant, granted: Option<Generation> },
    /// The handoff has ended.
    Over,
}

impl Ending {
    /// All KV is verified, and the stream is open: tells the peer, and finishes.
    pub(super) fn commit<U, E: From<Committed>>(
        committed: Committed,
        actions: &mut Vec<DecodeAction<U, E>>,
    ) -> Ending {
        let generation = committed.generation;
        actions.push(DecodeAction::Send(DecodeMessage::Commit { generation }));
        Ending::finish(committed, actions)
    }

    fn finish<U, E: From<Committed>>(committed: Committed, actions: &mut Vec<DecodeAction<U, E>>) -> Ending {
        actions.extend([DecodeAction::Finish(Ok(committed.into())), DecodeAction::Close]);
        Ending::Over
    }

    /// When [`DecodeInput::Tick`] is due; `None` when the handoff is over.
    pub(super) fn deadline(&self) -> Option<Instant> {
        match self {
            Ending::Verifying { deadlines, .. } => Some(deadlines.next()),
            Ending::Stopping { until, .. } => Some(*until),
            Ending::Over => None,
        }
    }

    /// Takes one input.
    pub(super) fn on<T, U, E: From<Committed>>(
        self,
        input: DecodeInput<T>,
        limits: &Limits,
        now: Instant,
        actions: &mut Vec<DecodeAction<U, E>>,
    ) -> Ending {
        match (self, input) {
            (Ending::Verifying { deadlines, incoming }, input) => {
                let generation = incoming.generation();
                verifying(deadlines, incoming, input, limits.stall, now, actions).unwrap_or_else(|abort| {
                    abort.with_grant(generation).without_stream().end(limits.stop, now, actions)
                })
            }
            // Reserved before the handoff ended: these blocks are not needed.
            (ending, DecodeInput::Granted(grant)) => {
                actions.push(DecodeAction::Revoke(grant.generation));
                ending
            }
            (Ending::Stopping { until, granted }, input) => stopping(until, granted, &input, now, actions),
            (Ending::Over, _) => Ending::Over,
        }
    }
}

fn verifying<T, U, E: From<Committed>>(
    mut deadlines: Deadlines,
    mut incoming: Incoming,
    input: DecodeInput<T>,
    stall: Duration,
    now: Instant,
    actions: &mut Vec<DecodeAction<U, E>>,
) -> Result<Ending, Abort> {
    match input {
        DecodeInput::Verified { num_pieces, result } => {
            incoming.verified(num_pieces, result)?;
            deadlines.stall = Some(now + stall);
            if let Some(committed) = incoming.committed() {
                return Ok(Ending::finish(committed, actions));
            }
        }
        DecodeInput::StreamClosed(_) => {}
        input => unexpected(input, RECEIVING, deadlines.next(), now, actions)?,
    }
    Ok(Ending::Verifying { deadlines, incoming })
}

fn stopping<T, U, E>(
    until: Instant,
    granted: Option<Generation>,
    input: &DecodeInput<T>,
    now: Instant,
    actions: &mut Vec<DecodeAction<U, E>>,
) -> Ending {
    match input {
        DecodeInput::Message(PrefillMessage::Stopped) => {
            actions.extend(granted.map(DecodeAction::WriterStopped));
        }
        DecodeInput::StreamClosed(_) => {}
        DecodeInput::Tick if now >= until => {}
        // Sent before the peer learned that the handoff has ended.
        _ => return Ending::Stopping { until, granted },
    }
    actions.push(DecodeAction::Close);
    Ending::Over
}

pub(super) const RESERVING: &str = "waiting for free blocks";
pub(super) const RECEIVING: &str = "receiving kv";

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
    pub(super) fn with_grant(self, granted: Generation) -> Abort {
        Abort { granted: Some(granted), ..self }
    }

    /// The same, of a handoff whose stream has closed before.
    fn without_stream(self) -> Abort {
        Abort { peer: PeerStream::Closed, ..self }
    }

    /// Ends the handoff. An open stream stays open until the peer has stopped, at most for `stop`.
    pub(super) fn end<U, E>(
        self,
        stop: Duration,
        now: Instant,
        actions: &mut Vec<DecodeAction<U, E>>,
    ) -> Ending {
        actions.extend(self.granted.map(DecodeAction::Revoke));
        if self.peer == PeerStream::Listening {
            let reason = self.error.to_string();
            actions.push(DecodeAction::Send(DecodeMessage::Cancel { reason }));
        }
        actions.push(DecodeAction::Finish(Err(self.error)));
        if self.peer == PeerStream::Closed {
            actions.push(DecodeAction::Close);
            return Ending::Over;
        }
        Ending::Stopping { until: now + stop, granted: self.granted }
    }
}

impl From<KvFault> for Abort {
    fn from(fault: KvFault) -> Abort {
        Abort::new(fault.into(), PeerStream::Listening)
    }
}

/// Handles input that a running state does not expect: the input is ignored, or the handoff fails.
pub(super) fn unexpected<T, U, E>(
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
        DecodeInput::Tick | DecodeInput::Progress | DecodeInput::Verified { .. } => return Ok(()),
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

fn name<T>(message: &PrefillMessage<T>) -> &'static str {
    match message {
        PrefillMessage::Started => "Started",
        PrefillMessage::Held { .. } => "Held",
        PrefillMessage::Progress => "Progress",
        PrefillMessage::FirstToken(_) => "FirstToken",
        PrefillMessage::Written(_) => "Written",
        PrefillMessage::Stopped => "Stopped",
        PrefillMessage::Failed(_) => "Failed",
    }
}
