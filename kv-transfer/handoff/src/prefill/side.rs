//! What the machines of the prefill side share: their inputs, their actions, and how a handoff ends.

use std::time::{Duration, Instant};

use baton_request::Failure;

use crate::{
    access::{AccessKey, Generation},
    deadlines::Deadlines,
    error::{HandoffError, PushError, RouteError, Side},
    message::{DecodeMessage, PrefillMessage},
    piece::{PieceWrite, Pushed},
    transport::TransportOffer,
};

/// The properties of this worker that a handoff depends on.
#[derive(Clone, Copy, Debug)]
pub struct OwnSide {
    /// The incarnation of this worker. A `Begin` for another incarnation is refused.
    pub incarnation: u64,
    /// Tokens in a block.
    pub block_size: usize,
    /// Decoder layers.
    pub num_layers: usize,
}

/// What happened on the stream, in the data plane, or by the clock. Events of the engine are separate inputs.
#[derive(Clone, Debug)]
pub enum PrefillInput {
    /// From the decode side.
    Message(DecodeMessage),
    /// The stream ended or broke, for this reason.
    StreamClosed(String),
    /// The engine or the service has failed.
    Fail(Failure),
    /// Answer to [`PrefillAction::Route`].
    Routed(Result<(), RouteError>),
    /// Answer to one [`PrefillAction::Push`], in any order.
    Pushed(Result<Pushed, PushError>),
    /// Answer to [`PrefillAction::Stop`]: the computation is dropped and the route is closed and idle.
    Idle,
    /// Time has passed: due at the machine's `deadline`.
    Tick,
}

/// What the driver must do, in this order. `T` is the type of the first token, `E` that of a successful outcome.
#[derive(Clone, Debug, PartialEq)]
pub enum PrefillAction<T, E> {
    /// Open a route to the granted blocks, then answer [`PrefillInput::Routed`]. The route keeps the guard of the own blocks.
    Route {
        /// The access key of the grant.
        access_key: AccessKey,
        /// The peer's offers, best first.
        offers: Vec<TransportOffer>,
    },
    /// Write these pieces over the route, then answer [`PrefillInput::Pushed`].
    Push(Vec<PieceWrite>),
    /// Send to the decode side.
    Send(PrefillMessage<T>),
    /// The outcome, once.
    Finish(Result<E, HandoffError>),
    /// Drop the computation and close the route, then answer [`PrefillInput::Idle`]. No push follows.
    Stop,
    /// Drop the blocks and the route. Once.
    Release,
    /// Drop the stream. The last action.
    Close,
}

/// Every piece is written and reported. The decode side verifies.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(super) struct Committing {
    pub(super) generation: Generation,
    pub(super) deadlines: Deadlines,
}

/// The outcome is known; the computation and the route end.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(super) struct Stopping {
    pub(super) until: Instant,
    pub(super) is_peer_listening: bool,
}

impl Stopping {
    /// `None` when the handoff is over.
    pub(super) fn on<T, E>(
        self,
        input: PrefillInput,
        now: Instant,
        actions: &mut Vec<PrefillAction<T, E>>,
    ) -> Option<Stopping> {
        match input {
            // Invariant 3: the blocks are released below, after the engine and the route have stopped.
            PrefillInput::Idle => {
                if self.is_peer_listening {
                    actions.push(PrefillAction::Send(PrefillMessage::Stopped));
                }
            }
            PrefillInput::Tick if now >= self.until => {}
            PrefillInput::StreamClosed(_) => return Some(Stopping { is_peer_listening: false, ..self }),
            // Answers to earlier actions.
            _ => return Some(self),
        }
        release(actions);
        None
    }
}

pub(super) fn release<T, E>(actions: &mut Vec<PrefillAction<T, E>>) {
    actions.extend([PrefillAction::Release, PrefillAction::Close]);
}

/// Why a handoff fails, and whether the peer must be told.
#[derive(Debug)]
pub(super) struct Abort {
    error: HandoffError,
    pub(super) is_peer_listening: bool,
}

impl From<HandoffError> for Abort {
    fn from(error: HandoffError) -> Abort {
        Abort { error, is_peer_listening: true }
    }
}

impl Abort {
    /// Tells the peer, unless it has left or has ended the handoff itself, and finishes.
    pub(super) fn finish<T, E>(self, actions: &mut Vec<PrefillAction<T, E>>) {
        let error = self.error;
        if self.is_peer_listening && !matches!(error, HandoffError::Cancelled(_)) {
            let message = match &error {
                HandoffError::Refused { failed, .. } => failed.message.clone(),
                error => error.to_string(),
            };
            let failed = Failure { kind: error.kind(), message };
            actions.push(PrefillAction::Send(PrefillMessage::Failed(failed)));
        }
        actions.push(PrefillAction::Finish(Err(error)));
    }

    /// Ends a handoff whose computation or route must stop.
    pub(super) fn stop<T, E>(
        self,
        stop: Duration,
        now: Instant,
        actions: &mut Vec<PrefillAction<T, E>>,
    ) -> Stopping {
        let is_peer_listening = self.is_peer_listening;
        self.finish(actions);
        actions.push(PrefillAction::Stop);
        Stopping { until: now + stop, is_peer_listening }
    }
}

/// Handles input that a running state does not expect: the input is ignored, or the handoff fails.
pub(super) fn unexpected(
    input: PrefillInput,
    doing: &'static str,
    deadline: Instant,
    now: Instant,
) -> Result<(), Abort> {
    Err(match input {
        PrefillInput::Message(DecodeMessage::Cancel { reason }) => HandoffError::Cancelled(reason).into(),
        PrefillInput::Message(message) => {
            HandoffError::DecodeLost(format!("{} while {doing}", name(&message))).into()
        }
        PrefillInput::StreamClosed(why) => {
            Abort { error: HandoffError::DecodeLost(why), is_peer_listening: false }
        }
        PrefillInput::Fail(failed) => HandoffError::Refused { by: Side::Prefill, failed }.into(),
        PrefillInput::Tick if now >= deadline => HandoffError::Deadline { state: doing }.into(),
        PrefillInput::Tick
        | PrefillInput::Routed(_)
        | PrefillInput::Pushed(_)
        // `Stop` was no action yet.
        | PrefillInput::Idle => return Ok(()),
    })
}

pub(super) const COMMITTING: &str = "waiting for the commit";

pub(super) fn name(message: &DecodeMessage) -> &'static str {
    match message {
        DecodeMessage::Begin(_) => "Begin",
        DecodeMessage::Fetch(_) => "Fetch",
        DecodeMessage::Grant(_) => "Grant",
        DecodeMessage::Progress => "Progress",
        DecodeMessage::Commit { .. } => "Commit",
        DecodeMessage::Cancel { .. } => "Cancel",
        DecodeMessage::Done => "Done",
    }
}
