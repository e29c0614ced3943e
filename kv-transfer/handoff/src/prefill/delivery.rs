//! The delivery of KV into the peer's blocks: which pieces are ready, where they go, and which were pushed. Both
//! machines of the prefill side use it while they write.

use std::{
    collections::VecDeque,
    fmt::Display,
    ops::Range,
    time::{Duration, Instant},
};

use baton_kv_layout::BlockId;
use baton_request::{Failure, FailureKind};

use super::side::{Abort, Committing, PrefillAction, PrefillInput};
use crate::{
    access::Generation,
    block_map::BlockMap,
    deadlines::Deadlines,
    error::{HandoffError, PushError, RouteError, Side},
    message::{DecodeMessage, Grant, PrefillMessage, Written},
    piece::{PieceWrite, Pushed},
};

/// Most pushes in flight: enough to keep every stream of a route busy. Pieces that become ready meanwhile are gathered
/// into the next push.
const MAX_PUSHES: usize = 4;
/// Pieces of one push: bounds the size of a `Written`.
const MAX_PUSH_PIECES: usize = 1024;

/// How long the reason for a revoked grant may take after the data plane's report. The decode side sends both at once.
const REASON_TIMEOUT: Duration = Duration::from_secs(1);

/// The pieces of one handoff.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(super) struct Delivery {
    block_map: BlockMap,
    /// Pieces to be pushed: layer, and the peer's block as counted in the sequence.
    waiting: VecDeque<(usize, usize)>,
    destination: Destination,
    stall: Duration,
}

#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
enum Destination {
    /// The peer has granted nothing yet.
    Ungranted,
    /// A route is being opened, until then at most.
    Routing(Granted, Instant),
    Open(Route),
    /// The data plane reported that the grant is revoked. The decode side sends the reason on the stream, which may arrive
    /// later.
    Revoked {
        /// Without a reason by this time, the transfer has failed.
        until: Instant,
        error: HandoffError,
    },
}

#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
struct Granted {
    generation: Generation,
    num_cached_blocks: usize,
    block_ids: Vec<BlockId>,
    num_unwritten: usize,
}

#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
struct Route {
    granted: Granted,
    num_pushing: usize,
    /// When the route must next have made progress. `None` while nothing is pushed, for example while the engine
    /// computes.
    stall: Option<Instant>,
}

impl Delivery {
    /// Nothing is ready. `stall` bounds how long a route or a push may make no progress.
    pub(super) fn new(block_map: BlockMap, stall: Duration) -> Delivery {
        Delivery { block_map, waiting: VecDeque::new(), destination: Destination::Ungranted, stall }
    }

    /// When KV must next have moved. `None` while none is expected to move.
    pub(super) fn stall(&self) -> Option<Instant> {
        match &self.destination {
            Destination::Ungranted => None,
            Destination::Routing(_, until) => Some(*until),
            Destination::Open(route) => route.stall,
            Destination::Revoked { until, .. } => Some(*until),
        }
    }

    /// Takes the input about the grant and the route, and returns all other input.
    pub(super) fn on<T, E>(
        &mut self,
        input: PrefillInput,
        now: Instant,
        actions: &mut Vec<PrefillAction<T, E>>,
    ) -> Result<Option<PrefillInput>, Abort> {
        let is_revoked = matches!(self.destination, Destination::Revoked { .. });
        match input {
            PrefillInput::Message(DecodeMessage::Grant(grant))
                if matches!(self.destination, Destination::Ungranted) =>
            {
                self.route(grant, now, actions)?;
            }
            // Other pushes of the same route.
            PrefillInput::Pushed(_) if is_revoked => {}
            PrefillInput::Routed(Err(error @ RouteError::OtherIncarnation(_))) => self.revoked(&error, now),
            PrefillInput::Pushed(Err(error @ PushError::Revoked)) => self.revoked(&error, now),
            PrefillInput::Tick => {
                if let Destination::Revoked { until, error } = &self.destination
                    && now >= *until
                {
                    return Err(error.clone().into());
                }
                return Ok(Some(PrefillInput::Tick));
            }
            PrefillInput::Routed(result) => {
                result.map_err(|error| HandoffError::TransferFailed(error.to_string()))?;
                self.routed(now, actions);
            }
            PrefillInput::Pushed(result) => {
                let pushed = result.map_err(|error| HandoffError::TransferFailed(error.to_string()))?;
                self.pushed(pushed, now, actions);
            }
            input => return Ok(Some(input)),
        }
        Ok(None)
    }

    fn route<T, E>(
        &mut self,
        grant: Grant,
        now: Instant,
        actions: &mut Vec<PrefillAction<T, E>>,
    ) -> Result<(), Abort> {
        let num_blocks = self.block_map.num_peer_blocks();
        if grant.num_cached_blocks.checked_add(grant.block_ids.len()) != Some(num_blocks) {
            let what = format!(
                "grant of {} + {} blocks for a sequence of {num_blocks}",
                grant.num_cached_blocks,
                grant.block_ids.len(),
            );
            return Err(HandoffError::DecodeLost(what).into());
        }
        let access_key = grant.access_key();
        let Grant { generation, num_cached_blocks, block_ids, offers, .. } = grant;
        self.waiting.retain(|&(_, block_idx)| block_idx >= num_cached_blocks);
        let num_unwritten = block_ids.len() * self.block_map.num_layers();
        let granted = Granted { generation, num_cached_blocks, block_ids, num_unwritten };
        self.destination = Destination::Routing(granted, now + self.stall);
        actions.push(PrefillAction::Route { access_key, offers });
        Ok(())
    }

