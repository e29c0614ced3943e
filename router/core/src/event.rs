//! The steps of a running request, as its edge sees them.

use baton_proto::v1;
use baton_request::FinishReason;
use serde::Serialize;

use super::timing::Timing;

/// What a log-probability takes in an answer, about.
const LOGPROB_BYTES: usize = 40;

/// A step of one choice.
#[derive(Clone, Debug)]
pub struct Event {
    /// Which choice: choice `i` of prompt `p` has the index `p * n + i`.
    pub index: u32,
    /// Whole characters; may be empty.
    pub text: String,
    /// The tokens that the text came from, and those whose text is still held back.
    pub tokens: Vec<TokenOut>,
    /// The next tokens of the prompt, from the second on, if the request asks for their log-probabilities. All come before the first
    /// generated token, and with the first choice of a prompt.
    pub scored: Vec<v1::TokenLogprobs>,
    /// Set in the choice's last event.
    pub finish: Option<Finish>,
}

impl Event {
    /// A step that says nothing.
    pub fn empty(index: u32) -> Event {
        Event { index, text: String::new(), tokens: Vec::new(), scored: Vec::new(), finish: None }
    }

    /// About how much text an answer has of it.
    pub fn num_bytes(&self) -> usize {
        let generated = self.tokens.iter().filter_map(|token| token.logprobs.as_ref());
        let num_logprobs: usize = generated.chain(&self.scored).map(|token| 1 + token.top.len()).sum();
        self.text.len() + num_logprobs * LOGPROB_BYTES
    }

    /// Leaves out what was generated, where the prompt alone is asked for.
    pub(super) fn leave_out_output(&mut self) {
        self.text.clear();
        self.tokens.clear();
        if let Some(finish) = &mut self.finish {
            finish.usage.completion_tokens = 0;
            finish.stop = None;
            if finish.reason == FinishReason::Stop {
                finish.reason = FinishReason::Length;
            }
        }
    }
}

/// One generated token.
#[derive(Clone, Debug)]
pub struct TokenOut {
    /// Its id in the vocabulary.
    pub id: u32,
    /// If the request asks for them.
    pub logprobs: Option<v1::TokenLogprobs>,
}

/// How a choice ended.
#[derive(Clone, Debug)]
pub struct Finish {
    /// Why it ended.
    pub reason: FinishReason,
    /// The stop string that matched.
    pub stop: Option<String>,
    /// What it took.
    pub usage: Usage,
    /// How long, and where.
    pub timing: Timing,
}

/// Tokens of one choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Of the prompt.
    pub prompt_tokens: u32,
    /// Generated.
    pub completion_tokens: u32,
    /// Of the prompt, found in a prefix cache.
    pub cached_tokens: u32,
    /// Of the prompt: their KV came from passages that were computed for other prompts.
    pub blended_tokens: u32,
    /// Proposed by a drafter and verified.
    pub drafted_tokens: u32,
    /// Of those.
    pub accepted_tokens: u32,
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
            add(&mut self.blended_tokens, choice.blended_tokens);
        }
    }
}

pub(super) fn saturate(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
