//! One handoff, from the stream's opening to its end, on the side that gives KV: feeds the state machine with what the stream, the
//! engine, the data plane and the clock say, and does what it decides.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use baton_engine::{CachedPrefix, HeldBlocks, PrefillEvent, PrefillEvents, Request, SubmitError};
use baton_handoff::{
    DecodeMessage, Extent, Failed, FailureKind, HandoffError, Limits, PushError, Pushed, RouteError,
    TransportKind,
    prefill::{Action, Input, PrefillHandoff},
};
use baton_kv_cache::{KvFormat, KvLayout, KvShard, WireFormat};
use baton_proto::worker as proto;
use baton_transfer::Route;
use futures_util::{StreamExt, future::BoxFuture, stream::FuturesUnordered};
use tokio::sync::mpsc;
use tonic::{Status, Streaming};

use crate::{
    convert::{WireError, engine_failure, request_from_begin, submit_failure},
    convert_handoff::{
        FirstToken, begin_from_proto, decode_message_from_proto, prefill_message_to_proto, wire_from_begin,
    },
    handoff_stream::{HandoffStream, StreamEvent, if_any, sleep_until},
    worker::Worker,
};

use super::{prefix, pulse::Pulse};

type Routing = BoxFuture<'static, Result<Route, RouteError>>;
type Pushing = BoxFuture<'static, Result<Pushed, PushError>>;

type Holding = BoxFuture<'static, Result<CachedPrefix, SubmitError>>;

/// What `Begin` asks for.
struct Asked {
    request: Request,
    kv_format: KvFormat,
    wire: WireFormat,
    attempt: u32,
    prefix_source: Option<proto::PrefillPeer>,
}

/// What keeps the blocks as they are.
enum Held {
    /// Of a prompt that was computed for this handoff.
    Prefilled { _blocks: HeldBlocks },
    /// Of the prefix cache.
    Cached { _blocks: CachedPrefix },
}

/// One handoff, on the side that gives KV.
pub struct Handoff {
    worker: Arc<Worker>,
    machine: PrefillHandoff,
    started: Instant,

    stream: HandoffStream<proto::DecodeMessage, Result<proto::PrefillMessage, Status>>,

    /// What `Begin` asked for, until it is computed.
    asked: Option<Asked>,
    has_begun: bool,
    extent: Extent,
    /// What another worker has cached is on its way here.
    fetching: Option<BoxFuture<'static, ()>>,
    holding: Option<Holding>,
    events: Option<PrefillEvents>,
    /// For whoever waits for `events`.
    pulse: Option<Pulse>,
    /// What of this sequence was computed, event by event: a step may be long.
    num_ready: u64,
    /// How long either side waits without a sign of progress.
    deadline: Duration,
    /// How the decode worker arranges its blocks, and how KV travels there.
    destination: Option<(KvShard, WireFormat)>,
    /// Shared with the route: whichever is dropped last returns the blocks.
    held: Option<Arc<Held>>,
    cached_tokens: usize,

    routing: Option<Routing>,
    route: Option<Route>,
    pushes: FuturesUnordered<Pushing>,
    stopping: Option<BoxFuture<'static, ()>>,
    moved: Option<(TransportKind, u64)>,
    is_halted: bool,
}

impl Handoff {
    /// A stream has opened.
    pub fn new(
        worker: Arc<Worker>,
        inbound: Streaming<proto::DecodeMessage>,
        outbound: mpsc::Sender<Result<proto::PrefillMessage, Status>>,
    ) -> Handoff {
        let mut stream = HandoffStream::new(outbound);
        stream.opened(inbound);
        let started = Instant::now();
        let total = worker.config().handoff_deadline;
        let limits = Limits { total, stall: total.min(Limits::default().stall), ..Limits::default() };
        let KvLayout { block_size, num_layers, .. } = *worker.engine().storage().layout();
        Handoff {
            machine: PrefillHandoff::new(worker.incarnation(), block_size, num_layers, limits, started),
            worker,
            started,
            stream,
            asked: None,
            has_begun: false,
            extent: Extent::Whole,
            fetching: None,
            holding: None,
            events: None,
            pulse: None,
            num_ready: 0,
            deadline: total,
            destination: None,
            held: None,
            cached_tokens: 0,
            routing: None,
            route: None,
            pushes: FuturesUnordered::new(),
            stopping: None,
            moved: None,
            is_halted: false,
        }
    }

    /// Drives it to its end.
    pub async fn run(mut self) {
        let mut inputs = VecDeque::new();
        while !self.machine.is_over() {
            let input = match inputs.pop_front() {
                Some(input) => input,
                None => self.next().await,
            };
            for action in self.machine.on(input, Instant::now()) {
                inputs.extend(self.act(action));
            }
        }
        self.stream.end().await;
    }

