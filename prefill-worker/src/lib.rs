//! The prefill worker: computes prompts and hands their KV over.
//!
//! [`run()`] is one from start to end. What it serves every worker does ([`baton_worker::handoff`]): it is a prefill
//! worker because routers send it prompts, and because it owns no request.
//!
//! It does not know who decodes, or why a prompt came here.
#![forbid(unsafe_code)]

use std::sync::Arc;

use baton_worker::{RoleService, Worker, WorkerConfig, service_name};
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

/// Runs a prefill worker until `shutdown` and a drain.
///
/// # Errors
/// When it cannot start, or its engine broke.
pub async fn run(config: WorkerConfig, shutdown: CancellationToken) -> anyhow::Result<()> {
    baton_worker::run(config, shutdown, role).await
}

/// What makes a worker a prefill worker.
pub fn role(_: &Arc<Worker>) -> RoleService {
    RoleService { routes: Routes::default(), name: service_name(baton_cluster::Role::Prefill) }
}
