//! The two directions of a `Handoff` stream, as the drivers of both sides use them: no message is lost when a wait is
//! interrupted, and the last message arrives.

use std::{
    collections::VecDeque,
    convert::Infallible,
    future::pending,
    time::{Duration, Instant},
};

use futures_util::future::BoxFuture;
use tokio::{sync::mpsc, time::timeout};
use tonic::{Response, Status, Streaming};

/// How long the last messages may wait to be sent.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// How long the peer may take to read them and to end its half. It is long because a peer on a busy machine, or one that is
/// stopped for a moment, must still receive the last message of a committed handoff. Only the stream is held meanwhile.
const REST_TIMEOUT: Duration = Duration::from_secs(5);

/// This worker's end of a `Handoff` stream. It receives messages of type `In` and sends messages of type `Out`.
pub struct HandoffStream<In, Out> {
    inbound: Inbound<In>,
    outbound: mpsc::Sender<Out>,
    unsent: VecDeque<Out>,
    is_dropped: bool,
}

/// A call that opens a stream.
pub type StreamOpening<In> = BoxFuture<'static, Result<Response<Streaming<In>>, Status>>;

/// The inbound half of the stream.
enum Inbound<In> {
    Opening(StreamOpening<In>),
    Open(Box<Streaming<In>>),
    /// The peer has ended it, or this side has stopped reading.
    Closed,
}

/// An event of a [`HandoffStream`].
pub enum StreamEvent<In> {
    /// A message, the end of the inbound half (`None`), or why the stream broke.
    Received(Result<Option<In>, Status>),
    /// The peer has stopped reading. Reported once.
    Dropped,
}

impl<In, Out> HandoffStream<In, Out> {
    /// A stream that the peer has opened. Messages are sent through `outbound`.
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

    /// Queues a message. It is sent while [`next`](HandoffStream::next) or [`until`](HandoffStream::until) is awaited.
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

    /// Waits for `done`, and sends the queued messages meanwhile.
    pub async fn until<T>(&mut self, done: impl Future<Output = T>) -> T {
        tokio::select! {
            biased;
            done = done => done,
            never = self.flush() => match never {},
        }
    }

    /// Sends the queued messages. Never completes.
    async fn flush(&mut self) -> Infallible {
        while !self.unsent.is_empty() {
            let Ok(permit) = self.outbound.reserve().await else { break };
            if let Some(message) = self.unsent.pop_front() {
                permit.send(message);
            }
        }
        pending().await
    }

    /// Sends the queued messages and ends the outbound half. Then reads and drops what the peer still sends: dropping the
    /// stream at once would reset it, and messages in transit could be lost.
    pub async fn end(self) {
        let HandoffStream { inbound, outbound, unsent, .. } = self;
        let flush = async move {
            for message in unsent {
                if outbound.send(message).await.is_err() {
                    break;
                }
            }
        };
        // On a timeout the rest is lost: the peer does not read.
        let _ = timeout(FLUSH_TIMEOUT, flush).await;
        if let Inbound::Open(mut inbound) = inbound {
            let rest = async { while let Ok(Some(_)) = inbound.message().await {} };
            let _ = timeout(REST_TIMEOUT, rest).await;
        }
    }
}

impl<In> Inbound<In> {
    /// Never completes after it is closed.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn queued_messages_are_sent_while_another_event_is_awaited() {
        let (outbound, mut messages) = mpsc::channel(1);
        let opening: StreamOpening<()> = Box::pin(pending());
        let mut stream = HandoffStream::opening(opening, outbound);
        stream.send(1);
        stream.send(2);
        // As the fence of a writer that ends when it reads the last message.
        let read = async { (messages.recv().await, messages.recv().await) };
        let read = timeout(REST_TIMEOUT, stream.until(read)).await.expect("they are sent");
        assert_eq!(read, (Some(1), Some(2)));

        // A peer that has stopped reading changes nothing.
        drop(messages);
        stream.send(3);
        timeout(REST_TIMEOUT, stream.until(tokio::task::yield_now())).await.expect("it is over");
    }
}
