//! A prompt that a prefill worker computes. Its first token goes to the router at once, its KV into reserved blocks of this
//! worker. The engine decodes with these blocks when all KV is verified.
//!
//! This is the driver of [`RemotePrefill`]: it feeds the state machine with events of the stream, the engine, the data plane,
//! the router and the clock, and carries out its actions.

use std::{
    collections::VecDeque,
    future::poll_fn,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use baton_engine::{Reservation, SampledToken, Submission, TokenStream};
use baton_handoff::{
    HandoffError, PrefillMessage, Side, TransportKind,
    decode::{Committed, DecodeAction, DecodeInput, RemotePrefill, RemotePrefillAction, RemotePrefilled},
};
use baton_kv_cache::WireFormat;
use baton_proto::worker::{PrefillPeer, Ticket};
use baton_request::{Failure, FailureKind, FinishReason, Request};
use baton_telemetry::{KeyValue, TracePoint, trace_context};
use baton_worker::{
    PromptPace, Uncovered, Worker,
    handoff::{
        decode_side::{DecodeSide, FENCING, begin, limits},
        opening::draining_failure,
        pulse::Pulse,
        stream::sleep_until,
    },
    peers::Link,
};
use baton_worker_messages::{FirstToken, submit_failure};
use tokio::sync::mpsc;
use tracing::Span;

/// The router's plan for a request whose prompt another worker computes.
pub struct RemotePrefillPlan {
    /// How often the router planned the request before.
    pub attempt: u32,
    /// The worker that computes the prompt.
    pub peer: PrefillPeer,
    /// The connection to it.
    pub link: Link,
    /// The wire format to ask for; `None`: the prefill worker chooses.
    pub wire: Option<WireFormat>,
    /// The worker from which the peer fetches a cached prefix before it computes.
    pub prefix_source: Option<PrefillPeer>,
    /// The router's number for what the peer gets.
    pub ticket: Option<Ticket>,
}

/// An event of a remote prefill for the router's stream.
#[derive(Debug)]
pub enum RemotePrefillEvent {
    /// The prefill worker has sampled the first token.
    First {
        /// The token.
        token: SampledToken,
        /// Prompt tokens found in the prefill worker's cache.
        cached_tokens: usize,
        /// Prompt tokens whose KV came from passages that the prefill worker had kept.
        blended_tokens: usize,
        /// What it took.
        pace: PromptPace,
        /// Present when the token ends the request.
        finish: Option<FinishReason>,
    },
    /// The engine decodes.
    Decoding {
        /// The stream of the tokens after the first.
        tokens: TokenStream,
        /// When the engine was asked for blocks.
        reserving: Instant,
        /// When it had them.
        granted: Instant,
        /// From when there were both the first token and blocks until the KV was here.
        exposed: Duration,
        /// What carried it.
        transport: &'static str,
    },
    /// No token follows.
    Failed(Failure),
}

/// The driver of a [`RemotePrefill`].
pub struct RemotePrefillDriver {
    machine: RemotePrefill,
    /// Actions of the machine that are not done yet.
    actions: VecDeque<RemotePrefillAction<FirstToken>>,
    started: Instant,
    /// How long the prefill worker may take to close its route after the commit.
    stall: Duration,
    /// When the prefill worker began to compute.
    computing: Option<Instant>,
    /// When the wait for blocks began, and when it ended; `started` before.
    reserving: Instant,
    granted: Instant,
    request: Request,
    /// The same for this worker's engine, until blocks are reserved.
    submission: Option<Submission>,
    prefix_source: Option<PrefillPeer>,
    side: DecodeSide<Reservation>,
    /// Until the engine counts the request: when it waits there for its blocks.
    uncovered: Option<Uncovered>,
    /// The router's stream. Closed when the router has stopped reading.
    events: mpsc::Sender<RemotePrefillEvent>,
    sent: SentToRouter,
    num_progress: Arc<AtomicU64>,
    /// Tells when to report progress of this worker.
    pulse: Pulse,
}

/// What the router's stream has received.
enum SentToRouter {
    Nothing,
    /// The first token, at this time.
    FirstToken(SampledToken, Instant),
    /// Its last event, or the router has gone.
    End,
}

impl RemotePrefillDriver {
    /// Opens the stream to the prefill worker. `deadline` bounds everything except the computation there.
    pub fn new(
        worker: Arc<Worker>,
        submission: Submission,
        plan: RemotePrefillPlan,
        uncovered: Option<Uncovered>,
        deadline: Duration,
        events: mpsc::Sender<RemotePrefillEvent>,
    ) -> RemotePrefillDriver {
        let RemotePrefillPlan { attempt, peer, link, wire, prefix_source, ticket } = plan;
        let started = Instant::now();
        let request = submission.request.clone();
        let begin = begin(&worker, &peer, attempt, &request, deadline);
        let num_layers = worker.engine().storage().layout().num_layers;
        let limits = limits(deadline);
        let (machine, actions) = RemotePrefill::begin(begin, num_layers, limits, started);
        let pulse = Pulse::new(deadline, num_moved(&worker));
        let side = DecodeSide::new(worker, link, peer, wire).with_ticket(ticket);
        RemotePrefillDriver {
            machine,
            actions: actions.into(),
            started,
            stall: limits.stall,
            computing: None,
            reserving: started,
            granted: started,
            request,
            submission: Some(submission),
            prefix_source,
            side,
            uncovered,
            events,
            sent: SentToRouter::Nothing,
            num_progress: Arc::default(),
            pulse,
        }
    }

    /// Counts the `Progress` messages of the prefill worker.
    pub fn num_progress(&self) -> Arc<AtomicU64> {
        self.num_progress.clone()
    }

    /// Drives the handoff to its end.
    pub async fn run(mut self) {
        loop {
            while let Some(action) = self.actions.pop_front() {
                self.act(action).await;
            }
            if self.machine.is_over() {
                break;
            }
            let input = self.next().await;
            self.actions.extend(self.machine.on(input, Instant::now()));
        }
        self.side.end().await;
    }

    async fn next(&mut self) -> DecodeInput<FirstToken> {
        let worker = self.side.worker().clone();
        let halted = worker.lifecycle().halted();
        let deadline = self.machine.deadline();
        let reads_progress = self.side.reads_progress();
        let is_read = !matches!(self.sent, SentToRouter::End);
        let why = tokio::select! {
            // The deadline comes first: a busy stream must not delay it.
            biased;
            // Invariant 6: the deadline of the reservation.
            () = sleep_until(deadline) => return DecodeInput::Tick,
            input = self.side.next() => {
                match &input {
                    DecodeInput::Message(PrefillMessage::Progress) => {
                        self.num_progress.fetch_add(1, Ordering::Relaxed);
                    }
                    DecodeInput::Message(PrefillMessage::Started) => self.computing = Some(Instant::now()),
                    DecodeInput::Granted(_) => {
                        self.granted = Instant::now();
                        let waited = self.granted - self.reserving;
                        worker.metrics().block_wait_seconds.observe(waited.as_secs_f64());
                    }
                    _ => {}
                }
                return input;
            }
            // A peer that would not learn of it waits no longer than before.
            () = self.pulse.beat(|| num_moved(&worker)), if reads_progress => return DecodeInput::Progress,
            () = self.events.closed(), if is_read => "the request was cancelled",
            () = halted.cancelled(), if is_read => "this worker is leaving",
        };
        self.sent = SentToRouter::End;
        DecodeInput::Cancel(why.into())
    }

    async fn act(&mut self, action: RemotePrefillAction<FirstToken>) {
        match action {
            DecodeAction::Send(message) => {
                self.side.send(message, &self.request, self.prefix_source.as_ref());
            }
            DecodeAction::Reserve { .. } => {
                self.reserving = Instant::now();
                let (worker, uncovered) = (self.side.worker().clone(), self.uncovered.take());
                let submission = self.submission.take().unwrap_or_else(|| self.request.clone().into());
                let reserving = reserve(worker, submission, uncovered);
                self.side.reserve(Box::pin(reserving));
            }
            DecodeAction::FirstToken(first) => {
                if self.forward(first).is_some() {
                    self.actions.extend(self.machine.request_ended(Instant::now()));
                }
            }
            DecodeAction::Verify(pieces) => self.side.verify(pieces),
            DecodeAction::Revoke(generation) => self.side.revoke(generation),
            DecodeAction::WriterStopped(generation) => self.side.writer_stopped(generation),
            DecodeAction::Finish(result) => self.finish(result).await,
            // `run` ends, and with it the stream.
            DecodeAction::Close => {}
        }
    }

    /// Sends the first token to the router, with the finish reason if the token ends the request.
    fn forward(&mut self, first: FirstToken) -> Option<FinishReason> {
        let FirstToken { token, cached_tokens, blended_tokens, pace } = first;
        let context_length = self.side.worker().engine().context_length();
        let num_output_tokens = self.request.output.len() + 1;
        let finish = self.request.finish_after(num_output_tokens, token.id, context_length);
        // Older prefill workers do not say it.
        let pace = pace.unwrap_or_else(|| PromptPace::new(self.started, self.computing, Instant::now()));
        let event =
            RemotePrefillEvent::First { token: token.clone(), cached_tokens, blended_tokens, pace, finish };
        self.send_event(event);
        self.sent = match (&self.sent, finish) {
            (SentToRouter::Nothing, None) => SentToRouter::FirstToken(token, Instant::now()),
            _ => SentToRouter::End,
        };
        finish
    }

    async fn finish(&mut self, result: Result<RemotePrefilled, HandoffError>) {
        let elapsed = self.started.elapsed();
        self.trace(&result);
        let metrics = self.side.worker().metrics();
        metrics.handoff_seconds.observe(elapsed.as_secs_f64());
        metrics.handoff_ended(result.as_ref().map_or_else(HandoffError::label, RemotePrefilled::label));
        let peer = self.side.peer().worker_id.clone();
        match result {
            Ok(RemotePrefilled::Committed(committed)) => self.decode(&committed, &peer, elapsed).await,
            Ok(RemotePrefilled::Ended) => {
                self.side.cancel_reservation();
                tracing::info!(prefill = %peer, ?elapsed, "the first token ended the request; its kv is not needed");
            }
            Err(error) => {
                self.side.cancel_reservation();
                tracing::info!(prefill = %peer, ?elapsed, %error, "handoff ended");
                // Invariant 9: a failed handoff is reported, not repeated. The router plans again.
                self.send_event(RemotePrefillEvent::Failed(failure_of(&error)));
            }
        }
        self.sent = SentToRouter::End;
    }

    /// Records what the request waited for, under this handoff's span.
    fn trace(&self, result: &Result<RemotePrefilled, HandoffError>) {
        let span = Span::current();
        // What is not wanted any more has not failed.
        if let Err(error) = result
            && !matches!(error, HandoffError::Cancelled(_))
        {
            trace_context::fail(&span, error.label(), &error.to_string());
        }
        let Some(trace) = TracePoint::of(&span) else { return };
        if let Some(computing) = self.computing {
            trace.record("wait for prefill worker", self.started, computing, vec![]);
        }
        if self.granted > self.reserving {
            trace.record("wait for blocks", self.reserving, self.granted, vec![]);
        }
        if let (Ok(RemotePrefilled::Committed(committed)), SentToRouter::FirstToken(_, sampled)) =
            (result, &self.sent)
        {
            let attributes = vec![
                KeyValue::new("transport", committed.transport.map_or("none", |kind| kind.name())),
                KeyValue::new("bytes", committed.bytes as i64),
            ];
            let since = self.granted.max(*sampled);
            trace.record("exposed transfer", since, Instant::now(), attributes);
        }
    }

    /// All KV is verified: gives the blocks to the engine.
    async fn decode(&mut self, committed: &Committed, peer: &str, elapsed: Duration) {
        let halted = self.side.worker().lifecycle().halted();
        // Invariant 4: only the machine's commit leads here, so the engine never sees unverified blocks. Blocks that are not waited
        // for return by themselves.
        let committed_blocks = tokio::select! {
            biased;
            blocks = self.side.commit() => blocks,
            () = tokio::time::sleep(self.stall) => Err(failure_of(&HandoffError::Deadline { state: FENCING })),
            () = self.events.closed() => Err(Failure::new(FailureKind::Internal, "the request was cancelled")),
            () = halted.cancelled() => Err(draining_failure()),
        };
        // If the router has gone or the request has ended, no token is needed: the blocks return to the pool.
        let SentToRouter::FirstToken(token, sampled) = std::mem::replace(&mut self.sent, SentToRouter::End)
        else {
            return;
        };
        let worker = self.side.worker();
        // While it has no blocks, it waits for them, not for the transfer.
        let exposed = self.granted.max(sampled).elapsed();
        worker.metrics().exposed_seconds.observe(exposed.as_secs_f64());
        let transport = committed.transport.map_or("none", |kind| kind.name());
        tracing::info!(prefill = %peer, transport, bytes = committed.bytes, ?elapsed, ?exposed, "kv received");
        let decoding = committed_blocks.and_then(|reservation| {
            // Invariant 1: the router already has the first token, so the engine starts after it.
            worker.engine().decode(reservation, token).map_err(|error| submit_failure(&error))
        });
        let event = match decoding {
            Ok(tokens) => {
                let (reserving, granted) = (self.reserving, self.granted);
                RemotePrefillEvent::Decoding { tokens, reserving, granted, exposed, transport }
            }
            Err(failure) => {
                tracing::info!(prefill = %peer, error = failure.message, "the received kv is not decoded; the request fails here");
                RemotePrefillEvent::Failed(failure)
            }
        };
        let _ = self.events.try_send(event);
    }

    /// Sends an event to the router's stream, unless the stream has its last event or the router has gone.
    fn send_event(&self, event: RemotePrefillEvent) {
        if !matches!(self.sent, SentToRouter::End) {
            // The channel has room for all events of a handoff. It is closed when the router has gone.
            let _ = self.events.try_send(event);
        }
    }
}

/// Waits for blocks for the request, and for a running slot. Load reports count it, and its blocks, as soon as it waits.
async fn reserve(
    worker: Arc<Worker>,
    submission: Submission,
    mut uncovered: Option<Uncovered>,
) -> Result<Reservation, Failure> {
    let mut reserving = pin!(worker.engine().reserve(submission));
    let reserved = poll_fn(|cx| {
        let polled = reserving.as_mut().poll(cx);
        // The first poll has submitted it.
        drop(uncovered.take());
        polled
    });
    reserved.await.map_err(|error| submit_failure(&error))
}

/// Grows while the queue of a decode worker moves: its engine computes, or KV arrives for requests that hold blocks.
fn num_moved(worker: &Worker) -> u64 {
    let counters = worker.data_plane().receiver.counters();
    let num_bytes: u64 = TransportKind::ALL.map(|kind| counters.of(kind).read().bytes).iter().sum();
    num_bytes + worker.engine().num_computed_tokens()
}

/// The failure that the router receives when a handoff fails.
fn failure_of(error: &HandoffError) -> Failure {
    match error {
        // The kind tells the router which of the two workers to avoid.
        HandoffError::Refused { by, failed } => {
            let kind = match (by, failed.kind) {
                (Side::Prefill, FailureKind::Draining) => FailureKind::PrefillDraining,
                (Side::Prefill, FailureKind::Full) => FailureKind::PrefillFull,
                (_, kind) => kind,
            };
            Failure::new(kind, failed.message.clone())
        }
        error => Failure::new(error.kind(), error.to_string()),
    }
}
