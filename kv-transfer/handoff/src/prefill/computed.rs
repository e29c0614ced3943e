//! The prefill side of a prompt that is computed here.
//!
//! ```text
//! Opening, Begin
//!      |
//!      v       Started                        all written and first token sent
//!   Queued ----------> Computing --------------------------------> Committing
//!      |                   |  Grant: Route, then Push as pieces        |
//!      |                   |  become ready; earlier ones are kept      | Commit:
//!      +-------------------+-------------------------------------------+ Release
//!      | Cancel, failure, deadline, stream closed: Stop, Finish(Err)   |
//!      | Done, after the first token: Stop, Finish(Ok)                 |
//!      v                                                               v
//!   Stopping --- Idle: Stopped; deadline --- (Release) -----------> Over
//! ```
//!
//! While the engine computes, before the first token, `Progress` restarts the total deadline: a long queue or a long
//! prompt is not a fault. After it, `Progress` of the decode worker does, which waits for blocks of its own. Written pieces
//! restart it, too: a slow link is not a fault.

use std::{
    ops::Range,
    time::{Duration, Instant},
};

use baton_kv_layout::BlockId;

use super::{
    delivery::Delivery,
    side::{
        Abort, COMMITTING, Committing, OwnSide, PrefillAction, PrefillInput, Stopping, release, unexpected,
    },
};
use crate::{
    block_map::BlockMap,
    deadlines::Deadlines,
    limits::Limits,
    message::{Begin, DecodeMessage, PrefillMessage},
};

/// An action of a [`ComputedHandoff`].
pub type ComputedHandoffAction<T> = PrefillAction<T, HandedOver>;

/// The outcome of a successful computed handoff.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandedOver {
    /// The decode worker has verified all KV.
    Committed,
    /// The first token ended the request, so its KV was not needed.
    Ended,
}

impl HandedOver {
    /// A word for metric labels.
    pub fn label(self) -> &'static str {
        match self {
            HandedOver::Committed => "committed",
            HandedOver::Ended => "finished",
        }
    }
}

/// An input: an event of the engine, the stream, the data plane or the clock.
#[derive(Clone, Debug)]
pub enum ComputeInput<T> {
    /// The engine has computed something, for any request, or a prefix is still brought in.
    Progress,
    /// The engine has scheduled the request.
    Started,
    /// These blocks of this worker hold final KV of these layers.
    Ready {
        /// Decoder layers.
        layers: Range<usize>,
        /// Position in the sequence of the first of `blocks`.
        first_block_idx: usize,
        /// The engine's blocks.
        blocks: Vec<BlockId>,
    },
    /// The engine has sampled the first token.
    FirstToken(T),
    /// From the stream, the data plane or the clock.
    Other(PrefillInput),
}

/// The prefill side of a prompt that is computed here. The module's documentation shows the states.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub struct ComputedHandoff {
    limits: Limits,
    state: State,
}

#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
enum State {
    /// The engine has not scheduled the request.
    Queued(Work),
    /// The engine computes. Final pieces are pushed.
    Computing(Work),
    /// Every piece is written and reported. The decode worker verifies.
    Committing(Committing),
    /// The outcome is known; the computation and the route end.
    Stopping(Stopping),
    Over,
}

#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
struct Work {
    /// Time from `Begin` to `total`. From the last progress, it is a quarter longer.
    deadline: Duration,
    total: Instant,
    has_first_token: bool,
    delivery: Delivery,
}

const QUEUED: &str = "queued";
const COMPUTING: &str = "computing and writing";

impl ComputedHandoff {
    pub(super) fn new(begin: &Begin, own: OwnSide, limits: Limits, now: Instant) -> ComputedHandoff {
        let deadline = begin.deadline.min(limits.total);
        let block_map = BlockMap::new(begin.num_tokens, own.block_size, begin.block_size, own.num_layers);
        let delivery = Delivery::new(block_map, limits.stall);
        let work = Work { deadline, total: now + deadline, has_first_token: false, delivery };
        ComputedHandoff { limits, state: State::Queued(work) }
    }

    /// When [`PrefillInput::Tick`] is due; `None` when the handoff is over.
    pub fn deadline(&self) -> Option<Instant> {
        match &self.state {
            State::Queued(work) | State::Computing(work) => Some(work.deadlines().next()),
            State::Committing(committing) => Some(committing.deadlines.next()),
            State::Stopping(stopping) => Some(stopping.until),
            State::Over => None,
        }
    }

    /// Whether the handoff is over: `Close` was an action.
    pub fn is_over(&self) -> bool {
        matches!(self.state, State::Over)
    }

    /// Takes one input.
    pub fn on<T>(&mut self, input: ComputeInput<T>, now: Instant) -> Vec<ComputedHandoffAction<T>> {
        let (stop, mut actions) = (self.limits.stop, Vec::new());
        let next = match std::mem::replace(&mut self.state, State::Over) {
            State::Queued(work) => queued(work, input, stop, now, &mut actions),
            State::Computing(work) => computing(work, input, stop, now, &mut actions),
            State::Committing(state) => committing(state, input, stop, now, &mut actions),
            State::Stopping(stopping) => Ok(match input {
                ComputeInput::Other(input) => State::ended(stopping.on(input, now, &mut actions)),
                _ => State::Stopping(stopping),
            }),
            State::Over => Ok(State::Over),
        };
        self.state = next.unwrap_or_else(|failure| State::Stopping(failure.stop(stop, now, &mut actions)));
        actions
    }
}

