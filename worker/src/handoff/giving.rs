//! The prefill side of a handoff, as far as a computed prompt and a cached prefix do it the same way: the stream from the
//! peer, the route to its blocks, and the pushes.
//!
//! It decides nothing: a state machine of `baton-handoff` says what to do.

use std::sync::Arc;

use baton_handoff::{
    AccessKey, PieceWrite, PrefillMessage, PushError, Pushed, RouteError, TransportKind, TransportOffer,
    prefill::PrefillInput,
};
use baton_kv_cache::{KvFormat, KvShard, WireFormat};
use baton_proto::worker as proto;
use baton_request::{Failure, FailureKind};
use baton_transfer::Route;
use futures_util::{StreamExt, future::BoxFuture, stream::FuturesUnordered};
use tonic::Status;

use super::stream::{HandoffStream, StreamEvent};
use crate::{
    convert_handoff::{FirstToken, decode_message_from_proto, prefill_message_to_proto},
    worker::Worker,
};

/// The stream from the decode side.
pub type GivingStream = HandoffStream<proto::DecodeMessage, Result<proto::PrefillMessage, Status>>;

/// How the peer arranges its blocks, and how KV travels there.
#[derive(Clone, Copy, Debug)]
pub struct PeerBlocks {
    shard: KvShard,
    wire: WireFormat,
}

impl PeerBlocks {
    /// Blocks of `theirs`.
    ///
    /// # Errors
    /// When KV of `worker` cannot be used there.
    pub fn accept(worker: &Worker, theirs: &KvFormat, wire: WireFormat) -> Result<PeerBlocks, Failure> {
        // Invariant 4: the formats are compared before any KV moves.
        if let Some(difference) = worker.kv_format().difference(theirs) {
            let message = format!("the workers' KV formats differ: {difference}");
            return Err(Failure::new(FailureKind::KvRejected, message));
        }
        // One rank on either side, as the formats agree on that.
        let shard = KvShard::of_format(theirs, 0).map_err(|error| {
            let message = format!("no blocks can be like the decode worker's: {error}");
            Failure::new(FailureKind::KvRejected, message)
        })?;
        Ok(PeerBlocks { shard, wire })
    }
}

/// One handoff's stream and route.
pub struct Giving {
    worker: Arc<Worker>,
    stream: GivingStream,
    peer_blocks: PeerBlocks,
    way: Way,
    moved: Option<(TransportKind, u64)>,
}

/// The way to the peer's blocks.
enum Way {
    /// Not granted yet, or released.
    None,
    Routing(BoxFuture<'static, Result<Route, RouteError>>),
    Open {
        route: Route,
        pushes: FuturesUnordered<BoxFuture<'static, Result<Pushed, PushError>>>,
    },
    Stopping(BoxFuture<'static, ()>),
}

impl Giving {
    /// Nothing is granted yet.
    pub fn new(worker: Arc<Worker>, stream: GivingStream, peer_blocks: PeerBlocks) -> Giving {
        Giving { worker, stream, peer_blocks, way: Way::None, moved: None }
    }

    /// The worker that gives.
    pub fn worker(&self) -> &Arc<Worker> {
        &self.worker
    }

    /// Waits for the next input of the state machine. Nothing is lost when the future is dropped.
    pub async fn next(&mut self) -> PrefillInput {
        tokio::select! {
            biased;
            event = self.stream.next() => read(&mut self.stream, event),
            event = self.way.next() => match event {
                WayEvent::Routed(Ok(route)) => {
                    self.way = Way::Open { route, pushes: FuturesUnordered::new() };
                    PrefillInput::Routed(Ok(()))
                }
                WayEvent::Routed(Err(error)) => {
                    self.way = Way::None;
                    PrefillInput::Routed(Err(error))
                }
                WayEvent::Pushed(pushed) => {
                    if let Ok(pushed) = &pushed {
                        let bytes = self.moved.map_or(0, |(_, bytes)| bytes) + pushed.bytes;
                        self.moved = Some((pushed.transport, bytes));
                    }
                    PrefillInput::Pushed(pushed)
                }
                WayEvent::Stopped => {
                    self.way = Way::None;
                    PrefillInput::Idle
                }
            },
        }
    }

    /// Opens a route to granted blocks. `keep` holds this worker's blocks as long as the route reads them.
    pub fn route(&mut self, access_key: AccessKey, offers: Vec<TransportOffer>, keep: impl Send + 'static) {
        let sender = self.worker.data_plane().sender.clone();
        let PeerBlocks { shard, wire } = self.peer_blocks;
        let routing = async move { sender.route_to(&shard, wire, access_key, &offers, keep).await };
        self.way = Way::Routing(Box::pin(routing));
    }

    /// Writes pieces over the route.
    pub fn push(&mut self, pieces: Vec<PieceWrite>) {
        // Pieces are pushed only over an open route.
        let Way::Open { route, pushes } = &mut self.way else { return };
        pushes.push(Box::pin(route.push(pieces)));
    }

    /// Sends a message.
    pub fn send(&mut self, message: PrefillMessage<FirstToken>) {
        self.stream.send(Ok(prefill_message_to_proto(message)));
    }

    /// Closes the route; [`next`](Self::next) says when it is idle.
    pub fn stop(&mut self) {
        let way = std::mem::replace(&mut self.way, Way::None);
        self.way = Way::Stopping(Box::pin(close(way)));
    }

    /// Drops the route.
    pub fn release(&mut self) {
        self.way = Way::None;
    }

    /// What carried KV, or "none", and how many bytes.
    pub fn moved(&self) -> (&'static str, u64) {
        self.moved.map_or(("none", 0), |(kind, bytes)| (kind.name(), bytes))
    }

    /// Sends what is queued, and ends the stream.
    pub async fn end(self) {
        self.stream.end().await;
    }
}

enum WayEvent {
    Routed(Result<Route, RouteError>),
    Pushed(Result<Pushed, PushError>),
    Stopped,
}

impl Way {
    async fn next(&mut self) -> WayEvent {
        match self {
            Way::None => std::future::pending().await,
            Way::Routing(routing) => WayEvent::Routed(routing.await),
            Way::Open { pushes, .. } => match pushes.next().await {
                Some(pushed) => WayEvent::Pushed(pushed),
                None => std::future::pending().await,
            },
            Way::Stopping(stopping) => {
                stopping.await;
                WayEvent::Stopped
            }
        }
    }
}

/// Closes a route, or the one that is being opened: the peer must hear of either.
async fn close(way: Way) {
    let route = match way {
        Way::None => None,
        Way::Routing(routing) => routing.await.ok(),
        Way::Open { route, .. } => Some(route),
        Way::Stopping(stopping) => {
            stopping.await;
            None
        }
    };
    if let Some(route) = route {
        route.close().await;
    }
}

/// What a stream's event means to the state machine. A message that is none closes the stream.
pub(super) fn read(stream: &mut GivingStream, event: StreamEvent<proto::DecodeMessage>) -> PrefillInput {
    let broken = match event {
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
    PrefillInput::StreamClosed(broken)
}
