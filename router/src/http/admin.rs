//! Models, probes, version, metrics.

use std::{
    sync::Arc,
    time::{Duration, UNIX_EPOCH},
};

use axum::{
    extract::{Extension, Path, State},
    response::{IntoResponse, Response},
};
use baton_telemetry::Metrics;
use http::{HeaderMap, StatusCode, header};
use serde::Serialize;
use serde_json::{Value, json};

use super::{anthropic, body::json, error::ApiError};
use baton_router_core::{Core, RequestArrival, check_model};

/// The served model in the shape of the API that asks.
fn model_body(core: &Core, headers: &HeaderMap) -> Result<Value, ApiError> {
    let model = core.model()?;
    let (name, created) = (&model.name, model.created);
    Ok(match anthropic::tells_version(headers) {
        true => json!({"type": "model", "id": name, "display_name": name, "created_at": rfc3339(created)}),
        false => json!({
            "id": name, "object": "model", "created": created, "owned_by": "baton",
            "max_model_len": core.context_length(),
        }),
    })
}

/// Seconds since 1970 as RFC 3339 has them: up to the year 9999.
fn rfc3339(seconds: u64) -> String {
    let time = UNIX_EPOCH + Duration::from_secs(seconds.min(253_402_300_799));
    humantime::format_rfc3339_seconds(time).to_string()
}

/// `GET /v1/models`.
pub(crate) async fn models(State(core): State<Arc<Core>>, headers: HeaderMap) -> Result<Response, ApiError> {
    let model = model_body(&core, &headers)?;
    let id = &model["id"];
    Ok(json(&match anthropic::tells_version(&headers) {
        true => json!({"data": [model], "has_more": false, "first_id": id, "last_id": id}),
        false => json!({"object": "list", "data": [model]}),
    }))
}

/// `GET /v1/models/{id}`.
pub(crate) async fn model(
    State(core): State<Arc<Core>>,
    Path(id): Path<String>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    check_model(core.model()?, &id)?;
    Ok(json(&model_body(&core, &headers)?))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_rfc_3339() {
        // As `date -u -d @…` has them.
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (951_868_799, "2000-02-29T23:59:59Z"),
            (1_798_761_600, "2027-01-01T00:00:00Z"),
            (4_107_587_696, "2100-03-01T12:34:56Z"),
            (u64::MAX, "9999-12-31T23:59:59Z"),
        ] {
            assert_eq!(rfc3339(seconds), text);
        }
    }
}
