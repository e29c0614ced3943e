//! The decode side of a handoff, as far as remote prefills and prefix fetches share it: the stream to the peer, the grant, and
//! the verification of received KV.
//!
//! It decides nothing: a state machine of `baton-handoff` does.

use std::{sync::Arc, time::Duration};

use baton_engine::{DecodeSlot, HeldBlocks, Reservation};
use baton_handoff::{
    AccessKey, Begin, DecodeMessage, Generation, Grant, KvFault, Limits, Piece, decode::DecodeInput,
};
use baton_kv_cache::{BlockId, WireFormat};
use baton_proto::worker::{
    self as proto, PrefillPeer, Ticket, prefill_client::PrefillClient, prefill_message::Message,
};
use baton_request::{Failure, FailureKind, Request};
use baton_telemetry::trace_context;
use baton_transfer::Granted;
use baton_worker_messages::{FirstToken, Payload, decode_message_to_proto, prefill_message_from_proto};
use futures_util::{StreamExt, future::BoxFuture, stream::FuturesUnordered};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Response, Status, Streaming, metadata::MetadataKey, transport::Channel};

use super::stream::{HandoffStream, StreamEvent};
use crate::{peers::Link, worker::Worker};

/// Messages to the peer that wait in the stream. One handoff sends at most the first message, `Progress` every few seconds,
/// `Grant`, and `Commit` or `Cancel`.
const OUTBOUND_BOUND: usize = 4;

/// What [`DecodeSide::commit`] waits for, in the words of a deadline.
pub const FENCING: &str = "waiting until the sender of the kv cannot write any more";

type Verifying = BoxFuture<'static, (usize, Result<(), KvFault>)>;

/// Blocks of this worker's engine that can be granted to a peer.
pub trait ReservedBlocks: Sized + Send + 'static {
    /// Holds the blocks until no writer can reach them.
    type Held: Send + 'static;
    /// What is reserved with them, and is given up as soon as the grant is revoked.
    type Slot: Send + 'static;

    /// Blocks at the front of the sequence that need not be sent.
    fn num_cached_blocks(&self) -> usize;
    /// The blocks after them, to be written.
    fn new_blocks(&self) -> &[BlockId];
    /// Separates both.
    fn split(self) -> (Self::Slot, Self::Held);
    /// Undoes [`split`](Self::split).
    fn join(slot: Self::Slot, held: Self::Held) -> Self;
}

impl ReservedBlocks for Reservation {
    type Held = HeldBlocks;
    type Slot = DecodeSlot;

    fn num_cached_blocks(&self) -> usize {
        self.num_cached_blocks()
    }

    fn new_blocks(&self) -> &[BlockId] {
        &self.blocks()[self.num_cached_blocks()..]
    }

    fn split(self) -> (DecodeSlot, HeldBlocks) {
        self.split()
    }

    fn join(slot: DecodeSlot, held: HeldBlocks) -> Reservation {
        Reservation::join(slot, held)
    }
}

/// The stream of one handoff to the peer, and its blocks on this worker.
pub struct DecodeSide<R: ReservedBlocks> {
    worker: Arc<Worker>,
    link: Link,
    peer: PrefillPeer,
    /// The wire format to ask for; `None`: the peer chooses.
    wire: Option<WireFormat>,
    stream: HandoffStream<proto::PrefillMessage, proto::DecodeMessage>,
    blocks: Blocks<R>,
    /// The router's number for what the peer gets; sent with the first message.
    ticket: Option<Ticket>,
    reads_progress: bool,
}

enum Blocks<R: ReservedBlocks> {
    None,
    Reserving(BoxFuture<'static, Result<R, Failure>>),
    Granted { granted: Granted<R::Held>, slot: R::Slot, verifying: FuturesUnordered<Verifying> },
}

enum BlocksEvent<R> {
    Reserved(Result<R, Failure>),
    Verified { num_pieces: usize, result: Result<(), KvFault> },
}

impl<R: ReservedBlocks> DecodeSide<R> {
    /// Opens the stream to the peer.
    pub fn new(
        worker: Arc<Worker>,
        link: Link,
        peer: PrefillPeer,
        wire: Option<WireFormat>,
    ) -> DecodeSide<R> {
        let (outbound, messages) = mpsc::channel(OUTBOUND_BOUND);
        let opening = Box::pin(open(link.client(), messages));
        let stream = HandoffStream::opening(opening, outbound);
        let blocks = Blocks::None;
        DecodeSide { worker, link, peer, wire, stream, blocks, ticket: None, reads_progress: false }
    }

