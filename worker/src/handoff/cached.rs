//! Hands over the prefix of a sequence that this worker has cached. Every worker does this, whatever its role, and also while
//! it drains: its requests migrate this way, and it costs almost nothing.

use std::{collections::VecDeque, sync::Arc, time::Instant};

use baton_engine::{CachedPrefix, SubmitError};
use baton_handoff::{
    HandoffError,
    prefill::{CachedHandoff, CachedHandoffAction, PrefillAction, PrefillInput},
};
use baton_request::Request;
use baton_worker_messages::{FirstToken, submit_failure};
use baton_worker_tiers::Recall;
use futures_util::future::BoxFuture;

use super::{
    opening::{OpenedHandoff, draining_failure},
    prefill_side::{PeerFormat, PrefillSide},
    stream::sleep_until,
};
use crate::worker::Worker;

/// Hands over what is cached of the sequence in `opened`, or refuses with a reason.
pub async fn hand_over(worker: Arc<Worker>, opened: OpenedHandoff<CachedHandoff>) {
    match PeerFormat::new(&worker, &opened.kv_format, opened.wire) {
        Ok(peer_format) => CachedHandoffDriver::new(worker, opened, peer_format).run().await,
        Err(failure) => opened.decline(&worker, failure).await,
    }
}

/// The driver of a [`CachedHandoff`].
struct CachedHandoffDriver {
    machine: CachedHandoff,
    started: Instant,
    side: PrefillSide,
    prefix: Prefix,
    is_halted: bool,
}

/// The blocks that are handed over.
enum Prefix {
    /// The engine looks them up.
    Holding(BoxFuture<'static, Result<CachedPrefix, SubmitError>>),
    /// The engine keeps them. The route shares this guard; the last owner to drop it returns the blocks.
    Held(Arc<CachedPrefix>),
    Released,
}

enum Event {
    Held(Result<CachedPrefix, SubmitError>),
    Input(PrefillInput),
}

impl CachedHandoffDriver {
    fn new(
        worker: Arc<Worker>,
        opened: OpenedHandoff<CachedHandoff>,
        peer_format: PeerFormat,
    ) -> CachedHandoffDriver {
        let OpenedHandoff { machine, request, started, stream, .. } = opened;
        let prefix = Prefix::Holding(Box::pin(hold(worker.clone(), request)));
        let side = PrefillSide::new(worker, stream, peer_format);
        CachedHandoffDriver { machine, started, side, prefix, is_halted: false }
    }

    async fn run(mut self) {
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
        let halted = self.side.worker().lifecycle().halted();
        let deadline = self.machine.deadline();
        tokio::select! {
            // The deadline comes first: a busy stream must not delay it. The halt comes last: an event that is ready gives a
            // better reason.
            biased;
            // Invariant 6: the deadline of the held prefix.
            () = sleep_until(deadline) => Event::Input(PrefillInput::Tick),
            input = self.side.next() => Event::Input(input),
            held = self.prefix.held() => Event::Held(held),
            () = halted.cancelled(), if !self.is_halted => {
                self.is_halted = true;
                Event::Input(PrefillInput::Fail(draining_failure()))
            }
        }
    }

    fn take(&mut self, event: Event) -> Vec<CachedHandoffAction<FirstToken>> {
        let now = Instant::now();
        match event {
            Event::Held(Ok(held)) => {
                let actions = self.machine.held(held.blocks(), now);
                self.prefix = Prefix::Held(Arc::new(held));
                actions
            }
            Event::Held(Err(error)) => {
                self.prefix = Prefix::Released;
                self.machine.on(PrefillInput::Fail(submit_failure(&error)), now)
            }
            Event::Input(input) => self.machine.on(input, now),
        }
    }

    fn act(&mut self, action: CachedHandoffAction<FirstToken>) {
        match action {
            PrefillAction::Route { access_key, offers } => {
                // The machine accepts a grant only after the prefix is held.
                if let Prefix::Held(prefix) = &self.prefix {
                    self.side.open_route(access_key, offers, Arc::clone(prefix));
                }
            }
            PrefillAction::Push(pieces) => self.side.push(pieces),
            PrefillAction::Send(message) => self.side.send(message),
            PrefillAction::Finish(result) => self.finish(result),
            PrefillAction::Stop => {
                if let Prefix::Holding(_) = self.prefix {
                    self.prefix = Prefix::Released;
                }
                self.side.close_route();
            }
            PrefillAction::Release => {
                self.side.drop_route();
                self.prefix = Prefix::Released;
            }
            // `run` ends, and with it the stream.
            PrefillAction::Close => {}
        }
    }

    fn finish(&self, result: Result<(), HandoffError>) {
        let elapsed = self.started.elapsed();
        let outcome = result.as_ref().map_or_else(HandoffError::label, |()| "committed");
        self.side.worker().metrics().prefix_handed_over(outcome);
        let (transport, bytes) = self.side.transferred();
        match result {
            Ok(()) => tracing::debug!(transport, bytes, ?elapsed, "cached prefix handed over"),
            Err(error) => tracing::info!(transport, bytes, ?elapsed, %error, "cached prefix not handed over"),
        }
    }
}

impl Prefix {
    /// Completes when the engine has looked up the blocks.
    async fn held(&mut self) -> Result<CachedPrefix, SubmitError> {
        match self {
            Prefix::Holding(holding) => holding.await,
            Prefix::Held(_) | Prefix::Released => std::future::pending().await,
        }
    }
}

/// Also what the tiers have: a router takes it for cached here.
async fn hold(worker: Arc<Worker>, request: Request) -> Result<CachedPrefix, SubmitError> {
    let engine = worker.engine();
    engine.validate(&request)?;
    if let Some(recall) = Recall::for_peer(worker.tiers(), &request).await {
        recall.run().await;
    }
    let hashes = engine.hash_prefix(&request, request.num_known_tokens()).await;
    engine.hold_cached(hashes.into()).await
}
