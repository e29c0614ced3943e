//! `baton.worker.v1.Prefill`, as far as every worker serves it: cached prefixes, and measurements of the transports to decode
//! workers.

use std::sync::Arc;

use baton_proto::worker::{
    DecodeMessage, PrefillMessage, ProbeReport, ProbeRequest, prefill_server::Prefill,
};
use baton_request::{Failure, FailureKind};
use baton_telemetry::trace_context;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};
use tracing::Instrument;

use super::{
    cached,
    opening::{HandoffRequest, open},
    probe::Prober,
};
use crate::worker::Worker;

/// Messages to the peer that wait in the channel. More wait in the handoff's own queue.
const OUTBOUND_BOUND: usize = 16;

/// What the peer of a handoff reads.
pub type HandoffMessages = ReceiverStream<Result<PrefillMessage, Status>>;

/// Serves `Prefill` on a worker that computes no prompts for others.
#[derive(Clone)]
pub struct PrefixService {
    worker: Arc<Worker>,
    prober: Prober,
}

impl PrefixService {
    /// Hands over prefixes that `worker` has cached.
    pub fn new(worker: Arc<Worker>) -> PrefixService {
        let prober = Prober::new(worker.clone());
        PrefixService { worker, prober }
    }
}

/// Runs a handoff that another worker opens. `serve` continues it after the first message.
pub fn accept<F>(
    worker: &Arc<Worker>,
    request: Request<Streaming<DecodeMessage>>,
    serve: impl FnOnce(Arc<Worker>, HandoffRequest) -> F + Send + 'static,
) -> Response<HandoffMessages>
where
    F: Future<Output = ()> + Send,
{
    let span = tracing::info_span!(
        "handoff",
        otel.kind = "server",
        request_id = tracing::field::Empty,
        worker = %worker.id(),
    );
    trace_context::set_parent(&span, |name| {
        request.metadata().get(name).and_then(|value| value.to_str().ok()).map(str::to_owned)
    });
    let (outbound, messages) = mpsc::channel(OUTBOUND_BOUND);
    let (served, inbound) = (worker.clone(), request.into_inner());
    let handoff = async move {
        if let Some(handoff) = open(&served, inbound, outbound).await {
            serve(served, handoff).await;
        }
    };
    worker.lifecycle().spawn(handoff.instrument(span));
    Response::new(ReceiverStream::new(messages))
}

#[tonic::async_trait]
impl Prefill for PrefixService {
    type HandoffStream = HandoffMessages;

    async fn handoff(
        &self,
        request: Request<Streaming<DecodeMessage>>,
    ) -> Result<Response<Self::HandoffStream>, Status> {
        Ok(accept(&self.worker, request, |worker, handoff| async move {
            match handoff {
                HandoffRequest::Fetch(opened) => cached::hand_over(worker, opened).await,
                HandoffRequest::Compute(opened, _) => {
                    let message =
                        "this worker computes no prompts for other workers: it is not a prefill worker";
                    opened.decline(&worker, Failure::new(FailureKind::PrefillLost, message)).await;
                }
            }
        }))
    }

    async fn probe(&self, request: Request<ProbeRequest>) -> Result<Response<ProbeReport>, Status> {
        self.prober.probe(&request.get_ref().decode_address).await.map(Response::new)
    }
}
