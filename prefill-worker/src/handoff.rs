//! A prompt that this worker computes for a decode worker. Its grammar is compiled, it waits in the engine's queue and is computed.
//! Each layer is pushed into the decode worker's blocks when it is final. The first token is sent when it is sampled.
//!
//! This is the driver of [`ComputedHandoff`]: it feeds the state machine with events of the stream, the engine, the data plane
//! and the clock, and carries out its actions.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use baton_engine::{HeldBlocks, PrefillEvent, PrefillEvents, Submission};
use baton_handoff::{
    HandoffError,
    prefill::{
        ComputeInput, ComputedHandoff, ComputedHandoffAction, HandedOver, PrefillAction, PrefillInput,
    },
};
use baton_request::{Failure, FailureKind, FinishReason, Request};
use baton_telemetry::{KeyValue, TracePoint, trace_context};
use baton_worker::{
    Meanwhile, Recall, RequestClock, SaveAtEnd, Uncovered, Worker, blending, bring_in,
    handoff::{
        opening::{OpenedHandoff, PrefixSource, draining_failure},
        prefill_side::{PeerFormat, PrefillSide},
        pulse::Pulse,
        stream::sleep_until,
    },
};
use baton_worker_messages::{FirstToken, engine_failure, submit_failure};
use futures_util::future::BoxFuture;
use tokio::time::timeout;
use tracing::Span;

/// The driver of a [`ComputedHandoff`].
pub struct ComputedHandoffDriver {
    machine: ComputedHandoff,
    started: Instant,
    /// How long either side waits without progress.
    deadline: Duration,
    side: PrefillSide,
    prompt: Prompt,
    clock: RequestClock,
    /// Of the model.
    num_layers: usize,
    /// When the first piece was ready.
    pushing: Option<Instant>,
    /// Saves the blocks when the handoff is over. `None` until the prompt is prepared.
    save: Option<SaveAtEnd>,
    is_halted: bool,
}

/// The prompt and its blocks.
enum Prompt {
    /// The engine does not have the prompt yet. Its grammar is compiled first, and a prefix that another worker has cached is
    /// fetched, if there are any.
    Preparing { prepare: BoxFuture<'static, Prepared>, uncovered: Option<Uncovered>, pulse: Pulse },
    /// The prompt is in the engine: it waits in the queue or is computed.
    Computing(Computing),
    /// The engine has finished. The route shares this guard; the last owner to drop it returns the blocks.
    Computed { blocks: Arc<HeldBlocks> },
    /// The blocks are returned to the pool, or there were none.
    Released,
}

/// What the engine gets, what saves its blocks, and what comes while it computes; or why it gets nothing.
type Prepared = Result<Box<(Submission, Option<SaveAtEnd>, Meanwhile)>, Failure>;

struct Computing {
    events: PrefillEvents,
    blocks: Arc<HeldBlocks>,
    /// Prompt tokens that were found in the prefix cache.
    cached_tokens: usize,
    /// Prompt tokens whose KV came from kept passages.
    blended_tokens: usize,
    /// Brings more of the prompt into the pool.
    _meanwhile: Meanwhile,
    /// Tells when to report progress to the decode worker.
    pulse: Pulse,
    /// `Ready` events of this sequence. They are progress within a step, which may be long.
    num_ready: u64,
}

enum Event {
    /// The grammar is compiled, and the fetch of a cached prefix has ended, with or without success. More may come while the prompt
    /// is computed.
    Prepared(Prepared),
    Engine(Option<PrefillEvent>),
    /// The engine has made progress, for any request, or a prefix is still brought in.
    Progress,
    Other(PrefillInput),
}

type Action = ComputedHandoffAction<FirstToken>;

impl ComputedHandoffDriver {
    /// Compiles the request's grammar and fetches the prefix that `source` has cached, if there are any. Then the engine computes the
    /// rest of the prompt.
    pub fn new(
        worker: Arc<Worker>,
        opened: OpenedHandoff<ComputedHandoff>,
        source: Option<PrefixSource>,
        peer_format: PeerFormat,
    ) -> ComputedHandoffDriver {
        let OpenedHandoff { machine, request, deadline, started, stream, uncovered, .. } = opened;
        let clock = worker.metrics().request_taken("handoff", request.num_known_tokens(), &Span::current());
        let prepare = Box::pin(prepare(worker.clone(), request, source, deadline));
        let pulse = Pulse::new(deadline, worker.engine().num_computed_tokens());
        let prompt = Prompt::Preparing { prepare, uncovered, pulse };
        let num_layers = worker.engine().storage().layout().num_layers;
        let side = PrefillSide::new(worker, stream, peer_format);
        ComputedHandoffDriver {
            machine,
            started,
            deadline,
            side,
            prompt,
            clock,
            num_layers,
            pushing: None,
            save: None,
            is_halted: false,
        }
    }

    /// Drives the handoff to its end.
    pub async fn run(mut self) {
        let mut actions = VecDeque::new();
        while !self.machine.is_over() {
            let event = self.next().await;
            actions.extend(self.take(event));
            while let Some(action) = actions.pop_front() {
                self.act(action);
            }
        }
        self.side.end().await;
    }

