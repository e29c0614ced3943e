//! The decode worker's side of a handoff.
//!
//! ```text
//!   begin()
//!      | Begin
//!      v        Started             Granted                  all verified, last named,
//!   Queued -----------> Reserving -----------> Receiving --- first token known: Commit ---+
//!      |     (Reserve)      |       (Grant)        |                                      |
//!      +--------------------+----------------------+                                      |
//!      | anything wrong, Cancel, deadline:         | stream closed:                       |
//!      | Revoke, Cancel, Finish(Err)               | Revoke, Finish(Err)                  |
//!      v                                           v                                      v
//!   Stopping --- Stopped, stream closed, deadline ------------------------------------> Over
//! ```
//!
//! `Progress`, before the first token, lets the deadline count anew: how long a prompt waits and is computed is bounded
//! only by the prefill worker's standing still.
//!
//! A stream that closes when everything has been said ends nothing: what is left is this side's to verify.
//!
//! Of [`Extent::Cached`] `Held` is said for `Started`, and no token comes. Then the blocks that are reserved are those
//! of the tokens that the peer holds.
//!
//! The machine does not wait for fences: `Revoke` hands the blocks to the data plane, which gives
//! them back when no writer can reach them. `Stopping` only keeps the stream open a little, so that
//! the peer can say `Stopped` and the data plane is told.

use std::time::{Duration, Instant};

use crate::{
    Limits,
    access::Generation,
    error::{HandoffError, KvFault, Side},
    message::{Begin, DecodeMessage, Extent, Failed, Grant, PrefillMessage, Written},
    piece::Piece,
    pieces::{Insert, PieceSet},
    transport::TransportKind,
};

/// What happened.
#[derive(Clone, Debug)]
pub enum Input<T> {
    /// From the prefill worker.
    Message(PrefillMessage<T>),
    /// The stream ended or broke, for this reason.
    StreamClosed(String),
    /// Answer to [`Action::Reserve`]: blocks are set aside and the data plane lets them be written.
    /// Welcome at any time; too late, it is answered with [`Action::Revoke`].
    Granted(Grant),
    /// Answer to [`Action::Reserve`]: there will be no blocks.
    ReserveFailed(Failed),
    /// Answer to one [`Action::Verify`].
    Verified {
        /// How many pieces it named.
        num_pieces: usize,
        /// Whether all of them are right.
        result: Result<(), KvFault>,
    },
    /// Nobody wants the result any more.
    Cancel(String),
    /// Nothing but time: to be given when [`DecodeHandoff::deadline`] has passed.
    Tick,
}

/// What is to be done, in this order.
#[derive(Clone, Debug, PartialEq)]
pub enum Action<T> {
    /// Send to the prefill worker.
    Send(DecodeMessage),
    /// Set blocks aside for so many tokens, make a grant of them, answer [`Input::Granted`]. Give up at `Finish`.
    Reserve {
        /// Of the sequence, from its front.
        num_tokens: usize,
    },
    /// Pass the first token on. Before `Finish(Ok)`, once, if the whole sequence is handed over.
    FirstToken(T),
    /// Compare checksums with the blocks' memory, answer [`Input::Verified`].
    Verify(Vec<Piece>),
    /// Take the grant back; the blocks return when the data plane has fenced them.
    Revoke(Generation),
    /// The peer says that it writes no more: tell the data plane.
    WriterStopped(Generation),
    /// The outcome, once. When good, take the blocks out of the grant, and decode or cache them.
    Finish(Result<Committed, HandoffError>),
    /// Drop the stream. Nothing more will come out but `Revoke` for a late `Granted`.
    Close,
}

/// A handoff that went well.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Committed {
    /// The grant whose blocks hold the verified KV.
    pub generation: Generation,
    /// What carried it; `None` when every block was cached.
    pub transport: Option<TransportKind>,
    /// Bytes that moved.
    pub bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Queued,
    Reserving,
    Receiving,
    Stopping,
    Over,
}

/// The decode worker's side of one handoff. See the module's picture.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub struct DecodeHandoff {
    state: State,
    extent: Extent,
    num_tokens: usize,
    block_size: usize,
    num_layers: usize,
    limits: Limits,
    /// From `Begin` or the last `Progress` to `total`.
    deadline: Duration,
    total: Instant,
    /// The deadline of the state, when it has one of its own.
    patience: Option<Instant>,
    transfer: Option<Transfer>,
    has_first_token: bool,
    /// The stream has closed, after everything was said.
    is_peer_gone: bool,
}

/// What is known of the KV since the grant.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
struct Transfer {
    generation: Generation,
    named: PieceSet,
    num_unverified: usize,
    last: bool,
    transport: Option<TransportKind>,
    bytes: u64,
}

