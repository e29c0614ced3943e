//! The seam that a transport implements on the prefill side.
//!
//! ```text
//! Sender --- pool(offer) ---> RemotePool, one per pool and transport
//!                               open   a grant may be written
//!                               push   a frame of pieces, which ends by Frame::done or Frame::fail
//!                               retire a route is closed
//! ```

use std::sync::Arc;

use baton_handoff::{TransportKind, TransportOffer};
use baton_kv_cache::KvLayout;

use super::{
    context::SenderContext,
    frame::Frame,
    jobs::Open,
    route_state::{RouteState, max_pieces},
};
use crate::checksum::SumOf;

/// A prefill worker's half of a transport: it reaches pools of other workers.
pub trait SendingTransport: Send + Sync {
    /// The kind of this transport. The methods below get offers of this kind only.
    fn kind(&self) -> TransportKind;

    /// Whether an offer can be reached from this host. An offer that cannot is not tried and not reported as a failure.
    fn may_reach(&self, offer: &TransportOffer) -> bool {
        let _ = offer;
        true
    }

    /// Whether pieces can travel in the wire format that the route asks for. If not, they travel as they are.
    fn takes_wire_formats(&self) -> bool {
        false
    }

    /// The pool of an offer, whose blocks have this layout. It connects when the first grant is opened.
    fn pool(
        &self,
        context: &Arc<SenderContext>,
        offer: &TransportOffer,
        layout: &KvLayout,
    ) -> Arc<dyn RemotePool>;
}

/// Another worker's pool, reached by one transport.
pub trait RemotePool: Send + Sync {
    /// Connects to the peer if needed, and opens a grant for writing.
    fn open(&self, open: Open);
    /// Queues a frame of an opened route; it ends by [`Frame::done`] or [`Frame::fail`].
    fn push(&self, frame: Frame);
    /// The most pieces of a frame of an opened route.
    fn frame_pieces(&self, route: &RouteState) -> usize {
        max_pieces(route.frame_bytes(), route.wire_bytes())
    }
    /// Drops the queued frames of a route that is closed, and tells the peer if the transport needs that.
    fn retire(&self, route: &Arc<RouteState>);
    /// Whether the pool has no connection, so that it may be forgotten.
    fn is_cold(&self) -> bool;
    /// What the checksums of its pieces cover. It is known once a grant was opened.
    fn sum_of(&self) -> SumOf;
}
