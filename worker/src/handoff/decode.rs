//! One handoff, from `Begin` to verified KV, on the side that wants it: feeds the state machine with what the stream,
//! the engine, the data plane, the caller and the clock say, and does what it decides.
//!
//! Of a whole sequence the KV goes to a request that decodes here; what another worker had cached goes into the prefix
//! cache.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use baton_engine::{FinishReason, PrefixReservation, Request, Reservation, SampledToken, TokenStream};
use baton_handoff::{
    AccessKey, Begin, Extent, Failed, FailureKind, Generation, Grant, HandoffError, KvFault, Limits, Piece,
    PrefillMessage, Side,
    decode::{Action, Committed, DecodeHandoff, Input},
};
use baton_kv_cache::{BlockId, WireFormat};
use baton_proto::worker::{self as proto, PrefillPeer, prefill_client::PrefillClient};
use baton_telemetry::trace_context;
use baton_transfer::Granted;
use futures_util::{StreamExt, future::BoxFuture, stream::FuturesUnordered};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Response, Status, Streaming, metadata::MetadataKey, transport::Channel};

use super::peers::Link;
use crate::{
    convert::submit_failure,
    convert_handoff::{FirstToken, Payload, decode_message_to_proto, prefill_message_from_proto},
    handoff_stream::{HandoffStream, StreamEvent, if_any, sleep_until},
    worker::Worker,
};

/// Messages to the peer that wait in the stream: all that one handoff can have, `Begin`, `Grant` and `Commit` or
/// `Cancel`.
const OUTBOUND_BOUND: usize = 4;

type Opening = BoxFuture<'static, Result<Response<Streaming<proto::PrefillMessage>>, Status>>;
type Reserving = BoxFuture<'static, Result<Reserved, Failed>>;
type Verifying = BoxFuture<'static, (usize, Result<(), KvFault>)>;

/// What is wanted of whom.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The request.
    pub request: Request,
    /// How often it was planned before.
    pub attempt: u32,
    /// Who has its KV, or computes it.
    pub peer: PrefillPeer,
    /// How the KV shall travel; `None`: as the prefill worker likes.
    pub wire: Option<WireFormat>,
    /// How much of it is wanted.
    pub extent: Extent,
    /// Whom the peer is to ask for what it has cached before it computes.
    pub prefix_source: Option<PrefillPeer>,
}

/// What a handoff says to whoever wants it.
#[derive(Debug)]
pub enum HandoffEvent {
    /// Sampled by the peer.
    First {
        /// The token.
        token: SampledToken,
        /// Prompt tokens found in the peer's cache.
        cached_tokens: usize,
        /// Present when the token ends the request.
        finish: Option<FinishReason>,
    },
    /// The KV has arrived; these are the tokens after the first.
    Decoding(TokenStream),
    /// What was cached there is cached here, so many tokens of it; or nothing came of it.
    Prefix(Result<usize, HandoffError>),
    /// It ends here.
    Failed(Failed),
}

/// Blocks set aside here.
enum Reserved {
    /// For a request that will decode.
    Decode(Reservation),
    /// For the prefix cache.
    Prefix(PrefixReservation),
}

impl Reserved {
    fn num_cached_blocks(&self) -> usize {
        match self {
            Reserved::Decode(reservation) => reservation.num_cached_blocks(),
            Reserved::Prefix(reservation) => reservation.num_cached_blocks(),
        }
    }

    fn blocks(&self) -> &[BlockId] {
        match self {
            Reserved::Decode(reservation) => reservation.blocks(),
            Reserved::Prefix(reservation) => reservation.blocks(),
        }
    }
}

/// One handoff, on the side that wants KV.
pub struct Handoff {
    worker: Arc<Worker>,
    plan: Plan,
    machine: DecodeHandoff,
    first_actions: Vec<Action<FirstToken>>,
    started: Instant,

    /// Whoever wants it; closed when nobody reads it any more.
    events: mpsc::Sender<HandoffEvent>,
    /// Nothing is said any more.
    is_told: bool,

    link: Link,
    opening: Option<Opening>,
    stream: HandoffStream<proto::PrefillMessage, proto::DecodeMessage>,

