//! The prefill side of a handoff, as far as computed prompts and cached prefixes share it: the stream from the peer, the route
//! to its blocks, and the pushes.
//!
//! It decides nothing: a state machine of `baton-handoff` does.

use std::{sync::Arc, time::Instant};

use baton_handoff::{
    AccessKey, PieceWrite, PrefillMessage, PushError, Pushed, RouteError, TransportKind, TransportOffer,
    prefill::PrefillInput,
};
use baton_kv_cache::{KvFormat, KvShard, WireFormat};
use baton_proto::worker as proto;
use baton_request::{Failure, FailureKind};
use baton_transfer::Route;
use baton_worker_messages::{FirstToken, decode_message_from_proto, prefill_message_to_proto};
use futures_util::{StreamExt, future::BoxFuture, stream::FuturesUnordered};
use tonic::Status;

use super::stream::{HandoffStream, StreamEvent};
use crate::worker::Worker;

/// The stream from the decode side.
pub type PrefillStream = HandoffStream<proto::DecodeMessage, Result<proto::PrefillMessage, Status>>;

/// The layout of the peer's blocks, and the wire format of KV to it.
#[derive(Clone, Copy, Debug)]
pub struct PeerFormat {
    shard: KvShard,
    wire: WireFormat,
}

impl PeerFormat {
    /// For a peer with blocks in the format `theirs`.
    ///
    /// # Errors
    /// When the peer cannot use KV of `worker`.
    pub fn new(worker: &Worker, theirs: &KvFormat, wire: WireFormat) -> Result<PeerFormat, Failure> {
        // Invariant 4: the formats are compared before any KV moves.
        if let Some(difference) = worker.kv_format().difference(theirs) {
            let message = format!("the workers' KV formats differ: {difference}");
            return Err(Failure::new(FailureKind::KvRejected, message));
        }
        // This worker's format has one rank, and the peer's does not differ in that.
        let shard = KvShard::of_format(theirs, 0).map_err(|error| {
            let message = format!("the decode worker's KV format is invalid: {error}");
            Failure::new(FailureKind::KvRejected, message)
        })?;
        Ok(PeerFormat { shard, wire })
    }

    /// Bytes of a piece as the peer stores it.
    fn piece_bytes(&self) -> usize {
        self.shard.layout().layer_bytes()
    }
}

/// The stream of one handoff from the peer, and the route to the peer's blocks.
pub struct PrefillSide {
    worker: Arc<Worker>,
    stream: PrefillStream,
    peer_format: PeerFormat,
    route: PeerRoute,
    transferred: Option<(TransportKind, u64)>,
    busy: Option<Busy>,
}

/// A time in which pushes were under way, from the begin of the first push, for the rate of the link.
struct Busy {
    since: Instant,
    /// Of finished pushes.
    num_bytes: u64,
    /// Of all that was begun, as this worker stores them.
    num_begun: u64,
}

