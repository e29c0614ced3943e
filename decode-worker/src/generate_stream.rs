//! The stream that a router reads: token events, then exactly one terminal event. Dropping it cancels the request.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use baton_engine::{SampledToken, Submission, TokenEvent, TokenStream};
use baton_proto::worker::GenerateEvent;
use baton_request::{Failure, FailureKind, FinishReason};
use baton_telemetry::trace_context;
use baton_worker::{Meanwhile, RequestClock, SaveAtEnd, Uncovered, Worker};
use baton_worker_messages::{
    TokenNotes, engine_failure, failed_event, finished_event, leaving_event, scored_event, submit_failure,
    token_event,
};
use futures_util::future::BoxFuture;
use tokio::sync::mpsc;
use tokio_util::{sync::CancellationToken, task::task_tracker::TaskTrackerToken};
use tracing::Span;

use crate::remote_prefill::RemotePrefillEvent;

/// The source of the next event.
enum TokenSource {
    /// A cached prefix is fetched from another worker, or recalled from a tier. Then this worker's engine computes the rest.
    Fetch(BoxFuture<'static, Meanwhile>, Box<Submission>, Option<Uncovered>),
    RemotePrefill(mpsc::Receiver<RemotePrefillEvent>),
    Engine(TokenStream),
    /// No token follows: the first one was the last, or was delivered before.
    End(FinishReason),
    Over,
}

/// One request's events.
pub struct GenerateStream {
    source: TokenSource,
    /// `Progress` messages of the prefill worker.
    num_progress: Arc<AtomicU64>,
    /// Sent with the next token.
    notes: TokenNotes,
    worker: Arc<Worker>,
    clock: RequestClock,
    /// Cancelled when the worker begins to drain; `None` after the router was told.
    draining: Option<CancellationToken>,
    halted: CancellationToken,
    /// Brings more of the prompt into the pool until its first token.
    meanwhile: Meanwhile,
    /// Saves the blocks when the stream ends or is dropped.
    save: Option<SaveAtEnd>,
    /// Ends with the stream.
    span: Span,
    /// The worker does not exit before the stream has ended.
    _busy: TaskTrackerToken,
}

impl GenerateStream {
    /// This worker's engine computes the prompt.
    pub fn local(worker: Arc<Worker>, tokens: TokenStream, clock: RequestClock) -> GenerateStream {
        GenerateStream::new(worker, TokenSource::Engine(tokens), Arc::default(), clock)
    }

    /// The same, after `fetch` has ended. More may come while it is computed.
    pub fn fetching(
        worker: Arc<Worker>,
        fetch: impl Future<Output = Meanwhile> + Send + 'static,
        submission: Submission,
        uncovered: Option<Uncovered>,
        clock: RequestClock,
    ) -> GenerateStream {
        GenerateStream::new(
            worker,
            TokenSource::Fetch(Box::pin(fetch), Box::new(submission), uncovered),
            Arc::default(),
            clock,
        )
    }

    /// A remote prefill supplies the first token, and then the engine's stream. `num_progress` counts the `Progress` messages
    /// of the prefill worker.
    pub fn remote(
        worker: Arc<Worker>,
        events: mpsc::Receiver<RemotePrefillEvent>,
        num_progress: Arc<AtomicU64>,
        clock: RequestClock,
    ) -> GenerateStream {
        GenerateStream::new(worker, TokenSource::RemotePrefill(events), num_progress, clock)
    }

    /// The last token was delivered before.
    pub fn ended(worker: Arc<Worker>, reason: FinishReason, clock: RequestClock) -> GenerateStream {
        GenerateStream::new(worker, TokenSource::End(reason), Arc::default(), clock)
    }

    fn new(
        worker: Arc<Worker>,
        source: TokenSource,
        num_progress: Arc<AtomicU64>,
        clock: RequestClock,
    ) -> GenerateStream {
        let lifecycle = worker.lifecycle();
        let (draining, halted, busy) = (lifecycle.drain_signal(), lifecycle.halted(), lifecycle.token());
        GenerateStream {
            source,
            num_progress,
            notes: TokenNotes::default(),
            worker,
            clock,
            draining: Some(draining),
            halted,
            meanwhile: Meanwhile::default(),
            save: None,
            span: Span::none(),
            _busy: busy,
        }
    }

    /// Its blocks are saved at its end.
    pub fn saving(self, save: Option<SaveAtEnd>) -> GenerateStream {
        GenerateStream { save, ..self }
    }

    /// Its failure is that of `span`.
    pub fn in_span(self, span: Span) -> GenerateStream {
        GenerateStream { span, ..self }
    }

    /// A count that grows while this worker's engine or that of the prefill worker computes, for any request.
    pub fn work(&self) -> impl Fn() -> u64 + Send + use<> {
        let (worker, num_progress) = (self.worker.clone(), self.num_progress.clone());
        move || worker.engine().num_computed_tokens() + num_progress.load(Ordering::Relaxed)
    }

