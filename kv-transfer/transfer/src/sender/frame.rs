//! A push, and its frames. A transport writes one frame at a time and reports its end to the push.

use std::sync::{Arc, Mutex, PoisonError};

use baton_handoff::{Piece, PieceWrite, PushError, Pushed};
use tokio::sync::oneshot;

use super::route_state::RouteState;

/// One push of a route. It lives until the last of its frames has ended.
pub(super) struct Push {
    route: Arc<RouteState>,
    progress: Mutex<Progress>,
}

struct Progress {
    num_frames: usize,
    pieces: Vec<Piece>,
    reply: Option<oneshot::Sender<Result<Pushed, PushError>>>,
}

impl Push {
    pub(super) fn new(
        route: &Arc<RouteState>,
        num_pieces: usize,
        num_frames: usize,
        reply: oneshot::Sender<Result<Pushed, PushError>>,
    ) -> Arc<Push> {
        let progress = Progress { num_frames, pieces: Vec::with_capacity(num_pieces), reply: Some(reply) };
        Arc::new(Push { route: Arc::clone(route), progress: Mutex::new(progress) })
    }

    pub(super) fn add(&self, pieces: Vec<Piece>) {
        let mut progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        progress.num_frames = progress.num_frames.saturating_sub(1);
        progress.pieces.extend(pieces);
        if progress.num_frames == 0
            && let Some(reply) = progress.reply.take()
        {
            let pieces = std::mem::take(&mut progress.pieces);
            let bytes = (pieces.len() * self.route.wire_bytes()) as u64;
            // Fails when the caller has dropped the push's future: then the result is not needed.
            let _ = reply.send(Ok(Pushed { pieces, transport: self.route.kind(), bytes }));
        }
    }

    pub(super) fn fail(&self, error: PushError) {
        let mut progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(reply) = progress.reply.take() {
            // As above.
            let _ = reply.send(Err(error));
        }
    }
}

/// Some pieces of a push. A transport writes them together.
pub struct Frame {
    push: Arc<Push>,
    /// Read from the source blocks, in order.
    pub pieces: Vec<PieceWrite>,
    /// How many connections broke while this frame was on them.
    pub num_tries: usize,
}

impl Frame {
    pub(super) fn new(push: &Arc<Push>, pieces: Vec<PieceWrite>) -> Frame {
        Frame { push: Arc::clone(push), pieces, num_tries: 0 }
    }

    /// The route that this frame belongs to.
    pub fn route(&self) -> &Arc<RouteState> {
        &self.push.route
    }

    /// Reports that the pieces are in the granted blocks.
    pub fn done(self, pieces: Vec<Piece>) {
        self.push.route.placed(pieces.len());
        self.push.add(pieces);
    }

    /// Reports that some of the pieces may not be in the granted blocks.
    pub fn fail(self, error: PushError) {
        if let PushError::Lost(why) = &error {
            self.push.route.lost(why);
        }
        self.push.fail(error);
    }
}
