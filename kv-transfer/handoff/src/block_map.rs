//! Maps the blocks of one sequence between two sides with different block sizes: which blocks of P hold the tokens of a block
//! of D, and which pieces of D are complete.
//!
//! ```text
//! P, 4 tokens | 0        | 1        | 2        | 3  .  .  |   num_tokens = 13
//! D, 6 tokens | 0              | 1              | 2 .  .  .  .  .  |
//! ```
//!
//! A layer of D's block 1 can be written when that layer of P's blocks 1 and 2 is final. The last block of either side may be
//! partly filled. It is final with the last token of the sequence.

use std::{ops::Range, sync::Arc};

use baton_kv_layout::BlockId;

use crate::{
    piece::Source,
    piece_set::{Insert, PieceSet},
};

/// P's record of its own blocks, and which pieces of D's blocks they complete.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct BlockMap {
    num_tokens: usize,
    own_block_size: usize,
    peer_block_size: usize,
    /// Own pieces that are final.
    ready: PieceSet,
    /// Own blocks; `None`: not known yet.
    block_table: Vec<Option<BlockId>>,
}

impl BlockMap {
    pub(crate) fn new(
        num_tokens: usize,
        own_block_size: usize,
        peer_block_size: usize,
        num_layers: usize,
    ) -> BlockMap {
        let num_blocks = num_tokens.div_ceil(own_block_size);
        BlockMap {
            num_tokens,
            own_block_size,
            peer_block_size,
            ready: PieceSet::new(num_blocks, num_layers),
            block_table: vec![None; num_blocks],
        }
    }

    /// An empty map of a shorter sequence: the full blocks of the peer whose tokens are in the first `num_blocks` own blocks.
    pub(crate) fn truncated(&self, num_blocks: usize) -> BlockMap {
        let covered = self.num_tokens.min(num_blocks.saturating_mul(self.own_block_size));
        let num_tokens = covered - covered % self.peer_block_size;
        BlockMap::new(num_tokens, self.own_block_size, self.peer_block_size, self.ready.num_layers())
    }

    pub(crate) fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    pub(crate) fn num_layers(&self) -> usize {
        self.ready.num_layers()
    }

    pub(crate) fn num_peer_blocks(&self) -> usize {
        self.num_tokens.div_ceil(self.peer_block_size)
    }

    /// Records that a layer of an own block is final. Returns the peer's blocks whose KV of this layer is complete now and was
    /// not before; `None` when there is no such block or layer.
    pub(crate) fn set_ready(
        &mut self,
        block_idx: usize,
        layer_idx: usize,
        block: BlockId,
    ) -> Option<Range<usize>> {
        match self.ready.insert(block_idx, layer_idx) {
            Insert::New => {}
            Insert::Present => return Some(0..0),
            Insert::OutOfRange => return None,
        }
        // The blocks of a prefill do not change while it runs.
        debug_assert!(self.block_table[block_idx].is_none_or(|known| known == block));
        self.block_table[block_idx] = Some(block);
        let Range { start, end } = blocks_of(self.own_tokens(block_idx), self.peer_block_size);
        // Only the first and the last of them have tokens outside of this block.
        let is_complete =
            |peer_idx| self.own_blocks(peer_idx).all(|block_idx| self.ready.contains(block_idx, layer_idx));
        let start = if is_complete(start) { start } else { start + 1 };
        let end = if start >= end || is_complete(end - 1) { end } else { end - 1 };
        Some(start..end.max(start))
    }

    /// Where the KV of a complete block of the peer is.
    pub(crate) fn source(&self, peer_idx: usize) -> Source {
        let block = |idx: usize| self.block_table[idx].expect("the own blocks of a complete block are known");
        if self.own_block_size == self.peer_block_size {
            return Source::Block(block(peer_idx));
        }
        Source::Tokens {
            tokens: self.peer_tokens(peer_idx),
            blocks: self.own_blocks(peer_idx).map(block).collect::<Arc<[BlockId]>>(),
        }
    }

