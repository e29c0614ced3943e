//! `baton.worker.v1.Prefill`: prompts are computed here; what every worker serves, cached prefixes and measurements, is
//! `worker`'s.

use std::sync::Arc;

use baton_handoff::prefill::ComputedHandoff;
use baton_proto::worker::{DecodeMessage, ProbeReport, ProbeRequest, prefill_server::Prefill};
use baton_worker::{
    Worker,
    handoff::{
        cached,
        opening::{Begun, OpenedHandoff, PrefixSource},
        probe::Prober,
        service::{HandoffMessages, accept},
    },
};
use tonic::{Request, Response, Status, Streaming};

use crate::{admission::admit, handoff::ComputedHandoffDriver};

/// Serves `Prefill` on a prefill worker.
#[derive(Clone)]
pub struct PrefillService {
    worker: Arc<Worker>,
    prober: Prober,
}

impl PrefillService {
    /// Computes on `worker`'s engine.
    pub fn new(worker: Arc<Worker>) -> PrefillService {
        let prober = Prober::new(worker.clone());
        PrefillService { worker, prober }
    }
}

#[tonic::async_trait]
impl Prefill for PrefillService {
    type HandoffStream = HandoffMessages;

    async fn handoff(
        &self,
        request: Request<Streaming<DecodeMessage>>,
    ) -> Result<Response<Self::HandoffStream>, Status> {
        Ok(accept(&self.worker, request, |worker, opened| async move {
            match opened {
                OpenedHandoff::Compute(begun, source) => compute(worker, begun, source).await,
                OpenedHandoff::Fetch(begun) => cached::give(worker, begun).await,
            }
        }))
    }

    async fn probe(&self, request: Request<ProbeRequest>) -> Result<Response<ProbeReport>, Status> {
        self.prober.probe(&request.get_ref().decode_address).await.map(Response::new)
    }
}

/// Computes the prompt in `begun` and hands it over, or says why not.
async fn compute(worker: Arc<Worker>, begun: Begun<ComputedHandoff>, source: Option<PrefixSource>) {
    match admit(&worker, &begun) {
        Ok(peer_blocks) => ComputedHandoffDriver::new(worker, begun, source, peer_blocks).run().await,
        Err(failure) => begun.decline(&worker, failure).await,
    }
}
