//! `baton.worker.v1.Decode`.

use std::{pin::Pin, sync::Arc};

use baton_handoff::Extent;
use baton_proto::{
    failure_to_status,
    worker::{GenerateEvent, GenerateRequest, LendRequest, Loan as LoanMessage, decode_server::Decode},
};
use baton_request::{Failure, FailureKind};
use baton_telemetry::trace_context;
use baton_worker::{
    Worker,
    convert::{progress_event, request_from_generate, submit_failure},
    convert_handoff::wire_from_generate,
    handoff::{
        decode::{Handoff, Plan},
        prefix,
        pulse::Pulse,
    },
    peer_of,
};
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tonic::{Request, Response, Status};
use tracing::Instrument;

use crate::{
    generation::Generation,
    loan::{Lender, Loan},
};

/// A handoff says at most two things: the first token, and the stream of the others or a failure.
const EVENTS_BOUND: usize = 2;

/// Serves `Decode`.
#[derive(Clone)]
pub struct DecodeService {
    worker: Arc<Worker>,
    lender: Lender,
}

impl DecodeService {
    /// Decodes on `worker`'s engine.
    pub fn new(worker: Arc<Worker>) -> DecodeService {
        let lender = Lender::new(worker.clone());
        DecodeService { worker, lender }
    }

    fn generation(&self, message: &GenerateRequest, span: tracing::Span) -> Result<Generation, Status> {
        if self.worker.lifecycle().is_draining() {
            let failed = Failure::new(FailureKind::Draining, "the decode worker is leaving");
            return Err(failure_to_status(&failed));
        }
        let request = request_from_generate(message)?;
        let wire = wire_from_generate(message)?.or(self.worker.config().kv_wire);
        let engine = self.worker.engine();
        let num_tokens = request.num_known_tokens();
        let worker = self.worker.clone();
        let valid = || {
            let valid = request.validate(engine.vocab_size(), engine.context_length());
            valid.map_err(|error| failure_to_status(&submit_failure(&error.into())))
        };
        let Some(peer) = &message.prefill else {
            if let Some(source) = &message.prefix_source {
                valid()?;
                worker.metrics().request_taken("local", num_tokens);
                let fetch = prefix::fetch(worker.clone(), source.clone(), message.attempt, request.clone());
                return Ok(Generation::fetching(worker, fetch.instrument(span), request));
            }
            let tokens =
                engine.generate(request).map_err(|error| failure_to_status(&submit_failure(&error)))?;
            worker.metrics().request_taken("local", num_tokens);
            return Ok(Generation::local(worker, tokens));
        };
        valid()?;
        let link = worker
            .peers()
            .link(&peer.address)
            .map_err(|error| Status::invalid_argument(format!("prefill.address: {error}")))?;
        worker.metrics().request_taken("remote", num_tokens);
        let (events, received) = mpsc::channel(EVENTS_BOUND);
        let plan = Plan {
            request,
            attempt: message.attempt,
            peer: peer.clone(),
            wire,
            extent: Extent::Whole,
            prefix_source: message.prefix_source.clone(),
        };
        let deadline = worker.config().handoff_deadline;
        let handoff = Handoff::new(worker.clone(), link, plan, deadline, events);
        let num_beats = handoff.num_beats();
        worker.lifecycle().spawn(handoff.run().instrument(span));
        Ok(Generation::remote(worker, received, num_beats))
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
        let span =
            tracing::info_span!("generate", request_id = message.request_id, attempt = message.attempt);
        trace_context::set_parent(&span, |name| {
            request.metadata().get(name).and_then(|value| value.to_str().ok()).map(str::to_owned)
        });
        let generation = self.generation(message, span)?;
        // For whoever waits longer than a handoff may stand still.
        let work = generation.work();
        let pulse = Pulse::new(self.worker.config().handoff_deadline, work());
        let state = (generation, pulse, work);
        let events = futures_util::stream::unfold(state, |(mut generation, mut pulse, work)| async move {
            let event = tokio::select! {
                biased;
                event = generation.next() => event?,
                () = pulse.beat(&work) => progress_event(),
            };
            Some((Ok(event), (generation, pulse, work)))
        });
        Ok(Response::new(Box::pin(events)))
    }

    type LendStream = Pin<Box<dyn Stream<Item = Result<LoanMessage, Status>> + Send>>;

    async fn lend(&self, request: Request<LendRequest>) -> Result<Response<Self::LendStream>, Status> {
        let borrower = peer_of(request.extensions());
        let loan = self.lender.lend(request.into_inner(), borrower).await?;
        Ok(Response::new(Box::pin(futures_util::stream::unfold(loan, Loan::next))))
    }
}