impl State {
    fn ended(stopping: Option<Stopping>) -> State {
        stopping.map_or(State::Over, State::Stopping)
    }
}

fn queued<T>(
    mut work: Work,
    input: ComputeInput<T>,
    stop: Duration,
    now: Instant,
    actions: &mut Vec<ComputedHandoffAction<T>>,
) -> Result<State, Abort> {
    let input = match input {
        ComputeInput::Started => {
            actions.push(PrefillAction::Send(PrefillMessage::Started));
            return Ok(State::Computing(work));
        }
        // A grant answers `Started`. Before, there may be no blocks that a route could guard.
        ComputeInput::Other(input @ PrefillInput::Message(DecodeMessage::Grant(_))) => {
            unexpected(input, QUEUED, work.deadlines().next(), now)?;
            return Ok(State::Queued(work));
        }
        input => input,
    };
    if let Some(stopping) = work.on(input, QUEUED, stop, now, actions)? {
        return Ok(State::Stopping(stopping));
    }
    Ok(State::Queued(work))
}

fn computing<T>(
    mut work: Work,
    input: ComputeInput<T>,
    stop: Duration,
    now: Instant,
    actions: &mut Vec<ComputedHandoffAction<T>>,
) -> Result<State, Abort> {
    if let Some(stopping) = work.on(input, COMPUTING, stop, now, actions)? {
        return Ok(State::Stopping(stopping));
    }
    let committing = if work.has_first_token { work.delivery.committing(work.total, now) } else { None };
    Ok(committing.map_or(State::Computing(work), State::Committing))
}

fn committing<T>(
    committing: Committing,
    input: ComputeInput<T>,
    stop: Duration,
    now: Instant,
    actions: &mut Vec<ComputedHandoffAction<T>>,
) -> Result<State, Abort> {
    // The engine has finished. What it computes for other requests does not matter here.
    let ComputeInput::Other(input) = input else { return Ok(State::Committing(committing)) };
    match input {
        PrefillInput::Message(DecodeMessage::Commit { generation })
            if generation == committing.generation =>
        {
            actions.push(PrefillAction::Finish(Ok(HandedOver::Committed)));
            release(actions);
            Ok(State::Over)
        }
        PrefillInput::Message(DecodeMessage::Done) => Ok(State::Stopping(done(stop, now, actions))),
        input => {
            unexpected(input, COMMITTING, committing.deadlines.next(), now)?;
            Ok(State::Committing(committing))
        }
    }
}

/// The decode worker needs nothing but the first token.
fn done<T>(stop: Duration, now: Instant, actions: &mut Vec<ComputedHandoffAction<T>>) -> Stopping {
    actions.extend([PrefillAction::Finish(Ok(HandedOver::Ended)), PrefillAction::Stop]);
    Stopping { until: now + stop, is_peer_listening: true }
}

impl Work {
    fn deadlines(&self) -> Deadlines {
        Deadlines { total: self.total, stall: self.delivery.stall() }
    }

    /// Takes the inputs that `Queued` and `Computing` share. Returns the stop when the request has ended.
    fn on<T>(
        &mut self,
        input: ComputeInput<T>,
        doing: &'static str,
        stop: Duration,
        now: Instant,
        actions: &mut Vec<ComputedHandoffAction<T>>,
    ) -> Result<Option<Stopping>, Abort> {
        match input {
            ComputeInput::Progress if !self.has_first_token => {
                self.restart(now);
                actions.push(PrefillAction::Send(PrefillMessage::Progress));
            }
            ComputeInput::Other(PrefillInput::Message(DecodeMessage::Progress)) if self.has_first_token => {
                self.restart(now);
            }
            ComputeInput::Progress | ComputeInput::Started => {}
            ComputeInput::Ready { layers, first_block_idx, blocks } => {
                self.delivery.ready(layers, first_block_idx, &blocks, now, actions)?;
            }
            ComputeInput::FirstToken(token) => {
                self.has_first_token = true;
                actions.push(PrefillAction::Send(PrefillMessage::FirstToken(token)));
            }
            ComputeInput::Other(PrefillInput::Message(DecodeMessage::Done)) if self.has_first_token => {
                return Ok(Some(done(stop, now, actions)));
            }
            ComputeInput::Other(input) => {
                if let PrefillInput::Pushed(Ok(_)) = &input {
                    self.restart(now);
                }
                if let Some(input) = self.delivery.on(input, now, actions)? {
                    unexpected(input, doing, self.deadlines().next(), now)?;
                }
            }
        }
        Ok(None)
    }

    /// A side has reported progress, or pieces were written. The decode worker may count from when it receives this, and it must give up first.
    fn restart(&mut self, now: Instant) {
        self.total = now + self.deadline + self.deadline / 4;
    }
}
