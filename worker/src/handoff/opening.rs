//! A handoff stream that another worker has opened, until its first message: who may continue it, and with what request.

use std::{sync::Arc, time::Instant};

use baton_handoff::{
    HandoffError, Limits,
    prefill::{
        CachedHandoff, ComputedHandoff, Opening, OpeningAction, OwnBlocks, PrefillAction, PrefillInput,
    },
};
use baton_kv_cache::{KvFormat, KvLayout, WireFormat};
use baton_proto::worker::{self as proto, PrefillPeer};
use baton_request::{Failure, FailureKind, Request};
use tokio::sync::mpsc;
use tonic::{Status, Streaming};

use super::{
    giving::{GivingStream, read},
    stream::{HandoffStream, StreamEvent, sleep_until},
};
use crate::{
    convert::{WireError, request_from_begin},
    convert_handoff::{FirstToken, begin_from_proto, prefill_message_to_proto, wire_from_begin},
    worker::Worker,
};

/// A handoff whose first message has come.
pub enum OpenedHandoff {
    /// The decode worker wants a prompt to be computed.
    Compute(Begun<ComputedHandoff>, Option<PrefixSource>),
    /// Another worker wants what is cached of a sequence.
    Fetch(Begun<CachedHandoff>),
}

/// What every handoff begins with, and the state machine that continues it.
pub struct Begun<M> {
    /// Decides what to do.
    pub machine: M,
    /// The sequence.
    pub request: Request,
    /// What the peer's blocks mean.
    pub kv_format: KvFormat,
    /// How KV travels, as both sides agree.
    pub wire: WireFormat,
    /// How long either side waits without a sign of progress.
    pub deadline: std::time::Duration,
    /// When the stream opened.
    pub started: Instant,
    /// To the peer.
    pub stream: GivingStream,
}

/// The worker that probably has more of a sequence cached than this one.
#[derive(Clone, Debug)]
pub struct PrefixSource {
    /// It.
    pub peer: PrefillPeer,
    /// How often the router planned the request before.
    pub attempt: u32,
}

/// The request in a first message.
struct Asked {
    begin: baton_handoff::Begin,
    cached_only: bool,
    request: Request,
    kv_format: KvFormat,
    wire: WireFormat,
    prefix_source: Option<PrefixSource>,
}

enum First {
    Asked(Box<Asked>),
    Other(PrefillInput),
}

/// Waits for the first message. `None` when the handoff ended before it; that was counted and said to the peer.
pub async fn open(
    worker: &Arc<Worker>,
    inbound: Streaming<proto::DecodeMessage>,
    outbound: mpsc::Sender<Result<proto::PrefillMessage, Status>>,
) -> Option<OpenedHandoff> {
    let mut stream = HandoffStream::accepted(inbound, outbound);
    let started = Instant::now();
    let total = worker.config().handoff_deadline;
    let limits = Limits { total, stall: total.min(Limits::default().stall), ..Limits::default() };
    let KvLayout { block_size, num_layers, .. } = *worker.engine().storage().layout();
    let own = OwnBlocks { incarnation: worker.incarnation(), block_size, num_layers };
    let mut opening = Opening::new(own, limits, started);
    loop {
        let over = match first(worker, &mut stream, opening.deadline()).await {
            First::Asked(asked) => {
                let Asked { begin, cached_only, request, kv_format, wire, prefix_source } = *asked;
                let (now, deadline) = (Instant::now(), total.min(begin.deadline));
                if cached_only {
                    match opening.fetch(&begin, now) {
                        Ok(machine) => {
                            let begun =
                                Begun { machine, request, kv_format, wire, deadline, started, stream };
                            return Some(OpenedHandoff::Fetch(begun));
                        }
                        Err(over) => (Served::CachedPrefix, over),
                    }
                } else {
                    match opening.begin(&begin, now) {
                        Ok(machine) => {
                            let begun =
                                Begun { machine, request, kv_format, wire, deadline, started, stream };
                            return Some(OpenedHandoff::Compute(begun, prefix_source));
                        }
                        Err(over) => (Served::Prompt, over),
                    }
                }
            }
            First::Other(input) => match opening.on(input, Instant::now()) {
                Ok(waiting) => {
                    opening = waiting;
                    continue;
                }
                Err(over) => (Served::Prompt, over),
            },
        };
        let (served, actions) = over;
        end(worker, served, actions, started, stream).await;
        return None;
    }
}

impl Begun<ComputedHandoff> {
    /// Refuses to compute the prompt.
    pub async fn decline(self, worker: &Worker, failure: Failure) {
        end(worker, Served::Prompt, Opening::declined(failure), self.started, self.stream).await;
    }
}

impl Begun<CachedHandoff> {
    /// Refuses to hand over what is cached.
    pub async fn decline(self, worker: &Worker, failure: Failure) {
        end(worker, Served::CachedPrefix, Opening::declined(failure), self.started, self.stream).await;
    }
}

/// What a worker that leaves says.
pub fn leaving() -> Failure {
    Failure::new(FailureKind::Draining, "this worker is leaving")
}

/// What a handoff on the prefill side serves, and so how it is counted.
#[derive(Clone, Copy, Debug)]
enum Served {
    Prompt,
    CachedPrefix,
}

async fn first(worker: &Worker, stream: &mut GivingStream, deadline: Instant) -> First {
    let halted = worker.lifecycle().halted();
    let event = tokio::select! {
        biased;
        () = sleep_until(Some(deadline)) => return First::Other(PrefillInput::Tick),
        event = stream.next() => event,
        () = halted.cancelled() => return First::Other(PrefillInput::Fail(leaving())),
    };
    let begin = match event {
        StreamEvent::Received(Ok(Some(proto::DecodeMessage {
            message: Some(proto::decode_message::Message::Begin(begin)),
        }))) => begin,
        event => return First::Other(read(stream, event)),
    };
    match asked(worker, &begin) {
        Ok(asked) => {
            tracing::Span::current().record("request_id", &asked.begin.request_id);
            First::Asked(Box::new(asked))
        }
        Err(error) => {
            stream.send(Err(error.clone().into()));
            stream.close();
            First::Other(PrefillInput::StreamClosed(error.to_string()))
        }
    }
}

fn asked(worker: &Worker, message: &proto::Begin) -> Result<Asked, WireError> {
    let request = request_from_begin(message)?;
    let (begin, kv_format) = begin_from_proto(message)?;
    let source = |peer| PrefixSource { peer, attempt: message.attempt };
    Ok(Asked {
        begin,
        cached_only: message.cached_only,
        request,
        kv_format,
        wire: WireFormat::agreed(wire_from_begin(message), worker.config().kv_wire),
        prefix_source: message.prefix_source.clone().map(source),
    })
}

/// Nothing was begun: only messages are left.
async fn end(
    worker: &Worker,
    served: Served,
    actions: Vec<OpeningAction<FirstToken>>,
    started: Instant,
    mut stream: GivingStream,
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
        Served::CachedPrefix => metrics.prefix_given(error.label()),
    }
    tracing::info!(?elapsed, %error, "handoff ended before it began");
}
