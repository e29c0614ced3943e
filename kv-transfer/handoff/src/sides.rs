//! One sequence in the blocks of two sides with different block sizes: which blocks of P cover which blocks of D, and
//! which blocks of D are complete.
//!
//! ```text
//! P, 4 tokens | 0        | 1        | 2        | 3  .  .  |   num_tokens = 13
//! D, 6 tokens | 0              | 1              | 2 .  .  .  .  .  |
//! ```
//!
//! D's piece 1 (one layer of block 1) can be written when P's pieces 1 and 2 are final. The last block of either side
//! may be filled in part: it is final with the sequence's last token, however many of its tokens exist.

use std::{ops::Range, sync::Arc};

use baton_kv_layout::BlockId;

use crate::{
    piece::Source,
    pieces::{Insert, PieceSet},
};

/// What P knows of its own blocks, and what follows from that for D's.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Sides {
    num_tokens: usize,
    own_block_size: usize,
    peer_block_size: usize,
    /// Own pieces that are final.
    known: PieceSet,
    /// Own blocks, as far as they are known.
    table: Vec<Option<BlockId>>,
}

impl Sides {
    pub(crate) fn new(
        num_tokens: usize,
        own_block_size: usize,
        peer_block_size: usize,
        num_layers: usize,
    ) -> Sides {
        let num_blocks = num_tokens.div_ceil(own_block_size);
        Sides {
            num_tokens,
            own_block_size,
            peer_block_size,
            known: PieceSet::new(num_blocks, num_layers),
            table: vec![None; num_blocks],
        }
    }

    /// The same, of a sequence that ends with the last of the peer's blocks that `num_blocks` own ones cover.
    pub(crate) fn cut(&self, num_blocks: usize) -> Sides {
        let covered = self.num_tokens.min(num_blocks.saturating_mul(self.own_block_size));
        let num_tokens = covered - covered % self.peer_block_size;
        Sides::new(num_tokens, self.own_block_size, self.peer_block_size, self.known.num_layers())
    }

    pub(crate) fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    pub(crate) fn num_layers(&self) -> usize {
        self.known.num_layers()
    }

    pub(crate) fn num_peer_blocks(&self) -> usize {
        self.num_tokens.div_ceil(self.peer_block_size)
    }

    /// A layer of an own block is final. Returns the peer's blocks that can be written in this layer now and could not
    /// before; `None` when there is no such piece.
    pub(crate) fn complete(
        &mut self,
        block_idx: usize,
        layer_idx: usize,
        block: BlockId,
    ) -> Option<Range<usize>> {
        match self.known.insert(block_idx, layer_idx) {
            Insert::New => {}
            Insert::Present => return Some(0..0),
            Insert::OutOfRange => return None,
        }
        // What a prefill holds is not moved.
        debug_assert!(self.table[block_idx].is_none_or(|known| known == block));
        self.table[block_idx] = Some(block);
        let Range { start, end } = self.over(self.own_tokens(block_idx), self.peer_block_size);
        // Only the first and the last of them reach beyond this block.
        let is_complete =
            |peer_idx| self.under(peer_idx).all(|block_idx: usize| self.known.contains(block_idx, layer_idx));
        let start = if is_complete(start) { start } else { start + 1 };
        let end = if start >= end || is_complete(end - 1) { end } else { end - 1 };
        Some(start..end.max(start))
    }

    /// Where the KV of the peer's block is, once it is complete.
    pub(crate) fn source(&self, peer_idx: usize) -> Source {
        let block = |idx: usize| self.table[idx].expect("the blocks under a complete block are known");
        if self.own_block_size == self.peer_block_size {
            return Source::Block(block(peer_idx));
        }
        Source::Tokens {
            tokens: self.peer_tokens(peer_idx),
            blocks: self.under(peer_idx).map(block).collect::<Arc<[BlockId]>>(),
        }
    }

    /// Own blocks that hold tokens of the peer's block.
    fn under(&self, peer_idx: usize) -> Range<usize> {
        self.over(self.peer_tokens(peer_idx), self.own_block_size)
    }

    fn over(&self, tokens: Range<usize>, block_size: usize) -> Range<usize> {
        tokens.start / block_size..tokens.end.div_ceil(block_size)
    }

