//! The decode worker: owns a request from plan to last token. It computes the prompt itself, or has a
//! prefill worker do it and receives the KV.
//!
//! [`run()`] is one from start to end, [`service`] its gRPC service, [`admission`] says which requests it accepts.
//! [`remote_prefill`] is a prompt that a prefill worker computes, [`generate_stream`] the events that a router reads, and
//! [`loan`] lends blocks to a worker that measures its ways here. Handing over what is cached, as every worker does, is
//! [`baton_worker::handoff`]'s.
//!
//! It does not know why a request came here, nor text.
#![forbid(unsafe_code)]

pub mod admission;
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

/// Runs a decode worker until `shutdown` and a drain.
///
/// # Errors
/// When it cannot start, or its engine broke.
pub async fn run(config: WorkerConfig, shutdown: CancellationToken) -> anyhow::Result<()> {
    baton_worker::run(config, shutdown, role).await
}

/// What makes a worker a decode worker.
pub fn role(worker: &Arc<Worker>) -> RoleService {
    let service = DecodeServer::new(DecodeService::new(worker.clone()))
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
