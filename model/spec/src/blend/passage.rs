//! The KV of a passage, and a prompt that contains passages.

use std::ops::Range;

use baton_kv_cache::BlockId;

use super::selection::{SELECTING_LAYER, Selection};

/// The KV of a passage of text that was computed on its own, from layer [`SELECTING_LAYER`] on. Keys are kept without
/// rotation, as at position 0 but without the scaling of cosines and sines. So one rotation brings them to any position.
#[derive(Clone, Debug, PartialEq)]
pub struct PassageKv {
    num_tokens: usize,
    width: usize,
    /// `[layers][k|v][tokens][width]`
    numbers: Vec<f32>,
}

/// A passage in a prompt.
#[derive(Clone, Copy, Debug)]
pub struct BlendPassage<'a> {
    /// Position of its first token in the prompt.
    pub start_idx: usize,
    /// Its KV.
    pub kv: &'a PassageKv,
}

/// The beginning of a sequence, up to the end of its last passage. What follows is computed as ever.
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
}

impl PassageKv {
    /// Zeros for a passage of a model with `num_layers` layers and `width` numbers in the keys of a token.
    pub fn zeroed(num_tokens: usize, num_layers: usize, width: usize) -> PassageKv {
        let num_stored = num_layers.saturating_sub(SELECTING_LAYER);
        PassageKv { num_tokens, width, numbers: vec![0.0; num_stored * 2 * num_tokens * width] }
    }

    /// Tokens of the passage.
    pub fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    /// Bytes of the KV.
    pub fn size_bytes(&self) -> usize {
        size_of_val(&self.numbers[..])
    }

    /// The keys of a layer, `[tokens][width]`, and its values.
    ///
    /// # Panics
    /// When the passage has no such layer.
    pub fn layer(&self, layer_idx: usize) -> (&[f32], &[f32]) {
        self.numbers[self.range(layer_idx)].split_at(self.num_tokens * self.width)
    }

    /// As [`layer`](Self::layer), to be written.
    ///
    /// # Panics
    /// As [`layer`](Self::layer).
    pub fn layer_mut(&mut self, layer_idx: usize) -> (&mut [f32], &mut [f32]) {
        let range = self.range(layer_idx);
        self.numbers[range].split_at_mut(self.num_tokens * self.width)
    }

    fn range(&self, layer_idx: usize) -> Range<usize> {
        let size = 2 * self.num_tokens * self.width;
        let stored_idx = layer_idx.checked_sub(SELECTING_LAYER).expect("a passage has no earlier layers");
        stored_idx * size..(stored_idx + 1) * size
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

    /// The keys and the values that the passage at `position` has for it in a layer; `None` if no passage is there.
    ///
    /// # Panics
    /// When passages have no such layer.
    pub fn kept(&self, position: usize, layer_idx: usize) -> Option<(&[f32], &[f32])> {
        let idx = self.passages.partition_point(|passage| passage.start_idx <= position).checked_sub(1)?;
        let passage = &self.passages[idx];
        let at = position - passage.start_idx;
        (at < passage.kv.num_tokens).then(|| {
            let (keys, values) = passage.kv.layer(layer_idx);
            let row = at * passage.kv.width..(at + 1) * passage.kv.width;
            (&keys[row.clone()], &values[row])
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blend::selection::{BlendRatio, SelectionOrder};

    /// A passage whose keys are `first`, `first + 1`, ... and whose values are their negatives, in the last layer.
    fn passage(num_tokens: usize, first: f32) -> PassageKv {
        let mut kv = PassageKv::zeroed(num_tokens, 3, 2);
        let (keys, values) = kv.layer_mut(2);
        for (idx, (key, value)) in keys.iter_mut().zip(values).enumerate() {
            *key = first + idx as f32;
            *value = -*key;
        }
        kv
    }

    fn prompt<'a>(tokens: &'a [u32], passages: &'a [BlendPassage<'a>]) -> BlendedPrompt<'a> {
        let selection =
            Selection { num_first_tokens: 0, ratio: BlendRatio::ALL, order: SelectionOrder::Deviation };
        BlendedPrompt { tokens, blocks: &[], passages, selection }
    }

    #[test]
    fn a_token_of_a_passage_has_the_passages_numbers() {
        let (one, two) = (passage(2, 10.0), passage(1, 20.0));
        assert_eq!(
            one.size_bytes(),
            2 * 2 * 2 * 2 * 4,
            "layers 1 and 2, keys and values, two numbers of four bytes"
        );
        assert_eq!(one.layer(1), (&[0.0; 4][..], &[0.0; 4][..]));
        let passages = [BlendPassage { start_idx: 1, kv: &one }, BlendPassage { start_idx: 3, kv: &two }];
        let prompt = prompt(&[0; 5], &passages);
        assert_eq!(prompt.ranges(), [1..3, 3..4]);
        let keys: Vec<_> = (0..5).map(|position| prompt.kept(position, 2).map(|kept| kept.0)).collect();
        assert_eq!(keys, [None, Some(&[10.0, 11.0][..]), Some(&[12.0, 13.0]), Some(&[20.0, 21.0]), None]);
        assert_eq!(prompt.kept(2, 2).unwrap().1, [-12.0, -13.0]);
    }

    #[test]
    #[should_panic(expected = "passages overlap: [1..3, 2..3]")]
    fn overlapping_passages_are_a_fault_of_the_caller() {
        let (one, two) = (passage(2, 0.0), passage(1, 0.0));
        prompt(&[0; 5], &[BlendPassage { start_idx: 1, kv: &one }, BlendPassage { start_idx: 2, kv: &two }])
            .ranges();
    }

    #[test]
    #[should_panic(expected = "a passage ends at 6 in a prompt of 5")]
    fn a_passage_beyond_the_prompt_is_a_fault_of_the_caller() {
        prompt(&[0; 5], &[BlendPassage { start_idx: 4, kv: &passage(2, 0.0) }]).ranges();
    }
}
