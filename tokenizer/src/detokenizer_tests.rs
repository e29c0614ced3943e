use proptest::prelude::*;

use super::*;
use crate::testing;

/// Pushes `ids` after `prompt`, checks what every push promises, and returns the whole text.
fn stream(tokenizer: &Tokenizer, prompt: &[u32], ids: &[u32]) -> Vec<String> {
    let mut detokenizer = Detokenizer::new(tokenizer, prompt);
    let mut pieces: Vec<String> = ids.iter().map(|&id| detokenizer.push(id)).collect();
    pieces.push(detokenizer.finish());
    assert_eq!(detokenizer.finish(), "", "finishing twice gives nothing twice");
    pieces
}

fn check_text(tokenizer: &Tokenizer, text: &str) {
    let ids = tokenizer.encode(text, true).unwrap();
    let pieces = stream(tokenizer, &[], &ids);
    assert_eq!(pieces.concat(), text);
    assert_eq!(pieces.concat(), tokenizer.decode(&ids, true));
    for piece in &pieces {
        assert!(!piece.contains('\u{FFFD}') || text.contains('\u{FFFD}'), "{pieces:?}");
    }
    // Cut anywhere, the rest continues the prompt's text.
    for cut in [ids.len() / 3, ids.len() / 2] {
        let (prompt, rest) = ids.split_at(cut);
        let prompt_text = tokenizer.decode(prompt, true);
        if let Some(expected) = text.strip_prefix(&prompt_text)
            && !prompt_text.ends_with('\u{FFFD}')
        {
            assert_eq!(stream(tokenizer, prompt, rest).concat(), expected);
        }
    }
}

proptest! {
    // Failures print their input; they are not written beside the sources.
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn pieces_join_to_the_text(text in "(\\PC|[ \\n🙂é▁a-z]|👩‍👩‍👧‍👦){0,40}") {
        check_text(&testing::byte_level(), &text);
        // The SentencePiece alphabet writes spaces as this character and cannot tell them apart.
        check_text(&testing::byte_fallback(), &text.replace('▁', "_"));
    }

    #[test]
    fn any_bytes_join_to_what_the_decoder_says(ids in prop::collection::vec(0u32..263, 0..60)) {
        let tokenizer = testing::byte_level();
        prop_assert_eq!(stream(&tokenizer, &[], &ids).concat(), tokenizer.decode(&ids, true));
    }

    #[test]
    fn any_pieces_make_characters(ids in prop::collection::vec(0u32..400, 0..60)) {
        // Bytes around a fault may survive here, but nothing is lost that the decoder keeps.
        let tokenizer = testing::byte_fallback();
        let expected = tokenizer.decode(&ids, true);
        let streamed = stream(&tokenizer, &[], &ids).concat();
        let mut streamed = streamed.chars();
        for wanted in expected.chars().filter(|&char| char != '\u{FFFD}') {
            prop_assert!(streamed.any(|char| char == wanted), "{expected:?}");
        }
    }

    #[test]
    fn word_pieces_join_to_what_the_decoder_says(ids in prop::collection::vec(0u32..9, 0..30)) {
        let tokenizer = testing::word_piece();
        prop_assert_eq!(stream(&tokenizer, &[], &ids).concat(), tokenizer.decode(&ids, true));
    }
}

#[test]
fn character_split_over_tokens_comes_out_whole() {
    let tokenizer = testing::byte_level();
    let ids = tokenizer.encode("a🙂b", false).unwrap();
    assert!(ids.len() > 3, "the emoji is several tokens");
    let pieces = stream(&tokenizer, &[], &ids);
    assert_eq!(pieces.iter().filter(|piece| !piece.is_empty()).collect::<Vec<_>>(), ["a", "🙂", "b"]);
}

#[test]
fn incomplete_character_appears_only_at_the_end() {
    for tokenizer in [testing::byte_level(), testing::byte_fallback()] {
        let mut ids = tokenizer.encode("x🙂", false).unwrap();
        ids.pop();
        let mut detokenizer = Detokenizer::new(&tokenizer, &[]);
        let text: String = ids.iter().map(|&id| detokenizer.push(id)).collect();
        assert_eq!(text, "x");
        let rest = detokenizer.finish();
        assert!(!rest.is_empty() && rest.chars().all(|char| char == '\u{FFFD}'), "{rest:?}");
    }
}

#[test]
fn leading_space_belongs_to_the_start_only() {
    let tokenizer = testing::byte_fallback();
    let word = [tokenizer.token_id("▁t").unwrap()];
    assert_eq!(stream(&tokenizer, &[], &word).concat(), "t");
    assert_eq!(stream(&tokenizer, &[1], &word).concat(), "t", "a special token is no text");
    let prompt = tokenizer.encode("x", true).unwrap();
    assert_eq!(stream(&tokenizer, &prompt, &word).concat(), " t");
    let long = vec![prompt[2]; 100];
    assert_eq!(stream(&tokenizer, &long, &word).concat(), " t");
}

#[test]
fn special_tokens_are_hidden_unless_asked_for() {
    let tokenizer = testing::byte_level();
    let end = tokenizer.token_id("<|end|>").unwrap();
    assert_eq!(Detokenizer::new(&tokenizer, &[]).push(end), "");
    assert_eq!(Detokenizer::with_special(&tokenizer, &[], false).push(end), "<|end|>");
    assert_eq!(Detokenizer::new(&tokenizer, &[]).push(u32::MAX), "", "no such token");
}
