//! The prefill worker's side of a handoff.
//!
//! ```text
//!   new()
//!      |
//!      v       Begin            Started                       all written and first token sent
//!   Opening ---------> Queued ----------> Computing ---------------------------> Committing
//!      |     (Compute)    |                   |  Grant: Route, then Push as pieces     |
//!      |                  |                   |  become ready; those of before are kept| Commit:
//!      |                  +-------------------+----------------------------------------+ Release
//!      | anything wrong: Failed, Finish(Err)  | Cancel, Failed, deadline, stream closed:|
//!      |                                      v Stop, Finish(Err)                       |
//!      |                                   Stopping --- idle: Stopped; deadline ---+    |
//!      v                                                                 (Release) v    v
//!      +-----------------------------------------------------------------------> Over
//! ```
//!
//! Of [`Extent::Cached`] `Hold` is done for `Compute`, and answered by `Held`: everything is ready with that, and no
//! token comes. A grant is taken only then, since it must fit what is held.
//!
//! As long as the engine computes, before the first token, the deadline counts anew (`Progress`): a long queue or prompt
//! is no fault.
//!
//! `Stop` ends the computation and closes the route; `Idle` says that no thread reads the blocks
//! any more. The blocks' guard travels with the route, so that `Release` is safe even when the
//! deadline of `Stopping` passes first: the memory stays until the route is idle.

use std::{
    collections::VecDeque,
    ops::Range,
    time::{Duration, Instant},
};

use baton_kv_layout::BlockId;

use crate::{
    Limits,
    access::{AccessKey, Generation},
    error::{HandoffError, PushError, RouteError, Side},
    message::{Begin, DecodeMessage, Extent, Failed, FailureKind, Grant, PrefillMessage, Written},
    piece::{PieceWrite, Pushed},
    sides::Sides,
    transport::TransportOffer,
};

/// Pushes under way at a time: enough to keep every stream of a route busy. What becomes ready
/// meanwhile is gathered into the next push.
const MAX_PUSHES: usize = 4;
/// Pieces of one push: bounds the size of a `Written`.
const MAX_PUSH_PIECES: usize = 1024;

/// What happened.
#[derive(Clone, Debug)]
pub enum Input<T> {
    /// From the decode worker.
    Message(DecodeMessage),
    /// The stream ended or broke, for this reason.
    StreamClosed(String),
    /// The engine has computed something, for whomever.
    Progress,
    /// The engine has scheduled the request.
    Started,
    /// Answer to [`Action::Hold`]: these blocks at the front of the sequence are full and cached, and stay as they are.
    Held {
        /// This worker's; perhaps none.
        blocks: Vec<BlockId>,
    },
    /// These blocks of the sequence, this worker's, hold final KV of these layers.
    Ready {
        /// Decoder layers.
        layers: Range<usize>,
        /// Position in the sequence of the first of `blocks`.
        first_block_idx: usize,
        /// The engine's blocks.
        blocks: Vec<BlockId>,
    },
    /// The engine has sampled.
    FirstToken(T),
    /// The engine or the service gives up.
    Fail(Failed),
    /// Answer to [`Action::Route`].
    Routed(Result<(), RouteError>),
    /// Answer to one [`Action::Push`], in any order.
    Pushed(Result<Pushed, PushError>),
    /// Answer to [`Action::Stop`]: the computation is dropped and the route is closed and idle.
    Idle,
    /// Nothing but time: to be given when [`PrefillHandoff::deadline`] has passed.
    Tick,
}

/// What is to be done, in this order.
#[derive(Clone, Debug, PartialEq)]
pub enum Action<T> {
    /// Give the request to the engine, answer with `Started`, `Ready`, `FirstToken` or `Fail`.
    Compute,
    /// Take hold of what is cached of the sequence, answer with `Held` or `Fail`.
    Hold,
    /// Open a route to the granted blocks (the blocks' guard goes with it), answer [`Input::Routed`].
    Route {
        /// What the grant's writer shows.
        access_key: AccessKey,
        /// Ways, best first.
        offers: Vec<TransportOffer>,
    },
    /// Write these over the route, answer [`Input::Pushed`].
    Push(Vec<PieceWrite>),
    /// Send to the decode worker.
    Send(PrefillMessage<T>),
    /// The outcome, once.
    Finish(Result<(), HandoffError>),
    /// Drop the computation, close the route, answer [`Input::Idle`]. No push follows.
    Stop,
    /// Drop the blocks and the route. Once, if `Compute` or `Hold` was said.
    Release,
    /// Drop the stream. The last action.
    Close,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Opening,
    Queued,
    Computing,
    Committing,
    Stopping,
    Over,
}

