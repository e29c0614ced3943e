//! Streams that can be resumed: `id:` lines with each event, `Last-Event-ID` with a call, `GET /v1/streams/{id}`.
//!
//! An event's id is that of its answer and the event's number: `chatcmpl-1f…:17`. A resumed stream is its call again, from the
//! journal; the events that the client has are left out.

use std::sync::Arc;

use axum::{
    body::Body,
    extract::{Extension, Path, Request, State},
    middleware::Next,
    response::{IntoResponse, Response},
};
use baton_router_core::{Core, DurableCall, RequestArrival};
use futures_util::StreamExt;
use http::{HeaderMap, Method, StatusCode};
use serde_json::Value;

use super::{anthropic, body, chat, completions, error::ApiError, responses};

const LAST_EVENT_ID: &str = "last-event-id";

/// The newest event that a client has.
#[derive(Debug, PartialEq, Eq)]
struct LastEvent {
    answer_id: String,
    /// Of the event.
    number: u64,
}

/// Keeps the call of a request whose answer may be journalled; a call with `Last-Event-ID` becomes the one that it resumes.
pub(crate) async fn keep(State(core): State<Arc<Core>>, request: Request, next: Next) -> Response {
    if core.config.durable.is_none() && !request.headers().contains_key(LAST_EVENT_ID) {
        return next.run(request).await;
    }
    let path = request.uri().path().to_owned();
    match attach(&core, &path, request).await {
        Ok(request) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

async fn attach(core: &Arc<Core>, path: &str, request: Request) -> Result<Request, ApiError> {
    let (mut parts, body) = request.into_parts();
    let mut body = body::read(core, body).await?;
    let call = match last_event(&parts.headers)? {
        None => DurableCall::new(path, body.clone()),
        Some(last) => {
            let arrival = parts.extensions.get::<RequestArrival>().expect("the edge observes every call");
            let (call, kept) = core.find_stream(&arrival.caller, &last.answer_id).await?;
            if call.endpoint != path {
                let message = format!("the stream {:?} is one of {}", last.answer_id, call.endpoint);
                return Err(ApiError::new(StatusCode::BAD_REQUEST, message));
            }
            if !body.bytes.is_empty() && body.bytes != kept.bytes {
                let (num_bytes, first) = (body.bytes.len(), kept.bytes.clone());
                let compare = move |core: &Core| {
                    let counted = body::count_values(core, &body.bytes, &body.room, None);
                    Ok(counted.map(|()| is_same(&body.bytes, &first)))
                };
                if !core.offload(num_bytes, compare).await?? {
                    let message = format!(
                        "the body differs from that of the stream {:?}: send the same, or none",
                        last.answer_id
                    );
                    return Err(ApiError::new(StatusCode::BAD_REQUEST, message));
                }
            }
            body = kept;
            call.after(last.number + 1)?
        }
    };
    if let Some(arrival) = parts.extensions.get_mut::<RequestArrival>() {
        arrival.durable = Some(Arc::new(call));
    }
    // It is not read, nor counted, again.
    parts.extensions.insert(body);
    Ok(Request::from_parts(parts, Body::empty()))
}

/// `GET /v1/streams/{id}`: the stream from its beginning, or after `Last-Event-ID`.
pub(crate) async fn resume(
    State(core): State<Arc<Core>>,
    Extension(mut arrival): Extension<RequestArrival>,
    Path(id): Path<String>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let number = match last_event(&headers)? {
        None => 0,
        Some(last) if last.answer_id == id => last.number + 1,
        Some(last) => {
            let message = format!("Last-Event-ID is one of the stream {:?}", last.answer_id);
            return Err(ApiError::new(StatusCode::BAD_REQUEST, message));
        }
    };
    let (call, body) = core.find_stream(&arrival.caller, &id).await?;
    let call = call.after(number)?;
    let (endpoint, has_ended) = (call.endpoint.clone(), call.has_ended());
    arrival.durable = Some(Arc::new(call));
    let request = Request::builder().method(Method::POST).uri(&endpoint).extension(body).body(Body::empty());
    let request = request.map_err(|error| ApiError::new(StatusCode::BAD_REQUEST, error.to_string()))?;
    let (core, arrival) = (State(core), Extension(arrival));
    let response = match &*endpoint {
        "/v1/chat/completions" => chat::chat_completions(core, arrival, request).await.into_response(),
        "/v1/completions" => completions::completions(core, arrival, request).await.into_response(),
        "/v1/responses" => responses::responses(core, arrival, request).await.into_response(),
        "/v1/messages" => anthropic::create(core, arrival, request).await.into_response(),
        other => {
            let message = format!("the stream {id:?} is one of {other}: resume it there");
            return Err(ApiError::new(StatusCode::BAD_REQUEST, message));
        }
    };
    Ok(if has_ended { or_no_content(response).await } else { response })
}

/// An `EventSource` asks again for what follows until it is told that nothing does.
async fn or_no_content(response: Response) -> Response {
    let (parts, body) = response.into_parts();
    let mut pieces = body.into_data_stream();
    match pieces.next().await {
        None => StatusCode::NO_CONTENT.into_response(),
        Some(first) => {
            let pieces = futures_util::stream::iter([first]).chain(pieces);
            Response::from_parts(parts, Body::from_stream(pieces))
        }
    }
}

fn last_event(headers: &HeaderMap) -> Result<Option<LastEvent>, ApiError> {
    let Some(value) = headers.get(LAST_EVENT_ID) else { return Ok(None) };
    let parsed = value.to_str().ok().and_then(|text| text.rsplit_once(':'));
    let parsed = parsed.and_then(|(id, number)| {
        // No stream has so many events, and one more must be possible.
        let number = number.parse().ok().filter(|&number| number < u64::from(u32::MAX))?;
        Some(LastEvent { answer_id: id.to_owned(), number })
    });
    match parsed {
        Some(last) => Ok(Some(last)),
        None => {
            let message =
                format!("Last-Event-ID is {value:?}, expected the id of an event, such as chatcmpl-1f:17");
            Err(ApiError::new(StatusCode::BAD_REQUEST, message))
        }
    }
}

/// Clients may write the same JSON otherwise.
fn is_same(one: &[u8], other: &[u8]) -> bool {
    let parse = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).ok();
    parse(one).is_some_and(|one| Some(one) == parse(other))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_events_are_read_and_others_refused() {
        let read = |text: &str| {
            let headers = HeaderMap::from_iter([(LAST_EVENT_ID.parse().unwrap(), text.parse().unwrap())]);
            last_event(&headers).map_err(|error| error.status)
        };
        let last = LastEvent { answer_id: "a:b".to_owned(), number: 17 };
        assert_eq!(read("a:b:17"), Ok(Some(last)));
        for wrong in ["", "17", "a:", "a:-1", "a:x", "a:18446744073709551615"] {
            assert_eq!(read(wrong), Err(StatusCode::BAD_REQUEST), "{wrong}");
        }
        assert!(is_same(br#"{"a": 1, "b": [2]}"#, br#"{"b":[2],"a":1}"#));
        assert!(!is_same(br#"{"a": 1}"#, br#"{"a": 2}"#));
        assert!(!is_same(b"{", b"["));
    }
}
