//! A prompt that a prefill worker computes: its first token goes to the router at once, its KV into reserved blocks here, and
//! the engine decodes on these when all is verified.
//!
//! This is the driver of [`RemotePrefill`]: it feeds the state machine with what the stream, the engine, the data plane, the
//! router and the clock say, and does what it decides.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use baton_engine::{Reservation, SampledToken, TokenStream};
use baton_handoff::{
    HandoffError, PrefillMessage, Side,
    decode::{Committed, DecodeAction, DecodeInput, RemotePrefill, RemotePrefillAction, RemotePrefilled},
};
use baton_kv_cache::WireFormat;
use baton_proto::worker::PrefillPeer;
use baton_request::{Failure, FailureKind, FinishReason, Request};
use baton_worker::{
    Worker,
    convert::submit_failure,
    convert_handoff::FirstToken,
    handoff::{
        stream::sleep_until,
        taking::{Taking, begin, limits},
    },
    peers::Link,
};
use tokio::sync::mpsc;

/// What the router decided.
#[derive(Clone, Debug)]
pub struct RemotePrefillPlan {
    /// The request.
    pub request: Request,
    /// How often it was planned before.
    pub attempt: u32,
    /// The worker that computes the prompt.
    pub peer: PrefillPeer,
    /// How KV may travel; `None`: as the prefill worker prefers.
    pub wire: Option<WireFormat>,
    /// The worker that the peer asks for a cached prefix before it computes.
    pub prefix_source: Option<PrefillPeer>,
}

/// What a remote prefill gives to the router's stream.
#[derive(Debug)]
pub enum RemotePrefillEvent {
    /// Sampled by the prefill worker.
    First {
        /// The token.
        token: SampledToken,
        /// Prompt tokens found in the prefill worker's cache.
        cached_tokens: usize,
        /// Present when the token ends the request.
        finish: Option<FinishReason>,
    },
    /// The KV has arrived; these are the tokens after the first.
    Decoding(TokenStream),
    /// There will be no more tokens.
    Failed(Failure),
}

/// The driver of a [`RemotePrefill`].
pub struct RemotePrefillDriver {
    machine: RemotePrefill,
    first_actions: Vec<RemotePrefillAction<FirstToken>>,
    started: Instant,
    request: Request,
    prefix_source: Option<PrefillPeer>,
    taking: Taking<Reservation>,
    /// The router's stream; closed when it is not read any more.
    events: mpsc::Sender<RemotePrefillEvent>,
    told: Told,
    num_beats: Arc<AtomicU64>,
}

/// What the router's stream was told.
enum Told {
    Nothing,
    /// The first token, at this time.
    First(SampledToken, Instant),
    /// Its end, or it has left.
    End,
}

impl RemotePrefillDriver {
    /// Opens the stream to the prefill worker. `deadline` bounds everything except the computation there.
    pub fn new(
        worker: Arc<Worker>,
        link: Link,
        plan: RemotePrefillPlan,
        deadline: Duration,
        events: mpsc::Sender<RemotePrefillEvent>,
    ) -> RemotePrefillDriver {
        let RemotePrefillPlan { request, attempt, peer, wire, prefix_source } = plan;
        let started = Instant::now();
        let begin = begin(&worker, &peer, attempt, &request, deadline);
        let num_layers = worker.engine().storage().layout().num_layers;
        let (machine, first_actions) = RemotePrefill::begin(begin, num_layers, limits(deadline), started);
        let taking = Taking::new(worker, link, peer, wire);
        RemotePrefillDriver {
            machine,
            first_actions,
            started,
            request,
            prefix_source,
            taking,
            events,
            told: Told::Nothing,
            num_beats: Arc::default(),
        }
    }

    /// Counts how often the prefill worker reported that it computes.
    pub fn num_beats(&self) -> Arc<AtomicU64> {
        self.num_beats.clone()
    }

    /// Drives it to its end.
    pub async fn run(mut self) {
        let mut actions = VecDeque::from(std::mem::take(&mut self.first_actions));
        loop {
            while let Some(action) = actions.pop_front() {
                actions.extend(self.act(action).await);
            }
            if self.machine.is_over() {
                break;
            }
            let input = self.next().await;
            actions.extend(self.machine.on(input, Instant::now()));
        }
        self.taking.end().await;
    }

    async fn next(&mut self) -> DecodeInput<FirstToken> {
        let halted = self.taking.worker().lifecycle().halted();
        let deadline = self.machine.deadline();
        let is_read = !matches!(self.told, Told::End);
        let why = tokio::select! {
            // Time first, so that nothing busy outlives its deadline.
            biased;
            // Invariant 6: the deadline of the reservation.
            () = sleep_until(deadline) => return DecodeInput::Tick,
            input = self.taking.next() => {
                if let DecodeInput::Message(PrefillMessage::Progress) = &input {
                    self.num_beats.fetch_add(1, Ordering::Relaxed);
                }
                return input;
            }
            () = self.events.closed(), if is_read => "the request was cancelled",
            () = halted.cancelled(), if is_read => "this worker is leaving",
        };
        self.told = Told::End;
        DecodeInput::Cancel(why.into())
    }

