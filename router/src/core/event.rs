//! The [`Event`]s of a running request, which its edge reads from [`Events`].

use std::{pin::Pin, sync::Arc, time::Instant};

use baton_proto::v1;
use baton_request::FinishReason;
use futures_util::{Stream, StreamExt, stream::SelectAll};
use tokio::sync::OwnedSemaphorePermit;

use super::{ActiveRequest, Core, CoreError, PreparedRequest, choice::Choice};

/// A step of one choice.
#[derive(Clone, Debug)]
pub(crate) struct Event {
    /// Which choice: choice `i` of prompt `p` has the index `p * n + i`.
    pub(crate) index: u32,
    /// Whole characters; may be empty.
    pub(crate) text: String,
    pub(crate) tokens: Vec<TokenOut>,
    /// Set in the choice's last event.
    pub(crate) finish: Option<Finish>,
}

/// One generated token.
#[derive(Clone, Debug)]
pub(crate) struct TokenOut {
    pub(crate) id: u32,
    pub(crate) logprobs: Option<v1::TokenLogprobs>,
}

/// How a choice ended.
#[derive(Clone, Debug)]
pub(crate) struct Finish {
    pub(crate) reason: FinishReason,
    /// The stop string that matched.
    pub(crate) stop: Option<String>,
    pub(crate) usage: Usage,
}

/// Tokens of one choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: u32,
    pub(crate) completion_tokens: u32,
    pub(crate) cached_tokens: u32,
    /// Proposed by a drafter and verified.
    pub(crate) drafted_tokens: u32,
    /// Of those.
    pub(crate) accepted_tokens: u32,
}

impl Usage {
    /// Adds the usage of one choice; `is_first` says that it is the first of its prompt.
    fn add(&mut self, choice: Usage, is_first: bool) {
        let add = |sum: &mut u32, count: u32| *sum = sum.saturating_add(count);
        add(&mut self.completion_tokens, choice.completion_tokens);
        add(&mut self.drafted_tokens, choice.drafted_tokens);
        add(&mut self.accepted_tokens, choice.accepted_tokens);
        if is_first {
            add(&mut self.cached_tokens, choice.cached_tokens);
        }
    }
}

type ChoiceStream = Pin<Box<dyn Stream<Item = Result<Event, CoreError>> + Send>>;

/// The events of all choices of a request. Dropping it cancels the request everywhere.
pub(crate) struct Events {
    choices: SelectAll<ChoiceStream>,
    /// Summed over prompts and choices that have finished.
    usage: Usage,
    n: u32,
    core: Arc<Core>,
    endpoint: &'static str,
    started: Instant,
    outcome: &'static str,
    active: ActiveRequest,
    _permit: OwnedSemaphorePermit,
}

impl Events {
    pub(crate) fn new(
        core: Arc<Core>,
        request: PreparedRequest,
        active: ActiveRequest,
        permit: OwnedSemaphorePermit,
    ) -> Events {
        let prompt_tokens: usize = request.prompts.iter().map(|prompt| prompt.prompt.len()).sum();
        let usage = Usage { prompt_tokens: saturate(prompt_tokens), ..Usage::default() };
        core.metrics.on_start(usage.prompt_tokens);
        let (n, endpoint, started) = (request.n, request.endpoint, request.started);
        let num_prompts = request.prompts.len() as u32;
        let request = Arc::new(request);
        let choices = (0..num_prompts * n).map(|index| {
            let choice = Choice::new(core.clone(), request.clone(), index, active.abort_signal().clone());
            let events = futures_util::stream::unfold(Box::new(choice), |mut choice| async move {
                let event = choice.next().await?;
                Some((event, choice))
            });
            Box::pin(events) as ChoiceStream
        });
        let choices = choices.collect();
        Events { choices, usage, n, core, endpoint, started, outcome: "cancelled", active, _permit: permit }
    }

    /// The next event of any choice; nothing follows an error.
    pub(crate) async fn next(&mut self) -> Option<Result<Event, CoreError>> {
        let Some(event) = self.choices.next().await else {
            self.outcome = if self.outcome == "cancelled" { "ok" } else { self.outcome };
            return None;
        };
        match &event {
            Ok(Event { index, finish: Some(finish), .. }) => {
                // Choices of one prompt share its prefix: it is counted once.
                self.usage.add(finish.usage, index % self.n == 0);
                if finish.reason == FinishReason::Abort {
                    self.outcome = "aborted";
                }
            }
            Ok(_) => {}
            Err(_) => {
                self.outcome = "error";
                self.choices.clear();
            }
        }
        Some(event)
    }

    /// Tokens of the whole request; complete once [`next`](Self::next) has returned `None`.
    pub(crate) fn usage(&self) -> Usage {
        self.usage
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        // The edge has read the last event but not the end: the request is complete.
        let outcome =
            if self.outcome == "cancelled" && self.choices.is_empty() { "ok" } else { self.outcome };
        tracing::debug!(
            request = self.active.id(),
            endpoint = self.endpoint,
            outcome,
            prompt_tokens = self.usage.prompt_tokens,
            completion_tokens = self.usage.completion_tokens,
            "request ended"
        );
        self.core.metrics.on_end(self.endpoint, outcome, self.started.elapsed());
    }
}

pub(super) fn saturate(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
