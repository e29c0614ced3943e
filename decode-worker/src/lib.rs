//! The decode worker: owns a request from plan to last token. It computes the prompt itself, or has a
//! prefill worker do it and receives the KV.
//!
//! [`run()`] is one from start to end, [`service`] its gRPC service, [`generation`] the stream that a
//! router reads, [`handoff`] one remote prefill, [`loan`] blocks for a prefill worker that measures its ways here.
//!
//! It does not know why a request came here, nor text.
#![forbid(unsafe_code)]

pub mod generation;
pub mod handoff;
pub mod loan;
pub mod peers;
pub mod service;

use std::sync::Arc;

use anyhow::Context;
use baton_kv_transfer::{Receiver, ReceiverConfig, TransportKind};
use baton_proto::worker::decode_server::DecodeServer;
use baton_worker::{
    Direction, MAX_MESSAGE_BYTES, RoleService, Worker, WorkerConfig, private_runtime_dir, service_name,
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
///
/// # Errors
/// When its data plane cannot start.
pub fn role(worker: &Arc<Worker>) -> anyhow::Result<RoleService> {
    let receiver = start_receiver(worker)?;
    let counted = receiver.clone();
    worker.set_data_plane(Direction::Received, Box::new(move |kind| counted.counters().of(kind).read()));
    let service = DecodeServer::new(DecodeService::new(worker.clone(), receiver.clone()))
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES);
    Ok(RoleService {
        routes: Routes::new(service),
        name: service_name(baton_cluster::Role::Decode),
        // Listeners and threads end with the last clone of the receiver, which waits for them.
        stop: Box::pin(async {
            let _ = tokio::task::spawn_blocking(|| drop(receiver)).await;
        }),
    })
}

fn start_receiver(worker: &Worker) -> anyhow::Result<Receiver> {
    let config = worker.config();
    let offers = |kind| config.transports.contains(&kind);
    let shm_dir = match &config.shm_dir {
        _ if !offers(TransportKind::Shm) => None,
        Some(dir) => Some(dir.clone()),
        None => Some(private_runtime_dir().context("no directory for the sockets of the shm transport")?),
    };
    let receiver = ReceiverConfig {
        rdma_listen: offers(TransportKind::Rdma).then(|| config.rdma_listen()),
        nixl: config.nixl.clone(),
        nccl_listen: offers(TransportKind::Nccl).then_some(config.nccl_listen),
        nccl: config.nccl.clone(),
        tcp_listen: offers(TransportKind::Tcp).then_some(config.data_listen),
        advertise_host: Some(config.data_host(&worker.record().address)),
        shm_dir,
        tls: config.tls.clone(),
        ..ReceiverConfig::default()
    };
    if config.tls.is_some() && offers(TransportKind::Rdma) {
        tracing::warn!("kv that travels over rdma is not encrypted, nor is its control connection");
    }
    Receiver::start(worker.engine().storage().clone(), receiver).context("cannot start receiving KV")
}
