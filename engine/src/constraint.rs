//! The grammar of a request, and the masks of the tokens that it allows next. Those that take long are computed on a thread of
//! their own while the executor computes the step.
//!
//! ```text
//! engine thread   draft forced text, cut drafts, begin masks | execute ................. | collect masks, sample, accept
//! mask thread                                                  masks before and after drafts
//! ```
//!
//! The likeliest token of all, if the grammar allows it, is the likeliest that it allows. So a request that takes the likeliest
//! needs a mask only where it is refused; until then none is begun. A request that samples needs none where its random number
//! leads to the likeliest.
//!
//! It does not know logits.

use std::borrow::Cow;

use baton_grammar::{GrammarError, MaskThread, Masked, NoMasks, TokenMask, TokenMatcher};
use baton_scheduler::SequenceId;

use crate::events::EngineError;

/// The grammar of one live request.
#[derive(Debug)]
pub(crate) struct Constraint {
    /// `None` while its masks are computed.
    matcher: Option<TokenMatcher>,
    /// Of the step's rows. Empty if they were not begun.
    masks: Result<Vec<TokenMask>, GrammarError>,
    /// Whether the grammar refused the last token that was asked about.
    has_refused: bool,
}

impl Constraint {
    pub(crate) fn new(matcher: TokenMatcher) -> Constraint {
        Constraint { matcher: Some(matcher), masks: Ok(Vec::new()), has_refused: false }
    }

    /// Whether the grammar may allow a draft. Not while its masks are computed.
    pub(crate) fn may_draft(&self) -> bool {
        self.matcher.as_ref().is_some_and(TokenMatcher::may_draft)
    }

    /// How many tokens of a draft the grammar allows.
    pub(crate) fn num_allowed(&mut self, draft: &[u32]) -> usize {
        self.matcher().num_allowed(draft)
    }

    /// At most `max_tokens` tokens of the text that is certain to come.
    pub(crate) fn forced(&mut self, max_tokens: usize) -> Vec<u32> {
        self.matcher().forced(max_tokens)
    }

    /// Whether the last token that [`allows`](Self::allows) was asked about was refused.
    pub(crate) fn has_refused(&self) -> bool {
        self.has_refused
    }

    /// Whether the grammar allows a token in a row of the step, the tokens of earlier rows being accepted.
    ///
    /// # Errors
    /// When the mask of the row could not be computed.
    pub(crate) fn allows(&mut self, row_idx: usize, token: u32) -> Result<bool, EngineError> {
        let allows = match self.begun(row_idx)? {
            Some(mask) => mask.allows(token),
            None => self.matcher().allows(token),
        };
        self.has_refused = !allows;
        Ok(allows)
    }

    /// The mask of a row of the step, the tokens of earlier rows being accepted.
    ///
    /// # Errors
    /// When it could not be computed.
    pub(crate) fn mask(
        &mut self,
        row_idx: usize,
        masks: &mut MaskThread<SequenceId>,
    ) -> Result<Cow<'_, TokenMask>, EngineError> {
        // Two looks, as the borrow of a mask that is returned would last.
        if self.begun(row_idx)?.is_none() {
            return Ok(Cow::Owned(masks.compute(self.matcher())?));
        }
        Ok(Cow::Borrowed(self.begun(row_idx)?.expect("it was begun")))
    }

    /// The mask of a row, if it was begun.
    ///
    /// # Errors
    /// When it could not be computed.
    pub(crate) fn begun(&self, row_idx: usize) -> Result<Option<&TokenMask>, EngineError> {
        Ok(self.masks.as_ref().map_err(|error| error.clone())?.get(row_idx))
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

    /// Takes back what it has lent.
    pub(crate) fn take_back(&mut self, Masked { matcher, masks, .. }: Masked<SequenceId>) {
        self.matcher = Some(matcher);
        self.masks = masks;
    }

    /// Goes into a step without masks.
    pub(crate) fn skip_masks(&mut self) {
        self.masks = Ok(Vec::new());
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
