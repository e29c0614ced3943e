//! One prompt that a decode worker wants computed: it waits in the engine's queue, is computed, and each layer is pushed into
//! the decode worker's blocks when it is final. The first token is sent when it is sampled.
//!
//! This is the driver of [`ComputedHandoff`]: it feeds the state machine with what the stream, the engine, the data plane and
//! the clock say, and does what it decides.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use baton_engine::{HeldBlocks, PrefillEvent, PrefillEvents};
use baton_handoff::{
    HandoffError,
    prefill::{
        ComputeInput, ComputedHandoff, ComputedHandoffAction, HandedOver, PrefillAction, PrefillInput,
    },
};
use baton_request::{Failure, FailureKind, Request};
use baton_worker::{
    Worker,
    convert::{engine_failure, submit_failure},
    convert_handoff::FirstToken,
    handoff::{
        giving::{Giving, PeerBlocks},
        opening::{Begun, PrefixSource, leaving},
        prefix_fetch,
        pulse::Pulse,
        stream::sleep_until,
    },
};
use futures_util::future::BoxFuture;

/// The driver of a [`ComputedHandoff`].
pub struct ComputedHandoffDriver {
    machine: ComputedHandoff,
    started: Instant,
    /// How long either side waits without a sign of progress.
    deadline: Duration,
    giving: Giving,
    prompt: Prompt,
    is_halted: bool,
}

/// The prompt and its blocks.
enum Prompt {
    /// The engine was not asked yet: another worker's cached prefix is fetched first, if there is one.
    Fetching { fetch: BoxFuture<'static, ()>, request: Request },
    /// It waits in the engine's queue, or is computed.
    Computing(Computing),
    /// The engine has done its part. Shared with the route: whichever is dropped last returns the blocks.
    Computed { blocks: Arc<HeldBlocks> },
    /// The blocks are returned, or there were none.
    Released,
}

struct Computing {
    events: PrefillEvents,
    blocks: Arc<HeldBlocks>,
    /// Prompt tokens that were found in the prefix cache.
    cached_tokens: usize,
    /// Reports to the decode worker that this engine computes.
    pulse: Pulse,
    /// What of this sequence was computed, event by event: a step may be long.
    num_ready: u64,
}

enum Event {
    /// The prefix is here, or will not come.
    Fetched,
    Engine(Option<PrefillEvent>),
    Computed,
    Other(PrefillInput),
}

type Action = ComputedHandoffAction<FirstToken>;

impl ComputedHandoffDriver {
    /// Fetches what `source` has of the prompt, if it is named, and has the rest computed.
    pub fn new(
        worker: Arc<Worker>,
        begun: Begun<ComputedHandoff>,
        source: Option<PrefixSource>,
        peer_blocks: PeerBlocks,
    ) -> ComputedHandoffDriver {
        let Begun { machine, request, deadline, started, stream, .. } = begun;
        worker.metrics().request_taken("handoff", request.num_known_tokens());
        let fetch = fetch(worker.clone(), source, request.clone());
        let prompt = Prompt::Fetching { fetch: Box::pin(fetch), request };
        let giving = Giving::new(worker, stream, peer_blocks);
        ComputedHandoffDriver { machine, started, deadline, giving, prompt, is_halted: false }
    }

    /// Drives it to its end.
    pub async fn run(mut self) {
        let mut actions = VecDeque::new();
        while !self.machine.is_over() {
            let event = self.next().await;
            actions.extend(self.take(event));
            while let Some(action) = actions.pop_front() {
                self.act(action);
            }
        }
        self.giving.end().await;
    }

    async fn next(&mut self) -> Event {
        let worker = self.giving.worker();
        let (engine, halted) = (worker.engine().clone(), worker.lifecycle().halted());
        let deadline = self.machine.deadline();
        tokio::select! {
            // Time first, so that nothing busy outlives its deadline; leaving last, since what just happened says more.
            biased;
            () = sleep_until(deadline) => Event::Other(PrefillInput::Tick),
            event = self.prompt.next(|| engine.num_computed_tokens()) => event,
            input = self.giving.next() => Event::Other(input),
            () = halted.cancelled(), if !self.is_halted => {
                self.is_halted = true;
                Event::Other(PrefillInput::Fail(leaving()))
            }
        }
    }

    fn take(&mut self, event: Event) -> Vec<Action> {
        let input = match event {
            Event::Fetched => match self.submit() {
                Ok(()) => return Vec::new(),
                Err(failure) => ComputeInput::Other(PrefillInput::Fail(failure)),
            },
            Event::Engine(event) => self.computed(event),
            Event::Computed => ComputeInput::Progress,
            Event::Other(input) => ComputeInput::Other(input),
        };
        self.machine.on(input, Instant::now())
    }

