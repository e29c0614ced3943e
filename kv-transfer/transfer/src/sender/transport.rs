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

use super::{context::SenderContext, frame::Frame, jobs::Open, route_state::RouteState};
use crate::checksum::SumOf;

/// A prefill worker's half of a transport: it reaches pools of other workers.
pub trait SendingTransport: Send + Sync {
    /// Which it is. Its methods get offers of this kind only.
    fn kind(&self) -> TransportKind;

    /// Whether an offer can lead anywhere from this host. One that cannot is not tried, and not reported as a failure.
    fn may_reach(&self, offer: &TransportOffer) -> bool {
        let _ = offer;
        true
    }

    /// Whether pieces travel in the wire format that the route asks for. Without, they travel as they are.
    fn takes_wire_formats(&self) -> bool {
        false
    }

    /// The pool of an offer, whose blocks have this layout. It connects when a grant is opened.
    fn pool(
        &self,
        context: &Arc<SenderContext>,
        offer: &TransportOffer,
        layout: &KvLayout,
    ) -> Arc<dyn RemotePool>;
}

/// Another worker's pool, reached by one transport.
pub trait RemotePool: Send + Sync {
    /// Makes sure that the peer is connected and may be written to under the grant.
    fn open(&self, open: Open);
    /// Queues a frame of an opened route; it ends by [`Frame::done`] or [`Frame::fail`].
    fn push(&self, frame: Frame);
    /// The route is closed: drops what is queued of it, and tells the peer where that matters.
    fn retire(&self, route: &Arc<RouteState>);
    /// Whether nothing is connected, so that the pool may be forgotten.
    fn is_cold(&self) -> bool;
    /// What the checksums of its pieces are of. Known when a grant was opened.
    fn sum_of(&self) -> SumOf;
}
