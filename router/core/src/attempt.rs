//! One attempt: one plan, one stream of a decode worker.

use std::time::{Duration, Instant};

use baton_cluster::WorkerRecord;
use baton_planner::{Plan, Prefill, WorkerKey};
use baton_proto::{
    failure_from_status,
    worker::{GenerateEvent, GenerateRequest, PrefillPeer, decode_client::DecodeClient, generate_event},
};
use baton_request::{Failure, FailureKind};
use baton_router_workers::{Assignment, Workers};
use baton_telemetry::trace_context;
use tokio::time::timeout;
use tonic::{Request, Streaming};
use tracing::{Instrument, Span, field::Empty};

use crate::{explain::ExplainedPlan, patience::Patience};

/// Dropping it cancels the request at the worker.
#[derive(Debug)]
pub(crate) struct Attempt {
    pub(crate) plan: Plan,
    pub(crate) decode: WorkerKey,
    /// New tokens that have come.
    pub(crate) num_tokens: usize,
    /// Position of the next token in the output.
    pub(crate) next_idx: usize,
    /// It tells log-probabilities of the prompt: no prefix cache has its KV, not even in its worker.
    pub(crate) is_scored: bool,
    stream: Streaming<GenerateEvent>,
    /// When it was sent.
    pub(crate) started: Instant,
    assignment: Assignment,
    /// Until the first token, when the prefill worker is done.
    prefill: Option<Assignment>,
    /// With the worker.
    patience: Patience,
    /// Ends with the attempt.
    span: Span,
}

impl Attempt {
    /// Sends the request to the plan's decode worker.
    pub(crate) async fn start(
        workers: &Workers,
        plan: Plan,
        request: GenerateRequest,
        stall_timeout: Duration,
    ) -> Result<Attempt, (Plan, Failure)> {
        let span = tracing::info_span!(
            "attempt",
            otel.kind = "client",
            attempt = i64::from(request.attempt),
            decode = plan.decode.id.0,
            prefill = match &plan.prefill {
                Prefill::Local => plan.decode.id.0.as_str(),
                Prefill::Remote(worker) => worker.id.0.as_str(),
            },
            plan.ttft_ms = Empty,
            plan.tpot_ms = Empty,
            plan.harm_ms = Empty,
            plan.options = Empty,
        );
        ExplainedPlan::record(&span, &plan);
        let sending = Attempt::send(workers, plan, request, stall_timeout, span.clone());
        let sent = sending.instrument(span.clone()).await;
        sent.inspect_err(|(_, failure)| trace_context::fail(&span, failure.kind.name(), &failure.message))
    }

    async fn send(
        workers: &Workers,
        plan: Plan,
        mut request: GenerateRequest,
        stall_timeout: Duration,
        span: Span,
    ) -> Result<Attempt, (Plan, Failure)> {
        let started = Instant::now();
        let decode = WorkerKey::of(&plan.decode);
        let gone = || Failure::new(FailureKind::Draining, format!("worker {decode} has left"));
        let Some((channel, assignment, ticket)) = workers.assign(&decode, plan.decode_work) else {
            let failure = gone();
            return Err((plan, failure));
        };
        request.ticket = Some(ticket);
        let mut prefill = None;
        if let Prefill::Remote(worker) = &plan.prefill {
            if let Some((_, assignment, ticket)) = workers.assign(&WorkerKey::of(worker), plan.prefill_work) {
                prefill = Some(assignment);
                request.prefill_ticket = Some(ticket);
            }
            request.prefill = Some(peer(worker));
        }
        request.prefix_source = plan.prefix_source.as_deref().map(peer);
        // Invariant 1: the worker continues after the delivered tokens, which the request carries.
        let next_idx = request.output_token_ids.len();
        let wants_scores = request.sampling.as_ref().is_some_and(|it| it.prompt_logprobs.is_some());
        let mut message = Request::new(request);
        crate::trace::inject(message.metadata_mut());
        let mut client = DecodeClient::new(channel);
        let answer = match timeout(stall_timeout, client.generate(message)).await {
            Ok(answer) => answer.map_err(|status| failure_from_status(&status)),
            Err(_) => Err(stalled(stall_timeout)),
        };
        match answer {
            Ok(response) => Ok(Attempt {
                plan,
                decode,
                num_tokens: 0,
                next_idx,
                is_scored: wants_scores && next_idx == 0,
                stream: response.into_inner(),
                started,
                assignment,
                prefill,
                patience: Patience::new(stall_timeout),
                span,
            }),
            Err(failure) => Err((plan, failure)),
        }
    }

    /// Why it ends without the request.
    pub(crate) fn fail(&self, failure: &Failure) {
        trace_context::fail(&self.span, failure.kind.name(), &failure.message);
    }

    /// The worker's next event.
    pub(crate) async fn next(&mut self) -> Result<generate_event::Event, Failure> {
        let message = loop {
            match self.patience.wait(self.stream.message()).await {
                // The worker computes or waits its turn: the attempt has not stalled.
                Some(Ok(Some(GenerateEvent { event: Some(generate_event::Event::Progress(_)) }))) => {}
                Some(message) => break message.map_err(|status| failure_from_status(&status))?,
                None => return Err(stalled(self.patience.limit())),
            }
        };
        match message {
            Some(GenerateEvent { event: Some(generate_event::Event::Failed(failed)) }) => Err(failed.into()),
            Some(GenerateEvent { event: Some(event) }) => {
                if let generate_event::Event::Token(_) = event
                    && self.num_tokens == 0
                {
                    self.prefill = None;
                    self.assignment.computed();
                }
                Ok(event)
            }
            // An event of a newer worker that this router does not know cannot be skipped safely.
            Some(GenerateEvent { event: None }) => {
                Err(Failure::new(FailureKind::Internal, "the worker sent an unknown event"))
            }
            None => Err(Failure::new(FailureKind::Lost, "the worker's stream ended without a last event")),
        }
    }
}

/// No message came for this long.
pub(super) fn stalled(after: Duration) -> Failure {
    Failure::new(FailureKind::Stalled, format!("nothing came for {after:?}"))
}

fn peer(worker: &WorkerRecord) -> PrefillPeer {
    PrefillPeer {
        worker_id: worker.id.0.clone(),
        incarnation: worker.incarnation,
        address: worker.address.clone(),
    }
}
