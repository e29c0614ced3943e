//! One sequence and its grammar: which tokens may come next.

#[cfg(test)]
mod tests;

use std::{fmt, sync::Arc};

use llguidance::Matcher;
use toktrie::SimpleVob;

use crate::{
    cache::Start,
    error::GrammarError,
    vocabulary::Lexicon,
    watch::{GrammarTime, Meter, Watch},
};

/// Shorter texts are not worth a draft.
const MIN_FORCED_BYTES: usize = 4;

/// So much forced text is tokenised for each token that is wanted. Few tokens are longer.
const BYTES_PER_FORCED: usize = 64;

/// So many tokens are consumed again between two masks. A mask refills what llguidance's lexer may use.
const CONSUMED_AT_ONCE: usize = 64;

/// The tokens that may come next.
#[derive(Clone)]
pub struct TokenMask {
    allowed: SimpleVob,
}

/// A grammar, and how far a sequence has come in it.
pub struct TokenMatcher {
    start: Arc<Start>,
    matcher: Matcher,
    /// The tokens that led from the start to where the sequence is.
    accepted: Vec<u32>,
    /// If not, nothing may be drafted: tokens cannot be taken back, or a draft led to an error.
    can_draft: bool,
    /// Whether the matcher was asked about tokens that may never come. What they used up stays used up.
    has_tried_drafts: bool,
    lexicon: Arc<Lexicon>,
    meter: Arc<Meter>,
    /// Text that is certain to come, as far as it was found. To find it again after each token takes time with its length.
    forced: Vec<u8>,
    has_ended: bool,
}

impl TokenMask {
    /// Whether `token` may come next. Ids beyond the vocabulary may not.
    pub fn allows(&self, token: u32) -> bool {
        (token as usize) < self.allowed.len() && self.allowed.is_allowed(token)
    }

    /// Number of tokens that may come next; at least one.
    pub fn num_allowed(&self) -> usize {
        self.allowed.num_set()
    }

    /// The tokens that may come next, in the order of their ids.
    pub fn to_list(&self) -> Vec<u32> {
        self.allowed.to_list()
    }

    /// Writes a bit for each token, `t % 32` of word `t / 32`, of a vocabulary that may be longer.
    pub fn write_bits(&self, words: &mut [u32]) {
        let own = self.allowed.as_slice();
        let (front, rest) = words.split_at_mut(own.len().min(words.len()));
        front.copy_from_slice(&own[..front.len()]);
        rest.fill(0);
        // Bits beyond the vocabulary say nothing.
        if let Some(last) = words.get_mut(self.allowed.len() / 32) {
            *last &= (1 << (self.allowed.len() % 32)) - 1;
        }
    }

