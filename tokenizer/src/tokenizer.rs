//! The tokenizer of a model.

use std::{fmt, sync::Arc};

use serde_json::{Map, Value};

use crate::{
    ChatTemplate, TemplateError, TokenizerError,
    pieces::PieceEncoder,
    vocabulary::{Joining, Vocabulary},
};

/// Past this many white-space characters in a row, the regular expressions that split a text hit
/// their backtracking limit, and would yield other tokens than they should.
const MAX_WHITESPACE_RUN: usize = 200_000;

/// Text to token ids and back. Cheap to clone.
#[derive(Clone)]
pub struct Tokenizer {
    inner: Arc<Inner>,
}

struct Inner {
    tokenizer: tokenizers::Tokenizer,
    pieces: Option<PieceEncoder>,
    vocabulary: Vocabulary,
    special_tokens: Map<String, Value>,
    chat_template: Option<ChatTemplate>,
}

impl Tokenizer {
    /// Puts one together from its parts. `special_tokens` maps names such as `bos_token` to texts.
    pub fn new(
        mut tokenizer: tokenizers::Tokenizer,
        special_tokens: Map<String, Value>,
        chat_template: Option<ChatTemplate>,
    ) -> Self {
        // Some files were saved with the settings of a training run. Prompts are never truncated or padded.
        tokenizer.with_truncation(None).expect("no truncation suits every tokenizer");
        tokenizer.with_padding(None);
        let vocabulary = Vocabulary::new(&tokenizer);
        let pieces = PieceEncoder::of(&tokenizer);
        Self { inner: Arc::new(Inner { tokenizer, pieces, vocabulary, special_tokens, chat_template }) }
    }

    /// Makes the tokens that end a sequence special, also where the files call them ordinary. Texts are encoded as before.
    pub(crate) fn with_ends(mut self, ends: &[u32]) -> Self {
        let inner = Arc::get_mut(&mut self.inner).expect("it is called before the tokenizer is shared");
        ends.iter().for_each(|&id| inner.vocabulary.mark_special(id));
        self
    }

    /// Keeps nothing of a text for the next one, which takes longer then. Otherwise the time that a text takes tells whether its
    /// words were in earlier ones.
    ///
    /// # Panics
    /// When there are clones already.
    pub fn forget_texts(&mut self) {
        let inner = Arc::get_mut(&mut self.inner).expect("it is called before the tokenizer is shared");
        let mut model = inner.tokenizer.get_model().clone();
        model.resize_cache(0);
        inner.tokenizer.with_model(model);
        if let Some(pieces) = &mut inner.pieces {
            pieces.forgets_texts = true;
        }
    }

