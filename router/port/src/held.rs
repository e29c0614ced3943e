//! The body of an answer that holds a permit, and may end before it is whole.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use axum::body::{Body, Bytes, HttpBody};
use hyper::body::{Frame, SizeHint};

type End = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A body with a permit, which is dropped with it.
pub struct HeldBody<P> {
    body: Body,
    _permit: P,
    end: Option<End>,
}

impl<P> HeldBody<P> {
    /// `end`: the body ends when this does.
    pub fn new(body: Body, permit: P, end: Option<impl Future<Output = ()> + Send + 'static>) -> HeldBody<P> {
        HeldBody { body, _permit: permit, end: end.map(|end| Box::pin(end) as End) }
    }
}

impl<P: Unpin> HttpBody for HeldBody<P> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if let Some(end) = &mut self.end
            && end.as_mut().poll(cx).is_ready()
        {
            self.end = None;
            self.body = Body::empty();
        }
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
