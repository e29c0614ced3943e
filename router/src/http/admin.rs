//! Models, probes, version, metrics.

use std::sync::Arc;

use axum::{
    extract::{Extension, Path, State},
    response::{IntoResponse, Response},
};
use baton_telemetry::Metrics;
use http::{StatusCode, header};
use serde::Serialize;

use super::{body::json, error::ApiError};
use baton_router_core::{Core, RequestArrival, check_model};

#[derive(Serialize)]
struct ModelBody<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    max_model_len: usize,
}

#[derive(Serialize)]
struct ModelList<'a> {
    object: &'static str,
    data: [ModelBody<'a>; 1],
}

fn model_body(core: &Core) -> Result<ModelBody<'_>, ApiError> {
    let model = core.model()?;
    Ok(ModelBody {
        id: &model.name,
        object: "model",
        created: model.created,
        owned_by: "baton",
        max_model_len: core.context_length(),
    })
}

/// `GET /v1/models`.
pub(crate) async fn models(State(core): State<Arc<Core>>) -> Result<Response, ApiError> {
    Ok(json(&ModelList { object: "list", data: [model_body(&core)?] }))
}

/// `GET /v1/models/{id}`.
pub(crate) async fn model(
    State(core): State<Arc<Core>>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    check_model(core.model()?, &id)?;
    Ok(json(&model_body(&core)?))
}

/// `GET /livez`: the process answers.
pub(crate) async fn live() -> &'static str {
    "ok\n"
}

/// `GET /startupz`: the tokenizer is loaded.
pub(crate) async fn started(
    State(core): State<Arc<Core>>,
    Extension(arrival): Extension<RequestArrival>,
) -> Response {
    probe(core.model().err().map(|error| error.to_string()), &arrival)
}

/// `GET /readyz`: the router can serve a request now.
pub(crate) async fn ready(
    State(core): State<Arc<Core>>,
    Extension(arrival): Extension<RequestArrival>,
) -> Response {
    probe(core.missing(), &arrival)
}

/// An unauthenticated caller is told that something is missing, but not what.
fn probe(missing: Option<String>, arrival: &RequestArrival) -> Response {
    let word = match missing {
        None => return "ok\n".into_response(),
        Some(missing) if arrival.caller.is_trusted() => missing,
        Some(_) => UNAVAILABLE.to_owned(),
    };
    (StatusCode::SERVICE_UNAVAILABLE, word + "\n").into_response()
}

const UNAVAILABLE: &str = "unavailable";

#[derive(Serialize)]
struct Health {
    status: &'static str,
    /// What is missing, when the status is not "ok".
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    /// Absent for an unauthenticated caller, as is the reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    workers: Option<Vec<WorkerHealth>>,
}

#[derive(Serialize)]
struct WorkerHealth {
    id: String,
    role: &'static str,
    address: String,
    answers: bool,
    /// How far it is known what it has cached: "exact", "degraded" or "approximate".
    index: &'static str,
}

/// `GET /health`: the same as JSON.
pub(crate) async fn health(
    State(core): State<Arc<Core>>,
    Extension(arrival): Extension<RequestArrival>,
) -> Response {
    let is_trusted = arrival.caller.is_trusted();
    let missing = core.missing();
    let workers = core.workers.list().into_iter().map(|listed| WorkerHealth {
        id: listed.record.id.0.clone(),
        role: listed.record.role.name(),
        address: listed.record.address.clone(),
        answers: listed.report.is_some(),
        index: listed.source.name(),
    });
    let (status, word) = match missing {
        None => (StatusCode::OK, "ok"),
        Some(_) => (StatusCode::SERVICE_UNAVAILABLE, UNAVAILABLE),
    };
    let workers = is_trusted.then(|| workers.collect());
    let mut response = json(&Health { status: word, reason: missing.filter(|_| is_trusted), workers });
    *response.status_mut() = status;
    response
}

#[derive(Serialize)]
struct Version {
    version: &'static str,
}

/// `GET /version`.
pub(crate) async fn version() -> Response {
    json(&Version { version: env!("CARGO_PKG_VERSION") })
}

/// `GET /metrics`.
pub(crate) async fn metrics(State(core): State<Arc<Core>>) -> Response {
    let text = core.metrics.encode(&core.workers);
    ([(header::CONTENT_TYPE, Metrics::CONTENT_TYPE)], text).into_response()
}
