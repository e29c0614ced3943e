//! Ends answers that their clients leave unread.
//!
//! A timeout of the connection does not: over HTTP/2 the window of one stream is full while others of its connection are read.
//! Hyper then asks that answer for nothing more, and would keep its request for ever.

use std::{
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    task::{Context, Poll},
    time::{Duration, Instant},
};

use axum::{
    body::{Body, Bytes, HttpBody},
    response::Response,
};
use hyper::body::{Frame, SizeHint};
use thiserror::Error;

/// The answers that are being sent.
#[derive(Debug)]
pub(crate) struct Answers {
    /// How long a client may leave what it was sent unread.
    timeout: Duration,
    sent: Mutex<Vec<Weak<Answer>>>,
}

#[derive(Debug, Error)]
#[error("the client has left the answer unread for too long")]
struct LeftUnread;

#[derive(Debug)]
struct Answer(Mutex<Part>);

/// What is left of an answer.
#[derive(Debug)]
struct Part {
    /// `None` once it was left unread for too long.
    body: Option<Body>,
    /// Since when hyper could have asked for more; `None` while it waits for the next frame.
    since: Option<Instant>,
}

impl Answers {
    pub(crate) fn new(timeout: Duration) -> Arc<Answers> {
        Arc::new(Answers { timeout, sent: Mutex::default() })
    }

    /// Ends the answer when its client leaves it unread. One that is whole already holds no request.
    pub(crate) fn watch(&self, response: Response) -> Response {
        if response.body().size_hint().exact().is_some() {
            return response;
        }
        response.map(|body| {
            let part = Part { body: Some(body), since: Some(Instant::now()) };
            let answer = Arc::new(Answer(Mutex::new(part)));
            self.lock().push(Arc::downgrade(&answer));
            Body::new(WatchedBody(answer))
        })
    }

    /// Looks at all answers, as long as it is polled.
    pub(crate) async fn run(self: Arc<Answers>) {
        let mut ticks = tokio::time::interval((self.timeout / 4).max(Duration::from_millis(1)));
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            self.end_unread();
        }
    }

    fn end_unread(&self) {
        let mut ended = Vec::new();
        self.lock().retain(|answer| {
            let Some(answer) = answer.upgrade() else { return false };
            let mut part = answer.lock();
            let is_unread = part.since.is_some_and(|since| since.elapsed() >= self.timeout);
            if is_unread {
                ended.extend(part.body.take());
            }
            !is_unread
        });
        if !ended.is_empty() {
            tracing::info!(num = ended.len(), timeout = ?self.timeout, "clients have left answers unread: their requests end");
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Weak<Answer>>> {
        self.sent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Answer {
    fn lock(&self) -> MutexGuard<'_, Part> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The body that hyper has.
struct WatchedBody(Arc<Answer>);

impl HttpBody for WatchedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let mut part = self.0.lock();
        let Some(body) = &mut part.body else {
            return Poll::Ready(Some(Err(axum::Error::new(LeftUnread))));
        };
        let polled = Pin::new(body).poll_frame(cx);
        part.since = polled.is_ready().then(Instant::now);
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.0.lock().body.as_ref().is_some_and(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.0.lock().body.as_ref().map(HttpBody::size_hint).unwrap_or_default()
    }
}
