//! The KV of a passage, and a prompt that contains passages.

use std::any::{Any, type_name};
use std::fmt;
use std::ops::Range;

use baton_kv_cache::BlockId;

use super::selection::Selection;

/// The KV of a passage of text that was computed on its own, from layer [`FIRST_KEPT_LAYER`](super::FIRST_KEPT_LAYER) on,
/// where and as the executor that computed it keeps it. Keys are kept without rotation, so one rotation brings them to any
/// position.
pub struct PassageKv {
    num_tokens: usize,
    size_bytes: usize,
    numbers: Box<dyn Any + Send + Sync>,
}

/// A passage in a prompt.
#[derive(Clone, Copy, Debug)]
pub struct BlendPassage<'a> {
    /// Position of its first token in the prompt.
    pub start_idx: usize,
    /// Its KV.
    pub kv: &'a PassageKv,
}

/// The beginning of a sequence, at least up to the end of its last passage. What follows is computed as ever.
#[derive(Clone, Copy, Debug)]
pub struct BlendedPrompt<'a> {
    /// Its tokens, from position 0 on.
    pub tokens: &'a [u32],
    /// Blocks of the sequence, enough for the tokens.
    pub blocks: &'a [BlockId],
    /// Its passages, in the order of their positions. Tokens in none are computed in all layers.
    pub passages: &'a [BlendPassage<'a>],
    /// Which tokens of passages are computed in all layers.
    pub selection: Selection,
    /// Whether the logits after its last token are returned, which is in no passage then.
    pub wants_logits: bool,
}

/// What came of blending a prompt.
#[derive(Clone, Debug)]
pub struct Blended<'a> {
    /// The positions that were computed in all layers, in order.
    pub computed: Vec<usize>,
    /// `[vocab_size]`, if wanted: the logits after the last token.
    pub logits: &'a [f32],
}

impl PassageKv {
    /// A passage of `num_tokens` tokens whose KV takes `size_bytes` bytes.
    pub fn new(num_tokens: usize, size_bytes: usize, numbers: impl Any + Send + Sync) -> PassageKv {
        PassageKv { num_tokens, size_bytes, numbers: Box::new(numbers) }
    }

    /// Tokens of the passage.
    pub fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    /// Bytes of the KV.
    pub fn size_bytes(&self) -> usize {
        self.size_bytes
    }

    /// What the executor keeps.
    ///
    /// # Panics
    /// When another kind of executor computed the passage.
    pub fn numbers<T: Any>(&self) -> &T {
        let found = self.numbers.downcast_ref();
        found.unwrap_or_else(|| panic!("a passage of another executor, expected {}", type_name::<T>()))
    }
}

impl fmt::Debug for PassageKv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PassageKv { num_tokens, size_bytes, .. } = self;
        f.debug_struct("PassageKv")
            .field("num_tokens", num_tokens)
            .field("size_bytes", size_bytes)
            .finish_non_exhaustive()
    }
}

impl BlendPassage<'_> {
    /// Its positions in the prompt.
    pub fn range(&self) -> Range<usize> {
        self.start_idx..self.start_idx + self.kv.num_tokens
    }
}

impl BlendedPrompt<'_> {
    /// The positions of its passages.
    ///
    /// # Panics
    /// When passages overlap, are out of order or beyond the prompt.
    pub fn ranges(&self) -> Vec<Range<usize>> {
        let ranges: Vec<_> = self.passages.iter().map(BlendPassage::range).collect();
        assert!(ranges.windows(2).all(|pair| pair[0].end <= pair[1].start), "passages overlap: {ranges:?}");
        let end = ranges.last().map_or(0, |last| last.end);
        assert!(end <= self.tokens.len(), "a passage ends at {end} in a prompt of {}", self.tokens.len());
        ranges
    }

    /// The passage at `position`, and the position's place in it; `None` if no passage is there.
    pub fn kept(&self, position: usize) -> Option<(&PassageKv, usize)> {
        let idx = self.passages.partition_point(|passage| passage.start_idx <= position).checked_sub(1)?;
        let passage = &self.passages[idx];
        let at = position - passage.start_idx;
        (at < passage.kv.num_tokens).then_some((passage.kv, at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blend::selection::{BlendRatio, FIRST_KEPT_LAYER, SelectionOrder};

    /// A passage that keeps a number.
    fn passage(num_tokens: usize, number: u32) -> PassageKv {
        PassageKv::new(num_tokens, 4, number)
    }

    fn prompt<'a>(tokens: &'a [u32], passages: &'a [BlendPassage<'a>]) -> BlendedPrompt<'a> {
        let (ratio, order) = (BlendRatio::ALL, SelectionOrder::Deviation);
        let selection = Selection { layer: FIRST_KEPT_LAYER, num_first_tokens: 0, ratio, order };
        BlendedPrompt { tokens, blocks: &[], passages, selection, wants_logits: false }
    }

    #[test]
    fn a_position_has_its_passage() {
        let (one, two) = (passage(2, 10), passage(1, 20));
        let passages = [BlendPassage { start_idx: 1, kv: &one }, BlendPassage { start_idx: 3, kv: &two }];
        let prompt = prompt(&[0; 5], &passages);
        assert_eq!(prompt.ranges(), [1..3, 3..4]);
        let kept = |position| prompt.kept(position).map(|(kv, at)| (*kv.numbers::<u32>(), at));
        assert_eq!(
            (0..5).map(kept).collect::<Vec<_>>(),
            [None, Some((10, 0)), Some((10, 1)), Some((20, 0)), None]
        );
    }

    #[test]
    #[should_panic(expected = "a passage of another executor, expected u64")]
    fn a_passage_of_another_executor_is_a_fault_of_the_caller() {
        passage(1, 0).numbers::<u64>();
    }

    #[test]
    #[should_panic(expected = "passages overlap: [1..3, 2..3]")]
    fn overlapping_passages_are_a_fault_of_the_caller() {
        let (one, two) = (passage(2, 0), passage(1, 0));
        prompt(&[0; 5], &[BlendPassage { start_idx: 1, kv: &one }, BlendPassage { start_idx: 2, kv: &two }])
            .ranges();
    }

    #[test]
    #[should_panic(expected = "a passage ends at 6 in a prompt of 5")]
    fn a_passage_beyond_the_prompt_is_a_fault_of_the_caller() {
        prompt(&[0; 5], &[BlendPassage { start_idx: 4, kv: &passage(2, 0) }]).ranges();
    }
}
