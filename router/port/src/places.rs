//! Places of connections: as many as may be open, and a few more, in which only probes are answered. So a router that is full is not taken
//! for one that hangs, and ended with all its streams.

use std::{io, net::SocketAddr, sync::Arc};

use axum::{
    Router,
    extract::Request,
    middleware::{self, Next},
    response::{IntoResponse, Response},
};
use http::{
    HeaderValue, Method, StatusCode, Version,
    header::{CONNECTION, RETRY_AFTER},
};
use prometheus_client::metrics::{counter::Counter, gauge::Gauge};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
};

/// Places for probes. Each is taken for a moment, by a probe or by a client that is refused.
const NUM_SPARE: usize = 16;
/// What is served there.
const PROBES: [&str; 5] = ["/livez", "/readyz", "/startupz", "/health", "/metrics"];
/// The probe of gRPC that has an end.
const GRPC_PROBE: &str = "/grpc.health.v1.Health/Check";

/// The places of a port.
#[derive(Debug)]
pub(crate) struct Places {
    ordinary: Arc<Semaphore>,
    spare: Arc<Semaphore>,
    max_connections: usize,
    /// Connections that are open.
    connections: Gauge,
    /// Connections that came when all ordinary places were taken.
    full: Counter,
}

/// The place of an open connection.
#[derive(Debug)]
pub(crate) struct Place {
    /// For probes.
    pub(crate) is_spare: bool,
    _permit: OwnedSemaphorePermit,
    connections: Gauge,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.connections.dec();
    }
}

impl Places {
    pub(crate) fn new(max_connections: usize, connections: Gauge, full: Counter) -> Places {
        let places = |num: usize| Arc::new(Semaphore::new(num.min(Semaphore::MAX_PERMITS)));
        Places {
            ordinary: places(max_connections),
            spare: places(NUM_SPARE),
            max_connections,
            connections,
            full,
        }
    }

    /// Waits for a place, then for a connection. Those that wait meanwhile stay in the kernel's queue.
    pub(crate) async fn accept(
        &mut self,
        listener: &TcpListener,
    ) -> io::Result<(TcpStream, SocketAddr, Place)> {
        let (mut permit, mut is_spare) = match self.ordinary.clone().try_acquire_owned() {
            Ok(permit) => (permit, false),
            Err(_) => {
                tokio::select! {
                    biased;
                    permit = self.ordinary.clone().acquire_owned() => (permit.expect("it is never closed"), false),
                    permit = self.spare.clone().acquire_owned() => (permit.expect("it is never closed"), true),
                }
            }
        };
        let (stream, address) = listener.accept().await?;
        // One may have closed meanwhile.
        if is_spare && let Ok(freed) = self.ordinary.clone().try_acquire_owned() {
            (permit, is_spare) = (freed, false);
        }
        if is_spare && self.full.inc() == 0 {
            tracing::warn!(
                max_connections = self.max_connections,
                "no more connections may be open (--max-connections): until one closes, new ones are refused but for probes, now and later"
            );
        }
        self.connections.inc();
        Ok((stream, address, Place { is_spare, _permit: permit, connections: self.connections.clone() }))
    }
}

/// These routes for a connection in a spare place: it gets one answer.
pub(crate) fn for_spare(routes: Router) -> Router {
    routes.layer(middleware::from_fn(answer_probe))
}

async fn answer_probe(request: Request, next: Next) -> Response {
    let is_http1 = request.version() <= Version::HTTP_11;
    let path = request.uri().path();
    let is_probe = match *request.method() {
        Method::GET | Method::HEAD => PROBES.contains(&path),
        _ => path == GRPC_PROBE,
    };
    let mut response = match is_probe {
        true => next.run(request).await,
        false => {
            let why = "the router has as many connections as it may have\n";
            (StatusCode::SERVICE_UNAVAILABLE, [(RETRY_AFTER, "1")], why).into_response()
        }
    };
    // HTTP/2 has no such field.
    if is_http1 {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    response
}
