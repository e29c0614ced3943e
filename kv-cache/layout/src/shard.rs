//! The part of one tensor-parallel rank: which of the model's kv heads it has, and their arrangement.
//!
//! The heads are divided in order. With more ranks than heads (grouped-query attention), neighbouring ranks hold
//! replicas of one head:
//!
//! ```text
//! 8 heads, 4 ranks   | 0 1 | 2 3 | 4 5 | 6 7 |
//! 2 heads, 4 ranks   |  0  |  0  |  1  |  1  |
//! ```
//!
//! It does not know how KV moves from one shard to another (that is [`KvMapping`](crate::KvMapping)).

use std::ops::Range;

use crate::{KvFormat, KvLayout};

/// The kv heads that one rank has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadShard {
    num_kv_heads: usize,
    num_ranks: usize,
    rank: usize,
}

/// The part of a model's KV that one rank holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShard {
    layout: KvLayout,
    heads: HeadShard,
}

/// Why a shard is invalid, or why KV cannot move between two shards.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShardError {
    /// A size is zero.
    #[error("kv with a {0} of 0")]
    Zero(&'static str),
    /// Neither number is a multiple of the other.
    #[error("{num_kv_heads} kv heads cannot be divided among {num_ranks} ranks")]
    Indivisible {
        /// Heads of the whole model.
        num_kv_heads: usize,
        /// The tensor-parallel degree.
        num_ranks: usize,
    },
    /// The rank is too large: ranks count from 0.
    #[error("no rank {rank} of {num_ranks}")]
    NoSuchRank {
        /// The requested rank.
        rank: usize,
        /// The tensor-parallel degree.
        num_ranks: usize,
    },
    /// A block exceeds the address space.
    #[error("a block of kv is too large to be addressed")]
    TooLarge,
    /// The two sides hold KV of different models.
    #[error("{what} {from} against {to}")]
    OtherModel {
        /// The size that differs.
        what: &'static str,
        /// The source's.
        from: usize,
        /// The destination's.
        to: usize,
    },
}

impl HeadShard {
    /// The heads of `rank` among `num_ranks` ranks, out of `num_kv_heads`.
    ///
    /// # Errors
    /// When they cannot be divided so. The numbers may come from a peer.
    pub fn new(num_kv_heads: usize, num_ranks: usize, rank: usize) -> Result<HeadShard, ShardError> {
        let sizes = [("number of kv heads", num_kv_heads), ("number of ranks", num_ranks)];
        if let Some((what, _)) = sizes.into_iter().find(|(_, size)| *size == 0) {
            return Err(ShardError::Zero(what));
        }
        if !num_kv_heads.is_multiple_of(num_ranks) && !num_ranks.is_multiple_of(num_kv_heads) {
            return Err(ShardError::Indivisible { num_kv_heads, num_ranks });
        }
        if rank >= num_ranks {
            return Err(ShardError::NoSuchRank { rank, num_ranks });
        }
        Ok(HeadShard { num_kv_heads, num_ranks, rank })
    }

    /// The rank's heads, counted in the whole model.
    pub fn heads(&self) -> Range<usize> {
        let num_heads = (self.num_kv_heads / self.num_ranks).max(1);
        let first = match self.num_replicas() {
            1 => self.rank * num_heads,
            num_replicas => self.rank / num_replicas,
        };
        first..first + num_heads
    }

    /// Ranks that have the same heads as this one, itself included.
    pub fn num_replicas(&self) -> usize {
        (self.num_ranks / self.num_kv_heads).max(1)
    }

    /// Index of this rank among its replicas.
    pub fn replica_idx(&self) -> usize {
        self.rank % self.num_replicas()
    }
}

impl KvShard {
    /// The part of `rank` among `num_ranks` ranks of KV whose undivided arrangement is `whole`.
    ///
    /// # Errors
    /// When no such part exists. The numbers may come from a peer.
    pub fn new(whole: &KvLayout, num_ranks: usize, rank: usize) -> Result<KvShard, ShardError> {
        let sizes = [
            ("block size", whole.block_size),
            ("number of layers", whole.num_layers),
            ("head dim", whole.head_dim),
        ];
        if let Some((what, _)) = sizes.into_iter().find(|(_, size)| *size == 0) {
            return Err(ShardError::Zero(what));
        }
        let heads = HeadShard::new(whole.num_kv_heads, num_ranks, rank)?;
        if !is_addressable(whole) {
            return Err(ShardError::TooLarge);
        }
        let layout = KvLayout { num_kv_heads: heads.heads().len(), ..*whole };
        Ok(KvShard { layout, heads })
    }

