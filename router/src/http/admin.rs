//! Models, probes, version, metrics.

use std::sync::Arc;

use axum::{
    extract::{Path, State},
    response::{IntoResponse, Response},
};
use baton_telemetry::Metrics;
use http::{StatusCode, header};
use serde::Serialize;

use super::{body::json, error::ApiError};
use baton_router_core::{Core, check_model};

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
pub(crate) async fn started(State(core): State<Arc<Core>>) -> Response {
    match core.model() {
        Ok(_) => "ok\n".into_response(),
        Err(error) => (StatusCode::SERVICE_UNAVAILABLE, format!("{error}\n")).into_response(),
    }
}

/// `GET /readyz`: the router can serve a request now.
pub(crate) async fn ready(State(core): State<Arc<Core>>) -> Response {
    match core.missing() {
        None => "ok\n".into_response(),
        Some(missing) => (StatusCode::SERVICE_UNAVAILABLE, format!("{missing}\n")).into_response(),
    }
}

#[derive(Serialize)]
struct Health {
    status: &'static str,
    /// What is missing, when the status is not "ok".
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    workers: Vec<WorkerHealth>,
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
pub(crate) async fn health(State(core): State<Arc<Core>>) -> Response {
    let reason = core.missing();
    let workers = core.workers.list().into_iter().map(|listed| WorkerHealth {
        id: listed.record.id.0.clone(),
        role: listed.record.role.name(),
        address: listed.record.address.clone(),
        answers: listed.report.is_some(),
        index: listed.source.name(),
    });
    let status = if reason.is_none() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let word = if reason.is_none() { "ok" } else { "unavailable" };
    let mut response = json(&Health { status: word, reason, workers: workers.collect() });
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
