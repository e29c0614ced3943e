//! The gRPC edge: `baton.v1.Inference`, health, reflection, and the registry of embedded discovery.

mod convert;
mod health;
mod inference;

use std::{convert::Infallible, sync::Arc, time::Duration};

use axum::{
    Router,
    body::Body,
    middleware::{Next, from_fn},
    response::IntoResponse,
};
use baton_cluster::RegistryService;
use baton_proto::{v1::inference_server::InferenceServer, worker::registry_server::RegistryServer};
use futures_util::StreamExt;
use http::{Request, Response, StatusCode};
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};
use tonic::{Code, Status, server::NamedService};
use tower::ServiceExt;

use crate::http::{error::ApiError, observe::is_grpc};
use baton_router_core::{BodyRoom, Core};
use convert::status;
use inference::Inference;

pub(crate) use health::Readiness;

/// Adds every gRPC service.
pub(crate) fn mount(
    router: Router<Arc<Core>>,
    core: Arc<Core>,
    ready: watch::Receiver<Option<bool>>,
    registry: Option<RegistryServer<RegistryService>>,
) -> Router<Arc<Core>> {
    let limit = core.config.max_body_bytes;
    let inference = InferenceServer::new(Inference::new(core.clone())).max_decoding_message_size(limit);
    let inference = inference
        .map_request(move |request| bounded(request, core.body_room(), core.config.body_timeout))
        .map_response(with_right_status);
    let mut services = Router::new().route_service(&path::<InferenceServer<Inference>>(), inference);
    services = add(services, health::service(ready));
    services = add(services, reflection_v1());
    services = add(services, reflection_v1alpha());
    if let Some(registry) = registry {
        services = add(services, registry);
    }
    router.merge(services.route_layer(from_fn(only_grpc)))
}

/// tonic looks at no content type, and a page in a browser sends some of them anywhere without asking.
async fn only_grpc(request: Request<Body>, next: Next) -> Response<Body> {
    if is_grpc(request.headers()) {
        return next.run(request).await;
    }
    let message = "the content type of gRPC calls is application/grpc";
    ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message).into_response()
}

fn add<S>(router: Router<Arc<Core>>, service: S) -> Router<Arc<Core>>
where
    S: tower::Service<Request<Body>, Response = Response<tonic::body::Body>, Error = Infallible>
        + NamedService
        + Clone
        + Send
        + Sync
        + 'static,
    S::Future: Send + 'static,
{
    router.route_service(&path::<S>(), service.map_response(with_right_status))
}

fn path<S: NamedService>() -> String {
    format!("/{}/{{*rest}}", S::NAME)
}

fn reflection() -> tonic_reflection::server::Builder<'static> {
    tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(baton_proto::DESCRIPTORS)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        // The services for clients; the workers' protocol is internal.
        .with_service_name("baton.v1.Inference")
        .with_service_name("grpc.health.v1.Health")
}

macro_rules! reflection_service {
    ($name:ident, $build:ident, $version:ident) => {
        fn $name() -> tonic_reflection::server::$version::ServerReflectionServer<
            impl tonic_reflection::server::$version::ServerReflection,
        > {
            reflection().$build().expect("the descriptors were compiled with this crate")
        }
    };
}
reflection_service!(reflection_v1, build_v1, v1);
reflection_service!(reflection_v1alpha, build_v1alpha, v1alpha);

/// Bounds the time for the request's only message: a client that sends half of it and stops must not hold the call. The
/// message takes its room, which the call finds among the extensions.
fn bounded(mut request: Request<Body>, room: Arc<BodyRoom>, timeout: Duration) -> Request<Body> {
    let deadline = Instant::now() + timeout;
    request.extensions_mut().insert(room.clone());
    request.map(|body| {
        let state = Some((body.into_data_stream(), room));
        let pieces = futures_util::stream::unfold(state, move |state| async move {
            let (mut pieces, room) = state?;
            match timeout_at(deadline, pieces.next()).await {
                Ok(piece) => {
                    let piece = piece?.map_err(|error| Status::unknown(error.to_string()));
                    let counted =
                        piece.and_then(|piece| room.grow(piece.len()).map(|()| piece).map_err(status));
                    Some((counted, Some((pieces, room))))
                }
                Err(_) => {
                    let message = format!("the request did not arrive within {timeout:?}");
                    Some((Err(Status::deadline_exceeded(message)), None))
                }
            }
        });
        Body::from_stream(pieces)
    })
}

/// Bytes of a status's message, of which a header has up to three each. Messages quote what the client sent, and clients bound headers,
/// the first ones at 8 KiB: they would see their own error in place of the status.
const MAX_MESSAGE_BYTES: usize = 2 << 10;

/// tonic calls a message that cannot be read INTERNAL, and one over the limit OUT_OF_RANGE. The first is
/// the client's fault, and gRPC's own name for the second is RESOURCE_EXHAUSTED. Long messages are cut.
fn with_right_status(response: Response<tonic::body::Body>) -> Response<tonic::body::Body> {
    let Some(status) = Status::from_header_map(response.headers()) else { return response };
    let message = status.message();
    let code = match status.code() {
        Code::Internal if message.starts_with("failed to decode Protobuf message") => Code::InvalidArgument,
        Code::OutOfRange if message.contains("message length too large") => Code::ResourceExhausted,
        code => code,
    };
    let message = &message[..message.floor_char_boundary(MAX_MESSAGE_BYTES)];
    Status::with_metadata(code, message, status.metadata().clone()).into_http()
}