    /// The same, with the router's number for what the peer gets.
    #[must_use]
    pub fn with_ticket(mut self, ticket: Option<Ticket>) -> DecodeSide<R> {
        self.ticket = ticket;
        self
    }

    /// This worker, which receives KV.
    pub fn worker(&self) -> &Arc<Worker> {
        &self.worker
    }

    /// The worker that sends KV.
    pub fn peer(&self) -> &PrefillPeer {
        &self.peer
    }

    /// Whether the peer reads `Progress`. It says so when it starts; older prefill workers do not.
    pub fn reads_progress(&self) -> bool {
        self.reads_progress
    }

    /// Waits for the next input of the state machine. Nothing is lost when the future is dropped.
    pub async fn next(&mut self) -> DecodeInput<FirstToken> {
        loop {
            tokio::select! {
                biased;
                event = self.stream.next() => match event {
                    StreamEvent::Received(message) => return self.received(message),
                    // The inbound half of the stream ends as well, with the reason.
                    StreamEvent::Dropped => {}
                },
                event = self.blocks.next() => return match event {
                    BlocksEvent::Reserved(reserved) => self.reserved(reserved),
                    BlocksEvent::Verified { num_pieces, result } => DecodeInput::Verified { num_pieces, result },
                },
            }
        }
    }

    fn received(
        &mut self,
        message: Result<Option<proto::PrefillMessage>, Status>,
    ) -> DecodeInput<FirstToken> {
        if let Ok(Some(proto::PrefillMessage { message: Some(Message::Started(started)) })) = &message {
            self.reads_progress = started.reads_progress;
        }
        let why = match message.map(|message| message.map(prefill_message_from_proto)) {
            Ok(Some(Ok(message))) => return DecodeInput::Message(message),
            Ok(Some(Err(error))) => format!("the prefill worker sent an invalid message: {error}"),
            Ok(None) => "the prefill worker ended the stream".to_owned(),
            Err(status) => {
                let PrefillPeer { worker_id, address, .. } = &self.peer;
                format!("{worker_id} at {address}: {}", status.message())
            }
        };
        self.stream.close();
        DecodeInput::StreamClosed(why)
    }

    fn reserved(&mut self, reserved: Result<R, Failure>) -> DecodeInput<FirstToken> {
        self.blocks = Blocks::None;
        let reservation = match reserved {
            Ok(reservation) => reservation,
            Err(failure) => return DecodeInput::ReserveFailed(failure),
        };
        let num_cached_blocks = reservation.num_cached_blocks();
        let block_ids = reservation.new_blocks().to_vec();
        let (slot, held) = reservation.split();
        let granted = self.worker.data_plane().receiver.grant_as(block_ids.clone(), self.wire, held);
        if self.worker.config().tls.is_some() {
            // Only the worker that answers the stream may write.
            match self.link.identity() {
                Some(identity) => granted.bind(identity),
                None => {
                    let message = "the prefill worker presented no certificate";
                    return DecodeInput::ReserveFailed(Failure::new(FailureKind::Internal, message));
                }
            }
        }
        let offers = granted.offers().to_vec();
        let AccessKey { generation, secret } = granted.access_key();
        self.blocks = Blocks::Granted { granted, slot, verifying: FuturesUnordered::new() };
        DecodeInput::Granted(Grant { generation, secret, num_cached_blocks, block_ids, offers })
    }

    /// Sends a message; the first one carries the request.
    pub fn send(&mut self, message: DecodeMessage, request: &Request, prefix_source: Option<&PrefillPeer>) {
        let (kv_format, wire, ticket) = (self.worker.kv_format(), self.wire, self.ticket);
        let payload = Payload { request, kv_format, wire, prefix_source, ticket };
        self.stream.send(decode_message_to_proto(message, payload));
    }

