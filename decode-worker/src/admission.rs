//! Which requests a decode worker accepts, and where their prompts are computed.

use baton_proto::{
    failure_to_status,
    worker::{GenerateRequest, PrefillPeer},
};
use baton_request::{Failure, FailureKind, Request};
use baton_worker::{
    Worker,
    convert::{request_from_generate, submit_failure},
    convert_handoff::wire_from_generate,
    peers::Link,
};
use tonic::Status;

use crate::remote_prefill::RemotePrefillPlan;

/// An accepted request.
pub enum Admitted {
    /// The engine here computes the prompt.
    Local(Request),
    /// The engine here computes what `source` has not cached of the prompt.
    Fetch {
        /// The request.
        request: Request,
        /// The worker that probably has more of it cached.
        source: PrefillPeer,
        /// How often the request was planned before.
        attempt: u32,
    },
    /// A prefill worker computes the prompt.
    Remote(RemotePrefillPlan, Link),
}

/// Accepts a request unless the worker drains or the request cannot be served. Whether the engine has room for it, the
/// engine decides.
///
/// # Errors
/// Why not: the call is refused.
pub fn admit(worker: &Worker, message: &GenerateRequest) -> Result<Admitted, Status> {
    if worker.lifecycle().is_draining() {
        let failure = Failure::new(FailureKind::Draining, "the decode worker is leaving");
        return Err(failure_to_status(&failure));
    }
    let request = request_from_generate(message)?;
    let wire = wire_from_generate(message)?.or(worker.config().kv_wire);
    let attempt = message.attempt;
    let Some(peer) = message.prefill.clone() else {
        return Ok(match message.prefix_source.clone() {
            // The engine validates.
            None => Admitted::Local(request),
            Some(source) => {
                validate(worker, &request)?;
                Admitted::Fetch { request, source, attempt }
            }
        });
    };
    validate(worker, &request)?;
    let link = worker
        .peers()
        .link(&peer.address)
        .map_err(|error| Status::invalid_argument(format!("prefill.address: {error}")))?;
    let prefix_source = message.prefix_source.clone();
    Ok(Admitted::Remote(RemotePrefillPlan { request, attempt, peer, wire, prefix_source }, link))
}

fn validate(worker: &Worker, request: &Request) -> Result<(), Status> {
    let engine = worker.engine();
    let valid = request.validate(engine.vocab_size(), engine.context_length());
    valid.map_err(|error| failure_to_status(&submit_failure(&error.into())))
}
