//! Server-sent events: a stream of `data:` lines from a request's events.

use std::{sync::Arc, time::Duration};

use axum::{
    body::{Body, Bytes},
    response::{IntoResponse, Response},
};
use http::{HeaderValue, StatusCode, header};
use serde::Serialize;

use super::error::{ApiError, ErrorBody};
use baton_router_core::{Event, Events, Extras, Patience, Usage};

/// Turns events into chunks of one API's shape.
pub(crate) trait Chunks: Send + 'static {
    /// Appends the chunks of one event.
    fn write_event(&mut self, event: &Event, out: &mut Frame);
    /// Appends the chunks after the last event; `extras` if the request asks for them.
    fn write_end(&mut self, usage: Usage, extras: Extras, out: &mut Frame);
    /// Appends the chunk of an error, after which nothing follows.
    fn write_error(&mut self, error: ApiError, out: &mut Frame) {
        out.push(&ErrorBody { error: &error.detail });
    }
}

/// Bytes of some SSE events, under construction.
#[derive(Debug, Default)]
pub(crate) struct Frame {
    bytes: Vec<u8>,
    numbers: Option<Numbers>,
}

/// Numbers the events of a stream that can be resumed.
#[derive(Clone, Debug)]
struct Numbers {
    /// Of the answer.
    id: Arc<str>,
    next: u64,
    /// The client has the events before this one.
    from: u64,
}

impl Frame {
    /// Appends one event.
    pub(crate) fn push(&mut self, data: &impl Serialize) {
        self.push_event(None, |bytes| {
            serde_json::to_writer(bytes, data).expect("chunks are plain data and memory takes all");
        });
    }

    /// Appends one event with a name.
    pub(crate) fn push_named(&mut self, name: &str, data: &impl Serialize) {
        self.push_event(Some(name), |bytes| {
            serde_json::to_writer(bytes, data).expect("chunks are plain data and memory takes all");
        });
    }

    /// Appends what OpenAI's older APIs end a stream with.
    pub(crate) fn push_done(&mut self) {
        self.push_event(None, |bytes| bytes.extend_from_slice(b"[DONE]"));
    }

    fn push_comment(&mut self) {
        self.bytes.extend_from_slice(b": keep-alive\n\n");
    }

    fn push_event(&mut self, name: Option<&str>, data: impl FnOnce(&mut Vec<u8>)) {
        if let Some(numbers) = &mut self.numbers {
            let number = numbers.next;
            numbers.next += 1;
            if number < numbers.from {
                return;
            }
            self.bytes.extend_from_slice(format!("id: {}:{number}\n", numbers.id).as_bytes());
        }
        if let Some(name) = name {
            self.bytes.extend_from_slice(b"event: ");
            self.bytes.extend_from_slice(name.as_bytes());
            self.bytes.push(b'\n');
        }
        self.bytes.extend_from_slice(b"data: ");
        data(&mut self.bytes);
        self.bytes.extend_from_slice(b"\n\n");
    }
}

struct State<C> {
    events: Events,
    chunks: C,
    /// The first event, taken to see whether the request can be answered.
    first: Option<Event>,
    /// After each such silence a comment is sent.
    keep_alive: Patience,
    /// Of the newest frame: the next one is about as long.
    frame_bytes: usize,
    /// `None` if the stream cannot be resumed.
    numbers: Option<Numbers>,
    over: bool,
}

/// Answers with a stream. Waits for the first event, so that a failure before it has a status of its own, but no longer
/// than `keep_alive`. After each such silence a comment is sent. A resume after more events than a stream has is refused if the
/// stream had ended.
pub(crate) async fn stream<C: Chunks>(
    mut events: Events,
    chunks: C,
    keep_alive: Duration,
) -> Result<Response, ApiError> {
    let mut keep_alive = Patience::new(keep_alive);
    let first = keep_alive.wait(events.next()).await.flatten().transpose()?;
    let numbers =
        events.durable_id().map(|id| Numbers { id: id.into(), next: 0, from: events.num_delivered() });
    let had_ended = events.had_ended();
    let mut state = State { events, chunks, first, keep_alive, frame_bytes: 0, numbers, over: false };
    let ready = if had_ended { state.next_frame().await } else { None };
    state.check_end()?;
    let frames = futures_util::stream::unfold((ready, state), |(ready, mut state)| async move {
        let frame = match ready {
            Some(frame) => frame,
            None => state.next_frame().await?,
        };
        Some((Ok::<_, std::convert::Infallible>(Bytes::from(frame.bytes)), (None, state)))
    });
    let mut response = Body::from_stream(frames).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Otherwise nginx buffers the events.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    Ok(response)
}

impl<C: Chunks> State<C> {
    async fn next_frame(&mut self) -> Option<Frame> {
        if self.over {
            return None;
        }
        let mut frame = Frame { bytes: Vec::with_capacity(self.frame_bytes), numbers: self.numbers.take() };
        // An event without text that is certain makes no frame, and ends no silence.
        let mut deadline = None;
        while frame.bytes.is_empty() {
            let event = match self.first.take() {
                Some(event) => Some(Ok(event)),
                None => match self.keep_alive.wait_by(&mut deadline, self.events.next()).await {
                    Some(event) => event,
                    None => {
                        frame.push_comment();
                        break;
                    }
                },
            };
            match event {
                Some(Ok(event)) => self.chunks.write_event(&event, &mut frame),
                Some(Err(error)) => {
                    self.over = true;
                    // An error is no part of the stream: a resumed one goes on in its place.
                    frame.numbers = None;
                    self.chunks.write_error(error.into(), &mut frame);
                }
                None => {
                    self.over = true;
                    self.chunks.write_end(self.events.usage(), self.events.extras(), &mut frame);
                    if frame.bytes.is_empty() {
                        self.numbers = frame.numbers.take();
                        return None;
                    }
                }
            }
        }
        self.numbers = frame.numbers.take();
        self.frame_bytes = frame.bytes.len();
        Some(frame)
    }

    /// Refuses a client that claims to have more than all events.
    fn check_end(&self) -> Result<(), ApiError> {
        match &self.numbers {
            Some(Numbers { next, from, .. }) if self.over && next < from => {
                let message =
                    format!("Last-Event-ID is that of event {}, but the stream has {next} events", from - 1);
                Err(ApiError::new(StatusCode::BAD_REQUEST, message))
            }
            _ => Ok(()),
        }
    }
}