    /// Gives the prompt to the engine.
    fn submit(&mut self) -> Result<(), Failure> {
        let Prompt::Fetching { request, .. } = std::mem::replace(&mut self.prompt, Prompt::Released) else {
            return Ok(());
        };
        let engine = self.giving.worker().engine();
        let (events, blocks) = engine.prefill(request).map_err(|error| submit_failure(&error))?;
        let pulse = Pulse::new(self.deadline, engine.num_computed_tokens());
        let blocks = Arc::new(blocks);
        self.prompt = Prompt::Computing(Computing { events, blocks, cached_tokens: 0, pulse, num_ready: 0 });
        Ok(())
    }

    fn computed(&mut self, event: Option<PrefillEvent>) -> ComputeInput<FirstToken> {
        let Prompt::Computing(computing) = &mut self.prompt else { return ComputeInput::Progress };
        let failure = match event {
            Some(PrefillEvent::Started { cached_tokens }) => {
                computing.cached_tokens = cached_tokens;
                return ComputeInput::Started;
            }
            Some(PrefillEvent::Ready { layers, first_block_idx, blocks }) => {
                computing.num_ready += 1;
                return ComputeInput::Ready { layers, first_block_idx, blocks };
            }
            Some(PrefillEvent::FirstToken(token)) => {
                let cached_tokens = computing.cached_tokens;
                self.prompt.stop_computing();
                return ComputeInput::FirstToken(FirstToken { token, cached_tokens });
            }
            Some(PrefillEvent::Failed(error)) => engine_failure(&error),
            None => Failure::new(FailureKind::Internal, "the engine broke off"),
        };
        self.prompt.stop_computing();
        ComputeInput::Other(PrefillInput::Fail(failure))
    }

    fn act(&mut self, action: Action) {
        match action {
            PrefillAction::Route { access_key, offers } => {
                let blocks = self.prompt.blocks();
                self.giving.route(access_key, offers, blocks);
            }
            PrefillAction::Push(pieces) => self.giving.push(pieces),
            PrefillAction::Send(message) => self.giving.send(message),
            PrefillAction::Finish(result) => self.finish(result),
            PrefillAction::Stop => {
                self.prompt.stop_computing();
                self.giving.stop();
            }
            PrefillAction::Release => {
                self.giving.release();
                self.prompt = Prompt::Released;
            }
            // `run` ends, and with it the stream.
            PrefillAction::Close => {}
        }
    }

    fn finish(&self, result: Result<HandedOver, HandoffError>) {
        let elapsed = self.started.elapsed();
        let metrics = self.giving.worker().metrics();
        metrics.handoff_seconds.observe(elapsed.as_secs_f64());
        metrics.handoff_ended(result.as_ref().map_or_else(HandoffError::label, |outcome| outcome.label()));
        let (transport, bytes) = self.giving.moved();
        match result {
            Ok(HandedOver::Committed) => tracing::debug!(transport, bytes, ?elapsed, "prompt handed over"),
            Ok(HandedOver::Ended) => {
                tracing::debug!(
                    transport,
                    bytes,
                    ?elapsed,
                    "the first token ended the request; its kv is not needed"
                );
            }
            Err(error) => tracing::info!(transport, bytes, ?elapsed, %error, "handoff ended"),
        }
    }
}

impl Prompt {
    /// `num_computed`: what the engine has computed so far, for any request.
    async fn next(&mut self, num_computed: impl Fn() -> u64) -> Event {
        match self {
            Prompt::Fetching { fetch, .. } => {
                fetch.await;
                Event::Fetched
            }
            Prompt::Computing(Computing { events, pulse, num_ready, .. }) => tokio::select! {
                biased;
                event = events.next() => Event::Engine(event),
                () = pulse.beat(|| num_computed() + *num_ready) => Event::Computed,
            },
            Prompt::Computed { .. } | Prompt::Released => std::future::pending().await,
        }
    }

    /// Drops the computation. The blocks stay as they are.
    fn stop_computing(&mut self) {
        *self = match std::mem::replace(self, Prompt::Released) {
            Prompt::Computing(Computing { blocks, .. }) => Prompt::Computed { blocks },
            Prompt::Fetching { .. } => Prompt::Released,
            unchanged => unchanged,
        };
    }

    /// The blocks, for a route that reads them; `None` before the engine has them.
    fn blocks(&self) -> Option<Arc<HeldBlocks>> {
        match self {
            Prompt::Computing(Computing { blocks, .. }) | Prompt::Computed { blocks } => {
                Some(Arc::clone(blocks))
            }
            Prompt::Fetching { .. } | Prompt::Released => None,
        }
    }
}

async fn fetch(worker: Arc<Worker>, source: Option<PrefixSource>, request: Request) {
    if let Some(PrefixSource { peer, attempt }) = source {
        prefix_fetch::fetch(worker, peer, attempt, request).await;
    }
}
