//! What an engine says about a request, and the streams that carry it.
//!
//! Each stream is bounded by what its request can produce, so the engine thread never waits for a
//! reader, and ends with exactly one terminal event, whatever becomes of the engine: a `Sink` that
//! is dropped without one says [`EngineError::ShuttingDown`].

use std::{
    ops::Range,
    task::{Context, Poll},
};

use baton_kv_cache::BlockId;
use tokio::sync::mpsc;

use baton_model::SampledToken;
use baton_request::FinishReason;

use crate::{command::Owner, speculation::DraftCounts};

/// An event of a sequence that decodes.
#[derive(Clone, Debug, PartialEq)]
pub enum TokenEvent {
    /// The engine has begun to compute its prompt. Not said of one that arrives computed.
    Started {
        /// Prompt tokens that the prefix cache supplied.
        cached_tokens: usize,
    },
    /// A draft was verified: what the tokens that follow at once came from.
    Verified(DraftCounts),
    /// The next output token.
    Token(SampledToken),
    /// It is complete. Terminal.
    Finished(FinishReason),
    /// It broke off. Terminal.
    Failed(EngineError),
}

/// An event of a sequence that is computed for another engine.
#[derive(Clone, Debug, PartialEq)]
pub enum PrefillEvent {
    /// It was taken up.
    Started {
        /// Prompt tokens that the prefix cache supplied.
        cached_tokens: usize,
    },
    /// From now on these blocks hold their final KV of these layers. Each layer of each block of the
    /// sequence is named once: a cached prefix at once, a full block when a chunk completed it, a
    /// partial last block when the prompt ends.
    Ready {
        /// Which layers.
        layers: Range<usize>,
        /// Index of the first of `blocks` in the sequence's table.
        first_block_idx: usize,
        /// Consecutive blocks of the sequence.
        blocks: Vec<BlockId>,
    },
    /// The token after the prompt. Terminal.
    FirstToken(SampledToken),
    /// It broke off. Terminal.
    Failed(EngineError),
}

/// Why an accepted request ended without an answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// Another engine may continue the request.
    #[error("the engine is shutting down")]
    ShuttingDown,
    /// The model computed NaN or infinite logits for this request; the others go on.
    #[error("the model's logits are not finite")]
    InvalidLogits,
    /// The device failed. The engine has ended.
    #[error("the executor failed: {message}")]
    Executor {
        /// What it said.
        message: String,
    },
    /// There is a bug in the executor or the engine. The engine has ended.
    #[error("the engine panicked: {message}")]
    Panicked {
        /// What the panic said.
        message: String,
    },
}

/// The events of a sequence that decodes. Dropping it cancels the sequence; its blocks are free at
/// the next step.
#[derive(Debug)]
pub struct TokenStream {
    pub(crate) events: mpsc::Receiver<TokenEvent>,
    pub(crate) _cancel: Owner,
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

/// The events of a prefill. Dropping it cancels the computation.
#[derive(Debug)]
pub struct PrefillEvents {
    pub(crate) events: mpsc::Receiver<PrefillEvent>,
    pub(crate) _cancel: Owner,
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

/// Where the engine puts a stream's events.
#[derive(Debug)]
pub(crate) struct Sink<E: Event> {
    /// `None` once the terminal event was sent.
    events: Option<mpsc::Sender<E>>,
}

pub(crate) trait Event {
    fn failed(error: EngineError) -> Self;
}

impl Event for TokenEvent {
    fn failed(error: EngineError) -> TokenEvent {
        TokenEvent::Failed(error)
    }
}

impl Event for PrefillEvent {
    fn failed(error: EngineError) -> PrefillEvent {
        PrefillEvent::Failed(error)
    }
}

impl<E: Event> Sink<E> {
    /// A sink and its reader. `max_events` is the most that can be sent, the terminal one included.
    pub(crate) fn new(max_events: usize) -> (Sink<E>, mpsc::Receiver<E>) {
        let (sender, receiver) = mpsc::channel(max_events);
        (Sink { events: Some(sender) }, receiver)
    }

    pub(crate) fn send(&self, event: E) {
        if let Some(events) = &self.events {
            put(events, event);
        }
    }

    pub(crate) fn end(mut self, event: E) {
        if let Some(events) = self.events.take() {
            put(&events, event);
        }
    }
}

impl<E: Event> Drop for Sink<E> {
    fn drop(&mut self) {
        if let Some(events) = self.events.take() {
            put(&events, E::failed(EngineError::ShuttingDown));
        }
    }
}

fn put<E>(events: &mpsc::Sender<E>, event: E) {
    // A closed channel is a reader that left; its cancellation is under way.
    let result = events.try_send(event);
    debug_assert!(
        !matches!(result, Err(mpsc::error::TrySendError::Full(_))),
        "a stream holds everything its request can produce"
    );
}
