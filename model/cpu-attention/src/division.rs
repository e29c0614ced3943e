//! Divides a batch's attention into work items.
//!
//! An item is a tile of rows of one sequence and one KV head. If there are too few items for the threads, each span
//! of positions of an item becomes a part that a thread can take. The result does not depend on the division.

use std::ops::Range;

use super::shape::{AttentionShape, ITEMS_PER_THREAD, MIN_QUERIES, SPAN};
use baton_model_spec::BatchSequence;

/// The division of one batch.
#[derive(Clone, Copy)]
pub(super) struct Division<'a> {
    sequences: &'a [BatchSequence<'a>],
    num_kv_heads: usize,
    window: usize,
    /// The largest number of rows of an item.
    pub(super) tile_rows: usize,
    /// Whether an item's spans are separate parts.
    pub(super) by_spans: bool,
}

/// Some rows of a sequence, and one KV head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Item {
    pub(super) sequence_idx: usize,
    /// Row indices in the sequence.
    pub(super) rows: Range<usize>,
    pub(super) kv_head: usize,
    /// Spans that any of the rows sees.
    pub(super) spans: Range<usize>,
    /// The number of parts of all earlier items.
    pub(super) first_part: usize,
}

impl<'a> Division<'a> {
    /// The division into items of about `queries` queries.
    pub(super) fn new(
        shape: &AttentionShape,
        sequences: &'a [BatchSequence<'a>],
        num_threads: usize,
        queries: usize,
    ) -> Division<'a> {
        let most_rows = sequences.iter().map(|sequence| sequence.tokens.len()).max().unwrap_or(1);
        let mut division = Division {
            sequences,
            num_kv_heads: shape.num_kv_heads,
            window: shape.window.unwrap_or(usize::MAX),
            tile_rows: (queries / shape.group()).clamp(1, most_rows),
            by_spans: false,
        };
        let wanted = if num_threads > 1 { ITEMS_PER_THREAD * num_threads } else { 1 };
        let min_rows = MIN_QUERIES.div_ceil(shape.group());
        while division.num_items() < wanted && division.tile_rows > min_rows {
            division.tile_rows = (division.tile_rows / 2).max(min_rows);
        }
        division.by_spans = division.num_items() < wanted;
        division
    }

    pub(super) fn num_items(&self) -> usize {
        self.sequences.iter().map(|sequence| self.items_of(sequence)).sum()
    }

    /// The number of parts: all items' spans if spans are separate, else one per item.
    pub(super) fn num_parts(&self) -> usize {
        self.sequences.iter().map(|sequence| self.items_of(sequence) * self.parts_of(sequence)).sum()
    }

    /// Item `item_idx`, below [`num_items`](Self::num_items).
    pub(super) fn item(&self, mut item_idx: usize) -> Item {
        let mut first_part = 0;
        for (sequence_idx, sequence) in self.sequences.iter().enumerate() {
            let (num_items, num_parts) = (self.items_of(sequence), self.parts_of(sequence));
            if item_idx < num_items {
                let first_row = item_idx / self.num_kv_heads * self.tile_rows;
                return Item {
                    sequence_idx,
                    rows: first_row..sequence.tokens.len().min(first_row + self.tile_rows),
                    kv_head: item_idx % self.num_kv_heads,
                    spans: self.spans_of(sequence),
                    first_part: first_part + item_idx * num_parts,
                };
            }
            item_idx -= num_items;
            first_part += num_items * num_parts;
        }
        unreachable!("items are counted from the same sequences")
    }

    /// The item of part `part_idx`, which is below [`num_parts`](Self::num_parts), and the part's spans.
    pub(super) fn part(&self, mut part_idx: usize) -> (Item, Range<usize>) {
        if !self.by_spans {
            let item = self.item(part_idx);
            let spans = item.spans.clone();
            return (item, spans);
        }
        let mut first_item = 0;
        for sequence in self.sequences {
            let (num_items, num_spans) = (self.items_of(sequence), self.spans_of(sequence).len());
            if part_idx < num_items * num_spans {
                let item = self.item(first_item + part_idx / num_spans);
                let span_idx = item.spans.start + part_idx % num_spans;
                return (item, span_idx..span_idx + 1);
            }
            first_item += num_items;
            part_idx -= num_items * num_spans;
        }
        unreachable!("parts are counted from the same sequences")
    }

    fn items_of(&self, sequence: &BatchSequence<'_>) -> usize {
        let num_rows = sequence.tokens.len();
        // Avoids a division in the most frequent case.
        let num_tiles = if num_rows <= self.tile_rows { 1 } else { num_rows.div_ceil(self.tile_rows) };
        num_tiles * self.num_kv_heads
    }

    fn parts_of(&self, sequence: &BatchSequence<'_>) -> usize {
        if self.by_spans { self.spans_of(sequence).len() } else { 1 }
    }

    fn spans_of(&self, sequence: &BatchSequence<'_>) -> Range<usize> {
        let first_seen = (sequence.start_idx + 1).saturating_sub(self.window);
        // Invariant 8: spans start at multiples of `SPAN`, whatever the chunk.
        first_seen / SPAN..(sequence.start_idx + sequence.tokens.len()).div_ceil(SPAN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(num_heads: usize, num_kv_heads: usize, window: Option<usize>) -> AttentionShape {
        AttentionShape {
            num_heads,
            num_kv_heads,
            first_kv_head: 0,
            head_dim: 64,
            scale: 1.0,
            soft_cap: None,
            window,
            bf16_pairs: false,
        }
    }

    /// Checks that the division has every row, head and visible span once.
    fn check(shape: &AttentionShape, lens: &[(usize, usize)], num_threads: usize) -> (usize, usize) {
        let tokens = vec![0; 5000];
        let sequences: Vec<BatchSequence<'_>> = lens
            .iter()
            .map(|&(start_idx, num_rows)| BatchSequence {
                tokens: &tokens[..num_rows],
                start_idx,
                blocks: &[],
                num_logits: 0,
            })
            .collect();
        let division = Division::new(shape, &sequences, num_threads, 256);
        let mut seen = std::collections::BTreeSet::new();
        for part_idx in 0..division.num_parts() {
            let (item, spans) = division.part(part_idx);
            assert!(!spans.is_empty() && spans.start >= item.spans.start && spans.end <= item.spans.end);
            for span_idx in spans {
                if division.by_spans {
                    assert_eq!(item.first_part + span_idx - item.spans.start, part_idx);
                }
                for row in item.rows.clone() {
                    assert!(seen.insert((item.sequence_idx, row, item.kv_head, span_idx)), "{item:?} twice");
                }
            }
        }
        for (sequence_idx, &(start, num_rows)) in lens.iter().enumerate() {
            for row in 0..num_rows {
                let first = (start + row + 1).saturating_sub(shape.window.unwrap_or(usize::MAX));
                for position in [first, start + row] {
                    for kv_head in 0..shape.num_kv_heads {
                        let place = (sequence_idx, row, kv_head, position / SPAN);
                        assert!(seen.contains(&place), "{place:?} is missing");
                    }
                }
            }
        }
        (division.num_items(), division.num_parts())
    }

    #[test]
    fn items_cover_everything_once_and_suffice_for_the_threads() {
        let llama = shape(32, 8, None);
        assert_eq!(check(&llama, &[(0, 512)], 2), (8 * 8, 8 * 8), "a chunk of a prompt");
        assert_eq!(check(&llama, &[(2000, 1)], 1), (8, 8), "one thread needs no parts");
        assert_eq!(check(&llama, &[(2047, 1)], 16), (8, 8 * 4), "a long context is shared by spans");
        assert_eq!(check(&llama, &[(2047, 1), (9, 1), (700, 3)], 16), (24, 8 * (4 + 1 + 2)));
        assert_eq!(check(&shape(8, 2, Some(100)), &[(5150, 1)], 4), (2, 2 * 2), "only spans in the window");
        let (items, _) = check(&shape(4, 2, None), &[(0, 300)], 4);
        assert!(items >= 16, "{items} items: rows are divided further");
        check(&shape(3, 1, Some(70)), &[(0, 1), (512, 40), (1000, 1100)], 3);
    }
}
