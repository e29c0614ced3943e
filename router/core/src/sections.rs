//! Sections of a prompt whose bounds depend on the text around them alone, so that a text has the same ones in every prompt. Pure.
//!
//! A token ends a section if none of its neighbours has as high a rank: the local maximum approach (Bjørner, Blass and Gurevich,
//! "Content-dependent chunking for differential compression", 2010). A rank depends on the newest tokens, and is higher where a
//! paragraph ends. Unlike chunking that begins a count at each bound (gear hashes with a least size, as in FastCDC), a difference
//! has no effect beyond [`NEIGHBOURS`] + [`WINDOW`] tokens.

use std::{
    collections::hash_map::DefaultHasher,
    hash::{Hash, Hasher},
    ops::Range,
};

/// A token that ends a section has the highest rank among so many tokens on either side. So a section has more tokens than that, and
/// where no paragraphs end about twice as many.
const NEIGHBOURS: usize = 32;

/// Tokens that a rank depends on.
const WINDOW: usize = 4;

/// Only a text that repeats itself has longer sections. They are cut.
const MAX_TOKENS: usize = 24 * NEIGHBOURS;

/// The sections of a prompt, in order; together they are the prompt. `ends_paragraph` says of a position whether its token does.
pub(crate) fn sections(tokens: &[u32], ends_paragraph: impl Fn(usize) -> bool) -> Vec<Range<usize>> {
    let mut sections = Vec::new();
    let mut start = 0;
    for end in bounds(tokens, ends_paragraph).into_iter().chain([tokens.len()]) {
        while start < end {
            let size = MAX_TOKENS.min(end - start);
            sections.push(start..start + size);
            start += size;
        }
    }
    sections
}

/// The positions after tokens that end a section.
fn bounds(tokens: &[u32], ends_paragraph: impl Fn(usize) -> bool) -> Vec<usize> {
    let rank = |idx: usize| {
        let mut hasher = DefaultHasher::new();
        tokens[(idx + 1).saturating_sub(WINDOW)..=idx].hash(&mut hasher);
        (ends_paragraph(idx), hasher.finish())
    };
    let ranks: Vec<(bool, u64)> = (0..tokens.len()).map(rank).collect();
    let is_highest = |idx: &usize| {
        let before = &ranks[idx.saturating_sub(NEIGHBOURS)..*idx];
        let after = &ranks[idx + 1..ranks.len().min(idx + 1 + NEIGHBOURS)];
        before.iter().chain(after).all(|rank| *rank < ranks[*idx])
    };
    (0..tokens.len()).filter(is_highest).map(|idx| idx + 1).collect()
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    /// The bounds in a text are the same in every prompt, but for those nearer than this to its ends.
    const REACH: usize = NEIGHBOURS + WINDOW;

    /// Ends a paragraph.
    const BREAK: u32 = 7;

    fn cut(tokens: &[u32]) -> Vec<Range<usize>> {
        sections(tokens, |idx| tokens[idx] == BREAK)
    }

    /// The bounds of `tokens[range]` that are not near its ends, as positions in it.
    fn inner(tokens: &[u32], range: Range<usize>) -> Vec<usize> {
        let (first, last) = (range.start + REACH, range.end.saturating_sub(REACH));
        let bounds = bounds(tokens, |idx| tokens[idx] == BREAK);
        bounds.into_iter().filter(|&end| first <= end && end <= last).map(|end| end - range.start).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn a_text_has_the_same_bounds_wherever_it_is(
            text in vec(0u32..50, 0..1500), before in vec(0u32..50, 0..200), after in vec(0u32..50, 0..200),
        ) {
            let whole = [&before[..], &text, &after].concat();
            let range = before.len()..before.len() + text.len();
            prop_assert_eq!(inner(&whole, range), inner(&text, 0..text.len()));
        }

        #[test]
        fn sections_are_the_prompt_and_neither_many_nor_long(text in vec(0u32..12, 0..3000)) {
            let sections = cut(&text);
            let mut next = 0;
            for section in &sections {
                prop_assert!(section.start == next && !section.is_empty() && section.len() <= MAX_TOKENS);
                next = section.end;
            }
            prop_assert_eq!(next, text.len());
            prop_assert!(sections.len() <= text.len() / NEIGHBOURS + text.len() / MAX_TOKENS + 2);
        }
    }

    #[test]
    fn an_insertion_changes_only_the_bounds_around_it() {
        let text: Vec<u32> = (0..4000u32).map(|idx| idx.wrapping_mul(2_654_435_761) >> 8).collect();
        let mut changed = text.clone();
        changed.insert(2000, 5);
        let old = bounds(&text, |_| false);
        let new: Vec<usize> =
            bounds(&changed, |_| false).into_iter().map(|end| end - usize::from(end > 2000)).collect();
        let differs = |end: &usize| !(old.contains(end) && new.contains(end));
        let different: Vec<usize> = old.iter().chain(&new).copied().filter(differs).collect();
        assert!(different.iter().all(|end| end.abs_diff(2000) <= REACH), "{different:?}");
        assert!(old.len() > 20, "{old:?}");
    }

    #[test]
    fn sections_end_where_paragraphs_do() {
        let paragraph = |nth: u32| (0..60).map(move |idx| 100 + nth * 1000 + idx).chain([BREAK]);
        let text: Vec<u32> = (0..20).flat_map(paragraph).collect();
        let expected: Vec<usize> = (1..=20).map(|nth| nth * 61).collect();
        // Far from the first one, a paragraph may be cut.
        let ends = cut(&text).into_iter().map(|section| section.end).filter(|&end| end >= 61);
        assert_eq!(ends.collect::<Vec<_>>(), expected);
        // What repeats itself has no highest rank.
        let sizes: Vec<usize> = cut(&[5; 2000]).iter().map(Range::len).collect();
        assert!(sizes.iter().all(|&size| size <= MAX_TOKENS) && sizes.len() <= 5, "{sizes:?}");
        assert!(cut(&[]).is_empty());
    }
}
