//! A handoff stream that another worker has opened, until its first message. That message has the request and decides which
//! state machine continues.

use std::{sync::Arc, time::Instant};

use baton_handoff::{
    HandoffError, Limits,
    prefill::{CachedHandoff, ComputedHandoff, Opening, OpeningAction, OwnSide, PrefillAction, PrefillInput},
};
use baton_kv_cache::{KvFormat, KvLayout, WireFormat};
use baton_proto::worker::{self as proto, PrefillPeer};
use baton_request::{Failure, FailureKind, Request};
use baton_worker_messages::{
    FirstToken, WireError, begin_from_proto, prefill_message_to_proto, request_from_begin, wire_from_begin,
};
use tokio::sync::mpsc;
use tonic::{Status, Streaming};

use super::{
    prefill_side::{PrefillStream, input_from_stream},
    stream::{HandoffStream, StreamEvent, sleep_until},
};
use crate::{tickets::Uncovered, worker::Worker};

/// What the first message of a handoff asks for.
pub enum HandoffRequest {
    /// The decode worker asks for a prompt to be computed.
    Compute(OpenedHandoff<ComputedHandoff>, Option<PrefixSource>),
    /// Another worker asks for the cached prefix of a sequence.
    Fetch(OpenedHandoff<CachedHandoff>),
}

/// A handoff after its first message: the request, the stream, and the state machine that continues.
pub struct OpenedHandoff<M> {
    /// The state machine of the handoff.
    pub machine: M,
    /// The sequence.
    pub request: Request,
    /// Format of the peer's blocks.
    pub kv_format: KvFormat,
    /// Wire format that both sides have agreed on.
    pub wire: WireFormat,
    /// How long either side waits without progress.
    pub deadline: std::time::Duration,
    /// When the stream opened.
    pub started: Instant,
    /// The stream to the peer.
    pub stream: PrefillStream,
    /// Until load reports count the request.
    pub uncovered: Option<Uncovered>,
}

/// The worker that probably has more of a sequence cached than this one.
#[derive(Clone, Debug)]
pub struct PrefixSource {
    /// The worker.
    pub peer: PrefillPeer,
    /// How often the router planned the request before.
    pub attempt: u32,
    /// The wire format to ask for; `None`: it chooses.
    pub wire: Option<WireFormat>,
}

/// The first message, decoded.
struct FirstMessage {
    begin: baton_handoff::Begin,
    cached_only: bool,
    request: Request,
    kv_format: KvFormat,
    wire: WireFormat,
    prefix_source: Option<PrefixSource>,
    uncovered: Option<Uncovered>,
}

enum Event {
    FirstMessage(Box<FirstMessage>),
    Other(PrefillInput),
}

/// Waits for the first message. `None` when the handoff has ended before it; the peer is told, and a metric counts it.
pub async fn open(
    worker: &Arc<Worker>,
    inbound: Streaming<proto::DecodeMessage>,
    outbound: mpsc::Sender<Result<proto::PrefillMessage, Status>>,
) -> Option<HandoffRequest> {
    let mut stream = HandoffStream::accepted(inbound, outbound);
    let started = Instant::now();
    let total = worker.config().handoff_deadline;
    let limits = Limits { total, stall: total.min(Limits::default().stall), ..Limits::default() };
    let KvLayout { block_size, num_layers, .. } = *worker.engine().storage().layout();
    let own = OwnSide { incarnation: worker.incarnation(), block_size, num_layers };
    let mut opening = Opening::new(own, limits, started);
    loop {
        let (served, actions) = match next_event(worker, &mut stream, opening.deadline()).await {
            Event::FirstMessage(message) => {
                let FirstMessage { begin, cached_only, request, kv_format, wire, prefix_source, uncovered } =
                    *message;
                let (now, deadline) = (Instant::now(), total.min(begin.deadline));
                if cached_only {
                    match opening.fetch(&begin, now) {
                        Ok(machine) => {
                            let opened = OpenedHandoff {
                                machine,
                                request,
                                kv_format,
                                wire,
                                deadline,
                                started,
                                stream,
                                uncovered,
                            };
                            return Some(HandoffRequest::Fetch(opened));
                        }
                        Err(actions) => (Served::CachedPrefix, actions),
                    }
                } else {
                    match opening.begin(&begin, now) {
                        Ok(machine) => {
                            let opened = OpenedHandoff {
                                machine,
                                request,
                                kv_format,
                                wire,
                                deadline,
                                started,
                                stream,
                                uncovered,
                            };
                            return Some(HandoffRequest::Compute(opened, prefix_source));
                        }
                        Err(actions) => (Served::Prompt, actions),
                    }
                }
            }
            Event::Other(input) => match opening.on(input, Instant::now()) {
                Ok(waiting) => {
                    opening = waiting;
                    continue;
                }
                Err(actions) => (Served::Prompt, actions),
            },
        };
        end(worker, served, actions, started, stream).await;
        return None;
    }
}

