//! Parts of a prompt whose KV may be computed apart from it.

use std::ops::Range;

use crate::invalid::{InvalidRequest, Problem};

/// Passages of a prompt: texts that occur in other prompts, too, in another order or after other text. Their KV is computed
/// once and blended into each prompt, where a part of their tokens is computed again.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BlendMarks {
    /// Positions of the prompt, in order; they do not overlap. The last token of the prompt is in none.
    pub passages: Vec<Range<usize>>,
    /// Which part of the passages' tokens is computed again, from 0 to 1. `None`: not decided. Until it is, the prompt is computed
    /// in full.
    pub ratio: Option<f32>,
}

/// So many tokens at the start of each passage are always computed again: alone, they attend to nothing before them. With six the
/// tiny model answers as with a full prefill where passages need one another; with four it loses 6 to 10 points
/// (docs/benchmarks/2026-11-23-blending.md).
pub const NUM_FIRST_TOKENS: usize = 6;

/// Most passages of a prompt with so many tokens. Each that is new takes a pass over the model's weights, in one step together.
pub fn max_passages(num_tokens: usize) -> usize {
    64 + num_tokens / 32
}

impl BlendMarks {
    /// Checks the marks of a prompt with `num_tokens` tokens. Names the first bad one.
    ///
    /// # Errors
    /// When a passage is empty, begins before the end of another one or is not followed by a token of the prompt, there are more
    /// than [`max_passages`], or the ratio is none.
    pub fn validate(&self, num_tokens: usize) -> Result<(), InvalidRequest> {
        let passage = |problem| Err(InvalidRequest::new("blend.passages", problem));
        let mut before_idx = 0;
        for Range { start, end } in self.passages.iter().cloned() {
            if start >= end {
                return passage(Problem::EmptyPassage { start_idx: start, end_idx: end });
            }
            if start < before_idx {
                return passage(Problem::PassageOverlap { start_idx: start, before_idx });
            }
            if end >= num_tokens {
                return passage(Problem::PassageTooLate { end_idx: end, num_tokens });
            }
            before_idx = end;
        }
        let (num, max) = (self.passages.len(), max_passages(num_tokens));
        if num > max {
            return passage(Problem::TooManyPassages { num, max, num_tokens });
        }
        match self.ratio {
            Some(ratio) if !(0.0..=1.0).contains(&ratio) => {
                let problem = Problem::OutOfRange { value: f64::from(ratio), expected: "between 0 and 1" };
                Err(InvalidRequest::new("blend.ratio", problem))
            }
            _ => Ok(()),
        }
    }

    /// What a blended head depends on beside its tokens: the ratio, and the bounds of its passages.
    pub fn settings(&self) -> Vec<u32> {
        let bounds = self.passages.iter().flat_map(|passage| [passage.start as u32, passage.end as u32]);
        let ratio = self.ratio.map_or(u32::MAX, f32::to_bits);
        [ratio, NUM_FIRST_TOKENS as u32].into_iter().chain(bounds).collect()
    }

    /// The end of the last passage; 0 without passages. Tokens from there on are computed as ever.
    pub fn end_idx(&self) -> usize {
        self.passages.last().map_or(0, |last| last.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_that_fit_no_prompt_are_refused_by_name() {
        let marks = |passages: &[(usize, usize)], ratio| BlendMarks {
            passages: passages.iter().map(|&(start, end)| start..end).collect(),
            ratio,
        };
        for (marks, message) in [
            (marks(&[(0, 3), (3, 3)], None), "blend.passages: the passage from 3 to 3 has no tokens"),
            (marks(&[(7, 2)], None), "blend.passages: the passage from 7 to 2 has no tokens"),
            (
                marks(&[(0, 5), (4, 6)], None),
                "blend.passages: a passage begins at 4, and the one before it ends at 5",
            ),
            (
                marks(&[(5, 6), (0, 2)], None),
                "blend.passages: a passage begins at 0, and the one before it ends at 6",
            ),
            (
                marks(&[(0, 10)], None),
                "blend.passages: a passage ends at 10 in a prompt of 10 tokens, whose last token must follow it",
            ),
            (
                marks(&[(0, usize::MAX)], None),
                "blend.passages: a passage ends at 18446744073709551615 in a prompt of 10 tokens, whose last token must \
                 follow it",
            ),
            (marks(&[], Some(1.5)), "blend.ratio: 1.5 is not between 0 and 1"),
            (marks(&[(0, 1)], Some(f32::NAN)), "blend.ratio: NaN is not between 0 and 1"),
        ] {
            assert_eq!(marks.validate(10).unwrap_err().to_string(), message);
        }
        for (marks, end_idx) in [
            (marks(&[], None), 0),
            (marks(&[(0, 9)], Some(0.0)), 9),
            (marks(&[(0, 1), (1, 2), (5, 7)], Some(1.0)), 7),
        ] {
            assert_eq!((marks.validate(10), marks.end_idx()), (Ok(()), end_idx));
        }
    }

    #[test]
    fn prompts_have_no_more_passages_than_one_step_can_compute() {
        let marks = |num| BlendMarks { passages: (0..num).map(|idx| idx..idx + 1).collect(), ratio: None };
        assert_eq!(marks(64 + 500).validate(16_000), Ok(()));
        assert_eq!(
            marks(64 + 501).validate(16_000).unwrap_err().to_string(),
            "blend.passages: 565 passages in a prompt of 16000 tokens, which may have 564"
        );
    }
}
