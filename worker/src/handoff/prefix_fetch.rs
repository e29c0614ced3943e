//! Prefixes that another worker has cached: fetched before a prompt is computed, and put into this worker's cache.
//!
//! A failure costs the time until then, and no more: what did not come is computed.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use baton_engine::PrefixReservation;
use baton_handoff::{
    HandoffError, Side,
    decode::{Committed, DecodeAction, DecodeInput, PrefixFetch, PrefixFetchAction},
};
use baton_proto::worker::PrefillPeer;
use baton_request::{Failure, FailureKind, Request};
use tokio::sync::oneshot;
use tracing::Instrument;

use super::{
    stream::sleep_until,
    taking::{Taking, begin, limits},
};
use crate::{convert::submit_failure, convert_handoff::FirstToken, peers::Link, worker::Worker};

/// Nothing was computed here yet.
const UNKNOWN: Duration = Duration::from_secs(1);
/// Less says nothing about the source: the first connection to it and one step of its engine take as long.
const SHORTEST: Duration = Duration::from_millis(250);

/// Fetches the full blocks of a request's known tokens that `source` has cached and this worker lacks. Dropping the
/// future cancels it.
pub async fn fetch(worker: Arc<Worker>, source: PrefillPeer, attempt: u32, request: Request) {
    let num_tokens = worker.engine().num_sharable_tokens(&request);
    if num_tokens == 0 {
        return;
    }
    let prompt = request.prompt.iter().chain(&request.output).copied().take(num_tokens).collect();
    let request = Request { prompt, output: Vec::new(), ..request };
    let Ok(link) = worker.peers().link(&source.address) else {
        tracing::warn!(address = source.address, "the source of a prefix has no usable address");
        return;
    };
    let deadline = patience(&worker, num_tokens);
    let (reply, outcome) = oneshot::channel();
    let driver = PrefixFetchDriver::new(worker.clone(), link, source, attempt, request, deadline, reply);
    worker.lifecycle().spawn(driver.run().in_current_span());
    let metrics = worker.metrics();
    // It ends by its deadline.
    match outcome.await {
        Ok(Ok(num_tokens)) => metrics.prefix_fetched("fetched", num_tokens),
        Ok(Err(error)) => metrics.prefix_fetched(error.label(), 0),
        Err(_) => metrics.prefix_fetched("broken", 0),
    }
}

/// A fetch may take as long as the computation that it saves, by what steps took here. So a slow or silent source at most
/// doubles the time to the first token.
fn patience(worker: &Worker, num_tokens: usize) -> Duration {
    let config = worker.config();
    let computing = || worker.engine().prefill_time(num_tokens).unwrap_or(UNKNOWN).max(SHORTEST);
    config.fetch_deadline.unwrap_or_else(computing).min(config.handoff_deadline)
}

/// The driver of a [`PrefixFetch`].
struct PrefixFetchDriver {
    machine: PrefixFetch,
    first_actions: Vec<PrefixFetchAction>,
    started: Instant,
    request: Request,
    taking: Taking<PrefixReservation>,
    /// `None` once the caller was answered, or has left.
    reply: Option<oneshot::Sender<Result<usize, HandoffError>>>,
}

impl PrefixFetchDriver {
    fn new(
        worker: Arc<Worker>,
        link: Link,
        source: PrefillPeer,
        attempt: u32,
        request: Request,
        deadline: Duration,
        reply: oneshot::Sender<Result<usize, HandoffError>>,
    ) -> PrefixFetchDriver {
        let started = Instant::now();
        let begin = begin(&worker, &source, attempt, &request, deadline);
        let num_layers = worker.engine().storage().layout().num_layers;
        let (machine, first_actions) = PrefixFetch::begin(begin, num_layers, limits(deadline), started);
        // The cache serves every request, so the preference of this one does not count.
        let wire = worker.config().kv_wire;
        let taking = Taking::new(worker, link, source, wire);
        PrefixFetchDriver { machine, first_actions, started, request, taking, reply: Some(reply) }
    }

    async fn run(mut self) {
        let mut actions = VecDeque::from(std::mem::take(&mut self.first_actions));
        loop {
            while let Some(action) = actions.pop_front() {
                self.act(action).await;
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
        let why = tokio::select! {
            // Time first, so that nothing busy outlives its deadline.
            biased;
            () = sleep_until(deadline) => return DecodeInput::Tick,
            input = self.taking.next() => return input,
            () = closed(&mut self.reply) => "the request was cancelled",
            () = halted.cancelled(), if self.reply.is_some() => "this worker is leaving",
        };
        self.reply = None;
        DecodeInput::Cancel(why.into())
    }

    async fn act(&mut self, action: PrefixFetchAction) {
        match action {
            DecodeAction::Send(message) => self.taking.send(message, &self.request, None),
            DecodeAction::Reserve { num_tokens } => {
                let reserving = reserve(self.taking.worker().clone(), self.request.clone(), num_tokens);
                self.taking.reserve(Box::pin(reserving));
            }
            DecodeAction::FirstToken(never) => match never {},
            DecodeAction::Verify(pieces) => self.taking.verify(pieces),
            DecodeAction::Revoke(generation) => self.taking.revoke(generation),
            DecodeAction::WriterStopped(generation) => self.taking.writer_stopped(generation),
            DecodeAction::Finish(result) => self.finish(result).await,
            // `run` ends, and with it the stream.
            DecodeAction::Close => {}
        }
    }

    async fn finish(&mut self, result: Result<Committed, HandoffError>) {
        let elapsed = self.started.elapsed();
        let source = self.taking.peer().worker_id.clone();
        let result = match result {
            Ok(committed) => {
                tracing::debug!(%source, bytes = committed.bytes, ?elapsed, "prefix fetched");
                self.cache().await
            }
            Err(error) => {
                self.taking.give_up();
                tracing::info!(%source, ?elapsed, %error, "prefix not fetched");
                Err(error)
            }
        };
        if let Some(reply) = self.reply.take() {
            // A caller that left needs no answer.
            let _ = reply.send(result);
        }
    }

    /// The KV is here: lets every request find it. Returns how many tokens of it are new here.
    async fn cache(&mut self) -> Result<usize, HandoffError> {
        let refused = |failed| HandoffError::Refused { by: Side::Decode, failed };
        let reservation = self.taking.commit().await.map_err(refused)?;
        let num_blocks = reservation.blocks().len() - reservation.num_cached_blocks();
        let engine = self.taking.worker().engine();
        engine.cache_prefix(reservation);
        Ok(num_blocks * engine.storage().layout().block_size)
    }
}

/// Blocks for a prefix: those that are free now.
async fn reserve(
    worker: Arc<Worker>,
    request: Request,
    num_tokens: usize,
) -> Result<PrefixReservation, Failure> {
    match worker.engine().reserve_prefix(&request, num_tokens).await {
        Ok(Some(reservation)) => Ok(reservation),
        Ok(None) => Err(Failure::new(FailureKind::Full, "no blocks are free for a prefix")),
        Err(error) => Err(submit_failure(&error)),
    }
}

/// Completes when the caller has left; never once it was answered.
async fn closed<T>(reply: &mut Option<oneshot::Sender<T>>) {
    match reply {
        Some(reply) => reply.closed().await,
        None => std::future::pending().await,
    }
}