    async fn next(&mut self) -> Event {
        let worker = self.side.worker();
        let (engine, halted) = (worker.engine().clone(), worker.lifecycle().halted());
        let deadline = self.machine.deadline();
        tokio::select! {
            // The deadline comes first: a busy stream must not delay it. The halt comes last: an event that is ready gives a
            // better reason.
            biased;
            () = sleep_until(deadline) => Event::Other(PrefillInput::Tick),
            event = self.prompt.next(|| engine.num_computed_tokens()) => event,
            input = self.side.next() => Event::Other(input),
            () = halted.cancelled(), if !self.is_halted => {
                self.is_halted = true;
                Event::Other(PrefillInput::Fail(draining_failure()))
            }
        }
    }

    fn take(&mut self, event: Event) -> Vec<Action> {
        let input = match event {
            Event::Prepared(prepared) => match self.submit(prepared) {
                Ok(()) => return Vec::new(),
                Err(failure) => ComputeInput::Other(PrefillInput::Fail(failure)),
            },
            Event::Engine(event) => self.engine_event(event),
            Event::Progress => ComputeInput::Progress,
            Event::Other(input) => ComputeInput::Other(input),
        };
        self.machine.on(input, Instant::now())
    }

    /// Gives the prompt to the engine.
    fn submit(&mut self, prepared: Prepared) -> Result<(), Failure> {
        let Prompt::Preparing { uncovered, .. } = std::mem::replace(&mut self.prompt, Prompt::Released)
        else {
            return Ok(());
        };
        let (submission, save, meanwhile) = *prepared?;
        self.save = save;
        self.clock.submitted(Instant::now());
        let engine = self.side.worker().engine();
        let (events, blocks) = engine.prefill(submission).map_err(|error| submit_failure(&error))?;
        // The engine counts it from here on.
        drop(uncovered);
        let pulse = Pulse::new(self.deadline, engine.num_computed_tokens());
        let blocks = Arc::new(blocks);
        self.prompt = Prompt::Computing(Computing {
            events,
            blocks,
            cached_tokens: 0,
            blended_tokens: 0,
            _meanwhile: meanwhile,
            pulse,
            num_ready: 0,
        });
        Ok(())
    }

    fn engine_event(&mut self, event: Option<PrefillEvent>) -> ComputeInput<FirstToken> {
        let Prompt::Computing(computing) = &mut self.prompt else { return ComputeInput::Progress };
        let sent_at = computing.events.sent_at();
        let failure = match event {
            Some(PrefillEvent::Started { cached_tokens }) => {
                computing.cached_tokens = cached_tokens;
                self.clock.admitted(sent_at);
                return ComputeInput::Started;
            }
            Some(PrefillEvent::Adopted { cached_tokens }) => {
                computing.cached_tokens += cached_tokens;
                return ComputeInput::Progress;
            }
            Some(PrefillEvent::Blended { reused_tokens }) => {
                computing.blended_tokens = reused_tokens;
                return ComputeInput::Progress;
            }
            Some(PrefillEvent::Ready { layers, first_block_idx, blocks }) => {
                computing.num_ready += 1;
                if layers.end == self.num_layers {
                    self.clock.chunk(sent_at, first_block_idx + blocks.len());
                }
                return ComputeInput::Ready { layers, first_block_idx, blocks };
            }
            Some(PrefillEvent::FirstToken(token)) => {
                let &mut Computing { cached_tokens, blended_tokens, .. } = computing;
                let pace = self.clock.token(sent_at);
                self.prompt.stop_computing();
                return ComputeInput::FirstToken(FirstToken { token, cached_tokens, blended_tokens, pace });
            }
            Some(PrefillEvent::Failed(error)) => engine_failure(&error),
            None => Failure::new(FailureKind::Internal, "the engine ended the request without an outcome"),
        };
        self.prompt.stop_computing();
        ComputeInput::Other(PrefillInput::Fail(failure))
    }

    fn act(&mut self, action: Action) {
        match action {
            PrefillAction::Route { access_key, offers } => {
                let blocks = self.prompt.blocks();
                self.side.open_route(access_key, offers, blocks);
            }
            PrefillAction::Push(pieces) => {
                self.pushing.get_or_insert_with(Instant::now);
                self.side.push(pieces);
            }
            PrefillAction::Send(message) => self.side.send(message),
            PrefillAction::Finish(result) => self.finish(result),
            PrefillAction::Stop => {
                self.prompt.stop_computing();
                self.side.close_route();
            }
            PrefillAction::Release => {
                self.side.drop_route();
                self.prompt = Prompt::Released;
                self.save = None;
            }
            // `run` ends, and with it the stream.
            PrefillAction::Close => {}
        }
    }