    /// This may be no failure: the peer may want no KV any more.
    fn revoked(&mut self, error: &impl Display, now: Instant) {
        let error = HandoffError::TransferFailed(error.to_string());
        self.destination = Destination::Revoked { until: now + REASON_TIMEOUT, error };
    }

    fn routed<T, E>(&mut self, now: Instant, actions: &mut Vec<PrefillAction<T, E>>) {
        self.destination = match std::mem::replace(&mut self.destination, Destination::Ungranted) {
            Destination::Routing(granted, _) => {
                Destination::Open(Route { granted, num_pushing: 0, stall: None })
            }
            unchanged => unchanged,
        };
        self.push(true, now, actions);
        // If the peer has every block already, it is told that nothing follows.
        if let Destination::Open(Route { granted, .. }) = &self.destination
            && granted.num_unwritten == 0
        {
            let written = Written { generation: granted.generation, pushed: None, last: true };
            actions.push(PrefillAction::Send(PrefillMessage::Written(written)));
        }
    }

    fn pushed<T, E>(&mut self, pushed: Pushed, now: Instant, actions: &mut Vec<PrefillAction<T, E>>) {
        let Destination::Open(route) = &mut self.destination else { return };
        route.num_pushing -= 1;
        route.granted.num_unwritten -= pushed.pieces.len();
        let written = Written {
            generation: route.granted.generation,
            pushed: Some(pushed),
            last: route.granted.num_unwritten == 0,
        };
        actions.push(PrefillAction::Send(PrefillMessage::Written(written)));
        self.push(true, now, actions);
    }

    /// Notes that these blocks of this worker hold final KV of these layers. Pushes the peer's pieces that are complete
    /// now.
    pub(super) fn ready<T, E>(
        &mut self,
        layers: Range<usize>,
        first_block_idx: usize,
        blocks: &[BlockId],
        now: Instant,
        actions: &mut Vec<PrefillAction<T, E>>,
    ) -> Result<(), Abort> {
        let num_cached_blocks = match &self.destination {
            Destination::Ungranted | Destination::Revoked { .. } => 0,
            Destination::Routing(granted, _) | Destination::Open(Route { granted, .. }) => {
                granted.num_cached_blocks
            }
        };
        for layer_idx in layers {
            for (block_idx, &block) in (first_block_idx..).zip(blocks) {
                let Some(complete) = self.block_map.set_ready(block_idx, layer_idx, block) else {
                    let what = format!("engine finished piece {block_idx}/{layer_idx} of no such block");
                    let failed = Failure::new(FailureKind::Internal, what);
                    return Err(HandoffError::Refused { by: Side::Prefill, failed }.into());
                };
                let uncached = complete.start.max(num_cached_blocks)..complete.end;
                self.waiting.extend(uncached.map(|block_idx| (layer_idx, block_idx)));
            }
        }
        self.push(false, now, actions);
        Ok(())
    }

    /// Pushes ready pieces, as many as the route has room for.
    fn push<T, E>(&mut self, has_moved: bool, now: Instant, actions: &mut Vec<PrefillAction<T, E>>) {
        let Destination::Open(route) = &mut self.destination else { return };
        let granted = &route.granted;
        while route.num_pushing < MAX_PUSHES && !self.waiting.is_empty() {
            let num_pieces = self.waiting.len().min(MAX_PUSH_PIECES);
            let pieces = self.waiting.drain(..num_pieces).map(|(layer_idx, seq_idx)| {
                let block_idx = seq_idx - granted.num_cached_blocks;
                PieceWrite {
                    layer_idx: layer_idx as u32,
                    block_idx: block_idx as u32,
                    src: self.block_map.source(seq_idx),
                    dst: granted.block_ids[block_idx],
                }
            });
            actions.push(PrefillAction::Push(pieces.collect()));
            route.num_pushing += 1;
        }
        if route.num_pushing == 0 {
            // Nothing moves while the engine computes: only the total deadline bounds that.
            route.stall = None;
        } else if has_moved || route.stall.is_none() {
            route.stall = Some(now + self.stall);
        }
    }

    /// The state after every piece is written: waiting for the commit. `None` before.
    pub(super) fn committing(&self, total: Instant, now: Instant) -> Option<Committing> {
        match &self.destination {
            Destination::Open(Route { granted, .. }) if granted.num_unwritten == 0 => Some(Committing {
                generation: granted.generation,
                deadlines: Deadlines { total, stall: Some(now + self.stall) },
            }),
            _ => None,
        }
    }
}
