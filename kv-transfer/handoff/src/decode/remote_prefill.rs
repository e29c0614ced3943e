//! The decode side of a prompt that a prefill worker computes.
//!
//! ```text
//!   begin()
//!      | Begin
//!      v        Started             Granted                  all reported and verified,
//!   Queued -----------> Reserving -----------> Receiving --- first token known: Commit ---+
//!      |     (Reserve)      |       (Grant)        |  \                                   |
//!      |                    |                      |   stream closed, all reported:       |
//!      |                    |                      |   Verifying ---- all verified -------+
//!      |                    |                      |       |                              |
//!      +--------------------+----------------------+-------+                              |
//!      | failure, Cancel, deadline:                | stream closed:                       |
//!      | Revoke, Cancel, Finish(Err)               | Revoke, Finish(Err)                  |
//!      | the first token ends the request:         |                                      |
//!      | Revoke, Done, Finish(Ok)                  |                                      |
//!      v                                           v                                      v
//!   Stopping --- Stopped, stream closed, deadline ------------------------------------> Over
//! ```
//!
//! `Progress` before the first token restarts the total deadline: how long a prompt waits and is computed is bounded only
//! by the prefill worker's lack of progress. After the first token, progress of this worker does: how long this side waits for
//! blocks is bounded only by its own lack of progress. Then this worker is full, and the peer is not at fault. Written pieces
//! restart it, too: how long a slow link takes is bounded only by the stall deadline.

use std::time::{Duration, Instant};

use baton_request::{Failure, FailureKind};

use super::{
    ending::{Abort, Ending, PeerStream, RECEIVING, RESERVING, refuse_grant, unexpected},
    incoming::{Committed, Incoming},
    side::{DecodeAction, DecodeInput},
};
use crate::{
    deadlines::Deadlines,
    error::{HandoffError, Side},
    limits::Limits,
    message::{Begin, DecodeMessage, PrefillMessage},
};

/// An action of a [`RemotePrefill`].
pub type RemotePrefillAction<T> = DecodeAction<T, RemotePrefilled>;

/// The outcome of a successful remote prefill.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RemotePrefilled {
    /// All KV was received and verified: decode with it.
    Committed(Committed),
    /// The first token ended the request, so its KV is not needed.
    Ended,
}

impl RemotePrefilled {
    /// A word for metric labels.
    pub fn label(&self) -> &'static str {
        match self {
            RemotePrefilled::Committed(_) => "committed",
            RemotePrefilled::Ended => "finished",
        }
    }
}

impl From<Committed> for RemotePrefilled {
    fn from(committed: Committed) -> RemotePrefilled {
        RemotePrefilled::Committed(committed)
    }
}

/// The decode side of a prompt that a prefill worker computes. The module's documentation shows the states.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub struct RemotePrefill {
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
    /// From `Begin`, the last `Progress` or the last `Written` to the total deadline.
    deadline: Duration,
}

#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
enum State {
    /// The prompt waits in the prefill worker's queue.
    Queued {
        total: Instant,
    },
    /// The prefill worker computes the prompt. This side waits for free blocks.
    Reserving {
        total: Instant,
        has_first_token: bool,
    },
    /// The peer writes into the granted blocks.
    Receiving(Receiving),
    Ending(Ending),
}

#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
struct Receiving {
    deadlines: Deadlines,
    has_first_token: bool,
    incoming: Incoming,
}

const QUEUED: &str = "waiting for the prefill worker to start";
const COMPUTING: &str = "waiting for the first token";

impl RemotePrefill {
    /// Starts a handoff; the actions send `begin`. Its deadline counts from `now`.
    pub fn begin<T>(
        begin: Begin,
        num_layers: usize,
        limits: Limits,
        now: Instant,
    ) -> (RemotePrefill, Vec<RemotePrefillAction<T>>) {
        let params = Params {
            num_tokens: begin.num_tokens,
            block_size: begin.block_size,
            num_layers,
            limits,
            deadline: begin.deadline,
        };
        let state = State::Queued { total: now + begin.deadline };
        (RemotePrefill { params, state }, vec![DecodeAction::Send(DecodeMessage::Begin(begin))])
    }

    /// When [`DecodeInput::Tick`] is due; `None` when the handoff is over.
    pub fn deadline(&self) -> Option<Instant> {
        match &self.state {
            State::Queued { total } | State::Reserving { total, .. } => Some(*total),
            State::Receiving(receiving) => Some(receiving.deadlines.next()),
            State::Ending(ending) => ending.deadline(),
        }
    }

    /// Whether the handoff is over: `Close` was an action.
    pub fn is_over(&self) -> bool {
        matches!(self.state, State::Ending(Ending::Over))
    }

    /// Takes one input.
    pub fn on<T>(&mut self, input: DecodeInput<T>, now: Instant) -> Vec<RemotePrefillAction<T>> {
        let (params, mut actions) = (self.params, Vec::new());
        let next = match std::mem::replace(&mut self.state, State::Ending(Ending::Over)) {
            State::Queued { total } => params.queued(total, input, now, &mut actions),
            State::Reserving { total, has_first_token } => {
                params.reserving(total, has_first_token, input, now, &mut actions)
            }
            State::Receiving(receiving) => {
                let generation = receiving.incoming.generation();
                let next = params.receiving(receiving, input, now, &mut actions);
                next.map_err(|abort| abort.with_grant(generation))
            }
            State::Ending(ending) => Ok(State::Ending(ending.on(input, &params.limits, now, &mut actions))),
        };
        self.state =
            next.unwrap_or_else(|abort| State::Ending(abort.end(params.limits.stop, now, &mut actions)));
        actions
    }

