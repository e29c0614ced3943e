//! `baton.worker.v1.Prefill` on a prefill worker: it computes prompts. Cached prefixes and measurements, which every worker
//! serves, are in `worker`.

use std::sync::Arc;

use baton_handoff::prefill::ComputedHandoff;
use baton_proto::worker::{DecodeMessage, ProbeReport, ProbeRequest, prefill_server::Prefill};
use baton_worker::{
    Worker,
    handoff::{
        cached,
        opening::{HandoffRequest, OpenedHandoff, PrefixSource},
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
    /// The service of `worker`.
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
        Ok(accept(&self.worker, request, |worker, handoff| async move {
            match handoff {
                HandoffRequest::Compute(opened, source) => compute(worker, opened, source).await,
                HandoffRequest::Fetch(opened) => cached::hand_over(worker, opened).await,
            }
        }))
    }

    async fn probe(&self, request: Request<ProbeRequest>) -> Result<Response<ProbeReport>, Status> {
        self.prober.probe(&request.get_ref().decode_address).await.map(Response::new)
    }
}

/// Computes the prompt in `opened` and hands its KV over, or refuses with a reason.
async fn compute(worker: Arc<Worker>, opened: OpenedHandoff<ComputedHandoff>, source: Option<PrefixSource>) {
    match admit(&worker, &opened) {
        Ok(peer_format) => {
            ComputedHandoffDriver::new(worker, opened, source, peer_format).run().await;
        }
        Err(failure) => opened.decline(&worker, failure).await,
    }
}