/// The state of the route to the peer's blocks.
enum PeerRoute {
    /// The peer has granted no blocks yet, or the route is closed.
    None,
    Opening(BoxFuture<'static, Result<Route, RouteError>>),
    Open {
        route: Route,
        pushes: FuturesUnordered<BoxFuture<'static, Result<Pushed, PushError>>>,
    },
    Closing(BoxFuture<'static, ()>),
}

impl PrefillSide {
    /// Without a route.
    pub fn new(worker: Arc<Worker>, stream: PrefillStream, peer_format: PeerFormat) -> PrefillSide {
        PrefillSide { worker, stream, peer_format, route: PeerRoute::None, transferred: None, busy: None }
    }

    /// This worker, which sends KV.
    pub fn worker(&self) -> &Arc<Worker> {
        &self.worker
    }

    /// Waits for the next input of the state machine. Nothing is lost when the future is dropped.
    pub async fn next(&mut self) -> PrefillInput {
        tokio::select! {
            biased;
            event = self.stream.next() => input_from_stream(&mut self.stream, event),
            event = self.route.next() => match event {
                RouteEvent::Opened(Ok(route)) => {
                    self.route = PeerRoute::Open { route, pushes: FuturesUnordered::new() };
                    PrefillInput::Routed(Ok(()))
                }
                RouteEvent::Opened(Err(error)) => {
                    self.route = PeerRoute::None;
                    PrefillInput::Routed(Err(error))
                }
                RouteEvent::Pushed(pushed) => {
                    if let Ok(pushed) = &pushed {
                        let bytes = self.transferred.map_or(0, |(_, bytes)| bytes) + pushed.bytes;
                        self.transferred = Some((pushed.transport, bytes));
                        // As they are stored, as plans count them.
                        let num_bytes = pushed.pieces.len() * self.peer_format.piece_bytes();
                        self.measure(pushed.transport, num_bytes as u64);
                    }
                    PrefillInput::Pushed(pushed)
                }
                RouteEvent::Closed => {
                    self.route = PeerRoute::None;
                    PrefillInput::Idle
                }
            },
        }
    }

    /// Opens a route to granted blocks. `keep` guards this worker's blocks as long as the route reads them.
    pub fn open_route(
        &mut self,
        access_key: AccessKey,
        offers: Vec<TransportOffer>,
        keep: impl Send + 'static,
    ) {
        let sender = self.worker.data_plane().sender.clone();
        let PeerFormat { shard, wire } = self.peer_format;
        let opening = async move { sender.route_to(&shard, wire, access_key, &offers, keep).await };
        self.route = PeerRoute::Opening(Box::pin(opening));
    }

    /// Writes pieces over the route.
    pub fn push(&mut self, pieces: Vec<PieceWrite>) {
        // The machine pushes only over an open route.
        let PeerRoute::Open { route, pushes } = &mut self.route else { return };
        let busy =
            self.busy.get_or_insert_with(|| Busy { since: Instant::now(), num_bytes: 0, num_begun: 0 });
        busy.num_begun += (pieces.len() * self.peer_format.piece_bytes()) as u64;
        pushes.push(Box::pin(route.push(pieces)));
    }

    /// Counts a finished push. Once none is under way, the time since the first began is what their bytes took.
    fn measure(&mut self, kind: TransportKind, num_bytes: u64) {
        let Some(busy) = &mut self.busy else { return };
        busy.num_bytes += num_bytes;
        if matches!(&self.route, PeerRoute::Open { pushes, .. } if pushes.is_empty()) {
            self.worker.links.observe(kind, busy.num_bytes, busy.since.elapsed().as_secs_f64());
            self.busy = None;
        }
    }

    /// The peer wants no more: what is under way takes longer than it was given.
    fn note_late(&mut self) {
        if let (Some(Busy { since, num_begun, .. }), PeerRoute::Open { route, .. }) =
            (self.busy.take(), &self.route)
        {
            self.worker.links.note_late(route.transport(), num_begun, since.elapsed().as_secs_f64());
        }
    }

    /// Sends a message.
    pub fn send(&mut self, message: PrefillMessage<FirstToken>) {
        self.stream.send(Ok(prefill_message_to_proto(message)));
    }

    /// Closes the route. [`next`](Self::next) returns [`PrefillInput::Idle`] when it is closed.
    pub fn close_route(&mut self) {
        self.note_late();
        let route = std::mem::replace(&mut self.route, PeerRoute::None);
        self.route = PeerRoute::Closing(Box::pin(close(route)));
    }

    /// Drops the route.
    pub fn drop_route(&mut self) {
        self.note_late();
        self.route = PeerRoute::None;
    }

    /// The transport that carried KV, or "none", and the bytes.
    pub fn transferred(&self) -> (&'static str, u64) {
        self.transferred.map_or(("none", 0), |(kind, bytes)| (kind.name(), bytes))
    }

    /// Sends the queued messages, and ends the stream.
    pub async fn end(self) {
        self.stream.end().await;
    }
}

enum RouteEvent {
    Opened(Result<Route, RouteError>),
    Pushed(Result<Pushed, PushError>),
    Closed,
}

impl PeerRoute {
    async fn next(&mut self) -> RouteEvent {
        match self {
            PeerRoute::None => std::future::pending().await,
            PeerRoute::Opening(opening) => RouteEvent::Opened(opening.await),
            PeerRoute::Open { pushes, .. } => match pushes.next().await {
                Some(pushed) => RouteEvent::Pushed(pushed),
                None => std::future::pending().await,
            },
            PeerRoute::Closing(closing) => {
                closing.await;
                RouteEvent::Closed
            }
        }
    }
}

/// Closes the route. One that is being opened is closed after it has opened, because the peer must be told.
async fn close(route: PeerRoute) {
    let route = match route {
        PeerRoute::None => None,
        PeerRoute::Opening(opening) => opening.await.ok(),
        PeerRoute::Open { route, .. } => Some(route),
        PeerRoute::Closing(closing) => {
            closing.await;
            None
        }
    };
    if let Some(route) = route {
        route.close().await;
    }
}

/// Converts an event of the stream to an input of the state machine. An invalid message closes the stream.
pub(super) fn input_from_stream(
    stream: &mut PrefillStream,
    event: StreamEvent<proto::DecodeMessage>,
) -> PrefillInput {
    let reason = match event {
        StreamEvent::Received(Ok(Some(message))) => match decode_message_from_proto(message) {
            Ok(message) => return PrefillInput::Message(message),
            Err(error) => {
                stream.send(Err(error.clone().into()));
                error.to_string()
            }
        },
        StreamEvent::Received(Ok(None)) => "the decode worker ended the stream".to_owned(),
        StreamEvent::Received(Err(status)) => status.message().to_owned(),
        StreamEvent::Dropped => "the decode worker dropped the stream".to_owned(),
    };
    stream.close();
    PrefillInput::StreamClosed(reason)
}