    /// Does what was decided. Returns what that leads to at once.
    async fn act(&mut self, action: RemotePrefillAction<FirstToken>) -> Vec<RemotePrefillAction<FirstToken>> {
        match action {
            DecodeAction::Send(message) => {
                self.taking.send(message, &self.request, self.prefix_source.as_ref());
            }
            DecodeAction::Reserve { .. } => {
                let reserving = reserve(self.taking.worker().clone(), self.request.clone());
                self.taking.reserve(Box::pin(reserving));
            }
            DecodeAction::FirstToken(first) => {
                if self.pass_on(first).is_some() {
                    return self.machine.request_ended(Instant::now());
                }
            }
            DecodeAction::Verify(pieces) => self.taking.verify(pieces),
            DecodeAction::Revoke(generation) => self.taking.revoke(generation),
            DecodeAction::WriterStopped(generation) => self.taking.writer_stopped(generation),
            DecodeAction::Finish(result) => self.finish(result).await,
            // `run` ends, and with it the stream.
            DecodeAction::Close => {}
        }
        Vec::new()
    }

    /// The router gets the first token at once, and the end with it if it ends the request.
    fn pass_on(&mut self, first: FirstToken) -> Option<FinishReason> {
        let FirstToken { token, cached_tokens } = first;
        let context_length = self.taking.worker().engine().context_length();
        let num_output_tokens = self.request.output.len() + 1;
        let finish = self.request.finish_after(num_output_tokens, token.id, context_length);
        self.tell(RemotePrefillEvent::First { token: token.clone(), cached_tokens, finish });
        self.told = match (&self.told, finish) {
            (Told::Nothing, None) => Told::First(token, Instant::now()),
            _ => Told::End,
        };
        finish
    }

    async fn finish(&mut self, result: Result<RemotePrefilled, HandoffError>) {
        let elapsed = self.started.elapsed();
        let metrics = self.taking.worker().metrics();
        metrics.handoff_seconds.observe(elapsed.as_secs_f64());
        metrics.handoff_ended(result.as_ref().map_or_else(HandoffError::label, RemotePrefilled::label));
        let peer = self.taking.peer().worker_id.clone();
        match result {
            Ok(RemotePrefilled::Committed(committed)) => self.decode(&committed, &peer, elapsed).await,
            Ok(RemotePrefilled::Ended) => {
                self.taking.give_up();
                tracing::info!(prefill = %peer, ?elapsed, "the first token ended the request; its kv is not needed");
            }
            Err(error) => {
                self.taking.give_up();
                tracing::info!(prefill = %peer, ?elapsed, %error, "handoff ended");
                // Invariant 9: a failed handoff is reported, not repeated. The router plans again.
                self.tell(RemotePrefillEvent::Failed(failure_of(&error)));
            }
        }
        self.told = Told::End;
    }

    /// The KV is here: gives the blocks to the engine.
    async fn decode(&mut self, committed: &Committed, peer: &str, elapsed: Duration) {
        // Invariant 4: only the machine's commit leads here, so the engine never sees unverified blocks.
        let committed_blocks = self.taking.commit().await;
        // A router that left, or whose request has ended, needs no more tokens: the blocks return.
        let Told::First(token, sampled) = std::mem::replace(&mut self.told, Told::End) else { return };
        let worker = self.taking.worker();
        let exposed = sampled.elapsed();
        worker.metrics().exposed_seconds.observe(exposed.as_secs_f64());
        let transport = committed.transport.map_or("none", |kind| kind.name());
        tracing::info!(prefill = %peer, transport, bytes = committed.bytes, ?elapsed, ?exposed, "kv received");
        let decoding = committed_blocks.and_then(|reservation| {
            // Invariant 1: the engine starts after the first token, which the router has already.
            worker.engine().decode(reservation, token).map_err(|error| submit_failure(&error))
        });
        let event = decoding.map_or_else(RemotePrefillEvent::Failed, RemotePrefillEvent::Decoding);
        let _ = self.events.try_send(event);
    }

    /// Tells the router's stream, unless it was told its end or has left.
    fn tell(&self, event: RemotePrefillEvent) {
        if !matches!(self.told, Told::End) {
            // The channel has room for all that a handoff says; a closed one is a router that left.
            let _ = self.events.try_send(event);
        }
    }
}

/// Blocks for the request, and a place to decode it: they are waited for.
async fn reserve(worker: Arc<Worker>, request: Request) -> Result<Reservation, Failure> {
    worker.engine().reserve(request).await.map_err(|error| submit_failure(&error))
}

/// What the router hears of a handoff that failed.
fn failure_of(error: &HandoffError) -> Failure {
    match error {
        // The router avoids the worker that drains, which is not this one.
        HandoffError::Refused { by: Side::Prefill, failed } if failed.kind == FailureKind::Draining => {
            Failure::new(FailureKind::PrefillDraining, failed.message.clone())
        }
        HandoffError::Refused { failed, .. } => failed.clone(),
        error => Failure::new(error.kind(), error.to_string()),
    }
}
