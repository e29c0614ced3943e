//! Around every request: its id, its span, its count.

use std::{sync::Arc, time::Instant};

use axum::{
    extract::{Request, State},
    middleware::Next,
    response::Response,
};
use baton_proto::is_server_fault;
use baton_router_core::{Caller, Core, GENERATION_ENDPOINTS, RequestArrival, is_request_id};
use baton_telemetry::trace_context;
use http::{HeaderMap, HeaderName, HeaderValue, header};
use tonic::Status;
use tracing::{Instrument, Span, field::Empty};

use super::anthropic;

pub(super) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Where Anthropic's clients look for it.
pub(super) const ANTHROPIC_REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

/// Gives the request an id, unless the client gave one, and returns the id with the answer. Counts the answer.
pub(crate) async fn observe(State(core): State<Arc<Core>>, mut request: Request, next: Next) -> Response {
    let id = request_id(request.headers());
    let x_request_id = id.to_str().expect("it is graphic ASCII").to_owned();
    let endpoint = endpoint(request.uri().path());
    let is_anthropic = anthropic::is_called(request.uri().path(), request.headers());
    let span = span(&request, endpoint, &x_request_id);
    // Until the caller has shown a key.
    let caller = match core.config.api_keys {
        Some(_) => Caller::Unauthenticated,
        None => Caller::Any,
    };
    request.extensions_mut().insert(RequestArrival {
        x_request_id: x_request_id.clone(),
        at: Instant::now(),
        caller,
        durable: None,
    });
    let caller = request.headers();
    trace_context::set_parent(&span, |name| Some(caller.get(name)?.to_str().ok()?.to_owned()));
    let response = next.run(request).instrument(span.clone()).await;
    let mut response = anthropic::write_error(response, is_anthropic, &x_request_id);
    span.record("http.response.status_code", i64::from(response.status().as_u16()));
    if has_failed(&response) {
        trace_context::set_failed(&span, &status(&response));
    }
    core.metrics.on_answer(endpoint, status(&response));
    if is_anthropic {
        response.headers_mut().insert(ANTHROPIC_REQUEST_ID, id.clone());
    }
    response.headers_mut().insert(REQUEST_ID, id);
    response
}

/// Requests that generate are traced. Probes, scrapes and registrations would drown them: their spans are for the log alone.
fn span(request: &Request, endpoint: &'static str, id: &str) -> Span {
    let method = request.method();
    if !GENERATION_ENDPOINTS.contains(&endpoint) {
        return tracing::debug_span!("request", id, %method, endpoint);
    }
    tracing::info_span!(
        "request",
        otel.name = format!("{method} {endpoint}"),
        otel.kind = "server",
        id,
        http.request.method = %method,
        http.route = endpoint,
        http.response.status_code = Empty,
    )
}

fn request_id(headers: &HeaderMap) -> HeaderValue {
    let given = headers.get(REQUEST_ID).filter(|id| is_request_id(id.as_bytes()));
    given.cloned().unwrap_or_else(|| {
        let id = uuid::Uuid::new_v4().to_string();
        HeaderValue::try_from(id).expect("a UUID is letters, digits and dashes")
    })
}

/// One of a few names: text of a client must not become a label.
fn endpoint(path: &str) -> &'static str {
    const KNOWN: [&str; 17] = [
        "/v1/messages/count_tokens",
        "/v1/models",
        "/tokenize",
        "/detokenize",
        "/health",
        "/livez",
        "/readyz",
        "/startupz",
        "/version",
        "/metrics",
        "/baton.v1.Inference/Abort",
        "/baton.v1.Inference/Resume",
        "/baton.v1.Inference/ModelInfo",
        "/baton.v1.Inference/Loads",
        "/baton.worker.v1.Registry/Register",
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
    ];
    GENERATION_ENDPOINTS.into_iter().chain(KNOWN).find(|known| *known == path).unwrap_or("other")
}

/// The HTTP status. For gRPC the status of an answer without a body, else 0, as its stream has started.
fn status(response: &Response) -> String {
    if !is_grpc(response.headers()) {
        return response.status().as_str().to_owned();
    }
    let status = response.headers().get("grpc-status").and_then(|status| status.to_str().ok());
    status.unwrap_or("0").to_owned()
}

/// Whether the server is at fault. Over gRPC a refused call has the HTTP status 200.
fn has_failed(response: &Response) -> bool {
    let refused = Status::from_header_map(response.headers());
    response.status().is_server_error() || refused.is_some_and(|status| is_server_fault(status.code()))
}

/// Whether a request or an answer is gRPC's.
pub(crate) fn is_grpc(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    kind.is_some_and(|kind| kind.starts_with("application/grpc"))
}

#[cfg(test)]
mod tests {
    use axum::body::Body;

    use super::*;

    #[test]
    fn a_span_fails_by_faults_of_the_server_over_http_and_grpc() {
        let failed = |status: u16, grpc_status: Option<&str>| {
            let mut response = Response::builder().status(status);
            if let Some(status) = grpc_status {
                response =
                    response.header(header::CONTENT_TYPE, "application/grpc").header("grpc-status", status);
            }
            has_failed(&response.body(Body::empty()).unwrap())
        };
        for (status, is_failed) in [(200, false), (400, false), (429, false), (500, true), (503, true)] {
            assert_eq!(failed(status, None), is_failed, "{status}");
        }
        for (status, is_failed) in [("0", false), ("3", false), ("8", false), ("13", true), ("14", true)] {
            assert_eq!(failed(200, Some(status)), is_failed, "gRPC {status}");
        }
    }
}