    /// The next event; `None` after the terminal one.
    pub async fn next(&mut self) -> Option<GenerateEvent> {
        loop {
            match &mut self.source {
                TokenSource::Fetch(fetch, submission, uncovered) => {
                    tokio::select! {
                        biased;
                        meanwhile = fetch => self.meanwhile = meanwhile,
                        () = self.halted.cancelled() => return Some(self.fail(draining_failure())),
                    }
                    self.clock.submitted(Instant::now());
                    match self.worker.engine().generate(std::mem::take(&mut **submission)) {
                        Ok(tokens) => {
                            // The engine counts it from here on.
                            drop(uncovered.take());
                            self.source = TokenSource::Engine(tokens);
                        }
                        Err(error) => return Some(self.fail(submit_failure(&error))),
                    }
                }
                TokenSource::RemotePrefill(events) => {
                    let event = tokio::select! {
                        biased;
                        event = events.recv() => event,
                        () = self.halted.cancelled() => return Some(self.fail(draining_failure())),
                    };
                    match event {
                        Some(RemotePrefillEvent::First {
                            token,
                            cached_tokens,
                            blended_tokens,
                            pace,
                            finish,
                        }) => {
                            self.notes.cached_tokens = Some(cached_tokens);
                            self.notes.blended_tokens = blended_tokens;
                            self.notes.pace = Some(pace);
                            if let Some(reason) = finish {
                                self.source = TokenSource::End(reason);
                            }
                            return Some(self.token(&token, Instant::now()));
                        }
                        Some(RemotePrefillEvent::Decoding {
                            tokens,
                            reserving,
                            granted,
                            exposed,
                            transport,
                        }) => {
                            self.clock.submitted(reserving);
                            self.clock.admitted(granted);
                            self.notes.exposed = Some(exposed);
                            self.notes.transport = Some(transport);
                            self.source = TokenSource::Engine(tokens);
                        }
                        Some(RemotePrefillEvent::Failed(failed)) => return Some(self.fail(failed)),
                        None => {
                            let failed =
                                Failure::new(FailureKind::Internal, "the handoff ended without an outcome");
                            return Some(self.fail(failed));
                        }
                    }
                }
                TokenSource::Engine(tokens) => {
                    let event = tokio::select! {
                        biased;
                        event = tokens.next() => event,
                        () = self.halted.cancelled() => return Some(self.fail(draining_failure())),
                        () = cancelled(&self.draining) => {
                            self.draining = None;
                            return Some(leaving_event());
                        }
                    };
                    let sent_at = tokens.sent_at();
                    match event {
                        Some(TokenEvent::Started { cached_tokens }) => {
                            self.clock.admitted(sent_at);
                            self.notes.cached_tokens = Some(cached_tokens);
                        }
                        Some(TokenEvent::Scored { first_idx, tokens }) => {
                            return Some(scored_event(first_idx, &tokens));
                        }
                        Some(TokenEvent::Adopted { cached_tokens }) => {
                            *self.notes.cached_tokens.get_or_insert_default() += cached_tokens;
                        }
                        Some(TokenEvent::Blended { reused_tokens }) => {
                            self.notes.blended_tokens = reused_tokens;
                        }
                        Some(TokenEvent::Verified(drafts)) => self.notes.drafts = drafts,
                        Some(TokenEvent::Token(token)) => return Some(self.token(&token, sent_at)),
                        Some(TokenEvent::Finished(reason)) => return Some(self.finish(reason)),
                        Some(TokenEvent::Failed(error)) => return Some(self.fail(engine_failure(&error))),
                        None => {
                            let failed = Failure::new(
                                FailureKind::Internal,
                                "the engine ended the request without an outcome",
                            );
                            return Some(self.fail(failed));
                        }
                    }
                }
                TokenSource::End(reason) => {
                    let reason = *reason;
                    return Some(self.finish(reason));
                }
                TokenSource::Over => return None,
            }
        }
    }

    fn token(&mut self, token: &SampledToken, sampled: Instant) -> GenerateEvent {
        if let Some(save) = &mut self.save {
            save.push(token.id);
        }
        self.meanwhile = Meanwhile::default();
        let pace = self.clock.token(sampled);
        self.notes.pace = self.notes.pace.or(pace);
        token_event(token, std::mem::take(&mut self.notes))
    }

    fn finish(&mut self, reason: FinishReason) -> GenerateEvent {
        self.source = TokenSource::Over;
        self.clock.finished(reason);
        finished_event(reason)
    }

    fn fail(&mut self, failure: Failure) -> GenerateEvent {
        // Invariant 2: the failure is typed, and no event follows it.
        self.source = TokenSource::Over;
        self.clock.failed(failure.kind);
        trace_context::fail(&self.span, failure.kind.name(), &failure.message);
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

fn draining_failure() -> Failure {
    Failure::new(FailureKind::Draining, "the decode worker is leaving")
}
