//! The prefill worker: computes prompts and hands their KV over.
//!
//! [`run()`] is one from start to end, [`service`] its gRPC service, [`handoff`] one handoff, [`probe`]
//! a measurement of the ways to a decode worker.
//!
//! It does not know who decodes, or why a prompt came here.
#![forbid(unsafe_code)]

pub mod handoff;
pub mod probe;
pub mod service;

use std::sync::Arc;

use baton_kv_transfer::{Sender, SenderConfig};
use baton_proto::worker::prefill_server::PrefillServer;
use baton_worker::{Direction, MAX_MESSAGE_BYTES, RoleService, Worker, WorkerConfig, service_name};
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
///
/// # Errors
/// When its data plane cannot start.
pub fn role(worker: &Arc<Worker>) -> anyhow::Result<RoleService> {
    let config = worker.config();
    let config = SenderConfig {
        transports: config.transports.clone(),
        nixl: config.nixl.clone(),
        nccl: config.nccl.clone(),
        tls: config.tls.clone(),
        ..SenderConfig::default()
    };
    let sender = Sender::start(worker.engine().storage().clone(), config)?;
    let counted = sender.clone();
    worker.set_data_plane(Direction::Sent, Box::new(move |kind| counted.counters().of(kind).read()));
    let service = PrefillServer::new(PrefillService::new(worker.clone(), sender))
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES);
    Ok(RoleService {
        routes: Routes::new(service),
        name: service_name(baton_cluster::Role::Prefill),
        // Connections and threads end with the last clone of the sender.
        stop: Box::pin(std::future::ready(())),
    })
}
