//! The bytes of each token of a model, as a prefix tree.

use std::{fmt, sync::Arc};

use toktrie::{TokEnv, TokRxInfo, TokTrie, TokenizerEnv};

use crate::error::GrammarError;

/// One token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VocabularyToken {
    /// What it stands for inside a text; empty for an id that names no token.
    pub bytes: Vec<u8>,
    /// Whether it is not part of the text. A grammar allows it only by name.
    pub is_special: bool,
}

/// Text to token ids as the model's own tokenizer does it, without special tokens around it.
pub type TextEncoder = Box<dyn Fn(&str) -> Vec<u32> + Send + Sync>;

/// All tokens of a model.
pub struct Vocabulary {
    pub(crate) lexicon: Arc<Lexicon>,
}

/// What a sequence needs of a vocabulary.
pub(crate) struct Lexicon {
    pub(crate) env: TokEnv,
    pub(crate) num_tokens: u32,
    pub(crate) end_tokens: Vec<u32>,
    pub(crate) encode: TextEncoder,
}

struct Env {
    trie: TokTrie,
}

impl Lexicon {
    /// Whether a token may be part of a text. llguidance takes an id beyond its vocabulary for an error of its caller, and does not
    /// recover.
    pub(crate) fn is_text(&self, token: u32) -> bool {
        token < self.num_tokens && !self.end_tokens.contains(&token)
    }

    /// What a token adds to a text. A special one begins with a byte that no text has.
    pub(crate) fn bytes(&self, token: u32) -> &[u8] {
        self.env.tok_trie().token(token)
    }
}

impl Vocabulary {
    /// A vocabulary of `tokens`, by id. Any of `end_tokens` ends a text. `encode` is used to propose tokens of text that
    /// a grammar forces; no mask depends on it.
    ///
    /// # Errors
    /// When no token ends a text: then no grammar could ever end.
    pub fn new(
        tokens: impl IntoIterator<Item = VocabularyToken>,
        end_tokens: &[u32],
        encode: TextEncoder,
    ) -> Result<Vocabulary, GrammarError> {
        let words: Vec<Vec<u8>> = tokens.into_iter().map(word).collect();
        let ends: Vec<u32> = end_tokens.iter().copied().filter(|&id| (id as usize) < words.len()).collect();
        let Some(&first) = ends.first() else {
            return Err(GrammarError::vocabulary("it names no token that ends a text"));
        };
        if words.iter().all(|word| word.is_empty() || word[0] == TokTrie::SPECIAL_TOKEN_MARKER) {
            return Err(GrammarError::vocabulary("it has no tokens of text"));
        }
        let info = TokRxInfo::new(words.len() as u32, first);
        let trie = TokTrie::from(&info, &words).with_eos_tokens(&ends);
        let env = Arc::new(Env { trie });
        let lexicon = Lexicon { env, num_tokens: info.vocab_size, end_tokens: ends, encode };
        Ok(Vocabulary { lexicon: Arc::new(lexicon) })
    }
}

/// Special tokens begin with a byte that no text has.
fn word(token: VocabularyToken) -> Vec<u8> {
    let VocabularyToken { mut bytes, is_special } = token;
    if is_special && !bytes.is_empty() {
        bytes.insert(0, TokTrie::SPECIAL_TOKEN_MARKER);
    }
    bytes
}

impl TokenizerEnv for Env {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<u32> {
        self.trie.greedy_tokenize(bytes)
    }

    /// A mask has every token that the grammar allows: how a text is cut into tokens is the model's choice.
    fn tokenize_is_canonical(&self) -> bool {
        false
    }
}

impl fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vocabulary").field("num_tokens", &self.lexicon.num_tokens).finish()
    }
}