    /// Token ids of `text`. With `add_special_tokens`, what the model expects around a bare text
    /// (usually a begin-of-sequence token): right for completions, wrong for the output of a chat
    /// template, which contains them already. Special tokens spelled out in `text` are recognised.
    ///
    /// Takes time about linear in the text; a text of megabytes does not belong on an async runtime.
    ///
    /// # Errors
    /// When the text cannot be tokenised faithfully.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TokenizerError> {
        let run = if text.len() > MAX_WHITESPACE_RUN { longest_whitespace_run(text) } else { 0 };
        if run > MAX_WHITESPACE_RUN {
            return Err(TokenizerError::Encode(format!(
                "it holds {run} white-space characters in a row; at most {MAX_WHITESPACE_RUN} are possible"
            )));
        }
        let Inner { tokenizer, pieces, .. } = &*self.inner;
        let ids = pieces.as_ref().and_then(|pieces| pieces.encode(tokenizer, text, add_special_tokens));
        let plainly = || Ok(tokenizer.encode_fast(text, add_special_tokens)?.get_ids().to_vec());
        ids.unwrap_or_else(plainly)
            .map_err(|error: tokenizers::Error| TokenizerError::Encode(error.to_string()))
    }

    /// The text of `ids`, as Hugging Face's `decode` gives it. Bytes that form no character become
    /// U+FFFD, ids without a token nothing.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let shown: Vec<u32> = ids.iter().copied().filter(|&id| !self.is_hidden(id, skip_special)).collect();
        // Some decoders index the last token without checking that there is one.
        if shown.is_empty() {
            return String::new();
        }
        self.inner.tokenizer.decode(&shown, false).unwrap_or_default()
    }

    /// Where each of `ids`, which are those of `text`, begins in it, in characters. Of a character of several tokens, the first
    /// has it. The text may lack special tokens, and the space that some tokenizers put before it.
    pub fn offsets(&self, ids: &[u32], text: &str) -> Vec<usize> {
        let (mut rest, mut offset) = (text.as_bytes(), 0);
        let begin = |&id: &u32| {
            let bytes = self.token_bytes(id).unwrap_or_default();
            let num_bytes = if rest.starts_with(&bytes) {
                bytes.len()
            } else if let Some(bare) = bytes.strip_prefix(b" ")
                && rest.starts_with(bare)
            {
                bare.len()
            } else {
                // Of a text that the tokenizer changed as many characters.
                let num_chars = if self.is_special(id) { 0 } else { char_starts(&bytes).count() };
                char_starts(rest).nth(num_chars).unwrap_or(rest.len())
            };
            let (passed, left) = rest.split_at(num_bytes);
            rest = left;
            let begin = offset;
            offset += char_starts(passed).count();
            begin
        };
        ids.iter().map(begin).collect()
    }

    /// One more than the highest token id. The model's own vocabulary may be padded beyond it.
    pub fn vocab_size(&self) -> usize {
        self.inner.vocabulary.num_ids()
    }

    /// The token as text; a part of a character shows as U+FFFD. `None` if no token has this id.
    pub fn token_text(&self, id: u32) -> Option<String> {
        self.token_bytes(id).map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The bytes that the token stands for inside a text. `None` if no token has this id.
    pub fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        if !self.inner.vocabulary.flags(id).exists {
            return None;
        }
        Some(match self.inner.vocabulary.joining {
            Joining::Opaque => self.decode(&[id], false).into_bytes(),
            _ => self.inner.vocabulary.bytes(id).to_vec(),
        })
    }

    /// The bytes of every token by id, none for an id that names no token, and whether it is special. `None` when a
    /// text is more than its tokens' bytes in a row.
    pub fn all_token_bytes(&self) -> Option<impl Iterator<Item = (Vec<u8>, bool)> + '_> {
        let vocabulary = &self.inner.vocabulary;
        let of = |id| (vocabulary.bytes(id).to_vec(), vocabulary.flags(id).special);
        (vocabulary.joining != Joining::Opaque).then(|| (0..vocabulary.num_ids() as u32).map(of))
    }

    /// The id of the token that is written `token` in the vocabulary.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.tokenizer.token_to_id(token)
    }

    /// The id of a named special token: `special_token_id("eos_token")`.
    pub fn special_token_id(&self, name: &str) -> Option<u32> {
        self.token_id(self.inner.special_tokens.get(name)?.as_str()?)
    }

    /// Whether the id is a special token, which is not part of the text.
    pub fn is_special(&self, id: u32) -> bool {
        self.inner.vocabulary.flags(id).special
    }

    /// Whether the model has a chat template, which [`chat_prompt`](Self::chat_prompt) needs.
    pub fn has_chat_template(&self) -> bool {
        self.inner.chat_template.is_some()
    }

    /// Whether the text of the chat template contains `text`: how a model's answers are written shows there.
    pub fn chat_template_contains(&self, text: &str) -> bool {
        self.inner.chat_template.as_ref().is_some_and(|template| template.contains(text))
    }

    /// Whether the chat template reads this variable.
    pub fn chat_template_reads(&self, variable: &str, with_tools: bool) -> bool {
        self.inner.chat_template.as_ref().is_some_and(|template| template.reads(variable, with_tools))
    }

    /// Writes a chat as the prompt that the model was trained on. `messages` is an array of
    /// OpenAI-shaped messages, `tools` one of tool descriptions. `extra` are further variables of the
    /// template; `add_generation_prompt` is true unless `extra` says otherwise.
    ///
    /// # Errors
    /// [`TemplateError::Raised`] when the template itself refuses the messages.
    pub fn chat_prompt(
        &self,
        messages: &Value,
        tools: Option<&Value>,
        extra: &Map<String, Value>,
    ) -> Result<String, TemplateError> {
        let template = self.inner.chat_template.as_ref().ok_or(TemplateError::Missing)?;
        template.render(messages, tools, &self.inner.special_tokens, extra)
    }

    #[cfg(test)]
    pub(crate) fn encodes_by_pieces(&self) -> bool {
        self.inner.pieces.is_some()
    }

    pub(crate) fn vocabulary(&self) -> &Vocabulary {
        &self.inner.vocabulary
    }

    /// Whether decoding leaves the id out.
    pub(crate) fn is_hidden(&self, id: u32, skip_special: bool) -> bool {
        let flags = self.inner.vocabulary.flags(id);
        !flags.exists || (skip_special && flags.special)
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size())
            .field("special_tokens", &self.inner.special_tokens)
            .field("has_chat_template", &self.has_chat_template())
            .finish_non_exhaustive()
    }
}

