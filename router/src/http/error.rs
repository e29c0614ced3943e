//! Errors in OpenAI's shape: `{"error":{"message","type","param","code"}}`. A gRPC status says the same in its metadata.

use std::time::Duration;

use axum::response::{IntoResponse, Response};
use baton_request_fields::FieldRefusal;
use baton_tools::OutputRefusal;
use http::{HeaderValue, StatusCode, header};
use serde::Serialize;
use tonic::{Code, Status, metadata::AsciiMetadataValue};

use baton_router_core::{ContextOverflow, CoreError};

/// An error as a client sees it.
#[derive(Clone, Debug)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    pub(crate) detail: Detail,
    pub(crate) retry_after: Option<Duration>,
    /// For APIs that tell it in their own words.
    pub(crate) overflow: Option<ContextOverflow>,
}

/// The object under `error`.
#[derive(Clone, Debug, Serialize, utoipa::ToSchema)]
#[schema(as = ErrorDetail)]
pub(crate) struct Detail {
    pub(crate) message: String,
    #[serde(rename = "type")]
    pub(crate) kind: &'static str,
    pub(crate) param: Option<String>,
    pub(crate) code: Option<&'static str>,
}

#[derive(Serialize)]
pub(crate) struct ErrorBody<'a> {
    pub(crate) error: &'a Detail,
}

impl ApiError {
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> ApiError {
        let kind = match status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        };
        let detail = Detail { message: message.into(), kind, param: None, code: None };
        ApiError { status, detail, retry_after: None, overflow: None }
    }

    pub(crate) fn with_param(mut self, param: impl Into<String>) -> ApiError {
        self.detail.param = Some(param.into());
        self
    }

    pub(crate) fn with_code(mut self, code: &'static str) -> ApiError {
        self.detail.code = Some(code);
        self
    }

    /// A 400 that names the field.
    pub(crate) fn invalid(param: impl Into<String>, message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, message).with_param(param)
    }

    /// A 400 for what is not built.
    pub(crate) fn unsupported(param: impl Into<String>, message: impl Into<String>) -> ApiError {
        ApiError::invalid(param, message).with_code("unsupported_parameter")
    }

    /// The same as a gRPC status.
    pub(crate) fn into_status(self, code: Code) -> Status {
        let mut status = Status::new(code, self.detail.message);
        let metadata = status.metadata_mut();
        if let Some(after) = self.retry_after {
            metadata.insert("retry-after", retry_after_seconds(after).into());
        }
        if let Some(code) = self.detail.code {
            metadata.insert("baton-code", AsciiMetadataValue::from_static(code));
        }
        if let Some(param) = self.detail.param.and_then(|param| param.parse().ok()) {
            metadata.insert("baton-param", param);
        }
        status
    }
}

/// Whole seconds, rounded up, so that a client that obeys is not too early.
fn retry_after_seconds(after: Duration) -> u64 {
    (after.as_secs_f64().ceil() as u64).max(1)
}

impl From<FieldRefusal> for ApiError {
    fn from(refusal: FieldRefusal) -> ApiError {
        let code = if refusal.is_unknown { "unknown_parameter" } else { "unsupported_parameter" };
        ApiError::invalid(refusal.field, refusal.message).with_code(code)
    }
}

impl From<OutputRefusal> for ApiError {
    fn from(refusal: OutputRefusal) -> ApiError {
        ApiError::invalid(refusal.param.clone(), refusal.to_string())
    }
}

impl From<CoreError> for ApiError {
    fn from(error: CoreError) -> ApiError {
        let (message, retry_after) = (error.to_string(), error.retry_after());
        let error = match error {
            CoreError::Invalid { param, code, .. } => {
                let mut error = ApiError::new(StatusCode::BAD_REQUEST, message);
                error.detail.param = param;
                error.detail.code = code;
                error
            }
            CoreError::TooLong { param, overflow, .. } => {
                let mut error =
                    ApiError::new(StatusCode::BAD_REQUEST, message).with_code("context_length_exceeded");
                error.detail.param = param;
                error.overflow = overflow;
                error
            }
            CoreError::NotFound { param, code, .. } => {
                let mut error = ApiError::new(StatusCode::NOT_FOUND, message);
                error.detail.param = param;
                error.detail.code = code;
                error
            }
            CoreError::Duplicate { .. } | CoreError::Parked { .. } => {
                ApiError::new(StatusCode::CONFLICT, message)
            }
            CoreError::Replaced => ApiError::new(StatusCode::CONFLICT, message).with_code("stream_replaced"),
            CoreError::Full { .. } => {
                ApiError::new(StatusCode::TOO_MANY_REQUESTS, message).with_code("rate_limit_exceeded")
            }
            CoreError::Unavailable { .. } => {
                ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message).with_code("service_unavailable")
            }
            CoreError::Internal { .. } => ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, message),
        };
        ApiError { retry_after, ..error }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let body = serde_json::to_vec(&ErrorBody { error: &self.detail }).expect("an error is plain data");
        let mut response = (self.status, [(header::CONTENT_TYPE, "application/json")], body).into_response();
        if let Some(after) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, retry_after_seconds(after).into());
        }
        if self.status == StatusCode::REQUEST_TIMEOUT || self.status == StatusCode::PAYLOAD_TOO_LARGE {
            // The rest of the body is not going to be read.
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        // For the edge, which writes it in the shape of another API.
        response.extensions_mut().insert(self);
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_of_the_server_are_its_5xx() {
        let message = String::from("no");
        for error in [
            CoreError::invalid("n", "no"),
            CoreError::TooLong { message: message.clone(), param: None, overflow: None },
            CoreError::NotFound { message: message.clone(), param: None, code: None },
            CoreError::Duplicate { id: message.clone() },
            CoreError::Parked { id: message.clone() },
            CoreError::Replaced,
            CoreError::Full { message: message.clone(), retry_after: Duration::ZERO },
            CoreError::Unavailable { message: message.clone() },
            CoreError::Internal { message },
        ] {
            assert_eq!(
                ApiError::from(error.clone()).status.is_server_error(),
                error.is_server_fault(),
                "{error:?}"
            );
        }
    }
}
