//! The grammar of a request, and the masks of the tokens that it allows next. They are computed on a thread of their own
//! while the executor computes the step.
//!
//! ```text
//! engine thread   draft forced text, cut drafts, begin masks | execute ................. | collect masks, sample, accept
//! mask thread                                                  masks before and after drafts
//! ```
//!
//! It does not know logits.

use baton_grammar::{GrammarError, Masked, NoMasks, TokenMask, TokenMatcher};

use crate::{events::EngineError, sequence::SequenceId};

/// The grammar of one live request.
#[derive(Debug)]
pub(crate) struct Constraint {
    /// `None` while its masks are computed.
    matcher: Option<TokenMatcher>,
    /// Of the step's rows.
    masks: Result<Vec<TokenMask>, GrammarError>,
}

impl Constraint {
    pub(crate) fn new(matcher: TokenMatcher) -> Constraint {
        Constraint { matcher: Some(matcher), masks: Ok(Vec::new()) }
    }

    /// How many tokens of a draft the grammar allows.
    pub(crate) fn num_allowed(&mut self, draft: &[u32]) -> usize {
        self.matcher().num_allowed(draft)
    }

    /// At most `max_tokens` tokens of the text that is certain to come.
    pub(crate) fn forced(&mut self, max_tokens: usize) -> Vec<u32> {
        self.matcher().forced(max_tokens)
    }

    /// The mask of a row of the step.
    ///
    /// # Errors
    /// When it could not be computed.
    pub(crate) fn mask(&self, row_idx: usize) -> Result<&TokenMask, EngineError> {
        let masks = self.masks.as_ref().map_err(|error| error.clone())?;
        Ok(&masks[row_idx])
    }

    /// Goes on after a sampled token. True when the text ended with it.
    ///
    /// # Errors
    /// When the grammar cannot go on.
    pub(crate) fn accept(&mut self, token: u32) -> Result<bool, EngineError> {
        self.matcher().accept(token)?;
        Ok(self.matcher().has_ended())
    }

    fn matcher(&mut self) -> &mut TokenMatcher {
        self.matcher.as_mut().expect("masks are collected before tokens are sampled")
    }

    /// Gives its matcher to the thread that computes masks.
    pub(crate) fn lend(&mut self) -> TokenMatcher {
        self.matcher.take().expect("the masks of the last step were collected")
    }
}

impl From<Masked<SequenceId>> for Constraint {
    fn from(Masked { matcher, masks, .. }: Masked<SequenceId>) -> Constraint {
        Constraint { matcher: Some(matcher), masks }
    }
}

impl From<NoMasks> for EngineError {
    fn from(error: NoMasks) -> EngineError {
        let message = error.to_string();
        match error {
            NoMasks::NotStarted(_) => EngineError::Executor { message },
            NoMasks::Ended => EngineError::Panicked { message },
        }
    }
}
