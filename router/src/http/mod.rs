//! The HTTP edge: OpenAI's API, probes, and errors in OpenAI's shape.

mod admin;
mod body;
mod chat;
mod completions;
mod error;
mod messages;
mod observe;
mod params;
mod shape;
mod sse;
mod tokens;

use std::sync::Arc;

use axum::{
    Router,
    extract::{Request, State},
    middleware,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use http::StatusCode;

use crate::core::Core;
use error::ApiError;

/// Every route. `grpc` adds the gRPC services' routes.
pub(crate) fn routes(core: Arc<Core>, grpc: impl FnOnce(Router<Arc<Core>>) -> Router<Arc<Core>>) -> Router {
    let router = Router::new()
        .route("/v1/chat/completions", post(chat::chat_completions))
        .route("/v1/completions", post(completions::completions))
        .route("/v1/models", get(admin::models))
        .route("/v1/models/{*id}", get(admin::model))
        .route("/tokenize", post(tokens::tokenize_text))
        .route("/detokenize", post(tokens::detokenize))
        .route("/health", get(admin::health))
        .route("/livez", get(admin::live))
        .route("/readyz", get(admin::ready))
        .route("/startupz", get(admin::started))
        .route("/version", get(admin::version))
        .route("/metrics", get(admin::metrics));
    grpc(router)
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(middleware::from_fn_with_state(core.clone(), observe::observe))
        .with_state(core)
}

async fn not_found(request: Request) -> Response {
    if observe::is_grpc(request.headers()) {
        let message = format!("there is no method {}", request.uri().path());
        return tonic::Status::unimplemented(message).into_http::<axum::body::Body>();
    }
    let message = format!("there is no {} {}", request.method(), request.uri().path());
    ApiError::new(StatusCode::NOT_FOUND, message).with_code("not_found").into_response()
}

async fn method_not_allowed(State(_): State<Arc<Core>>, request: Request) -> Response {
    let message = format!("{} is not possible here, see the allow header", request.method());
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, message).with_code("method_not_allowed").into_response()
}
