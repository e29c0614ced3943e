//! A route: the way of one handoff to granted blocks.

use std::{future::Future, sync::Arc};

use baton_handoff::{PieceWrite, PushError, Pushed, TransportKind};
use tokio::sync::oneshot;

use super::{
    frame::{Frame, Push},
    route_state::RouteState,
    transport::RemotePool,
};

/// The way of one handoff to granted blocks. Dropping the route closes it.
pub struct Route {
    state: Arc<RouteState>,
    pool: Arc<dyn RemotePool>,
}

impl Route {
    pub(super) fn new(state: Arc<RouteState>, pool: Arc<dyn RemotePool>) -> Route {
        Route { state, pool }
    }

    /// The transport that carries it.
    pub fn transport(&self) -> TransportKind {
        self.state.kind()
    }

    /// Writes pieces, on the sender's own threads. Resolves when the receiver's blocks hold them.
    /// Dropping the future does not stop the writing. Closing the route does.
    ///
    /// # Errors
    /// When a piece could not be written. Other pieces may have been written.
    pub fn push(
        &self,
        pieces: Vec<PieceWrite>,
    ) -> impl Future<Output = Result<Pushed, PushError>> + Send + use<> {
        let (reply, answer) = oneshot::channel();
        let num_per_frame = self.pool.frame_pieces(&self.state);
        let push = Push::new(&self.state, pieces.len(), pieces.len().div_ceil(num_per_frame), reply);
        if let Some(piece) = pieces.iter().find(|piece| !self.state.has(piece)) {
            push.fail(PushError::Refused(format!("no such piece here: {:?}/{}", piece.src, piece.layer_idx)));
        } else if pieces.is_empty() {
            push.add(Vec::new());
        } else {
            self.send(&push, &pieces, num_per_frame);
        }
        async { answer.await.unwrap_or(Err(PushError::Closed)) }
    }

    fn send(&self, push: &Arc<Push>, pieces: &[PieceWrite], num_per_frame: usize) {
        for pieces in pieces.chunks(num_per_frame) {
            self.pool.push(Frame::new(push, pieces.to_vec()));
        }
    }

    /// Stops writing. Resolves when no thread touches the blocks of either side for this route.
    /// The guard that was given to [`Sender::route`](super::Sender::route) has been dropped by then.
    pub fn close(self) -> impl Future<Output = ()> + Send {
        let mut active = self.state.activity();
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
        self.pool.retire(&self.state);
    }
}
