//! The decode side of a prompt that a prefill worker computes.
//!
//! ```text
//!   begin()
//!      | Begin
//!      v        Started             Granted                  all verified, last named,
//!   Queued -----------> Reserving -----------> Receiving --- first token known: Commit ---+
//!      |     (Reserve)      |       (Grant)        |  \                                   |
//!      |                    |                      |   stream closed, all said:           |
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
//! by the prefill worker's lack of progress.

use std::time::{Duration, Instant};

use super::{
    incoming::{Committed, Incoming},
    side::{
        Abort, DecodeAction, DecodeInput, RECEIVING, RESERVING, Stopping, on_after_end, refuse, refuse_grant,
        verify_rest,
    },
};
use crate::{
    access::Generation,
    deadlines::Deadlines,
    limits::Limits,
    message::{Begin, DecodeMessage, PrefillMessage},
};

/// What the driver of a [`RemotePrefill`] must do.
pub type RemotePrefillAction<T> = DecodeAction<T, RemotePrefilled>;

/// A remote prefill that ended well.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RemotePrefilled {
    /// The KV is here: decode on it.
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

/// The decode side of a prompt that a prefill worker computes. See the module's picture.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub struct RemotePrefill {
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
    /// From `Begin` or the last `Progress` to the total deadline.
    deadline: Duration,
}

#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
enum State {
    /// The prompt waits in the prefill worker's queue.
    Queued {
        total: Instant,
    },
    /// The prompt is computed, and this side waits for free blocks.
    Reserving {
        total: Instant,
        has_first_token: bool,
    },
    /// The peer writes into the granted blocks.
    Receiving(Receiving),
    /// The peer has said everything and closed the stream; this side verifies the rest.
    Verifying {
        deadlines: Deadlines,
        incoming: Incoming,
    },
    /// The outcome is known; the peer has not stopped yet.
    Stopping(Stopping),
    Over,
}

#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
struct Receiving {
    deadlines: Deadlines,
    has_first_token: bool,
    incoming: Incoming,
}

const QUEUED: &str = "waiting for the prefill worker to start";

impl RemotePrefill {
    /// Starts a handoff; the actions send `begin`. Its deadline counts from `now`.
    pub fn begin<T>(
        begin: Begin,
        num_layers: usize,
        limits: Limits,
        now: Instant,
    ) -> (RemotePrefill, Vec<RemotePrefillAction<T>>) {
        let terms = Terms {
            num_tokens: begin.num_tokens,
            block_size: begin.block_size,
            num_layers,
            limits,
            deadline: begin.deadline,
        };
        let state = State::Queued { total: now + begin.deadline };
        (RemotePrefill { terms, state }, vec![DecodeAction::Send(DecodeMessage::Begin(begin))])
    }

    /// When [`DecodeInput::Tick`] is due; `None` when the handoff is over.
    pub fn deadline(&self) -> Option<Instant> {
        match &self.state {
            State::Queued { total } | State::Reserving { total, .. } => Some(*total),
            State::Receiving(Receiving { deadlines, .. }) | State::Verifying { deadlines, .. } => {
                Some(deadlines.next())
            }
            State::Stopping(stopping) => Some(stopping.until),
            State::Over => None,
        }
    }

    /// Whether `Close` was an action.
    pub fn is_over(&self) -> bool {
        matches!(self.state, State::Over)
    }

    /// Takes one input.
    pub fn on<T>(&mut self, input: DecodeInput<T>, now: Instant) -> Vec<RemotePrefillAction<T>> {
        let (terms, mut actions) = (self.terms, Vec::new());
        let next = match std::mem::replace(&mut self.state, State::Over) {
            State::Queued { total } => terms.queued(total, input, now, &mut actions),
            State::Reserving { total, has_first_token } => {
                terms.reserving(total, has_first_token, input, now, &mut actions)
            }
            State::Receiving(receiving) => {
                let granted = receiving.incoming.generation();
                let next = terms.receiving(receiving, input, now, &mut actions);
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

    /// The first token, which was just passed on, ends the request: its KV is not needed. Does nothing to a handoff that has
    /// ended.
    pub fn request_ended<T>(&mut self, now: Instant) -> Vec<RemotePrefillAction<T>> {
        let mut actions = Vec::new();
        let done = |granted: Option<Generation>, actions: &mut Vec<_>| {
            actions.extend(granted.map(DecodeAction::Revoke));
            actions.push(DecodeAction::Send(DecodeMessage::Done));
            actions.push(DecodeAction::Finish(Ok(RemotePrefilled::Ended)));
            State::Stopping(Stopping { until: now + self.terms.limits.stop, granted })
        };
        self.state = match std::mem::replace(&mut self.state, State::Over) {
            State::Reserving { has_first_token: true, .. } => done(None, &mut actions),
            State::Receiving(receiving) if receiving.has_first_token => {
                done(Some(receiving.incoming.generation()), &mut actions)
            }
            ended => ended,
        };
        actions
    }
}

impl State {
    fn ended(stopping: Option<Stopping>) -> State {
        stopping.map_or(State::Over, State::Stopping)
    }
}

impl Terms {
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
                refuse(input, QUEUED, total, now, actions)?;
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
                refuse(input, RESERVING, total, now, actions)?;
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
                let pieces = incoming.note(written)?;
                if !pieces.is_empty() {
                    actions.push(DecodeAction::Verify(pieces));
                }
            }
            DecodeInput::Verified { num_pieces, result } => incoming.verified(num_pieces, result)?,
            DecodeInput::StreamClosed(_) if *has_first_token && incoming.is_named() => {
                let Receiving { deadlines, incoming, .. } = receiving;
                return Ok(State::Verifying { deadlines, incoming });
            }
            input => {
                refuse(input, RECEIVING, deadlines.next(), now, actions)?;
                return Ok(State::Receiving(receiving));
            }
        }
        deadlines.stall = Some(now + self.limits.stall);
        match incoming.committed().filter(|_| *has_first_token) {
            Some(committed) => {
                let generation = committed.generation;
                actions.push(DecodeAction::Send(DecodeMessage::Commit { generation }));
                Ok(commit(committed, actions))
            }
            None => Ok(State::Receiving(receiving)),
        }
    }
}

fn verifying<T>(
    mut deadlines: Deadlines,
    mut incoming: Incoming,
    input: DecodeInput<T>,
    stall: Duration,
    now: Instant,
    actions: &mut Vec<RemotePrefillAction<T>>,
) -> Result<State, Abort> {
    match verify_rest(&mut deadlines, &mut incoming, input, stall, now, actions)? {
        Some(committed) => Ok(commit(committed, actions)),
        None => Ok(State::Verifying { deadlines, incoming }),
    }
}

fn commit<T>(committed: Committed, actions: &mut Vec<RemotePrefillAction<T>>) -> State {
    actions.push(DecodeAction::Finish(Ok(RemotePrefilled::Committed(committed))));
    actions.push(DecodeAction::Close);
    State::Over
}
