//! The body of an answer: it holds the permit of its call, and ends when its key is revoked.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use axum::body::{Body, Bytes, HttpBody};
use baton_keys::CallPermit;
use hyper::body::{Frame, SizeHint};

type End = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A body with the permit of its call.
pub(super) struct HeldBody {
    body: Body,
    _permit: CallPermit,
    /// Ends the body.
    end: Option<End>,
}

impl HeldBody {
    pub(super) fn new(
        body: Body,
        permit: CallPermit,
        end: Option<impl Future<Output = ()> + Send + 'static>,
    ) -> HeldBody {
        HeldBody { body, _permit: permit, end: end.map(|end| Box::pin(end) as End) }
    }
}

impl HttpBody for HeldBody {
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