    /// Waits for blocks, and grants them to the peer.
    pub fn reserve(&mut self, reserving: BoxFuture<'static, Result<R, Failure>>) {
        self.blocks = Blocks::Reserving(reserving);
    }

    /// Compares written pieces with their checksums.
    pub fn verify(&mut self, pieces: Vec<Piece>) {
        // The machine verifies only pieces of a grant.
        let Blocks::Granted { granted, verifying, .. } = &self.blocks else { return };
        let num_pieces = pieces.len();
        let verified = granted.verify(pieces);
        verifying.push(Box::pin(async move { (num_pieces, verified.await) }));
    }

    /// Revokes the grant. Its blocks return to the pool when no writer can reach them, its slot at once.
    pub fn revoke(&mut self, generation: Generation) {
        match std::mem::replace(&mut self.blocks, Blocks::None) {
            Blocks::Granted { granted, slot, .. } if granted.generation() == generation => {
                if granted.was_shown_by_another() {
                    // The peer probably has a new certificate. It presents it only on new connections.
                    self.link.forget();
                }
                // A peer that does not answer keeps no request from running.
                drop(slot);
                // The grant owns the blocks.
                drop(granted.revoke());
            }
            other => self.blocks = other,
        }
    }

    /// The peer reports that it has stopped writing.
    pub fn writer_stopped(&self, generation: Generation) {
        self.worker.data_plane().receiver.writer_stopped(generation);
    }

    /// Stops waiting for blocks.
    pub fn cancel_reservation(&mut self) {
        self.blocks = Blocks::None;
    }

    /// Commits the grant, whose pieces are all verified. Returns the blocks when no writer can reach them. Meanwhile the queued
    /// messages are sent: the peer closes its route when it reads `Commit`. If the future is dropped, the slot returns at once, and
    /// the blocks by themselves.
    ///
    /// # Errors
    /// When the receiver was shut down.
    pub async fn commit(&mut self) -> Result<R, Failure> {
        let shut_down = || Failure::new(FailureKind::Internal, "the kv receiver was shut down");
        match std::mem::replace(&mut self.blocks, Blocks::None) {
            Blocks::Granted { granted, slot, .. } => {
                let held = self.stream.until(granted.commit()).await.ok_or_else(shut_down)?;
                Ok(R::join(slot, held))
            }
            Blocks::None | Blocks::Reserving(_) => Err(shut_down()),
        }
    }

    /// Sends the queued messages, and ends the stream.
    pub async fn end(self) {
        self.stream.end().await;
    }
}

impl<R: ReservedBlocks> Blocks<R> {
    async fn next(&mut self) -> BlocksEvent<R> {
        match self {
            Blocks::None => std::future::pending().await,
            Blocks::Reserving(reserving) => BlocksEvent::Reserved(reserving.await),
            Blocks::Granted { verifying, .. } => match verifying.next().await {
                Some((num_pieces, result)) => BlocksEvent::Verified { num_pieces, result },
                None => std::future::pending().await,
            },
        }
    }
}

/// The first message of a handoff to `worker`.
pub fn begin(
    worker: &Worker,
    peer: &PrefillPeer,
    attempt: u32,
    request: &Request,
    deadline: Duration,
) -> Begin {
    Begin {
        request_id: request.id.clone(),
        attempt,
        prefill_incarnation: peer.incarnation,
        num_tokens: request.num_known_tokens(),
        block_size: worker.engine().storage().layout().block_size,
        deadline,
    }
}

/// The limits of a handoff with this deadline.
pub fn limits(deadline: Duration) -> Limits {
    Limits { total: deadline, stall: deadline.min(Limits::default().stall), ..Limits::default() }
}

async fn open(
    mut client: PrefillClient<Channel>,
    messages: mpsc::Receiver<proto::DecodeMessage>,
) -> Result<Response<Streaming<proto::PrefillMessage>>, Status> {
    let mut request = tonic::Request::new(ReceiverStream::new(messages));
    trace_context::inject(|name, value| {
        if let (Ok(name), Ok(value)) = (MetadataKey::from_bytes(name.as_bytes()), value.parse()) {
            request.metadata_mut().insert(name, value);
        }
    });
    client.handoff(request).await
}