    /// Sets the logits of all other tokens to minus infinity. The row may be longer than the vocabulary.
    pub fn apply_to(&self, logits: &mut [f32]) {
        let words = self.allowed.as_slice();
        for (chunk_idx, chunk) in logits.chunks_mut(32).enumerate() {
            let word = words.get(chunk_idx).copied().unwrap_or(0);
            if word == u32::MAX {
                continue;
            }
            for (bit, logit) in chunk.iter_mut().enumerate() {
                let token = 32 * chunk_idx + bit;
                if word & (1 << bit) == 0 || token >= self.allowed.len() {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
    }
}

impl TokenMatcher {
    /// A sequence at the start of a grammar, whose operations `watch` cancels when they used up `time`.
    pub(crate) fn new(
        start: Arc<Start>,
        lexicon: Arc<Lexicon>,
        watch: &Watch,
        time: GrammarTime,
    ) -> TokenMatcher {
        let (matcher, handle) = start.copy();
        TokenMatcher {
            can_draft: start.can_roll_back,
            start,
            matcher,
            accepted: Vec::new(),
            has_tried_drafts: false,
            lexicon,
            meter: watch.meter(time, handle),
            forced: Vec::new(),
            has_ended: false,
        }
    }

    /// The tokens that may come next: those of the grammar, and those that end a text if the text so far is complete.
    /// When the text is complete and nothing may follow, only those that end it.
    ///
    /// # Errors
    /// When the grammar needs more than it may, or has ended.
    pub fn mask(&mut self) -> Result<TokenMask, GrammarError> {
        self.despite_drafts(Self::compute_mask)
    }

    /// The masks before each of `drafts` and after the last. The position in the grammar stays. There are fewer where a draft is
    /// not allowed (see [`num_allowed`](Self::num_allowed)), or needs more than it may: it may never come, so it fails nothing.
    ///
    /// # Errors
    /// As [`mask`](Self::mask).
    pub fn masks(&mut self, drafts: &[u32]) -> Result<Vec<TokenMask>, GrammarError> {
        let mut masks = Vec::with_capacity(drafts.len() + 1);
        masks.push(self.mask()?);
        if !drafts.is_empty() {
            self.has_tried_drafts = true;
            if self.push_masks(drafts, &mut masks).is_err() {
                self.forget_drafts()?;
            }
        }
        Ok(masks)
    }

    /// Whether [`num_allowed`](Self::num_allowed) and [`forced`](Self::forced) may find anything. Not where tokens cannot be
    /// taken back, after a draft that led to an error, and while less than half of the time ahead is left.
    pub fn may_draft(&self) -> bool {
        self.can_draft && self.meter.has_reserve()
    }

    /// How many of `tokens`, in a row, the grammar allows as drafts, before the text ends. None where nothing
    /// [may be drafted](Self::may_draft).
    pub fn num_allowed(&mut self, tokens: &[u32]) -> usize {
        let num_text = tokens.iter().take_while(|&&token| self.lexicon.is_text(token)).count();
        if num_text == 0 || !self.may_draft() || self.matcher.is_stopped() {
            return 0;
        }
        self.has_tried_drafts = true;
        let _running = self.meter.begin();
        self.matcher.validate_tokens(&tokens[..num_text]).unwrap_or(0)
    }

    /// Whether the mask has `token`. Takes a small part of the mask's time.
    pub fn allows(&mut self, token: u32) -> bool {
        !self.has_ended
            && match self.lexicon.end_tokens.contains(&token) {
                true => self.is_complete(),
                false => self.is_next(token),
            }
    }

    /// Goes on after `token`, which was sampled.
    ///
    /// # Errors
    /// When the grammar does not allow it.
    pub fn accept(&mut self, token: u32) -> Result<(), GrammarError> {
        if self.has_ended {
            return Err(GrammarError::Refused { token });
        }
        if self.lexicon.end_tokens.contains(&token) && self.is_complete() {
            self.has_ended = true;
            return Ok(());
        }
        self.despite_drafts(|it| it.consume(token))?;
        self.accepted.push(token);
        self.meter.add_token();
        let bytes = self.lexicon.bytes(token);
        if self.forced.starts_with(bytes) {
            self.forced.drain(..bytes.len());
        } else {
            self.forced.clear();
        }
        Ok(())
    }

    /// Drafts of the text that is certain to come, as the tokenizer would write it: at most `max_tokens`, and empty if
    /// there is none or nothing [may be drafted](Self::may_draft). The model may cut the same text into other tokens.
    pub fn forced(&mut self, max_tokens: usize) -> Vec<u32> {
        if !self.may_draft() || self.matcher.is_stopped() {
            return Vec::new();
        }
        if self.forced.is_empty() {
            self.has_tried_drafts = true;
            let _running = self.meter.begin();
            self.forced = self.matcher.compute_ff_bytes();
        }
        // A cut changes tokens near it only, of which some may then be refused.
        let max_bytes = max_tokens.saturating_add(1).saturating_mul(BYTES_PER_FORCED);
        let bytes = &self.forced[..self.forced.len().min(max_bytes)];
        let text = match std::str::from_utf8(bytes) {
            Ok(text) => text,
            Err(error) => std::str::from_utf8(&bytes[..error.valid_up_to()]).unwrap_or_default(),
        };
        if text.len() < MIN_FORCED_BYTES {
            return Vec::new();
        }
        let mut tokens = (self.lexicon.encode)(text);
        // The last token may go on in the text that follows.
        tokens.truncate(tokens.len().saturating_sub(1).min(max_tokens));
        let num_allowed = self.num_allowed(&tokens);
        tokens.truncate(num_allowed);
        tokens
    }

    /// Whether the text so far is a text of the grammar.
    pub fn is_complete(&mut self) -> bool {
        let _running = self.meter.begin();
        !self.matcher.is_error()
            && (self.matcher.is_stopped() || self.matcher.is_accepting().unwrap_or(false))
    }

    /// Whether a token has ended the text.
    pub fn has_ended(&self) -> bool {
        self.has_ended
    }

    fn compute_mask(&mut self) -> Result<TokenMask, GrammarError> {
        let _running = self.meter.begin();
        let allowed = self.matcher.compute_mask_or_eos().map_err(|error| self.exhausted(error))?;
        if allowed.is_zero() {
            return Err(GrammarError::exhausted("no token may follow"));
        }
        Ok(TokenMask { allowed })
    }

    /// Adds the masks after each of `drafts`, while there is time for what may never come, and takes the drafts back.
    fn push_masks(&mut self, drafts: &[u32], masks: &mut Vec<TokenMask>) -> Result<(), GrammarError> {
        let mut num_consumed = 0;
        for &draft in drafts {
            if !self.meter.has_reserve() {
                break;
            }
            self.consume(draft)?;
            num_consumed += 1;
            masks.push(self.compute_mask()?);
            // A refused draft pays for its mask like a token of the output.
            self.meter.add_token();
        }
        let _running = self.meter.begin();
        self.matcher.rollback(num_consumed).map_err(|error| self.exhausted(error))
    }

    /// Does `work` where the sequence is. If something is used up and drafts may be the reason, it is done again without them.
    fn despite_drafts<T>(
        &mut self,
        work: impl Fn(&mut TokenMatcher) -> Result<T, GrammarError>,
    ) -> Result<T, GrammarError> {
        match work(self) {
            Err(GrammarError::Exhausted { .. }) if self.has_tried_drafts => {
                self.forget_drafts()?;
                work(self)
            }
            outcome => outcome,
        }
    }

    /// Follows the accepted tokens from the start, as llguidance recovers from no error. From now on nothing is drafted, so this
    /// happens once.
    fn forget_drafts(&mut self) -> Result<(), GrammarError> {
        if self.meter.has_run_out() {
            return Err(GrammarError::OutOfTime { time: self.meter.time() });
        }
        (self.can_draft, self.has_tried_drafts) = (false, false);
        self.forced.clear();
        let (matcher, handle) = self.start.copy();
        self.matcher = matcher;
        self.meter.cancel_by(handle);
        for tokens in self.accepted.chunks(CONSUMED_AT_ONCE) {
            let _running = self.meter.begin();
            let mask = self.matcher.compute_mask_or_eos();
            let consumed = mask.and_then(|_| self.matcher.consume_tokens(tokens));
            consumed.map_err(|error| self.exhausted(error))?;
            tokens.iter().for_each(|_| self.meter.add_token());
        }
        Ok(())
    }

    /// Whether `token` goes on with the text. One that ends texts may be a part of it all the same.
    fn is_next(&mut self, token: u32) -> bool {
        token < self.lexicon.num_tokens && !self.matcher.is_stopped() && {
            let _running = self.meter.begin();
            self.matcher.validate_tokens(&[token]).unwrap_or(0) == 1
        }
    }

    fn consume(&mut self, token: u32) -> Result<(), GrammarError> {
        // llguidance takes a refused token for an error of its caller, and does not recover.
        if !self.is_next(token) {
            return Err(match self.matcher.get_error() {
                Some(reason) => self.exhausted(reason),
                None => GrammarError::Refused { token },
            });
        }
        let _running = self.meter.begin();
        self.matcher.consume_token(token).map_err(|error| self.exhausted(error))
    }

    fn exhausted(&self, error: impl fmt::Display) -> GrammarError {
        match self.meter.has_run_out() {
            true => GrammarError::OutOfTime { time: self.meter.time() },
            false => GrammarError::exhausted(error.to_string()),
        }
    }
}

impl fmt::Debug for TokenMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenMask").field("num_allowed", &self.num_allowed()).finish()
    }
}

impl fmt::Debug for TokenMatcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenMatcher").field("has_ended", &self.has_ended).finish_non_exhaustive()
    }
}
