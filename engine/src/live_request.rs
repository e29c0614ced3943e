//! One request of an engine: what its reader asked for and where its events go. Its tokens are a [`Sequence`]'s.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use baton_drafting::DraftLength;
use baton_grammar::TokenMatcher;
use baton_kv_cache::BlockId;
use baton_request::{FinishReason, Request};
use baton_sampler::TokenHistory;
#[cfg(doc)]
use baton_scheduler::Sequence;
use tokio::sync::oneshot;

use crate::{
    constraint::Constraint,
    events::{EngineError, PrefillEvent, Sink, TokenEvent},
};

/// A request from its submission to its terminal event.
pub(crate) struct LiveRequest {
    pub(crate) request: Request,
    pub(crate) history: TokenHistory,
    /// Its grammar.
    pub(crate) constraint: Option<Box<Constraint>>,
    pub(crate) reply: ReplyChannel,
    pub(crate) draft_length: DraftLength,
    /// How many tokens of the newest draft its grammar left, if it refused the one after them.
    pub(crate) draft_cut_at: Option<usize>,
    /// Whether its draft is text that its grammar forces.
    pub(crate) has_forced_draft: bool,
    /// Of its drafts of forced text.
    pub(crate) forced_length: DraftLength,
    /// Whether its reader knows that its head was blended.
    pub(crate) is_blended: bool,
    /// Held until admission.
    pub(crate) slot: Option<QueueSlot>,
}

/// Where a request's events go, by role.
pub(crate) enum ReplyChannel {
    Tokens(Sink<TokenEvent>),
    Prefill(Sink<PrefillEvent>),
    /// `None` after the grant. Then `Decode` brings a sink.
    Reservation(Option<oneshot::Sender<Grant>>),
}

/// The blocks of a reservation, sent when it is admitted.
#[derive(Debug)]
pub(crate) struct Grant {
    pub(crate) blocks: Vec<BlockId>,
    /// So many of them at the front are cached.
    pub(crate) num_cached_blocks: usize,
}

/// A slot in the queue, held from submission until admission or the end.
#[derive(Debug)]
pub(crate) struct QueueSlot(Arc<AtomicUsize>);

impl LiveRequest {
    /// A request that waits. Takes time with the length of the prompt if it has a repetition penalty.
    pub(crate) fn new(
        request: Request,
        matcher: Option<TokenMatcher>,
        reply: ReplyChannel,
        slot: QueueSlot,
    ) -> LiveRequest {
        let history = TokenHistory::new(&request);
        let constraint = matcher.map(|matcher| Box::new(Constraint::new(matcher)));
        LiveRequest {
            request,
            history,
            constraint,
            reply,
            draft_length: DraftLength::default(),
            draft_cut_at: None,
            has_forced_draft: false,
            forced_length: DraftLength::default(),
            is_blended: false,
            slot: Some(slot),
        }
    }

    /// Counts `token`, the newest of the sequence. Returns the reason to end after it, if there is one.
    ///
    /// # Errors
    /// When the request's grammar cannot go on.
    pub(crate) fn take(
        &mut self,
        token: u32,
        context_length: usize,
    ) -> Result<Option<FinishReason>, EngineError> {
        self.history.push(token);
        let has_ended = self.constraint.as_mut().map_or(Ok(false), |constraint| constraint.accept(token))?;
        Ok(self.finish_after(token, context_length).or(has_ended.then_some(FinishReason::Stop)))
    }

    /// The reason to end the sequence after `token`, its newest, if there is one.
    pub(crate) fn finish_after(&self, token: u32, context_length: usize) -> Option<FinishReason> {
        self.request.finish_after(self.history.num_output_tokens(), token, context_length)
    }
}

impl ReplyChannel {
    /// Ends the events with `error`.
    pub(crate) fn fail(self, error: EngineError) {
        match self {
            ReplyChannel::Tokens(sink) => sink.end(TokenEvent::Failed(error)),
            ReplyChannel::Prefill(sink) => sink.end(PrefillEvent::Failed(error)),
            // The future of the reservation reports a shutdown.
            ReplyChannel::Reservation(_) => {}
        }
    }
}

impl QueueSlot {
    /// Takes one of at most `max_waiting` slots. `Err` with the number of taken slots when none is free.
    pub(crate) fn take(num_taken: &Arc<AtomicUsize>, max_waiting: usize) -> Result<QueueSlot, usize> {
        let more = |num| (num < max_waiting).then_some(num + 1);
        num_taken.try_update(Ordering::AcqRel, Ordering::Acquire, more)?;
        Ok(QueueSlot(num_taken.clone()))
    }
}

impl Drop for QueueSlot {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}
