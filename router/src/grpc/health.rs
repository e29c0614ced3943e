//! `grpc.health.v1.Health`, whose status is the router's readiness.

use std::{pin::Pin, sync::Arc};

use futures_util::Stream;
use tokio::{
    sync::{Semaphore, watch},
    task::JoinHandle,
};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};
use tonic_health::pb::{
    HealthCheckRequest, HealthCheckResponse,
    health_check_response::ServingStatus,
    health_server::{Health, HealthServer},
};

use baton_router_core::Core;

/// The services that have a status; the empty name is the whole server.
const SERVICES: [&str; 2] = ["", "baton.v1.Inference"];

/// Streams of `Watch` that are open at a time. They need no key, and have no end.
const MAX_WATCHERS: usize = 1024;

/// Follows whether the router is ready. `None` is the end.
#[derive(Debug)]
pub(crate) struct Readiness {
    status: watch::Receiver<Option<bool>>,
    task: JoinHandle<()>,
    stop: CancellationToken,
}

impl Readiness {
    pub(crate) fn follow(core: Arc<Core>) -> Readiness {
        let (sender, status) = watch::channel(Some(false));
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        let task = tokio::spawn(async move {
            let _ = stopped.run_until_cancelled(publish(&core, &sender)).await;
            sender.send_replace(None);
        });
        Readiness { status, task, stop }
    }

    pub(crate) fn status(&self) -> watch::Receiver<Option<bool>> {
        self.status.clone()
    }

    /// Ends the stream of every watcher.
    pub(crate) async fn stop(self) {
        self.stop.cancel();
        if let Err(error) = self.task.await {
            tracing::error!(%error, "the readiness task failed: health checks are stale");
        }
    }
}

async fn publish(core: &Core, status: &watch::Sender<Option<bool>>) {
    let mut changes = core.workers.changes();
    core.model_loaded().await;
    loop {
        let ready = core.missing().is_none();
        // Watchers are told of changes only.
        let changed = status.send_if_modified(|status| status.replace(ready) != Some(ready));
        if changed {
            tracing::info!(ready, "readiness changed");
        }
        if changes.changed().await.is_err() {
            return;
        }
    }
}

#[derive(Clone, Debug)]
pub(super) struct HealthService {
    ready: watch::Receiver<Option<bool>>,
    watchers: Arc<Semaphore>,
}

pub(super) fn service(ready: watch::Receiver<Option<bool>>) -> HealthServer<HealthService> {
    HealthServer::new(HealthService { ready, watchers: Arc::new(Semaphore::new(MAX_WATCHERS)) })
}

fn response(ready: Option<bool>) -> HealthCheckResponse {
    let status = if ready == Some(true) { ServingStatus::Serving } else { ServingStatus::NotServing };
    HealthCheckResponse { status: status.into() }
}

#[tonic::async_trait]
impl Health for HealthService {
    async fn check(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        if !SERVICES.contains(&request.get_ref().service.as_str()) {
            return Err(Status::not_found(format!("there is no service {:?}", request.get_ref().service)));
        }
        Ok(Response::new(response(*self.ready.borrow())))
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<HealthCheckResponse, Status>> + Send>>;

    async fn watch(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        if !SERVICES.contains(&request.get_ref().service.as_str()) {
            // The protocol asks for no error here: the service may be added later.
            let unknown = HealthCheckResponse { status: ServingStatus::ServiceUnknown.into() };
            return Ok(Response::new(Box::pin(futures_util::stream::iter([Ok(unknown)]))));
        }
        let permit = self.watchers.clone().try_acquire_owned().map_err(|_| {
            Status::resource_exhausted(format!("{MAX_WATCHERS} streams are open already, try again later"))
        })?;
        let mut ready = self.ready.clone();
        ready.mark_changed();
        let statuses = futures_util::stream::unfold(Some((ready, permit)), |state| async move {
            let (mut ready, permit) = state?;
            ready.changed().await.ok()?;
            let now = *ready.borrow_and_update();
            Some((Ok(response(now)), now.map(|_| (ready, permit))))
        });
        Ok(Response::new(Box::pin(statuses)))
    }
}