    /// The part of `rank` of a worker with this format.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of_format(format: &KvFormat, rank: usize) -> Result<KvShard, ShardError> {
        let &KvFormat { dtype, block_size, num_layers, num_kv_heads, head_dim, tensor_parallel, .. } = format;
        KvShard::new(
            &KvLayout { block_size, num_layers, num_kv_heads, head_dim, dtype },
            tensor_parallel,
            rank,
        )
    }

    /// The bytes of its heads of K, and of V: in a piece of `whole`, and in its own piece.
    pub fn halves(&self, whole: &KvLayout) -> [(Range<usize>, Range<usize>); 2] {
        let (own, first) = (self.layout(), whole.head_offset(self.heads().start));
        [0, 1].map(|half| {
            let start = half * whole.half_bytes() + first;
            let own_start = half * own.half_bytes();
            (start..start + own.half_bytes(), own_start..own_start + own.half_bytes())
        })
    }

    /// How the rank's blocks are arranged.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Heads of the whole model.
    pub fn num_kv_heads(&self) -> usize {
        self.heads.num_kv_heads
    }

    /// The rank's heads, counted in the whole model.
    pub fn heads(&self) -> Range<usize> {
        self.heads.heads()
    }

    /// Ranks that hold the same heads as this one, itself included.
    pub fn num_replicas(&self) -> usize {
        self.heads.num_replicas()
    }

    /// Index of this rank among its replicas.
    pub fn replica_idx(&self) -> usize {
        self.heads.replica_idx()
    }
}

fn is_addressable(layout: &KvLayout) -> bool {
    let elements = layout.head_dim.checked_mul(layout.dtype.size_bytes());
    let vector_bytes = elements.and_then(|bytes| bytes.checked_add(layout.dtype.scale_bytes()));
    let block_bytes = [layout.block_size, layout.num_kv_heads, layout.num_layers, 2]
        .into_iter()
        .try_fold(vector_bytes.unwrap_or(usize::MAX), usize::checked_mul);
    block_bytes.is_some_and(|bytes| bytes <= isize::MAX as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::KvDtype;

    const WHOLE: KvLayout =
        KvLayout { block_size: 16, num_layers: 2, num_kv_heads: 6, head_dim: 8, dtype: KvDtype::Bf16 };

    #[test]
    fn heads_are_divided_in_order_and_replicated_for_more_ranks() {
        for (num_kv_heads, num_ranks, expected) in [
            (6, 2, vec![0..3, 3..6]),
            (6, 3, vec![0..2, 2..4, 4..6]),
            (2, 2, vec![0..1, 1..2]),
            (2, 6, vec![0..1, 0..1, 0..1, 1..2, 1..2, 1..2]),
        ] {
            let whole = KvLayout { num_kv_heads, ..WHOLE };
            let shards = (0..num_ranks).map(|rank| KvShard::new(&whole, num_ranks, rank).unwrap());
            assert_eq!(shards.clone().map(|shard| shard.heads()).collect::<Vec<_>>(), expected);
            for (rank, shard) in shards.enumerate() {
                assert_eq!(shard.layout().num_kv_heads, shard.heads().len());
                let replicas = expected.iter().filter(|heads| **heads == shard.heads()).count();
                let before = expected[..rank].iter().filter(|heads| **heads == shard.heads()).count();
                assert_eq!((shard.num_replicas(), shard.replica_idx()), (replicas, before));
            }
        }
    }

    #[test]
    fn what_cannot_be_is_refused_in_words() {
        let check = |whole: KvLayout, num_ranks, rank, message: &str| {
            assert_eq!(KvShard::new(&whole, num_ranks, rank).unwrap_err().to_string(), message);
        };
        check(KvLayout { block_size: 0, ..WHOLE }, 1, 0, "kv with a block size of 0");
        check(KvLayout { num_kv_heads: 0, ..WHOLE }, 1, 0, "kv with a number of kv heads of 0");
        check(WHOLE, 0, 0, "kv with a number of ranks of 0");
        check(WHOLE, 4, 0, "6 kv heads cannot be divided among 4 ranks");
        check(WHOLE, 9, 0, "6 kv heads cannot be divided among 9 ranks");
        check(WHOLE, 3, 3, "no rank 3 of 3");
        for huge in [usize::MAX, usize::MAX / 2, 1 << 55] {
            check(KvLayout { block_size: huge, ..WHOLE }, 1, 0, "a block of kv is too large to be addressed");
            check(KvLayout { head_dim: huge, ..WHOLE }, 1, 0, "a block of kv is too large to be addressed");
        }
    }

    #[test]
    fn a_format_gives_the_shards_of_its_ranks() {
        let format = KvFormat { tensor_parallel: 3, ..KvFormat::new("r1".into(), &WHOLE, "theta".into()) };
        assert_eq!(KvShard::of_format(&format, 2), KvShard::new(&WHOLE, 3, 2));
    }
}