    /// Waits for whatever happens next.
    async fn next(&mut self) -> Input<FirstToken> {
        loop {
            let halted = self.worker.lifecycle().halted();
            let deadline = self.machine.deadline();
            let (engine, num_ready) = (self.worker.engine(), self.num_ready);
            return tokio::select! {
                // Time first, so that nothing busy outlives its deadline; leaving last, since what just happened
                // says more.
                biased;
                () = sleep_until(deadline) => Input::Tick,
                event = self.stream.next() => match event {
                    StreamEvent::Received(message) => self.received(message),
                    StreamEvent::Dropped => {
                        self.stream.close();
                        Input::StreamClosed("the decode worker dropped the stream".into())
                    }
                },
                () = if_any(&mut self.fetching) => match self.submit() {
                    Ok(()) => continue,
                    Err(failed) => Input::Fail(failed),
                },
                held = if_any(&mut self.holding) => self.hold(held),
                event = next_event(&mut self.events) => self.computed(event),
                () = next_beat(&mut self.pulse, || engine.num_computed_tokens() + num_ready) => Input::Progress,
                routed = if_any(&mut self.routing) => Input::Routed(routed.map(|route| {
                    self.route = Some(route);
                })),
                Some(pushed) = self.pushes.next() => {
                    if let Ok(pushed) = &pushed {
                        let bytes = self.moved.map_or(0, |(_, bytes)| bytes) + pushed.bytes;
                        self.moved = Some((pushed.transport, bytes));
                    }
                    Input::Pushed(pushed)
                }
                () = if_any(&mut self.stopping) => Input::Idle,
                () = halted.cancelled(), if !self.is_halted => {
                    self.is_halted = true;
                    Input::Fail(leaving())
                }
            };
        }
    }

    fn received(&mut self, message: Result<Option<proto::DecodeMessage>, Status>) -> Input<FirstToken> {
        let broken = match message {
            Ok(Some(message)) => match self.convert(message) {
                Ok(message) => return Input::Message(message),
                Err(error) => {
                    self.stream.send(Err(error.clone().into()));
                    error.to_string()
                }
            },
            Ok(None) => "the decode worker ended the stream".to_owned(),
            Err(status) => status.message().to_owned(),
        };
        self.stream.close();
        Input::StreamClosed(broken)
    }

    fn convert(&mut self, message: proto::DecodeMessage) -> Result<DecodeMessage, WireError> {
        let Some(proto::decode_message::Message::Begin(begin)) = &message.message else {
            return decode_message_from_proto(message);
        };
        let request = request_from_begin(begin)?;
        let wire = WireFormat::agreed(wire_from_begin(begin), self.worker.config().kv_wire);
        let prefix_source = begin.prefix_source.clone();
        let (begin, kv_format) = begin_from_proto(begin)?;
        tracing::Span::current().record("request_id", &begin.request_id);
        // A second one is the state machine's to refuse; it must not replace the first.
        if !std::mem::replace(&mut self.has_begun, true) {
            self.extent = begin.extent;
            self.deadline = self.deadline.min(begin.deadline);
            let attempt = begin.attempt;
            self.asked = Some(Asked { request, kv_format, wire, attempt, prefix_source });
        }
        Ok(DecodeMessage::Begin(begin))
    }

    fn computed(&mut self, event: Option<PrefillEvent>) -> Input<FirstToken> {
        match event {
            Some(PrefillEvent::Started { cached_tokens }) => {
                self.cached_tokens = cached_tokens;
                Input::Started
            }
            Some(PrefillEvent::Ready { layers, first_block_idx, blocks }) => {
                self.num_ready += 1;
                Input::Ready { layers, first_block_idx, blocks }
            }
            Some(PrefillEvent::FirstToken(token)) => {
                self.no_more_events();
                Input::FirstToken(FirstToken { token, cached_tokens: self.cached_tokens })
            }
            Some(PrefillEvent::Failed(error)) => {
                self.no_more_events();
                Input::Fail(engine_failure(&error))
            }
            None => {
                self.no_more_events();
                Input::Fail(Failed::new(FailureKind::Internal, "the engine broke off"))
            }
        }
    }

    fn no_more_events(&mut self) {
        (self.events, self.pulse) = (None, None);
    }

    /// Does what was decided; what that leads to at once is the next input.
    fn act(&mut self, action: Action<FirstToken>) -> Option<Input<FirstToken>> {
        match action {
            Action::Compute => return self.compute().err().map(Input::Fail),
            Action::Hold => return self.hold_cached().err().map(Input::Fail),
            Action::Route { access_key, offers } => {
                let (sender, held) = (self.worker.data_plane().sender.clone(), self.held.clone());
                let (shard, wire) = self.destination.expect("known before anything is computed");
                self.routing =
                    Some(Box::pin(
                        async move { sender.route_to(&shard, wire, access_key, &offers, held).await },
                    ));
            }
            Action::Push(pieces) => {
                let route = self.route.as_ref().expect("the state machine pushes once it is routed");
                self.pushes.push(Box::pin(route.push(pieces)));
            }
            Action::Send(message) => self.stream.send(Ok(prefill_message_to_proto(message))),
            Action::Finish(result) => self.finish(result),
            Action::Stop => {
                self.no_more_events();
                self.fetching = None;
                self.holding = None;
                self.pushes.clear();
                let (routing, route) = (self.routing.take(), self.route.take());
                self.stopping = Some(Box::pin(close(routing, route)));
            }
            Action::Release => {
                self.no_more_events();
                self.route = None;
                self.held = None;
            }
            // `run` ends, and with it the stream.
            Action::Close => {}
        }
        None
    }

