//! A route: one handoff's way to granted blocks, and what is under way on it.

use std::{
    future::Future,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use baton_kv_cache::BlockStorage;
use tokio::sync::{oneshot, watch};

use super::{Peer, SenderContext};
use crate::{
    error::PushError,
    message::{Generation, Piece, PieceWrite, TransportKind},
};

/// Pieces that lie in the granted blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pushed {
    /// Which, and their checksums.
    pub pieces: Vec<Piece>,
    /// What carried them.
    pub transport: TransportKind,
    /// Their bytes.
    pub bytes: u64,
}

/// One handoff's way to granted blocks. Dropping it closes it.
pub struct Route {
    state: Arc<RouteState>,
    peer: Arc<dyn Peer>,
}

impl Route {
    pub(super) fn new(state: Arc<RouteState>, peer: Arc<dyn Peer>) -> Route {
        Route { state, peer }
    }

    /// What carries it.
    pub fn transport(&self) -> TransportKind {
        self.state.kind
    }

    /// Writes pieces, on the sender's own threads; resolves when the receiver's blocks hold them.
    /// Dropping the future does not stop the writing; closing the route does.
    ///
    /// # Errors
    /// When one of the pieces could not be written; some of the others may have been.
    pub fn push(
        &self,
        pieces: Vec<PieceWrite>,
    ) -> impl Future<Output = Result<Pushed, PushError>> + Send + use<> {
        let (reply, answer) = oneshot::channel();
        let layout = self.state.storage().layout();
        let num_per_frame = (self.state.context.config.frame_bytes / layout.layer_bytes()).clamp(1, 256);
        let push = Arc::new(Push {
            route: Arc::clone(&self.state),
            progress: Mutex::new(Progress {
                num_frames: pieces.len().div_ceil(num_per_frame),
                pieces: Vec::with_capacity(pieces.len()),
                reply: Some(reply),
            }),
        });
        if let Some(piece) = pieces.iter().find(|piece| !self.state.has(piece)) {
            push.fail(PushError::Refused(format!("no such piece here: {}/{}", piece.src, piece.layer_idx)));
        } else if pieces.is_empty() {
            push.add(Vec::new());
        } else {
            self.send(&push, &pieces, num_per_frame);
        }
        async { answer.await.unwrap_or(Err(PushError::Closed)) }
    }

    fn send(&self, push: &Arc<Push>, pieces: &[PieceWrite], num_per_frame: usize) {
        for pieces in pieces.chunks(num_per_frame) {
            self.peer.push(Frame { push: Arc::clone(push), pieces: pieces.to_vec(), num_tries: 0 });
        }
    }

    /// Stops writing; resolves when no thread touches the blocks of either side for this route.
    /// The guard given to [`Sender::route`](super::Sender::route) has been dropped then.
    pub fn close(self) -> impl Future<Output = ()> + Send {
        let mut active = self.state.num_active.subscribe();
        let state = Arc::clone(&self.state);
        drop(self);
        async move {
            // The sender half lives in `state`.
            let _ = active.wait_for(|&num_active| num_active == 0).await;
            drop(state.take_keep());
        }
    }
}

impl Drop for Route {
    fn drop(&mut self) {
        self.state.shut();
        self.peer.retire(&self.state);
    }
}

/// What the threads of a peer see of a route.
pub(crate) struct RouteState {
    generation: Generation,
    kind: TransportKind,
    context: Arc<SenderContext>,
    is_closed: Mutex<bool>,
    /// Threads, or frames on the wire, that use the blocks.
    num_active: watch::Sender<usize>,
    keep: Mutex<Box<dyn Send>>,
}

impl RouteState {
    pub(super) fn new(
        generation: Generation,
        kind: TransportKind,
        context: Arc<SenderContext>,
        keep: Box<dyn Send>,
    ) -> Arc<RouteState> {
        Arc::new(RouteState {
            generation,
            kind,
            context,
            is_closed: Mutex::new(false),
            num_active: watch::Sender::new(0),
            keep: Mutex::new(keep),
        })
    }

    pub(crate) fn generation(&self) -> Generation {
        self.generation
    }

    /// Where the pieces are read from.
    pub(crate) fn storage(&self) -> &BlockStorage {
        &self.context.storage
    }

    fn has(&self, piece: &PieceWrite) -> bool {
        let storage = self.storage();
        piece.src.idx() < storage.num_blocks() && (piece.layer_idx as usize) < storage.layout().num_layers
    }

    /// The right to use the blocks of both sides, while it lives; `None` when the route is closed.
    pub(crate) fn enter(self: &Arc<Self>) -> Option<Active> {
        let is_closed = self.closed();
        if *is_closed {
            return None;
        }
        self.num_active.send_modify(|num_active| *num_active += 1);
        Some(Active(Arc::clone(self)))
    }

    /// Nobody enters any more.
    pub(crate) fn shut(&self) {
        *self.closed() = true;
    }

    pub(super) fn take_keep(&self) -> Box<dyn Send> {
        std::mem::replace(&mut *self.keep.lock().unwrap_or_else(PoisonError::into_inner), Box::new(()))
    }

    fn closed(&self) -> MutexGuard<'_, bool> {
        self.is_closed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The right to use a route's blocks.
pub(crate) struct Active(Arc<RouteState>);

impl Drop for Active {
    fn drop(&mut self) {
        self.0.num_active.send_modify(|num_active| *num_active -= 1);
    }
}

struct Push {
    route: Arc<RouteState>,
    progress: Mutex<Progress>,
}

struct Progress {
    num_frames: usize,
    pieces: Vec<Piece>,
    reply: Option<oneshot::Sender<Result<Pushed, PushError>>>,
}

impl Push {
    fn add(&self, pieces: Vec<Piece>) {
        let mut progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        progress.num_frames = progress.num_frames.saturating_sub(1);
        progress.pieces.extend(pieces);
        if progress.num_frames == 0
            && let Some(reply) = progress.reply.take()
        {
            let pieces = std::mem::take(&mut progress.pieces);
            let bytes = (pieces.len() * self.route.storage().layout().layer_bytes()) as u64;
            // Nobody waits any more: fine.
            let _ = reply.send(Ok(Pushed { pieces, transport: self.route.kind, bytes }));
        }
    }

    fn fail(&self, error: PushError) {
        let mut progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(reply) = progress.reply.take() {
            // As above.
            let _ = reply.send(Err(error));
        }
    }
}

/// Some pieces of a push: what a peer writes in one go.
pub(crate) struct Frame {
    push: Arc<Push>,
    pub(crate) pieces: Vec<PieceWrite>,
    /// How often it was begun on a connection that broke.
    pub(crate) num_tries: u32,
}

impl Frame {
    pub(crate) fn route(&self) -> &Arc<RouteState> {
        &self.push.route
    }

    /// Its pieces are in the granted blocks.
    pub(crate) fn done(self, pieces: Vec<Piece>) {
        let counters = self.push.route.context.counters.of(self.push.route.kind);
        counters.placed(pieces.len(), pieces.len() * self.push.route.storage().layout().layer_bytes());
        self.push.add(pieces);
    }

    /// They may not be.
    pub(crate) fn fail(self, error: PushError) {
        self.push.fail(error);
    }
}
