//! The stream that a router reads: token events, then exactly one end. Dropping it cancels the request.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use baton_engine::{DraftCounts, Request, SampledToken, TokenEvent, TokenStream};
use baton_proto::worker::GenerateEvent;
use baton_request::{Failure, FailureKind};
use baton_worker::{
    Worker,
    convert::{engine_failure, failed_event, finished_event, leaving_event, submit_failure, token_event},
};
use futures_util::future::BoxFuture;
use tokio::sync::mpsc;
use tokio_util::{sync::CancellationToken, task::task_tracker::TaskTrackerToken};

use crate::remote_prefill::RemotePrefillEvent;

/// What the next event comes from.
enum TokenSource {
    /// A cached prefix is fetched from another worker; then the engine here computes the rest.
    Fetch(BoxFuture<'static, ()>, Request),
    RemotePrefill(mpsc::Receiver<RemotePrefillEvent>),
    Engine(TokenStream),
    /// One last event.
    End(GenerateEvent),
    Over,
}

/// One request's events.
pub struct GenerateStream {
    source: TokenSource,
    /// How often the prefill worker reported that it computes.
    num_beats: Arc<AtomicU64>,
    /// Prompt tokens found in a prefix cache; sent with the first token.
    cached_tokens: Option<usize>,
    /// Drafts verified since the last token; sent with the next.
    drafts: DraftCounts,
    worker: Arc<Worker>,
    /// Cancelled when the worker begins to drain; `None` once the router was told.
    draining: Option<CancellationToken>,
    halted: CancellationToken,
    /// The worker waits for the stream before it ends.
    _busy: TaskTrackerToken,
}

impl GenerateStream {
    /// The engine here computes the prompt.
    pub fn local(worker: Arc<Worker>, tokens: TokenStream) -> GenerateStream {
        GenerateStream::new(worker, TokenSource::Engine(tokens), Arc::default())
    }

    /// The same, after `fetch` has ended.
    pub fn fetching(
        worker: Arc<Worker>,
        fetch: impl Future<Output = ()> + Send + 'static,
        request: Request,
    ) -> GenerateStream {
        GenerateStream::new(worker, TokenSource::Fetch(Box::pin(fetch), request), Arc::default())
    }

    /// A remote prefill supplies the first token and then the engine's stream. `num_beats` counts the prefill worker's
    /// reports of progress.
    pub fn remote(
        worker: Arc<Worker>,
        events: mpsc::Receiver<RemotePrefillEvent>,
        num_beats: Arc<AtomicU64>,
    ) -> GenerateStream {
        GenerateStream::new(worker, TokenSource::RemotePrefill(events), num_beats)
    }

    fn new(worker: Arc<Worker>, source: TokenSource, num_beats: Arc<AtomicU64>) -> GenerateStream {
        let lifecycle = worker.lifecycle();
        let (draining, halted, busy) = (lifecycle.drain_signal(), lifecycle.halted(), lifecycle.token());
        GenerateStream {
            source,
            num_beats,
            cached_tokens: None,
            drafts: DraftCounts::default(),
            worker,
            draining: Some(draining),
            halted,
            _busy: busy,
        }
    }

    /// A count that grows while the engine here or that of the prefill worker computes, for any request.
    pub fn work(&self) -> impl Fn() -> u64 + Send + use<> {
        let (worker, num_beats) = (self.worker.clone(), self.num_beats.clone());
        move || worker.engine().num_computed_tokens() + num_beats.load(Ordering::Relaxed)
    }

    /// The next event; `None` after the terminal one.
    pub async fn next(&mut self) -> Option<GenerateEvent> {
        loop {
            match &mut self.source {
                TokenSource::Fetch(fetch, request) => {
                    tokio::select! {
                        biased;
                        () = fetch => {}
                        () = self.halted.cancelled() => return Some(self.fail(leaving())),
                    }
                    match self.worker.engine().generate(std::mem::take(request)) {
                        Ok(tokens) => self.source = TokenSource::Engine(tokens),
                        Err(error) => return Some(self.fail(submit_failure(&error))),
                    }
                }
                TokenSource::RemotePrefill(events) => {
                    let event = tokio::select! {
                        biased;
                        event = events.recv() => event,
                        () = self.halted.cancelled() => return Some(self.fail(leaving())),
                    };
                    match event {
                        Some(RemotePrefillEvent::First { token, cached_tokens, finish }) => {
                            self.cached_tokens = Some(cached_tokens);
                            if let Some(reason) = finish {
                                self.source = TokenSource::End(finished_event(reason));
                            }
                            return Some(self.token(&token));
                        }
                        Some(RemotePrefillEvent::Decoding(tokens)) => {
                            self.source = TokenSource::Engine(tokens)
                        }
                        Some(RemotePrefillEvent::Failed(failed)) => return Some(self.fail(failed)),
                        None => {
                            let failed = Failure::new(FailureKind::Internal, "the handoff broke off");
                            return Some(self.fail(failed));
                        }
                    }
                }
                TokenSource::Engine(tokens) => {
                    let event = tokio::select! {
                        biased;
                        event = tokens.next() => event,
                        () = self.halted.cancelled() => return Some(self.fail(leaving())),
                        () = cancelled(&self.draining) => {
                            self.draining = None;
                            return Some(leaving_event());
                        }
                    };
                    match event {
                        Some(TokenEvent::Started { cached_tokens }) => {
                            self.cached_tokens = Some(cached_tokens);
                        }
                        Some(TokenEvent::Verified(drafts)) => self.drafts = drafts,
                        Some(TokenEvent::Token(token)) => return Some(self.token(&token)),
                        Some(TokenEvent::Finished(reason)) => {
                            self.source = TokenSource::Over;
                            return Some(finished_event(reason));
                        }
                        Some(TokenEvent::Failed(error)) => return Some(self.fail(engine_failure(&error))),
                        None => {
                            let failed = Failure::new(FailureKind::Internal, "the engine broke off");
                            return Some(self.fail(failed));
                        }
                    }
                }
                TokenSource::End(_) => {
                    let TokenSource::End(event) = std::mem::replace(&mut self.source, TokenSource::Over)
                    else {
                        unreachable!("just matched")
                    };
                    return Some(event);
                }
                TokenSource::Over => return None,
            }
        }
    }

    fn token(&mut self, token: &SampledToken) -> GenerateEvent {
        self.worker.metrics().output_tokens.inc();
        token_event(token, self.cached_tokens.take(), std::mem::take(&mut self.drafts))
    }

    fn fail(&mut self, failure: Failure) -> GenerateEvent {
        // Invariant 2: the failure is typed, and no event follows it.
        self.source = TokenSource::Over;
        tracing::debug!(kind = failure.kind.name(), "generation failed: {}", failure.message);
        failed_event(failure)
    }
}

async fn cancelled(token: &Option<CancellationToken>) {
    match token {
        Some(token) => token.cancelled().await,
        None => std::future::pending().await,
    }
}

fn leaving() -> Failure {
    Failure::new(FailureKind::Draining, "the decode worker is leaving")
}
