//! The steps of a running request, as its edge sees them.

use baton_proto::v1;
use baton_request::FinishReason;

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
    pub(super) fn add(&mut self, choice: Usage, is_first: bool) {
        let add = |sum: &mut u32, count: u32| *sum = sum.saturating_add(count);
        add(&mut self.completion_tokens, choice.completion_tokens);
        add(&mut self.drafted_tokens, choice.drafted_tokens);
        add(&mut self.accepted_tokens, choice.accepted_tokens);
        if is_first {
            add(&mut self.cached_tokens, choice.cached_tokens);
        }
    }
}

pub(super) fn saturate(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
