//! One port for everything a worker serves: gRPC services, health, reflection, and over plain HTTP
//! `/metrics`, `/livez` and `/readyz`.
//!
//! It listens before the model is loaded, so that probes get an answer at once. The services that need
//! the engine are mounted when it runs.

use std::{
    net::SocketAddr,
    sync::{Arc, OnceLock},
    time::Duration,
};

use axum::{
    Router,
    extract::{Request, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use baton_cluster::CONNECTION_WINDOW;
use baton_telemetry::Metrics;
use baton_tls::Tls;
use tokio::{net::TcpListener, task::JoinHandle, time::timeout};
use tokio_util::sync::CancellationToken;
use tonic::{Status, service::Routes, transport::server::Server as TonicServer};
use tonic_health::{ServingStatus, server::HealthReporter};
use tower::ServiceExt;

use crate::{
    incoming::{self, identity_of},
    lifecycle::{Lifecycle, Phase},
};

/// Largest gRPC message: a context of a million token ids fits.
pub const MAX_MESSAGE_BYTES: usize = 64 << 20;

/// How often a silent connection is checked.
pub const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(2);
/// How long the answer to a keep-alive may take.
pub const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes of a request that a router may send before the worker reads them.
const STREAM_WINDOW: u32 = 1 << 20;

/// Calls that a peer may reset before the server accepts them. The default of 20 protects public servers against floods by
/// closing the connection. Here the peers are routers and workers: one connection carries all requests between two of
/// them, and a burst of cancellations is legitimate.
const MAX_PENDING_RESETS: usize = 1 << 20;

/// For streams that are not read when the server closes.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// A listening server.
#[derive(Debug)]
pub(crate) struct Server {
    address: SocketAddr,
    services: Services,
    health: HealthReporter,
    close: CancellationToken,
    task: JoinHandle<Result<(), tonic::transport::Error>>,
}

/// Services that need the engine.
type Services = Arc<OnceLock<Router>>;

#[derive(Clone)]
struct Shared {
    lifecycle: Lifecycle,
    metrics: Metrics,
    services: Services,
    /// Services need a certificate; probes and metrics do not.
    wants_identity: bool,
}

impl Server {
    /// Serves health, reflection and HTTP on `listener`, at once.
    pub(crate) async fn start(
        listener: TcpListener,
        tls: Option<Tls>,
        lifecycle: Lifecycle,
        metrics: Metrics,
    ) -> anyhow::Result<Server> {
        let address = listener.local_addr()?;
        let (health, health_service) = tonic_health::server::health_reporter();
        // "" is the server as a whole; it is known and not serving until a router can send.
        health.set_service_status("", ServingStatus::NotServing).await;
        let services = Services::default();
        let shared = Shared { lifecycle, metrics, services: services.clone(), wants_identity: tls.is_some() };
        let routes = Router::new()
            .route("/metrics", get(metrics_text))
            .route("/livez", get(livez))
            .route("/readyz", get(readyz))
            .fallback(mounted)
            .with_state(shared);
        let mut routes = Routes::from(routes).add_service(health_service);
        for service in reflection()? {
            routes = service(routes);
        }
        let close = CancellationToken::new();
        let incoming = incoming::accept(listener, tls, close.clone());
        let server = TonicServer::builder()
            .accept_http1(true)
            .http2_keepalive_interval(Some(KEEP_ALIVE_INTERVAL))
            .http2_keepalive_timeout(Some(KEEP_ALIVE_TIMEOUT))
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .http2_max_pending_accept_reset_streams(Some(MAX_PENDING_RESETS))
            .add_routes(routes.prepare())
            .serve_with_incoming_shutdown(incoming, close.clone().cancelled_owned());
        let task = tokio::spawn(server);
        Ok(Server { address, services, health, close, task })
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Adds `routes`, once.
    pub(crate) fn mount(&self, routes: Routes) {
        let mounted = self.services.set(routes.prepare().into_axum_router());
        assert!(mounted.is_ok(), "services are mounted once");
    }

    /// Reports through `grpc.health.v1` whether `services` accept calls.
    pub(crate) async fn set_serving(&self, services: &[&str], serving: bool) {
        let status = if serving { ServingStatus::Serving } else { ServingStatus::NotServing };
        for service in services.iter().chain(&[""]) {
            self.health.set_service_status(*service, status).await;
        }
    }

    /// Accepts no more connections, gives open calls a moment to end, then cuts them.
    pub(crate) async fn close(mut self) {
        self.close.cancel();
        match timeout(CLOSE_TIMEOUT, &mut self.task).await {
            Ok(Ok(Ok(()))) => {}
            Ok(Ok(Err(error))) => tracing::warn!(%error, "the server ended badly"),
            Ok(Err(error)) => tracing::error!(%error, "the server broke"),
            // Some calls, such as health watches, never end by themselves.
            Err(_) => {
                self.task.abort();
                tracing::debug!("closed with calls open");
            }
        }
    }
}

type Mount = Box<dyn FnOnce(Routes) -> Routes>;

fn reflection() -> anyhow::Result<[Mount; 2]> {
    let builder = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(baton_proto::DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let v1 = builder().build_v1()?;
    let v1alpha = builder().build_v1alpha()?;
    Ok([
        Box::new(|routes: Routes| routes.add_service(v1)),
        Box::new(|routes: Routes| routes.add_service(v1alpha)),
    ])
}

async fn metrics_text(State(shared): State<Shared>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, Metrics::CONTENT_TYPE)], shared.metrics.encode())
}

/// Always ok: the process ends when its engine ends.
async fn livez() -> &'static str {
    "ok\n"
}

async fn readyz(State(shared): State<Shared>) -> (StatusCode, &'static str) {
    match shared.lifecycle.phase() {
        Phase::Serving => (StatusCode::OK, "ok\n"),
        Phase::Starting => (StatusCode::SERVICE_UNAVAILABLE, "starting\n"),
        Phase::Draining => (StatusCode::SERVICE_UNAVAILABLE, "draining\n"),
    }
}

/// Services that are mounted later; until then gRPC calls are answered with UNAVAILABLE.
async fn mounted(State(shared): State<Shared>, request: Request) -> Response {
    let content_type = request.headers().get(header::CONTENT_TYPE);
    if !content_type.is_some_and(|value| value.as_bytes().starts_with(b"application/grpc")) {
        return StatusCode::NOT_FOUND.into_response();
    }
    if shared.wants_identity && identity_of(request.extensions()).is_none() {
        let message = "unauthenticated peer: call this worker over https, with a certificate of its --tls-ca";
        return Status::unauthenticated(message).into_http();
    }
    match shared.services.get() {
        Some(router) => match router.clone().oneshot(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        },
        None => Status::unavailable("the worker is loading its model").into_http(),
    }
}
