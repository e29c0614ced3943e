//! Why a call is not admitted, in the words of its API.

use axum::{
    extract::Request,
    response::{IntoResponse, Response},
};
use baton_keys::{BadKey, KeyRole, QuotaExceeded};
use baton_router_port::PageRefusal;
use http::{HeaderValue, StatusCode, header};
use tonic::Code;

use crate::http::{error::ApiError, observe::is_grpc};

/// Why a call is not admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refusal {
    #[error("this server needs an API key: send Authorization: Bearer KEY, or x-api-key: KEY")]
    NoKey,
    #[error(transparent)]
    BadKey(#[from] BadKey),
    #[error("{}", wrong_role(*.0))]
    WrongRole(KeyRole),
    #[error(transparent)]
    Page(#[from] PageRefusal),
    #[error(transparent)]
    Exceeded(#[from] QuotaExceeded),
}

fn wrong_role(role: KeyRole) -> &'static str {
    match role {
        KeyRole::Worker => "this API key is for workers, which send no requests",
        KeyRole::Client | KeyRole::Operator => {
            "workers register with an API key of their own, whose role is worker"
        }
    }
}

impl Refusal {
    pub(super) fn answer(self, request: &Request) -> Response {
        let (status, code, grpc) = match self {
            // OpenAI's code for all of them.
            Refusal::NoKey | Refusal::BadKey(_) => {
                (StatusCode::UNAUTHORIZED, "invalid_api_key", Code::Unauthenticated)
            }
            Refusal::WrongRole(_) | Refusal::Page(_) => {
                (StatusCode::FORBIDDEN, "permission_denied", Code::PermissionDenied)
            }
            Refusal::Exceeded(_) => {
                (StatusCode::TOO_MANY_REQUESTS, "rate_limit_exceeded", Code::ResourceExhausted)
            }
        };
        let mut error = ApiError::new(status, self.to_string()).with_code(code);
        if let Refusal::Exceeded(exceeded) = self {
            error.retry_after = Some(exceeded.retry_after);
        }
        if is_grpc(request.headers()) {
            return error.into_status(grpc).into_http();
        }
        let mut response = error.into_response();
        if status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
