//! Request bodies: bounded in size and time, parsed with errors that name the field or the position.

use std::sync::Arc;

use axum::{
    body::Body,
    extract::Request,
    response::{IntoResponse, Response},
};
use futures_util::StreamExt;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use serde::{Serialize, de::DeserializeOwned};
use tokio::time::{Instant, timeout_at};

use super::error::ApiError;
use baton_router_core::{BodyRoom, Core, ReadBody, parsed_bytes};

/// Reads a JSON body, if a layer has not read it, and parses it on another thread when it is long. The room is the body's, and that
/// of its values, until its request is prepared. `ids` is the field whose token ids are parsed as such.
pub(crate) async fn read_json<T: DeserializeOwned + Send + 'static>(
    core: &Arc<Core>,
    mut request: Request,
    ids: Option<&'static str>,
) -> Result<(T, Arc<BodyRoom>), ApiError> {
    check_content_type(request.headers())?;
    let ReadBody { bytes, room } = match request.extensions_mut().remove::<ReadBody>() {
        Some(body) => body,
        None => read(core, request.into_body()).await?,
    };
    let num_bytes = bytes.len();
    let read = move |core: &Core| {
        let parsed = count_values(core, &bytes, &room, ids).and_then(|()| parse(&bytes));
        Ok(parsed.map(|parsed| (parsed, room)))
    };
    core.offload(num_bytes, read).await?
}

/// Answers with JSON.
pub(crate) fn json(value: &impl Serialize) -> Response {
    let body = serde_json::to_vec(value).expect("an answer is plain data with string keys");
    let mut response = Body::from(body).into_response();
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

fn check_content_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(value) = headers.get(header::CONTENT_TYPE) else { return Ok(()) };
    let text = value.to_str().unwrap_or_default();
    let essence = text.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    // `curl -d` says that it sends a form unless it is told otherwise. The parser finds out.
    if matches!(&*essence, "application/json" | "application/x-www-form-urlencoded")
        || essence.ends_with("+json")
    {
        return Ok(());
    }
    let message = format!("content-type is {text:?}, expected application/json");
    Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message))
}

/// Reads a body, as long and as slow as it may be.
pub(super) async fn read(core: &Core, body: Body) -> Result<ReadBody, ApiError> {
    let config = &core.config;
    let limit = config.max_body_bytes;
    let too_large = || {
        let message = format!("the request body is larger than {limit} bytes");
        Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message))
    };
    let hint = http_body_size(&body);
    if hint.is_some_and(|bytes| bytes > limit as u64) {
        return too_large();
    }
    let deadline = Instant::now() + config.body_timeout;
    let mut pieces = body.into_data_stream();
    let (mut whole, room) = (Vec::new(), core.body_room());
    loop {
        let piece = match timeout_at(deadline, pieces.next()).await {
            Ok(Some(Ok(piece))) => piece,
            Ok(None) => return Ok(ReadBody { bytes: whole.into(), room }),
            Ok(Some(Err(error))) => {
                return Err(ApiError::new(StatusCode::BAD_REQUEST, format!("the body broke off: {error}")));
            }
            Err(_) => {
                let message = format!("the request body did not arrive within {:?}", config.body_timeout);
                return Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, message));
            }
        };
        if whole.len() + piece.len() > limit {
            return too_large();
        }
        room.grow(piece.len())?;
        whole.extend_from_slice(&piece);
    }
}

fn http_body_size(body: &Body) -> Option<u64> {
    use axum::body::HttpBody as _;
    body.size_hint().exact()
}

/// Counts the values of a body before they are parsed: a few bytes of text can be a value of hundreds. One body may take half of the
/// room of all.
pub(super) fn count_values(
    core: &Core,
    body: &[u8],
    room: &BodyRoom,
    ids: Option<&str>,
) -> Result<(), ApiError> {
    let (num_bytes, most) = (parsed_bytes(body, ids), core.config.max_bodies_bytes / 2);
    if num_bytes > most {
        let message = format!(
            "the lists and objects of the request take about {num_bytes} bytes of memory, at most {most} are possible"
        );
        return Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message));
    }
    Ok(room.grow(num_bytes)?)
}

fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    // The path is followed for errors alone: with it a list of token ids takes twice as long.
    if let Ok(value) = serde_json::from_slice(body) {
        return Ok(value);
    }
    let mut json = serde_json::Deserializer::from_slice(body);
    let value = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = error.path().to_string();
        describe(error.into_inner(), path)
    })?;
    json.end().map_err(|error| describe(error, ".".to_owned()))?;
    Ok(value)
}

fn describe(error: serde_json::Error, path: String) -> ApiError {
    let message = error.to_string();
    if !error.is_data() {
        let message = format!("the body is not valid JSON: {message}");
        return ApiError::new(StatusCode::BAD_REQUEST, message).with_code("invalid_json");
    }
    // "missing field `messages` at line 1 column 2": the path is that of the object that lacks it.
    let missing = message.strip_prefix("missing field `").and_then(|rest| rest.split('`').next());
    let param = match (missing, path.as_str()) {
        (Some(field), "." | "?") => Some(field.to_owned()),
        (Some(field), path) => Some(format!("{path}.{field}")),
        (None, "." | "?") => None,
        (None, path) => Some(path.to_owned()),
    };
    match param {
        Some(param) => ApiError::invalid(param.clone(), format!("{param}: {message}")),
        None => ApiError::new(StatusCode::BAD_REQUEST, message),
    }
}
