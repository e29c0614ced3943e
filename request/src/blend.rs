//! Parts of a prompt whose KV may be computed apart from it.

use std::ops::{Range, RangeInclusive};

use crate::invalid::{InvalidRequest, Problem};

/// Passages of a prompt: texts that occur in other prompts, too, in another order or after other text. Their KV is computed
/// once and blended into each prompt, where a part of their tokens is computed again.
#[derive(Clone, Debug, PartialEq)]
pub struct BlendMarks {
    /// Positions of the prompt, in order; they do not overlap. The last token of the prompt is in none.
    pub passages: Vec<Range<usize>>,
    /// The layer whose keys show which tokens are computed again, at least 1. The layers before it are computed for all tokens.
    pub layer: u32,
    /// Which part of the passages' tokens is computed again, from 0 to 1. `None`: not decided. Until it is, the prompt is computed
    /// in full.
    pub ratio: Option<f32>,
}

/// How many tokens of passages are computed again, and which. A higher layer and a larger ratio cost more each.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlendPoint {
    /// See [`BlendMarks::layer`].
    pub layer: u32,
    /// See [`BlendMarks::ratio`].
    pub ratio: f32,
}

/// Layers whose keys may decide.
const LAYERS: RangeInclusive<u32> = 1..=8;
/// A NaN is in no range.
const RATIOS: RangeInclusive<f32> = 0.0..=1.0;

/// So many tokens at the start of each passage are always computed again: alone, they attend to nothing before them. With six the
/// tiny model answers as with a full prefill where passages need one another; with four it loses 6 to 10 points
/// (docs/benchmarks/2026-11-23-blending.md).
pub const NUM_FIRST_TOKENS: usize = 6;

/// Most passages of a prompt with so many tokens. Each that is new takes a pass over the model's weights, in one step together.
pub fn max_passages(num_tokens: usize) -> usize {
    64 + num_tokens / 32
}

/// No passages, the layer that costs least, and no ratio.
impl Default for BlendMarks {
    fn default() -> BlendMarks {
        BlendMarks { passages: Vec::new(), layer: 1, ratio: None }
    }
}

impl BlendPoint {
    /// The point, if it can be one. Foreign reports are checked with it.
    pub fn checked(self) -> Option<BlendPoint> {
        (LAYERS.contains(&self.layer) && RATIOS.contains(&self.ratio)).then_some(self)
    }

    /// Whether both its layer and its ratio are at least those of `other`.
    pub fn is_at_least(self, other: BlendPoint) -> bool {
        self.layer >= other.layer && self.ratio >= other.ratio
    }

    /// The smallest point that [is at least](Self::is_at_least) both.
    pub fn max(self, other: BlendPoint) -> BlendPoint {
        BlendPoint { layer: self.layer.max(other.layer), ratio: self.ratio.max(other.ratio) }
    }
}

impl BlendMarks {
    /// How they are blended; `None` while that is not decided.
    pub fn point(&self) -> Option<BlendPoint> {
        self.ratio.map(|ratio| BlendPoint { layer: self.layer, ratio })
    }

    /// Decides how they are blended by what was `calibrated`: a client chooses no layer, and perhaps a ratio.
    pub fn decide(&mut self, calibrated: Option<BlendPoint>) {
        self.layer = calibrated.map_or(1, |point| point.layer);
        self.ratio = self.ratio.or(calibrated.map(|point| point.ratio));
    }