/// Positions of the bytes that begin a character.
pub(crate) fn char_starts(bytes: &[u8]) -> impl Iterator<Item = usize> {
    let begins = |(at, byte): (usize, &u8)| (byte & 0b1100_0000 != 0b1000_0000).then_some(at);
    bytes.iter().enumerate().filter_map(begins)
}

fn longest_whitespace_run(text: &str) -> usize {
    let mut longest = 0;
    let mut run = 0;
    for char in text.chars() {
        run = if char.is_whitespace() { run + 1 } else { 0 };
        longest = longest.max(run);
    }
    longest
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::{Detokenizer, testing};

    #[test]
    fn missing_and_broken_files_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let error = Tokenizer::load(dir.path()).unwrap_err().to_string();
        assert!(error.contains("tokenizer.json") && error.contains("cannot read"), "{error}");
        std::fs::write(dir.path().join("tokenizer.json"), "{\"model\": 1}").unwrap();
        let error = Tokenizer::load(dir.path()).unwrap_err().to_string();
        assert!(error.contains("tokenizer.json is not valid"), "{error}");
        let dir = testing::model_dir(&[("tokenizer_config.json", "[")]);
        let error = Tokenizer::load(dir.path()).unwrap_err().to_string();
        assert!(error.contains("tokenizer_config.json is not valid"), "{error}");
    }

    #[test]
    fn special_tokens_are_texts_or_objects() {
        let config = r#"{"bos_token": "<|start|>", "eos_token": {"content": "<|end|>"},
                         "pad_token": null, "add_bos_token": true}"#;
        let dir = testing::model_dir(&[("tokenizer_config.json", config)]);
        let tokenizer = Tokenizer::load(dir.path()).unwrap();
        assert_eq!(tokenizer.special_token_id("bos_token"), tokenizer.token_id("<|start|>"));
        assert_eq!(tokenizer.special_token_id("eos_token"), tokenizer.token_id("<|end|>"));
        assert!(tokenizer.is_special(tokenizer.token_id("<|end|>").unwrap()));
        assert_eq!(tokenizer.special_token_id("pad_token"), None);
    }

    #[test]
    fn ends_are_no_text_whatever_the_files_call_them() {
        let plain = testing::byte_level();
        let [named, listed, x] = ["ll", "Ġhe", "x"].map(|token| plain.token_id(token).unwrap());
        let generation = format!(r#"{{"eos_token_id": [{listed}, 9999]}}"#);
        let dir = testing::model_dir(&[
            ("tokenizer_config.json", r#"{"eos_token": "ll"}"#),
            ("generation_config.json", generation.as_str()),
        ]);
        let tokenizer = Tokenizer::load(dir.path()).unwrap();
        for end in [named, listed] {
            assert!(tokenizer.is_special(end) && !plain.is_special(end));
            assert_eq!(tokenizer.decode(&[x, end], true), "x");
            assert_eq!(Detokenizer::new(&tokenizer, &[]).push(end), "");
        }
        assert!(!tokenizer.is_special(x));
        let text = "hello hello";
        assert_eq!(tokenizer.encode(text, false).unwrap(), plain.encode(text, false).unwrap());
    }

    #[test]
    fn saved_truncation_does_not_cut_prompts() {
        let dir = testing::model_dir(&[]);
        let tokenizer = Tokenizer::load(dir.path()).unwrap();
        assert_eq!(tokenizer.encode(&"x ".repeat(100), false).unwrap().len(), 200);
    }

    #[test]
    fn tokens_have_bytes() {
        let tokenizer = testing::byte_level();
        assert_eq!(tokenizer.token_bytes(tokenizer.token_id("Ġhe").unwrap()).unwrap(), b" he");
        assert_eq!(tokenizer.token_bytes(tokenizer.token_id("ð").unwrap()).unwrap(), [0xF0]);
        assert_eq!(tokenizer.token_text(tokenizer.token_id("<|end|>").unwrap()).unwrap(), "<|end|>");
        assert_eq!(tokenizer.vocab_size(), 263);
        assert_eq!(tokenizer.token_bytes(263), None);
        let tokenizer = testing::byte_fallback();
        assert_eq!(tokenizer.token_bytes(tokenizer.token_id("<0xE2>").unwrap()).unwrap(), [0xE2]);
        assert_eq!(tokenizer.token_text(tokenizer.token_id("▁t").unwrap()).unwrap(), " t");
        let tokenizer = testing::word_piece();
        assert_eq!(tokenizer.token_text(tokenizer.token_id("you").unwrap()).unwrap(), "you");
        assert_eq!(tokenizer.decode(&[], true), "");
    }

    #[test]
    fn tokens_begin_where_the_text_has_them() {
        let pieces = testing::byte_fallback();
        for (text, expected) in [("hi to", vec![0, 0, 0, 1, 2, 4]), ("é!", vec![0, 0, 0, 1, 1])] {
            let ids = pieces.encode(text, true).unwrap();
            assert_eq!(pieces.offsets(&ids, text), expected, "a sign, a space and {text:?}");
        }
        let bytes = testing::byte_level();
        let text = "x<|end|>hello";
        let ids = bytes.encode(text, false).unwrap();
        assert_eq!(bytes.offsets(&ids, text), [0, 1, 8, 10, 12]);
        assert_eq!(bytes.offsets(&ids, &bytes.decode(&ids, true)), [0, 1, 1, 3, 5]);
        let ids = ["Ã", "o"].map(|token| bytes.token_id(token).unwrap());
        assert_eq!(bytes.offsets(&ids, &bytes.decode(&ids, true)), [0, 1], "half a character is one");
    }

    #[test]
    fn special_tokens_are_added_on_request() {
        let tokenizer = testing::byte_fallback();
        assert_eq!(tokenizer.encode("x", true).unwrap()[0], 1);
        assert_ne!(tokenizer.encode("x", false).unwrap()[0], 1);
    }

    #[test]
    fn huge_texts_are_tokenised_faithfully_or_refused() {
        let deadline = Duration::from_secs(60); // quadratic work takes hours
        for tokenizer in [testing::byte_level(), testing::byte_fallback()] {
            let texts = [
                "a".repeat(300_000),
                "hello world ".repeat(30_000),
                "🙂".repeat(80_000),
                "!?".repeat(100_000),
                "\n".repeat(150_000),
                " ".repeat(MAX_WHITESPACE_RUN) + "x",
                "1234567890".repeat(20_000),
            ];
            for text in texts {
                let start = Instant::now();
                let ids = tokenizer.encode(&text, false).unwrap();
                assert!(start.elapsed() < deadline, "{:?} for {:?}", start.elapsed(), &text[..8]);
                assert!(tokenizer.decode(&ids, true) == text, "{:?}", &text[..8]);
            }
            let error = tokenizer.encode(&" ".repeat(MAX_WHITESPACE_RUN + 1), false).unwrap_err();
            assert!(matches!(error, TokenizerError::Encode(_)), "{error}");
        }
    }
}
