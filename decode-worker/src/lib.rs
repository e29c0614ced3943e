//! The decode worker: owns a request from `Generate` to the last token. Its engine computes the prompt, or a prefill worker
//! does and hands the KV over.
//!
//! [`run()`] runs a decode worker, [`service`] is its gRPC service, and [`admission`] decides which requests it accepts,
//! and [`balance`] which of those that migrate for balance.
//! [`remote_prefill`] drives the decode side of a handoff, [`generate_stream`] has the events that a router reads, and
//! [`loan`] lends blocks to a worker that measures the transports to them. [`baton_worker::handoff`] hands over cached
//! prefixes, as on every worker.
//!
//! It knows neither text nor why the router chose this worker.
#![forbid(unsafe_code)]

pub mod admission;
pub mod balance;
pub mod generate_stream;
pub mod loan;
pub mod remote_prefill;
pub mod service;

use std::sync::Arc;

use baton_proto::worker::{decode_server::DecodeServer, prefill_server::PrefillServer};
use baton_worker::{
    MAX_MESSAGE_BYTES, RoleService, Worker, WorkerConfig, handoff::service::PrefixService, service_name,
};
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use service::DecodeService;

/// Runs a decode worker until `shutdown`, and then drains it.
///
/// # Errors
/// When it cannot start, or when its engine has failed.
pub async fn run(config: WorkerConfig, shutdown: CancellationToken) -> anyhow::Result<()> {
    baton_worker::run(config, shutdown, role).await
}

/// The services of a decode worker.
pub fn role(worker: &Arc<Worker>) -> RoleService {
    let service = DecodeServer::new(DecodeService::new(worker.clone(), loan::LEASE))
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES);
    let prefixes = PrefillServer::new(PrefixService::new(worker.clone()))
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES);
    RoleService {
        routes: Routes::new(service).add_service(prefixes),
        name: service_name(baton_cluster::Role::Decode),
    }
}
