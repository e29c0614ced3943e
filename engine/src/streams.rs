//! The readers' ends of an engine's events. Dropping one cancels its sequence.

use std::{
    future::poll_fn,
    task::{Context, Poll, ready},
    time::Instant,
};

use tokio::sync::mpsc;

use crate::{
    command::DropCommand,
    events::{PrefillEvent, TokenEvent},
};

/// Events that were sent by a [`Sink`](crate::events::Sink).
#[derive(Debug)]
pub(crate) struct StampedEvents<E> {
    events: mpsc::Receiver<(Instant, E)>,
    sent_at: Instant,
}

impl<E> StampedEvents<E> {
    /// `now`: before the first event.
    pub(crate) fn new(events: mpsc::Receiver<(Instant, E)>, now: Instant) -> StampedEvents<E> {
        StampedEvents { events, sent_at: now }
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<E>> {
        let Some((sent_at, event)) = ready!(self.events.poll_recv(cx)) else { return Poll::Ready(None) };
        self.sent_at = sent_at;
        Poll::Ready(Some(event))
    }
}

/// The events of a sequence that decodes. Dropping the stream cancels the sequence. Its blocks are free at the next
/// step.
#[derive(Debug)]
pub struct TokenStream {
    pub(crate) events: StampedEvents<TokenEvent>,
    pub(crate) _cancel: DropCommand,
}

impl TokenStream {
    /// The next event; `None` after the terminal one.
    pub async fn next(&mut self) -> Option<TokenEvent> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    /// [`next`](Self::next) for implementations of streams.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<TokenEvent>> {
        self.events.poll_next(cx)
    }

    /// When the engine sent the newest event, by its clock. A reader may be late.
    pub fn sent_at(&self) -> Instant {
        self.events.sent_at
    }
}

/// The events of a prefill. Dropping them cancels the computation.
#[derive(Debug)]
pub struct PrefillEvents {
    pub(crate) events: StampedEvents<PrefillEvent>,
    pub(crate) _cancel: DropCommand,
}

impl PrefillEvents {
    /// The next event; `None` after the terminal one.
    pub async fn next(&mut self) -> Option<PrefillEvent> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    /// [`next`](Self::next) for implementations of streams.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<PrefillEvent>> {
        self.events.poll_next(cx)
    }

    /// When the engine sent the newest event, by its clock. A reader may be late.
    pub fn sent_at(&self) -> Instant {
        self.events.sent_at
    }
}
