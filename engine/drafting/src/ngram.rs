//! Drafts by lookup (Saxena: Prompt Lookup Decoding, 2023): where the last few tokens of a sequence occurred before,
//! it proposes what followed them there. It costs nothing, and is right where text repeats: answers that quote their
//! prompt, edited code, lists.

/// Fewest equal tokens of a match.
const MIN_NGRAM: usize = 2;
/// Most tokens that are compared.
const MAX_NGRAM: usize = 4;
/// Newest tokens that are searched: a bound on the cost per step.
const WINDOW: usize = 8192;

/// The continuation of `tokens` after the best earlier occurrence of their last few; empty if there is none. Of the
/// longest matches the newest counts. The continuation repeats without end: what follows a match runs into the
/// proposal itself.
pub fn propose(tokens: &[u32]) -> impl Iterator<Item = u32> {
    let tokens = &tokens[tokens.len().saturating_sub(WINDOW)..];
    let follower_idx = find(tokens).unwrap_or(tokens.len());
    tokens[follower_idx..].iter().copied().cycle()
}

/// Whether a token may be proposed after the next one, whichever that is. None is when the last of `tokens` did not
/// occur before.
pub fn may_propose_after_next(tokens: &[u32]) -> bool {
    let tokens = &tokens[tokens.len().saturating_sub(WINDOW - 1)..];
    tokens.split_last().is_some_and(|(last, before)| before.contains(last))
}

/// Index of the token that follows the best match of the end of `tokens`.
fn find(tokens: &[u32]) -> Option<usize> {
    let (&last, before) = tokens.split_last()?;
    let (mut best, mut best_len) = (None, MIN_NGRAM - 1);
    for (idx, _) in before.iter().enumerate().rev().filter(|&(_, &token)| token == last) {
        let pairs = tokens[..=idx].iter().rev().zip(tokens.iter().rev());
        let len = pairs.take(MAX_NGRAM).take_while(|(a, b)| a == b).count();
        if len > best_len {
            (best, best_len) = (Some(idx + 1), len);
        }
        if len == MAX_NGRAM {
            break;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_continuation_of_the_longest_newest_match_is_proposed() {
        let cases: [(&[u32], &[u32]); 9] = [
            (&[], &[]),
            (&[5], &[]),
            (&[1, 2, 3, 4], &[]), // nothing repeats
            (&[1, 7, 2, 7], &[]), // one token is too few
            (&[1, 2, 3, 4, 9, 1, 2], &[3, 4, 9, 1, 2, 3]),
            (&[1, 2, 3, 1, 2, 4, 1, 2], &[4, 1, 2, 4, 1, 2]), // the newest of equals
            (&[0, 1, 2, 3, 8, 1, 2, 4, 8, 0, 1, 2], &[3, 8, 1, 2, 4, 8]), // three beat two
            (&[6, 6, 6], &[6, 6, 6, 6, 6, 6]),
            (&[1, 2, 3, 1, 2, 3, 1, 2], &[3, 1, 2, 3, 1, 2]),
        ];
        for (tokens, expected) in cases {
            assert_eq!(propose(tokens).take(6).collect::<Vec<_>>(), expected, "after {tokens:?}");
        }
    }

    #[test]
    fn a_token_may_be_proposed_after_an_unknown_one_when_some_token_allows_it() {
        let is_proposed =
            |tokens: &[u32]| (0..4).any(|token| propose(&[tokens, &[token]].concat()).next().is_some());
        // Every text of up to seven tokens over a vocabulary of four.
        for len in 0..8 {
            for text in 0..4u32.pow(len) {
                let tokens: Vec<u32> = (0..len).map(|idx| text >> (2 * idx) & 3).collect();
                assert_eq!(may_propose_after_next(&tokens), is_proposed(&tokens), "after {tokens:?}");
            }
        }
        for len in WINDOW - 4..WINDOW + 2 {
            let tokens = [&[1][..], &vec![3; len], &[2, 1]].concat();
            assert_eq!(may_propose_after_next(&tokens), is_proposed(&tokens), "{len} tokens after the first");
        }
    }

    #[test]
    fn tokens_before_the_window_are_not_searched() {
        let with_gap = |len: usize| [&[1, 2, 3][..], &vec![9; len], &[1, 2]].concat();
        assert_eq!(propose(&with_gap(WINDOW - 5)).next(), Some(3));
        assert_eq!(propose(&with_gap(WINDOW)).next(), None);
    }
}
