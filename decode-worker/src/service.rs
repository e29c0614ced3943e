//! `baton.worker.v1.Decode`.

use std::{pin::Pin, sync::Arc, time::Duration};

use baton_engine::Submission;
use baton_proto::{
    failure_to_status, is_server_fault,
    worker::{
        GenerateEvent, GenerateRequest, LendRequest, LetGoRequest, LetGoResponse, Loan as LoanMessage,
        decode_server::Decode,
    },
};
use baton_request::FinishReason;
use baton_telemetry::{TracePoint, trace_context};
use baton_worker::{
    Recall, SaveAtEnd, Uncovered, Worker, blending, bring_in, handoff::pulse::Pulse, identity_of,
};
use baton_worker_messages::{progress_event, submit_failure};
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tonic::{Request, Response, Status};
use tracing::{Instrument, Span};

use crate::{
    admission::{PromptKv, admit},
    balance::BalanceGate,
    generate_stream::GenerateStream,
    loan::{Lender, Loan},
    remote_prefill::RemotePrefillDriver,
};

/// A handoff sends at most two events: the first token, and then the stream of the others or a failure.
const EVENTS_BOUND: usize = 2;

/// Serves `Decode`.
#[derive(Clone)]
pub struct DecodeService {
    worker: Arc<Worker>,
    lender: Lender,
    balance: BalanceGate,
}

impl DecodeService {
    /// Decodes on `worker`'s engine, and lends its blocks for the time `lease`.
    pub fn new(worker: Arc<Worker>, lease: Duration) -> DecodeService {
        let lender = Lender::new(worker.clone(), lease);
        DecodeService { worker, lender, balance: BalanceGate::default() }
    }

    /// Starts an accepted request.
    async fn start(
        &self,
        mut submission: Submission,
        kv: PromptKv,
        uncovered: Option<Uncovered>,
        span: &Span,
    ) -> Result<GenerateStream, Status> {
        let worker = self.worker.clone();
        let num_tokens = submission.request.num_known_tokens();
        if submission.has_ended() {
            // An earlier attempt was lost after its last token.
            let clock = worker.metrics().request_taken("local", num_tokens, span);
            return Ok(GenerateStream::ended(worker, FinishReason::Stop, clock).in_span(span.clone()));
        }
        let request = &mut submission.request;
        if !matches!(kv, PromptKv::Remote(_)) {
            blending::decide(&worker, request);
        }
        let recall = match kv {
            PromptKv::Local | PromptKv::Fetch { .. } => Recall::of(worker.tiers(), request).await,
            PromptKv::Remote(_) => None,
        };
        let save = SaveAtEnd::new(worker.tiers(), request);
        let stream = match (kv, recall) {
            (PromptKv::Local, None) => {
                let tokens = worker.engine().generate(submission);
                let tokens = tokens.map_err(|error| failure_to_status(&submit_failure(&error)))?;
                // The engine counts it from here on.
                drop(uncovered);
                let clock = worker.metrics().request_taken("local", num_tokens, span);
                GenerateStream::local(worker, tokens, clock)
            }
            (PromptKv::Local, Some(recall)) => {
                let clock = worker.metrics().request_taken("local", num_tokens, span);
                let recall = bring_in(worker.clone(), Some(recall), None, request.clone());
                let recall = recall.instrument(span.clone());
                GenerateStream::fetching(worker, recall, submission, uncovered, clock)
            }
            (PromptKv::Fetch { source }, recall) => {
                let clock = worker.metrics().request_taken("local", num_tokens, span);
                // The peer is asked for what the tiers lack.
                let fetch = bring_in(worker.clone(), recall, Some(source), request.clone());
                let fetch = fetch.instrument(span.clone());
                GenerateStream::fetching(worker, fetch, submission, uncovered, clock)
            }
            (PromptKv::Remote(plan), _) => {
                let clock = worker.metrics().request_taken("remote", num_tokens, span);
                let span = tracing::info_span!(
                    parent: span, "handoff", otel.kind = "client", prefill = plan.peer.worker_id
                );
                let (events, received) = mpsc::channel(EVENTS_BOUND);
                let deadline = worker.config().handoff_deadline;
                let driver =
                    RemotePrefillDriver::new(worker.clone(), submission, plan, uncovered, deadline, events);
                let num_progress = driver.num_progress();
                worker.lifecycle().spawn(driver.run().instrument(span));
                GenerateStream::remote(worker, received, num_progress, clock)
            }
        };
        Ok(stream.saving(save).in_span(span.clone()))
    }
}

/// The call is refused.
fn refuse(span: &Span, status: &Status) {
    if let Some(trace) = TracePoint::of(span) {
        trace.set("rpc.grpc.status_code", i64::from(i32::from(status.code())));
    }
    if is_server_fault(status.code()) {
        trace_context::fail(span, "refused", status.message());
    }
}

#[tonic::async_trait]
impl Decode for DecodeService {
    type GenerateStream = Pin<Box<dyn Stream<Item = Result<GenerateEvent, Status>> + Send>>;

    async fn generate(
        &self,
        request: Request<GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let message = request.get_ref();
        let span = tracing::info_span!(
            "generate",
            otel.kind = "server",
            request_id = message.request_id,
            attempt = i64::from(message.attempt),
            worker = %self.worker.id(),
        );
        trace_context::set_parent(&span, |name| {
            request.metadata().get(name).and_then(|value| value.to_str().ok()).map(str::to_owned)
        });
        let uncovered = self.worker.tickets().take(message.ticket);
        let (accepted, kv) = admit(&self.worker, message).inspect_err(|status| refuse(&span, status))?;
        if message.for_balance {
            let arrived = self.balance.arrive(&self.worker, message.prefix_source.as_ref()).await;
            arrived.inspect_err(|status| refuse(&span, status))?;
        }
        let prepared = self.worker.prepare_grammar(accepted).await;
        let submission = prepared
            .map_err(|failure| failure_to_status(&failure))
            .inspect_err(|status| refuse(&span, status))?;
        let started = self.start(submission, kv, uncovered, &span).await;
        let stream = started.inspect_err(|status| refuse(&span, status))?;
        // The router's timeout for a silent stream may be shorter than a prefill: `Progress` events restart it.
        let work = stream.work();
        let pulse = Pulse::new(self.worker.config().handoff_deadline, work());
        let state = (stream, pulse, work);
        let events = futures_util::stream::unfold(state, |(mut stream, mut pulse, work)| async move {
            let event = tokio::select! {
                biased;
                event = stream.next() => event?,
                () = pulse.beat(&work) => progress_event(),
            };
            Some((Ok(event), (stream, pulse, work)))
        });
        Ok(Response::new(Box::pin(events)))
    }

    type LendStream = Pin<Box<dyn Stream<Item = Result<LoanMessage, Status>> + Send>>;

    async fn lend(&self, request: Request<LendRequest>) -> Result<Response<Self::LendStream>, Status> {
        let borrower = identity_of(request.extensions());
        let loan = self.lender.lend(request.into_inner(), borrower).await?;
        Ok(Response::new(Box::pin(futures_util::stream::unfold(loan, Loan::next))))
    }

    async fn let_go(&self, request: Request<LetGoRequest>) -> Result<Response<LetGoResponse>, Status> {
        self.balance.let_go(&self.worker, request.get_ref())?;
        Ok(Response::new(LetGoResponse {}))
    }
}