    /// Own blocks that hold tokens of the peer's block.
    fn own_blocks(&self, peer_idx: usize) -> Range<usize> {
        blocks_of(self.peer_tokens(peer_idx), self.own_block_size)
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

/// The blocks that hold these tokens.
fn blocks_of(tokens: Range<usize>, block_size: usize) -> Range<usize> {
    tokens.start / block_size..tokens.end.div_ceil(block_size)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn map(num_tokens: usize, own: usize, peer: usize) -> BlockMap {
        BlockMap::new(num_tokens, own, peer, 1)
    }

    #[test]
    fn a_peer_block_is_complete_when_all_own_blocks_with_its_tokens_are_final() {
        let mut map = map(13, 4, 6);
        assert_eq!(map.num_peer_blocks(), 3);
        let block = |idx: u32| BlockId(10 + idx);
        assert_eq!(map.set_ready(1, 0, block(1)), Some(1..1));
        assert_eq!(map.set_ready(1, 0, block(1)), Some(0..0), "again");
        assert_eq!(map.set_ready(0, 0, block(0)), Some(0..1));
        assert_eq!(map.set_ready(3, 0, block(3)), Some(2..3));
        assert_eq!(map.set_ready(2, 0, block(2)), Some(1..2));
        assert_eq!(map.set_ready(4, 0, block(4)), None);
        assert_eq!(map.set_ready(0, 1, block(0)), None);
        let tokens = |tokens, blocks: &[u32]| Source::Tokens {
            tokens,
            blocks: blocks.iter().map(|&idx| block(idx)).collect(),
        };
        assert_eq!(map.source(0), tokens(0..6, &[0, 1]));
        assert_eq!(map.source(1), tokens(6..12, &[1, 2]));
        assert_eq!(map.source(2), tokens(12..13, &[3]));
    }

    #[test]
    fn a_sequence_is_truncated_at_the_end_of_a_peer_block() {
        for (num_tokens, own, peer, num_blocks, expected) in [
            (12, 4, 4, 2, 8),
            (12, 4, 6, 1, 0),
            (12, 4, 6, 2, 6),
            (12, 4, 6, 9, 12),
            (12, 24, 4, 1, 12),
            (13, 4, 6, 3, 12),
            (12, 4, 4, 0, 0),
        ] {
            assert_eq!(map(num_tokens, own, peer).truncated(num_blocks).num_tokens(), expected);
        }
    }

    #[test]
    fn a_block_of_the_same_size_is_read_as_a_whole() {
        let mut map = map(13, 4, 4);
        assert_eq!(map.set_ready(3, 0, BlockId(7)), Some(3..4));
        assert_eq!(map.source(3), Source::Block(BlockId(7)));
    }

    #[test]
    fn each_peer_block_completes_once_and_not_too_early_in_any_order() {
        let mut state = 1u64;
        let mut below = |end: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as usize % end
        };
        for own in 1..9 {
            for peer in 1..9 {
                for num_tokens in [1, 7, 8, 9, 24, 31] {
                    let mut map = map(num_tokens, own, peer);
                    let mut order: Vec<usize> = (0..num_tokens.div_ceil(own)).collect();
                    for idx in (1..order.len()).rev() {
                        order.swap(idx, below(idx + 1));
                    }
                    let (mut final_tokens, mut written) = (HashSet::new(), HashSet::new());
                    for idx in order {
                        final_tokens.extend(map.own_tokens(idx));
                        for peer_idx in map.set_ready(idx, 0, BlockId(idx as u32)).unwrap() {
                            let tokens = map.peer_tokens(peer_idx);
                            assert!(tokens.clone().all(|token| final_tokens.contains(&token)));
                            assert!(written.insert(peer_idx), "twice: {own} {peer} {num_tokens}");
                            if let Source::Tokens { blocks, .. } = map.source(peer_idx) {
                                let (first, last) = (tokens.start / own, (tokens.end - 1) / own);
                                let expected = (first as u32..=last as u32).map(BlockId);
                                assert!(blocks.iter().copied().eq(expected));
                            }
                        }
                    }
                    assert_eq!(written.len(), map.num_peer_blocks(), "{own} {peer} {num_tokens}");
                }
            }
        }
    }
}
