//! The inputs and the actions of both machines of the decode side.

use baton_request::Failure;

use crate::{
    access::Generation,
    error::{HandoffError, KvFault},
    message::{DecodeMessage, Grant, PrefillMessage},
    piece::Piece,
};

/// What happened on the stream, in the engine, in the data plane, or by the clock.
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
    /// This worker's queue moves: its engine computes or KV arrives, for any request.
    Progress,
    /// Answer to one [`DecodeAction::Verify`].
    Verified {
        /// The number of pieces in that action.
        num_pieces: usize,
        /// Whether the checksums of all of them match.
        result: Result<(), KvFault>,
    },
    /// The caller does not need the result any more, for this reason.
    Cancel(String),
    /// Time has passed: due at the machine's `deadline`.
    Tick,
}

/// What the driver must do, in this order. `T` is the type of the first token, `E` that of a successful outcome.
#[derive(Clone, Debug, PartialEq)]
pub enum DecodeAction<T, E> {
    /// Send to the prefill side.
    Send(DecodeMessage),
    /// Reserve blocks and grant them, then answer [`DecodeInput::Granted`]. `Finish` ends an unanswered reservation.
    Reserve {
        /// Tokens at the front of the sequence that the blocks must hold.
        num_tokens: usize,
    },
    /// Forward the first token. Once, before `Finish(Ok)`.
    FirstToken(T),
    /// Compare checksums with the blocks' memory, answer [`DecodeInput::Verified`].
    Verify(Vec<Piece>),
    /// Revoke the grant; the blocks return when the data plane has fenced them.
    Revoke(Generation),
    /// The peer reports that it has stopped writing: tell the data plane.
    WriterStopped(Generation),
    /// The outcome, once.
    Finish(Result<E, HandoffError>),
    /// Drop the stream. Only `Revoke` for a late `Granted` follows.
    Close,
}