impl DecodeHandoff {
    /// Starts a handoff; the actions send `begin`. Its deadline counts from `now`.
    pub fn begin<T>(
        begin: Begin,
        num_layers: usize,
        limits: Limits,
        now: Instant,
    ) -> (DecodeHandoff, Vec<Action<T>>) {
        let handoff = DecodeHandoff {
            state: State::Queued,
            extent: begin.extent,
            num_tokens: begin.num_tokens,
            block_size: begin.block_size,
            num_layers,
            limits,
            deadline: begin.deadline,
            total: now + begin.deadline,
            patience: None,
            transfer: None,
            has_first_token: false,
            is_peer_gone: false,
        };
        (handoff, vec![Action::Send(DecodeMessage::Begin(begin))])
    }

    /// When [`Input::Tick`] is due; `None` when the handoff is over.
    pub fn deadline(&self) -> Option<Instant> {
        match self.state {
            State::Over => None,
            State::Stopping => self.patience,
            _ => Some(self.patience.map_or(self.total, |patience| patience.min(self.total))),
        }
    }

    /// Whether `Close` has been said.
    pub fn is_over(&self) -> bool {
        self.state == State::Over
    }

    /// Takes one input.
    pub fn on<T>(&mut self, input: Input<T>, now: Instant) -> Vec<Action<T>> {
        let mut actions = Vec::new();
        match self.state {
            State::Queued | State::Reserving | State::Receiving => {
                if let Err((error, peer)) = self.advance(input, now, &mut actions) {
                    self.fail(error, peer, now, &mut actions);
                }
            }
            State::Stopping => self.stop(input, now, &mut actions),
            State::Over => {
                if let Input::Granted(grant) = input {
                    actions.push(Action::Revoke(grant.generation));
                }
            }
        }
        actions
    }

    fn advance<T>(
        &mut self,
        input: Input<T>,
        now: Instant,
        actions: &mut Vec<Action<T>>,
    ) -> Result<(), (HandoffError, Peer)> {
        use PrefillMessage as M;
        match input {
            Input::Message(M::Started) if self.state == State::Queued && self.extent == Extent::Whole => {
                self.reserve(actions);
            }
            Input::Message(M::Held { num_tokens })
                if self.state == State::Queued
                    && self.extent == Extent::Cached
                    && num_tokens <= self.num_tokens
                    && num_tokens.is_multiple_of(self.block_size) =>
            {
                if num_tokens == 0 {
                    return Err((HandoffError::NotCached, Peer::Listens));
                }
                self.num_tokens = num_tokens;
                self.reserve(actions);
            }
            Input::Message(M::Progress) if self.extent == Extent::Whole && !self.has_first_token => {
                self.total = now + self.deadline;
                self.progress(now);
            }
            Input::Message(M::FirstToken(token))
                if self.state != State::Queued && self.extent == Extent::Whole && !self.has_first_token =>
            {
                self.has_first_token = true;
                self.progress(now);
                actions.push(Action::FirstToken(token));
                self.try_commit(actions);
            }
            Input::Message(M::Written(written)) if self.state == State::Receiving => {
                self.progress(now);
                let pieces = self.note(written).map_err(|fault| (fault.into(), Peer::Listens))?;
                if !pieces.is_empty() {
                    actions.push(Action::Verify(pieces));
                }
                self.try_commit(actions);
            }
            Input::Message(M::Failed(failed)) => {
                return Err((HandoffError::Refused { by: Side::Prefill, failed }, Peer::Stops));
            }
            Input::Message(message) => {
                let what = format!("{} while {}", name(&message), self.state.doing());
                return Err((HandoffError::PrefillLost(what), Peer::Listens));
            }
            Input::StreamClosed(_) if self.has_heard_all() => self.is_peer_gone = true,
            Input::StreamClosed(why) => return Err((HandoffError::PrefillLost(why), Peer::Gone)),
            Input::Granted(grant) => self.grant(grant, now, actions)?,
            Input::ReserveFailed(failed) => {
                return Err((HandoffError::Refused { by: Side::Decode, failed }, Peer::Listens));
            }
            Input::Verified { num_pieces, result } => {
                result.map_err(|fault| (fault.into(), Peer::Listens))?;
                let transfer = self.transfer.as_mut().expect("only a granted transfer is verified");
                transfer.num_unverified -= num_pieces;
                self.progress(now);
                self.try_commit(actions);
            }
            Input::Cancel(why) => return Err((HandoffError::Cancelled(why), Peer::Listens)),
            Input::Tick => {
                if self.deadline().is_some_and(|deadline| now >= deadline) {
                    return Err((HandoffError::Deadline { state: self.state.doing() }, Peer::Listens));
                }
            }
        }
        Ok(())
    }

    fn reserve<T>(&mut self, actions: &mut Vec<Action<T>>) {
        self.state = State::Reserving;
        actions.push(Action::Reserve { num_tokens: self.num_tokens });
    }