    fn finish(&mut self, result: Result<HandedOver, HandoffError>) {
        let elapsed = self.started.elapsed();
        let metrics = self.side.worker().metrics();
        metrics.handoff_seconds.observe(elapsed.as_secs_f64());
        metrics.handoff_ended(result.as_ref().map_or_else(HandoffError::label, |outcome| outcome.label()));
        let (transport, bytes) = self.side.transferred();
        self.trace(&result, transport, bytes);
        match result {
            Ok(HandedOver::Committed) => {
                self.clock.finished(FinishReason::Length);
                tracing::debug!(transport, bytes, ?elapsed, "prompt handed over");
            }
            Ok(HandedOver::Ended) => {
                self.clock.finished(FinishReason::Stop);
                tracing::debug!(
                    transport,
                    bytes,
                    ?elapsed,
                    "the first token ended the request; its kv is not needed"
                );
            }
            Err(error) => {
                tracing::info!(transport, bytes, ?elapsed, %error, "handoff ended");
                // A decode worker that has gone wants nothing more: the clock counts that as cancelled.
                if !matches!(error, HandoffError::Cancelled(_) | HandoffError::DecodeLost(_)) {
                    self.clock.failed(error.kind());
                }
            }
        }
    }
}

impl ComputedHandoffDriver {
    /// Records the transfer, which computation hides in part, under this handoff's span.
    fn trace(&self, result: &Result<HandedOver, HandoffError>, transport: &'static str, bytes: u64) {
        let span = Span::current();
        // The decode worker says whether it failed.
        if let Err(error) = result
            && !matches!(error, HandoffError::Cancelled(_))
        {
            trace_context::fail(&span, error.label(), &error.to_string());
        }
        if let (Some(trace), Some(pushing)) = (TracePoint::of(&span), self.pushing) {
            let attributes =
                vec![KeyValue::new("transport", transport), KeyValue::new("bytes", bytes as i64)];
            trace.record("transfer", pushing, Instant::now(), attributes);
        }
    }
}

/// Compiles the request's grammar within `deadline`, decides whether the prompt is blended, then brings in what the pool lacks
/// of it.
async fn prepare(
    worker: Arc<Worker>,
    request: Request,
    source: Option<PrefixSource>,
    deadline: Duration,
) -> Prepared {
    // A model directory may hang while the vocabulary is loaded, and threads for blocking work may all be taken.
    let late =
        |_| Failure::new(FailureKind::Deadline, format!("the grammar was not compiled within {deadline:?}"));
    let compiled = timeout(deadline, worker.prepare_grammar(request)).await.map_err(late)?;
    let mut submission = compiled?;
    // Not before: a prompt that is refused for its grammar is neither audited nor saved.
    blending::decide(&worker, &mut submission.request);
    let save = SaveAtEnd::new(worker.tiers(), &submission.request);
    let request = submission.request.clone();
    let recall = Recall::of(worker.tiers(), &request).await;
    let meanwhile = bring_in(worker, recall, source, request).await;
    Ok(Box::new((submission, save, meanwhile)))
}

impl Prompt {
    /// `num_computed`: tokens that the engine has computed so far, for any request.
    async fn next(&mut self, num_computed: impl Fn() -> u64) -> Event {
        match self {
            Prompt::Preparing { prepare, pulse, .. } => tokio::select! {
                biased;
                prepared = prepare => Event::Prepared(prepared),
                // The grammar has the deadline of the handoff, and tiers and the prefix source have their own, by what computing
                // would take. One after the other they may take longer than the decode worker waits.
                () = pulse.tick() => Event::Progress,
            },
            Prompt::Computing(Computing { events, pulse, num_ready, .. }) => tokio::select! {
                biased;
                event = events.next() => Event::Engine(event),
                () = pulse.beat(|| num_computed() + *num_ready) => Event::Progress,
            },
            Prompt::Computed { .. } | Prompt::Released => std::future::pending().await,
        }
    }

    /// Drops the computation. The blocks and their KV stay.
    fn stop_computing(&mut self) {
        *self = match std::mem::replace(self, Prompt::Released) {
            Prompt::Computing(Computing { blocks, .. }) => Prompt::Computed { blocks },
            Prompt::Preparing { .. } => Prompt::Released,
            unchanged => unchanged,
        };
    }

    /// The blocks, for a route that reads them.
    fn blocks(&self) -> Arc<HeldBlocks> {
        match self {
            Prompt::Computing(Computing { blocks, .. }) | Prompt::Computed { blocks } => Arc::clone(blocks),
            Prompt::Preparing { .. } | Prompt::Released => {
                unreachable!("the machine opens a route after `Started` and before `Release`")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_prefix_that_is_brought_in_counts_as_progress_while_the_engine_computes_nothing() {
        let mut prompt = Prompt::Preparing {
            prepare: Box::pin(std::future::pending()),
            uncovered: None,
            pulse: Pulse::new(Duration::from_millis(40), 0),
        };
        for _ in 0..2 {
            let event = tokio::time::timeout(Duration::from_secs(30), prompt.next(|| 0)).await;
            assert!(matches!(event, Ok(Event::Progress)));
        }
    }
}
