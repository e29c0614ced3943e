//! `baton.worker.v1.Prefill`, which every worker serves.

use std::sync::Arc;

use baton_proto::worker::{
    DecodeMessage, PrefillMessage, ProbeReport, ProbeRequest, prefill_server::Prefill,
};
use baton_telemetry::trace_context;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};
use tracing::Instrument;

use super::{prefill::Handoff, probe::Prober};
use crate::worker::Worker;

/// Messages to the decode worker that wait in the stream; more wait in the handoff, in order.
const OUTBOUND_BOUND: usize = 16;

/// Serves `Prefill`.
#[derive(Clone)]
pub struct PrefillService {
    worker: Arc<Worker>,
    prober: Prober,
}

impl PrefillService {
    /// Computes on `worker`'s engine, and gives what is in its blocks.
    pub fn new(worker: Arc<Worker>) -> PrefillService {
        let prober = Prober::new(worker.clone());
        PrefillService { worker, prober }
    }
}

#[tonic::async_trait]
impl Prefill for PrefillService {
    type HandoffStream = ReceiverStream<Result<PrefillMessage, Status>>;

    async fn handoff(
        &self,
        request: Request<Streaming<DecodeMessage>>,
    ) -> Result<Response<Self::HandoffStream>, Status> {
        let span = tracing::info_span!("handoff", request_id = tracing::field::Empty);
        trace_context::set_parent(&span, |name| {
            request.metadata().get(name).and_then(|value| value.to_str().ok()).map(str::to_owned)
        });
        let (outbound, messages) = mpsc::channel(OUTBOUND_BOUND);
        let handoff = Handoff::new(self.worker.clone(), request.into_inner(), outbound);
        self.worker.lifecycle().spawn(handoff.run().instrument(span));
        Ok(Response::new(ReceiverStream::new(messages)))
    }

    async fn probe(&self, request: Request<ProbeRequest>) -> Result<Response<ProbeReport>, Status> {
        self.prober.probe(&request.get_ref().decode_address).await.map(Response::new)
    }
}
