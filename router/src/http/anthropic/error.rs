//! Errors in Anthropic's shape: `{"type": "error", "error": {"type", "message"}, "request_id"}`, with `details` where its clients
//! read them. What is too long is told in the sentences of Anthropic's server, from which clients take the numbers.

use axum::response::{IntoResponse, Response};
use baton_router_core::ContextOverflow;
use http::{HeaderValue, StatusCode, header};
use serde_json::{Value, json};

use crate::http::error::ApiError;

/// An error that answers a call of this API.
#[derive(Clone, Debug)]
pub(crate) struct MessagesError(pub(crate) ApiError);

impl<E: Into<ApiError>> From<E> for MessagesError {
    fn from(error: E) -> MessagesError {
        MessagesError(error.into())
    }
}

impl MessagesError {
    /// The body of the answer to the request with this id.
    pub(super) fn body(&self, x_request_id: &str) -> Value {
        let kind = match self.0.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
            status if status.is_server_error() => "api_error",
            _ => "invalid_request_error",
        };
        let message = self.0.overflow.map_or_else(|| self.0.detail.message.clone(), too_long);
        let mut error = json!({"type": kind, "message": message});
        // Anthropic's clients send `thread` unasked, and go on without it when they are told so.
        if self.0.detail.param.as_deref() == Some("thread") {
            error["details"] = json!({"error_code": "thread_unsupported_request", "unsupported": ["thread"]});
        }
        json!({"type": "error", "error": error, "request_id": x_request_id})
    }
}

fn too_long(overflow: ContextOverflow) -> String {
    let ContextOverflow { num_prompt, max_tokens, context } = overflow;
    match max_tokens {
        None => format!("prompt is too long: {num_prompt} tokens > {} maximum", context.saturating_sub(1)),
        Some(max) => format!(
            "input length and `max_tokens` exceed context limit: {num_prompt} + {max} > {context}, decrease input \
             length or `max_tokens` and try again"
        ),
    }
}

impl IntoResponse for MessagesError {
    /// Without its body: the edge, which knows the id of the request, [writes](write_error) it.
    fn into_response(self) -> Response {
        // Status and headers are the same in all APIs.
        let mut response = self.0.clone().into_response();
        response.extensions_mut().insert(self);
        response
    }
}

/// Writes the body of a response if it is an error of this API, or `is_called` says that any error is one.
pub(crate) fn write_error(response: Response, is_called: bool, x_request_id: &str) -> Response {
    let (mut parts, body) = response.into_parts();
    let other = parts.extensions.remove::<ApiError>().filter(|_| is_called).map(MessagesError);
    let Some(error) = parts.extensions.remove::<MessagesError>().or(other) else {
        return Response::from_parts(parts, body);
    };
    let body = error.body(x_request_id).to_string();
    parts.headers.insert(header::CONTENT_LENGTH, HeaderValue::from(body.len()));
    Response::from_parts(parts, body.into())
}