    reserving: Option<Reserving>,
    granted: Option<Granted<Reserved>>,
    verifying: FuturesUnordered<Verifying>,
    first: Option<(SampledToken, Instant)>,
    num_beats: Arc<AtomicU64>,
}

impl Handoff {
    /// Opens the stream to the peer. `deadline` bounds everything but what the peer computes or has to compute before.
    pub fn new(
        worker: Arc<Worker>,
        link: Link,
        plan: Plan,
        deadline: Duration,
        events: mpsc::Sender<HandoffEvent>,
    ) -> Handoff {
        let started = Instant::now();
        let layout = *worker.engine().storage().layout();
        let limits =
            Limits { total: deadline, stall: deadline.min(Limits::default().stall), ..Limits::default() };
        let begin = Begin {
            request_id: plan.request.id.clone(),
            attempt: plan.attempt,
            prefill_incarnation: plan.peer.incarnation,
            decode_worker_id: worker.id().0.clone(),
            decode_incarnation: worker.incarnation(),
            num_tokens: plan.request.num_known_tokens(),
            block_size: layout.block_size,
            deadline,
            extent: plan.extent,
        };
        let (machine, first_actions) = DecodeHandoff::begin(begin, layout.num_layers, limits, started);
        let (outbound, messages) = mpsc::channel(OUTBOUND_BOUND);
        Handoff {
            worker,
            plan,
            machine,
            first_actions,
            started,
            events,
            is_told: false,
            opening: Some(Box::pin(open(link.client(), messages))),
            link,
            stream: HandoffStream::new(outbound),
            reserving: None,
            granted: None,
            verifying: FuturesUnordered::new(),
            first: None,
            num_beats: Arc::default(),
        }
    }

    /// Counts how often the peer said that it computes.
    pub fn num_beats(&self) -> Arc<AtomicU64> {
        self.num_beats.clone()
    }

    /// Drives it to its end.
    pub async fn run(mut self) {
        let mut inputs = VecDeque::new();
        let mut actions = std::mem::take(&mut self.first_actions);
        loop {
            for action in actions {
                inputs.extend(self.act(action).await);
            }
            if self.machine.is_over() {
                break;
            }
            let input = match inputs.pop_front() {
                Some(input) => input,
                None => self.next().await,
            };
            actions = self.machine.on(input, Instant::now());
        }
        self.stream.end().await;
    }

    /// Waits for whatever happens next.
    async fn next(&mut self) -> Input<FirstToken> {
        loop {
            let halted = self.worker.lifecycle().halted();
            let deadline = self.machine.deadline();
            tokio::select! {
                // Time first, so that nothing busy outlives its deadline.
                biased;
                () = sleep_until(deadline) => return Input::Tick,
                opened = if_any(&mut self.opening) => match opened {
                    Ok(response) => self.stream.opened(response.into_inner()),
                    Err(status) => return Input::StreamClosed(self.lost(&status)),
                },
                event = self.stream.next() => match event {
                    StreamEvent::Received(message) => return self.received(message),
                    // Why, the other half of the stream will say.
                    StreamEvent::Dropped => {}
                },
                reserved = if_any(&mut self.reserving) => return self.reserved(reserved),
                Some((num_pieces, result)) = self.verifying.next() => {
                    return Input::Verified { num_pieces, result };
                }
                () = self.events.closed(), if !self.is_told => {
                    self.is_told = true;
                    return Input::Cancel("the request was cancelled".into());
                }
                () = halted.cancelled(), if !self.is_told => {
                    self.is_told = true;
                    return Input::Cancel("this worker is leaving".into());
                }
            }
        }
    }

    fn received(&mut self, message: Result<Option<proto::PrefillMessage>, Status>) -> Input<FirstToken> {
        let why = match message.map(|message| message.map(prefill_message_from_proto)) {
            Ok(Some(Ok(message))) => {
                if message == PrefillMessage::Progress {
                    self.num_beats.fetch_add(1, Ordering::Relaxed);
                }
                return Input::Message(message);
            }
            Ok(Some(Err(error))) => format!("the prefill worker sent nonsense: {error}"),
            Ok(None) => "the prefill worker ended the stream".to_owned(),
            Err(status) => self.lost(&status),
        };
        self.stream.close();
        Input::StreamClosed(why)
    }

