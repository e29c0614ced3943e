//! The two directions of a `Handoff` stream, as the drivers of both sides use them: no message is lost when a wait is
//! interrupted, and the last message arrives.

use std::{
    collections::VecDeque,
    future::pending,
    time::{Duration, Instant},
};

use futures_util::future::BoxFuture;
use tokio::{sync::mpsc, time::timeout};
use tonic::{Response, Status, Streaming};

/// For the last messages to leave.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// For the peer to read them and to end its half. On a busy machine, or while a process is stopped for a moment, a handoff
/// that was committed must not be taken for a lost one. Only the stream is held meanwhile.
const REST_TIMEOUT: Duration = Duration::from_secs(5);

/// Our end of a `Handoff` stream: messages of type `In` arrive, those of type `Out` leave.
pub struct HandoffStream<In, Out> {
    inbound: Inbound<In>,
    outbound: mpsc::Sender<Out>,
    unsent: VecDeque<Out>,
    is_dropped: bool,
}

/// The answer of a call whose stream is not open yet.
pub type StreamOpening<In> = BoxFuture<'static, Result<Response<Streaming<In>>, Status>>;

/// The peer's half.
enum Inbound<In> {
    Opening(StreamOpening<In>),
    Open(Box<Streaming<In>>),
    /// It has ended, or is not read any more.
    Closed,
}

/// What a [`HandoffStream`] has to say.
pub enum StreamEvent<In> {
    /// A message, the end of the peer's half, or why it broke off.
    Received(Result<Option<In>, Status>),
    /// The peer does not read any more; said once.
    Dropped,
}

impl<In, Out> HandoffStream<In, Out> {
    /// A stream that the peer opened. Messages leave through `outbound`.
    pub fn accepted(inbound: Streaming<In>, outbound: mpsc::Sender<Out>) -> HandoffStream<In, Out> {
        HandoffStream::new(Inbound::Open(Box::new(inbound)), outbound)
    }

    /// A stream that this worker opens.
    pub fn opening(opening: StreamOpening<In>, outbound: mpsc::Sender<Out>) -> HandoffStream<In, Out> {
        HandoffStream::new(Inbound::Opening(opening), outbound)
    }

    fn new(inbound: Inbound<In>, outbound: mpsc::Sender<Out>) -> HandoffStream<In, Out> {
        HandoffStream { inbound, outbound, unsent: VecDeque::new(), is_dropped: false }
    }

    /// Stops reading.
    pub fn close(&mut self) {
        self.inbound = Inbound::Closed;
    }

    /// Queues a message; it leaves while [`next`](HandoffStream::next) is awaited.
    pub fn send(&mut self, message: Out) {
        self.unsent.push_back(message);
    }

    /// Waits for the next event. Nothing is lost when the future is dropped.
    pub async fn next(&mut self) -> StreamEvent<In> {
        loop {
            tokio::select! {
                biased;
                received = self.inbound.receive() => return StreamEvent::Received(received),
                permit = self.outbound.reserve(), if !self.unsent.is_empty() && !self.is_dropped => {
                    if let (Ok(permit), Some(message)) = (permit, self.unsent.pop_front()) {
                        permit.send(message);
                        continue;
                    }
                }
                () = self.outbound.closed(), if !self.is_dropped => {}
            }
            self.is_dropped = true;
            self.unsent.clear();
            return StreamEvent::Dropped;
        }
    }

    /// Sends what is queued, and ends our half. What the peer still says is read and dropped, so that our
    /// last message arrives: dropping the stream at once would reset it and could discard messages under way.
    pub async fn end(self) {
        let HandoffStream { inbound, outbound, unsent, .. } = self;
        let flush = async move {
            for message in unsent {
                if outbound.send(message).await.is_err() {
                    break;
                }
            }
        };
        // A peer that reads nothing loses what it did not read.
        let _ = timeout(FLUSH_TIMEOUT, flush).await;
        if let Inbound::Open(mut inbound) = inbound {
            let rest = async { while let Ok(Some(_)) = inbound.message().await {} };
            let _ = timeout(REST_TIMEOUT, rest).await;
        }
    }
}

impl<In> Inbound<In> {
    /// Never completes once it is closed.
    async fn receive(&mut self) -> Result<Option<In>, Status> {
        loop {
            match self {
                Inbound::Opening(opening) => *self = Inbound::Open(Box::new(opening.await?.into_inner())),
                Inbound::Open(inbound) => return inbound.message().await,
                Inbound::Closed => return pending().await,
            }
        }
    }
}

/// Sleeps until a deadline, forever if there is none.
pub async fn sleep_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
        None => pending().await,
    }
}
