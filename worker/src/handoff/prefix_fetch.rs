//! Fetches a prefix that another worker has cached, before a prompt is computed, and adds it to this worker's cache.
//!
//! A failed fetch costs only the time until it fails: the engine computes what did not arrive.

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
    decode_side::{DecodeSide, begin, limits},
    stream::sleep_until,
};
use crate::{convert::submit_failure, convert_handoff::FirstToken, peers::Link, worker::Worker};

/// Fetches the full blocks of a request's known tokens that `source` has cached and this worker lacks. Returns how many tokens at
/// the front this worker has then; 0 if nothing came. Dropping the future cancels it.
pub async fn fetch(worker: Arc<Worker>, source: PrefillPeer, attempt: u32, request: Request) -> usize {
    let num_tokens = worker.engine().num_sharable_tokens(&request);
    if num_tokens == 0 {
        return 0;
    }
    let prompt = request.prompt.iter().chain(&request.output).copied().take(num_tokens).collect();
    let request = Request { prompt, output: Vec::new(), ..request };
    let Ok(link) = worker.peers().link(&source.address) else {
        tracing::warn!(
            address = source.address,
            "prefix not fetched: the address of its source is invalid; the prompt is computed"
        );
        return 0;
    };
    let deadline = worker.fetch_limits().deadline(num_tokens);
    let (reply, outcome) = oneshot::channel();
    let driver = PrefixFetchDriver::new(worker.clone(), link, source, attempt, request, deadline, reply);
    worker.lifecycle().spawn(driver.run().in_current_span());
    let metrics = worker.metrics();
    // The driver ends at its deadline at the latest.
    match outcome.await {
        Ok(Ok(Fetched { num_new_tokens, num_tokens })) => {
            metrics.prefix_fetched("fetched", num_new_tokens);
            return num_tokens;
        }
        Ok(Err(error)) => metrics.prefix_fetched(error.label(), 0),
        Err(_) => metrics.prefix_fetched("broken", 0),
    }
    0
}

/// What a fetch brought.
struct Fetched {
    /// Tokens that this worker did not have.
    num_new_tokens: usize,
    /// With those before them.
    num_tokens: usize,
}

/// The driver of a [`PrefixFetch`].
struct PrefixFetchDriver {
    machine: PrefixFetch,
    /// Actions of the machine that are not done yet.
    actions: VecDeque<PrefixFetchAction>,
    started: Instant,
    request: Request,
    side: DecodeSide<PrefixReservation>,
    /// `None` after the caller was answered or has gone.
    reply: Option<oneshot::Sender<Result<Fetched, HandoffError>>>,
}

impl PrefixFetchDriver {
    fn new(
        worker: Arc<Worker>,
        link: Link,
        source: PrefillPeer,
        attempt: u32,
        request: Request,
        deadline: Duration,
        reply: oneshot::Sender<Result<Fetched, HandoffError>>,
    ) -> PrefixFetchDriver {
        let started = Instant::now();
        let begin = begin(&worker, &source, attempt, &request, deadline);
        let num_layers = worker.engine().storage().layout().num_layers;
        let (machine, actions) = PrefixFetch::begin(begin, num_layers, limits(deadline), started);
        // The cache serves every request, so the wire format that this request prefers does not count.
        let wire = worker.config().kv_wire;
        let side = DecodeSide::new(worker, link, source, wire);
        PrefixFetchDriver { machine, actions: actions.into(), started, request, side, reply: Some(reply) }
    }

    async fn run(mut self) {
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
        let halted = self.side.worker().lifecycle().halted();
        let deadline = self.machine.deadline();
        let why = tokio::select! {
            // The deadline comes first: a busy stream must not delay it.
            biased;
            () = sleep_until(deadline) => return DecodeInput::Tick,
            input = self.side.next() => return input,
            () = closed(&mut self.reply) => "the request was cancelled",
            () = halted.cancelled(), if self.reply.is_some() => "this worker is leaving",
        };
        self.reply = None;
        DecodeInput::Cancel(why.into())
    }

    async fn act(&mut self, action: PrefixFetchAction) {
        match action {
            DecodeAction::Send(message) => self.side.send(message, &self.request, None),
            DecodeAction::Reserve { num_tokens } => {
                let reserving = reserve(self.side.worker().clone(), self.request.clone(), num_tokens);
                self.side.reserve(Box::pin(reserving));
            }
            DecodeAction::FirstToken(never) => match never {},
            DecodeAction::Verify(pieces) => self.side.verify(pieces),
            DecodeAction::Revoke(generation) => self.side.revoke(generation),
            DecodeAction::WriterStopped(generation) => self.side.writer_stopped(generation),
            DecodeAction::Finish(result) => self.finish(result).await,
            // `run` ends, and with it the stream.
            DecodeAction::Close => {}
        }
    }

    async fn finish(&mut self, result: Result<Committed, HandoffError>) {
        let elapsed = self.started.elapsed();
        let source = self.side.peer().worker_id.clone();
        let result = match result {
            Ok(committed) => {
                tracing::debug!(%source, bytes = committed.bytes, ?elapsed, "prefix fetched");
                self.cache().await
            }
            Err(error) => {
                self.side.cancel_reservation();
                tracing::info!(%source, ?elapsed, %error, "prefix not fetched");
                Err(error)
            }
        };
        if let Some(reply) = self.reply.take() {
            // A caller that has gone needs no answer.
            let _ = reply.send(result);
        }
    }

    /// Adds the received blocks to the prefix cache.
    async fn cache(&mut self) -> Result<Fetched, HandoffError> {
        let refused = |failed| HandoffError::Refused { by: Side::Decode, failed };
        let reservation = self.side.commit().await.map_err(refused)?;
        let engine = self.side.worker().engine();
        let block_size = engine.storage().layout().block_size;
        let num_tokens = reservation.blocks().len() * block_size;
        let num_new_tokens = num_tokens - reservation.num_cached_blocks() * block_size;
        engine.cache_prefix(reservation);
        Ok(Fetched { num_new_tokens, num_tokens })
    }
}

/// Reserves blocks for a prefix. It does not wait until blocks become free.
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

/// Completes when the caller has gone; never after it was answered.
async fn closed<T>(reply: &mut Option<oneshot::Sender<T>>) {
    match reply {
        Some(reply) => reply.closed().await,
        None => std::future::pending().await,
    }
}