    fn lost(&self, status: &Status) -> String {
        format!("{} at {}: {}", self.plan.peer.worker_id, self.plan.peer.address, status.message())
    }

    fn reserved(&mut self, reserved: Result<Reserved, Failed>) -> Input<FirstToken> {
        let reservation = match reserved {
            Ok(reservation) => reservation,
            Err(failed) => return Input::ReserveFailed(failed),
        };
        let num_cached_blocks = reservation.num_cached_blocks();
        let block_ids = reservation.blocks()[num_cached_blocks..].to_vec();
        let granted =
            self.worker.data_plane().receiver.grant_as(block_ids.clone(), self.plan.wire, reservation);
        if self.worker.config().tls.is_some() {
            // Whoever answers the stream, and nobody else, may write.
            match self.link.identity() {
                Some(identity) => granted.bind(identity),
                None => {
                    let message = "it is not known who the prefill worker is";
                    return Input::ReserveFailed(Failed::new(FailureKind::Internal, message));
                }
            }
        }
        let offers = granted.offers().to_vec();
        let AccessKey { generation, secret } = granted.access_key();
        let grant = Grant { generation, secret, num_cached_blocks, block_ids, offers };
        self.granted = Some(granted);
        Input::Granted(grant)
    }

    /// Does what was decided; what that leads to at once is the next input.
    async fn act(&mut self, action: Action<FirstToken>) -> Option<Input<FirstToken>> {
        match action {
            Action::Send(message) => {
                let payload = Payload {
                    request: &self.plan.request,
                    kv_format: self.worker.kv_format(),
                    wire: self.plan.wire,
                    prefix_source: self.plan.prefix_source.as_ref(),
                };
                self.stream.send(decode_message_to_proto(message, payload));
            }
            Action::Reserve { num_tokens } => {
                let reserving = reserve(self.worker.clone(), self.plan.clone(), num_tokens);
                self.reserving = Some(Box::pin(reserving));
            }
            Action::FirstToken(first) => return self.pass_on(first),
            Action::Verify(pieces) => self.verify(pieces),
            Action::Revoke(generation) => self.revoke(generation),
            Action::WriterStopped(generation) => self.worker.data_plane().receiver.writer_stopped(generation),
            Action::Finish(result) => {
                self.reserving = None;
                self.verifying.clear();
                self.finish(result).await;
            }
            // `run` ends, and with it the stream.
            Action::Close => {}
        }
        None
    }

    /// Whoever waits gets the first token at once, and the end with it if that is all.
    fn pass_on(&mut self, first: FirstToken) -> Option<Input<FirstToken>> {
        let FirstToken { token, cached_tokens } = first;
        let request = &self.plan.request;
        let context_length = self.worker.engine().context_length();
        let finish = request.finish_after(request.output.len() + 1, token.id, context_length);
        self.first = Some((token.clone(), Instant::now()));
        self.tell(HandoffEvent::First { token, cached_tokens, finish });
        finish.map(|_| {
            self.is_told = true;
            Input::Cancel("the first token ends the request".into())
        })
    }

    fn verify(&mut self, pieces: Vec<Piece>) {
        let granted = self.granted.as_ref().expect("pieces are verified under a grant");
        let num_pieces = pieces.len();
        let verified = granted.verify(pieces);
        self.verifying.push(Box::pin(async move { (num_pieces, verified.await) }));
    }

    fn revoke(&mut self, generation: Generation) {
        if let Some(granted) = self.granted.take_if(|granted| granted.generation() == generation) {
            if granted.was_shown_by_another() {
                // Most likely it has a new key, which it shows to new connections only.
                self.link.forget();
            }
            // The reservation goes with the grant, and returns its blocks once they are fenced.
            drop(granted.revoke());
        }
    }

    async fn finish(&mut self, result: Result<Committed, HandoffError>) {
        match self.plan.extent {
            Extent::Whole => self.finish_whole(result).await,
            Extent::Cached => self.finish_cached(result).await,
        }
        self.is_told = true;
    }

