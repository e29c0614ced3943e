//! Errors in Anthropic's shape: `{"type": "error", "error": {"type", "message"}}`, with `details` where its clients read them.

use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use serde_json::{Value, json};

use crate::http::error::ApiError;

/// An error that answers a call of this API.
#[derive(Debug)]
pub(crate) struct MessagesError(pub(crate) ApiError);

impl<E: Into<ApiError>> From<E> for MessagesError {
    fn from(error: E) -> MessagesError {
        MessagesError(error.into())
    }
}

impl MessagesError {
    /// The body.
    pub(super) fn body(&self) -> Value {
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
        let mut error = json!({"type": kind, "message": self.0.detail.message});
        // Anthropic's clients send `thread` unasked, and go on without it when they are told so.
        if self.0.detail.param.as_deref() == Some("thread") {
            error["details"] = json!({"error_code": "thread_unsupported_request", "unsupported": ["thread"]});
        }
        json!({"type": "error", "error": error})
    }
}

impl IntoResponse for MessagesError {
    fn into_response(self) -> Response {
        let body = self.body().to_string();
        // Status and headers are the same in all APIs.
        let (mut parts, _) = self.0.into_response().into_parts();
        parts.headers.insert(header::CONTENT_LENGTH, HeaderValue::from(body.len()));
        Response::from_parts(parts, body.into())
    }
}