    fn own_tokens(&self, block_idx: usize) -> Range<usize> {
        self.tokens(block_idx, self.own_block_size)
    }

    fn peer_tokens(&self, peer_idx: usize) -> Range<usize> {
        self.tokens(peer_idx, self.peer_block_size)
    }

    fn tokens(&self, block_idx: usize, block_size: usize) -> Range<usize> {
        let first = block_idx * block_size;
        first..first.saturating_add(block_size).min(self.num_tokens)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn sides(num_tokens: usize, own: usize, peer: usize) -> Sides {
        Sides::new(num_tokens, own, peer, 1)
    }

    #[test]
    fn a_block_can_be_written_when_all_blocks_under_it_are_final() {
        let mut sides = sides(13, 4, 6);
        assert_eq!(sides.num_peer_blocks(), 3);
        let block = |idx: u32| BlockId(10 + idx);
        assert_eq!(sides.complete(1, 0, block(1)), Some(1..1));
        assert_eq!(sides.complete(1, 0, block(1)), Some(0..0), "again");
        assert_eq!(sides.complete(0, 0, block(0)), Some(0..1));
        assert_eq!(sides.complete(3, 0, block(3)), Some(2..3));
        assert_eq!(sides.complete(2, 0, block(2)), Some(1..2));
        assert_eq!(sides.complete(4, 0, block(4)), None);
        assert_eq!(sides.complete(0, 1, block(0)), None);
        let tokens = |tokens, blocks: &[u32]| Source::Tokens {
            tokens,
            blocks: blocks.iter().map(|&idx| block(idx)).collect(),
        };
        assert_eq!(sides.source(0), tokens(0..6, &[0, 1]));
        assert_eq!(sides.source(1), tokens(6..12, &[1, 2]));
        assert_eq!(sides.source(2), tokens(12..13, &[3]));
    }

    #[test]
    fn a_sequence_is_cut_where_a_block_of_the_peer_ends() {
        for (num_tokens, own, peer, num_blocks, cut) in [
            (12, 4, 4, 2, 8),
            (12, 4, 6, 1, 0),
            (12, 4, 6, 2, 6),
            (12, 4, 6, 9, 12),
            (12, 24, 4, 1, 12),
            (13, 4, 6, 3, 12),
            (12, 4, 4, 0, 0),
        ] {
            assert_eq!(sides(num_tokens, own, peer).cut(num_blocks).num_tokens(), cut);
        }
    }

    #[test]
    fn blocks_of_one_size_are_their_own_sources() {
        let mut sides = sides(13, 4, 4);
        assert_eq!(sides.complete(3, 0, BlockId(7)), Some(3..4));
        assert_eq!(sides.source(3), Source::Block(BlockId(7)));
    }

    #[test]
    fn each_block_becomes_writable_once_and_not_too_early_in_any_order() {
        let mut state = 1u64;
        let mut below = |end: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as usize % end
        };
        for own in 1..9 {
            for peer in 1..9 {
                for num_tokens in [1, 7, 8, 9, 24, 31] {
                    let mut sides = sides(num_tokens, own, peer);
                    let mut order: Vec<usize> = (0..num_tokens.div_ceil(own)).collect();
                    for idx in (1..order.len()).rev() {
                        order.swap(idx, below(idx + 1));
                    }
                    let (mut final_tokens, mut written) = (HashSet::new(), HashSet::new());
                    for idx in order {
                        final_tokens.extend(sides.own_tokens(idx));
                        for peer_idx in sides.complete(idx, 0, BlockId(idx as u32)).unwrap() {
                            let tokens = sides.peer_tokens(peer_idx);
                            assert!(tokens.clone().all(|token| final_tokens.contains(&token)));
                            assert!(written.insert(peer_idx), "twice: {own} {peer} {num_tokens}");
                            if let Source::Tokens { blocks, .. } = sides.source(peer_idx) {
                                let (first, last) = (tokens.start / own, (tokens.end - 1) / own);
                                let expected = (first as u32..=last as u32).map(BlockId);
                                assert!(blocks.iter().copied().eq(expected));
                            }
                        }
                    }
                    assert_eq!(written.len(), sides.num_peer_blocks(), "{own} {peer} {num_tokens}");
                }
            }
        }
    }
}