    fn grant<T>(
        &mut self,
        grant: Grant,
        now: Instant,
        actions: &mut Vec<Action<T>>,
    ) -> Result<(), (HandoffError, Peer)> {
        let num_blocks = self.num_tokens.div_ceil(self.block_size);
        if self.state != State::Reserving || grant.num_cached_blocks + grant.block_ids.len() != num_blocks {
            actions.push(Action::Revoke(grant.generation));
            let what = format!(
                "grant of {} + {} blocks for a sequence of {}, while {}",
                grant.num_cached_blocks,
                grant.block_ids.len(),
                num_blocks,
                self.state.doing()
            );
            let failed = Failed::new(crate::message::FailureKind::Internal, what);
            return Err((HandoffError::Refused { by: Side::Decode, failed }, Peer::Listens));
        }
        self.state = State::Receiving;
        self.transfer = Some(Transfer {
            generation: grant.generation,
            named: PieceSet::new(grant.block_ids.len(), self.num_layers),
            num_unverified: 0,
            last: false,
            transport: None,
            bytes: 0,
        });
        self.progress(now);
        actions.push(Action::Send(DecodeMessage::Grant(grant)));
        Ok(())
    }

    /// Notes what is written and returns what is to be verified.
    fn note(&mut self, written: Written) -> Result<Vec<Piece>, KvFault> {
        let transfer = self.transfer.as_mut().expect("Receiving has a transfer");
        if written.generation != transfer.generation {
            return Err(KvFault::WrongGeneration);
        }
        for &Piece { block_idx, layer_idx, .. } in &written.pieces {
            match transfer.named.insert(block_idx as usize, layer_idx as usize) {
                Insert::New => {}
                Insert::Present => return Err(KvFault::DuplicatePiece { block_idx, layer_idx }),
                Insert::OutOfRange => return Err(KvFault::UnknownPiece { block_idx, layer_idx }),
            }
        }
        if written.last && !transfer.named.is_full() {
            return Err(KvFault::MissingPieces { missing: transfer.named.num_missing() });
        }
        transfer.last |= written.last;
        transfer.num_unverified += written.pieces.len();
        if !written.pieces.is_empty() {
            transfer.transport = Some(written.transport);
            // The peer's word, for people.
            transfer.bytes = transfer.bytes.saturating_add(written.bytes);
        }
        Ok(written.pieces)
    }

    /// Whether the peer has nothing more to say.
    fn has_heard_all(&self) -> bool {
        let has_token = self.has_first_token || self.extent == Extent::Cached;
        has_token && self.transfer.as_ref().is_some_and(|transfer| transfer.last)
    }

    fn try_commit<T>(&mut self, actions: &mut Vec<Action<T>>) {
        let Some(transfer) = self.transfer.as_ref().filter(|_| self.has_heard_all()) else { return };
        if transfer.num_unverified > 0 {
            return;
        }
        debug_assert!(transfer.named.is_full());
        let generation = transfer.generation;
        let committed = Committed { generation, transport: transfer.transport, bytes: transfer.bytes };
        if !self.is_peer_gone {
            actions.push(Action::Send(DecodeMessage::Commit { generation }));
        }
        actions.push(Action::Finish(Ok(committed)));
        actions.push(Action::Close);
        self.state = State::Over;
    }

    fn fail<T>(&mut self, error: HandoffError, peer: Peer, now: Instant, actions: &mut Vec<Action<T>>) {
        if let Some(transfer) = &self.transfer {
            actions.push(Action::Revoke(transfer.generation));
        }
        let peer = if self.is_peer_gone { Peer::Gone } else { peer };
        if peer == Peer::Listens {
            actions.push(Action::Send(DecodeMessage::Cancel { reason: error.to_string() }));
        }
        actions.push(Action::Finish(Err(error)));
        if peer == Peer::Gone {
            actions.push(Action::Close);
            self.state = State::Over;
        } else {
            self.state = State::Stopping;
            self.patience = Some(now + self.limits.stop);
        }
    }

    fn stop<T>(&mut self, input: Input<T>, now: Instant, actions: &mut Vec<Action<T>>) {
        match input {
            Input::Granted(grant) => actions.push(Action::Revoke(grant.generation)),
            Input::Message(PrefillMessage::Stopped) => {
                if let Some(transfer) = &self.transfer {
                    actions.push(Action::WriterStopped(transfer.generation));
                }
                self.close(actions);
            }
            Input::StreamClosed(_) => self.close(actions),
            Input::Tick if self.patience.is_some_and(|patience| now >= patience) => self.close(actions),
            // What the peer sent before it heard of the end.
            _ => {}
        }
    }

    fn close<T>(&mut self, actions: &mut Vec<Action<T>>) {
        actions.push(Action::Close);
        self.state = State::Over;
    }

    fn progress(&mut self, now: Instant) {
        if self.state == State::Receiving {
            self.patience = Some(now + self.limits.stall);
        }
    }
}

/// What is left of the peer when a handoff fails.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Peer {
    /// It must be told.
    Listens,
    /// It ended the handoff itself, and will say when it has stopped.
    Stops,
    /// The stream is closed.
    Gone,
}

impl State {
    fn doing(self) -> &'static str {
        match self {
            State::Queued => "waiting for the prefill worker to start",
            State::Reserving => "waiting for free blocks",
            State::Receiving => "receiving kv",
            State::Stopping => "stopping",
            State::Over => "over",
        }
    }
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