    /// The first token, which was just forwarded, ends the request: its KV is not needed. Does nothing to a handoff that
    /// has ended.
    pub fn request_ended<T>(&mut self, now: Instant) -> Vec<RemotePrefillAction<T>> {
        let granted = match &self.state {
            State::Reserving { has_first_token: true, .. } => None,
            State::Receiving(receiving) if receiving.has_first_token => Some(receiving.incoming.generation()),
            _ => return Vec::new(),
        };
        self.state = State::Ending(Ending::Stopping { until: now + self.params.limits.stop, granted });
        let mut actions: Vec<_> = granted.map(DecodeAction::Revoke).into_iter().collect();
        actions.push(DecodeAction::Send(DecodeMessage::Done));
        actions.push(DecodeAction::Finish(Ok(RemotePrefilled::Ended)));
        actions
    }
}

impl Params {
    fn queued<T>(
        self,
        total: Instant,
        input: DecodeInput<T>,
        now: Instant,
        actions: &mut Vec<RemotePrefillAction<T>>,
    ) -> Result<State, Abort> {
        match input {
            DecodeInput::Message(PrefillMessage::Started) => {
                actions.push(DecodeAction::Reserve { num_tokens: self.num_tokens });
                Ok(State::Reserving { total, has_first_token: false })
            }
            DecodeInput::Message(PrefillMessage::Progress) => {
                Ok(State::Queued { total: now + self.deadline })
            }
            input => {
                unexpected(input, QUEUED, total, now, actions)?;
                Ok(State::Queued { total })
            }
        }
    }

    fn reserving<T>(
        self,
        total: Instant,
        has_first_token: bool,
        input: DecodeInput<T>,
        now: Instant,
        actions: &mut Vec<RemotePrefillAction<T>>,
    ) -> Result<State, Abort> {
        match input {
            DecodeInput::Message(PrefillMessage::Progress) if !has_first_token => {
                Ok(State::Reserving { total: now + self.deadline, has_first_token })
            }
            DecodeInput::Message(PrefillMessage::FirstToken(token)) if !has_first_token => {
                actions.push(DecodeAction::FirstToken(token));
                Ok(State::Reserving { total, has_first_token: true })
            }
            DecodeInput::Progress if has_first_token => {
                actions.push(DecodeAction::Send(DecodeMessage::Progress));
                Ok(State::Reserving { total: now + self.deadline, has_first_token })
            }
            DecodeInput::Tick if has_first_token && now >= total => {
                let what = "no blocks have become free, and this worker makes no progress";
                let failed = Failure::new(FailureKind::Full, what);
                Err(Abort::new(HandoffError::Refused { by: Side::Decode, failed }, PeerStream::Listening))
            }
            DecodeInput::Granted(grant) => {
                let num_blocks = self.num_tokens.div_ceil(self.block_size);
                let Some(incoming) = Incoming::new(&grant, num_blocks, self.num_layers) else {
                    return Err(refuse_grant(&grant, RESERVING, actions));
                };
                actions.push(DecodeAction::Send(DecodeMessage::Grant(grant)));
                let deadlines = Deadlines { total, stall: Some(now + self.limits.stall) };
                Ok(State::Receiving(Receiving { deadlines, has_first_token, incoming }))
            }
            input => {
                let doing = if has_first_token { RESERVING } else { COMPUTING };
                unexpected(input, doing, total, now, actions)?;
                Ok(State::Reserving { total, has_first_token })
            }
        }
    }

    fn receiving<T>(
        self,
        mut receiving: Receiving,
        input: DecodeInput<T>,
        now: Instant,
        actions: &mut Vec<RemotePrefillAction<T>>,
    ) -> Result<State, Abort> {
        let Receiving { deadlines, has_first_token, incoming } = &mut receiving;
        match input {
            DecodeInput::Message(PrefillMessage::Progress) if !*has_first_token => {
                deadlines.total = now + self.deadline;
            }
            DecodeInput::Message(PrefillMessage::FirstToken(token)) if !*has_first_token => {
                *has_first_token = true;
                actions.push(DecodeAction::FirstToken(token));
            }
            DecodeInput::Message(PrefillMessage::Written(written)) => {
                actions.extend(incoming.written(written)?.map(DecodeAction::Verify));
                deadlines.total = now + self.deadline;
            }
            DecodeInput::Verified { num_pieces, result } => incoming.verified(num_pieces, result)?,
            DecodeInput::StreamClosed(_) if *has_first_token && incoming.is_complete() => {
                let Receiving { deadlines, incoming, .. } = receiving;
                return Ok(State::Ending(Ending::Verifying { deadlines, incoming }));
            }
            input => {
                unexpected(input, RECEIVING, deadlines.next(), now, actions)?;
                return Ok(State::Receiving(receiving));
            }
        }
        deadlines.stall = Some(now + self.limits.stall);
        match incoming.committed().filter(|_| *has_first_token) {
            Some(committed) => Ok(State::Ending(Ending::commit(committed, actions))),
            None => Ok(State::Receiving(receiving)),
        }
    }
}
