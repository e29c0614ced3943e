//! Marks in a text that arrives in pieces: a piece may end within a mark.

/// Where the first mark begins, and which it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// The mark with this index is at this offset.
    At(usize, usize),
    /// None is in the text. From this offset on the text may be the beginning of one.
    NotBefore(usize),
}

/// Looks for the first of `marks` in `text`; of two that begin at the same place, the one that is listed first.
pub(crate) fn find(text: &str, marks: &[&str]) -> Found {
    for (offset, _) in text.char_indices() {
        let rest = &text[offset..];
        if let Some(idx) = marks.iter().position(|mark| rest.starts_with(mark)) {
            return Found::At(offset, idx);
        }
        if marks.iter().any(|mark| mark.starts_with(rest)) {
            return Found::NotBefore(offset);
        }
    }
    Found::NotBefore(text.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_found_or_may_have_begun() {
        let marks = ["<think>", "<tool_call>"];
        for (text, expected) in [
            ("", Found::NotBefore(0)),
            ("ab", Found::NotBefore(2)),
            ("ab<", Found::NotBefore(2)),
            ("ab<t", Found::NotBefore(2)),
            ("ab<to", Found::NotBefore(2)),
            ("é<x<tool_cal", Found::NotBefore(4)),
            ("a<think>b<tool_call>", Found::At(1, 0)),
            ("a<tool_call><think>", Found::At(1, 1)),
            ("<<<think>", Found::At(2, 0)),
        ] {
            assert_eq!(find(text, &marks), expected, "{text:?}");
        }
    }
}