    async fn finish_whole(&mut self, result: Result<Committed, HandoffError>) {
        let elapsed = self.started.elapsed();
        let metrics = self.worker.metrics();
        metrics.handoff_seconds.observe(elapsed.as_secs_f64());
        let peer = &self.plan.peer.worker_id;
        match result {
            Ok(committed) => {
                let (_, sampled) = self.first.as_ref().expect("a handoff commits with a first token");
                let exposed = sampled.elapsed();
                metrics.handoff_ended("committed");
                metrics.exposed_seconds.observe(exposed.as_secs_f64());
                let transport = committed.transport.map_or("none", |kind| kind.name());
                tracing::info!(prefill = %peer, transport, bytes = committed.bytes, ?elapsed, ?exposed, "kv received");
                self.decode().await;
            }
            Err(error) => {
                metrics.handoff_ended(error.label());
                tracing::info!(prefill = %peer, ?elapsed, %error, "handoff ended");
                let failed = match &error {
                    HandoffError::Refused { failed, .. } => failed.clone(),
                    error => Failed::new(error.kind(), error.to_string()),
                };
                self.tell(HandoffEvent::Failed(failed));
            }
        }
    }

    async fn finish_cached(&mut self, result: Result<Committed, HandoffError>) {
        let elapsed = self.started.elapsed();
        let source = &self.plan.peer.worker_id;
        let result = match result {
            Ok(committed) => {
                tracing::debug!(%source, bytes = committed.bytes, ?elapsed, "prefix fetched");
                self.cache().await
            }
            Err(error) => {
                tracing::info!(%source, ?elapsed, %error, "prefix not fetched");
                Err(error)
            }
        };
        self.tell(HandoffEvent::Prefix(result));
    }

    /// The KV is here: gives the blocks to the engine.
    async fn decode(&mut self) {
        let granted = self.granted.take().expect("a handoff commits a grant");
        let (token, _) = self.first.take().expect("a handoff commits with a first token");
        let event = match granted.commit().await {
            Some(Reserved::Decode(reservation)) => match self.worker.engine().decode(reservation, token) {
                Ok(tokens) => HandoffEvent::Decoding(tokens),
                Err(error) => HandoffEvent::Failed(submit_failure(&error)),
            },
            Some(Reserved::Prefix(_)) => unreachable!("of a whole sequence a request's blocks are reserved"),
            None => HandoffEvent::Failed(torn_down()),
        };
        self.tell(event);
    }

    /// The KV is here: lets every request find it.
    async fn cache(&mut self) -> Result<usize, HandoffError> {
        let granted = self.granted.take().expect("a handoff commits a grant");
        match granted.commit().await {
            Some(Reserved::Prefix(reservation)) => {
                let num_blocks = reservation.blocks().len() - reservation.num_cached_blocks();
                self.worker.engine().cache_prefix(reservation);
                Ok(num_blocks * self.worker.engine().storage().layout().block_size)
            }
            Some(Reserved::Decode(_)) => unreachable!("of what is cached a prefix is reserved"),
            None => Err(HandoffError::Refused { by: Side::Decode, failed: torn_down() }),
        }
    }

    /// Says it to the router's stream, unless it was told its end or has left.
    fn tell(&self, event: HandoffEvent) {
        if !self.is_told {
            // Room is kept for all that a handoff says; a closed channel is a router that left.
            let _ = self.events.try_send(event);
        }
    }
}

fn torn_down() -> Failed {
    Failed::new(FailureKind::Internal, "the receiver was torn down")
}

/// Blocks for what is wanted: for a request they are waited for, for a prefix not.
async fn reserve(worker: Arc<Worker>, plan: Plan, num_tokens: usize) -> Result<Reserved, Failed> {
    let engine = worker.engine();
    match plan.extent {
        Extent::Whole => {
            engine.reserve(plan.request).await.map(Reserved::Decode).map_err(|error| submit_failure(&error))
        }
        Extent::Cached => match engine.reserve_prefix(&plan.request, num_tokens).await {
            Ok(Some(reservation)) => Ok(Reserved::Prefix(reservation)),
            Ok(None) => Err(Failed::new(FailureKind::Full, "no blocks are free for a prefix")),
            Err(error) => Err(submit_failure(&error)),
        },
    }
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
