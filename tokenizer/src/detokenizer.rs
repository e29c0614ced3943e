//! Text out of a stream of tokens, as soon as it is certain.

use std::{str, sync::Arc};

use crate::{Tokenizer, vocabulary::Joining};

/// Tokens of the prompt that can matter to the text after it.
const PROMPT_TAIL: usize = 16;
/// An incomplete character has at most this many bytes, so at most this many tokens.
const MAX_INCOMPLETE: usize = 4;

/// Turns tokens into text one at a time. What the pushes and [`finish`](Self::finish) return,
/// joined, is what decoding prompt and tokens at once appends to the prompt's text. No push returns a
/// part of a character. The work per token does not grow with the text.
///
/// One difference to Hugging Face is meant: of a run of byte tokens that is not valid UTF-8, the
/// characters before the fault are kept, since they may have been sent already.
#[derive(Clone, Debug)]
pub struct Detokenizer {
    tokenizer: Tokenizer,
    skip_special: bool,
    /// Special tokens that give text all the same.
    shown: Arc<[u32]>,
    state: State,
}

#[derive(Clone, Debug)]
enum State {
    Bytes(Bytes),
    Window(Window),
}

impl Detokenizer {
    /// Continues after `prompt`, of which the last few tokens matter. Special tokens give no text.
    pub fn new(tokenizer: &Tokenizer, prompt: &[u32]) -> Self {
        Self::with_special(tokenizer, prompt, true)
    }

    /// Like [`new`](Self::new); the special tokens `shown` give their text.
    pub fn showing(tokenizer: &Tokenizer, prompt: &[u32], shown: Arc<[u32]>) -> Self {
        Self { shown, ..Self::new(tokenizer, prompt) }
    }

    /// Like [`new`](Self::new); `skip_special` says whether special tokens give no text.
    pub fn with_special(tokenizer: &Tokenizer, prompt: &[u32], skip_special: bool) -> Self {
        let tail = &prompt[prompt.len().saturating_sub(PROMPT_TAIL)..];
        let state = match tokenizer.vocabulary().joining {
            Joining::Opaque => State::Window(Window::default()),
            Joining::ByteLevel => State::Bytes(Bytes::default()),
            Joining::SentencePiece { strip, bare_first_token } => {
                let at_start = tail.len() == prompt.len();
                State::Bytes(Bytes {
                    strip: strip.filter(|_| at_start),
                    bare_token: at_start && bare_first_token,
                    ..Bytes::default()
                })
            }
        };
        let mut detokenizer =
            Self { tokenizer: tokenizer.clone(), skip_special, shown: Arc::default(), state };
        for &id in tail {
            detokenizer.push(id);
        }
        detokenizer
    }

    /// The characters that `id` completes; often one word, sometimes nothing.
    pub fn push(&mut self, id: u32) -> String {
        if self.tokenizer.is_hidden(id, self.skip_special) && !self.shown.contains(&id) {
            return String::new();
        }
        match &mut self.state {
            State::Bytes(state) => state.push(&self.tokenizer, id),
            State::Window(state) => state.push(&self.tokenizer, id),
        }
    }

    /// What was held back. An incomplete character becomes U+FFFD.
    pub fn finish(&mut self) -> String {
        let mut text = String::new();
        match &mut self.state {
            State::Bytes(state) => state.flush(&self.tokenizer, &mut text),
            State::Window(state) => text = state.emit(&self.tokenizer),
        }
        text
    }
}

/// For decoders that join bytes.
#[derive(Clone, Debug, Default)]
struct Bytes {
    /// The beginning of a character.
    incomplete: Vec<u8>,
    /// Still to be dropped from the front of the text.
    strip: Option<(char, usize)>,
    /// The next token is the first one, and loses its spaces.
    bare_token: bool,
}

impl Bytes {
    fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> String {
        let vocabulary = tokenizer.vocabulary();
        let mut text = String::new();
        // Only byte tokens continue a character, unless all tokens are bytes.
        if vocabulary.joining != Joining::ByteLevel && !vocabulary.flags(id).is_byte {
            self.flush(tokenizer, &mut text);
        }
        let bytes = vocabulary.bytes(id);
        if std::mem::take(&mut self.bare_token) {
            self.incomplete.extend(bytes.iter().filter(|&&byte| byte != b' '));
        } else {
            self.incomplete.extend_from_slice(bytes);
        }
        let mut rest = self.incomplete.as_slice();
        loop {
            let error = match str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    rest = &[];
                    break;
                }
                Err(error) => error,
            };
            let (valid, after) = rest.split_at(error.valid_up_to());
            text.push_str(str::from_utf8(valid).expect("valid up to here"));
            rest = after;
            let Some(invalid) = error.error_len() else { break };
            text.push(char::REPLACEMENT_CHARACTER);
            rest = &rest[invalid..];
        }
        let num_done = self.incomplete.len() - rest.len();
        self.incomplete.drain(..num_done);
        self.stripped(text)
    }

    fn flush(&mut self, tokenizer: &Tokenizer, text: &mut String) {
        let num_lost = match tokenizer.vocabulary().joining {
            // An incomplete character becomes one U+FFFD, or one for each byte, as the decoder does it.
            Joining::ByteLevel => usize::from(!self.incomplete.is_empty()),
            _ => self.incomplete.len(),
        };
        self.incomplete.clear();
        text.extend(std::iter::repeat_n(char::REPLACEMENT_CHARACTER, num_lost));
    }

    fn stripped(&mut self, mut text: String) -> String {
        while let Some((content, num_left)) = self.strip {
            if num_left > 0 && text.starts_with(content) {
                text.drain(..content.len_utf8());
                self.strip = Some((content, num_left - 1));
            } else if num_left == 0 || !text.is_empty() {
                self.strip = None;
            } else {
                break;
            }
        }
        text
    }
}

/// For decoders that only know whole texts: decode a short window with and without what is new.
///
/// ```text
///  … | known | new …     known: tokens whose text is out; decoded again as the context of new
/// ```
#[derive(Clone, Debug, Default)]
struct Window {
    ids: Vec<u32>,
    num_known: usize,
}

impl Window {
    fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> String {
        self.ids.push(id);
        let text = tokenizer.decode(&self.ids, false);
        let num_new = self.ids.len() - self.num_known;
        if text.ends_with(char::REPLACEMENT_CHARACTER) && num_new < MAX_INCOMPLETE {
            return String::new();
        }
        self.emit(tokenizer)
    }

    fn emit(&mut self, tokenizer: &Tokenizer) -> String {
        if self.num_known == self.ids.len() {
            return String::new();
        }
        let known = tokenizer.decode(&self.ids[..self.num_known], false);
        let text = tokenizer.decode(&self.ids, false);
        // A decoder that changes text already returned cannot be streamed: keep the new part by its length.
        let new = match text.strip_prefix(&known) {
            Some(new) => new.to_owned(),
            None => text.chars().skip(known.chars().count()).collect(),
        };
        self.ids.drain(..self.num_known);
        self.num_known = self.ids.len();
        new
    }
}

#[cfg(test)]
#[path = "detokenizer_tests.rs"]
mod tests;