    /// Sees that the sequence can be computed here, fetches what another worker has of it, and has the rest computed.
    fn compute(&mut self) -> Result<(), Failed> {
        if self.worker.lifecycle().is_draining() {
            return Err(leaving());
        }
        self.accept()?;
        let asked = self.asked.as_ref().expect("Begin came with a request");
        self.worker.metrics().request_taken("handoff", asked.request.num_known_tokens());
        let Some(source) = asked.prefix_source.clone() else { return self.submit() };
        let fetch = prefix::fetch(self.worker.clone(), source, asked.attempt, asked.request.clone());
        self.fetching = Some(Box::pin(fetch));
        Ok(())
    }

    fn submit(&mut self) -> Result<(), Failed> {
        let request = self.asked.take().expect("it is computed once").request;
        let (events, held) = self.worker.engine().prefill(request).map_err(|error| submit_failure(&error))?;
        self.events = Some(events);
        self.pulse = Some(Pulse::new(self.deadline, self.worker.engine().num_computed_tokens()));
        self.held = Some(Arc::new(Held::Prefilled { _blocks: held }));
        Ok(())
    }

    /// Takes hold of what is cached here. That costs next to nothing, so a worker that is about to leave does it, too:
    /// it is how its requests go elsewhere.
    fn hold_cached(&mut self) -> Result<(), Failed> {
        self.accept()?;
        let request = self.asked.take().expect("Begin came with a request").request;
        let engine = self.worker.engine().clone();
        self.holding = Some(Box::pin(async move { engine.hold_cached(&request).await }));
        Ok(())
    }

    fn hold(&mut self, held: Result<CachedPrefix, SubmitError>) -> Input<FirstToken> {
        match held {
            Ok(prefix) => {
                let blocks = prefix.blocks().to_vec();
                self.held = Some(Arc::new(Held::Cached { _blocks: prefix }));
                Input::Held { blocks }
            }
            Err(error) => Input::Fail(submit_failure(&error)),
        }
    }

    /// Whether KV from here can be used there.
    fn accept(&mut self) -> Result<(), Failed> {
        let asked = self.asked.as_ref().expect("Begin came with a request");
        if let Some(difference) = self.worker.kv_format().difference(&asked.kv_format) {
            let message = format!("the workers' KV formats differ: {difference}");
            return Err(Failed::new(FailureKind::KvRejected, message));
        }
        // One rank on either side, as the formats agree on that.
        let destination = KvShard::of_format(&asked.kv_format, 0).map_err(|error| {
            Failed::new(
                FailureKind::KvRejected,
                format!("no blocks can be like the decode worker's: {error}"),
            )
        })?;
        self.destination = Some((destination, asked.wire));
        Ok(())
    }

    fn finish(&self, result: Result<(), HandoffError>) {
        let elapsed = self.started.elapsed();
        let metrics = self.worker.metrics();
        let outcome = result.as_ref().map_or_else(HandoffError::label, |()| "committed");
        match self.extent {
            Extent::Whole => {
                metrics.handoff_seconds.observe(elapsed.as_secs_f64());
                metrics.handoff_ended(outcome);
            }
            Extent::Cached => metrics.prefix_given(outcome),
        }
        let (transport, bytes) = self.moved.map_or(("none", 0), |(kind, bytes)| (kind.name(), bytes));
        match result {
            Ok(()) => tracing::debug!(transport, bytes, ?elapsed, "handed over"),
            Err(error) => tracing::info!(transport, bytes, ?elapsed, %error, "handoff ended"),
        }
    }
}

fn leaving() -> Failed {
    Failed::new(FailureKind::Draining, "this worker is leaving")
}

/// Closes a route, or the one that is just being opened: the peer must hear of either.
async fn close(routing: Option<Routing>, route: Option<Route>) {
    let opened = match routing {
        Some(routing) => routing.await.ok(),
        None => None,
    };
    if let Some(route) = route.or(opened) {
        route.close().await;
    }
}

async fn next_event(events: &mut Option<PrefillEvents>) -> Option<PrefillEvent> {
    match events {
        Some(events) => events.next().await,
        None => std::future::pending().await,
    }
}

async fn next_beat(pulse: &mut Option<Pulse>, count: impl Fn() -> u64) {
    match pulse {
        Some(pulse) => pulse.beat(count).await,
        None => std::future::pending().await,
    }
}
