//! The text of the tokens that a choice has delivered, all attempts together, up to a stop string; and their count.

use std::sync::Arc;

use baton_proto::worker::Token;
use baton_tokenizer::Detokenizer;

use super::{
    Usage,
    event::saturate,
    stops::{Matched, StopMatcher},
};

/// What is left of the delivered tokens' text.
pub(super) struct Output {
    /// No stop string matches in so many of the first tokens.
    min_tokens: u32,
    /// Set with the first token that has text.
    detokenizer: Option<Detokenizer>,
    stops: StopMatcher,
    usage: Usage,
}

impl Output {
    pub(super) fn new(num_prompt_tokens: usize, stops: Arc<[String]>, min_tokens: u32) -> Output {
        Output {
            min_tokens,
            detokenizer: None,
            stops: StopMatcher::new(stops),
            usage: Usage { prompt_tokens: saturate(num_prompt_tokens), ..Usage::default() },
        }
    }

    /// The text that the token completes; one without text is only counted. `detokenizer` is called for the first with text.
    pub(super) fn push(
        &mut self,
        token: &Token,
        has_text: bool,
        detokenizer: impl FnOnce() -> Detokenizer,
    ) -> Matched {
        // Cached tokens are those of the first attempt: later ones find what the first has computed.
        if self.usage.completion_tokens == 0 {
            self.usage.blended_tokens = token.blended_tokens.min(self.usage.prompt_tokens);
            self.usage.cached_tokens = token.cached_tokens.unwrap_or(0).min(self.usage.prompt_tokens);
        }
        self.usage.drafted_tokens = self.usage.drafted_tokens.saturating_add(token.drafted_tokens);
        self.usage.accepted_tokens = self.usage.accepted_tokens.saturating_add(token.accepted_tokens);
        self.usage.completion_tokens = self.usage.completion_tokens.saturating_add(1);
        if !has_text {
            return Matched { text: String::new(), stop: None };
        }
        let text = self.detokenizer.get_or_insert_with(detokenizer).push(token.id);
        if self.usage.completion_tokens < self.min_tokens {
            Matched { text, stop: None }
        } else {
            self.stops.push(text)
        }
    }

    /// The text has ended: what is left of it.
    pub(super) fn finish(&mut self) -> Matched {
        let Some(mut detokenizer) = self.detokenizer.take() else {
            return Matched { text: String::new(), stop: None };
        };
        let mut matched = self.stops.push(detokenizer.finish());
        if matched.stop.is_none() {
            matched.text.push_str(&self.stops.finish());
        }
        matched
    }

    /// The counts of a step come with its first token. Accepted tokens that a stop string left out are not counted as drafted.
    pub(super) fn usage(&self) -> Usage {
        let Usage { completion_tokens, drafted_tokens, accepted_tokens, .. } = self.usage;
        let num_left_out = accepted_tokens.saturating_sub(completion_tokens);
        Usage {
            drafted_tokens: drafted_tokens.saturating_sub(num_left_out),
            accepted_tokens: accepted_tokens - num_left_out,
            ..self.usage
        }
    }
}
