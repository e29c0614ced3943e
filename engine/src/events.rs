//! What an engine says about a request, and the sinks it writes to.
//!
//! Each channel is bounded by what its request can produce, so the engine thread never waits for a reader. It ends
//! with exactly one terminal event: a `Sink` that is dropped without one sends [`EngineError::ShuttingDown`].
//!
//! An event carries the time of the engine's thread: its reader runs when it gets a processor.

use std::{
    ops::Range,
    task::{Context, Poll, ready},
    time::Instant,
};

use baton_grammar::GrammarError;
use baton_kv_cache::BlockId;
use tokio::sync::mpsc;

use baton_model_spec::SampledToken;
use baton_request::FinishReason;
use baton_sampler::ScoredToken;

/// An event of a sequence that decodes.
#[derive(Clone, Debug, PartialEq)]
pub enum TokenEvent {
    /// The engine started to compute its prompt. Not sent for a sequence that arrives computed.
    Started {
        /// Prompt tokens that the prefix cache supplied.
        cached_tokens: usize,
    },
    /// The prefix cache got more of its prompt from outside while it was computed. After `Started`.
    Adopted {
        /// Prompt tokens that need not be computed.
        cached_tokens: usize,
    },
    /// Tokens of the prompt were scored. All but the first are, in order, before the first token.
    Scored {
        /// Position of the first.
        first_idx: usize,
        /// Consecutive tokens.
        tokens: Vec<ScoredToken>,
    },
    /// The head of its prompt was blended.
    Blended {
        /// Tokens whose KV came from passages that were kept.
        reused_tokens: usize,
    },
    /// A draft was verified. The tokens that follow at once come from it.
    Verified(DraftCounts),
    /// The next output token.
    Token(SampledToken),
    /// The sequence is complete. Terminal.
    Finished(FinishReason),
    /// The sequence ended without an answer. Terminal.
    Failed(EngineError),
}

/// An event of a sequence that is computed for another engine.
#[derive(Clone, Debug, PartialEq)]
pub enum PrefillEvent {
    /// The sequence was admitted.
    Started {
        /// Prompt tokens that the prefix cache supplied.
        cached_tokens: usize,
    },
    /// As [`TokenEvent::Adopted`]. Their blocks are announced after it.
    Adopted {
        /// Prompt tokens that need not be computed.
        cached_tokens: usize,
    },
    /// As [`TokenEvent::Blended`]. The blocks of the head are announced before it.
    Blended {
        /// Tokens whose KV came from passages that were kept.
        reused_tokens: usize,
    },
    /// From now on these blocks hold their final KV of these layers. Each layer of each block is named once: of a
    /// cached prefix at once, of a full block when a chunk completes it or when it is adopted, of a partial last block when the
    /// prompt ends.
    Ready {
        /// Layers of the model.
        layers: Range<usize>,
        /// Index of the first of `blocks` in the sequence's table.
        first_block_idx: usize,
        /// Consecutive blocks of the sequence.
        blocks: Vec<BlockId>,
    },
    /// The token after the prompt. Terminal.
    FirstToken(SampledToken),
    /// The sequence ended without an answer. Terminal.
    Failed(EngineError),
}

/// Drafted tokens, by a drafter or of text that a grammar forces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftCounts {
    /// Tokens that were proposed and that the target verified.
    pub drafted: u64,
    /// Of those, the ones that equal the sampled token.
    pub accepted: u64,
}

/// Why an accepted request ended without an answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// Another engine may continue the request.
    #[error("the engine is shutting down")]
    ShuttingDown,
    /// The model computed NaN or infinite logits for this request. Other requests continue.
    #[error("the model's logits are not finite")]
    InvalidLogits,
    /// The request's grammar cannot go on. Other requests continue.
    #[error(transparent)]
    Grammar(#[from] GrammarError),
    /// The device failed. The engine has ended.
    #[error("the executor failed: {message}")]
    Executor {
        /// The device's message.
        message: String,
    },
    /// The executor or the engine has a bug. The engine has ended.
    #[error("the engine panicked: {message}")]
    Panicked {
        /// The panic's message.
        message: String,
    },
}

/// Where the engine writes a stream's events.
#[derive(Debug)]
pub(crate) struct Sink<E: Event> {
    /// `None` after the terminal event.
    events: Option<mpsc::Sender<(Instant, E)>>,
    clock: fn() -> Instant,
}

/// The reader of a [`Sink`].
#[derive(Debug)]
pub(crate) struct StampedEvents<E> {
    events: mpsc::Receiver<(Instant, E)>,
    sent_at: Instant,
}

impl<E> StampedEvents<E> {
    pub(crate) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<E>> {
        let Some((sent_at, event)) = ready!(self.events.poll_recv(cx)) else { return Poll::Ready(None) };
        self.sent_at = sent_at;
        Poll::Ready(Some(event))
    }

    /// When the newest event was sent.
    pub(crate) fn sent_at(&self) -> Instant {
        self.sent_at
    }
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
    /// A sink and its reader. `max_events` is the largest number of events that can be sent, the terminal one
    /// included.
    pub(crate) fn new(max_events: usize, clock: fn() -> Instant) -> (Sink<E>, StampedEvents<E>) {
        let (sender, receiver) = mpsc::channel(max_events);
        (Sink { events: Some(sender), clock }, StampedEvents { events: receiver, sent_at: clock() })
    }

    pub(crate) fn send(&self, event: E) {
        if let Some(events) = &self.events {
            put(events, (self.clock)(), event);
        }
    }

    pub(crate) fn end(mut self, event: E) {
        if let Some(events) = self.events.take() {
            put(&events, (self.clock)(), event);
        }
    }
}

impl<E: Event> Drop for Sink<E> {
    fn drop(&mut self) {
        if let Some(events) = self.events.take() {
            // Invariant 2: a request that ends without a terminal event gets this one, also when the engine stops or panics.
            put(&events, (self.clock)(), E::failed(EngineError::ShuttingDown));
        }
    }
}

fn put<E>(events: &mpsc::Sender<(Instant, E)>, now: Instant, event: E) {
    // A closed channel has no reader any more. Its cancellation is on the way.
    let result = events.try_send((now, event));
    debug_assert!(
        !matches!(result, Err(mpsc::error::TrySendError::Full(_))),
        "a stream holds everything its request can produce"
    );
}
