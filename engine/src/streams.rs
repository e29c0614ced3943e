//! The readers' ends of an engine's events. Dropping one cancels its sequence.

use std::task::{Context, Poll};

use tokio::sync::mpsc;

use crate::{
    command::DropCommand,
    events::{PrefillEvent, TokenEvent},
};

/// The events of a sequence that decodes. Dropping the stream cancels the sequence. Its blocks are free at the next
/// step.
#[derive(Debug)]
pub struct TokenStream {
    pub(crate) events: mpsc::Receiver<TokenEvent>,
    pub(crate) _cancel: DropCommand,
}

impl TokenStream {
    /// The next event; `None` after the terminal one.
    pub async fn next(&mut self) -> Option<TokenEvent> {
        self.events.recv().await
    }

    /// [`next`](Self::next) for implementations of streams.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<TokenEvent>> {
        self.events.poll_recv(cx)
    }
}

/// The events of a prefill. Dropping them cancels the computation.
#[derive(Debug)]
pub struct PrefillEvents {
    pub(crate) events: mpsc::Receiver<PrefillEvent>,
    pub(crate) _cancel: DropCommand,
}

impl PrefillEvents {
    /// The next event; `None` after the terminal one.
    pub async fn next(&mut self) -> Option<PrefillEvent> {
        self.events.recv().await
    }

    /// [`next`](Self::next) for implementations of streams.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<PrefillEvent>> {
        self.events.poll_recv(cx)
    }
}
