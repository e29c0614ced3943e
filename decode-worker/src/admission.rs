//! Which requests a decode worker accepts, and where their prompts are computed.

use baton_proto::{failure_to_status, worker::GenerateRequest};
use baton_request::{Failure, FailureKind, Request};
use baton_worker::{Worker, handoff::opening::PrefixSource};
use baton_worker_messages::{request_from_generate, submit_failure, wire_from_generate};
use tonic::Status;

use crate::remote_prefill::RemotePrefillPlan;

/// Where the KV of an accepted prompt comes from.
pub enum PromptKv {
    /// This worker's engine computes it.
    Local,
    /// This worker fetches the prefix that `source` has cached, and its engine computes the rest.
    Fetch {
        /// The worker that probably has more of it cached.
        source: PrefixSource,
    },
    /// A prefill worker computes it.
    Remote(RemotePrefillPlan),
}

/// Accepts a request unless the worker drains or the request is invalid. Whether there is room for it, the engine decides
/// later.
///
/// # Errors
/// The status with which the call is refused.
pub fn admit(worker: &Worker, message: &GenerateRequest) -> Result<(Request, PromptKv), Status> {
    if worker.lifecycle().is_draining() {
        let failure = Failure::new(FailureKind::Draining, "the decode worker is leaving");
        return Err(failure_to_status(&failure));
    }
    let request = request_from_generate(message)?;
    let wire = wire_from_generate(message)?.or(worker.config().kv_wire);
    let (attempt, prefix_source) = (message.attempt, message.prefix_source.clone());
    let kv = match (message.prefill.clone(), prefix_source) {
        (None, None) => PromptKv::Local,
        (None, Some(peer)) => PromptKv::Fetch { source: PrefixSource { peer, attempt, wire } },
        (Some(peer), prefix_source) => {
            let link = worker.peers().link(&peer.address);
            let link = link.map_err(|error| Status::invalid_argument(format!("prefill.address: {error}")))?;
            let ticket = message.prefill_ticket;
            PromptKv::Remote(RemotePrefillPlan { attempt, peer, link, wire, prefix_source, ticket })
        }
    };
    let valid = worker.engine().validate(&request);
    valid.map_err(|error| failure_to_status(&submit_failure(&error.into())))?;
    Ok((request, kv))
}
