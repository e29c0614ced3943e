//! Hands over what this worker has cached of a sequence. Every worker does that, whatever its role, also while it drains:
//! it costs next to nothing, and its requests migrate by it.

use std::{collections::VecDeque, sync::Arc, time::Instant};

use baton_engine::{CachedPrefix, SubmitError};
use baton_handoff::{
    HandoffError,
    prefill::{CachedHandoff, CachedHandoffAction, PrefillAction, PrefillInput},
};
use baton_request::Request;
use futures_util::future::BoxFuture;

use super::{
    giving::{Giving, PeerBlocks},
    opening::{Begun, leaving},
    stream::sleep_until,
};
use crate::{convert::submit_failure, convert_handoff::FirstToken, worker::Worker};

/// Hands over what is cached of the sequence in `begun`, or says why not.
pub async fn give(worker: Arc<Worker>, begun: Begun<CachedHandoff>) {
    match PeerBlocks::accept(&worker, &begun.kv_format, begun.wire) {
        Ok(peer_blocks) => CachedHandoffDriver::new(worker, begun, peer_blocks).run().await,
        Err(failure) => begun.decline(&worker, failure).await,
    }
}

/// The driver of a [`CachedHandoff`].
struct CachedHandoffDriver {
    machine: CachedHandoff,
    started: Instant,
    giving: Giving,
    prefix: Prefix,
    is_halted: bool,
}

/// The blocks that are handed over.
enum Prefix {
    /// The engine looks for them.
    Holding(BoxFuture<'static, Result<CachedPrefix, SubmitError>>),
    /// They stay as they are. Shared with the route: whichever is dropped last returns them.
    Held(Arc<CachedPrefix>),
    Released,
}

enum Event {
    Held(Result<CachedPrefix, SubmitError>),
    Input(PrefillInput),
}

impl CachedHandoffDriver {
    fn new(worker: Arc<Worker>, begun: Begun<CachedHandoff>, peer_blocks: PeerBlocks) -> CachedHandoffDriver {
        let Begun { machine, request, started, stream, .. } = begun;
        let prefix = Prefix::Holding(Box::pin(hold(worker.clone(), request)));
        let giving = Giving::new(worker, stream, peer_blocks);
        CachedHandoffDriver { machine, started, giving, prefix, is_halted: false }
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
        self.giving.end().await;
    }

    async fn next(&mut self) -> Event {
        let halted = self.giving.worker().lifecycle().halted();
        let deadline = self.machine.deadline();
        tokio::select! {
            // Time first, so that nothing busy outlives its deadline; leaving last, since what just happened says more.
            biased;
            // Invariant 6: the deadline of the held prefix.
            () = sleep_until(deadline) => Event::Input(PrefillInput::Tick),
            input = self.giving.next() => Event::Input(input),
            held = self.prefix.held() => Event::Held(held),
            () = halted.cancelled(), if !self.is_halted => {
                self.is_halted = true;
                Event::Input(PrefillInput::Fail(leaving()))
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
                // A grant is accepted only once the prefix is held.
                if let Prefix::Held(prefix) = &self.prefix {
                    self.giving.route(access_key, offers, Arc::clone(prefix));
                }
            }
            PrefillAction::Push(pieces) => self.giving.push(pieces),
            PrefillAction::Send(message) => self.giving.send(message),
            PrefillAction::Finish(result) => self.finish(result),
            PrefillAction::Stop => {
                if let Prefix::Holding(_) = self.prefix {
                    self.prefix = Prefix::Released;
                }
                self.giving.stop();
            }
            PrefillAction::Release => {
                self.giving.release();
                self.prefix = Prefix::Released;
            }
            // `run` ends, and with it the stream.
            PrefillAction::Close => {}
        }
    }

    fn finish(&self, result: Result<(), HandoffError>) {
        let elapsed = self.started.elapsed();
        let outcome = result.as_ref().map_or_else(HandoffError::label, |()| "committed");
        self.giving.worker().metrics().prefix_given(outcome);
        let (transport, bytes) = self.giving.moved();
        match result {
            Ok(()) => tracing::debug!(transport, bytes, ?elapsed, "cached prefix handed over"),
            Err(error) => tracing::info!(transport, bytes, ?elapsed, %error, "cached prefix not handed over"),
        }
    }
}

impl Prefix {
    /// Completes when the engine has looked.
    async fn held(&mut self) -> Result<CachedPrefix, SubmitError> {
        match self {
            Prefix::Holding(holding) => holding.await,
            Prefix::Held(_) | Prefix::Released => std::future::pending().await,
        }
    }
}

async fn hold(worker: Arc<Worker>, request: Request) -> Result<CachedPrefix, SubmitError> {
    worker.engine().hold_cached(&request).await
}