/// The prefill worker's side of one handoff. See the module's picture.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub struct PrefillHandoff {
    state: State,
    incarnation: u64,
    block_size: usize,
    num_layers: usize,
    limits: Limits,
    /// From `Begin` to `total`; a quarter more from the last `Progress`.
    deadline: Duration,
    total: Instant,
    /// The deadline of the state, when it has one of its own.
    patience: Option<Instant>,
    extent: Extent,
    /// The sequence, as far as it is handed over, in the blocks of both workers; from `Begin` on.
    sides: Sides,
    /// Pieces to be pushed: layer, and the peer's block as counted in the sequence.
    waiting: VecDeque<(usize, usize)>,
    grant: Option<Granted>,
    has_first_token: bool,
    is_peer_listening: bool,
}

#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
struct Granted {
    generation: Generation,
    num_cached_blocks: usize,
    block_ids: Vec<BlockId>,
    is_routed: bool,
    num_pushing: usize,
    num_unwritten: usize,
}

impl PrefillHandoff {
    /// A stream has opened. `incarnation`, `block_size` and `num_layers` are this worker's. Until `Begin` comes,
    /// `limits.stall` bounds the wait.
    pub fn new(
        incarnation: u64,
        block_size: usize,
        num_layers: usize,
        limits: Limits,
        now: Instant,
    ) -> PrefillHandoff {
        PrefillHandoff {
            state: State::Opening,
            incarnation,
            block_size,
            num_layers,
            limits,
            deadline: limits.total,
            total: now + limits.total,
            patience: Some(now + limits.stall),
            extent: Extent::Whole,
            sides: Sides::new(0, block_size, block_size, num_layers),
            waiting: VecDeque::new(),
            grant: None,
            has_first_token: false,
            is_peer_listening: true,
        }
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
            State::Opening | State::Queued | State::Computing | State::Committing => {
                if let Err(error) = self.advance(input, now, &mut actions) {
                    self.fail(error, now, &mut actions);
                }
            }
            State::Stopping => self.stop(input, now, &mut actions),
            State::Over => {}
        }
        actions
    }

    fn advance<T>(
        &mut self,
        input: Input<T>,
        now: Instant,
        actions: &mut Vec<Action<T>>,
    ) -> Result<(), HandoffError> {
        use DecodeMessage as M;
        match input {
            Input::Message(M::Begin(begin)) if self.state == State::Opening => {
                self.begin(begin, now, actions)?;
            }
            Input::Message(M::Grant(grant)) if self.takes_grant() => {
                self.route(grant, now, actions)?;
            }
            Input::Message(M::Commit { generation })
                if self.state == State::Committing
                    && self.grant.as_ref().is_some_and(|grant| grant.generation == generation) =>
            {
                actions.push(Action::Finish(Ok(())));
                self.close(actions);
            }
            Input::Message(M::Cancel { reason }) => return Err(HandoffError::Cancelled(reason)),
            Input::Message(message) => {
                let what = format!("{} while {}", name(&message), self.state.doing());
                return Err(HandoffError::DecodeLost(what));
            }
            Input::StreamClosed(why) => {
                self.is_peer_listening = false;
                return Err(HandoffError::DecodeLost(why));
            }
            Input::Progress => {
                let is_waiting = matches!(self.state, State::Queued | State::Computing);
                if is_waiting && self.extent == Extent::Whole && !self.has_first_token {
                    // The decode worker counts from when it hears of it, and is to give up first.
                    self.total = now + self.deadline + self.deadline / 4;
                    actions.push(Action::Send(PrefillMessage::Progress));
                }
            }
            Input::Started => {
                if self.state == State::Queued {
                    self.state = State::Computing;
                    actions.push(Action::Send(PrefillMessage::Started));
                }
            }
            Input::Held { blocks } => {
                if self.state == State::Queued {
                    self.state = State::Computing;
                    self.held(&blocks, actions)?;
                }
            }
            Input::Ready { layers, first_block_idx, blocks } => {
                self.ready(layers, first_block_idx, &blocks)?;
                self.push(false, now, actions);
            }
            Input::FirstToken(token) => {
                self.has_first_token = true;
                actions.push(Action::Send(PrefillMessage::FirstToken(token)));
                self.finish_writing(now);
            }
            Input::Fail(failed) => return Err(HandoffError::Refused { by: Side::Prefill, failed }),
            Input::Routed(result) => {
                result.map_err(|error| HandoffError::TransferFailed(error.to_string()))?;
                self.granted().is_routed = true;
                self.push(true, now, actions);
                self.nothing_to_write(actions);
                self.finish_writing(now);
            }
            Input::Pushed(result) => {
                let pushed = result.map_err(|error| HandoffError::TransferFailed(error.to_string()))?;
                self.written(pushed, actions);
                self.push(true, now, actions);
                self.finish_writing(now);
            }
            // Nothing was told to stop.
            Input::Idle => {}
            Input::Tick => {
                if self.deadline().is_some_and(|deadline| now >= deadline) {
                    return Err(HandoffError::Deadline { state: self.state.doing() });
                }
            }
        }
        Ok(())
    }

    fn begin<T>(
        &mut self,
        begin: Begin,
        now: Instant,
        actions: &mut Vec<Action<T>>,
    ) -> Result<(), HandoffError> {
        if begin.prefill_incarnation != self.incarnation {
            let what = format!(
                "this is incarnation {:x} of the prefill worker, not {:x}",
                self.incarnation, begin.prefill_incarnation
            );
            let failed = Failed::new(FailureKind::PrefillLost, what);
            return Err(HandoffError::Refused { by: Side::Prefill, failed });
        }
        self.state = State::Queued;
        self.sides = Sides::new(begin.num_tokens, self.block_size, begin.block_size, self.num_layers);
        self.deadline = begin.deadline.min(self.limits.total);
        self.total = now + self.deadline;
        self.patience = None;
        self.extent = begin.extent;
        actions.push(match begin.extent {
            Extent::Whole => Action::Compute,
            Extent::Cached => Action::Hold,
        });
        Ok(())
    }

    fn takes_grant(&self) -> bool {
        let is_known = match self.extent {
            Extent::Whole => self.state != State::Opening,
            Extent::Cached => self.state == State::Computing,
        };
        is_known && self.grant.is_none()
    }

    /// Cuts the sequence to the peer's blocks that these cover.
    fn held<T>(&mut self, blocks: &[BlockId], actions: &mut Vec<Action<T>>) -> Result<(), HandoffError> {
        self.sides = self.sides.cut(blocks.len());
        let num_tokens = self.sides.num_tokens();
        actions.push(Action::Send(PrefillMessage::Held { num_tokens }));
        let num_blocks = num_tokens.div_ceil(self.block_size);
        self.ready(0..self.num_layers, 0, &blocks[..num_blocks])
    }

    fn route<T>(
        &mut self,
        grant: Grant,
        now: Instant,
        actions: &mut Vec<Action<T>>,
    ) -> Result<(), HandoffError> {
        let num_blocks = self.sides.num_peer_blocks();
        if grant.num_cached_blocks.checked_add(grant.block_ids.len()) != Some(num_blocks) {
            let what = format!(
                "grant of {} + {} blocks for a sequence of {num_blocks}",
                grant.num_cached_blocks,
                grant.block_ids.len(),
            );
            return Err(HandoffError::DecodeLost(what));
        }
        let access_key = grant.access_key();
        let Grant { generation, num_cached_blocks, block_ids, offers, .. } = grant;
        self.waiting.retain(|&(_, block_idx)| block_idx >= num_cached_blocks);
        let num_unwritten = block_ids.len() * self.num_layers;
        self.grant = Some(Granted {
            generation,
            num_cached_blocks,
            block_ids,
            is_routed: false,
            num_pushing: 0,
            num_unwritten,
        });
        self.patience = Some(now + self.limits.stall);
        actions.push(Action::Route { access_key, offers });
        Ok(())
    }

    fn ready(
        &mut self,
        layers: Range<usize>,
        first_block_idx: usize,
        blocks: &[BlockId],
    ) -> Result<(), HandoffError> {
        let num_cached_blocks = self.grant.as_ref().map_or(0, |grant| grant.num_cached_blocks);
        for layer_idx in layers {
            for (block_idx, &block) in (first_block_idx..).zip(blocks) {
                let Some(complete) = self.sides.complete(block_idx, layer_idx, block) else {
                    let what = format!("engine finished piece {block_idx}/{layer_idx} of no such block");
                    let failed = Failed::new(FailureKind::Internal, what);
                    return Err(HandoffError::Refused { by: Side::Prefill, failed });
                };
                let uncached = complete.start.max(num_cached_blocks)..complete.end;
                self.waiting.extend(uncached.map(|block_idx| (layer_idx, block_idx)));
            }
        }
        Ok(())
    }

    /// Pushes what is ready, as far as the route has room. `progress`: something has moved.
    fn push<T>(&mut self, progress: bool, now: Instant, actions: &mut Vec<Action<T>>) {
        let Some(grant) = self.grant.as_mut().filter(|grant| grant.is_routed) else { return };
        if self.state == State::Committing {
            return;
        }
        while grant.num_pushing < MAX_PUSHES && !self.waiting.is_empty() {
            let num_pieces = self.waiting.len().min(MAX_PUSH_PIECES);
            let pieces = self.waiting.drain(..num_pieces).map(|(layer_idx, seq_idx)| {
                let block_idx = seq_idx - grant.num_cached_blocks;
                PieceWrite {
                    layer_idx: layer_idx as u32,
                    block_idx: block_idx as u32,
                    src: self.sides.source(seq_idx),
                    dst: grant.block_ids[block_idx],
                }
            });
            actions.push(Action::Push(pieces.collect()));
            grant.num_pushing += 1;
        }
        if grant.num_pushing == 0 {
            // Nothing moves while the engine computes: only the total deadline bounds that.
            self.patience = None;
        } else if progress || self.patience.is_none() {
            self.patience = Some(now + self.limits.stall);
        }
    }

    fn written<T>(&mut self, pushed: Pushed, actions: &mut Vec<Action<T>>) {
        let grant = self.granted();
        grant.num_pushing -= 1;
        grant.num_unwritten -= pushed.pieces.len();
        let written = Written {
            generation: grant.generation,
            transport: pushed.transport,
            pieces: pushed.pieces,
            last: grant.num_unwritten == 0,
            bytes: pushed.bytes,
        };
        actions.push(Action::Send(PrefillMessage::Written(written)));
    }

    /// The decode worker has every block already: says so.
    fn nothing_to_write<T>(&mut self, actions: &mut Vec<Action<T>>) {
        let grant = self.granted();
        if grant.num_unwritten > 0 {
            return;
        }
        let written = Written {
            generation: grant.generation,
            transport: crate::TransportKind::Tcp,
            pieces: Vec::new(),
            last: true,
            bytes: 0,
        };
        actions.push(Action::Send(PrefillMessage::Written(written)));
    }

    fn finish_writing(&mut self, now: Instant) {
        let is_written = self.grant.as_ref().is_some_and(|grant| grant.is_routed && grant.num_unwritten == 0);
        let has_token = self.has_first_token || self.extent == Extent::Cached;
        if self.state == State::Computing && has_token && is_written {
            self.state = State::Committing;
            self.patience = Some(now + self.limits.stall);
        }
    }

    fn granted(&mut self) -> &mut Granted {
        self.grant.as_mut().expect("routes and pushes come after the grant")
    }

    fn fail<T>(&mut self, error: HandoffError, now: Instant, actions: &mut Vec<Action<T>>) {
        let is_cancelled = matches!(error, HandoffError::Cancelled(_));
        if self.is_peer_listening && !is_cancelled {
            let message = match &error {
                HandoffError::Refused { failed, .. } => failed.message.clone(),
                error => error.to_string(),
            };
            actions.push(Action::Send(PrefillMessage::Failed(Failed { kind: error.kind(), message })));
        }
        actions.push(Action::Finish(Err(error)));
        if self.state == State::Opening {
            // Nothing was begun, so nothing is to be stopped.
            if self.is_peer_listening {
                actions.push(Action::Send(PrefillMessage::Stopped));
            }
            actions.push(Action::Close);
            self.state = State::Over;
        } else {
            actions.push(Action::Stop);
            self.waiting.clear();
            self.state = State::Stopping;
            self.patience = Some(now + self.limits.stop);
        }
    }

    fn stop<T>(&mut self, input: Input<T>, now: Instant, actions: &mut Vec<Action<T>>) {
        match input {
            Input::Idle => {
                if self.is_peer_listening {
                    actions.push(Action::Send(PrefillMessage::Stopped));
                }
                self.close(actions);
            }
            Input::StreamClosed(_) => self.is_peer_listening = false,
            Input::Tick if self.patience.is_some_and(|patience| now >= patience) => self.close(actions),
            // What was under way when the end came.
            _ => {}
        }
    }

    fn close<T>(&mut self, actions: &mut Vec<Action<T>>) {
        actions.push(Action::Release);
        actions.push(Action::Close);
        self.state = State::Over;
    }
}

impl State {
    fn doing(self) -> &'static str {
        match self {
            State::Opening => "waiting for Begin",
            State::Queued => "queued",
            State::Computing => "computing and writing",
            State::Committing => "waiting for the commit",
            State::Stopping => "stopping",
            State::Over => "over",
        }
    }
}

fn name(message: &DecodeMessage) -> &'static str {
    match message {
        DecodeMessage::Begin(_) => "Begin",
        DecodeMessage::Grant(_) => "Grant",
        DecodeMessage::Commit { .. } => "Commit",
        DecodeMessage::Cancel { .. } => "Cancel",
    }
}
