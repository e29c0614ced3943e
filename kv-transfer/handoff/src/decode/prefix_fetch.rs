//! The decode side of a prefix that another worker has cached.
//!
//! ```text
//!   begin()
//!      | Fetch
//!      v       Held                Granted                  all verified, last named:
//!   Asking -----------> Reserving -----------> Receiving --- Commit ----------------------+
//!      |     (Reserve)      |       (Grant)        |  \  stream closed, all said:         |
//!      |                    |                      |   Verifying ---- all verified -------+
//!      +--------------------+----------------------+-------+                              |
//!      | nothing held, failure, Cancel, deadline:  | stream closed:                       |
//!      | Revoke, Cancel, Finish(Err)               | Revoke, Finish(Err)                  |
//!      v                                           v                                      v
//!   Stopping --- Stopped, stream closed, deadline ------------------------------------> Over
//! ```
//!
//! The peer computes nothing: there is neither a first token nor `Progress`. Blocks are reserved for those tokens that the
//! peer holds.

use std::{
    convert::Infallible,
    time::{Duration, Instant},
};

use super::{
    incoming::{Committed, Incoming},
    side::{
        Abort, DecodeAction, DecodeInput, PeerStream, RECEIVING, RESERVING, Stopping, on_after_end, refuse,
        refuse_grant, verify_rest,
    },
};
use crate::{
    deadlines::Deadlines,
    error::HandoffError,
    limits::Limits,
    message::{Begin, DecodeMessage, PrefillMessage},
};

/// What the driver of a [`PrefixFetch`] must do: it never has a first token.
pub type PrefixFetchAction = DecodeAction<Infallible, Committed>;

/// The decode side of a prefix that another worker has cached. See the module's picture.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub struct PrefixFetch {
    terms: Terms,
    state: State,
}

/// What does not change during a handoff.
#[derive(Clone, Copy, Debug)]
struct Terms {
    num_tokens: usize,
    block_size: usize,
    num_layers: usize,
    limits: Limits,
}

#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
enum State {
    /// The peer looks into its cache.
    Asking {
        total: Instant,
    },
    /// The peer holds so many tokens, and this side looks for free blocks.
    Reserving {
        total: Instant,
        num_tokens: usize,
    },
    /// The peer writes into the granted blocks.
    Receiving {
        deadlines: Deadlines,
        incoming: Incoming,
    },
    /// The peer has said everything and closed the stream; this side verifies the rest.
    Verifying {
        deadlines: Deadlines,
        incoming: Incoming,
    },
    /// The outcome is known; the peer has not stopped yet.
    Stopping(Stopping),
    Over,
}

const ASKING: &str = "asking for a cached prefix";

impl PrefixFetch {
    /// Starts a handoff; the actions send `begin`. Its deadline counts from `now`.
    pub fn begin(
        begin: Begin,
        num_layers: usize,
        limits: Limits,
        now: Instant,
    ) -> (PrefixFetch, Vec<PrefixFetchAction>) {
        let (num_tokens, block_size) = (begin.num_tokens, begin.block_size);
        let terms = Terms { num_tokens, block_size, num_layers, limits };
        let state = State::Asking { total: now + begin.deadline };
        (PrefixFetch { terms, state }, vec![DecodeAction::Send(DecodeMessage::Fetch(begin))])
    }

    /// When [`DecodeInput::Tick`] is due; `None` when the handoff is over.
    pub fn deadline(&self) -> Option<Instant> {
        match &self.state {
            State::Asking { total } | State::Reserving { total, .. } => Some(*total),
            State::Receiving { deadlines, .. } | State::Verifying { deadlines, .. } => Some(deadlines.next()),
            State::Stopping(stopping) => Some(stopping.until),
            State::Over => None,
        }
    }

    /// Whether `Close` was an action.
    pub fn is_over(&self) -> bool {
        matches!(self.state, State::Over)
    }

