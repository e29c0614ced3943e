//! The prefill worker: computes prompts for decode workers and hands their KV over.
//!
//! [`run()`] is one from start to end, [`service`] its gRPC service, [`admission`] says which prompts it accepts, and
//! [`handoff`] is one prompt from its queue to its last layer. Handing over what is cached, as every worker does, is
//! [`baton_worker::handoff`]'s.
//!
//! It owns no request: it does not know who decodes, nor why a prompt came here.
#![forbid(unsafe_code)]

pub mod admission;
pub mod handoff;
pub mod service;

use std::sync::Arc;

use baton_proto::worker::prefill_server::PrefillServer;
use baton_worker::{MAX_MESSAGE_BYTES, RoleService, Worker, WorkerConfig, service_name};
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use service::PrefillService;

/// Runs a prefill worker until `shutdown` and a drain.
///
/// # Errors
/// When it cannot start, or its engine broke.
pub async fn run(config: WorkerConfig, shutdown: CancellationToken) -> anyhow::Result<()> {
    baton_worker::run(config, shutdown, role).await
}

/// What makes a worker a prefill worker.
pub fn role(worker: &Arc<Worker>) -> RoleService {
    let service = PrefillServer::new(PrefillService::new(worker.clone()))
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES);
    RoleService { routes: Routes::new(service), name: service_name(baton_cluster::Role::Prefill) }
}
