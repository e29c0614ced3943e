//! The readers' ends of an engine's events. Dropping one cancels its sequence.

use std::{
    future::poll_fn,
    task::{Context, Poll},
    time::Instant,
};

use crate::{
    command::DropCommand,
    events::{PrefillEvent, StampedEvents, TokenEvent},
};

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
        self.events.sent_at()
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
        self.events.sent_at()
    }
}
