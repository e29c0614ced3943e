//! The decode side of a prefix that another worker has cached.
//!
//! ```text
//!   begin()
//!      | Fetch
//!      v       Held                Granted                  all reported and verified:
//!   Asking -----------> Reserving -----------> Receiving --- Commit ----------------------+
//!      |     (Reserve)      |       (Grant)        |  \  stream closed, all reported:     |
//!      |                    |                      |   Verifying ---- all verified -------+
//!      +--------------------+----------------------+-------+                              |
//!      | nothing held, failure, Cancel, deadline:  | stream closed:                       |
//!      | Revoke, Cancel, Finish(Err)               | Revoke, Finish(Err)                  |
//!      v                                           v                                      v
//!   Stopping --- Stopped, stream closed, deadline ------------------------------------> Over
//! ```
//!
//! The peer computes nothing: there is neither a first token nor `Progress`. This side reserves blocks only for the tokens
//! that the peer holds.

use std::{convert::Infallible, time::Instant};

use super::{
    ending::{Abort, Ending, PeerStream, RECEIVING, RESERVING, refuse_grant, unexpected},
    incoming::{Committed, Incoming},
    side::{DecodeAction, DecodeInput},
};
use crate::{
    deadlines::Deadlines,
    error::HandoffError,
    limits::Limits,
    message::{Begin, DecodeMessage, PrefillMessage},
};

/// An action of a [`PrefixFetch`]: there is no first token.
pub type PrefixFetchAction = DecodeAction<Infallible, Committed>;

/// The decode side of a prefix that another worker has cached. The module's documentation shows the states.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub struct PrefixFetch {
    params: Params,
    state: State,
}

/// What stays the same during a handoff.
#[derive(Clone, Copy, Debug)]
struct Params {
    num_tokens: usize,
    block_size: usize,
    num_layers: usize,
    limits: Limits,
}

#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
enum State {
    /// The peer looks up the prefix in its cache.
    Asking {
        total: Instant,
    },
    /// The peer holds `num_tokens` tokens. This side waits for free blocks.
    Reserving {
        total: Instant,
        num_tokens: usize,
    },
    /// The peer writes into the granted blocks.
    Receiving {
        deadlines: Deadlines,
        incoming: Incoming,
    },
    Ending(Ending),
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
        let params = Params { num_tokens, block_size, num_layers, limits };
        let state = State::Asking { total: now + begin.deadline };
        (PrefixFetch { params, state }, vec![DecodeAction::Send(DecodeMessage::Fetch(begin))])
    }

    /// When [`DecodeInput::Tick`] is due; `None` when the handoff is over.
    pub fn deadline(&self) -> Option<Instant> {
        match &self.state {
            State::Asking { total } | State::Reserving { total, .. } => Some(*total),
            State::Receiving { deadlines, .. } => Some(deadlines.next()),
            State::Ending(ending) => ending.deadline(),
        }
    }

    /// Whether the handoff is over: `Close` was an action.
    pub fn is_over(&self) -> bool {
        matches!(self.state, State::Ending(Ending::Over))
    }

    /// Takes one input.
    pub fn on<T>(&mut self, input: DecodeInput<T>, now: Instant) -> Vec<PrefixFetchAction> {
        let (params, mut actions) = (self.params, Vec::new());
        let next = match std::mem::replace(&mut self.state, State::Ending(Ending::Over)) {
            State::Asking { total } => params.asking(total, input, now, &mut actions),
            State::Reserving { total, num_tokens } => {
                params.reserving(total, num_tokens, input, now, &mut actions)
            }
            State::Receiving { deadlines, incoming } => {
                let generation = incoming.generation();
                let next = params.receiving(deadlines, incoming, input, now, &mut actions);
                next.map_err(|abort| abort.with_grant(generation))
            }
            State::Ending(ending) => Ok(State::Ending(ending.on(input, &params.limits, now, &mut actions))),
        };
        self.state =
            next.unwrap_or_else(|abort| State::Ending(abort.end(params.limits.stop, now, &mut actions)));
        actions
    }
}

impl Params {
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
                unexpected(input, ASKING, total, now, actions)?;
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
                unexpected(input, RESERVING, total, now, actions)?;
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
                actions.extend(incoming.written(written)?.map(DecodeAction::Verify));
            }
            DecodeInput::Verified { num_pieces, result } => incoming.verified(num_pieces, result)?,
            DecodeInput::StreamClosed(_) if incoming.is_complete() => {
                return Ok(State::Ending(Ending::Verifying { deadlines, incoming }));
            }
            input => {
                unexpected(input, RECEIVING, deadlines.next(), now, actions)?;
                return Ok(State::Receiving { deadlines, incoming });
            }
        }
        deadlines.stall = Some(now + self.limits.stall);
        match incoming.committed() {
            Some(committed) => Ok(State::Ending(Ending::commit(committed, actions))),
            None => Ok(State::Receiving { deadlines, incoming }),
        }
    }
}
