//! A set of pieces of one sequence.

/// One bit for each of `num_blocks` x `num_layers` pieces.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct PieceSet {
    bits: Vec<u64>,
    num_blocks: usize,
    num_layers: usize,
    len: usize,
}

/// The result of [`PieceSet::insert`].
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Insert {
    New,
    Present,
    OutOfRange,
}

impl PieceSet {
    pub(crate) fn new(num_blocks: usize, num_layers: usize) -> PieceSet {
        PieceSet { bits: vec![0; (num_blocks * num_layers).div_ceil(64)], num_blocks, num_layers, len: 0 }
    }

    pub(crate) fn insert(&mut self, block_idx: usize, layer_idx: usize) -> Insert {
        if block_idx >= self.num_blocks || layer_idx >= self.num_layers {
            return Insert::OutOfRange;
        }
        let idx = block_idx * self.num_layers + layer_idx;
        let bit = 1 << (idx % 64);
        if self.bits[idx / 64] & bit != 0 {
            return Insert::Present;
        }
        self.bits[idx / 64] |= bit;
        self.len += 1;
        Insert::New
    }

    pub(crate) fn contains(&self, block_idx: usize, layer_idx: usize) -> bool {
        let idx = block_idx * self.num_layers + layer_idx;
        debug_assert!(block_idx < self.num_blocks && layer_idx < self.num_layers);
        self.bits[idx / 64] & 1 << (idx % 64) != 0
    }

    pub(crate) fn num_layers(&self) -> usize {
        self.num_layers
    }

    pub(crate) fn num_missing(&self) -> usize {
        self.num_blocks * self.num_layers - self.len
    }

    pub(crate) fn is_full(&self) -> bool {
        self.num_missing() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_is_new_only_once() {
        let mut set = PieceSet::new(3, 70);
        for block_idx in 0..3 {
            for layer_idx in 0..70 {
                assert!(!set.is_full() && !set.contains(block_idx, layer_idx));
                assert_eq!(set.insert(block_idx, layer_idx), Insert::New);
                assert_eq!(set.insert(block_idx, layer_idx), Insert::Present);
                assert!(set.contains(block_idx, layer_idx));
            }
        }
        assert!(set.is_full());
        assert_eq!(set.insert(3, 0), Insert::OutOfRange);
        assert_eq!(set.insert(0, 70), Insert::OutOfRange);
        assert!(PieceSet::new(0, 5).is_full());
    }
}