    /// Takes one input.
    pub fn on<T>(&mut self, input: DecodeInput<T>, now: Instant) -> Vec<PrefixFetchAction> {
        let (terms, mut actions) = (self.terms, Vec::new());
        let next = match std::mem::replace(&mut self.state, State::Over) {
            State::Asking { total } => terms.asking(total, input, now, &mut actions),
            State::Reserving { total, num_tokens } => {
                terms.reserving(total, num_tokens, input, now, &mut actions)
            }
            State::Receiving { deadlines, incoming } => {
                let granted = incoming.generation();
                let next = terms.receiving(deadlines, incoming, input, now, &mut actions);
                next.map_err(|failure| failure.under(granted))
            }
            State::Verifying { deadlines, incoming } => {
                let granted = incoming.generation();
                let next = verifying(deadlines, incoming, input, terms.limits.stall, now, &mut actions);
                next.map_err(|failure| failure.under(granted).without_stream())
            }
            State::Stopping(stopping) => Ok(State::ended(stopping.on(input, now, &mut actions))),
            State::Over => {
                on_after_end(input, &mut actions);
                Ok(State::Over)
            }
        };
        self.state =
            next.unwrap_or_else(|failure| State::ended(failure.end(terms.limits.stop, now, &mut actions)));
        actions
    }
}

impl State {
    fn ended(stopping: Option<Stopping>) -> State {
        stopping.map_or(State::Over, State::Stopping)
    }
}

impl Terms {
    fn asking<T>(
        self,
        total: Instant,
        input: DecodeInput<T>,
        now: Instant,
        actions: &mut Vec<PrefixFetchAction>,
    ) -> Result<State, Abort> {
        match input {
            DecodeInput::Message(PrefillMessage::Held { num_tokens: 0 }) => {
                Err(Abort::new(HandoffError::NotCached, PeerStream::Listening))
            }
            DecodeInput::Message(PrefillMessage::Held { num_tokens })
                if num_tokens <= self.num_tokens && num_tokens.is_multiple_of(self.block_size) =>
            {
                actions.push(DecodeAction::Reserve { num_tokens });
                Ok(State::Reserving { total, num_tokens })
            }
            input => {
                refuse(input, ASKING, total, now, actions)?;
                Ok(State::Asking { total })
            }
        }
    }

    fn reserving<T>(
        self,
        total: Instant,
        num_tokens: usize,
        input: DecodeInput<T>,
        now: Instant,
        actions: &mut Vec<PrefixFetchAction>,
    ) -> Result<State, Abort> {
        match input {
            DecodeInput::Granted(grant) => {
                let num_blocks = num_tokens.div_ceil(self.block_size);
                let Some(incoming) = Incoming::new(&grant, num_blocks, self.num_layers) else {
                    return Err(refuse_grant(&grant, RESERVING, actions));
                };
                actions.push(DecodeAction::Send(DecodeMessage::Grant(grant)));
                let deadlines = Deadlines { total, stall: Some(now + self.limits.stall) };
                Ok(State::Receiving { deadlines, incoming })
            }
            input => {
                refuse(input, RESERVING, total, now, actions)?;
                Ok(State::Reserving { total, num_tokens })
            }
        }
    }

    fn receiving<T>(
        self,
        mut deadlines: Deadlines,
        mut incoming: Incoming,
        input: DecodeInput<T>,
        now: Instant,
        actions: &mut Vec<PrefixFetchAction>,
    ) -> Result<State, Abort> {
        match input {
            DecodeInput::Message(PrefillMessage::Written(written)) => {
                let pieces = incoming.note(written)?;
                if !pieces.is_empty() {
                    actions.push(DecodeAction::Verify(pieces));
                }
            }
            DecodeInput::Verified { num_pieces, result } => incoming.verified(num_pieces, result)?,
            DecodeInput::StreamClosed(_) if incoming.is_named() => {
                return Ok(State::Verifying { deadlines, incoming });
            }
            input => {
                refuse(input, RECEIVING, deadlines.next(), now, actions)?;
                return Ok(State::Receiving { deadlines, incoming });
            }
        }
        deadlines.stall = Some(now + self.limits.stall);
        match incoming.committed() {
            Some(committed) => {
                let generation = committed.generation;
                actions.push(DecodeAction::Send(DecodeMessage::Commit { generation }));
                Ok(commit(committed, actions))
            }
            None => Ok(State::Receiving { deadlines, incoming }),
        }
    }
}

fn verifying<T>(
    mut deadlines: Deadlines,
    mut incoming: Incoming,
    input: DecodeInput<T>,
    stall: Duration,
    now: Instant,
    actions: &mut Vec<PrefixFetchAction>,
) -> Result<State, Abort> {
    match verify_rest(&mut deadlines, &mut incoming, input, stall, now, actions)? {
        Some(committed) => Ok(commit(committed, actions)),
        None => Ok(State::Verifying { deadlines, incoming }),
    }
}

fn commit(committed: Committed, actions: &mut Vec<PrefixFetchAction>) -> State {
    actions.push(DecodeAction::Finish(Ok(committed)));
    actions.push(DecodeAction::Close);
    State::Over
}
