//! One sequence and its grammar: which tokens may come next.

use std::{fmt, sync::Arc};

use llguidance::Matcher;
use toktrie::SimpleVob;

use crate::{cache::Start, error::GrammarError, vocabulary::Lexicon, watch::Meter};

/// Shorter texts are not worth a draft.
const MIN_FORCED_BYTES: usize = 4;

/// So much forced text is tokenised for each token that is wanted. Few tokens are longer.
const BYTES_PER_FORCED: usize = 64;

/// The tokens that may come next.
#[derive(Clone)]
pub struct TokenMask {
    allowed: SimpleVob,
}

/// A grammar, and how far a sequence has come in it.
pub struct TokenMatcher {
    matcher: Matcher,
    /// If not, nothing may be drafted: see [`masks`](Self::masks).
    can_roll_back: bool,
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
    /// A sequence at the start of a grammar, whose operations `meter` can cancel.
    pub(crate) fn new(start: Start, lexicon: Arc<Lexicon>, meter: Arc<Meter>) -> TokenMatcher {
        let Start { matcher, can_roll_back } = start;
        TokenMatcher { matcher, can_roll_back, lexicon, meter, forced: Vec::new(), has_ended: false }
    }

    /// The tokens that may come next: those of the grammar, and those that end a text if the text so far is complete.
    /// When the text is complete and nothing may follow, only those that end it.
    ///
    /// # Errors
    /// When the grammar needs more than it may, or has ended.
    pub fn mask(&mut self) -> Result<TokenMask, GrammarError> {
        let _running = self.meter.begin();
        let allowed = self.matcher.compute_mask_or_eos().map_err(|error| self.exhausted(error))?;
        if allowed.is_zero() {
            return Err(GrammarError::exhausted("no token may follow"));
        }
        Ok(TokenMask { allowed })
    }

    /// The masks before each of `drafts` and after the last. The position in the grammar stays.
    ///
    /// # Errors
    /// As [`mask`](Self::mask), and when a draft is not allowed: see [`num_allowed`](Self::num_allowed).
    pub fn masks(&mut self, drafts: &[u32]) -> Result<Vec<TokenMask>, GrammarError> {
        let mut masks = Vec::with_capacity(drafts.len() + 1);
        masks.push(self.mask()?);
        for &draft in drafts {
            self.consume(draft)?;
            masks.push(self.mask()?);
        }
        if !drafts.is_empty() {
            let _running = self.meter.begin();
            self.matcher.rollback(drafts.len()).map_err(|error| self.exhausted(error))?;
        }
        Ok(masks)
    }

    /// How many of `tokens`, in a row, the grammar allows as drafts, before the text ends. None where tokens cannot be taken back.
    pub fn num_allowed(&mut self, tokens: &[u32]) -> usize {
        let num_text = tokens.iter().take_while(|&&token| self.lexicon.is_text(token)).count();
        if num_text == 0 || !self.can_roll_back || self.matcher.is_stopped() {
            return 0;
        }
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
        self.consume(token)?;
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
    /// there is none or tokens cannot be taken back. The model may cut the same text into other tokens.
    pub fn forced(&mut self, max_tokens: usize) -> Vec<u32> {
        if !self.can_roll_back || self.matcher.is_stopped() {
            return Vec::new();
        }
        if self.forced.is_empty() {
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
