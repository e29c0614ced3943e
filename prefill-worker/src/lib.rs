//! The prefill worker: computes prompts for decode workers and hands their KV over.
//!
//! [`run()`] runs a prefill worker, [`service`] is its gRPC service, [`admission`] decides which prompts it accepts, and
//! [`handoff`] drives one prompt from the queue to the last layer. [`baton_worker::handoff`] hands over cached prefixes, as on
//! every worker.
//!
//! It owns no request. It knows neither the router's plan nor what the decode worker does with the KV.
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

/// Runs a prefill worker until `shutdown`, and then drains it.
///
/// # Errors
/// When it cannot start, or when its engine has failed.
pub async fn run(config: WorkerConfig, shutdown: CancellationToken) -> anyhow::Result<()> {
    baton_worker::run(config, shutdown, role).await
}

/// The services of a prefill worker.
pub fn role(worker: &Arc<Worker>) -> RoleService {
    let service = PrefillServer::new(PrefillService::new(worker.clone()))
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES);
    RoleService { routes: Routes::new(service), name: service_name(baton_cluster::Role::Prefill) }
}
