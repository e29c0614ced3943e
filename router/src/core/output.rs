//! What a choice has given its reader, all attempts together: tokens, their text up to a stop string, and their count.

use baton_proto::worker::Token;
use baton_tokenizer::Detokenizer;

use super::{
    Usage,
    event::saturate,
    stops::{Matched, StopMatcher},
};

/// Tokens that were delivered, and what is left of their text.
pub(super) struct Output {
    tokens: Vec<u32>,
    /// No stop string matches in so many of the first tokens.
    min_tokens: usize,
    /// Set with the first token.
    detokenizer: Option<Detokenizer>,
    stops: StopMatcher,
    usage: Usage,
}

impl Output {
    pub(super) fn new(num_prompt_tokens: usize, stops: Vec<String>, min_tokens: u32) -> Output {
        Output {
            tokens: Vec::new(),
            min_tokens: min_tokens as usize,
            detokenizer: None,
            stops: StopMatcher::new(stops),
            usage: Usage { prompt_tokens: saturate(num_prompt_tokens), ..Usage::default() },
        }
    }

    pub(super) fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The text that the token completes. `detokenizer` is called for the first token.
    pub(super) fn push(&mut self, token: &Token, detokenizer: impl FnOnce() -> Detokenizer) -> Matched {
        // A worker's word, for people. What whoever computed the prompt first had cached is what was cached.
        if self.tokens.is_empty() {
            self.usage.cached_tokens = token.cached_tokens.unwrap_or(0).min(self.usage.prompt_tokens);
        }
        self.usage.drafted_tokens = self.usage.drafted_tokens.saturating_add(token.drafted_tokens);
        self.usage.accepted_tokens = self.usage.accepted_tokens.saturating_add(token.accepted_tokens);
        self.tokens.push(token.id);
        let text = self.detokenizer.get_or_insert_with(detokenizer).push(token.id);
        if self.tokens.len() < self.min_tokens { Matched { text, stop: None } } else { self.stops.push(text) }
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

    pub(super) fn usage(&self) -> Usage {
        Usage { completion_tokens: saturate(self.tokens.len()), ..self.usage }
    }
}
