//! The HTTP edge: OpenAI's and Anthropic's APIs, probes, the page, and errors in the shape of each.

mod admin;
mod anthropic;
mod blocks;
mod body;
mod cache_control;
mod chat;
mod completions;
mod durable;
pub(crate) mod error;
mod messages;
pub(crate) mod observe;
mod openapi;
mod page;
mod params;
mod responses;
mod shape;
mod sse;
mod tokens;
mod tool_results;

use std::sync::Arc;

use axum::{
    Router,
    extract::{Request, State},
    middleware,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use http::{HeaderValue, Method, StatusCode, header};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

use baton_router_core::Core;
use error::ApiError;

/// Every route. `grpc` adds the gRPC services' routes, `guard` the layers that admit callers.
pub(crate) fn routes(
    core: Arc<Core>,
    grpc: impl FnOnce(Router<Arc<Core>>) -> Router<Arc<Core>>,
    guard: impl FnOnce(Router<Arc<Core>>) -> Router<Arc<Core>>,
) -> Router {
    let generating = Router::new()
        .route("/v1/chat/completions", post(chat::chat_completions))
        .route("/v1/completions", post(completions::completions))
        .route("/v1/responses", post(responses::responses))
        .route("/v1/messages", post(anthropic::create))
        .route_layer(middleware::from_fn_with_state(core.clone(), durable::keep));
    let router = generating
        .route("/v1/streams/{id}", get(durable::resume))
        .route("/v1/messages/count_tokens", post(anthropic::count_tokens))
        .route("/v1/embeddings", post(embeddings))
        .route("/v1/models", get(admin::models))
        .route("/v1/models/{*id}", get(admin::model))
        .route("/tokenize", post(tokens::tokenize_text))
        .route("/detokenize", post(tokens::detokenize))
        .route("/health", get(admin::health))
        .route("/livez", get(admin::live))
        .route("/readyz", get(admin::ready))
        .route("/startupz", get(admin::started))
        .route("/version", get(admin::version))
        .route("/metrics", get(admin::metrics))
        .route("/openapi.json", get(openapi::openapi))
        .merge(page::routes());
    let cors = cors(&core.config.cors_origins);
    // The last layer is the first to see a request: preflights of browsers, which show no key, do not reach the guard.
    guard(grpc(router).fallback(not_found).method_not_allowed_fallback(method_not_allowed))
        .layer(middleware::from_fn_with_state(core.clone(), observe::observe))
        .layer(tower::util::option_layer(cors))
        .with_state(core)
}

/// Lets pages of these origins call the API; `None` without any. Browsers then send what clients send.
fn cors(origins: &[HeaderValue]) -> Option<CorsLayer> {
    let origins = match origins {
        [] => return None,
        origins if origins.iter().any(|origin| origin == "*") => AllowOrigin::any(),
        origins => AllowOrigin::list(origins.iter().cloned()),
    };
    let layer = CorsLayer::new()
        .allow_origin(origins)
        .allow_methods([Method::GET, Method::POST])
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers([observe::REQUEST_ID, observe::ANTHROPIC_REQUEST_ID, header::RETRY_AFTER]);
    Some(layer)
}

async fn not_found(request: Request) -> Response {
    if observe::is_grpc(request.headers()) {
        let message = format!("there is no method {}", request.uri().path());
        return tonic::Status::unimplemented(message).into_http::<axum::body::Body>();
    }
    let message = format!("there is no {} {}", request.method(), request.uri().path());
    ApiError::new(StatusCode::NOT_FOUND, message).with_code("not_found").into_response()
}

/// Embeddings need a model that was trained for them, and hidden states that engines do not hand out.
async fn embeddings() -> Response {
    let message = "this server makes no embeddings: it serves a model that generates text, whose hidden states are not \
                   trained to be compared; serve an embedding model with another program";
    let error = ApiError::new(StatusCode::NOT_IMPLEMENTED, message).with_code("not_implemented");
    // Clients of OpenAI's API send a request again after any status from 500 on.
    ([("x-should-retry", "false")], error).into_response()
}

async fn method_not_allowed(State(_): State<Arc<Core>>, request: Request) -> ApiError {
    let message = format!("{} is not possible here, see the allow header", request.method());
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, message).with_code("method_not_allowed")
}