    /// Checks the marks of a prompt with `num_tokens` tokens. Names the first bad one.
    ///
    /// # Errors
    /// When a passage is empty, begins before the end of another one or is not followed by a token of the prompt, there are more
    /// than [`max_passages`], or the layer or the ratio is out of range.
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
        let outside =
            |field, value, expected| Err(InvalidRequest::new(field, Problem::OutOfRange { value, expected }));
        if !LAYERS.contains(&self.layer) {
            return outside("blend.layer", f64::from(self.layer), "between 1 and 8");
        }
        match self.ratio {
            Some(ratio) if !RATIOS.contains(&ratio) => {
                outside("blend.ratio", f64::from(ratio), "between 0 and 1")
            }
            _ => Ok(()),
        }
    }

    /// What a blended head depends on beside its tokens: how it is blended, and the bounds of its passages.
    pub fn settings(&self) -> Vec<u32> {
        let bounds = self.passages.iter().flat_map(|passage| [passage.start as u32, passage.end as u32]);
        let ratio = self.ratio.map_or(u32::MAX, f32::to_bits);
        [ratio, self.layer, NUM_FIRST_TOKENS as u32].into_iter().chain(bounds).collect()
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
            ..BlendMarks::default()
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
            (BlendMarks { layer: 0, ..marks(&[], None) }, "blend.layer: 0 is not between 1 and 8"),
            (BlendMarks { layer: 9, ..marks(&[], None) }, "blend.layer: 9 is not between 1 and 8"),
        ] {
            assert_eq!(marks.validate(10).unwrap_err().to_string(), message);
        }
        for (marks, end_idx) in [
            (marks(&[], None), 0),
            (marks(&[(0, 9)], Some(0.0)), 9),
            (BlendMarks { layer: 8, ..marks(&[(0, 1), (1, 2), (5, 7)], Some(1.0)) }, 7),
        ] {
            assert_eq!((marks.validate(10), marks.end_idx()), (Ok(()), end_idx));
        }
    }

    #[test]
    fn prompts_have_no_more_passages_than_one_step_can_compute() {
        let marks = |num| BlendMarks {
            passages: (0..num).map(|idx| idx..idx + 1).collect(),
            ..BlendMarks::default()
        };
        assert_eq!(marks(64 + 500).validate(16_000), Ok(()));
        assert_eq!(
            marks(64 + 501).validate(16_000).unwrap_err().to_string(),
            "blend.passages: 565 passages in a prompt of 16000 tokens, which may have 564"
        );
    }

    #[test]
    fn the_calibrated_layer_goes_with_any_ratio_and_layer_1_with_none() {
        let point = |layer, ratio| BlendPoint { layer, ratio };
        for (asked, calibrated, expected) in [
            (None, None, None),
            (Some(0.1), None, Some(point(1, 0.1))),
            (None, Some(point(2, 0.3)), Some(point(2, 0.3))),
            (Some(0.1), Some(point(2, 0.3)), Some(point(2, 0.1))),
        ] {
            let mut marks = BlendMarks { ratio: asked, ..BlendMarks::default() };
            marks.decide(calibrated);
            assert_eq!(marks.point(), expected, "{asked:?}, {calibrated:?}");
        }
    }

    #[test]
    fn points_are_compared_by_layer_and_by_ratio() {
        let point = |layer, ratio| BlendPoint { layer, ratio };
        for (other, expected) in [((1, 0.2), true), ((2, 0.2), true), ((1, 0.3), false), ((4, 0.1), false)] {
            assert_eq!(point(2, 0.2).is_at_least(point(other.0, other.1)), expected, "{other:?}");
        }
        assert_eq!(point(2, 0.05).max(point(1, 0.5)), point(2, 0.5));
        assert_eq!(point(2, 0.05).max(point(2, 0.1)), point(2, 0.1));
        for bad in [point(0, 0.1), point(9, 0.1), point(1, f32::NAN), point(1, 1.1)] {
            assert_eq!(bad.checked(), None, "{bad:?}");
        }
        assert_eq!(point(8, 1.0).checked(), Some(point(8, 1.0)));
    }

    #[test]
    fn the_same_head_by_another_layer_or_ratio_has_other_settings() {
        let marks =
            |layer, ratio| BlendMarks { passages: vec![0..1, 2..5], layer, ratio: Some(ratio) }.settings();
        assert_eq!(marks(1, 0.2), marks(1, 0.2));
        assert_ne!(marks(1, 0.2), marks(2, 0.2));
        assert_ne!(marks(1, 0.2), marks(1, 0.3));
    }
}
