//! What the drivers of both sides of a handoff do the same way: read and write the stream without
//! losing a message, and wait for things that are not always there.

use std::{
    collections::VecDeque,
    future::pending,
    time::{Duration, Instant},
};

use futures_util::future::BoxFuture;
use tokio::{sync::mpsc, time::timeout};
use tonic::{Status, Streaming};

/// For the last messages to leave.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// For the peer to read them, and to end its half: a machine that is busy, or a process that is stopped for a moment,
/// shall not take a handoff that was committed for one that was lost. Nothing is held meanwhile but the stream.
const REST_TIMEOUT: Duration = Duration::from_secs(5);

/// Our end of a `Handoff` stream: messages of type `In` arrive, those of type `Out` leave.
pub struct HandoffStream<In, Out> {
    /// `None` before the stream has opened, and once the peer has ended its half.
    inbound: Option<Streaming<In>>,
    outbound: mpsc::Sender<Out>,
    unsent: VecDeque<Out>,
    is_dropped: bool,
}

/// What a [`HandoffStream`] has to say.
pub enum StreamEvent<In> {
    /// A message, the end of the peer's half, or why it broke off.
    Received(Result<Option<In>, Status>),
    /// The peer reads no more; said once.
    Dropped,
}

impl<In, Out> HandoffStream<In, Out> {
    /// A stream whose messages leave through `outbound`.
    pub fn new(outbound: mpsc::Sender<Out>) -> HandoffStream<In, Out> {
        HandoffStream { inbound: None, outbound, unsent: VecDeque::new(), is_dropped: false }
    }

    /// The peer's half is there.
    pub fn opened(&mut self, inbound: Streaming<In>) {
        self.inbound = Some(inbound);
    }

    /// Reads no more.
    pub fn close(&mut self) {
        self.inbound = None;
    }

    /// Queues a message; it leaves while [`next`](HandoffStream::next) is awaited.
    pub fn send(&mut self, message: Out) {
        self.unsent.push_back(message);
    }

    /// Waits for whatever happens next. Nothing is lost when the future is dropped.
    pub async fn next(&mut self) -> StreamEvent<In> {
        loop {
            tokio::select! {
                biased;
                received = async { self.inbound.as_mut().expect("checked").message().await },
                    if self.inbound.is_some() => return StreamEvent::Received(received),
                permit = self.outbound.reserve(), if !self.unsent.is_empty() && !self.is_dropped => {
                    if let (Ok(permit), Some(message)) = (permit, self.unsent.pop_front()) {
                        permit.send(message);
                        continue;
                    }
                }
                () = self.outbound.closed(), if !self.is_dropped => {}
                // Nothing can happen before the stream opens.
                () = pending() => {}
            }
            self.is_dropped = true;
            self.unsent.clear();
            return StreamEvent::Dropped;
        }
    }

    /// Sends what is queued, and ends our half. What the peer still says is read and forgotten, so that our
    /// last message arrives: dropping the stream at once would reset it, and may discard what is on its way.
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
        if let Some(mut inbound) = inbound {
            let rest = async { while let Ok(Some(_)) = inbound.message().await {} };
            let _ = timeout(REST_TIMEOUT, rest).await;
        }
    }
}

/// Waits for a future that may not be there; forever if it is not. It is taken once it has ended.
pub async fn if_any<T>(future: &mut Option<BoxFuture<'static, T>>) -> T {
    let Some(running) = future else { return pending().await };
    let output = running.await;
    *future = None;
    output
}

/// Sleeps until a deadline, forever if there is none.
pub async fn sleep_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
        None => pending().await,
    }
}
