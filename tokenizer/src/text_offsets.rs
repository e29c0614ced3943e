//! Where generated tokens begin in their text. It does not know the text.

use crate::{Detokenizer, Tokenizer, tokenizer::char_starts};

/// Tells of generated tokens, one after the other, where they begin in the text, in characters. Of a character of several
/// tokens, the first has it; special tokens are not in the text.
#[derive(Clone, Debug)]
pub struct TextOffsets {
    tokenizer: Tokenizer,
    /// Until a token has given text. That may lack the token's space, or have what completes a character of the prompt.
    first: Option<Detokenizer>,
    /// Where the next token begins.
    next: usize,
}

impl TextOffsets {
    /// Continues after `prompt`, of which the text has so many characters.
    pub fn new(tokenizer: &Tokenizer, prompt: &[u32], num_chars: usize) -> TextOffsets {
        let first = Some(Detokenizer::new(tokenizer, prompt));
        TextOffsets { tokenizer: tokenizer.clone(), first, next: num_chars }
    }

    /// Where the next token begins, which is `id`.
    pub fn push(&mut self, id: u32) -> usize {
        let begin = self.next;
        if !self.tokenizer.is_hidden(id, true) {
            self.next += self.num_chars(id);
        }
        begin
    }

    fn num_chars(&mut self, id: u32) -> usize {
        let Some(first) = &mut self.first else {
            return char_starts(&self.tokenizer.token_bytes(id).unwrap_or_default()).count();
        };
        let text = first.push(id);
        // A part of a character is one, as of any later token; what else is held back is the prompt's.
        let num_chars = match text.is_empty() {
            true => first.clone().finish().chars().count().min(1),
            false => (text + &first.clone().finish()).chars().count(),
        };
        if num_chars > 0 {
            self.first = None;
        }
        num_chars
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    fn check(tokenizer: &Tokenizer, prompt: &[&str], tokens: &[&str], expected: &[usize]) {
        let ids = |tokens: &[&str]| -> Vec<u32> {
            tokens.iter().map(|token| tokenizer.token_id(token).expect("it has the token")).collect()
        };
        let mut offsets = TextOffsets::new(tokenizer, &ids(prompt), 0);
        let begins: Vec<usize> = ids(tokens).into_iter().map(|id| offsets.push(id)).collect();
        assert_eq!(begins, expected, "{tokens:?} after {prompt:?}");
    }

    #[test]
    fn the_first_token_begins_a_text_without_its_space() {
        let pieces = testing::byte_fallback();
        check(&pieces, &["<s>"], &["▁t", "▁t", "x"], &[0, 1, 3]);
        check(&pieces, &["<s>"], &["<s>", "▁", "▁t", "x"], &[0, 0, 0, 2]);
        check(&pieces, &["<s>", "▁t"], &["▁t", "x"], &[0, 2]);
        check(&testing::byte_level(), &[], &["Ġhe", "o"], &[0, 3]);
    }

    #[test]
    fn of_a_character_of_several_tokens_the_first_has_it() {
        let bytes = testing::byte_level();
        check(&bytes, &[], &["Ã", "©", "<|end|>", "o", "o"], &[0, 1, 1, 1, 2]);
        check(&bytes, &["Ã"], &["©", "o"], &[0, 1]);
        let fallback = testing::byte_fallback();
        check(&fallback, &["<s>"], &["<0xC3>", "<0xA9>", "x"], &[0, 1, 1]);
        // The prompt ends inside of it.
        check(&fallback, &["<s>", "<0xF0>", "<0x9F>"], &["<0x98>", "<0x80>", "x"], &[0, 1, 1]);
    }
}