impl OpenedHandoff<ComputedHandoff> {
    /// Refuses to compute the prompt.
    pub async fn decline(self, worker: &Worker, failure: Failure) {
        end(worker, Served::Prompt, Opening::declined(failure), self.started, self.stream).await;
    }
}

impl OpenedHandoff<CachedHandoff> {
    /// Refuses to hand over what is cached.
    pub async fn decline(self, worker: &Worker, failure: Failure) {
        end(worker, Served::CachedPrefix, Opening::declined(failure), self.started, self.stream).await;
    }
}

/// Why a worker that drains or shuts down refuses or ends a handoff.
pub fn draining_failure() -> Failure {
    Failure::new(FailureKind::Draining, "this worker is leaving")
}

/// What a handoff on the prefill side serves. Metrics count each separately.
#[derive(Clone, Copy, Debug)]
enum Served {
    Prompt,
    CachedPrefix,
}

async fn next_event(worker: &Worker, stream: &mut PrefillStream, deadline: Instant) -> Event {
    let halted = worker.lifecycle().halted();
    let event = tokio::select! {
        biased;
        () = sleep_until(Some(deadline)) => return Event::Other(PrefillInput::Tick),
        event = stream.next() => event,
        () = halted.cancelled() => return Event::Other(PrefillInput::Fail(draining_failure())),
    };
    let begin = match event {
        StreamEvent::Received(Ok(Some(proto::DecodeMessage {
            message: Some(proto::decode_message::Message::Begin(begin)),
        }))) => begin,
        event => return Event::Other(input_from_stream(stream, event)),
    };
    match first_message(worker, &begin) {
        Ok(message) => {
            tracing::Span::current().record("request_id", &message.begin.request_id);
            Event::FirstMessage(Box::new(message))
        }
        Err(error) => {
            stream.send(Err(error.clone().into()));
            stream.close();
            Event::Other(PrefillInput::StreamClosed(error.to_string()))
        }
    }
}

fn first_message(worker: &Worker, message: &proto::Begin) -> Result<FirstMessage, WireError> {
    let request = request_from_begin(message)?;
    let (begin, kv_format) = begin_from_proto(message)?;
    let wire = wire_from_begin(message);
    let source =
        |peer| PrefixSource { peer, attempt: message.attempt, wire: wire.or(worker.config().kv_wire) };
    Ok(FirstMessage {
        begin,
        cached_only: message.cached_only,
        request,
        kv_format,
        wire: WireFormat::agreed(wire, worker.config().kv_wire),
        prefix_source: message.prefix_source.clone().map(source),
        uncovered: worker.tickets().take(message.ticket),
    })
}

/// Ends a handoff that has no computation and no route: only messages remain.
async fn end(
    worker: &Worker,
    served: Served,
    actions: Vec<OpeningAction<FirstToken>>,
    started: Instant,
    mut stream: PrefillStream,
) {
    for action in actions {
        match action {
            PrefillAction::Send(message) => stream.send(Ok(prefill_message_to_proto(message))),
            PrefillAction::Finish(Err(error)) => count(worker, served, &error, started),
            PrefillAction::Finish(Ok(never)) => match never {},
            PrefillAction::Route { .. }
            | PrefillAction::Push(_)
            | PrefillAction::Stop
            | PrefillAction::Release
            | PrefillAction::Close => {}
        }
    }
    stream.end().await;
}

fn count(worker: &Worker, served: Served, error: &HandoffError, started: Instant) {
    let (metrics, elapsed) = (worker.metrics(), started.elapsed());
    match served {
        Served::Prompt => {
            metrics.handoff_seconds.observe(elapsed.as_secs_f64());
            metrics.handoff_ended(error.label());
        }
        Served::CachedPrefix => metrics.prefix_handed_over(error.label()),
    }
    tracing::info!(?elapsed, %error, "handoff refused or broken off before any work started");
}
