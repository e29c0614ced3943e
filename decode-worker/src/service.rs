//! `baton.worker.v1.Decode`.

use std::{pin::Pin, sync::Arc};

use baton_proto::{
    failure_to_status,
    worker::{GenerateEvent, GenerateRequest, LendRequest, Loan as LoanMessage, decode_server::Decode},
};
use baton_telemetry::trace_context;
use baton_worker::{
    Worker,
    convert::{progress_event, submit_failure},
    handoff::{prefix_fetch, pulse::Pulse},
    identity_of,
};
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tonic::{Request, Response, Status};
use tracing::Instrument;

use crate::{
    admission::{Admitted, admit},
    generate_stream::GenerateStream,
    loan::{Lender, Loan},
    remote_prefill::RemotePrefillDriver,
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

    /// Starts an accepted request.
    fn start(&self, admitted: Admitted, span: tracing::Span) -> Result<GenerateStream, Status> {
        let worker = self.worker.clone();
        match admitted {
            Admitted::Local(request) => {
                let num_tokens = request.num_known_tokens();
                let tokens = worker.engine().generate(request);
                let tokens = tokens.map_err(|error| failure_to_status(&submit_failure(&error)))?;
                worker.metrics().request_taken("local", num_tokens);
                Ok(GenerateStream::local(worker, tokens))
            }
            Admitted::Fetch { request, source, attempt } => {
                worker.metrics().request_taken("local", request.num_known_tokens());
                let fetch = prefix_fetch::fetch(worker.clone(), source, attempt, request.clone());
                Ok(GenerateStream::fetching(worker, fetch.instrument(span), request))
            }
            Admitted::Remote(plan, link) => {
                worker.metrics().request_taken("remote", plan.request.num_known_tokens());
                let (events, received) = mpsc::channel(EVENTS_BOUND);
                let deadline = worker.config().handoff_deadline;
                let driver = RemotePrefillDriver::new(worker.clone(), link, plan, deadline, events);
                let num_beats = driver.num_beats();
                worker.lifecycle().spawn(driver.run().instrument(span));
                Ok(GenerateStream::remote(worker, received, num_beats))
            }
        }
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
        let stream = self.start(admit(&self.worker, message)?, span)?;
        // A router may have to wait longer than a handoff may make no progress.
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
}
