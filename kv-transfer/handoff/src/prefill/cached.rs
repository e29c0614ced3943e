//! The prefill side of a prefix that is cached here.
//!
//! ```text
//! Opening, Fetch
//!      |
//!      v       Held                    all written
//!   Holding ----------> Writing --------------------> Committing
//!      |                   |  Grant: Route, then Push     |
//!      +-------------------+------------------------------+ Commit:
//!      | Cancel, failure, deadline, stream closed:        | Release
//!      v Stop, Finish(Err)                                v
//!   Stopping --- Idle: Stopped; deadline (Release) ----> Over
//! ```
//!
//! All pieces are ready once the blocks are held. A grant is accepted only then, because it must match the held blocks.

use std::time::Instant;

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

/// An action of a [`CachedHandoff`].
pub type CachedHandoffAction<T> = PrefillAction<T, ()>;

/// The prefill side of a prefix that is cached here. The module's documentation shows the states.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub struct CachedHandoff {
    own: OwnSide,
    limits: Limits,
    state: State,
}

#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
enum State {
    /// The engine looks up the cached blocks of the sequence.
    Holding {
        total: Instant,
        block_map: BlockMap,
    },
    /// The held blocks are pushed.
    Writing {
        total: Instant,
        delivery: Delivery,
    },
    /// Every piece is written. The decode side verifies.
    Committing(Committing),
    /// The outcome is known; the route ends.
    Stopping(Stopping),
    Over,
}

const HOLDING: &str = "looking for the prefix";
const WRITING: &str = "writing the prefix";

impl CachedHandoff {
    pub(super) fn new(begin: &Begin, own: OwnSide, limits: Limits, now: Instant) -> CachedHandoff {
        let total = now + begin.deadline.min(limits.total);
        let block_map = BlockMap::new(begin.num_tokens, own.block_size, begin.block_size, own.num_layers);
        CachedHandoff { own, limits, state: State::Holding { total, block_map } }
    }

    /// When [`PrefillInput::Tick`] is due; `None` when the handoff is over.
    pub fn deadline(&self) -> Option<Instant> {
        match &self.state {
            State::Holding { total, .. } => Some(*total),
            State::Writing { total, delivery } => {
                Some(Deadlines { total: *total, stall: delivery.stall() }.next())
            }
            State::Committing(committing) => Some(committing.deadlines.next()),
            State::Stopping(stopping) => Some(stopping.until),
            State::Over => None,
        }
    }

    /// Whether the handoff is over: `Close` was an action.
    pub fn is_over(&self) -> bool {
        matches!(self.state, State::Over)
    }

    /// Records the blocks of this worker that hold the front of the sequence. They are full and cached and do not change.
    /// The list may be empty.
    pub fn held<T>(&mut self, blocks: &[BlockId], now: Instant) -> Vec<CachedHandoffAction<T>> {
        let mut actions = Vec::new();
        self.state = match std::mem::replace(&mut self.state, State::Over) {
            State::Holding { total, block_map } => {
                // The peer gets only full blocks of its own.
                let block_map = block_map.truncated(blocks.len());
                let num_tokens = block_map.num_tokens();
                actions.push(PrefillAction::Send(PrefillMessage::Held { num_tokens }));
                let num_blocks = num_tokens.div_ceil(self.own.block_size);
                let mut delivery = Delivery::new(block_map, self.limits.stall);
                let layers = 0..self.own.num_layers;
                match delivery.ready(layers, 0, &blocks[..num_blocks], now, &mut actions) {
                    Ok(()) => State::Writing { total, delivery },
                    Err(failure) => self.stopped(failure, now, &mut actions),
                }
            }
            unchanged => unchanged,
        };
        actions
    }

    /// Takes one input.
    pub fn on<T>(&mut self, input: PrefillInput, now: Instant) -> Vec<CachedHandoffAction<T>> {
        let mut actions = Vec::new();
        let next = match std::mem::replace(&mut self.state, State::Over) {
            State::Holding { total, block_map } => {
                unexpected(input, HOLDING, total, now).map(|()| State::Holding { total, block_map })
            }
            State::Writing { total, delivery } => writing(total, delivery, input, now, &mut actions),
            State::Committing(state) => committing(state, input, now, &mut actions),
            State::Stopping(stopping) => {
                Ok(stopping.on(input, now, &mut actions).map_or(State::Over, State::Stopping))
            }
            State::Over => Ok(State::Over),
        };
        self.state = next.unwrap_or_else(|failure| self.stopped(failure, now, &mut actions));
        actions
    }

    fn stopped<T>(&self, failure: Abort, now: Instant, actions: &mut Vec<CachedHandoffAction<T>>) -> State {
        State::Stopping(failure.stop(self.limits.stop, now, actions))
    }
}

fn writing<T>(
    total: Instant,
    mut delivery: Delivery,
    input: PrefillInput,
    now: Instant,
    actions: &mut Vec<CachedHandoffAction<T>>,
) -> Result<State, Abort> {
    if let Some(input) = delivery.on(input, now, actions)? {
        unexpected(input, WRITING, Deadlines { total, stall: delivery.stall() }.next(), now)?;
    }
    Ok(delivery.committing(total, now).map_or(State::Writing { total, delivery }, State::Committing))
}

fn committing<T>(
    committing: Committing,
    input: PrefillInput,
    now: Instant,
    actions: &mut Vec<CachedHandoffAction<T>>,
) -> Result<State, Abort> {
    match input {
        PrefillInput::Message(DecodeMessage::Commit { generation })
            if generation == committing.generation =>
        {
            actions.push(PrefillAction::Finish(Ok(())));
            release(actions);
            Ok(State::Over)
        }
        input => {
            unexpected(input, COMMITTING, committing.deadlines.next(), now)?;
            Ok(State::Committing(committing))
        }
    }
}
